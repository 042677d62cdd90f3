"""Which pieces of the pool go in which row: best fit, carried pieces first, then the longest."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["pack"]


def pack(carried: Sequence[int], drawn: Sequence[int], *, num_rows: int, capacity: int) -> list[list[int]]:
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
    num_carried = len(carried)
    order = list(range(num_carried))
    order += sorted(range(num_carried, num_carried + len(drawn)), key=lambda piece: -drawn[piece - num_carried])
    lengths = [*carried, *drawn]
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    # room x num_rows + row, sorted: the first key large enough is the fullest row that fits, the lowest of those.
    keys = [capacity * num_rows + row for row in range(num_rows)]
    largest = capacity
    for piece in order:
        length = lengths[piece]
        if length > largest:
            continue
        at = bisect_left(keys, length * num_rows)
        if at == len(keys):
            continue
        key = keys.pop(at)
        rows[key % num_rows].append(piece)
        insort(keys, key - length * num_rows)
        largest = keys[-1] // num_rows
    return rows
