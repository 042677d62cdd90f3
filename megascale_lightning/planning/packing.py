"""Which pieces of the pool go in which row: best fit, carried pieces first, then the longest."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megascale_lightning.planning.mixture import grouping
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["pack", "placed_as_one"]


def pack(
    carried: Sequence[int] | IntArray, drawn: Sequence[int] | IntArray, *, num_rows: int, capacity: int
) -> list[list[int]]:
    """Place pieces into exactly `num_rows` rows of `capacity` tokens.

    Carried pieces come first, in order, then the drawn ones, longest first (ties by draw order). Each goes into the
    fullest row that still holds it (ties by lowest row). What fits nowhere stays out.

    Args:
        carried: Lengths of the pieces that earlier steps left over, in tokens, each at most `capacity`.
        drawn: Lengths of the new pieces, in draw order.
        num_rows: Rows to fill.
        capacity: Tokens of a row.

    Returns:
        For each row the pieces in the order they were placed: indices into `carried + drawn`.
    """
    lengths = np.concatenate([carried, drawn]).astype(np.int64)
    longest_first = len(carried) + grouping(lengths.max(initial=0) - lengths[len(carried) :])
    order = np.concatenate([np.arange(len(carried)), longest_first])
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    # Rows that were begun, sorted by room x num_rows + row: the first key large enough is the fullest row that fits,
    # the lowest of those. Rows from `begun` on are empty, and thus the last choice; full ones are of no use.
    keys: list[int] = []
    begun = 0
    largest = empty = capacity * num_rows
    for piece, needed in zip(order.tolist(), (lengths[order] * num_rows).tolist(), strict=True):
        if needed > largest:
            continue
        at = bisect_left(keys, needed)
        if at < len(keys):
            key = keys.pop(at)
        elif begun < num_rows:
            key = empty + begun
            begun += 1
        else:
            largest = keys[-1] if keys else 0
            continue
        rows[key % num_rows].append(piece)
        key -= needed
        if key >= num_rows:
            insort(keys, key, 0, at)
    return rows


def placed_as_one(
    pack: Callable[[IntArray, FloatArray | None, int], list[list[int]]],
    lengths: IntArray,
    costs: FloatArray | None,
    joined: npt.NDArray[np.bool_],
    num_carried: int,
) -> list[list[int]]:
    """Place pieces some of which have to be in one row, as if each group of them were one piece.

    Args:
        pack: Of lengths, costs, and how many of these are carried, gives the rows.
        lengths: int [n], of the carried pieces, then of the drawn ones; of a group at most a row's capacity in all.
        costs: float64 [n], where rows are to cost alike.
        joined: bool [n]: has to be in the row of the piece before it.
        num_carried: Pieces of earlier steps.
    """
    starts = np.flatnonzero(~joined)
    totals = np.add.reduceat(lengths, starts, dtype=np.int64) if len(starts) else lengths
    sums = np.add.reduceat(costs, starts) if costs is not None and len(starts) else costs
    rows = pack(totals, sums, int((starts < num_carried).sum()))
    bounds = [*starts.tolist(), len(lengths)]
    return [[piece for group in row for piece in range(bounds[group], bounds[group + 1])] for row in rows]
