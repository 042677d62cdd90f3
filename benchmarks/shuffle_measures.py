"""How well the order of an epoch mixes its records: plain functions of the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["batch_share", "files_per_batch", "held_units", "measure_order", "neighbours", "rank_correlation", "spread"]

Order = npt.NDArray[np.int64]
"""int64 [n]: entry i is the stored index of the record that is given i-th; each index once."""


def rank_correlation(order: Order) -> float:
    """Spearman's correlation of position and stored index: 1 in stored order, near 0 where nothing of it is left."""
    return float(np.corrcoef(order, np.arange(len(order)))[0, 1])


def neighbours(order: Order, places: int) -> float:
    """Share of the pairs of records stored next to each other that are at most so many places apart in the order."""
    return float((np.abs(np.diff(inverse(order))) <= places).mean())


def batch_share(order: Order, batch: int) -> float:
    """Share of the pairs stored next to each other that are in the same batch."""
    batches = inverse(order) // batch
    return float((batches[1:] == batches[:-1]).mean())


def files_per_batch(order: Order, groups: npt.NDArray[np.int64], batch: int) -> float:
    """How many groups of records (files) a whole batch has records of, on average."""
    whole = len(order) // batch
    ordered = np.sort(groups[order[: whole * batch]].reshape(whole, batch), axis=1)
    return float((np.diff(ordered, axis=1) != 0).sum(axis=1).mean() + 1)


def spread(order: Order, groups: npt.NDArray[np.int64]) -> float:
    """How far the records of a group (a file, a unit) are spread over the epoch, on average over the groups.

    The standard deviation of their positions over that of all positions: 1 where they are everywhere, 0 where they
    stand together.
    """
    positions = inverse(order).astype(np.float64)
    sizes = np.bincount(groups)
    means = np.bincount(groups, positions) / sizes
    deviations = np.sqrt(np.bincount(groups, (positions - means[groups]) ** 2) / sizes)
    return float(deviations.mean() / positions.std())


def held_units(order: Order, groups: npt.NDArray[np.int64]) -> int:
    """How many groups are begun and not done with at once, at most: what has to be held, or read again."""
    positions = inverse(order)
    count = int(groups.max()) + 1
    first, last = np.full(count, len(order)), np.full(count, -1)
    np.minimum.at(first, groups, positions)
    np.maximum.at(last, groups, positions)
    change = np.zeros(len(order) + 1, np.int64)
    np.add.at(change, first, 1)
    np.subtract.at(change, last + 1, 1)
    return int(np.cumsum(change).max())


def inverse(order: Order) -> Order:
    """Stored index -> position."""
    positions = np.empty(len(order), np.int64)
    positions[order] = np.arange(len(order))
    return positions


def measure_order(order: Order, files: npt.NDArray[np.int64], batch: int) -> dict[str, Any]:
    """All of it.

    Args:
        order: See `Order`.
        files: int64 [n], file of each stored record.
        batch: Records of a batch.

    Raises:
        ValueError: The order is no permutation.
    """
    if not np.array_equal(np.sort(order), np.arange(len(files))):
        raise ValueError("a record is missing in the order, or there twice")
    return {
        "rank_correlation": rank_correlation(order),
        "neighbours_1": neighbours(order, 1),
        "neighbours_in_batch": batch_share(order, batch),
        "files_per_batch": files_per_batch(order, files, batch),
        "file_spread": spread(order, files),
    }
