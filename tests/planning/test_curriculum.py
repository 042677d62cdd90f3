"""Curricula: the quantile follows its schedule, every sample comes once, the order is that of data and config."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megascale_lightning.checkpointing.state import from_json, to_json
from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import ConfigError, DataError, EmptySourceError, StateError
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.blocks import Block
from megascale_lightning.planning.dgraph import DGraph
from megascale_lightning.planning.strategies import Curriculum, declared_by
from megascale_lightning.rows import PaddedRows
from megascale_lightning.types import PIECE, Call, MetaBlock, PartKey
from tests.planning.fakes import Drive, FakeData, rows_of

SIZES = [1, 7, 100, 333]


class LongTails(FakeData):
    """Log-normal lengths in tokens, and their squares as `work`."""

    def __init__(self, sizes, medians=(400,), **shape):
        super().__init__(sizes, capacity=16_384, **{"window": 8_000, "part": 2_000, **shape})
        self.lengths = [
            np.clip(np.random.default_rng([3, index]).lognormal(np.log(median), 1.2, size), 1, 16_384).astype(np.int64)
            for index, (size, median) in enumerate(zip(sizes, medians, strict=True))
        ]

    def describe(self, key):
        self.described.append(key)
        start = key.window * self.window + key.part * self.part
        end = min((key.window + 1) * self.window, self.sizes[key.source])
        rows = np.arange(start, min(start + self.part, end))
        rows = np.random.default_rng([7, key.source, key.epoch, key.window, key.part]).permutation(rows)
        pieces = np.zeros(len(rows), PIECE)
        for name in ("source", "epoch", "window", "part"):
            pieces[name] = getattr(key, name)
        pieces["entry"], pieces["row"], pieces["stop"] = np.arange(len(rows)), rows, -1
        pieces["length"] = self.lengths[key.source][rows]
        ones = np.ones(len(rows), bool)
        return MetaBlock(
            key=key,
            pieces=pieces,
            first=ones,
            kept=ones,
            reason=np.zeros(len(rows), np.uint8),
            last_in_window=start + self.part >= end,
            metadata={"work": pieces["length"].astype(float) ** 2},
        )


def spec_of(data, curriculum, **changes):
    strategy = Curriculum(curriculum.field, curriculum.schedule, curriculum.quantile, curriculum.interpolate)
    order = {"mix.curriculum": curriculum.table}
    return data.spec(**{"strategy": strategy, "curriculum": curriculum, "order": order, "epochs": None, **changes})


def lengths_of(plans):
    return np.concatenate([plan.pieces["length"] for plan in plans])


def all_pieces(plans):
    return [tuple(piece) for plan in plans for piece in plan.pieces[["source", "epoch", "row", "start"]].tolist()]


RAMP = QuantileSchedule("length", [(0, 500), (1000, 4000)])
SHORT = QuantileSchedule("length", [(0, 10), (30, 50)])
"""For the lengths of `FakeData`."""


class TestTheQuantile:
    def test_it_follows_its_schedule_and_through_a_resume(self):
        data = LongTails([100_000])
        spec = spec_of(data, RAMP, rows=200, padded=True, micro=1)
        drive = Drive(data, spec)
        plans = drive.run(540)
        saved = from_json(to_json(drive.states[540], ["s0"]), ["s0"])
        resumed = Drive(data, spec, saved)
        again = resumed.run(460)
        assert [rows_of(plan) for plan in drive.run(30)] == [rows_of(plan) for plan in again[:30]]
        plans += again
        for step in range(100, 1001, 100):
            found = np.quantile(lengths_of(plans[max(step - 5, 0) : step + 5]), 0.9)
            assert found == pytest.approx(500 + 3.5 * step, rel=0.05), step
        natural = np.quantile(data.lengths[0], 0.9)
        assert natural == pytest.approx(1862, rel=0.02), "or else following it is nothing"

    def test_any_number_of_the_samples(self):
        data = LongTails([100_000])
        schedule = QuantileSchedule("work", [(0, 500**2), (60, 2000**2)], quantile=0.8)
        plans = Drive(data, spec_of(data, schedule, rows=400, padded=True)).run(64)
        for step in (4, 30, 60):
            found = np.quantile(lengths_of(plans[step - 4 : step + 4]), 0.8)
            assert found == pytest.approx(np.sqrt(schedule.at(step)), rel=0.05), step

    @pytest.mark.parametrize("at", [0, 40])
    def test_packed_rows_of_a_schedule_in_steps(self, at):
        schedule = QuantileSchedule("length", [(0, 600), (40, 3000)], interpolate="step")
        data = LongTails([100_000])
        spec = spec_of(data, schedule, rows=16, micro=1)
        plans = Drive(data, replace(spec, rows=replace(spec.rows, pack_ahead=100))).run(at + 40)
        assert np.quantile(lengths_of(plans[at + 10 :]), 0.9) == pytest.approx(schedule.at(at), rel=0.05)

    def test_sources_keep_their_weights_and_make_up_for_each_other(self):
        """Alone, one is always below the value and one is mostly above it."""
        data = LongTails([30_000] * 3, medians=(20, 400, 2000))
        schedule = QuantileSchedule("length", [(0, 1500)])
        plans = Drive(data, spec_of(data, schedule, rows=200, padded=True, weights=[2.0, 5.0, 1.0])).run(30)
        pieces = np.concatenate([plan.pieces for plan in plans])
        assert np.bincount(pieces["source"]) == pytest.approx([1500, 3750, 750], abs=1)
        assert np.quantile(pieces["length"], 0.9) == pytest.approx(1500, rel=0.05)
        for source, natural in enumerate(data.lengths):
            assert np.median(pieces["length"][pieces["source"] == source]) <= np.median(natural) * 1.02

    def test_levels_on_one_side_keep_their_proportions(self):
        data = LongTails([100_000])
        lengths = lengths_of(Drive(data, spec_of(data, RAMP, rows=1000, padded=True)).run(10))
        natural = data.lengths[0]
        for side in (lambda found: found[found <= 500], lambda found: found[found > 500]):
            for share in (0.25, 0.5, 0.75):
                assert np.quantile(side(lengths), share) == pytest.approx(np.quantile(side(natural), share), rel=0.08)

    def test_every_step_has_its_share(self):
        """Not only many steps together: draws of a step, and of sources beside each other, are spread evenly."""
        data = LongTails([20_000] * 20, medians=(400,) * 20)
        schedule = QuantileSchedule("length", [(0, 800)])
        for plan in Drive(data, spec_of(data, schedule, rows=40, padded=True, weights=[1.0] * 20)).run(40):
            assert 1 <= (plan.pieces["length"] > 800).sum() <= 7

    def test_what_the_data_hardly_have_is_not_looked_for_without_end(self):
        data = LongTails([1_000_000], part=500, window=1000)
        schedule = QuantileSchedule("length", [(0, 12_000)])
        drive = Drive(data, spec_of(data, schedule, rows=100, padded=True))
        lengths = lengths_of(drive.run(50))
        share = (data.lengths[0] > 12_000).mean()
        assert 0 < (lengths > 12_000).mean() < 16 * share < 0.1
        assert len(data.described) * 500 < 12 * len(lengths)

    def test_what_has_come_to_an_end_is_not_looked_for_without_end(self):
        data = LongTails([200_000], part=100, window=400)
        data.lengths[0][:] = 100
        data.lengths[0][:400:10] = 2000  # in the first window only
        drive = Drive(data, spec_of(data, QuantileSchedule("length", [(0, 1000)]), rows=20, padded=True))
        assert (lengths_of(drive.run(26)) == 2000).sum() == 40, "or else none is looked for"
        assert len(data.described) < 200

    def test_a_sample_in_pieces_has_the_length_of_all_of_them_and_a_dropped_one_has_none(self):
        pieces = np.zeros(5, PIECE)
        pieces["length"] = [0, 64, 64, 10, 70]
        meta = MetaBlock(
            key=PartKey("train", 0, 0, 0, 0),
            pieces=pieces,
            first=np.array([1, 1, 0, 0, 1], bool),
            kept=np.array([0, 1, 1, 1, 1], bool),
            reason=np.array([1, 0, 0, 0, 0], np.uint8),
            reasons=("", "filtered"),
            last_in_window=True,
            metadata={"noise": np.array([9.0, 1.0, 1.0, 1.0, 5.0])},
        )
        for field, edge, levels in (("length", 100, [[1], [0]]), ("noise", 3, [[0], [1]])):
            found = Block(meta).levels(QuantileSchedule(field, [(0, edge)]))
            assert [samples.tolist() for samples in found] == levels


class TestExactlyOnce:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("epochs", [1, 2])
    def test_every_epoch_gives_every_piece_once(self, padded, epochs):
        data = FakeData(SIZES, longest=200, drop_every=5)
        drive = Drive(data, spec_of(data, SHORT, padded=padded, epochs=epochs))
        plain = FakeData(SIZES, longest=200, drop_every=5)
        other = Drive(plain, plain.spec(padded=padded, epochs=epochs))
        found, expected = Counter(all_pieces(drive.run())), Counter(all_pieces(other.run()))
        assert found == expected
        assert set(found.values()) == {1}
        last = drive.states[max(drive.states)]
        assert last.ended
        assert last.dropped == other.states[max(other.states)].dropped
        assert not last.waiting.any()

    def test_what_is_too_hard_comes_at_the_end(self):
        data = FakeData([400], longest=60)
        never = QuantileSchedule("length", [(0, 20)], quantile=0.999)
        plans = Drive(data, spec_of(data, never, padded=True, epochs=1, rows=10)).run()
        lengths = lengths_of(plans)
        assert len(lengths) == 400
        assert (lengths[:100] <= 20).mean() > 0.95
        assert (lengths[-200:] > 20).all()

    @pytest.mark.parametrize("last_step", ["fill", "drop"])
    def test_passes(self, last_step):
        data = FakeData([50, 90])
        spec = spec_of(data, SHORT, padded=True, passes=True, last_step=last_step, rows=100)
        state = None
        for number in range(3):
            drive = Drive(data, spec, state)
            while (window := drive.window(3)).steps:
                drive.plans += window.steps
                drive.step += len(window.steps)
                drive.planner.consumed("train", "g", {0: drive.step - 1})
            state = window.states[-1]
            given = Counter(all_pieces(drive.plans))
            assert set(given.values()) == {1}
            assert {epoch for _, epoch, *_ in given} == {number}
            assert len(given) == (140 if last_step == "fill" else 100)
            assert (state.passes, state.waiting.sum()) == (number + 1, 0)
        left = sum(counts.get("last_step", 0) for counts in state.dropped)
        assert left == (0 if last_step == "fill" else 120)

    def test_what_a_stop_rule_leaves_is_counted(self):
        data = FakeData([30, 300], longest=60)
        spec = spec_of(data, SHORT, padded=True, rows=10, epochs=1, stop=("s0",), weights=[1.0, 1.0])
        sources = tuple(replace(s, num_records=size) for s, size in zip(spec.sources, data.sizes, strict=True))
        drive = Drive(data, replace(spec, sources=sources))
        given = Counter(source for source, *_ in all_pieces(drive.run()))
        last = drive.states[max(drive.states)]
        assert given[0] == 30
        assert given[1] + last.dropped[1]["stopped"] == 300

    def test_a_source_that_gives_nothing_is_named(self):
        data = FakeData([30, 20], drop_every=1)
        with pytest.raises(EmptySourceError, match=r"s0.*'filtered': 30"):
            Drive(data, spec_of(data, SHORT)).run(1)
        data = FakeData([30, 0])
        with pytest.raises(EmptySourceError, match="s1"):
            Drive(data, spec_of(data, SHORT)).run(1)
        assert Drive(data, spec_of(data, SHORT, weights=[1.0, 0.0], epochs=1)).run()

    @pytest.mark.parametrize("size", [1, 30, 130])
    @pytest.mark.parametrize("epochs", [2, None])
    def test_a_later_epoch_that_gives_nothing_is_refused_from_every_state_before_it(self, size, epochs):
        class Emptied(FakeData):
            def describe(self, key):
                self.drop_every = 1 if (key.source, key.epoch) == (0, 1) else 0
                return super().describe(key)

        def refusal(state=None):
            drive = Drive(data, spec, state)
            with pytest.raises(EmptySourceError, match=r"s0.*epoch 1 gave no sample at all") as caught:
                drive.run()
            return str(caught.value), drive.states

        data = Emptied([size, 140], part=4)
        spec = spec_of(data, SHORT, epochs=epochs, rows=20, padded=True, weights=[1.0, 1.0])
        said, states = refusal()
        assert f"'filtered': {size}" in said
        assert len(states) >= size // 60
        assert all(refusal(state)[0] == said for state in states.values())

    def test_parts_that_give_nothing_are_passed(self):
        class Sparse(FakeData):
            """Nothing is in the first and last two thirds of an epoch, far more parts than are opened for a draw."""

            def describe(self, key):
                self.drop_every = 1 if key.source == 0 and key.window % 30 != 15 else 0
                return super().describe(key)

        data = Sparse([1200, 60])
        given = Counter(all_pieces(Drive(data, spec_of(data, SHORT, epochs=2)).run()))
        assert set(given.values()) == {1}
        assert len(given) == 2 * (40 + 60)

    def test_a_limit_of_bad_records_holds(self):
        class Bad(FakeData):
            def describe(self, key):
                meta = super().describe(key)
                return replace(meta, reasons=("", "read_error"))

        data = Bad([500], drop_every=10)
        spec = spec_of(data, SHORT, epochs=1)
        strict = replace(spec, sources=(replace(spec.sources[0], max_bad_fraction=0.05),))
        with pytest.raises(DataError, match=r"more than max_bad_fraction=0\.05"):
            Drive(data, strict).run()
        assert Drive(data, replace(spec, sources=(replace(spec.sources[0], max_bad_fraction=0.2),))).run()


class TestTheOrder:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("unit", ["samples", "tokens"])
    def test_it_depends_on_nothing_but_data_and_order_config(self, padded, unit):
        def certificates(count, **changes):
            data = FakeData([50, 70, 90], longest=150, part=40)
            drive = Drive(
                data, spec_of(data, SHORT, padded=padded, rows=12, **{"mixture_unit": unit, "strategy": None} | changes)
            )
            plans = drive.run(16, count)
            return [rows_of(plan) for plan in plans], [drive.states[step].certificate for step in range(1, 17)]

        def strategy(graph):
            return graph.mix(curriculum=SHORT).pack().distribute("dp")

        plain = certificates(1, strategy=strategy)
        assert certificates(3, strategy=strategy) == plain
        assert certificates(16, strategy=strategy) == plain
        assert certificates(1, strategy=strategy, prefetch_steps=0) == plain
        assert certificates(2, strategy=Curriculum("length", SHORT.schedule)) == plain
        for groups in (2, 3, 4):
            changes = {"groups": groups, "num_microbatches": -(-12 // (2 * groups))}
            assert certificates(1, strategy=strategy, **changes) == plain

    def test_it_is_the_same_however_much_is_described_ahead(self):
        def plans(ahead):
            data = FakeData([200, 300], longest=60)
            drive = Drive(data, spec_of(data, SHORT, padded=True, rows=12))
            for source, window, part in product((0, 1), range(5), range(3)) if ahead else ():
                key = PartKey("train", source, 0, window, part)
                drive.planner.answered(Call("loader/0", "describe", (key,)), data.describe(key))
            return [rows_of(plan) for plan in drive.run(12)]

        assert plans(ahead=True) == plans(ahead=False)

    @pytest.mark.parametrize("padded", [False, True])
    def test_a_state_saved_as_json_goes_on_with_the_very_next_step(self, padded):
        data = FakeData([30, 40, 60], longest=150, drop_every=7)
        spec = spec_of(data, SHORT, padded=padded, epochs=2)
        names = [source.name for source in spec.sources]
        whole = Drive(data, spec)
        plans = whole.run()
        end = whole.states[len(plans)]
        for at in range(0, len(plans), 3):
            saved = from_json(to_json(whole.states[at], names), names)
            resumed = Drive(data, spec, saved)
            assert [rows_of(plan) for plan in resumed.run(3)] == [rows_of(plan) for plan in plans[at : at + 3]]
            if at % 30 == 0:
                resumed.run()
                assert resumed.states[len(plans)].certificate == end.certificate
                assert resumed.states[len(plans)].dropped == end.dropped

    def test_parts_between_the_levels_are_let_go(self):
        data = LongTails([100_000], window=400, part=100)
        drive = Drive(data, spec_of(data, QuantileSchedule("length", [(0, 300), (200, 2000)]), rows=200, padded=True))
        most = 0
        for _ in range(150):
            drive.run(1)
            drive.serve()
            most = max(most, drive.planner.stats()["train"]["parts"])
        levels = drive.states[150].levels[0]
        opened = (int(levels["epoch"].max()) * 250 + int(levels["window"].max())) * 4
        behind = (int(levels["epoch"].min()) * 250 + int(levels["window"].min())) * 4
        assert opened - behind > 200, "or else nothing lags behind"
        assert most < 60
        assert set(drive.released) < set(data.described)
        assert max(Counter(data.described).values()) < drive.spec.curriculum.num_levels + 6, "read by each level once"

    def test_parts_of_planned_steps_are_kept_until_they_are_consumed(self):
        data = LongTails([100_000], window=400, part=100)
        drive = Drive(data, spec_of(data, QuantileSchedule("length", [(0, 300), (200, 2000)]), rows=200, padded=True))
        drive.run(60)
        window = drive.window(4)
        drive.released.clear()
        for done in (1, 2, 3):
            drive.planner.consumed("train", "g", {0: drive.step + done - 1})
            drive.serve()
            to_come = np.concatenate([plan.pieces for plan in window.steps[done:]])
            places = to_come[["source", "epoch", "window", "part"]].tolist()
            assert not {PartKey("train", *place) for place in places} & set(drive.released)
        assert drive.released

    def test_the_state_is_small(self):
        data = LongTails([4000] * 306, medians=(400,) * 306, part=200, window=400)
        drive = Drive(data, spec_of(data, RAMP, rows=9000, padded=True, weights=[1.0] * 306))
        drive.run(10)
        names = [source.name for source in drive.spec.sources]
        saved = to_json(drive.states[10], names)
        assert len(saved["levels"]["packed"]) < 64 << 10

    def test_without_a_curriculum_it_is_as_it_was(self):
        data = FakeData([30])
        drive = Drive(data, data.spec())
        drive.run(1)
        assert "levels" not in to_json(drive.states[1], ["s0"])

    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            (lambda saved: saved.update(levels=[1]), "levels must be a mapping"),
            (lambda saved: saved["levels"].update(count=3), "levels.packed are no packed places, levels.count=3"),
            (lambda saved: saved["levels"].update(packed="x"), "levels.packed are no packed places"),
        ],
    )
    def test_a_damaged_state_is_refused(self, damage, said):
        data = FakeData([90])
        drive = Drive(data, spec_of(data, SHORT))
        drive.run(2)
        saved = to_json(drive.states[2], ["s0"])
        damage(saved)
        with pytest.raises(StateError, match=said):
            from_json(saved, ["s0"])


class TestDeclarations:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"field": ""}, "field must be .* not ''"),
            ({"quantile": 1}, "quantile must be above 0 and below 1, such as 0.9, not 1"),
            ({"interpolate": "cubic"}, "interpolate must be 'step' or 'linear', not 'cubic'"),
            ({"schedule": []}, r"schedule must be a list of \(step, value\)"),
            ({"schedule": [(0, 1, 2)]}, r"a point of the schedule must be \(step, value\), not \(0, 1, 2\)"),
            ({"schedule": [(5, 1.0)]}, "the first step of the schedule must be 0, not 5"),
            ({"schedule": [(0, 1.0), (9, 2.0), (9, 3.0)]}, "the steps of the schedule must rise: 9 comes after 9"),
            ({"schedule": [(0.5, 1.0)]}, "a step of the schedule must be a whole number of at least 0, not 0.5"),
            ({"schedule": [(0, float("nan"))]}, "step 0 of the schedule: the value must be a finite number, not nan"),
            ({"schedule": [(0, 10**400)]}, "step 0 of the schedule: the value must be a finite number, not 1000"),
            ({"schedule": [(0, "long")]}, "step 0 of the schedule: the value must be a finite number, not 'long'"),
        ],
    )
    def test_what_is_wrong_with_a_schedule_is_said(self, settings, said):
        for kind in (QuantileSchedule, Curriculum):
            with pytest.raises(ConfigError, match=f"curriculum: {said}"):
                kind(**{"field": "length", "schedule": [(0, 10)], **settings})

    def test_what_it_declares(self):
        found = declared_by(Curriculum("noise", [(0, 1), (10, 2)], quantile=0.5))
        assert found.fields == ("noise",)
        assert found.order == {
            "mix.curriculum": {
                "field": "noise",
                "schedule": [[0, 1.0], [10, 2.0]],
                "quantile": 0.5,
                "interpolate": "linear",
            }
        }
        assert declared_by(Curriculum("length", [(0, 1)])).fields == ()
        with pytest.raises(ConfigError, match=r"mix\(\): curriculum must be a QuantileSchedule.* not 'length'"):
            declared_by(lambda graph: graph.mix(curriculum="length"))

    def test_a_run_has_one_for_all_steps(self):
        def strategy(graph):
            mixed = graph.mix(curriculum=SHORT if graph.step < 2 else RAMP)
            return mixed.pack().distribute("dp")

        data = FakeData([90])
        drive = Drive(data, spec_of(data, SHORT, strategy=strategy, prefetch_steps=0))
        drive.run(2)
        with pytest.raises(
            ConfigError, match=r"at step 2 it declares .*4000.* what changes by the step belongs in a schedule"
        ):
            drive.run(1)

    def test_one_that_the_run_does_not_know_of_is_refused(self):
        data = FakeData([90])
        drive = Drive(data, replace(spec_of(data, SHORT), curriculum=None, order={}))
        with pytest.raises(ConfigError, match=r"declares .*mix.curriculum.* and nothing before"):
            drive.run(1)

    def test_outside_of_a_run(self):
        infos = {"web": {"length": [10] * 10, "noise": [9, 1, 8, 2, 7, 3, 6, 4, 5, 0]}}
        graph = DGraph.from_buffer_infos(infos).init(ClientPlaceTree.from_sizes(dp=2), global_batch_size=4)

        def rows(field):
            mixed = graph.mix(curriculum=QuantileSchedule(field, [(0, 4)], quantile=0.999))
            return mixed.pack(PaddedRows(16, 1)).distribute("dp").plan().pieces["row"].tolist()

        assert rows("noise") == [1, 3, 5, 7]
        assert rows("length") == [0, 1, 2, 3]
        with pytest.raises(ConfigError, match=r"source 'web': what is declared wants the metadata \['pixels'\]"):
            rows("pixels")
