"""Rows that cost much the same: which pieces of the pool go in which row when a cost is to be even."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import Final

import numpy as np

from megascale_lightning.planning.packing import pack
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["pack_evenly"]

_LATE: Final = 0.01
"""Share of the room that is left to the smallest new pieces: they fill what the others leave."""
_TRIES: Final = 4
_LEAST_FILL: Final = 0.99
_ROUNDING: Final = 1e-9


def pack_evenly(
    carried: Sequence[int] | IntArray,
    drawn: Sequence[int] | IntArray,
    costs: FloatArray,
    *,
    num_rows: int,
    capacity: int,
) -> list[list[int]]:
    """Place pieces into exactly `num_rows` rows of `capacity` tokens so that the rows cost much the same.

    Rows are full in the end, so what makes them uneven is what a piece costs above its tokens at the cheapest rate of
    all: its excess. `pack` says which pieces it would place. Of these, the largest by its share of their excess or of
    their tokens, whichever is more, goes into the row with the least excess so far that has room (ties: the emptiest,
    then the lowest), but for the smallest new ones; they and all the others then fill the rows by best fit, carried
    pieces first. A row that is one document costs what it costs: no packing can mend that.

    What `pack` places of the carried pieces is placed, and if it places all pieces, all are; they come first where they
    would be left out. If that does not help, or less than 99 % of its tokens are placed, the rows are those of `pack`.

    Args:
        carried: Lengths of the pieces that earlier steps left over, in tokens, each at most `capacity`.
        drawn: Lengths of the new pieces, in draw order.
        costs: float64 [carried + drawn], not negative.
        num_rows: Rows to fill.
        capacity: Tokens of a row.

    Returns:
        For each row the pieces in the order they were placed: indices into `carried + drawn`.
    """
    plain = pack(carried, drawn, num_rows=num_rows, capacity=capacity)
    sizes = np.concatenate([carried, drawn]).astype(np.int64)
    chosen = np.sort(np.fromiter(chain.from_iterable(plain), np.int64))
    if not len(chosen):
        return plain
    above = costs - (costs[chosen] / sizes[chosen]).min() * sizes
    above[above < _ROUNDING * costs] = 0.0  # of a cost that goes with the tokens nothing else is left
    lengths, excess, num_carried = sizes.tolist(), above.tolist(), len(carried)
    shares = above[chosen] / (above[chosen].sum() or 1.0), sizes[chosen] / sizes[chosen].sum()
    largest = chosen[np.argsort(-np.maximum(*shares), kind="stable")].tolist()
    late = set(_smallest(largest, lengths, num_carried, _LATE * num_rows * capacity))
    by_length = np.argsort(-sizes[num_carried:], kind="stable") + num_carried
    rest = [*range(num_carried), *by_length.tolist()]
    due = set((chosen if len(chosen) == len(sizes) else chosen[chosen < num_carried]).tolist())
    first: list[int] = []
    for _ in range(_TRIES):
        early = [piece for piece in largest if piece not in late and piece not in first]
        rows = _spread([*first, *early], lengths, excess, num_rows, capacity)
        _fill(rows, rest, lengths, capacity)
        placed = np.fromiter(chain.from_iterable(rows), np.int64)
        left = due.difference(placed.tolist())
        if not left:
            return rows if sizes[placed].sum() >= _LEAST_FILL * sizes[chosen].sum() else plain
        first = [*sorted(left), *(piece for piece in first if piece not in left)]
    return plain


def _smallest(largest: Sequence[int], lengths: Sequence[int], num_carried: int, tokens: float) -> Iterable[int]:
    """The new pieces from the end that hold so many tokens."""
    for piece in reversed(largest):
        if tokens <= 0:
            return
        if piece >= num_carried:
            tokens -= lengths[piece]
            yield piece


def _spread(
    pieces: Sequence[int], lengths: Sequence[int], excess: Sequence[float], num_rows: int, capacity: int
) -> list[list[int]]:
    """Each piece into the row with the least excess that has room; what fits nowhere is left out."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    open_rows = [(0.0, 0, row) for row in range(num_rows)]  # by excess, then by tokens
    waiting: list[tuple[int, float, int]] = []  # rows without room for the piece at hand, the emptiest first
    for piece in pieces:
        limit = capacity - lengths[piece]
        while waiting and waiting[0][0] <= limit:
            taken, load, row = heappop(waiting)
            heappush(open_rows, (load, taken, row))
        while open_rows and open_rows[0][1] > limit:
            load, taken, row = heappop(open_rows)
            heappush(waiting, (taken, load, row))
        if open_rows:
            load, taken, row = open_rows[0]
            rows[row].append(piece)
            heapreplace(open_rows, (load + excess[piece], taken + lengths[piece], row))
    return rows


def _fill(rows: list[list[int]], pieces: Sequence[int], lengths: Sequence[int], capacity: int) -> None:
    """Each piece that is in no row yet into the fullest row that holds it, in place."""
    placed = set(chain.from_iterable(rows))
    rooms = sorted((capacity - sum(lengths[piece] for piece in row), at) for at, row in enumerate(rows))
    for piece in pieces:
        if piece in placed:
            continue
        found = bisect_left(rooms, (lengths[piece], -1))
        if found < len(rooms):
            room, at = rooms.pop(found)
            rows[at].append(piece)
            insort(rooms, (room - lengths[piece], at))
