"""Equal work for every bin by largest differencing (Karmarkar-Karp), with equal counts restored.

Karmarkar and Karp 1982, "The differencing method of set partitioning"; many bins as in Michiels, Korst and Aarts 2003.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from megascale_lightning.planning.balancing import repair
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["assign_by_differencing", "difference"]


def assign_by_differencing(costs: FloatArray, *, num_bins: int, per_bin: int) -> IntArray:
    """Spread items over bins that take exactly `per_bin` items each.

    Differencing blocks of `num_bins` items, the usual way to equal counts, ends 20 to 40 % above the bound on long
    tails. Here counts are free at first; then bins with too many items give up their cheapest, which go by falling cost
    to the emptiest bin that lacks some, and the fullest bin swaps items with emptier ones.

    Args:
        costs: float64 [num_bins x per_bin], not negative.
        num_bins: Bins.
        per_bin: Items of each bin.

    Returns:
        int64 [num_bins, per_bin]: the items of each bin, in rising order.
    """
    order = np.argsort(-costs, kind="stable")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    spare: list[int] = []
    for item, place in zip(order.tolist(), difference(costs, num_bins)[order].tolist(), strict=True):
        (bins[place] if len(bins[place]) < per_bin else spare).append(item)
    values = costs.tolist()
    lacking = [(sum(values[item] for item in items), at) for at, items in enumerate(bins) if len(items) < per_bin]
    heapify(lacking)
    for item in spare:
        load, at = heappop(lacking)
        bins[at].append(item)
        if len(bins[at]) < per_bin:
            heappush(lacking, (load + values[item], at))
    return np.sort(repair(costs, np.array(bins, np.int64).reshape(num_bins, per_bin)), axis=1)


def difference(costs: FloatArray, num_bins: int) -> IntArray:
    """Merge the two partial partitions that are furthest from even, large parts on small ones, until one is left.

    Args:
        costs: float64 [n], not negative.
        num_bins: Bins.

    Returns:
        int64 [n]: the bin of each item; counts are as they come.
    """
    order = np.argsort(-costs, kind="stable")
    count = len(costs)
    # A partition is its parts that are not empty, as (-load, node), in order; a node is an item, or joins two.
    joins: list[tuple[int, int]] = []
    heap = [(-cost, item, [(-cost, item)]) for item, cost in enumerate(costs[order].tolist())]
    heapify(heap)
    while len(heap) > 1:
        _, serial, first = heappop(heap)
        _, _, second = heappop(heap)
        overlap = max(0, len(first) + len(second) - num_bins)
        kept, other = len(first) - overlap, len(second) - overlap
        merged = first[:kept] + second[:other]
        for (load, node), (more, partner) in zip(first[kept:], reversed(second[other:]), strict=True):
            merged.append((load + more, count + len(joins)))
            joins.append((node, partner))
        merged.sort()
        if len(merged) == num_bins:
            least = merged[-1][0]
            merged = [(load - least, node) for load, node in merged]
        heappush(heap, (merged[0][0], serial, merged))
    owner = np.zeros(count + len(joins), np.int64)
    for at, (_, node) in enumerate(heap[0][2] if heap else []):
        owner[node] = at
    for at in range(len(joins) - 1, -1, -1):
        owner[list(joins[at])] = owner[count + at]
    places = np.empty(count, np.int64)
    places[order] = owner[:count]
    return places
