"""`max_bad_fraction` in the planner: a function of the records in their order, whatever cuts and resumes there are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megascale_lightning.checkpointing.state import from_json, restart, to_json
from megascale_lightning.errors import DataError, EmptySourceError
from tests.planning.fakes import Drive, FakeData

REASONS = ("", "filtered", "read_error", "transform_error")


class BadData(FakeData):
    """Every `drop_every`-th record is dropped for `reason`."""

    reason = 2

    def describe(self, key: Any) -> Any:
        meta = super().describe(key)
        return replace(meta, reason=meta.reason * self.reason, reasons=REASONS)


def data_of(drop_every: int, reason: int = 2, **sizes: Any) -> BadData:
    data = BadData(**{"sizes": [50, 600], "drop_every": drop_every, "longest": 150, **sizes})
    data.reason = reason
    return data


def spec_of(data: BadData, limit: float | None, **changes: Any) -> Any:
    spec = data.spec(**{"epochs": None, "weights": [0.2, 1.0], **changes})
    sources = (spec.sources[0], *(replace(source, max_bad_fraction=limit) for source in spec.sources[1:]))
    return replace(spec, sources=sources)


def fail(drive: Drive, count: int = 1, steps: int = 400) -> tuple[int, str]:
    """The step that cannot be planned, and why."""
    with pytest.raises(DataError) as caught:
        drive.run(steps, count)
    assert type(caught.value) is DataError
    return drive.step, str(caught.value)


def test_it_ends_where_the_records_say() -> None:
    """Not before 100 records, and at the same step by single steps, from any saved state, with others beside it."""
    data = data_of(10)
    step, message = fail(Drive(data, spec_of(data, 0.05)))
    assert step > 5
    for word in ("'s1'", "'train'", "max_bad_fraction=0.05", "'read_error'", 'on_error="quarantine"'):
        assert word in message
    bad, records = (int(word) for word in message.partition("epoch 0: ")[2].split()[::2][:2])
    assert records >= 100
    assert bad / records > 0.05
    drive = Drive(data, spec_of(data, 0.05))
    drive.run(step)
    names = [source.name for source in drive.spec.sources]
    counted = [drive.states[at].checked[1][0] for at in range(1, step + 1)]
    assert counted == sorted(counted)
    assert counted[-1] < 100 <= records
    for at in (0, 3, step - 1, step):
        saved = json.loads(json.dumps(to_json(drive.states[at], names)))
        assert fail(Drive(data, spec_of(data, 0.05), from_json(saved, names))) == (step, message)
    padded = [fail(Drive(data, spec_of(data, 0.05, padded=True, mixture_unit="tokens"))) for _ in range(2)]
    assert padded[0] == padded[1]


def test_a_window_of_several_steps_fails_as_a_whole() -> None:
    data = data_of(10)
    step, message = fail(Drive(data, spec_of(data, 0.05)))
    for count in (2, 3, 7):
        at, said = fail(Drive(data, spec_of(data, 0.05)), count)
        assert said == message
        assert step - count < at <= step


@pytest.mark.parametrize(("drop_every", "limit"), [(10, 0.2), (10, 0.11), (0, 0.0), (3, 0.4)])
def test_below_the_limit_nothing_changes(drop_every: int, limit: float) -> None:
    data = data_of(drop_every)
    with_limit, without = Drive(data, spec_of(data, limit)), Drive(data, spec_of(data, None))
    with_limit.run(120)
    without.run(120)
    assert with_limit.states[120].certificate == without.states[120].certificate
    assert with_limit.states[120].dropped == without.states[120].dropped
    assert all(checked == (0, 0) for checked in without.states[120].checked)


def test_what_is_counted() -> None:
    """Records and not pieces; bad ones and not those that a policy drops; only of sources with a limit."""
    for reason, expected in ((1, 0), (2, 60), (3, 60)):
        data = data_of(10, reason)
        drive = Drive(data, spec_of(data, 0.5, epochs=1))
        drive.run()
        last = drive.states[max(drive.states)]
        assert last.checked == ((0, 0), (600, expected))
        assert last.dropped[1] == {REASONS[reason]: 60}


def test_fewer_records_than_a_share_is_taken_of() -> None:
    """They are judged when their epoch ends, with those of the epochs before."""
    data = data_of(4, sizes=[50, 40])
    _, message = fail(Drive(data, spec_of(data, 0.2)))
    assert "epoch 0: 10 of 40" in message
    _, message = fail(Drive(data, spec_of(data, 0.2, passes=True)))
    assert "10 of 40" in message
    data = data_of(4, sizes=[50, 1])
    Drive(data, spec_of(data, 0.2)).run(30)


def test_a_source_with_nothing_but_bad_records() -> None:
    """It ends after 100 of them, instead of going through all of them; what a policy drops is another matter."""
    data = data_of(1, sizes=[50, 4000])
    drive = Drive(data, spec_of(data, 0.1))
    _, message = fail(drive)
    assert "more than max_bad_fraction=0.1" in message
    assert sum(key.source == 1 for key in data.described) < 20
    data = data_of(1, reason=1, sizes=[50, 200])
    with pytest.raises(EmptySourceError):
        Drive(data, spec_of(data, 0.1)).run(10)


def test_the_state_of_before_there_were_limits() -> None:
    """It has no counts: they begin with the limit, and states without a limit have none to this day."""
    data = data_of(10)
    drive = Drive(data, spec_of(data, None))
    drive.run(12)
    names = [source.name for source in drive.spec.sources]
    saved = to_json(drive.states[12], names)
    assert "checked" not in str(saved)
    state = from_json(saved, names)
    _, message = fail(Drive(data, spec_of(data, 0.05), state))
    records = int(message.partition(" of ")[2].partition(" of ")[2].split()[0])
    assert 100 <= records < 150


def test_a_source_that_begins_anew_is_judged_anew() -> None:
    data = data_of(10)
    drive = Drive(data, spec_of(data, 0.3))
    drive.run(12)
    state = drive.states[12]
    assert state.checked[1][0] > 0
    assert restart(state, [1]).checked == ((0, 0), (0, 0))
    assert restart(state, [0]).checked == state.checked
    names = [source.name for source in drive.spec.sources]
    saved = to_json(state, names)["sources"]["s1"]["checked"]
    assert saved == {"records": state.checked[1][0], "bad": state.checked[1][1]}
    assert all(type(value) is int for value in saved.values())
    assert not np.array_equal(state.sources, drive.states[0].sources)
