"""The data constructor: what it asks for and when, what it shares and frees, and how errors get to those who ask."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from megascale_lightning.errors import DataError, NotOpenError, ReplayError, StreamError
from megascale_lightning.types import BatchWindow, Call, NotYet, Ragged, SampleBlock
from tests.constructing.fakes import SOURCES, World, make_spec, make_step, payload, planned, take


def assert_same(one: BatchWindow, other: BatchWindow) -> None:
    for entry in fields(BatchWindow):
        left, right = getattr(one, entry.name), getattr(other, entry.name)
        if entry.name in ("tokens", "samples"):
            assert left.keys() == right.keys()
            for name in left:
                assert left[name].dtype == right[name].dtype
                np.testing.assert_array_equal(left[name], right[name])
        elif isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
        elif entry.name == "states":
            assert [s.certificate for s in left] == [s.certificate for s in right]
        elif entry.name != "reports":
            assert left == right


def rows_by_hand(world: World, group: int, steps: range) -> list[list[Any]]:
    """Pieces per row of a group, straight from the plans."""
    found: list[list[Any]] = []
    for step in steps:
        plan = make_step(world.spec, step)
        bounds = plan.row_offsets
        rows = plan.placement[group].ravel()
        found += [[] if row < 0 else list(plan.pieces[bounds[row] : bounds[row + 1]]) for row in rows]
    return found


@pytest.mark.parametrize("group", [0, 1])
def test_a_window_holds_the_rows_of_its_group_in_place_order(group: int) -> None:
    world = World()
    window = world.fetch(0, group=group)
    rows = rows_by_hand(world, group, range(3))
    assert (window.first_step, window.num_steps, window.num_microbatches) == (0, 3, 3)
    assert np.diff(window.row_offsets).tolist() == [len(row) for row in rows]
    pieces = [piece for row in rows for piece in row]
    assert window.pieces.tolist() == [piece.tolist() for piece in pieces]
    samples = [payload(piece) for piece in pieces]
    for name in ("input_ids", "loss_mask"):
        np.testing.assert_array_equal(window.tokens[name], np.concatenate([sample[name] for sample in samples]))
    np.testing.assert_array_equal(window.samples["score"], [sample["score"] for sample in samples])
    assert window.samples["name"].tolist() == [sample["name"] for sample in samples]
    assert window.step_loss_tokens.tolist() == [make_step(world.spec, step).step_loss_tokens for step in range(3)]
    assert [state.step for state in window.states] == [0, 1, 2, 3]
    assert [(report.step, report.balance["max_over_mean"]) for report in window.reports] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("num_sources", "dtype"), [(2, np.uint16), (3, np.int32)])
def test_ids_are_as_narrow_as_all_blocks_allow(num_sources: int, dtype: Any) -> None:
    world = World()
    plan = world.planner.plan

    def narrowed(*args: Any) -> Any:
        window: Any = plan(*args)
        for step in window.steps:
            step.pieces["source"] %= num_sources
        return window

    world.faults["plan"] = narrowed
    assert world.fetch(0).tokens["input_ids"].dtype == dtype


def test_each_loader_is_asked_once_and_part_by_part() -> None:
    world = World()
    world.ask(0)
    (plan,) = world.constructor.wants()
    assert plan == Call("planner", "plan", ("train", "g", 0, 3))
    assert world.constructor.wants() == []
    assert isinstance(world.ask(0), NotYet)
    assert world.constructor.wants() == []
    world.constructor.answered(plan, world.answer(plan))
    takes = [call for call in world.constructor.wants() if call.method == "take"]
    assert sorted(call.target for call in takes) == ["loader/0", "loader/1"]
    assert not [call for call in world.constructor.wants() if call.method == "take"]
    for call in takes:
        keys = [request.key for request in call.args[0]]
        assert len(set(keys)) == len(keys)
        for request in call.args[0]:
            assert f"loader/{request.key.window % 2}" == call.target
            for name in ("source", "epoch", "window", "part"):
                assert (request.pieces[name] == getattr(request.key, name)).all()
            assert (np.diff(request.pieces["entry"]) >= 0).all()
    waiting = world.ask(0)
    assert isinstance(waiting, NotYet)
    assert "loader/0, loader/1" in waiting.reason


def test_all_ranks_of_a_group_get_the_same_object() -> None:
    world = World(clients=3)
    first = world.fetch(0, client=0)
    before = len(world.calls)
    assert world.fetch(0, client=1) is first
    assert world.fetch(2, client=1) is first
    assert len(world.calls) == before
    assert world.fetch(0, client=2, group=1) is not first
    assert not planned(world.calls[before:])


def test_it_reads_ahead_until_the_planner_refuses_and_goes_on_when_a_step_is_consumed() -> None:
    world = World()
    world.fetch(0)
    # Four steps ahead of step 0: the windows at 0 and 3 are allowed, the one at 6 is asked for and refused.
    assert planned(world.calls) == [0, 3, 6]
    assert sum(call.method == "take" for call in world.calls) == 4
    assert world.play() == []
    world.fetch(3, consumed=1)
    assert [call.method for call in world.calls[7:9]] == ["consumed", "plan"]
    assert world.calls[7].args == ("train", "g", {0: 1})
    assert planned(world.calls) == [0, 3, 6, 6, 9]


def test_a_notice_of_a_consumed_step_is_passed_on() -> None:
    world = World()
    world.fetch(0)
    world.constructor.consumed("train", "g", 0, 2)
    assert planned(world.play()) == [6, 9]
    assert world.planner.clients == {0: 2}
    world.constructor.consumed("train", "g", 0, 1)
    world.constructor.consumed("train", "g", 5, 9)
    world.constructor.consumed("train", "other", 0, 9)
    assert world.play() == []


def test_consumed_steps_are_told_one_call_at_a_time_with_the_latest_values() -> None:
    world = World(clients=2)
    world.fetch(0, client=0)
    world.fetch(0, client=1)
    world.ask(3, client=0, consumed=0)
    (told,) = [call for call in world.constructor.wants() if call.method == "consumed"]
    world.ask(3, client=0, consumed=1)
    world.ask(3, client=1, consumed=0)
    world.ask(3, client=0, consumed=2)
    assert not [call for call in world.constructor.wants() if call.method == "consumed"]
    world.constructor.answered(told, world.answer(told))
    (told,) = [call for call in world.constructor.wants() if call.method == "consumed"]
    assert told.args[2] == {0: 2, 1: 0}


def test_a_refusal_that_crossed_the_news_is_not_the_last_word() -> None:
    world = World()
    world.fetch(0)
    world.ask(3, consumed=1)
    told, plan = world.constructor.wants()
    assert (told.method, plan.method, plan.args[2]) == ("consumed", "plan", 6)
    world.constructor.answered(plan, NotYet("too far ahead"))
    assert world.constructor.wants() == []
    world.constructor.answered(told, world.answer(told))
    assert planned(world.play())[0] == 6


def test_what_could_not_be_told_is_told_with_the_next_news() -> None:
    world = World(clients=2)
    world.fetch(0, client=0)
    world.fetch(0, client=1)
    world.faults["consumed"] = RuntimeError("away")
    world.ask(3, client=0, consumed=1)
    assert [call.method for call in world.play()].count("consumed") == 1
    world.ask(3, client=1, consumed=0)
    world.play()
    assert world.planner.clients == {0: 1, 1: 0}


def test_a_refused_window_is_asked_for_again_when_the_client_comes_back() -> None:
    world = World()
    world.faults["plan"] = NotYet("heads are missing")
    world.ask(0)
    assert planned(world.play()) == [0]
    # The runtime's own retry after the answer must not ask again, or the two would spin.
    assert world.ask(0) == NotYet("heads are missing")
    assert world.play() == []
    world.ask(0)
    assert planned(world.play())[0] == 0
    assert isinstance(world.ask(0), BatchWindow)


def test_windows_below_the_watermark_are_freed_and_built_again_for_who_comes_late() -> None:
    world = World(clients=2)
    first = world.fetch(0, client=0)
    world.planner.clients = {0: -1}
    for step in (3, 6, 9):
        world.fetch(step, client=0, consumed=step - 1)
    assert first.first_step == 0
    held = world.constructor.stats()["windows"]
    assert held <= 4
    again = world.fetch(0, client=1)
    assert again is not first
    assert_same(again, first)
    assert world.fetch(0, client=1) is again


def test_the_slowest_client_holds_back_what_is_freed() -> None:
    world = World(clients=2)
    first = world.fetch(0, client=0)
    assert world.fetch(0, client=1) is first
    world.fetch(3, client=0, consumed=2)
    assert world.fetch(0, client=1) is first
    world.fetch(3, client=1, consumed=2)
    world.fetch(6, client=1, consumed=2)
    assert world.fetch(0, client=1, consumed=2) is not first


def test_a_client_that_has_not_come_yet_holds_back_what_is_freed() -> None:
    world = World(clients=2)
    first = world.fetch(0, client=0)
    world.fetch(3, client=0, consumed=2)
    assert world.fetch(0, client=1) is first


def test_a_long_run_holds_a_bounded_number_of_windows() -> None:
    world = World()
    for step in range(0, 90, 3):
        world.fetch(step, consumed=step - 1)
        assert world.constructor.stats()["windows"] <= 5
    assert planned(world.calls) == sorted(planned(world.calls))


def test_a_window_asked_for_in_between_begins_there() -> None:
    world = World()
    world.planner.clients = {0: 99}
    window = world.fetch(100, consumed=99)
    assert (window.first_step, window.num_steps) == (100, 3)
    assert planned(world.calls) == [100, 103, 106]
    assert world.fetch(102, consumed=99) is window


def test_nothing_before_the_first_question_is_read() -> None:
    world = World()
    world.planner.clients = {0: 99}
    world.fetch(100, consumed=-1)
    assert min(planned(world.calls)) == 100


@pytest.mark.parametrize("knows_end", [True, False])
def test_the_end_is_a_window_without_steps(knows_end: bool) -> None:
    world = World(num_steps=5, clients=2, knows_end=knows_end)
    last = world.fetch(3, consumed=-1)
    assert last.num_steps == 2
    end = world.fetch(5, consumed=2)
    assert (end.first_step, end.num_steps, len(end.row_offsets), len(end.states)) == (5, 0, 1, 1)
    assert end.tokens["input_ids"].shape == (0,)
    assert world.fetch(5, client=1, group=1, consumed=4) is end
    assert 5 not in planned(world.calls)
    world.fetch(5, consumed=4)
    assert not planned(world.play())


@pytest.mark.parametrize("num_steps", [0, 3])
def test_an_empty_answer_of_the_planner_is_the_end(num_steps: int) -> None:
    world = World(num_steps=num_steps, knows_end=False)
    assert world.fetch(num_steps, consumed=num_steps - 1).num_steps == 0
    assert planned(world.calls) == [num_steps]


@pytest.mark.parametrize("error", [DataError("bad file"), NotOpenError("open it")])
def test_a_plan_that_failed_is_raised_to_every_asker_and_then_tried_anew(error: Exception) -> None:
    world = World(clients=3)
    world.faults["plan"] = error
    for client in (0, 1):
        assert isinstance(world.ask(0, client=client, group=client), NotYet)
    assert planned(world.play()) == [0]
    for client in (0, 1):
        with pytest.raises(type(error), match=str(error)):
            world.ask(0, client=client, group=client)
    assert world.play() == []
    assert world.fetch(0).num_steps == 3
    assert planned(world.calls)[:2] == [0, 0]


def test_a_take_that_failed_fails_its_group_only_and_is_tried_anew() -> None:
    world = World(clients=3)
    world.faults["take"] = DataError("bad record")
    for client, group in ((0, 0), (1, 0), (2, 1)):
        world.ask(0, client=client, group=group)
    world.play()
    assert isinstance(world.ask(0, client=2, group=1), BatchWindow)
    for client in (0, 1):
        with pytest.raises(DataError, match="bad record"):
            world.ask(0, client=client)
    before = len(world.calls)
    assert world.fetch(0).num_steps == 3
    assert not planned(world.calls[before:])
    assert world.fetch(0, client=1) is world.fetch(0)


def test_a_loader_that_cannot_answer_yet_is_asked_again() -> None:
    world = World()
    world.faults["take"] = NotYet("later")
    assert world.fetch(0).num_steps == 3


def changed_block(change: str) -> Any:
    def answer(requests: Any) -> SampleBlock:
        block = take(requests)
        ids, mask = block.tokens["input_ids"], block.tokens["loss_mask"]
        if change == "length":
            offsets = ids.offsets.copy()
            offsets[-1] -= 1
            return replace(block, tokens={"input_ids": Ragged(ids.values[:-1], offsets), "loss_mask": mask})
        if change == "field":
            return replace(block, tokens={"input_ids": ids})
        if change == "sample field":
            return replace(block, samples={"name": block.samples["name"]})
        return replace(block, num_pieces=block.num_pieces - 1)

    return answer


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("length", ReplayError, r"source '\w+': field 'input_ids' of epoch 0, unit \d+, row \d+ has \d+ tokens"),
        ("field", DataError, r"per-token fields \['loss_mask'\] are declared in PackedRows"),
        ("sample field", DataError, r"per-sample fields \['score'\] are declared"),
        ("count", ReplayError, r"loader/\d gave \d+ pieces where \d+ were asked for"),
    ],
)
def test_a_block_that_does_not_fit_the_plan_is_an_error(change: str, error: type[Exception], message: str) -> None:
    world = World()
    world.faults["take"] = changed_block(change)
    world.ask(0)
    world.play()
    with pytest.raises(error, match=message):
        world.ask(0)
    assert world.fetch(0).num_steps == 3


def test_sample_fields_of_unlike_shape_become_objects() -> None:
    world = World()

    def answer(requests: Any) -> SampleBlock:
        block = take(requests)
        return replace(block, samples=dict(block.samples) | {"score": np.zeros((block.num_pieces, 2), np.float32)})

    world.faults["take"] = answer
    window = world.fetch(0)
    assert window.samples["score"].dtype == np.object_
    assert {np.shape(value) for value in window.samples["score"]} == {(), (2,)}


def test_closing_forgets_the_client_and_with_the_last_one_the_generation() -> None:
    world = World(clients=2)
    first = world.fetch(0, client=0)
    world.fetch(0, client=1, group=1)
    world.constructor.close("train", "g", 1)
    assert world.constructor.stats()["clients"] == 1
    assert world.fetch(0, client=0) is first
    world.constructor.close("train", "g", 0)
    world.constructor.close("train", "g", 0)
    idle = {"generations": 0, "clients": 0, "windows": 0, "batches": 0, "calls": 0}
    assert world.constructor.stats() == idle | {"fetches": 3}
    assert_same(world.fetch(0, client=0), first)


def test_the_batches_of_a_group_that_left_are_dropped() -> None:
    world = World(clients=2)
    world.fetch(0, client=0)
    both = world.constructor.stats()["batches"]
    world.fetch(0, client=1, group=1)
    assert world.constructor.stats()["batches"] == 2 * both
    world.constructor.close("train", "g", 1)
    assert world.constructor.stats()["batches"] == both


def test_an_answer_after_the_close_is_dropped_and_an_unknown_one_refused() -> None:
    world = World()
    world.ask(0)
    (call,) = world.constructor.wants()
    world.constructor.close("train", "g", 0)
    world.constructor.answered(call, world.answer(call))
    assert world.constructor.wants() == []
    with pytest.raises(StreamError, match="not awaited"):
        world.constructor.answered(call, None)


def test_generations_do_not_meet() -> None:
    world = World(clients=1)
    world.fetch(0)
    other = world.constructor.fetch("train", "other", 0, 0, 0, -1)
    assert isinstance(other, NotYet)
    assert all(call.args[1] == "other" for call in world.play() if call.method == "plan")


@pytest.mark.parametrize(("stream", "group", "message"), [("val/0", 0, r"\['train'\]"), ("train", 2, "groups 0 to 1")])
def test_what_does_not_exist_is_refused(stream: str, group: int, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        World().constructor.fetch(stream, "g", group, 0, 0, -1)


def test_a_group_with_nothing_but_filler_needs_no_loader() -> None:
    spec = make_spec(num_groups=1)
    world = World(spec)
    plan = world.planner.plan

    def emptied(*args: Any) -> Any:
        window: Any = plan(*args)
        return replace(window, steps=tuple(replace(s, placement=np.full_like(s.placement, -1)) for s in window.steps))

    world.faults["plan"] = emptied
    window = world.fetch(0)
    assert (window.num_steps, len(window.pieces), np.diff(window.row_offsets).sum()) == (3, 0, 0)
    assert len(window.row_offsets) == 3 * 3 * 2 + 1


def test_a_loader_that_nobody_knows_fails_the_fetch_and_not_the_loop() -> None:
    world = World()
    world.constructor._loader_of = lambda key: {}[key]  # type: ignore[index]
    world.ask(0)
    world.play()
    with pytest.raises(KeyError):
        world.ask(0)


def test_the_names_of_the_sources_are_those_of_the_stream() -> None:
    assert tuple(source.name for source in make_spec().sources) == SOURCES
