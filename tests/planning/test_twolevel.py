"""Groups and microbatches: every item once, equal rows, and the span that was asked for is the shorter."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.planning.twolevel import assign_two_levels


def spans(costs, items):
    loads = costs[items].sum(axis=2)
    return loads.sum(axis=1).max(), loads.max(axis=0).sum()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["step", "microbatch"]), st.integers(0))
@settings(max_examples=80, deadline=None)
def test_every_item_once_never_worse_than_dealing_in_any_order(groups, microbatches, per, sync, seed):
    shape = {"num_groups": groups, "num_microbatches": microbatches, "per_microbatch": per, "sync": sync}
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 40, groups * microbatches * per).astype(float)
    items = assign_two_levels(costs, **shape)
    assert items.shape == (groups, microbatches, per)
    assert sorted(items.ravel().tolist()) == list(range(costs.size))
    dealt = np.argsort(-costs, kind="stable").reshape(per, microbatches, groups).T
    at = int(sync == "microbatch")
    assert spans(costs, items)[at] <= spans(costs, dealt)[at] + 1e-9
    moved = costs[rng.permutation(costs.size)]
    assert (moved[assign_two_levels(moved, **shape)] == costs[items]).all()


def test_each_sync_is_the_better_at_its_own_span():
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(6, 1.2, 4096), 4096)
    costs = 6 * 5120 * lengths + lengths**2
    shape = {"num_groups": 64, "num_microbatches": 8, "per_microbatch": 8}
    step = spans(costs, assign_two_levels(costs, **shape, sync="step"))
    each = spans(costs, assign_two_levels(costs, **shape, sync="microbatch"))
    mean = costs.sum() / 64
    assert step[0] / mean < 1.001
    assert step[0] <= each[0]
    assert each[1] < step[1]
    assert each[1] / mean < 1.1


def test_what_is_even_at_every_microbatch_is_so_in_sum_as_far_as_it_can_be():
    items = assign_two_levels(
        np.array([1.0, 2, 3, 4]), num_groups=2, num_microbatches=2, per_microbatch=1, sync="microbatch"
    )
    assert sorted(map(sorted, items[:, :, 0].tolist())) == [[0, 3], [1, 2]]
    assert items[:, 0, 0].tolist() == [3, 2]


def test_several_costs_even_at_every_microbatch_are_so_in_sum_each():
    rng = np.random.default_rng(0)
    costs = rng.lognormal(0, 1, (1024, 2))
    shape = {"num_groups": 16, "num_microbatches": 64, "per_microbatch": 1}
    loads = costs[assign_two_levels(costs, **shape, sync="microbatch")].sum(axis=(1, 2))
    assert (loads.max(axis=0) / loads.mean(axis=0)).max() < 1.03


def bucket_span(costs, items, size):
    """Groups of a bucket wait for each other at every microbatch, buckets at the end of the step."""
    loads = costs[items].sum(axis=2).reshape(-1, size, items.shape[1])
    return loads.max(axis=1).sum(axis=1).max()


def test_buckets_are_even_and_inside_them_every_microbatch():
    shape = {"num_groups": 16, "num_microbatches": 8, "per_microbatch": 4}
    for seed in range(5):
        lengths = np.minimum(np.random.default_rng(seed).lognormal(6, 1.2, 512), 4096)
        costs = 6 * 5120 * lengths + lengths**2
        found = assign_two_levels(costs, **shape, sync="microbatch", group_size=4)
        assert sorted(found.ravel().tolist()) == list(range(512))
        flat = [assign_two_levels(costs, **shape, sync=sync) for sync in ("step", "microbatch")]
        assert bucket_span(costs, found, 4) < min(bucket_span(costs, items, 4) for items in flat)
        buckets = costs[found].sum(axis=(1, 2)).reshape(-1, 4).sum(axis=1)
        assert buckets.max() / buckets.mean() < 1.02
        whole = assign_two_levels(costs, **shape, sync="microbatch", group_size=16)
        assert (whole == flat[1]).all()
