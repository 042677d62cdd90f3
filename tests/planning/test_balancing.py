"""Greedy balancing: equal counts, near the lower bound, never worse than dealing in turn by more than one item."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.planning.balancing import assign_greedily, lower_bound
from megascale_lightning.planning.costs import AttentionCost, TokenCount


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


@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=60)
def test_no_assignment_beats_the_lower_bound(num_bins, per_bin, seed):
    costs = np.random.default_rng(seed).integers(1, 30, num_bins * per_bin).astype(float)
    bins = assign_greedily(costs, num_bins=num_bins, per_bin=per_bin)
    assert costs[bins].sum(axis=1).max() >= lower_bound(costs, num_bins) - 1e-9


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
