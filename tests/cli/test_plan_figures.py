"""The figures of `megascale plan` are those of the batches that all ranks of a run then get."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    CollatedRows,
    Curriculum,
    DGraph,
    MegaScaleLoader,
    Mixture,
    PackedRows,
    PaddedRows,
    RoundRobin,
    Source,
    TokenCount,
)
from megascale_lightning.errors import MegaScaleWarning
from tests.cli.plans import DOCS, KEPT, WEB, docs, in_six_files, ran, settings, web

pytestmark = pytest.mark.usefixtures("corpus")

ROWS = [
    PackedRows(32, 2, pack_ahead=8, pad_to_multiple_of=40),
    PaddedRows(24, 3),
    PaddedRows(40, 2, pad_to_multiple_of=16),
]


class TestFiguresOfARun:
    @pytest.mark.parametrize("rows", ROWS, ids=["packed", "padded", "padded to a multiple"])
    def test_what_all_ranks_get(self, rows: Any, figures: Any) -> None:
        config = settings(web(weight=3), docs(), rows=rows, global_batch_size=rows.micro_batch_size * 6)
        found, real = figures(config, "--dp", "3", "--steps", "9"), ran(config, 9, 3)
        assert found["steps"] == len(real.slots) == 9
        assert (found["groups"], found["microbatches"], found["rows_per_step"]) == (3, 2, rows.micro_batch_size * 6)
        for what in ("samples", "tokens"):
            values = real.of(what)
            assert found["each_step"][what] == values
            assert found[what] == {
                "total": sum(values),
                "mean": sum(values) / 9,
                "min": min(values),
                "max": max(values),
            }
            for source in found["sources"]:
                assert source[what] == sum(real.of(what, source["name"]))
        slots = [real.slots[step] for step in range(9)]
        padding = sum(slots) - sum(real.of("tokens"))
        assert found["padding"] == {
            "share": padding / sum(slots),
            "tokens": padding,
            "slots": sum(slots),
            "filler_rows": 0,
        }
        assert padding > 0
        assert found["each_step"]["padding"] == pytest.approx(
            [1 - tokens / room for tokens, room in zip(real.of("tokens"), slots, strict=True)]
        )

    def test_balance_and_speed_up(self, figures: Any) -> None:
        config = settings(web(), rows=PaddedRows(96, 1), global_batch_size=12)
        found, real = figures(config, "--dp", "3", "--steps", "7"), ran(config, 7, 3)
        reports = [real.reports[step] for step in range(7)]
        before = [report.group_costs_before.max() / report.group_costs_before.mean() for report in reports]
        after = [report.group_costs.max() / report.group_costs.mean() for report in reports]
        assert found["each_step"]["max_over_mean_before"] == pytest.approx(before)
        assert found["each_step"]["max_over_mean"] == pytest.approx(after)
        assert found["balance"]["max_over_mean_before"] == pytest.approx(
            {"mean": np.mean(before), "worst": max(before)}
        )
        assert found["balance"]["max_over_mean"] == pytest.approx({"mean": np.mean(after), "worst": max(after)})
        for name in ("max_over_bound_before", "max_over_bound"):
            bound = [report.balance[name] for report in reports]
            assert found["balance"][name] == pytest.approx({"mean": np.mean(bound), "worst": max(bound)})
        slowest = sum(report.group_costs_before.max() for report in reports)
        assert found["speed_up"] == pytest.approx(slowest / sum(report.group_costs.max() for report in reports))
        assert found["speed_up"] > 1.05
        assert (found["strategy"], found["cost"]) == ("Balanced", "AttentionCost")
        assert 0 < found["planning_ms"] < 1000

    def test_dealing_in_turn_gains_nothing(self, figures: Any) -> None:
        found = figures(settings(web(), strategy=RoundRobin(), global_batch_size=12), "--dp", "3", "--steps", "3")
        assert (found["speed_up"], found["strategy"]) == (pytest.approx(1.0), "RoundRobin")

    def test_a_strategy_of_ones_own(self, figures: Any) -> None:
        def even(graph: DGraph) -> DGraph:
            return graph.mix().pack().distribute("dp").cost(TokenCount()).balance("greedy")

        config = settings(web(), rows=PaddedRows(96, 1), global_batch_size=12, strategy=even)
        found, real = figures(config, "--dp", "3", "--steps", "3"), ran(config, 3, 3)
        assert found["cost"] == "TokenCount"
        assert found["strategy"].endswith("even")
        costs = [real.reports[step].group_costs for step in range(3)]
        assert found["each_step"]["max_over_mean"] == pytest.approx([cost.max() / cost.mean() for cost in costs])

    def test_lengths_are_those_of_the_pieces_in_rows(self, figures: Any) -> None:
        found = figures(settings(docs(epochs=1)), "--steps", "900")
        lengths = Counter(1 + i % 9 for i in KEPT)
        assert {one["from"]: one["count"] for one in found["lengths"]} == lengths
        assert all(one["from"] == one["to"] for one in found["lengths"])

    def test_samples_of_no_length(self, figures: Any, text: Any) -> None:
        config = settings(Source("d", [{"x": i} for i in range(20)], epochs=1), rows=CollatedRows(4))
        found = figures(config, "--dp", "2")
        assert (found["padding"], found["each_step"]["padding"], found["lengths"]) == (None, None, None)
        assert (found["steps"], found["ended"], found["samples"]["total"]) == (3, True, 20)
        shown = text(config, "--dp", "2", "--report", "plan.html")
        assert "padding" not in shown
        assert "Padding by step" not in Path("plan.html").read_text()


class TestMixture:
    def test_targets_are_normalised_weights(self, figures: Any) -> None:
        found = figures(settings(web(weight=3), docs(weight=1)), "--steps", "20")
        assert [source["target"] for source in found["sources"]] == [0.75, 0.25]
        assert [source["weight"] for source in found["sources"]] == [3.0, 1.0]
        drawn = [source["samples"] + source["waiting"] for source in found["sources"]]
        assert drawn[0] == pytest.approx(0.75 * sum(drawn), abs=1)
        given = [source["samples"] for source in found["sources"]]
        assert [source["share"] for source in found["sources"]] == [count / sum(given) for count in given]

    def test_records_that_stay_together_are_given_one_by_one(self, figures: Any, text: Any) -> None:
        table = pa.table({"input_ids": [[1, 2]] * 400, "pair": np.arange(400) // 2})
        pq.write_table(table, "pairs.parquet")
        pairs = Source("pairs", "pairs.parquet", together="pair", overlong="drop")
        found = figures(settings(web(), pairs), "--steps", "10")
        share = found["sources"][1]["share"]
        assert (found["sources"][1]["target"], share) == (0.5, pytest.approx(2 / 3, abs=0.05))
        (note,) = found["notes"]
        assert "given of ['pairs'] are of records, and the mixture counts those that stay together as one" in note
        assert note in text(settings(web(), pairs), "--steps", "10")
        tokens = Mixture({"web": 1, "pairs": 1}, unit="tokens")
        for config in (settings(pairs), settings(web(), docs()), settings(web(), pairs, mixture=tokens)):
            assert figures(config, "--steps", "2")["notes"] == []

    def test_of_tokens(self, figures: Any) -> None:
        config = settings(web(), docs(), mixture=Mixture({"web": 1, "docs": 3}, unit="tokens"))
        found = figures(config, "--steps", "10")
        tokens = [source["tokens"] for source in found["sources"]]
        assert found["unit"] == "tokens"
        assert [source["share"] for source in found["sources"]] == [count / sum(tokens) for count in tokens]
        shares = found["each_step"]["share"]
        assert np.sum([shares["web"], shares["docs"]], axis=0) == pytest.approx(np.ones(10))
        assert sum(np.array(shares["web"]) * found["each_step"]["tokens"]) == pytest.approx(tokens[0])

    def test_a_schedule_has_the_target_of_each_step(self, figures: Any, text: Any) -> None:
        mixture = Mixture.schedule(
            [(0, {"web": 1.0, "docs": 0.0}), (10, {"web": 0.0, "docs": 1.0})], interpolate="linear"
        )
        config = settings(web(), docs(), mixture=mixture)
        found = figures(config, "--steps", "8")
        targets = [step / 10 for step in range(8)]
        assert found["each_step"]["target"]["docs"] == pytest.approx(targets)
        assert found["each_step"]["target"]["web"] == pytest.approx([1 - target for target in targets])
        of_docs = found["sources"][1]
        samples = found["each_step"]["samples"]
        assert of_docs["target"] == pytest.approx(np.average(targets, weights=samples))
        assert (of_docs["target_first"], of_docs["target_last"]) == (0.0, pytest.approx(0.7))
        assert found["scheduled"]
        shown = text(config, "--steps", "8")
        assert "by a schedule" in shown
        assert "0.00%, 70.00%" in shown

    def test_a_source_that_has_ended_is_named(self, figures: Any, text: Any) -> None:
        config = settings(web(), docs(epochs=1))
        found = figures(config, "--steps", "60")
        of_web, of_docs = found["sources"]
        assert of_web["ended_after"] is None
        assert of_docs["epochs"] == 1.0
        with MegaScaleLoader(config) as loader:
            for _ in loader:
                if loader.state_dict()["sources"]["docs"]["epoch"] == 1:
                    assert of_docs["ended_after"] == loader.step
                    break
        assert f"all given after {of_docs['ended_after']} steps" in text(config, "--steps", "60")


class TestEnds:
    def test_steps_beyond_the_end(self, figures: Any, text: Any) -> None:
        config = settings(web(epochs=1), docs(epochs=2), global_batch_size=8)
        found, real = figures(config, "--dp", "2", "--steps", "1000"), ran(config, 1000, 2)
        assert (found["steps"], found["steps_asked"], found["ended"]) == (len(real.slots), 1000, True)
        assert [source["samples"] for source in found["sources"]] == [WEB, 2 * len(KEPT)]
        assert [source["epochs"] for source in found["sources"]] == [1.0, 2.0]
        assert [source["dropped"] for source in found["sources"]] == [{}, {"filtered": 2 * (DOCS - len(KEPT))}]
        assert [source["waiting"] for source in found["sources"]] == [0, 0]
        assert found["padding"]["filler_rows"] == real.filler
        shown = text(config, "--dp", "2", "--steps", "1000")
        assert f"the stream ends after {found['steps']} steps, and 1,000 were asked for" in shown
        exactly = figures(config, "--dp", "2", "--steps", str(found["steps"]))
        assert (exactly["steps"], exactly["ended"]) == (found["steps"], True)
        assert not figures(config, "--dp", "2", "--steps", str(found["steps"] - 1))["ended"]

    def test_filler_rows_are_counted(self, figures: Any) -> None:
        config = settings(docs(epochs=1), rows=PaddedRows(16, 2), global_batch_size=16)
        found, real = figures(config, "--dp", "2"), ran(config, 100, 2)
        assert found["padding"]["filler_rows"] == real.filler == found["steps"] * 16 - len(KEPT)
        assert found["padding"]["slots"] == real.slots.total()

    def test_steps_that_are_filled_up(self, figures: Any) -> None:
        config = settings(web(), rows=PaddedRows(90, 2), global_batch_size=9)
        with pytest.warns(MegaScaleWarning, match="no multiple"):
            real = ran(config, 12, 2)
        found = figures(config, "--dp", "2", "--steps", "12")
        assert found["padding"]["filler_rows"] == real.filler == 12 * 3
        assert found["padding"]["slots"] == real.slots.total()

    def test_a_last_step_that_is_dropped(self, figures: Any) -> None:
        config = settings(docs(epochs=1), rows=PaddedRows(16, 2), global_batch_size=16, last_step="drop")
        found = figures(config, "--dp", "2")
        assert found["steps"] == len(KEPT) // 16
        assert found["sources"][0]["dropped"] == {"filtered": DOCS - len(KEPT), "last_step": len(KEPT) % 16}

    def test_no_step_at_all(self, text: Any) -> None:
        config = settings(docs(epochs=1), rows=PaddedRows(16, 512), last_step="drop")
        assert 'lower global_batch_size, or set last_step="fill"' in text(config, status=1)

    def test_truncated_samples_are_not_dropped(self, figures: Any, text: Any) -> None:
        config = settings(web(epochs=1, overlong="truncate"))
        source = figures(config, "--steps", "900")["sources"][0]
        lengths = [len(ids) for ids in pq.read_table("web.parquet")["input_ids"].to_pylist()]
        cut = sum(length > 32 for length in lengths)
        assert (source["dropped"], source["truncated"], source["samples"]) == ({}, cut, WEB)
        assert f"({cut} truncated)" in text(config, "--steps", "900")

    def test_passes(self, figures: Any, text: Any) -> None:
        config = settings(web(), docs(), global_batch_size=8)
        real = ran(config, 45, 2, passes=True)
        found = figures(config, "--dp", "2", "--steps", "45", "--passes")
        for what in ("samples", "tokens"):
            assert found["each_step"][what] == real.of(what)
        assert found["passes"] == len(real.passes) >= 2
        assert not found["ended"]
        assert [source["ended_after"] for source in found["sources"]] == [None, None]
        whole = next(step for step in range(1, 46) if sum(found["each_step"]["samples"][:step]) == WEB + len(KEPT))
        one = figures(config, "--dp", "2", "--steps", str(whole), "--passes")
        assert one["passes"] == 1
        assert [source["epochs"] for source in one["sources"]] == [1.0, 1.0]
        assert "passes    1 completed" in text(config, "--dp", "2", "--steps", str(whole), "--passes")


class TestEpochs:
    def test_a_fraction_of_known_records(self, figures: Any) -> None:
        (source,) = figures(settings(web()), "--steps", "5")["sources"]
        assert source["epochs_are_exact"]
        assert source["records"] == WEB
        assert source["epochs"] == pytest.approx((source["samples"] + source["waiting"]) / WEB)
        assert 0 < source["epochs"] < 1

    def test_dropped_records_are_gone_through(self, figures: Any) -> None:
        (source,) = figures(settings(docs()), "--steps", "12")["sources"]
        passed = source["samples"] + source["waiting"] + source["dropped"]["filtered"]
        # Behind the last sample that was drawn, drops are not counted yet.
        assert source["records"] == DOCS
        assert source["epochs"] == pytest.approx(passed / DOCS)

    @pytest.mark.parametrize("in_files", [False, True])
    def test_more_than_one(self, in_files: bool, figures: Any) -> None:
        source = in_six_files(docs()) if in_files else docs()
        (source,) = figures(settings(source, window_units=1), "--steps", "60")["sources"]
        assert source["epochs"] > 2
        passed = source["samples"] + source["waiting"] + source["dropped"]["filtered"]
        assert source["epochs"] == pytest.approx(passed / DOCS)

    @pytest.mark.parametrize("epochs", [None, 2])
    def test_of_a_curriculum(self, epochs: int | None, figures: Any) -> None:
        source = in_six_files(docs(epochs=epochs))
        strategy = Curriculum("length", [(0, 3), (90, 8)])
        (source,) = figures(settings(source, window_units=1, strategy=strategy), "--steps", "60")["sources"]
        assert source["records"] == DOCS
        passed = source["samples"] + source["waiting"] + source["dropped"]["filtered"]
        assert source["epochs"] == pytest.approx(passed / DOCS)
        assert source["epochs"] == 2 if epochs else source["epochs"] > 2
        assert (source["ended_after"] is not None) == (epochs == 2)

    def test_of_a_curriculum_whose_samples_are_several_records(self, figures: Any) -> None:
        lengths = 1 + np.random.default_rng(0).integers(0, 12, 400)
        ids = pa.array([[1] * length for length in lengths.tolist()], pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": ids, "pair": np.arange(400) // 4}), "pairs.parquet", 40)
        pairs = Source("pairs", "pairs.parquet", together="pair", overlong="drop", epochs=1)
        strategy = Curriculum("length", [(0, 12), (90, 30)])
        for steps, is_behind in ((8, True), (900, False)):
            config = settings(pairs, window_units=1, strategy=strategy)
            (source,) = figures(config, "--steps", str(steps))["sources"]
            passed = source["samples"] + source["waiting"] + source["dropped"].get("overlong", 0)
            assert source["epochs"] == pytest.approx(passed / 400)
            assert (source["epochs"] < 0.9) == is_behind

    def test_a_record_in_pieces_is_one(self, figures: Any) -> None:
        Path("long.jsonl").write_text("\n".join(json.dumps({"input_ids": [1] * n}) for n in range(1, 101)))
        (source,) = figures(settings(Source("web", "long.jsonl")), "--steps", "20")["sources"]
        assert source["records"] == 100
        assert source["epochs"] == pytest.approx((source["samples"] + source["waiting"]) / 100)

    def test_records_that_nobody_counted(self, figures: Any, text: Any) -> None:
        config = settings(in_six_files(docs()), window_units=1)
        (some,) = figures(config, "--steps", "4")["sources"]
        assert not some["epochs_are_exact"]
        assert some["records"] is None
        drawn = some["samples"] + some["waiting"] + some["dropped"]["filtered"]
        assert some["epochs"] == pytest.approx(drawn // 50 / 6)
        assert f"at least {some['epochs']:.3f}" in text(config, "--steps", "4")
        (all_of_it,) = figures(config, "--steps", "60")["sources"]
        assert all_of_it["epochs_are_exact"]
        assert all_of_it["records"] == DOCS
