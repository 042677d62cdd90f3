"""Groups and microbatches together: even over a step, or even at every microbatch."""

from __future__ import annotations

from typing import Literal

import numpy as np

from megascale_lightning.planning.balancing import assign_greedily
from megascale_lightning.planning.vectors import assign_vectors
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["Sync", "assign_in_turn", "assign_two_levels"]

Sync = Literal["step", "microbatch"]


def assign_two_levels(
    costs: FloatArray,
    *,
    num_groups: int,
    num_microbatches: int,
    per_microbatch: int,
    sync: Sync,
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
        group_size: Neighbouring groups of a bucket, a divisor of `num_groups`: those that "microbatch" evens among
            themselves, while the buckets are even over the step. None: one bucket.

    Returns:
        int64 [groups, microbatches, per_microbatch]: items.
    """
    # Seen by falling cost, ties by lowest index, so that only twins depend on the order of arrival.
    order = np.argsort(-_peak(costs), kind="stable")
    shape = num_groups, num_microbatches, per_microbatch
    if sync == "step":
        return order[_by_step(costs[order], *shape)]
    return order[_by_microbatch(costs[order], *shape, group_size or num_groups)]


def assign_in_turn(num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    """Deal items as they come: int64 [groups, microbatches, per_microbatch]."""
    dealt = np.arange(num_groups * num_microbatches * per_microbatch, dtype=np.int64)
    return dealt.reshape(per_microbatch, num_microbatches, num_groups).T


def _by_step(costs: FloatArray, num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    groups = _bins(costs, num_groups, num_microbatches * per_microbatch)
    return np.stack([members[_bins(costs[members], num_microbatches, per_microbatch)] for members in groups])


def _by_microbatch(
    costs: FloatArray, num_groups: int, num_microbatches: int, per_microbatch: int, group_size: int
) -> IntArray:
    bins = _bins(costs, num_groups * num_microbatches, per_microbatch)
    loads = _peak(costs[bins].sum(axis=1))
    # Bins of like load run at the same index: a tier of one bin for each group of a bucket, as long as its heaviest.
    tiers = np.argsort(-loads, kind="stable").reshape(-1, group_size)
    buckets = assign_greedily(loads[tiers[:, 0]], num_bins=num_groups // group_size, per_bin=num_microbatches)
    placed = np.empty((num_groups // group_size, group_size, num_microbatches), np.int64)
    for bucket, members in zip(placed, buckets, strict=True):
        sums = np.zeros(group_size)
        for index, tier in enumerate(tiers[members]):  # The heaviest of a tier to the group that has least so far.
            emptiest = np.argsort(sums, kind="stable")
            bucket[emptiest, index] = tier
            sums[emptiest] += loads[tier]
    return bins[placed.reshape(num_groups, num_microbatches)]


def _bins(costs: FloatArray, num_bins: int, per_bin: int) -> IntArray:
    assign = assign_greedily if costs.ndim == 1 else assign_vectors
    return assign(costs, num_bins=num_bins, per_bin=per_bin)


def _peak(costs: FloatArray) -> FloatArray:
    """Float64 [n]: of several costs the one that is largest, each seen beside its mean."""
    if costs.ndim == 1:
        return costs
    means = np.sort(costs, axis=0).mean(axis=0)  # in rising order, as sums depend on it
    peaks: FloatArray = (costs / np.where(means > 0, means, 1.0)).max(axis=1)
    return peaks
