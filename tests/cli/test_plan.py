"""`megascale plan` only looks, says in words what it says in JSON, refuses what it cannot plan, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megascale_lightning import ClientPlaceTree, MegaScaleLoader, Source
from megascale_lightning.cli import dryrun, main
from megascale_lightning.errors import DataError
from megascale_lightning.loading.loader import SourceLoader
from tests.cli.plans import DOCS, KEPT, ROOT, docs, in_six_files, ran, settings, web

pytestmark = pytest.mark.usefixtures("corpus")


class TestItOnlyLooks:
    def test_every_record_is_read_once_and_none_is_taken(self, monkeypatch: pytest.MonkeyPatch, figures: Any) -> None:
        def take(*_: Any) -> None:
            raise AssertionError("a batch was built")

        monkeypatch.setattr(SourceLoader, "take", take)
        config = settings(docs(epochs=2), web(), part_bytes=512)
        import planned_code

        planned_code.seen.clear()
        figures(config, "--steps", "80", "--dp", "2")
        assert Counter(planned_code.seen) == dict.fromkeys(range(DOCS), 2)

    def test_no_more_than_is_due(self, figures: Any) -> None:
        config = settings(in_six_files(docs()), window_units=1)
        import planned_code

        planned_code.seen.clear()
        found = figures(config, "--steps", "1")
        needed = found["samples"]["total"] + found["sources"][0]["waiting"]
        assert needed <= len(planned_code.seen) <= needed + 100

    def test_nothing_is_written(self, corpus: Path, figures: Any) -> None:
        before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*") if "__pycache__" not in path.parts}
        config = settings(docs("breaks", epochs=1, on_error="quarantine"), cache_dir="cache")
        found = figures(config, "--steps", "900")
        assert found["sources"][0]["dropped"] == {"transform_error": DOCS - len(KEPT)}
        after = {path: path.stat().st_mtime_ns for path in corpus.rglob("*") if "__pycache__" not in path.parts}
        assert after == before

    def test_no_cache_is_filled(self, corpus: Path, figures: Any) -> None:
        files = fsspec.filesystem("memory")
        with files.open("/planned/web.parquet", "wb") as file:
            file.write(Path("web.parquet").read_bytes())
        try:
            config = settings(Source("web", "memory://planned/web.parquet"), cache_dir=str(corpus / "cache"))
            ran(config, 1, 1)
            kept = sorted((corpus / "cache").rglob("*"))
            assert kept
            for path in reversed(kept):
                path.rmdir() if path.is_dir() else path.unlink()
            figures(config, "--steps", "2")
            assert not list((corpus / "cache").rglob("*"))
        finally:
            files.rm("/planned", recursive=True)

    def test_what_is_done_with_is_let_go(self) -> None:
        config = settings(in_six_files(docs()), web(), window_units=1)
        with dryrun.DryRun(config, ClientPlaceTree.from_sizes(), passes=True) as run:
            held = [run._planner.stats()["train"] for _ in run.steps(300)]
            assert run.state is not None
            assert run.state.passes >= 2
        assert {one["clients"] for one in held} == {1}
        assert max(one["parts"] for one in held) <= 8
        assert max(one["steps"] for one in held) <= 3

    def test_reading_is_not_planning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now, describe = [0.0], SourceLoader.describe

        def slowly(loader: SourceLoader, key: Any) -> Any:
            now[0] += 1000.0
            return describe(loader, key)

        monkeypatch.setattr(SourceLoader, "describe", slowly)
        monkeypatch.setattr(dryrun.time, "perf_counter", lambda: now[0])
        with dryrun.DryRun(settings(web()), ClientPlaceTree.from_sizes()) as run:
            assert [step.seconds for step in run.steps(5)] == [0.0] * 5
        assert now[0] >= 1000.0

    def test_files_are_let_go(self, monkeypatch: pytest.MonkeyPatch, figures: Any) -> None:
        closed = []
        shutdown = SourceLoader.shutdown
        monkeypatch.setattr(SourceLoader, "shutdown", lambda loader: (closed.append(loader), shutdown(loader)))
        figures(settings(web()), "--steps", "1")
        assert len(closed) == 1

    def test_neither_torch_nor_ray_is_needed(self, corpus: Path) -> None:
        (corpus / "planned_config.py").write_text(
            "from megascale_lightning import LoaderConfig, PackedRows, Source\n"
            "web = Source('web', 'web.parquet')\n"
            "config = LoaderConfig(sources=[web], rows=PackedRows(32, 2), global_batch_size=8)\n"
        )
        code = (
            "import sys; from megascale_lightning.cli import main; "
            "status = main(['plan', 'planned_config.py:config', '--dp', '4', '--report', 'plan.html']); "
            "print(*{'torch', 'ray', 'lightning'} & set(sys.modules)); sys.exit(status)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        *shown, last = done.stdout.splitlines()
        assert shown[0] == "train: 100 steps of 8 rows, for dp 4"
        assert last == ""
        assert (corpus / "plan.html").exists()


class TestText:
    def test_it_says_what_json_says(self, figures: Any, text: Any) -> None:
        config = settings(web(weight=3), docs(), global_batch_size=8)
        found, shown = figures(config, "--dp", "2", "--steps", "12"), text(config, "--dp", "2", "--steps", "12")
        assert shown.startswith("train: 12 steps of 8 rows, for dp 2\n")
        assert "2 microbatches of 2 rows on each of 2 data-parallel ranks" in shown
        for name in ("samples", "tokens"):
            of = found[name]
            line = f"{of['total']:,} in all, {of['mean']:,.1f} a step ({of['min']:,} to {of['max']:,})"
            assert f"  {name:9} {line}\n" in shown
        lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("    ")}
        for source in found["sources"]:
            weight, target, given, samples, tokens, epochs, *dropped = lines[source["name"]][1:]
            assert float(weight) == source["weight"]
            assert (target, given) == (f"{source['target']:.2%}", f"{source['share']:.2%}")
            assert (samples, tokens) == (f"{source['samples']:,}", f"{source['tokens']:,}")
            assert epochs == f"{source['epochs']:.3f}"
            filtered = source["dropped"].get("filtered")
            assert " ".join(dropped) == (f"{filtered} filtered" if filtered else "none")
        numbers = re.findall(r"max/.*?  ([\d.]+)  ([\d.]+)\n", shown)
        assert numbers == [
            (f"{of['mean']:.3f}", f"{of['worst']:.3f}")
            for base in ("mean", "bound")
            for of in (found["balance"][f"max_over_{base}{when}"] for when in ("_before", ""))
        ]
        assert f"speed-up  {found['speed_up']:.3f} predicted" in shown
        assert f"padding   {found['padding']['share']:.2%} ({found['padding']['tokens']:,} of" in shown
        assert "costs by AttentionCost" in shown
        assert re.search(r"planning  [\d.]+ ms a step \(median\)", shown)

    def test_one_rank_waits_for_nobody(self, text: Any) -> None:
        shown = text(settings(web()), "--steps", "1")
        assert shown.startswith("train: 1 step of 2 rows, for one rank\n")
        assert "speed-up  none" in shown

    def test_what_a_run_warns_of_is_shown(self, figures: Any, text: Any) -> None:
        config = settings(web(), global_batch_size=9)
        (found,) = figures(config, "--dp", "2", "--steps", "2")["notes"]
        assert "is no multiple of" in found
        assert f"note      {found}" in text(config, "--dp", "2", "--steps", "2")

    @pytest.mark.parametrize(
        ("arguments", "tree"),
        [
            (["--dp", "4"], {"pp": 1, "dp": 4, "cp": 1, "tp": 1}),
            (["--tree", "dp_replicate=2,fsdp=3,tp=2"], {"pp": 1, "dp": 6, "cp": 1, "tp": 2}),
            ([], {"pp": 1, "dp": 1, "cp": 1, "tp": 1}),
        ],
    )
    def test_places(self, arguments: list[str], tree: dict[str, int], figures: Any) -> None:
        found = figures(settings(web()), "--steps", "1", *arguments)
        assert found["tree"] == tree
        assert (found["groups"], found["rows_per_step"]) == (tree["dp"], 2 * tree["dp"])

    def test_accumulation(self, figures: Any, text: Any) -> None:
        found = figures(settings(web()), "--steps", "1", "--dp", "2", "--accumulate", "3")
        assert (found["microbatches"], found["rows_per_step"]) == (3, 12)
        shown = text(settings(web(), global_batch_size=8), "--dp", "2", "--accumulate", "3", status=2)
        assert "set accumulate_grad_batches=2, or global_batch_size=12" in shown

    def test_an_evaluation_stream(self, figures: Any) -> None:
        config = settings(web(), val_sources=[docs()])
        found = figures(config, "--stream", "val/0", "--dp", "2")
        assert (found["stream"], found["ended"], found["microbatches"]) == ("val/0", True, 1)
        assert found["samples"]["total"] == len(KEPT)

    def test_of_a_yaml_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("run.yaml").write_text(
            "data:\n  sources: {web: {data: web.parquet}}\n  rows:\n    class_path: megascale_lightning.PackedRows\n"
            "    init_args: {seq_len: 32, micro_batch_size: 2}\n"
        )
        assert main(["plan", "run.yaml", "--steps", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"] == "run.yaml"


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--steps", "0"], "--steps: a whole number of at least 1, not '0'"),
            (["--steps", "many"], "--steps: a whole number of at least 1, not 'many'"),
            (["--dp", "-1"], "--dp: a whole number of at least 1, not '-1'"),
            (["--tree", "dp"], "'dp' is no AXIS=N; give such as dp=8,tp=2"),
            (["--tree", "dp=0"], "a whole number of at least 1, not '0'"),
            (["--tree", "ep=8"], "unknown axis 'ep'; known names are pp: "),
            (["--tree", "dp=8", "--dp", "8"], "not allowed with"),
        ],
    )
    def test_usage(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        if arguments == ["--dp", "-1"]:
            arguments = ["--dp=-1"]
        with pytest.raises(SystemExit) as ended:
            main(["plan", "run.yaml", *arguments])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--report", "nowhere/plan.html"], "there is no folder nowhere; make it, or name a file elsewhere"),
            (["--report", "."], "is a folder; give the name of a file"),
            (["--stream", "val/0"], "there is no stream 'val/0' to plan: the config has sources for train"),
            (["--passes"], "sources ['web'] have epochs=: leave them out"),
        ],
    )
    def test_settings(self, arguments: list[str], said: str, text: Any) -> None:
        assert said in text(settings(web(epochs=1)), *arguments, status=2)

    def test_a_report_that_cannot_be_written_is_refused_before_reading(self, text: Any) -> None:
        import_of = docs()  # imports the module
        import planned_code

        planned_code.seen.clear()
        text(settings(import_of), "--report", "nowhere/plan.html", status=2)
        assert planned_code.seen == []

    def test_passes_are_of_the_training_stream(self, text: Any) -> None:
        config = settings(web(), val_sources=[docs()])
        assert "of the training stream, not of 'val/0'" in text(config, "--stream", "val/0", "--passes", status=2)

    def test_files_that_are_not_there(self, text: Any) -> None:
        assert "gone.parquet" in text(settings(Source("web", "gone.parquet")), status=2)

    def test_there_is_nothing_to_train_on(self, text: Any) -> None:
        config = settings(val_sources=[docs()])
        assert "the config has sources for val/0" in text(config, status=2)

    def test_a_source_without_records(self, text: Any) -> None:
        Path("docs.jsonl").write_text("")
        assert "source 'docs'" in text(settings(docs()), status=1)

    def test_data_that_would_end_the_run(self, text: Any) -> None:
        shown = text(settings(docs("breaks")), status=1)
        assert len(shown.splitlines()) == 1
        assert "three" in shown
        assert "docs.jsonl" in shown

    def test_errors_in_what_is_not_needed_yet_end_nothing(self, figures: Any, text: Any) -> None:
        config = settings(in_six_files(docs(shuffle=False)), web(weight=4), window_units=1, plan_window=1, part_bytes=8)
        Path("part1.jsonl").write_text("{broken")
        with MegaScaleLoader(config) as loader:
            with pytest.raises(DataError, match="not JSON"):
                list(loader)
            steps = loader.step
        assert figures(config, "--steps", str(steps))["steps"] == steps > 1
        assert "part1.jsonl" in text(config, "--steps", str(steps + 1), status=1)


class TestInterrupt:
    def test_it_ends_in_order(self, monkeypatch: pytest.MonkeyPatch, text: Any) -> None:
        closed = []
        close = dryrun.DryRun.close
        monkeypatch.setattr(dryrun.DryRun, "close", lambda run: (closed.append(run), close(run)))

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(SourceLoader, "describe", interrupt)
        Path("plan.html").write_text("before")
        shown = text(settings(web()), "--report", "plan.html", status=130)
        assert shown == "megascale: interrupted; nothing was written\n"
        assert Path("plan.html").read_text() == "before"
        assert len(closed) == 1

    def test_in_the_midst_of_a_transform(self, corpus: Path) -> None:
        (corpus / "planned_config.py").write_text(
            "import planned_code\nfrom megascale_lightning import LoaderConfig, PackedRows, Source\n"
            "source = Source('docs', 'docs.jsonl', transform=planned_code.waits)\n"
            "config = LoaderConfig(sources=[source], rows=PackedRows(32, 2))\n"
        )
        # What a shell starts in the background has SIGINT ignored, the tests too.
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from megascale_lightning.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        started = subprocess.Popen(
            [sys.executable, "-c", code, "plan", "planned_config.py:config"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with started as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "begun\n"
                process.send_signal(signal.SIGINT)
                out, error = process.communicate(timeout=30)
            finally:
                process.kill()
        assert (process.returncode, out) == (130, "")
        assert error == "megascale: interrupted; nothing was written\n"
