"""`set_cost`: rows placed by other costs from a step on, the same rows throughout, kept by every state until then."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from megascale_lightning import (
    AttentionCost,
    Balanced,
    CalibratedCost,
    ConfigError,
    DGraph,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    StateError,
    StreamError,
    TokenCount,
)

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Step, World

pytestmark = pytest.mark.timeout(120)

CALL, LEAD, BACK, STEPS = 10, 32, 50, 60
FIRST = CALL + LEAD
COST = CalibratedCost(constant=0.5, per_document=0.25, r2=0.9, num_samples=100)
"""That a row costs by its documents, whatever their lengths."""


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None, weights={"web": 0.6, "code": 0.2, "books": 0.2}),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=8),
        "global_batch_size": 16,
        "strategy": Balanced(AttentionCost(64)),
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 1500,
    }
    return LoaderConfig(**(base | changes))


def places(step: Step | None) -> list[Any]:
    """The rows of each rank and microbatch, and what they are rows of."""
    assert step is not None
    return [step.certificate, *([mb.rows for mb in rank] for rank in step.ranks)]


def run(config: LoaderConfig, *, kill: tuple[int, ...] = (), again: tuple[int, ...] = ()) -> list[Any]:
    """The places of a run that changes its cost once `CALL` steps are consumed."""
    found = []
    with World(config, 2) as world:
        for number in range(STEPS):
            if number in again:
                world.reiterate()
            if number == CALL:
                assert [loader.set_cost(COST) for loader in world.loaders] == [FIRST, None]
                assert world.loaders[0].set_cost(at_step=BACK) == BACK
            if number in kill and config.runtime == "ray":
                os.kill(world.loaders[0]._session.stats()["planner"]["pid"], signal.SIGKILL)
            elif number in kill:
                world.loaders[0]._session._runtime.kill("planner")
            found.append(places(world.step()))
    return found


@pytest.fixture(scope="module")
def expected(mixed: Corpus) -> list[Any]:
    """By the declared cost, by the other one, and by the declared one again."""
    whole = []
    for cost in (AttentionCost(64), COST):
        with World(config_for(mixed, strategy=Balanced(cost)), 2) as world:
            whole.append([places(step) for step in world.steps(STEPS)])
    declared, other = whole
    assert [step[0] for step in declared] == [step[0] for step in other]
    assert all(one != two for one, two in zip(declared[FIRST - 1 : BACK + 1], other[FIRST - 1 : BACK + 1], strict=True))
    return declared[:FIRST] + other[FIRST:BACK] + declared[BACK:]


@pytest.mark.parametrize(("prefetch", "window"), [(0, 1), (4, 1), (4, 5)])
def test_it_governs_the_places_from_its_step_on(mixed: Corpus, expected: list[Any], prefetch: int, window: int) -> None:
    assert run(config_for(mixed, prefetch_steps=prefetch, plan_window=window)) == expected


def test_a_killed_planner_knows_it(mixed: Corpus, expected: list[Any]) -> None:
    """Killed right after the call, around the step, and around the way back."""
    assert run(config_for(mixed), kill=(CALL, CALL + 1, FIRST - 1, FIRST, FIRST + 3, BACK, BACK + 1)) == expected


@pytest.mark.ray
@pytest.mark.slow
def test_so_does_an_actor(mixed: Corpus, expected: list[Any], shared_ray: None) -> None:
    assert run(config_for(mixed, runtime="ray", num_loaders=2), kill=(CALL, FIRST - 1, FIRST + 1)) == expected


def test_a_new_iterator_keeps_it(mixed: Corpus, expected: list[Any]) -> None:
    assert run(config_for(mixed), again=(CALL + 2, FIRST - 1, FIRST, FIRST + 1, BACK)) == expected


@pytest.mark.parametrize("stop", [CALL, CALL + 1, FIRST - 1, FIRST, FIRST + 1, BACK, BACK + 1])
def test_a_state_brings_it_along(mixed: Corpus, expected: list[Any], stop: int) -> None:
    with World(config_for(mixed), 2) as world:
        world.steps(CALL)
        world.loaders[0].set_cost(COST)
        world.loaders[0].set_cost(at_step=BACK)
        world.steps(stop - CALL)
        state = json.loads(json.dumps(world.loaders[0].state_dict(), allow_nan=False))
    given = {"constant": 0.5, "per_document": 0.25}
    to_come = [change for change in [[FIRST, [given]], [BACK, []]] if change[0] >= stop]
    now = [given] if FIRST < stop <= BACK else []
    assert state.get("costs", {"now": [], "changes": []}) == {"now": now, "changes": to_come}
    with World(config_for(mixed), 2, state=state) as world:
        assert [places(step) for step in world.steps(STEPS - stop)] == expected[stop:]


def test_states_without_it_say_nothing_of_it(mixed: Corpus) -> None:
    with World(config_for(mixed)) as world:
        world.steps(3)
        world.loaders[0].set_mixture({"web": 1.0})
        assert "costs" not in world.state()


def test_both_changes_at_one_step(mixed: Corpus) -> None:
    """Neither takes the other's place, whichever comes first and wherever it is saved."""

    def read(*, mixture_first: bool, stop: int = 0) -> list[Any]:
        def change(at: int, loader: MegaScaleLoader) -> None:
            if (at == 0) == mixture_first:
                loader.set_mixture({"web": 0.0}, at_step=LEAD + 5)
            else:
                loader.set_cost(COST, at_step=LEAD + 5)

        with World(config_for(mixed), 2) as world:
            change(0, world.loaders[0])
            found = world.steps(stop)
            state = world.loaders[0].state_dict()
        with World(config_for(mixed), 2, state=state) as world:
            change(1, world.loaders[0])
            found += world.steps(LEAD + 15 - stop)
        return [places(step) for step in found]

    whole = read(mixture_first=True)
    assert read(mixture_first=False) == whole
    assert read(mixture_first=True, stop=4) == read(mixture_first=False, stop=4) == whole
    with World(config_for(mixed, strategy=Balanced(COST)), 2) as world:
        world.loaders[0].set_mixture({"web": 0.0}, at_step=LEAD + 5)
        assert [places(step) for step in world.steps(LEAD + 15)][LEAD + 5 :] == whole[LEAD + 5 :]


def test_edited_weights_leave_it_alone(mixed: Corpus) -> None:
    with World(config_for(mixed)) as world:
        world.loaders[0].set_mixture({"web": 0.5})
        world.loaders[0].set_cost(COST)
        state = world.state()
    with World(config_for(mixed, weights={"web": 0.0}), state=state) as world:
        found = world.state()
        assert (found["mixture"]["changes"], found["costs"]) == ([], state["costs"])


def two_costs(graph: DGraph) -> DGraph:
    return graph.mix().pack().distribute("dp").cost(TokenCount(), AttentionCost(64)).balance()


class TestRefusals:
    @pytest.mark.parametrize(
        ("costs", "at_step", "said"),
        [
            ((COST,), 31, r"set_cost\(at_step=31\): steps up to 31 may be planned"),
            ((COST, COST), None, r"declares 1 costs \(AttentionCost\), 2 are given"),
            ((AttentionCost(),), None, "a CalibratedCost is wanted"),
            ((None,), None, "a CalibratedCost is wanted, .* not None"),
            ((CalibratedCost(per_patch=1.0),), None, r"by \['patches'\] of the samples, .* lengths alone"),
        ],
    )
    def test_costs_and_steps(self, mixed: Corpus, costs: Any, at_step: int | None, said: str) -> None:
        with World(config_for(mixed)) as world:
            with pytest.raises(ConfigError, match=said):
                world.loaders[0].set_cost(*costs, at_step=at_step)
            assert "costs" not in world.state()

    def test_other_streams(self, mixed: Corpus) -> None:
        config = config_for(mixed, val_sources=mixed.sources())
        with MegaScaleLoader(config, stream="val/0") as loader, pytest.raises(StreamError, match="set_cost"):
            loader.set_cost(COST)

    def test_a_state_whose_costs_fit_another_strategy(self, mixed: Corpus) -> None:
        with World(config_for(mixed, strategy=two_costs)) as world:
            world.loaders[0].set_cost(COST, COST)
            state = world.state()
        with pytest.raises(StateError, match=r"set_cost\(\), which do not fit the strategy: .* 2 are given"):
            World(config_for(mixed), state=state)
        with World(config_for(mixed, force_resume=["costs"]), state=state) as world:
            assert "costs" not in world.state()
        for wrong in ({"per_word": 1.0}, {"per_token": "1"}):
            state["costs"]["changes"] = [[LEAD, [wrong, {}]]]
            with pytest.raises(StateError, match=r"damaged.*costs.*per_"):
                World(config_for(mixed, strategy=two_costs), state=state)
