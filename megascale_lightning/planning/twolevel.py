"""Groups and microbatches together: even over a step, or even at every microbatch."""

from __future__ import annotations

from typing import Literal

import numpy as np

from megascale_lightning.planning.balancing import assign_greedily
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["Sync", "assign_in_turn", "assign_two_levels"]

Sync = Literal["step", "microbatch"]


def assign_two_levels(
    costs: FloatArray, *, num_groups: int, num_microbatches: int, per_microbatch: int, sync: Sync
) -> IntArray:
    """Spread items over groups x microbatches of equal count.

    Args:
        costs: float64 [groups x microbatches x per_microbatch], not negative.
        num_groups: Data-parallel groups.
        num_microbatches: Microbatches of each group.
        per_microbatch: Items of each microbatch.
        sync: "step" evens the sum of each group; "microbatch" evens, at each index, the groups among themselves.

    Returns:
        int64 [groups, microbatches, per_microbatch]: items.
    """
    # Seen by falling cost, ties by lowest index, so that only twins depend on the order of arrival.
    order = np.argsort(-costs, kind="stable")
    spread = _by_step if sync == "step" else _by_microbatch
    return order[spread(costs[order], num_groups, num_microbatches, per_microbatch)]


def assign_in_turn(num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    """Deal items as they come: int64 [groups, microbatches, per_microbatch]."""
    dealt = np.arange(num_groups * num_microbatches * per_microbatch, dtype=np.int64)
    return dealt.reshape(per_microbatch, num_microbatches, num_groups).T


def _by_step(costs: FloatArray, num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    groups = assign_greedily(costs, num_bins=num_groups, per_bin=num_microbatches * per_microbatch)
    return np.stack([m[assign_greedily(costs[m], num_bins=num_microbatches, per_bin=per_microbatch)] for m in groups])


def _by_microbatch(costs: FloatArray, num_groups: int, num_microbatches: int, per_microbatch: int) -> IntArray:
    buckets = assign_greedily(costs, num_bins=num_groups * num_microbatches, per_bin=per_microbatch)
    loads = costs[buckets].sum(axis=1)
    # Buckets of like load run at the same index: a tier of one bucket for each group.
    tiers = np.argsort(-loads, kind="stable").reshape(num_microbatches, num_groups)
    groups_of = np.empty_like(tiers)
    sums = np.zeros(num_groups)
    for index, tier in enumerate(tiers):  # The heaviest of a tier to the group that has least so far.
        emptiest = np.argsort(sums, kind="stable")
        groups_of[index, emptiest] = tier
        sums[emptiest] += loads[tier]
    return buckets[groups_of.T]
