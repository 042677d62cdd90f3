"""Groups and microbatches together: even over a step, or even at every microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Protocol

import numpy as np

from megascale_lightning.planning.balancing import assign_greedily
from megascale_lightning.planning.differencing import assign_by_differencing
from megascale_lightning.planning.vectors import assign_vectors
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["Method", "Sync", "assign_in_turn", "assign_two_levels"]

Sync = Literal["step", "microbatch"]
Method = Literal["greedy", "karmarkar_karp"]


class _Assign(Protocol):
    def __call__(self, costs: FloatArray, *, num_bins: int, per_bin: int) -> IntArray: ...


_ASSIGN: Final[Mapping[Method, _Assign]] = {"greedy": assign_greedily, "karmarkar_karp": assign_by_differencing}


def assign_two_levels(
    costs: FloatArray,
    *,
    num_groups: int,
    num_microbatches: int,
    per_microbatch: int,
    sync: Sync,
    method: Method = "greedy",
    group_size: int | None = None,
) -> IntArray:
    """Spread items over groups x microbatches of equal count.

    Args:
        costs: float64 [groups x microbatches x per_microbatch], not negative; or [..., D], to be even in all at once,
            each in units of its own.
        num_groups: Data-parallel groups.
        num_microbatches: Microbatches of each group.
        per_microbatch: Items of each microbatch.
        sync: "step" evens the sum of each group; "microbatch" evens, at each index, the groups among themselves.
        method: How a single cost is evened; several are always evened greedily.
        group_size: Neighbouring groups of a bucket, a divisor of `num_groups`: those that "microbatch" evens among
            themselves, while the buckets are even over the step. None: one bucket.

    Returns:
        int64 [groups, microbatches, per_microbatch]: items.
    """
    # Seen by falling cost, ties by lowest index, so that only twins depend on the order of arrival.
    order = np.argsort(-_scaled(costs).max(axis=1), kind="stable")
    bins = _ASSIGN[method] if costs.ndim == 1 else assign_vectors
    shape = num_groups, num_microbatches, per_microbatch
    if sync == "step":
        return order[_by_step(bins, costs[order], *shape)]
    return order[_by_microbatch(bins, costs[order], *shape, group_size or num_groups)]


def assign_in_turn(num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    """Deal items as they come: int64 [groups, microbatches, per_microbatch]."""
    dealt = np.arange(num_groups * num_microbatches * per_microbatch, dtype=np.int64)
    return dealt.reshape(per_microbatch, num_microbatches, num_groups).T


def _by_step(bins: _Assign, costs: FloatArray, num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    groups = bins(costs, num_bins=num_groups, per_bin=num_microbatches * per_microbatch)
    inside = (bins(costs[members], num_bins=num_microbatches, per_bin=per_microbatch) for members in groups)
    return np.stack([members[found] for members, found in zip(groups, inside, strict=True)])


def _by_microbatch(
    assign: _Assign, costs: FloatArray, num_groups: int, num_microbatches: int, per_microbatch: int, group_size: int
) -> IntArray:
    bins = assign(costs, num_bins=num_groups * num_microbatches, per_bin=per_microbatch)
    loads = _scaled(costs[bins].sum(axis=1))
    # Bins of like load run at the same index: a tier of one bin for each group of a bucket, as long as its heaviest.
    tiers = np.argsort(-loads.max(axis=1), kind="stable").reshape(-1, group_size)
    longest = loads[tiers[:, 0]].max(axis=1)
    buckets = assign_greedily(longest, num_bins=num_groups // group_size, per_bin=num_microbatches)
    placed = np.empty((num_groups // group_size, group_size, num_microbatches), np.int64)
    for bucket, members in zip(placed, buckets, strict=True):
        sums = np.zeros((group_size, loads.shape[1]))
        for index, tier in enumerate(tiers[members]):  # The heaviest of a tier to the group that has least so far.
            cost = int(sums.max(axis=0).argmax())  # Of several costs in the one that is least even so far.
            emptiest = np.argsort(sums[:, cost], kind="stable")
            falling = tier[np.argsort(-loads[tier, cost], kind="stable")]
            bucket[emptiest, index] = falling
            sums[emptiest] += loads[falling]
    return bins[placed.reshape(num_groups, num_microbatches)]


def _scaled(costs: FloatArray) -> FloatArray:
    """Float64 [n, D]: several costs, each seen beside its mean; one as it is."""
    if costs.ndim == 1:
        return costs[:, None]
    means = np.sort(costs, axis=0).mean(axis=0)  # in rising order, as sums depend on it
    scaled: FloatArray = costs / np.where(means > 0, means, 1.0)
    return scaled
