"""Changes of mixture and costs at the planner: what is told in time counts, also for a planner that begins anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascale_lightning.errors import StateError
from megascale_lightning.planning.planner import Planner
from megascale_lightning.runtime.plan import RoleRecipe, ToldPlanner
from megascale_lightning.types import CostChange, MixtureChange
from tests.planning.fakes import Drive, FakeData

WEIGHTS = np.array([0.0, 1.0, 3.0])
DATA = FakeData([300, 300, 300])
SPEC = DATA.spec(rows=4, epochs=None, prefetch_steps=64)


def certificates(drive: Drive, steps: int) -> list[bytes]:
    drive.run(steps)
    return [drive.states[step].certificate for step in range(min(drive.states), drive.step + 1)]


def a_planner() -> ToldPlanner:
    settings = {"specs": {"train": SPEC}, "loader_of": lambda key: "loader/0"}
    return ToldPlanner(RoleRecipe(name="planner", factory=Planner, kwargs=settings))


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    drive = Drive(FakeData([300, 300, 300]), SPEC)
    drive.planner.set_changes("train", "g", (MixtureChange(12, WEIGHTS),))
    return certificates(drive, 20)


def test_when_it_is_told_does_not_matter(expected: list[bytes]) -> None:
    for told in (0, 5, 11):
        drive = Drive(FakeData([300, 300, 300]), SPEC)
        drive.run(told)
        drive.planner.set_changes("train", "g", (MixtureChange(12, WEIGHTS),))
        drive.run(20 - told)
        assert drive.states[20].certificate == expected[20]
        assert {piece["source"] for plan in drive.plans[16:] for piece in plan.pieces} == {1, 2}


def test_too_late_is_an_error_not_another_order() -> None:
    drive = Drive(FakeData([300, 300, 300]), SPEC)
    drive.window(13)
    with pytest.raises(StateError, match="step 12 is planned already"):
        drive.planner.set_changes("train", "g", (MixtureChange(12, WEIGHTS),))
    drive.planner.set_changes("train", "g", (MixtureChange(13, WEIGHTS),))
    drive.planner.set_changes("train", "g", (MixtureChange(13, WEIGHTS.copy()),))


def test_costs_too_late_are_an_error_not_other_places() -> None:
    drive = Drive(FakeData([300, 300, 300]), SPEC)
    change = CostChange(12, ({"per_token": 1.0},))
    drive.planner.set_changes("train", "g", (change,))
    drive.window(13)
    drive.planner.set_changes("train", "g", (CostChange(12, ({"per_token": 1.0},)), MixtureChange(13, WEIGHTS)))
    with pytest.raises(StateError, match="step 12 is planned already, so what its rows cost cannot change from step 8"):
        drive.planner.set_changes("train", "g", (replace(change, step=8),))
    with pytest.raises(StateError, match="step 12 is planned already"):
        drive.planner.set_changes("train", "g", (replace(change, costs=()),))


def test_a_planner_that_begins_anew_knows_it_before_anybody_opens(expected: list[bytes]) -> None:
    """A rank whose state was planned before the change was told may come first, and ask for the step it governs."""
    before = Drive(FakeData([300, 300, 300]), SPEC)
    before.run(11)
    state = before.states[11]
    assert not state.changes
    told = a_planner()
    told.tell("train", "g", (MixtureChange(12, WEIGHTS),))
    drive = Drive(FakeData([300, 300, 300]), SPEC, state)
    drive.planner = told.recipe().build()
    drive.planner.open("train", "g", 1, state)
    drive.run(9)
    assert drive.states[20].certificate == expected[20]


def test_another_generation_is_not_told() -> None:
    """What was to come in a stream that was left for another state is not to come there."""
    told = a_planner()
    undisturbed = certificates(Drive(FakeData([300, 300, 300]), SPEC), 15)
    told.tell("train", "old", (MixtureChange(12, WEIGHTS),))
    drive = Drive(FakeData([300, 300, 300]), SPEC)
    drive.planner = told.recipe().build()
    drive.planner.open("train", "g", 0, None)
    assert certificates(drive, 15)[-1] == undisturbed[-1]


def test_a_state_brings_its_changes(expected: list[bytes]) -> None:
    drive = Drive(FakeData([300, 300, 300]), SPEC)
    drive.planner.set_changes("train", "g", (MixtureChange(12, WEIGHTS),))
    drive.run(8)
    state = drive.states[8]
    assert [change.step for change in state.changes] == [12]
    again = Drive(FakeData([300, 300, 300]), SPEC, state)
    again.run(12)
    assert again.states[20].certificate == expected[20]
    assert not again.states[13].changes
    assert again.states[13].sources["weight"].tolist() == WEIGHTS.tolist()
