"""From records to the entries of a part: what is overlong is settled, loss tokens are counted, samples are permuted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import DataError
from megascale_lightning.loading.reasons import EMPTY, KEPT, OVERLONG, TRUNCATED
from megascale_lightning.sources.choices import Overlong
from megascale_lightning.types import IGNORED_LABEL, PIECE, IntArray

__all__ = ["apply_overlong", "count_loss_tokens", "cut_records", "permute_entries"]


def apply_overlong(
    lengths: npt.NDArray[np.int64],
    codes: npt.NDArray[np.uint8],
    capacity: int,
    policy: Overlong,
    where: Callable[[int], str],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Lengths and codes with the policies for empty and overlong samples applied.

    Args:
        lengths: int64 [n]
        codes: uint8 [n], of `reasons`.
        capacity: Tokens a row holds.
        policy: "split" leaves lengths as they are.
        where: Record index -> its place, for the message of policy "error".

    Raises:
        DataError: A sample is overlong under the policy "error".
    """
    good = codes == KEPT
    codes = np.where(good & (lengths == 0), EMPTY, codes).astype(np.uint8)
    over = good & (lengths > capacity)
    if policy == "split" or not over.any():
        return lengths, codes
    if policy == "error":
        record = int(np.flatnonzero(over)[0])
        raise DataError(
            f"{where(record)}: the sample has {lengths[record]} tokens and a row holds {capacity}; set "
            'overlong="split", "truncate" or "drop"'
        )
    if policy == "truncate":
        return np.minimum(lengths, capacity), np.where(over, TRUNCATED, codes).astype(np.uint8)
    return np.where(over, 0, lengths), np.where(over, OVERLONG, codes).astype(np.uint8)


def cut_records(
    lengths: npt.NDArray[np.int64], codes: npt.NDArray[np.uint8], capacity: int
) -> tuple[IntArray, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Entries in stored order: one per record, or per `capacity` tokens of a longer one.

    Returns:
        pieces: PIECE [entries] with start, stop and length set.
        records: int64 [entries], index of the record.
        first: bool [entries], begins a record.
    """
    counts = np.maximum(-(-lengths // capacity), 1)
    records = np.repeat(np.arange(len(lengths)), counts)
    begin = np.cumsum(counts) - counts
    index = np.arange(len(records)) - begin[records]
    pieces = np.zeros(len(records), PIECE)
    start = index * capacity
    length = np.minimum(lengths[records] - start, capacity)
    is_cut = (counts[records] > 1) | (codes[records] == TRUNCATED)
    pieces["start"] = start
    pieces["length"] = length
    pieces["stop"] = np.where(is_cut, start + length, -1)
    return pieces, records, index == 0


def count_loss_tokens(
    tokens: Mapping[str, npt.NDArray[Any]], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Targets of each piece: the tokens after its first that `loss_mask` and `labels`, if declared, let count.

    Args:
        tokens: Field -> values of one fragment.
        starts: int64 [n], ascending: first value of each piece.
        lengths: int64 [n]

    Returns:
        int64 [n]
    """
    flags = None
    if "loss_mask" in tokens:
        flags = tokens["loss_mask"] != 0
    if "labels" in tokens:
        counted = tokens["labels"] != IGNORED_LABEL
        flags = counted if flags is None else flags & counted
    found = np.maximum(lengths - 1, 0)
    targeted = lengths > 1
    if flags is None or not targeted.any():
        return found
    # reduceat over (start + 1, stop) pairs: every other sum is a piece's. One 0 more: a stop may be the end.
    bounds = np.empty(2 * int(targeted.sum()), np.int64)
    bounds[0::2] = starts[targeted] + 1
    bounds[1::2] = starts[targeted] + lengths[targeted]
    padded = np.zeros(len(flags) + 1, np.int8)
    padded[:-1] = flags
    found[targeted] = np.add.reduceat(padded, bounds, dtype=np.int64)[0::2]
    return found


def permute_entries(records: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Entries in the order of their records, those of one record side by side: int64 [entries], indices.

    Args:
        records: int64 [entries], ascending.
        order: int64 [num_records], a permutation.
    """
    if len(records) == len(order):
        return order
    counts = np.bincount(records, minlength=len(order))
    begin = np.cumsum(counts) - counts
    ordered = counts[order]
    shifts = np.repeat(begin[order] - (np.cumsum(ordered) - ordered), ordered)
    return shifts + np.arange(len(records))
