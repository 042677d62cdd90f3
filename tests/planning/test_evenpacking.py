"""Rows of even cost: capacity, nothing lost, what plain packing places of the carried pieces, and how even and full."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import AttentionCost
from megascale_lightning.planning.evenpacking import pack_evenly
from megascale_lightning.planning.packing import pack

LENGTHS = st.lists(st.integers(1, 12), max_size=16)


def squares(lengths):
    return np.array(lengths, float) ** 2


def tokens(rows, lengths):
    return [sum(lengths[piece] for piece in row) for row in rows]


@settings(max_examples=300, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 6), st.booleans())
def test_rows_of_any_pool(carried, drawn, num_rows, by_something_else):
    lengths = [*carried, *drawn]
    costs = np.array([(7 * n) % 5 for n in range(len(lengths))], float) if by_something_else else squares(lengths)
    rows = pack_evenly(carried, drawn, costs, num_rows=num_rows, capacity=12)
    plain = pack(carried, drawn, num_rows=num_rows, capacity=12)
    placed, due = Counter(chain.from_iterable(rows)), Counter(chain.from_iterable(plain))
    assert len(rows) == num_rows
    assert max(tokens(rows, lengths)) <= 12
    assert max(placed.values(), default=1) == 1, "each piece once"
    # A piece that waits already waits no longer than with plain packing, and nothing is left where nothing had to be.
    assert all(piece in placed for piece in due if piece < len(carried))
    assert len(due) < len(lengths) or placed == due
    assert sum(tokens(rows, lengths)) >= 0.99 * sum(tokens(plain, lengths))
    room = 12 - min(tokens(rows, lengths))
    assert all(length > room for piece, length in enumerate(lengths) if piece not in placed), "it had fitted"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30, unique=True), st.randoms())
def test_the_order_of_the_draws_decides_only_between_twins(drawn, rng):
    moved = rng.sample(drawn, len(drawn))
    rows = [
        [
            [lengths[piece] for piece in row]
            for row in pack_evenly([], lengths, squares(lengths), num_rows=3, capacity=20)
        ]
        for lengths in (drawn, moved)
    ]
    assert rows[0] == rows[1]


def pool_of(kind, seed):
    rng = np.random.default_rng(seed)
    if kind == "log-normal":
        return np.clip(rng.lognormal(6, 1.2, 1024), 1, 4096).astype(int)
    short = np.clip(rng.lognormal(6, 1, 1024), 1, 4096).astype(int)
    return np.where(rng.random(1024) < 0.95, short, rng.integers(16384, 32769, 1024))


def images(lengths):
    """A cost that has nothing to do with the lengths."""
    return np.minimum(np.random.default_rng(len(lengths)).lognormal(5, 1.5, len(lengths)), 5000)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "capacity", "cost", "allowed"),
    [
        ("log-normal", 16384, AttentionCost(4096), 1.03),
        ("long and short", 131072, AttentionCost(4096), 1.06),
        ("log-normal", 16384, images, 1.6),
    ],
)
def test_of_1024_documents_rows_are_full_and_even(kind, capacity, cost, allowed, seed):
    lengths, num_rows = pool_of(kind, seed), 0
    num_rows = int(lengths.sum() // capacity)
    costs = cost(lengths)
    even = pack_evenly([], lengths.tolist(), costs, num_rows=num_rows, capacity=capacity)
    plain = pack([], lengths.tolist(), num_rows=num_rows, capacity=capacity)
    for rows in (even, plain):
        assert sum(tokens(rows, lengths)) >= 0.99 * num_rows * capacity
    loads, before = (np.array([costs[row].sum() for row in rows]) for rows in (even, plain))
    assert loads.max() / loads.mean() <= allowed
    assert before.max() / before.mean() > 1.1


def test_a_carried_piece_comes_first_where_it_would_be_left():
    """By excess alone 8, 6 and 5 take the rows, and 2 finds none."""
    lengths = [2, 1, 8, 5, 6]
    assert pack(lengths[:3], lengths[3:], num_rows=2, capacity=12) == [[0, 1, 2], [4, 3]]
    rows = pack_evenly(lengths[:3], lengths[3:], squares(lengths), num_rows=2, capacity=12)
    assert [[lengths[piece] for piece in row] for row in rows] == [[5, 6, 1], [8, 2]]


def test_an_empty_pool_gives_empty_rows():
    assert pack_evenly([], [], np.empty(0), num_rows=3, capacity=8) == [[], [], []]


@pytest.mark.parametrize("rate", [1.0, 0.1, 3e-6])
def test_a_cost_that_goes_with_the_tokens_leaves_no_more_to_even_than_tokens(rate):
    lengths = np.random.default_rng(0).integers(1, 60, 200).tolist()
    costs = rate * np.array(lengths, float)
    assert pack_evenly([], lengths, costs, num_rows=40, capacity=128) == pack_evenly(
        [], lengths, np.array(lengths, float), num_rows=40, capacity=128
    )
