"""Scheduled mixtures and stop rules: the weights of each step, the same data on every topology, resumed anywhere."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

import pytest

from megascale_lightning import ConfigError, LoaderConfig, MegaScaleLoader, Mixture, PackedRows, StateError
from megascale_lightning.checkpointing.state import readable

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Step, World, run_world

pytestmark = pytest.mark.timeout(120)

STEPS = 45
RAMP = [(0, {"web": 0.8, "code": 0.2, "books": 0.0}), (10, {"web": 0.8}), (30, {"web": 0.0, "code": 0.4, "books": 0.6})]
JOIN, LEAVE = 12, 25
COMES_AND_GOES = [(0, {"web": 1.0, "code": 1.0, "books": 0.0}), (JOIN, {"books": 2.0}), (LEAVE, {"web": 0.0})]


def config_for(corpus: Corpus, mixture: Any, *, epochs: Any = None, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=epochs),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=8),
        "global_batch_size": 4,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 1500,
        "mixture": mixture,
    }
    return LoaderConfig(**(base | changes))


def ramp(unit: Any = "samples") -> Mixture:
    return Mixture.schedule(RAMP, interpolate="linear", unit=unit)


def certificates(steps: list[Step]) -> list[str]:
    return [step.certificate for step in steps]


def drawn(steps: list[Step]) -> Counter[str]:
    return Counter(piece[0] for step in steps for piece in step.pieces())


@pytest.fixture(scope="module", params=["samples", "tokens"])
def expected(request: Any, mixed: Corpus) -> tuple[Any, list[Step]]:
    return request.param, run_world(config_for(mixed, ramp(request.param)), steps=STEPS, keep_states=True)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_the_same_certificate_whatever_is_read_ahead(mixed: Corpus, expected: Any, dp: int, prefetch: int) -> None:
    unit, steps = expected
    config = config_for(mixed, ramp(unit), prefetch_steps=prefetch, plan_window=1 + prefetch)
    assert certificates(run_world(config, dp, steps=STEPS)) == certificates(steps)


@pytest.mark.ray
@pytest.mark.slow
def test_the_same_certificate_in_ray_actors(mixed: Corpus, expected: Any, shared_ray: None) -> None:
    unit, steps = expected
    config = config_for(mixed, ramp(unit), runtime="ray", num_loaders=2)
    assert certificates(run_world(config, 2, steps=STEPS)) == certificates(steps)


def test_resumed_inside_the_ramp(mixed: Corpus, expected: Any) -> None:
    unit, steps = expected
    for at in (1, 9, 10, 11, 17, 20, 29, 30, 31):
        state = steps[at - 1].state
        found = run_world(config_for(mixed, ramp(unit)), 1 + at % 2, state=state, steps=STEPS - at)
        assert certificates(found) == certificates(steps)[at:], f"resumed at step {at}"


def test_each_step_has_the_weights_of_its_own(mixed: Corpus, expected: Any) -> None:
    unit, steps = expected
    schedule = config_for(mixed, ramp(unit)).schedule_of("train")
    assert schedule is not None
    for number, step in enumerate(steps):
        assert step.state is not None
        weights = readable(step.state)["mixture"]["weights"]
        assert list(weights.values()) == [schedule.at(number)[index] for index in (2, 1, 0)]  # sorted by name
    before, behind = ({name: source["given"] for name, source in steps[at].state["sources"].items()} for at in (9, 29))
    due = sum((schedule.at(step) / schedule.at(step).sum() for step in range(10, 30)), 0) / 20
    given = {name: behind[name] - before[name] for name in before}
    for name, share in zip(("web", "code", "books"), due, strict=True):
        assert given[name] / sum(given.values()) == pytest.approx(share, abs=0.08)


def test_sources_join_and_leave(mixed: Corpus) -> None:
    config = config_for(mixed, Mixture.schedule(COMES_AND_GOES))
    steps = run_world(config, steps=STEPS)
    assert drawn(steps[:JOIN])["books"] == 0
    assert drawn(steps[JOIN : JOIN + 2])["books"] > 0
    assert drawn(steps[LEAVE + 4 :])["web"] == 0 < drawn(steps[LEAVE - 2 : LEAVE])["web"]
    assert certificates(run_world(config, 2, steps=STEPS)) == certificates(steps)


class TestSetMixture:
    AT = 36

    def test_it_takes_the_place_of_the_schedule(self, mixed: Corpus) -> None:
        def run(stop: int | None = None, prefetch: int = 1) -> tuple[list[str], Any]:
            points = [*RAMP, (self.AT + 10, {"web": 5.0})]
            config = config_for(mixed, Mixture.schedule(points, interpolate="linear"), prefetch_steps=prefetch)
            with World(config) as world:
                assert world.loaders[0].set_mixture({"web": 0.7}, at_step=self.AT) == self.AT
                found = world.steps(stop or 60)
                state = world.state()
            if stop is None:
                return certificates(found), readable(state)["mixture"]
            with World(config, 2, state=state) as world:
                return certificates(found + world.steps(60 - stop)), None

        expected, mixture = run()
        # web is set; of the others, what the schedule has for them at that step stays.
        points = [*RAMP, (self.AT + 10, {"web": 5.0})]
        schedule = config_for(mixed, Mixture.schedule(points, interpolate="linear")).schedule_of("train")
        assert schedule is not None
        assert mixture["weights"] == {"web": 0.7, "code": schedule.at(self.AT)[1], "books": schedule.at(self.AT)[2]}
        assert mixture["replaced"] is True
        assert run(prefetch=4)[0] == expected
        for stop in (20, self.AT, self.AT + 1, self.AT + 12):
            assert run(stop)[0] == expected, f"resumed at step {stop}"

    def test_not_named_keeps_the_weight_at_that_step(self, mixed: Corpus) -> None:
        with World(config_for(mixed, Mixture.schedule([*RAMP, (40, {"books": 9.0})]))) as world:
            world.loaders[0].set_mixture({"code": 1.0}, at_step=41)
            changes = readable(world.state())["mixture"]["changes"]
        assert changes == {41: {"web": 0.0, "code": 1.0, "books": 9.0}}


def test_an_edited_schedule_is_a_recorded_change(mixed: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    with World(config_for(mixed, ramp())) as world:
        world.loaders[0].set_mixture({"web": 1.0})
        world.steps(15)
        state = world.state()
    edited = config_for(mixed, Mixture.schedule([*RAMP[:2], (15, {"web": 0.0, "code": 1.0})]))
    with World(edited, state=state) as world, caplog.at_level(logging.WARNING):
        assert readable(world.state())["mixture"]["weights"] == {"web": 0.0, "code": 1.0, "books": 0.0}
        assert readable(world.state())["mixture"]["changes"] == {}
        steps = world.steps(20)
        again = world.state()
    assert set(drawn(steps[4:])) == {"code"}
    assert again["fingerprint"]["mixture_schedule"]["points"][-1] == [15, {"code": 1.0, "web": 0.0}]
    with World(config_for(mixed, {"web": 1, "code": 0, "books": 0}), state=again) as world:
        assert set(drawn(world.steps(20)[4:])) == {"web"}, "a schedule that is no longer there"


def test_an_edited_schedule_counts_again_after_set_mixture(mixed: Corpus) -> None:
    with World(config_for(mixed, ramp())) as world:
        world.loaders[0].set_mixture({"web": 1.0, "code": 0.0, "books": 0.0})
        world.steps(34)
        state = world.state()
    assert state["mixture"]["replaced"]
    edited = config_for(mixed, Mixture.schedule([*RAMP, (38, {"code": 0.0, "books": 1.0})]))
    assert set(drawn(run_world(edited, state=state, steps=16)[8:])) == {"books"}


def test_what_was_edited_is_shown(mixed: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    state = run_world(config_for(mixed, ramp()), steps=3, keep_states=True)[-1].state
    with caplog.at_level(logging.WARNING), World(config_for(mixed, Mixture.schedule(RAMP)), state=state):
        said = [record.message for record in caplog.records if "other settings" in record.message]
    assert len(said) == 1
    assert "mixture_schedule ({'interpolate': 'linear', 'points': [[0, {" in said[0]
    assert " | {'interpolate': 'step'" in said[0]


class TestStops:
    WEIGHTS = {"web": 0.6, "code": 0.2, "books": 0.2}  # noqa: RUF012 - 40, 150 and 300 samples

    def config(self, corpus: Corpus, stop: Any, epochs: Any, **changes: Any) -> LoaderConfig:
        return config_for(corpus, Mixture(self.WEIGHTS, stop=stop), epochs=epochs, **changes)

    def whole(self, steps: list[Step]) -> dict[str, int]:
        """Source -> samples that were given."""
        return Counter(name for name, *_ in {piece[:4] for step in steps for piece in step.pieces()})

    @pytest.mark.parametrize("last_step", ["fill", "drop"])
    def test_the_first(self, mixed: Corpus, last_step: Any) -> None:
        config = self.config(mixed, "first", {"web": 2, "code": 1, "books": None}, last_step=last_step)
        steps = run_world(config, keep_states=True)
        found = self.whole(steps)
        with World(config) as world:
            world.steps()
            state = world.state()
        assert state["ended"] is True
        for dp, prefetch in ((2, 0), (1, 4)):
            again = run_world(
                self.config(
                    mixed, "first", {"web": 2, "code": 1, "books": None}, last_step=last_step, prefetch_steps=prefetch
                ),
                dp,
            )
            assert certificates(again) == certificates(steps)
        for at in (len(steps) // 2, len(steps) - 2, len(steps) - 1):
            assert certificates(run_world(config, state=steps[at - 1].state)) == certificates(steps)[at:]
        last = list(steps[-1].microbatches())[-1].info
        assert last.is_last_in_stream
        if last_step == "fill":
            assert found["web"] == 80
            assert all(abs(found[name] - 80 / 3) <= 2 for name in ("code", "books"))
        counts = {name: source["dropped"].get("stopped", 0) for name, source in state["sources"].items()}
        late = {name: source["dropped"].get("last_step", 0) for name, source in state["sources"].items()}
        assert counts["books"] == 0, "it is endless"
        assert counts["web"] == 0
        assert bool(sum(late.values())) == (last_step == "drop")

    def test_what_is_left_over_is_counted(self, mixed: Corpus) -> None:
        """Of Parquet the records are known beforehand; web and books are."""
        config = self.config(mixed, ["web"], {"web": 1, "code": 1, "books": 2})
        with World(config) as world:
            found = self.whole(world.steps())
            state = world.state()
        assert found["web"] == 40
        assert state["sources"]["books"]["dropped"] == {"stopped": 600 - found["books"]}
        assert state["sources"]["web"]["dropped"] == {}

    def test_named_ones(self, mixed: Corpus) -> None:
        epochs = {"web": 1, "code": 1, "books": None}
        found = self.whole(run_world(self.config(mixed, ["web", "code"], epochs)))
        assert (found["web"], found["code"]) == (40, 150)
        assert 140 <= found["books"] <= 165

    def test_all_is_what_it_was(self, mixed: Corpus) -> None:
        config = config_for(mixed, dict(self.WEIGHTS), epochs=1)
        assert certificates(run_world(self.config(mixed, "all", 1))) == certificates(run_world(config))

    def test_it_is_part_of_the_order(self, mixed: Corpus) -> None:
        state = run_world(self.config(mixed, "first", 1), steps=2, keep_states=True)[-1].state
        with pytest.raises(StateError, match=r"mixture_stop: 'first' \| 'all' \| the end of the stream differs"):
            run_world(self.config(mixed, "all", 1), state=state)
        forced = self.config(mixed, "all", 1, force_resume=["mixture_stop"])
        assert len(self.whole(run_world(forced, state=json.loads(json.dumps(state))))) == 3


class TestPasses:
    def test_stop_rules_are_refused(self, mixed: Corpus) -> None:
        config = config_for(mixed, Mixture({"web": 1, "code": 1, "books": 1}, stop=["web"]), epochs=1)
        with pytest.raises(ConfigError, match=r"stop=\('web',\) ends the stream before .* in passes"):
            MegaScaleLoader(config, passes=True)

    def test_sources_that_join_are_refused(self, mixed: Corpus) -> None:
        with pytest.raises(ConfigError, match=r"\['web', 'books'\] join or leave, and in passes"):
            MegaScaleLoader(config_for(mixed, ramp()), passes=True)

    def test_a_schedule_that_keeps_all(self, mixed: Corpus) -> None:
        points = [(0, {"web": 9.0, "code": 1.0, "books": 1.0}), (20, {"web": 1.0, "books": 9.0})]
        config = config_for(mixed, Mixture.schedule(points, interpolate="linear"))
        with World(config, passes=True) as world:
            first = world.steps()
            world.reiterate()
            second = world.steps()
        for steps in (first, second):
            pieces = [piece for step in steps for piece in step.pieces()]
            assert len(pieces) == len(set(pieces))
            assert len({piece[:4] for piece in pieces}) == 490
