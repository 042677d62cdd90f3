"""Largest differencing: against the textbook, brute force and dealing, with equal counts, in any order of arrival."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.planning.balancing import assign_greedily, lower_bound
from megascale_lightning.planning.differencing import assign_by_differencing, difference


def test_the_textbook_case():
    costs = np.array([8.0, 7, 6, 5, 4])
    assert sorted(np.bincount(difference(costs, 2), costs).tolist()) == [14, 16], "longest first ends at 17"
    assert sorted(np.bincount(difference(costs, 3), costs).tolist()) == [8, 11, 11]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_small_cases_against_brute_force(costs, num_bins):
    values = np.array(costs, float)
    places = difference(values, num_bins)
    best = min(np.bincount(one, values).max() for one in product(range(num_bins), repeat=len(costs)))
    assert best <= np.bincount(places, values).max() <= best * 4 / 3 + 1e-9


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=120, deadline=None)
def test_every_item_once_in_bins_of_one_size_in_any_order(per_bin, num_bins, seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 50, num_bins * per_bin).astype(float)
    bins = assign_by_differencing(costs, num_bins=num_bins, per_bin=per_bin)
    assert bins.shape == (num_bins, per_bin)
    assert sorted(bins.ravel().tolist()) == list(range(costs.size))
    moved = costs[rng.permutation(costs.size)]
    again = assign_by_differencing(moved, num_bins=num_bins, per_bin=per_bin)
    assert np.sort(costs[bins], axis=1).tolist() == np.sort(moved[again], axis=1).tolist()


@pytest.mark.parametrize("per_bin", [2, 4, 8, 16, 32])
def test_long_tails_end_as_near_the_bound_as_with_the_greedy(per_bin):
    """Where differencing in blocks, which keeps counts equal by itself, ends 1.2 to 1.4 above it."""
    ratios = []
    for seed in range(8):
        lengths = np.clip(np.random.default_rng(seed).lognormal(6, 1.2, 64 * per_bin), 1, 8192)
        costs = 6 * 5120 * lengths + lengths**2
        found = [
            costs[assign(costs, num_bins=64, per_bin=per_bin)].sum(axis=1).max()
            for assign in (assign_greedily, assign_by_differencing)
        ]
        ratios.append([load / lower_bound(costs, 64, equal_counts=True) for load in found])
    greedy, differenced = np.median(ratios, axis=0)
    assert differenced <= greedy + 0.01
    assert differenced <= 1.03
