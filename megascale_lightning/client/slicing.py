"""What of a microbatch stands at a place: the slice of a context-parallel rank, the fields of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.places.tree import Place
from megascale_lightning.rows import ContextParallel
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import IntArray

__all__ = ["fields_of_stage", "slice_of", "width_multiple"]

_EVERYWHERE: Final = frozenset({"position_ids", "attention_mask", "loss_mask"})
"""Per-token fields that every stage of a pipeline has: what its attention, or a loss of its own, goes by."""


def width_multiple(context_parallel: ContextParallel, num_ranks: int) -> int:
    """What the width of a row has to be a multiple of, so that it can be cut; of a "full" one, by the trainer."""
    if num_ranks == 1:
        return 1
    return num_ranks if context_parallel == "contiguous" else 2 * num_ranks


def slice_of(bounds: IntArray, context_parallel: ContextParallel, rank: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """Where the tokens of one context-parallel rank stand.

    Args:
        bounds: int [n + 1], from 0: of what is cut, each by itself, into equal chunks.
        context_parallel: "head_tail": 2 x num_ranks chunks, of which rank r has r and 2 x num_ranks - 1 - r.
            "contiguous": num_ranks chunks, one each.
        rank: Coordinate of the rank on the axis cp.
        num_ranks: Size of that axis.

    Returns:
        int64 [bounds[-1] / num_ranks], ascending.
    """
    chunks = (rank, 2 * num_ranks - 1 - rank) if context_parallel == "head_tail" else (rank,)
    sizes = np.diff(bounds) // (num_ranks * len(chunks))
    starts = np.stack([bounds[:-1] + chunk * sizes for chunk in chunks], axis=1).ravel()
    sizes = np.repeat(sizes, len(chunks))
    before = np.cumsum(sizes) - sizes
    index: npt.NDArray[np.int64] = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
    return index


def fields_of_stage(names: Iterable[str], place: Place, spec: StreamSpec) -> list[str]:
    """Of the names of fields those that a stage of the pipeline has: the first inputs, the last labels.

    Bounds, positions and masks are on every stage; what the user declares beside them on the first and the last.
    """
    is_first, is_last = place.pp == 0, place.pp == spec.num_stages - 1
    has = {"input_ids": is_first, "labels": is_last}
    return [name for name in names if has.get(name, is_first or is_last) or name in _EVERYWHERE]
