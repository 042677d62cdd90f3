"""`BatchInfo`: what a batch says about itself, beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.types import IntArray, LoaderState

__all__ = ["INFO_KEY", "BatchInfo", "SampleIds", "model_inputs"]

INFO_KEY: Final = "megascale"
"""Where a batch keeps its `BatchInfo`."""

SampleIds = list[list[tuple[str, int, int, int, int, int]]]


class BatchInfo:
    """Where a microbatch stands in its stream, what it weighs, and which samples are in it.

    A plain class with host values and without `to`, `__len__`, `__iter__` and `pin_memory`: Lightning and Accelerate
    hand such an object through as it is, where they would take a dataclass apart.
    """

    def __init__(
        self,
        *,
        step: int,
        microbatch: int,
        num_loss_tokens: int,
        step_loss_tokens: int,
        num_groups: int,
        num_microbatches: int,
        row_weights: npt.NDArray[np.float32],
        is_last_in_step: bool,
        is_last_in_stream: bool,
        pieces: IntArray,
        row_offsets: npt.NDArray[np.int64],
        source_names: Sequence[str],
        before: LoaderState,
        after: LoaderState,
        is_last_in_pass: bool = False,
        num_context_ranks: int = 1,
        rank_loss_tokens: int | None = None,
    ) -> None:
        """Make it; the arrays are kept, not copied.

        Args:
            step: Optimizer step, from 0.
            microbatch: Microbatch of the step on this rank, from 0.
            num_loss_tokens: Targets in this microbatch, over all ranks that share it: its labels other than -100.
            step_loss_tokens: Targets in the whole step, over all ranks.
            num_groups: Data-parallel groups of the stream.
            num_microbatches: Microbatches of a step on each rank.
            row_weights: float32 [rows]: 1, or 0 for a filler row.
            is_last_in_step: An optimizer step follows this microbatch.
            is_last_in_stream: Nothing follows this microbatch.
            is_last_in_pass: Every source with a weight was given once; what follows belongs to the next pass.
            pieces: PIECE [n], row after row.
            row_offsets: int64 [rows + 1] into `pieces`.
            source_names: By the index in `pieces`.
            before: Where the stream stands before the step.
            after: Where the stream stands after the step.
            num_context_ranks: Context-parallel ranks that share each row.
            rank_loss_tokens: Those of the targets that are in this rank's slice of the rows; None: all of them.
        """
        self.step = step
        self.microbatch = microbatch
        self.num_loss_tokens = num_loss_tokens
        self.step_loss_tokens = step_loss_tokens
        self.rank_loss_tokens = num_loss_tokens if rank_loss_tokens is None else rank_loss_tokens
        self.num_groups = num_groups
        self.num_context_ranks = num_context_ranks
        self.num_microbatches = num_microbatches
        self.row_weights = row_weights
        self.is_last_in_step = is_last_in_step
        self.is_last_in_stream = is_last_in_stream
        self.is_last_in_pass = is_last_in_pass
        self._pieces = pieces
        self._row_offsets = row_offsets
        self._source_names = tuple(source_names)
        self._before = before
        self._after = after

    @property
    def lengths(self) -> IntArray:
        """Tokens of the documents, int [n], row after row."""
        return self._pieces["length"]

    def sample_ids(self) -> SampleIds:
        """Give per row the list of `(source, epoch, unit, row, start, stop)`; stop is -1 for a whole sample."""
        columns = [self._pieces[name].tolist() for name in ("source", "epoch", "unit", "row", "start", "stop")]
        ids = [(self._source_names[source], *rest) for source, *rest in zip(*columns, strict=True)]
        bounds = self._row_offsets.tolist()
        return [ids[start:stop] for start, stop in pairwise(bounds)]

    def __repr__(self) -> str:
        """Name the step and the microbatch."""
        return (
            f"BatchInfo(step={self.step}, microbatch={self.microbatch}, pieces={len(self._pieces)}, "
            f"num_loss_tokens={self.num_loss_tokens}, step_loss_tokens={self.step_loss_tokens})"
        )


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Give the batch without its `BatchInfo`, for `model(**model_inputs(batch))`."""
    return {name: value for name, value in batch.items() if name != INFO_KEY}
