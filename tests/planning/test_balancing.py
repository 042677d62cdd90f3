"""Greedy balancing: equal counts, near the lower bound, never worse than dealing in turn by more than one item."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.planning.balancing import assign_greedily, lower_bound
from megascale_lightning.planning.costs import AttentionCost, TokenCount
from megascale_lightning.planning.differencing import assign_by_differencing, difference


def long_tailed(count, seed=0):
    lengths = np.clip(np.random.default_rng(seed).lognormal(6, 1.2, count), 1, 16384)
    return AttentionCost()(lengths)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=150)
def test_each_item_is_in_one_bin_and_every_bin_has_its_count(num_bins, per_bin, seed):
    costs = np.random.default_rng(seed).integers(0, 50, num_bins * per_bin).astype(float)
    bins = assign_greedily(costs, num_bins=num_bins, per_bin=per_bin)
    assert bins.shape == (num_bins, per_bin)
    assert sorted(bins.ravel().tolist()) == list(range(num_bins * per_bin))


@given(st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_assignment_beats_the_bounds(shape, seed):
    num_bins, per_bin = shape
    costs = np.random.default_rng(seed).integers(0, 30, num_bins * per_bin).astype(float)
    every = np.array(list(product(range(num_bins), repeat=costs.size)))
    even = every[[(np.bincount(places, minlength=num_bins) == per_bin).all() for places in every]]
    for places, bound in (
        (every, lower_bound(costs, num_bins)),
        (even, lower_bound(costs, num_bins, equal_counts=True)),
    ):
        best = min(np.bincount(one, costs).max() for one in places)
        assert bound <= best + 1e-9


def test_what_raises_the_bounds():
    assert lower_bound(np.array([5.0, 5, 5]), 2) == 10, "two of three share a bin"
    assert lower_bound(np.array([9.0, 1, 1, 1]), 2) == 9, "the largest"
    assert lower_bound(np.array([9.0, 1, 2, 3]), 2, equal_counts=True) == 10, "the largest, with the smallest"
    assert lower_bound(np.empty(0), 2, equal_counts=True) == 0
    assert lower_bound(np.array([1.0, 7]), 2, equal_counts=True) == 7


@pytest.mark.parametrize(("mu", "sigma", "cap"), [(6, 1.2, 16384), (6.5, 1.8, 131072)])
@pytest.mark.parametrize(("ranks", "each"), [(64, 64), (512, 20)])
@pytest.mark.parametrize("assign", [assign_greedily, assign_by_differencing])
def test_ranks_end_at_the_bound_with_equal_counts_and_with_free_ones(mu, sigma, cap, ranks, each, assign):
    lengths = np.clip(np.random.default_rng(0).lognormal(mu, sigma, ranks * each), 1, cap)
    costs = 6 * 5120 * lengths + lengths**2  # FLOPs of a 13B model, up to a factor
    loads = costs[assign(costs, num_bins=ranks, per_bin=each)].sum(axis=1)
    assert loads.max() <= 1.02 * lower_bound(costs, ranks, equal_counts=True)
    if assign is assign_by_differencing:
        free = np.bincount(difference(costs, ranks), costs, ranks)
        assert free.max() <= 1.001 * lower_bound(costs, ranks)


@pytest.mark.parametrize(("per_bin", "allowed"), [(4, 1.05), (8, 1.05), (16, 1.02), (64, 1.002)])
def test_long_tails_end_near_the_bound(per_bin, allowed):
    ratios = []
    for seed in range(8):
        costs = long_tailed(64 * per_bin, seed)
        loads = costs[assign_greedily(costs, num_bins=64, per_bin=per_bin)].sum(axis=1)
        ratios.append(loads.max() / lower_bound(costs, 64))
    assert np.median(ratios) < allowed


def test_it_beats_dealing_in_turn_on_a_long_tail():
    costs = long_tailed(512)
    dealt = costs.reshape(-1, 8).sum(axis=0).max()
    balanced = costs[assign_greedily(costs, num_bins=8, per_bin=64)].sum(axis=1).max()
    assert balanced < dealt * 0.95


def test_the_same_costs_give_the_same_bins():
    costs = np.full(32, 3.0)
    assert (assign_greedily(costs, num_bins=4, per_bin=8) == assign_greedily(costs, num_bins=4, per_bin=8)).all()


def test_costs_grow_with_length_and_attention_with_its_square():
    lengths = np.array([1, 1000, 49152])
    assert TokenCount()(lengths).tolist() == [1.0, 1000.0, 49152.0]
    assert AttentionCost()(lengths)[2] == pytest.approx(2 * 49152)


def test_one_item_a_bin_is_placed_by_falling_cost() -> None:
    assert assign_greedily(np.array([1.0, 3.0, 2.0, 3.0]), num_bins=4, per_bin=1).tolist() == [[1], [3], [2], [0]]
