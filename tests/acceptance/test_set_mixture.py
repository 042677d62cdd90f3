"""`set_mixture`: other weights from a step on, the same data whatever the timing, kept by every state until then."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from megascale_lightning import ConfigError, LoaderConfig, MegaScaleLoader, PackedRows, Source, StreamError
from megascale_lightning.checkpointing.state import readable

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Step, World, run_world

pytestmark = pytest.mark.timeout(120)

CALL, LEAD = 10, 32
WEIGHTS = {"web": 0.1, "code": 0.8, "books": 0.1}


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None, weights={"web": 0.6, "code": 0.2, "books": 0.2}),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=8),
        "global_batch_size": 4,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 1500,
    }
    return LoaderConfig(**(base | changes))


def run(config: LoaderConfig, dp: int, *, call: int = CALL, steps: int = 60, kill: tuple[int, ...] = ()) -> list[Step]:
    """The steps of a run that changes the mixture once `call` steps are consumed."""
    found = []
    with World(config, dp) as world:
        for number in range(steps):
            if number == call:
                told = [loader.set_mixture(WEIGHTS) for loader in world.loaders]
                assert told == [call + LEAD] + [None] * (dp - 1)
            if number in kill:
                world.loaders[0]._session._runtime.kill("planner")
            step = world.step()
            assert step is not None
            found.append(step)
    return found


@pytest.fixture(scope="module")
def expected(mixed: Corpus) -> list[str]:
    return [step.certificate for step in run(config_for(mixed), 1)]


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_the_same_certificate_whatever_is_read_ahead(
    mixed: Corpus, expected: list[str], dp: int, prefetch: int
) -> None:
    for window in (1, 5):
        config = config_for(mixed, prefetch_steps=prefetch, plan_window=window)
        assert [step.certificate for step in run(config, dp)] == expected


def test_it_governs_the_draws_from_its_step_on(mixed: Corpus, expected: list[str]) -> None:
    undisturbed = run_world(config_for(mixed), steps=60)
    changed = run(config_for(mixed), 1)
    first = next(i for i, (a, b) in enumerate(zip(undisturbed, changed, strict=True)) if a.certificate != b.certificate)
    assert first == CALL + LEAD
    drawn = Counter(
        piece[0] for step in run(config_for(mixed), 1, steps=120)[CALL + LEAD + 5 :] for piece in step.pieces()
    )
    assert drawn["code"] / drawn.total() == pytest.approx(0.8, abs=0.06)


def test_a_killed_planner_knows_the_change(mixed: Corpus, expected: list[str]) -> None:
    """Killed right after the call, right before the step, and behind it."""
    for dp in (1, 2):
        killed = run(config_for(mixed), dp, kill=(CALL, CALL + 1, CALL + LEAD - 1, CALL + LEAD, CALL + LEAD + 3))
        assert [step.certificate for step in killed] == expected


@pytest.mark.parametrize("stop", [CALL, CALL + 1, CALL + LEAD - 1, CALL + LEAD, CALL + LEAD + 1])
def test_a_state_between_call_and_effect_brings_it_along(mixed: Corpus, expected: list[str], stop: int) -> None:
    with World(config_for(mixed)) as world:
        for _ in range(CALL):
            world.step()
        world.loaders[0].set_mixture(WEIGHTS)
        world.steps(stop - CALL)
        state = json.loads(json.dumps(world.loaders[0].state_dict()))
    steps = [change[0] for change in state["mixture"]["changes"]]
    assert steps == ([CALL + LEAD] if stop <= CALL + LEAD else [])
    for dp in (1, 2):
        with World(config_for(mixed), dp, state=state) as world:
            found = [step.certificate for step in world.steps(60 - stop)]
        assert found == expected[stop:]


def test_a_new_iterator_keeps_it(mixed: Corpus, expected: list[str]) -> None:
    found = []
    with World(config_for(mixed)) as world:
        for number in range(60):
            if number in (CALL + 2, CALL + LEAD - 1):
                world.reiterate()
            if number == CALL:
                world.loaders[0].set_mixture(WEIGHTS)
            step = world.step()
            assert step is not None
            found.append(step.certificate)
    assert found == expected


def test_before_the_first_batch_and_several_changes(mixed: Corpus) -> None:
    def read(prefetch: int) -> list[str]:
        with World(config_for(mixed, prefetch_steps=prefetch)) as world:
            loader = world.loaders[0]
            assert loader.set_mixture({"web": 0.0}) == LEAD
            assert loader.set_mixture({"web": 0.3}, at_step=50) == 50
            assert loader.set_mixture({"code": 0.0}, at_step=45) == 45
            changes = loader.state_dict()["mixture"]["changes"]
            assert [change[0] for change in changes] == [LEAD, 45, 50]
            steps = world.steps(70)
        late = Counter(piece[0] for step in steps[LEAD + 3 : 45] for piece in step.pieces())
        assert late["web"] == 0 < late["code"]
        last = Counter(piece[0] for step in steps[55:] for piece in step.pieces())
        assert last["web"] > 0
        return [step.certificate for step in steps]

    assert read(0) == read(4)


def test_in_passes(mixed: Corpus) -> None:
    def read(prefetch: int) -> list[str]:
        with World(config_for(mixed, prefetch_steps=prefetch), passes=True) as world:
            first = world.steps(4)
            world.loaders[0].set_mixture(WEIGHTS)
            first += world.steps()
            world.reiterate()
            second = world.steps()
        for steps in (first, second):
            pieces = [piece for step in steps for piece in step.pieces()]
            assert len(pieces) == len(set(pieces))
        assert len(first) > 4 + LEAD
        return [step.certificate for step in first + second]

    assert read(0) == read(4)


def test_edited_weights_are_a_change_at_the_resume(mixed: Corpus) -> None:
    """The config's own edit counts from the first step on, and for more than what was to come."""
    with World(config_for(mixed)) as world:
        world.steps(CALL)
        world.loaders[0].set_mixture(WEIGHTS)
        state = world.state()
    edited = config_for(mixed, weights={"web": 0.0})
    with World(edited, state=state) as world:
        begun = readable(world.state())["mixture"]
        assert begun["weights"] == {"web": 0.0, "code": 0.2, "books": 0.2}
        assert begun["changes"] == {}
        drawn = Counter(piece[0] for step in world.steps(60)[5:] for piece in step.pieces())
    assert drawn["web"] == 0 < drawn["code"]
    with World(config_for(mixed), state=state) as world:
        assert len(world.state()["mixture"]["changes"]) == 1, "nothing was edited: the change is still to come"


def test_weights_in_force_outlive_a_resume(mixed: Corpus) -> None:
    with World(config_for(mixed)) as world:
        world.loaders[0].set_mixture(WEIGHTS)
        world.steps(LEAD + 2)
        state = world.state()
    assert readable(state)["mixture"]["weights"] == WEIGHTS
    assert readable(state)["mixture"]["declared"] == {"web": 0.6, "code": 0.2, "books": 0.2}
    with World(config_for(mixed), state=state) as world:
        assert world.state()["mixture"] == state["mixture"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("weights", "at_step", "message"),
        [
            ({"web": 1.0}, LEAD - 1, "mixture_lead_steps=32"),
            ({"web": 1.0}, "40", r"set_mixture\(at_step='40'\): a step is a whole number"),
            ({"web": 1.0}, 40.5, "a step is a whole number"),
            ({"wub": 1.0}, None, "wub"),
            ({"web": -1.0}, None, "at least 0"),
            ({"web": float("nan")}, None, "finite"),
            ({"web": 0, "code": 0, "books": 0}, None, "above 0"),
        ],
    )
    def test_bad_changes(self, mixed: Corpus, weights: Any, at_step: Any, message: str) -> None:
        with World(config_for(mixed)) as world, pytest.raises(ConfigError, match=message):
            world.loaders[0].set_mixture(weights, at_step)

    @pytest.mark.parametrize("given", ["x", None, 3, ["web"]])
    def test_no_mapping(self, mixed: Corpus, given: Any) -> None:
        with (
            MegaScaleLoader(config_for(mixed)) as loader,
            pytest.raises(ConfigError, match=r"set_mixture takes weights by source name, such as .*; the sources are"),
        ):
            loader.set_mixture(given)

    def test_not_for_evaluation(self, mixed: Corpus) -> None:
        config = config_for(mixed, val_sources=mixed.sources())
        with MegaScaleLoader(config, stream="val/0") as loader, pytest.raises(StreamError, match="val/0"):
            loader.set_mixture(WEIGHTS)

    def test_reach_beyond_the_lead(self, mixed: Corpus) -> None:
        with (
            pytest.raises(ConfigError, match="mixture_lead_steps=41"),
            World(config_for(mixed, prefetch_steps=30, plan_window=10)),
        ):
            pass

    @pytest.mark.parametrize(("settings", "least"), [({"mixture_lead_steps": 2}, 3), ({"plan_window": 31}, 33)])
    def test_no_room_for_a_batch_read_ahead(self, mixed: Corpus, settings: Any, least: int) -> None:
        """A trainer may ask for a batch before it has taken the step of the last one, and would wait for ever."""
        with (
            pytest.raises(ConfigError, match=f"mixture_lead_steps={least}$"),
            World(config_for(mixed, prefetch_steps=None, **{"plan_window": None, **settings})),
        ):
            pass


def test_a_change_every_step_leaves_a_small_state(tmp_path: Any) -> None:
    """What is past is not kept: after 100,000 changes the state is as small as after 40."""
    names = [f"source-{index:03d}" for index in range(8)]
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 50)
    sources = [Source(name, str(tmp_path / f"{name}.jsonl")) for name in names]
    config = LoaderConfig(sources=sources, rows=PackedRows(8, 1, pack_ahead=4), global_batch_size=1, runtime="local")
    with MegaScaleLoader(config) as loader:
        steps = iter(loader)
        sizes = []
        for number in range(200):
            next(steps)
            loader.set_mixture({name: 1 + (number * 7 + index) % 13 / 3 for index, name in enumerate(names)})
            sizes.append(len(json.dumps(loader.state_dict())))
        assert len(loader._pending) <= LEAD + 1, "nor is it kept beside the state"
    assert max(sizes) < 8 << 10
    assert sizes[-1] < sizes[60] * 1.05
