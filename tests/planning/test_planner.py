"""The planner without any runtime: order, exactly once, bounds, rewinding, what is freed, what is refused."""

import struct
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import AttentionCost, Balanced, LongShort
from megascale_lightning.checkpointing.state import from_json, to_json
from megascale_lightning.errors import DataError, EmptySourceError, NotOpenError, StateError
from megascale_lightning.planning.strategies import RoundRobin, declared_by
from megascale_lightning.streams import initial_state
from megascale_lightning.types import NotYet
from tests.planning.fakes import Drive, FakeData, rows_of

SIZES = [1, 7, 100, 333]


def all_pieces(plans):
    return [tuple(piece) for plan in plans for piece in plan.pieces[["source", "row", "start", "stop"]].tolist()]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_the_order_depends_on_nothing_but_data_and_order_config(padded, unit):
    def certificates(count, **changes):
        data = FakeData([50, 70, 90], longest=150)
        drive = Drive(data, data.spec(padded=padded, rows=12, epochs=None, mixture_unit=unit, **changes))
        plans = drive.run(24, count)
        return [rows_of(plan) for plan in plans], [drive.states[step].certificate for step in range(1, 25)]

    plain = certificates(1)
    assert certificates(3) == plain
    assert certificates(16) == plain
    assert certificates(1, prefetch_steps=0) == plain
    assert certificates(2, strategy=RoundRobin()) == plain
    for groups in (2, 3, 4):
        assert certificates(1, groups=groups, num_microbatches=-(-12 // (2 * groups))) == plain


class Shuffled(Drive):
    """Metadata come one at a time or many at once, in any order."""

    def __init__(self, data, spec, rng):
        self.rng, self.due = rng, []
        super().__init__(data, spec)

    def serve(self):
        self.due += self.planner.wants()
        self.rng.shuffle(self.due)
        for _ in range(self.rng.randint(1, 4)):
            if self.due:
                call = self.due.pop()
                self.planner.answered(call, self.data.describe(*call.args) if call.method == "describe" else None)


@pytest.mark.parametrize(
    "strategy", [Balanced(method="karmarkar_karp"), LongShort(AttentionCost(32), sync="microbatch")]
)
@settings(max_examples=8, deadline=None)
@given(rng=st.randoms(use_true_random=False), count=st.integers(1, 4))
def test_plans_do_not_depend_on_the_order_in_which_metadata_arrive(strategy, rng, count):
    data = FakeData([50, 170, 90], longest=150)
    order = declared_by(strategy).order
    spec = data.spec(rows=12, groups=2, micro=3, epochs=2, strategy=strategy, order=order, prefetch_steps=8)
    plain, shuffled = Drive(data, spec), Shuffled(data, spec, rng)
    for one, other in zip(plain.run(), shuffled.run(count=count), strict=True):
        for column in ("pieces", "row_offsets", "placement", "group_costs"):
            assert (getattr(one, column) == getattr(other, column)).all()
    assert plain.states[plain.step].certificate == shuffled.states[plain.step].certificate


def test_the_certificate_is_the_chained_hash_of_step_row_and_pieces():
    """Written out by hand: whoever has the rows of all steps can compute it, and no row can move without it."""
    data = FakeData([50, 70, 90], longest=150)
    drive = Drive(data, data.spec(rows=12, epochs=None))
    plans = drive.run(6, 3)
    before = drive.states[0].certificate
    for plan in plans:
        bounds = plan.row_offsets.tolist()
        row_of = [row for row, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)]
        columns = [
            row_of,
            *(plan.pieces[name].tolist() for name in ("source", "epoch", "unit", "row", "start", "stop")),
        ]
        hashed = b"".join(struct.pack(f"<{len(column)}i", *column) for column in columns)
        before = blake2b(before + struct.pack("<q", plan.step) + hashed, digest_size=32).digest()
        assert drive.states[plan.step + 1].certificate == before


def test_the_certificate_begins_with_the_names_of_the_sources():
    data = FakeData([50, 70])
    one = data.spec()
    other = replace(one, sources=tuple(replace(source, name=f"{source.name}x") for source in one.sources))
    assert initial_state(one).certificate == initial_state(data.spec()).certificate
    assert initial_state(one).certificate != initial_state(other).certificate


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_an_epoch_gives_every_piece_once(padded, groups):
    data = FakeData(SIZES, longest=200)
    drive = Drive(data, data.spec(padded=padded, groups=groups, rows=8))
    plans = drive.run()
    expected = Counter()
    for source, _size in enumerate(SIZES):
        for window in range(data.num_windows(source)):
            for part in range(3):
                block = data.describe(type("Key", (), {"source": source, "epoch": 0, "window": window, "part": part})())
                expected.update(map(tuple, block.pieces[["source", "row", "start", "stop"]].tolist()))
    found = Counter(all_pieces(plans))
    assert {source for source, *_ in found} == set(range(len(SIZES)))
    assert found == expected
    assert set(found.values()) == {1}


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_group_gets_every_row_of_its_own_and_equal_counts(groups):
    data = FakeData(SIZES)
    drive = Drive(data, data.spec(groups=groups, num_microbatches=5, rows=8))
    for plan in drive.run():
        assert plan.placement.shape == (groups, 5, 2)
        placed = sorted(plan.placement[plan.placement >= 0].tolist())
        assert placed == np.flatnonzero(np.diff(plan.row_offsets)).tolist()


def test_a_stream_without_any_step_is_refused():
    data = FakeData([3])
    with pytest.raises(EmptySourceError, match=r"ends before its first step: .* 8 rows .*last_step=\"fill\""):
        Drive(data, data.spec(last_step="drop")).run()
    assert Drive(data, data.spec(last_step="fill")).run()


def test_the_last_step_can_be_dropped_and_is_counted():
    data = FakeData(SIZES)
    filled = Drive(data, data.spec(last_step="fill"))
    dropped = Drive(data, data.spec(last_step="drop"))
    all_of_them, fewer = all_pieces(filled.run()), all_pieces(dropped.run())
    last = dropped.states[max(dropped.states)]
    assert last.ended
    assert len(last.carry) == 0
    assert sum(counts.get("last_step", 0) for counts in last.dropped) == len(all_of_them) - len(fewer) > 0


def test_drops_are_counted_by_source_as_they_are_passed():
    data = FakeData(SIZES, drop_every=3)
    drive = Drive(data, data.spec())
    found = all_pieces(drive.run())
    last = drive.states[max(drive.states)]
    assert [counts.get("filtered", 0) for counts in last.dropped] == [size // 3 for size in SIZES]
    assert len(found) == sum(size - size // 3 for size in SIZES)


@pytest.mark.parametrize("padded", [False, True])
def test_a_state_saved_as_json_goes_on_with_the_very_next_step(padded):
    data = FakeData([25, 35, 45], longest=150, drop_every=7)
    spec = data.spec(padded=padded, epochs=2)
    names = [source.name for source in spec.sources]
    whole = Drive(data, spec)
    plans = whole.run()
    end = whole.states[len(plans)]
    for at in range(len(plans)):
        saved = from_json(to_json(whole.states[at], names), names)
        resumed = Drive(data, spec, saved)
        assert [rows_of(plan) for plan in resumed.run(3)] == [rows_of(plan) for plan in plans[at : at + 3]]
        rest = resumed.run()
        assert resumed.states[len(plans)].certificate == end.certificate
        assert resumed.states[len(plans)].dropped == end.dropped
        assert len(rest) + 3 >= len(plans) - at
    assert end.ended


def test_the_end_is_known_with_the_last_step_not_after_it():
    data = FakeData([30])
    drive = Drive(data, data.spec(rows=4))
    plans = drive.run()
    assert [drive.states[step].ended for step in range(len(plans) + 1)] == [False] * len(plans) + [True]
    empty = drive.window(first=len(plans) + 3)
    assert not empty.steps
    assert empty.states[-1].ended


def test_parts_that_are_waited_for_are_named_once_each():
    data = FakeData([500, 500])
    drive = Drive(data, data.spec(epochs=None))
    waiting = drive.planner.plan("train", "g", 0, 1)
    parts = ["source 0 epoch 0 window 0 part 0", "source 1 epoch 0 window 0 part 0"]
    assert waiting.reason == f"2 parts of stream 'train' are being read: {parts[1]}, {parts[0]}"


def test_nothing_is_planned_further_ahead_than_the_slowest_client_allows():
    data = FakeData([500])
    drive = Drive(data, data.spec(epochs=None, prefetch_steps=2))
    drive.planner.open("train", "g", 1, None)
    assert len(drive.window(first=2).steps) == 1
    refused = drive.window(first=3)
    assert isinstance(refused, NotYet)
    assert "client 0" in refused.reason
    drive.planner.consumed("train", "g", {0: 5})
    assert isinstance(drive.window(first=3), NotYet)
    drive.planner.consumed("train", "g", {1: 0})
    assert len(drive.window(first=3).steps) == 1
    drive.planner.close("train", "g", 1)
    assert len(drive.window(first=8).steps) == 1


def test_a_client_that_comes_late_gets_the_same_steps_again():
    data = FakeData([60, 60])
    drive = Drive(data, data.spec(epochs=None))
    plans = drive.run(12)
    drive.planner.open("train", "g", 1, None)
    for step in range(4):
        again = drive.window(first=step)
        assert rows_of(again.steps[0]) == rows_of(plans[step])


def test_parts_are_let_go_once_they_are_consumed_and_all_when_the_last_client_leaves():
    data = FakeData([300, 300])
    drive = Drive(data, data.spec(epochs=None))
    drive.run(60)
    drive.serve()
    held = drive.planner.stats()["train"]
    assert held["parts"] < 12
    assert held["steps"] <= 1
    assert set(drive.released) < set(data.described)
    drive.planner.close("train", "g", 0)
    drive.serve()
    assert drive.planner.stats()["train"] == {"parts": 0, "steps": 0, "clients": 0}
    assert set(drive.released) == set(data.described)


def test_two_generations_of_a_stream_do_not_disturb_each_other():
    data = FakeData([60, 60])
    drive = Drive(data, data.spec(epochs=None))
    first = drive.run(3)
    drive.planner.open("train", "other", 0, None)
    other = drive.window(3, first=0, generation="other")
    assert [rows_of(plan) for plan in other.steps] == [rows_of(plan) for plan in first]
    assert len(drive.run(2)) == 2


def test_an_unknown_generation_is_said_to_be_not_open():
    data = FakeData([10])
    drive = Drive(data, data.spec())
    with pytest.raises(NotOpenError, match="not open"):
        drive.planner.plan("train", "nobody", 0, 1)


def test_clients_with_different_states_of_one_step_are_refused():
    data = FakeData([60, 60])
    drive = Drive(data, data.spec(epochs=None))
    drive.run(3)
    forged = replace(drive.states[3], certificate=bytes(32))
    with pytest.raises(StateError, match="different checkpoints"):
        drive.planner.open("train", "g", 1, forged)


def test_a_source_that_gives_nothing_is_named():
    data = FakeData([30, 20], drop_every=1)
    drive = Drive(data, data.spec(epochs=None))
    with pytest.raises(EmptySourceError, match=r"s1.*filtered"):
        drive.run(1)


def test_a_source_without_records_is_named_but_one_of_weight_zero_is_left_alone():
    data = FakeData([30, 0])
    with pytest.raises(EmptySourceError, match="s1"):
        Drive(data, data.spec()).run(1)
    assert Drive(data, data.spec(weights=[1.0, 0.0])).run()


def test_a_part_that_cannot_be_described_raises_for_the_step_that_needs_it_not_before():
    class Broken(FakeData):
        def describe(self, key):
            if key.window == 1:
                raise DataError("source 's0', file x: broken")
            return super().describe(key)

    data = Broken([80], longest=1)
    drive = Drive(data, data.spec(rows=1, epochs=None, weights=[1.0], micro=1, strategy=RoundRobin()))
    with pytest.raises(DataError, match="broken"):
        drive.run()
    sound = FakeData([40], longest=1)
    expected = Drive(sound, sound.spec(rows=1, weights=[1.0], micro=1)).run()
    # 40 samples of one token fit into one row, and the pool looks 10 samples ahead of it.
    assert drive.step <= len(expected)


def test_no_part_is_described_twice_while_it_is_held():
    data = FakeData([400, 100])
    drive = Drive(data, data.spec(epochs=3))
    drive.run(count=4)
    assert Counter(data.described).most_common(1)[0][1] == 1


def test_every_step_says_how_even_it_is():
    data = FakeData([2000], longest=60)
    spec = data.spec(padded=True, groups=4, num_microbatches=4, rows=32, epochs=None)
    for plan in Drive(data, spec).run(5):
        assert plan.balance["max_over_mean"] <= plan.balance["max_over_mean_before"] + 1e-9
        assert plan.balance["max_over_bound"] >= 1 - 1e-9
        assert plan.group_costs.shape == plan.group_costs_before.shape == (4,)


def test_similar_lengths_share_a_microbatch_of_padded_rows():
    data = FakeData([2000])
    for plan in Drive(data, data.spec(padded=True, groups=2, num_microbatches=4, rows=16, epochs=None)).run(3):
        lengths = plan.pieces["length"][plan.placement].reshape(-1, 2)
        spread = np.sort(plan.pieces["length"]).reshape(-1, 2)
        assert sorted(np.sort(lengths, axis=1).tolist()) == sorted(spread.tolist())


def test_nothing_of_the_next_pass_is_read_ahead():
    data = FakeData([50, 90])
    drive = Drive(data, data.spec(epochs=None, passes=True))
    while (window := drive.window(3)).steps:
        drive.step += len(window.steps)
        drive.planner.consumed("train", "g", {0: drive.step - 1})
    assert window.states[-1].passes == 1
    drive.serve()
    assert {key.epoch for key in data.described} == {0}


def test_a_pass_that_one_source_has_ended_is_no_empty_one():
    # The small source was not drawn from when the large one ends just with a step.
    data = FakeData([40, 2], longest=8)
    spec = data.spec(padded=True, rows=4, epochs=None, passes=True, last_step="drop", weights=[0.999, 0.001])
    drive = Drive(data, spec)
    while (window := drive.window()).steps:
        drive.step += 1
        drive.planner.consumed("train", "g", {0: drive.step - 1})
    assert drive.step == 10
    assert window.states[-1].passes == 1
