"""A source that joins by schedule, or by a change to come, is described before the step that it joins at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascale_lightning.mixtures import WeightSchedule
from megascale_lightning.types import MixtureChange
from tests.planning.fakes import Drive, FakeData

JOIN = 12
JOINED = (1.0, 1.0, 3.0)
SCHEDULE = WeightSchedule((0, JOIN), ((1.0, 1.0, 0.0), JOINED), "step")


def described(drive: Drive) -> set[int]:
    return {key.source for key in drive.data.described}


@pytest.mark.parametrize("told", [False, True])
def test_it_is_described_before_it_joins_and_not_from_the_start(told: bool) -> None:
    spec = FakeData([300] * 3).spec(rows=4, epochs=None, weights=[1.0, 1.0, 0.0], schedule=None if told else SCHEDULE)
    drive = Drive(FakeData([300] * 3), spec)
    if told:
        drive.planner.set_changes("train", "g", (MixtureChange(JOIN, np.array(JOINED)),))
    drive.run(JOIN - 4)
    drive.serve()
    assert described(drive) == {0, 1}
    drive.run(2)
    drive.serve()
    assert described(drive) == {0, 1, 2}
    assert not any((plan.pieces["source"] == 2).any() for plan in drive.plans)
    drive.run(4)
    assert (drive.plans[JOIN + 1].pieces["source"] == 2).any()


def test_a_schedule_is_the_same_as_changes_at_its_points() -> None:
    scheduled = Drive(FakeData([300] * 3), FakeData([300] * 3).spec(rows=4, epochs=None, schedule=SCHEDULE))
    changed = Drive(FakeData([300] * 3), FakeData([300] * 3).spec(rows=4, epochs=None, weights=[1.0, 1.0, 0.0]))
    changed.planner.set_changes("train", "g", (MixtureChange(JOIN, np.array(JOINED)),))
    scheduled.run(20)
    changed.run(20)
    assert [scheduled.states[at].certificate for at in range(21)] == [
        changed.states[at].certificate for at in range(21)
    ]
    assert not scheduled.states[20].replaced
    assert changed.states[20].replaced


@pytest.mark.parametrize("padded", [False, True])
def test_a_stop_rule_ends_the_stream_where_its_source_is_due_again(padded: bool) -> None:
    """Inside a step, as between two, and beside an endless source; the last step is known to be the last."""
    data = FakeData([30, 300])
    spec = data.spec(rows=50, epochs=None, stop=("s0",), padded=padded, last_step="fill")
    drive = Drive(data, replace(spec, sources=(replace(spec.sources[0], epochs=1), spec.sources[1])))
    plans = drive.run()
    assert drive.states[drive.step].ended
    given = [[tuple(piece) for piece in np.concatenate([plan.pieces for plan in plans])[["source", "row"]]]]
    rows = [{row for source, row in given[0] if source == index} for index in (0, 1)]
    assert rows[0] == set(range(30))
    assert 58 <= len(rows[1]) <= 62


def test_the_last_step_is_known_to_be_the_last() -> None:
    """A stop rule may end the stream anywhere, so there is a step of lookahead everywhere."""
    data = FakeData([30, 300])
    spec = data.spec(rows=8, epochs=None, stop="first", prefetch_steps=0)
    drive = Drive(data, replace(spec, sources=(replace(spec.sources[0], epochs=1), spec.sources[1])))
    ends = []
    while not ends or not ends[-1]:
        window = drive.window()
        assert len(window.steps) == 1, "the end was found out only by asking for a step that is not there"
        drive.step += 1
        drive.planner.consumed("train", "g", {0: drive.step - 1})
        ends.append(window.states[-1].ended)
    assert len(ends) > 3
