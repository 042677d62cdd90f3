"""Mixing: every prefix of the draws within one sample of each source's share; no source starves."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megascale_lightning import LoaderConfig, Mixture, PackedRows, PaddedRows
from megascale_lightning.planning.mixture import DeadlineMixer

from .data import make_corpus
from .harness import World, run_world

pytestmark = pytest.mark.timeout(90)

HALF = [0.5] + [0.5 / 300] * 300
ZIPF = [1 / (rank + 1) for rank in range(306)]
DRAWS = 10_000


def names_of(count: int) -> list[str]:
    return [f"s{index:03d}" for index in range(count)]


def new_mixer(
    weights: list[float], share: list[float] | None = None, given: list[float] | None = None
) -> DeadlineMixer:
    """A mixer as the planner makes one at a step boundary."""
    zero = [0.0] * len(weights)
    names = names_of(len(weights))
    share, given = zero if share is None else share, zero if given is None else given
    return DeadlineMixer(names, weights, share=share, given=given, live=[True] * len(weights))


def draw(mixer: DeadlineMixer, count: int) -> list[int]:
    """So many draws from sources without end."""
    sources, _ = mixer.draw(count, [count] * len(mixer.given))
    mixer.book(sources)
    return sources.tolist()


def worst_distance(draws: list[int], weights: list[float]) -> float:
    """Largest |given - share| over all sources and all prefixes, in samples."""
    shares = np.asarray(weights) / sum(weights)
    given = np.zeros(len(weights))
    worst = 0.0
    for count, source in enumerate(draws, start=1):
        given[source] += 1
        worst = max(worst, float(np.abs(given - count * shares).max()))
    return worst


@pytest.mark.parametrize("weights", [HALF, ZIPF], ids=["half-and-300", "zipf-306"])
@pytest.mark.parametrize("per_step", [1, 7, 64, DRAWS], ids=lambda n: f"steps-of-{n}")
def test_every_prefix_is_within_one_sample_of_its_share(weights: list[float], per_step: int) -> None:
    """Also when the mixer is settled and made anew from its floats at every step boundary, as a resume does."""
    mixer = new_mixer(weights)
    draws: list[int] = []
    while len(draws) < DRAWS:
        draws += draw(mixer, min(per_step, DRAWS - len(draws)))
        mixer.settle()
        mixer = new_mixer(weights, list(mixer.share), list(mixer.given))
    assert worst_distance(draws, weights) <= 1 + 1e-6


def test_the_measure_can_fail() -> None:
    """Sorting by (k + 1/2) / weight, which is known to come in bursts, is far off by the same measure."""
    keys = sorted(((k + 0.5) / w, source) for source, w in enumerate(HALF) for k in range(int(DRAWS * w) + 1))
    assert worst_distance([source for _, source in keys[:2000]], HALF) > 3


def test_weights_that_change_every_step() -> None:
    """No source waits much longer than its share says, and at every draw all are near what was due to them so far."""
    rng = random.Random(1)
    count = 50
    mixer = new_mixer([1.0] * count)
    due, given, last_seen, position = np.zeros(count), np.zeros(count), np.zeros(count), 0
    longest_wait, furthest = np.zeros(count), 0.0
    for _ in range(500):
        weights = [rng.choice([0.02, 0.1, 1.0, 3.0]) for _ in range(count)]
        mixer.settle()
        mixer = new_mixer(weights, list(mixer.share), list(mixer.given))
        for source in draw(mixer, 40):
            position += 1
            due += np.asarray(weights) / sum(weights)
            given[source] += 1
            furthest = max(furthest, float(np.abs(given - due).max()))
            longest_wait[source] = max(longest_wait[source], position - last_seen[source])
            last_seen[source] = position
    longest_wait = np.maximum(longest_wait, position - last_seen)
    assert longest_wait.max() < 1200, "a source starves"
    assert furthest < 2
    assert given.min() > 0.75 * position / count


def test_a_weight_that_swings_between_zero_and_large() -> None:
    """A source that is off in every other step still gets its share of the steps it is on."""
    mixer = new_mixer([1.0, 1.0, 1.0])
    given = Counter()
    for step in range(400):
        weights = [1.0, 1.0, 2.0 if step % 2 else 0.0]
        mixer.settle()
        mixer = new_mixer(weights, list(mixer.share), list(mixer.given))
        found = draw(mixer, 8)
        assert step % 2 or 2 not in found, "weight 0 is never drawn"
        given.update(found)
    assert abs(given[2] - 400 / 2 * 8 / 2) <= 2
    assert abs(given[0] - given[1]) <= 2


def test_ties_go_by_name_not_by_position() -> None:
    zero = [0.0] * 3
    for names in (["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]):
        mixer = DeadlineMixer(names, [1.0] * 3, share=zero, given=zero, live=[True] * 3)
        assert [names[source] for source in draw(mixer, 6)] == ["a", "b", "c"] * 2


@pytest.mark.parametrize("weights", [[0.5, 0.25, 0.25], [0.125, 0.625, 0.25], [0.5, 0.5, 0.0]], ids=str)
def test_draws_are_those_of_the_rule_written_out(weights: list[float]) -> None:
    """Eligible: g < e (else all); taken: least (g + 1 - e) / w; ties by name. Dyadic weights: the floats are exact."""
    share, given, expected = np.zeros(3), np.zeros(3), []
    for _ in range(200):
        share += weights
        live = [i for i in range(3) if weights[i] > 0]
        eligible = [i for i in live if given[i] < share[i]] or live
        taken = min(eligible, key=lambda i: ((given[i] + 1 - share[i]) / weights[i], i))
        given[taken] += 1
        expected.append(taken)
    assert draw(new_mixer(weights), 200) == expected


class TestThroughTheLoader:
    """One-token samples: a step is a set of draws."""

    @pytest.mark.slow
    @pytest.mark.parametrize("weights", [HALF, ZIPF], ids=["half-and-300", "zipf-306"])
    @pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
    def test_many_sources(self, tmp_path: Path, weights: list[float], packed: bool) -> None:
        names = names_of(len(weights))
        corpus = make_corpus(
            tmp_path,
            dict.fromkeys(names, 3),
            seq_len=8,
            lengths={name: [1] * 3 for name in names},
            formats=("parquet", "jsonl"),
            num_files=1,
        )
        by_name = dict(zip(names, weights, strict=True))
        config = LoaderConfig(
            sources=corpus.sources(epochs=None, weights=by_name),
            rows=PackedRows(2, 20, pack_ahead=0) if packed else PaddedRows(2, 40),
            global_batch_size=20 if packed else 40,
            runtime="local",
            plan_window=16,
        )
        shares = np.asarray(weights) / sum(weights)
        given = np.zeros(len(weights))
        index = {name: i for i, name in enumerate(names)}
        with World(config) as world:
            for _ in range(50):
                step = world.step()
                assert step is not None
                for piece in step.pieces():
                    given[index[piece[0]]] += 1
                assert given.sum() == 40 * (step.number + 1)
                assert np.abs(given - given.sum() * shares).max() <= 1 + 1e-6

    def test_one_row_a_step_gives_every_prefix(self, tmp_path: Path) -> None:
        weights = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}
        corpus = make_corpus(
            tmp_path, dict.fromkeys(weights, 5), seq_len=8, lengths={name: [1] * 5 for name in weights}
        )
        config = LoaderConfig(
            sources=corpus.sources(epochs=None, weights=weights),
            rows=PaddedRows(2, 1),
            global_batch_size=1,
            runtime="local",
            plan_window=8,
        )
        draws = [list(weights).index(piece[0]) for step in run_world(config, steps=400) for piece in step.pieces()]
        assert worst_distance(draws, list(weights.values())) <= 1 + 1e-6

    def test_by_tokens_within_one_longest_sample(self, tmp_path: Path) -> None:
        """Sources whose samples differ in length by a factor of ten share the tokens, not the samples."""
        rng = np.random.default_rng(0)
        lengths = {"short": rng.integers(1, 7, 200).tolist(), "long": rng.integers(20, 61, 200).tolist()}
        corpus = make_corpus(tmp_path, dict.fromkeys(lengths, 200), seq_len=64, lengths=lengths)
        config = LoaderConfig(
            sources=corpus.sources(epochs=None, weights={"short": 0.5, "long": 0.5}),
            rows=PaddedRows(64, 4),
            global_batch_size=4,
            mixture=Mixture(unit="tokens"),
            runtime="local",
        )
        given = Counter()
        for step in run_world(config, steps=150):
            for mb in step.microbatches():
                for row, pieces in enumerate(mb.rows):
                    given[pieces[0][0]] += int(mb.tensors["attention_mask"][row].sum())
            assert abs(given["short"] - sum(given.values()) / 2) <= 60
        assert sum(given.values()) > 3000

    def test_a_finished_source_leaves_and_the_rest_keep_their_ratio(self, tmp_path: Path) -> None:
        weights = {"a": 0.5, "b": 0.25, "c": 0.25}
        counts = {"a": 50, "b": 400, "c": 400}
        corpus = make_corpus(tmp_path, counts, seq_len=8, lengths={name: [1] * n for name, n in counts.items()})
        config = LoaderConfig(
            sources=corpus.sources(epochs={"a": 1, "b": None, "c": None}, weights=weights),
            rows=PaddedRows(2, 4),
            global_batch_size=4,
            runtime="local",
        )
        steps = run_world(config, steps=100)
        given = Counter(piece[0] for step in steps for piece in step.pieces())
        assert given["a"] == 50
        assert abs(given["b"] - given["c"]) <= 1
        assert {p[0] for step in steps[26:] for p in step.pieces()} == {"b", "c"}

    def test_weight_zero_is_never_drawn(self, tmp_path: Path) -> None:
        corpus = make_corpus(tmp_path, {"a": 20, "b": 20}, seq_len=8, longest=0.5)
        config = LoaderConfig(
            sources=corpus.sources(epochs=1, weights={"a": 1.0, "b": 0.0}),
            rows=PaddedRows(8, 4),
            global_batch_size=4,
            runtime="local",
        )
        steps = run_world(config)
        assert {p[0] for step in steps for p in step.pieces()} == {"a"}
        assert sum(len(step.rows) for step in steps) == 20
