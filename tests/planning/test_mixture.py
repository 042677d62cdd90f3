"""Earliest-deadline mixing: shares held at every prefix, exhaustion, resume with the same floats."""

from itertools import islice

import numpy as np
import pytest

from megascale_lightning.planning.mixture import DeadlineMixer


def mixer(weights, *, share=None, given=None, names=None, **options):
    zeros = [0.0] * len(weights)
    return DeadlineMixer(
        names or [f"s{index:04}" for index in range(len(weights))],
        weights,
        share=share or zeros,
        given=given or zeros,
        live=[True] * len(weights),
        **options,
    )


def draw(one, count):
    return list(islice(one.draws(), count))


def largest_lag(drawn, weights):
    """How far any source is from its share at any prefix, in samples."""
    shares = np.asarray(weights, dtype=float) / np.sum(weights)
    given = np.zeros(len(shares))
    worst = 0.0
    for at, source in enumerate(drawn, start=1):
        given[source] += 1
        worst = max(worst, float(np.abs(given - shares * at).max()))
    return worst


ZIPF = [1 / rank**1.1 for rank in range(1, 307)]


@pytest.mark.parametrize("weights", [[0.5] + [0.5 / 300] * 300, ZIPF, [1.0], [3, 1], [0.7, 0.2, 0.1]])
def test_every_prefix_is_within_one_sample_of_its_share(weights):
    assert largest_lag(draw(mixer(weights), 10_000), weights) < 1.0 + 1e-6


def test_cut_at_any_draw_and_rebuilt_it_stays_within_one_sample():
    weights = ZIPF
    share, given, drawn = None, None, []
    for size in np.random.default_rng(0).integers(1, 60, size=150):
        one = mixer(weights, share=share, given=given)
        drawn += draw(one, int(size))
        one.settle()
        share, given = one.share, one.given
    assert largest_lag(drawn, weights) < 1.0 + 1e-6


def test_a_rebuilt_mixer_has_the_same_floats_as_the_one_that_went_on():
    first = mixer(ZIPF)
    draw(first, 777)
    first.settle()
    went_on = mixer(ZIPF, share=first.share, given=first.given)
    resumed = mixer(ZIPF, share=list(first.share), given=list(first.given))
    assert draw(went_on, 500) == draw(resumed, 500)
    went_on.settle(), resumed.settle()
    assert went_on.share == resumed.share


def test_weights_that_change_at_every_step_starve_nobody():
    rng = np.random.default_rng(3)
    share, given, owed = None, None, np.zeros(20)
    for _ in range(300):
        weights = rng.dirichlet(np.full(20, 0.3)) + 1e-6
        one = mixer(weights.tolist(), share=share, given=given)
        draw(one, 40)
        one.settle()
        share, given = one.share, one.given
        owed += 40 * weights / weights.sum()
    # What a source is owed grows with every weight it had, and no debt is ever left to grow: a new weight may find at
    # most the few samples that the changes of one step left over.
    assert np.abs(np.array(given) - owed).max() < 3.0
    assert min(given) > 0


def test_weight_zero_is_never_drawn():
    assert set(draw(mixer([1.0, 0.0, 2.0]), 300)) == {0, 2}


def test_equal_debts_go_by_name_not_by_position():
    assert draw(mixer([1.0, 1.0, 1.0], names=["c", "a", "b"]), 3) == [1, 2, 0]


def test_a_retired_source_leaves_and_the_rest_share_what_follows():
    one = mixer([0.5, 0.25, 0.25])
    drawn, draws = [], one.draws()
    while len(drawn) < 1000:
        source = next(draws)
        if source == 0 and len(drawn) >= 100:
            one.retire(source)
            draws = one.draws()
            continue
        drawn.append(source)
    assert 0 not in drawn[100:]
    assert abs(drawn.count(1) - drawn.count(2)) <= 1


def test_nothing_is_left_when_all_retire():
    one = mixer([1.0, 1.0])
    one.retire(next(one.draws()))
    one.retire(next(one.draws()))
    assert list(one.draws()) == []
    assert sum(one.given) == 0


def test_by_tokens_every_prefix_is_within_one_longest_sample():
    weights, rng = [0.6, 0.3, 0.1], np.random.default_rng(1)
    lengths = [rng.integers(1, longest, size=20_000).tolist() for longest in (50, 4000, 300)]
    heads = [0, 0, 0]
    one = mixer(weights, unit="tokens", head_cost=lambda source: lengths[source][heads[source]])
    given = np.zeros(3)
    for source in islice(one.draws(), 5000):
        cost = lengths[source][heads[source]]
        heads[source] += 1
        given[source] += cost
        assert np.abs(given - given.sum() * np.array(weights)).max() <= 4000


def test_by_tokens_an_exhausted_source_leaves():
    left = [3, 10**9]
    one = mixer([1.0, 1.0], unit="tokens", head_cost=lambda source: 5 if left[source] else None)
    drawn = []
    for source in islice(one.draws(), 20):
        left[source] -= 1
        drawn.append(source)
    assert drawn.count(0) == 3
