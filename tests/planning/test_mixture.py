"""Earliest-deadline mixing: shares held at every prefix, exhaustion, resume with the same floats."""

import math
import random
from itertools import cycle

import numpy as np
import pytest

from megascale_lightning.planning.mixture import DeadlineMixer


def mixer(weights, *, share=None, given=None, names=None, **options):
    zeros = [0.0] * len(weights)
    return DeadlineMixer(
        names or [f"s{index:04}" for index in range(len(weights))],
        weights,
        share=zeros if share is None else share,
        given=zeros if given is None else given,
        live=[True] * len(weights),
        **options,
    )


ENDLESS = 10**9


def draw(one, count, sizes=(1, 7, 50)):
    """So many draws by samples from sources without end, in pieces of several sizes."""
    drawn, sizes = [], cycle(sizes)
    while len(drawn) < count:
        known = [ENDLESS] * len(one.given)
        sources, blocked = one.draw(min(next(sizes), count - len(drawn)), known)
        assert blocked is None
        one.book(sources)
        drawn += sources.tolist()
    return drawn


def draw_all(one, lengths, count, horizon=1000):
    """Draws by samples or tokens from finite sources: those of `lengths`, by source; retires them when they end."""
    taken, drawn = [0] * len(lengths), []
    while len(drawn) < count and one.live:
        left = [np.array(given[at:], np.int64) for given, at in zip(lengths, taken, strict=True)]
        sources, blocked = one.draw(horizon, [len(each) for each in left], left)
        sources = sources[: count - len(drawn)]
        costs = []
        for source in sources.tolist():
            costs.append(lengths[source][taken[source]])
            taken[source] += 1
        one.book(sources, np.array(costs, np.int64))
        drawn += sources.tolist()
        if blocked is not None and len(drawn) < count:
            one.leave(blocked)
    return drawn


def one_by_one(names, weights, lengths, count, share, given, *, by_tokens):
    """The rule itself, a draw at a time, and the shares after it."""
    taken, drawn = [0] * len(names), []
    live = [weight > 0 for weight in weights]
    share, given, time = list(share), list(given), 0.0

    def shares():
        total = math.fsum(weight for weight, alive in zip(weights, live, strict=True) if alive)
        return [weight / total if alive else 0.0 for weight, alive in zip(weights, live, strict=True)]

    def leave(source):
        nonlocal time
        share[:] = [owed + weight * time for owed, weight in zip(share, shares(), strict=True)]
        live[source], time = False, 0.0

    while len(drawn) < count and any(live):
        weight, now = shares(), time if by_tokens else time + 1
        alive = [source for source in range(len(names)) if live[source]]
        may = [source for source in alive if (given[source] - share[source]) / weight[source] < now] or alive
        ended = [source for source in may if taken[source] == len(lengths[source])]
        if by_tokens and ended:
            leave(ended[0])
            continue

        def deadline(source, weight=weight):
            cost = lengths[source][taken[source]] if by_tokens else 1
            return (given[source] + cost - share[source]) / weight[source], names[source]

        source = min(may, key=deadline)
        if source in ended:
            leave(source)
            continue
        cost = lengths[source][taken[source]] if by_tokens else 1
        given[source], time = given[source] + cost, time + cost
        taken[source] += 1
        drawn.append(source)
    return drawn, [owed + weight * time for owed, weight in zip(share, shares() if any(live) else share, strict=True)]


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
    assert went_on.share.tolist() == resumed.share.tolist()


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
    assert np.abs(given - owed).max() < 3.0
    assert min(given) > 0


def test_weight_zero_is_never_drawn():
    assert set(draw(mixer([1.0, 0.0, 2.0]), 300)) == {0, 2}


def test_equal_debts_go_by_name_not_by_position():
    assert draw(mixer([1.0, 1.0, 1.0], names=["c", "a", "b"]), 3) == [1, 2, 0]


def test_a_source_that_ended_leaves_and_the_rest_share_what_follows():
    drawn = draw_all(mixer([0.5, 0.25, 0.25]), [[1] * 50, [1] * 2000, [1] * 2000], 1000)
    assert drawn.count(0) == 50
    assert 0 not in drawn[101:]
    assert abs(drawn.count(1) - drawn.count(2)) <= 1


def test_nothing_is_left_when_all_have_ended():
    one = mixer([1.0, 1.0])
    assert sorted(draw_all(one, [[1], []], 10)) == [0]
    assert not one.live
    assert one.draw(5, [3, 3]).sources.tolist() == []


def test_a_source_of_which_nothing_is_known_stops_the_draws():
    one = mixer([1.0, 1.0])
    sources, blocked = one.draw(10, [ENDLESS, 2])
    assert sources.tolist().count(1) == 2
    assert blocked == 1
    assert one.given.tolist() == [0.0, 0.0]


def test_by_tokens_every_prefix_is_within_one_longest_sample():
    weights, rng = [0.6, 0.3, 0.1], np.random.default_rng(1)
    lengths = [rng.integers(1, longest, size=20_000).tolist() for longest in (50, 4000, 300)]
    taken, given = [0] * 3, np.zeros(3)
    for source in draw_all(mixer(weights, unit="tokens"), lengths, 5000, horizon=3000):
        given[source] += lengths[source][taken[source]]
        taken[source] += 1
        assert np.abs(given - given.sum() * np.array(weights)).max() <= 4000


def test_by_tokens_an_exhausted_source_leaves():
    drawn = draw_all(mixer([1.0, 1.0], unit="tokens"), [[5] * 3, [5] * 100], 20)
    assert drawn.count(0) == 3


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_draws_are_those_of_the_rule_whatever_is_looked_at_ahead(unit):
    rng = random.Random(5)
    for _ in range(40):
        n = rng.choice([1, 2, 3, 5, 12])
        names = [f"s{rng.random()}" for _ in range(n)]
        weights = [rng.choice([0, 1, 1, 2, rng.random(), 1e-3 * rng.random()]) for _ in range(n - 1)] + [1.0]
        lengths = [[rng.randint(1, 50) for _ in range(rng.choice([0, 3, 30, 300]))] for _ in range(n)]
        # Sources that gave too much: at times nobody is owed anything.
        share, given = (
            [rng.choice([0.0, 5 * rng.random()]) for _ in range(n)],
            [rng.choice([0.0, 3.0]) for _ in range(n)],
        )
        expected, owed = one_by_one(names, weights, lengths, 200, share, given, by_tokens=unit == "tokens")
        one = mixer(weights, share=share, given=given, names=names, unit=unit)
        assert draw_all(one, lengths, 200, horizon=rng.choice([1, 5, 50, 3000])) == expected
        one.settle()
        assert np.allclose(one.share, owed, rtol=1e-9, atol=1e-9)
