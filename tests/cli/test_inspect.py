"""`megascale inspect` tells what a source holds as a run would read it, says what is bad, and shows no secret."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megascale_lightning import CollatedRows, LoaderConfig, PackedRows, Source
from megascale_lightning.cli import main

ROOT = Path(__file__).resolve().parents[2]
ROWS = {"class_path": "megascale_lightning.PackedRows", "init_args": {"seq_len": 16, "micro_batch_size": 2}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    lengths = [1 + i % 24 for i in range(48)]
    ids = pa.array([np.arange(n, dtype=np.int32) for n in lengths])
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "web.parquet", row_group_size=10)
    lines = [json.dumps({"text": "ab" * (i % 7), "id": i}) for i in range(200)]
    lines[150] = "{broken"
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    (tmp_path / "inspected_code.py").write_text(
        "import numpy as np\n"
        "from megascale_lightning import LoaderConfig, PackedRows, Source\n"
        "def tokenize(sample):\n"
        "    if sample['id'] % 10 == 3: return None\n"
        "    if sample['id'] == 45: raise ValueError('forty-five')\n"
        "    return {'input_ids': np.frombuffer(sample['text'].encode(), np.uint8).astype(np.int32)}\n"
        "def batched(columns):\n"
        "    return {'input_ids': [[1] * n for n in map(len, columns['text'])]}\n"
        "def config():\n"
        "    return LoaderConfig(sources=[Source('web', 'web.parquet')], rows=PackedRows(16, 2))\n"
        "def breaks(columns):\n"
        "    if 45 in columns['id']: raise ValueError('forty-five')\n"
        "    return batched(columns)\n"
        "made = config()\n"
        "listed = LoaderConfig(sources=[Source('d', [{'input_ids': [1]}] * 5)], rows=PackedRows(16, 2))\n"
        "number = 3\n"
    )
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('usage')\n")
    return tmp_path


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    """Name -> report."""
    assert main(["inspect", *arguments, "--json"]) == status
    shown = capsys.readouterr()
    return {found["source"]: found for found in json.loads(shown.out)["sources"]}


def written(sources: dict[str, Any], *, rows: Any = ROWS, wrapped: bool = True, **more: Any) -> str:
    settings = {"sources": sources, "rows": rows, "runtime": "local", **more}
    Path("run.yaml").write_text(
        yaml.safe_dump({"data": settings, "trainer": {}} if wrapped else settings, sort_keys=False)
    )
    return "run.yaml"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error."""
    assert main(["inspect", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megascale: ")
    return line


DOCS = {"data": "docs.jsonl", "transform": "inspected_code.tokenize"}


class TestWhatIsFound:
    def test_a_source_of_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = written({"web": {"data": "web.parquet", "weight": 3}, "docs": {**DOCS, "weight": 1}})
        web = inspected(capsys, config)["web"]
        assert {name: web[name] for name in ("format", "files", "units", "rows", "rows_are")} == {
            "format": "parquet",
            "files": 1,
            "units": 5,
            "rows": 48,
            "rows_are": "counted",
        }
        assert web["stored_bytes"] == Path("web.parquet").stat().st_size
        assert (web["weight"], web["share"]) == (3, 0.75)
        assert web["scanned"] == {"records": 48, "units": 5, "all": True, "ran_out_of_time": False}
        lengths = web["lengths"]
        assert (lengths["min"], lengths["max"], lengths["total"], lengths["samples"]) == (1, 24, 600, 48)
        assert (lengths["overlong"], lengths["overlong_policy"]) == (16, "split")
        assert [(bar["from"], bar["to"], bar["count"]) for bar in lengths["histogram"]] == [
            (1, 1, 2),
            (2, 3, 4),
            (4, 7, 8),
            (8, 15, 16),
            (16, 31, 18),
        ]
        assert web["first"]["raw"] == {"input_ids": {"type": "int32 [1]", "value": "[0]"}}

    def test_lengths_are_those_after_the_transform(self, capsys: pytest.CaptureFixture[str]) -> None:
        docs = inspected(capsys, written({"docs": DOCS}), "--scan", "1000")["docs"]
        good = [2 * (i % 7) for i in range(200) if i % 10 != 3 and i not in (45, 150)]
        kept = [n for n in good if n]
        assert docs["rows"] == 200
        assert docs["scanned"]["all"]
        assert docs["lengths"]["samples"] == len(kept)
        assert docs["lengths"]["total"] == sum(kept)
        assert docs["dropped"] == {
            "filtered": 20,
            "empty": len(good) - len(kept),
            "read_error": 1,
            "transform_error": 1,
        }
        assert docs["first"]["raw"]["text"] == {"type": "str of 0", "value": "''"}
        assert docs["first"]["transform"] == "tokenize"
        assert docs["first"]["transformed"] == {"input_ids": {"type": "int32 [0]", "value": "[]"}}

    @pytest.mark.parametrize("policy", ["truncate", "drop", "error"])
    def test_overlong_samples_keep_their_length(self, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
        config = written({"web": {"data": "web.parquet", "overlong": policy}})
        lengths = inspected(capsys, config)["web"]["lengths"]
        assert (lengths["max"], lengths["overlong"], lengths["overlong_policy"]) == (24, 16, policy)

    def test_batched_transforms_and_collated_rows(self, capsys: pytest.CaptureFixture[str]) -> None:
        batched = {"data": "docs.jsonl", "transform_batched": "inspected_code.batched", "on_error": "skip"}
        docs = inspected(capsys, written({"docs": batched}))["docs"]
        assert docs["lengths"]["total"] == sum(2 * (i % 7) for i in range(200) if i != 150)
        rows = {"class_path": "CollatedRows", "init_args": {"micro_batch_size": 2, "collate_fn": "torch.stack"}}
        docs = inspected(capsys, written({"docs": {"data": "docs.jsonl"}}, rows=rows))["docs"]
        assert docs["lengths"] is None, "samples that all count as 1 have nothing to show"
        assert docs["num_bad"] == 1

    def test_a_few_records_are_taken_from_all_over(self, capsys: pytest.CaptureFixture[str]) -> None:
        web = inspected(capsys, written({"web": {"data": "web.parquet"}}), "--scan", "10")["web"]
        assert web["scanned"] == {"records": 10, "units": 5, "all": False, "ran_out_of_time": False}
        assert web["lengths"]["max"] > 12

    def test_of_many_units_both_ends_are_looked_at(self, capsys: pytest.CaptureFixture[str]) -> None:
        pq.write_table(pa.table({"input_ids": [[1] * (i + 1) for i in range(60)]}), "many.parquet", row_group_size=2)
        many = inspected(capsys, written({"many": {"data": "many.parquet"}}), "--scan", "16")["many"]
        assert (many["scanned"]["units"], many["scanned"]["records"]) == (8, 16)
        assert (many["lengths"]["min"], many["lengths"]["max"]) == (1, 60)
        assert many["lengths"]["mean"] == pytest.approx(30.5, abs=2)

    def test_one_unit_cannot_use_up_the_number(self, capsys: pytest.CaptureFixture[str]) -> None:
        docs = inspected(capsys, written({"docs": DOCS}), "--scan", "7")["docs"]
        assert (docs["scanned"]["records"], docs["scanned"]["all"]) == (7, False)
        assert (docs["rows"], docs["rows_are"]) == (200, "counted"), "a small source is counted all the same"

    def test_rows_are_estimated_where_counting_takes_long(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("megascale_lightning.cli.inspection._COUNT_S", 0.0)
        with open("large.jsonl", "wb") as file:
            file.writelines(b'{"text": "%b", "id": %d}\n' % (b"x" * 1000, i) for i in range(20_000))
        large = inspected(capsys, written({"large": {**DOCS, "data": "large.jsonl"}}))["large"]
        assert (large["units"], large["rows_are"]) == (3, "estimated")
        assert large["rows"] == pytest.approx(20_000, rel=0.01)
        monkeypatch.setattr("megascale_lightning.sources.formats.webdataset.format.SLICED_BYTES", 1000)
        with tarfile.open("large.tar", "w") as archive:
            for index in range(300):
                info = tarfile.TarInfo(f"{index:04}.txt")
                info.size = 10_000
                archive.addfile(info, io.BytesIO(b"y" * 10_000))
        rows = {"class_path": "CollatedRows", "init_args": {"micro_batch_size": 2}}
        large = inspected(capsys, written({"large": {"data": "large.tar"}}, rows=rows))["large"]
        assert (large["read_in_slices"], large["scanned"]["all"]) == (True, True)
        assert (large["rows"], large["rows_are"]) == (300, "counted"), "all of it was looked at"
        large = inspected(capsys, written({"large": {"data": "large.tar"}}, rows=rows), "--scan", "30")["large"]
        assert (large["scanned"]["records"], large["rows_are"]) == (30, "estimated")
        assert large["rows"] == pytest.approx(300, rel=0.05)

    def test_of_what_is_compressed_and_large_some_are_counted(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("megascale_lightning.sources.stores.plaintext.SLICED_BYTES", 1000)
        with gzip.open("large.jsonl.gz", "wb", compresslevel=1) as file:
            file.writelines(b'{"text": "%b", "id": %d}\n' % (b"x" * 1000, i) for i in range(3000))
        config = written({"large": {**DOCS, "data": "large.jsonl.gz"}})
        large = inspected(capsys, config)["large"]
        assert (large["read_in_slices"], large["scanned"]["records"]) == (True, 1000)
        assert (large["rows"], large["rows_are"]) == (3000, "counted")
        monkeypatch.setattr("megascale_lightning.cli.inspection._COUNT_S", 0.0)
        large = inspected(capsys, config)["large"]
        assert large["rows_are"] == "at least"
        assert 900 < large["rows"] < 1100

    def test_an_iterable_says_what_it_can(self, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
        def numbers() -> Any:
            return ({"input_ids": [1, 2]} for _ in range(10**12))

        module = type(sys)("inspected_numbers")
        module.config = LoaderConfig(sources=[Source("n", numbers)], rows=PackedRows(8, 1), runtime="local")
        monkeypatch.setitem(sys.modules, "inspected_numbers", module)
        monkeypatch.setattr("megascale_lightning.cli.inspection._COUNT_S", 0.1)
        found = inspected(capsys, "inspected_numbers:config", "--scan", "1500")["n"]
        assert (found["format"], found["rows_are"], found["stored_bytes"]) == ("iterable", "at least", None)
        assert found["scanned"]["records"] == 1500
        assert "is an iterable" in found["notes"][0]

    def test_values_of_many_kinds(self, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
        item = (np.zeros((2, 3), np.float32), 7, b"x" * 500, None, {"a": 1}, "line\nline", [1.5] * 99)
        module = type(sys)("inspected_items")
        module.config = LoaderConfig(sources=[Source("d", [item])], rows=CollatedRows(1), runtime="local")
        monkeypatch.setitem(sys.modules, "inspected_items", module)
        raw = inspected(capsys, "inspected_items:config")["d"]["first"]["raw"]
        assert list(raw) == ["0", "1", "2", "3", "4", "5", "6"]
        assert [raw[name]["type"] for name in raw] == [
            "float32 [2, 3]",
            "int",
            "bytes of 500",
            "none",
            "dict of 1",
            "str of 9",
            "list of 99 float",
        ]
        assert raw["0"]["value"] == "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]"
        assert raw["5"]["value"] == "'line\\nline'"
        assert all(len(field["value"]) < 110 for field in raw.values())
        assert main(["inspect", "inspected_items:config"]) == 0
        assert "    3: none" in capsys.readouterr().out.splitlines()

    def test_the_time_ends_a_slow_scan(self, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
        monkeypatch.setattr("megascale_lightning.cli.inspection._SCAN_S", 0.0)
        docs = inspected(capsys, written({"docs": DOCS}))["docs"]
        assert docs["scanned"] == {"records": 32, "units": 1, "all": False, "ran_out_of_time": True}

    def test_a_batched_transform_gets_as_much_as_in_a_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("sizes.py").write_text(
            "def batched(columns):\n    n = len(columns['id'])\n    return {'input_ids': [[1] * n] * n}\n"
        )
        Path("many.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(300)))
        config = written({"many": {"data": "many.jsonl", "transform_batched": "sizes.batched"}})
        many = inspected(capsys, config)["many"]
        assert (many["lengths"]["min"], many["lengths"]["max"]) == (44, 256)

    def test_what_is_joined(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = [json.dumps({"id": i, "more": "x" * i}) for i in range(10, 200)]
        Path("more.jsonl").write_text("\n".join(lines))
        join = {"data": "more.jsonl", "on": "id", "columns": ["more"]}
        config = written({"docs": {**DOCS, "join": join}})
        docs = inspected(capsys, config, "--scan", "all", status=1)["docs"]
        (joined,) = docs["joined"]
        assert (joined["on"], joined["columns"], joined["format"], joined["files"]) == ("id", ["more"], "jsonl", 1)
        assert joined["paths"] == [str(Path("more.jsonl").resolve())]
        assert docs["dropped"]["unpaired"] == 10
        assert docs["num_bad"] == 10 + docs["dropped"]["read_error"] + docs["dropped"]["transform_error"]
        assert {"row": 3, "reason": "unpaired"}.items() <= docs["bad"][3].items()
        assert docs["bad"][3]["message"].endswith("more.jsonl has the 'id' 3")
        assert docs["first"]["row"] == 10
        assert set(docs["first"]["raw"]) == {"text", "id", "more"}
        assert main(["inspect", config]) == 0
        shown = capsys.readouterr().out
        assert "joined    more by 'id' of jsonl, " in shown
        assert "unpaired (what is to be joined to it is not there)" in shown

    def test_the_first_record_of_an_iterable_is_that_of_the_run(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: Any
    ) -> None:
        def draws() -> Any:
            return ({"input_ids": [1] * random.randrange(1, 10**4)} for _ in range(1))

        module = type(sys)("inspected_draws")
        module.config = LoaderConfig(sources=[Source("n", draws)], rows=PackedRows(8, 1), runtime="local")
        monkeypatch.setitem(sys.modules, "inspected_draws", module)
        found = inspected(capsys, "inspected_draws:config")["n"]
        assert found["first"]["raw"]["input_ids"]["type"] == f"list of {found['lengths']['max']} int"


class TestBadData:
    def test_a_bad_image_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("pictures").mkdir()
        for name in ("a.png", "b.png", "c.png"):
            Path("pictures", name).write_bytes(b"" if name == "b.png" else b"x" * 100)
        rows = {"class_path": "CollatedRows", "init_args": {"micro_batch_size": 1}}
        config = written({"p": {"data": "pictures", "format": "images"}}, rows=rows)
        (bad,) = inspected(capsys, config, "--scan", "all", status=1)["p"]["bad"]
        assert (Path(bad["file"]).name, bad["row"]) == ("b.png", 1)

    def test_all_lists_every_bad_row_and_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        docs = inspected(capsys, written({"docs": DOCS}), "--scan", "all", status=1)["docs"]
        assert docs["num_bad"] == 2
        assert [(bad["unit"], bad["row"], bad["reason"]) for bad in docs["bad"]] == [
            (0, 45, "transform_error"),
            (0, 150, "read_error"),
        ]
        assert "forty-five" in docs["bad"][0]["message"]
        assert docs["bad"][0]["file"].endswith("docs.jsonl")

    def test_a_file_cut_short(self, capsys: pytest.CaptureFixture[str]) -> None:
        pq.write_table(pa.table({"input_ids": [[1, 2]] * 30}), "cut.parquet", row_group_size=10)
        content = bytearray(Path("cut.parquet").read_bytes())
        at = pq.ParquetFile("cut.parquet").metadata.row_group(1).column(0).dictionary_page_offset
        content[at : at + 8] = b"\xff" * 8
        Path("cut.parquet").write_bytes(content)
        config = written({"cut": {"data": "cut.parquet"}})
        cut = inspected(capsys, config, "--scan", "all", status=1)["cut"]
        assert (cut["num_bad"], len(cut["bad"])) == (10, 1)
        assert (cut["bad"][0]["unit"], cut["bad"][0]["row"]) == (1, None)
        assert main(["inspect", config]) == 0, "a look finds it, too, and is no verdict"
        assert "unit 1, all rows: read_error" in capsys.readouterr().out

    def test_a_batched_transform_that_raises(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The record is found also where `on_error` is "raise", under which a run stops at the batch."""
        config = written({"docs": {"data": "docs.jsonl", "transform_batched": "inspected_code.breaks"}})
        docs = inspected(capsys, config, "--scan", "all", status=1)["docs"]
        assert [(bad["row"], bad["reason"]) for bad in docs["bad"]] == [(45, "transform_error"), (150, "read_error")]

    def test_good_data_pass(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert inspected(capsys, written({"web": {"data": "web.parquet"}}), "--scan", "all")["web"]["num_bad"] == 0

    def test_the_first_sample_is_a_good_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("bad.jsonl").write_text('{broken\n{"input_ids": [7]}\n')
        first = inspected(capsys, written({"bad": {"data": "bad.jsonl"}}))["bad"]["first"]
        assert (first["row"], first["raw"]["input_ids"]["value"]) == (1, "[7]")


class TestText:
    def test_what_a_person_reads(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", written({"web": {"data": "web.parquet"}, "docs": DOCS}, val_sources={})]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "train  web: parquet, weight 1 (50.0% of the samples of train)"
        assert "  rows      48" in lines
        assert "    16-31  18  ########################################" in lines
        assert "  overlong  16 are longer than a row (16): they are split (overlong='split')" in lines
        assert "  dropped   20 filtered (the transform gave None)" in lines
        assert any("docs.jsonl, unit 0, row 45: transform_error: " in line for line in lines)

    def test_one_source(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = written({"web": {"data": "web.parquet"}, "docs": DOCS}, val_sources={"web": {"data": "web.parquet"}})
        assert main(["inspect", config, "--source", "web"]) == 0
        heads = [line for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
        assert [line.split(":")[0] for line in heads] == ["train  web", "val/0  web"]

    def test_no_secret_is_shown(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INSPECTED_KEY", "hunter2222")
        Path("said.jsonl").write_text('{"input_ids": [1], "text": "hunter2222 and pass-in-plain"}\n{hunter2222\n')
        options = {"key": "env:INSPECTED_KEY", "password": "pass-in-plain", "auto_mkdir": False}
        config = written({"said": {"data": "said.jsonl", "storage_options": options}})
        for more in ((), ("--json",), ("--scan", "all")):
            main(["inspect", config, *more])
            shown = capsys.readouterr()
            assert "***" in shown.out
            assert "hunter2222" not in shown.out + shown.err
            assert "pass-in-plain" not in shown.out + shown.err
        signed = "https://u:pass-word@127.0.0.1:9/x.jsonl?X-Amz-Signature=s1gned"
        line = refused(capsys, written({"far": {"data": signed}}))
        assert "s1gned" not in line
        assert "pass-word" not in line

    def test_a_reader_that_has_seen_enough(self) -> None:
        config = written({"web": {"data": "web.parquet"}, "docs": DOCS})
        code = f"import sys; from megascale_lightning.cli import main; sys.exit(main(['inspect', {config!r}]))"
        with subprocess.Popen(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as done:
            assert done.stdout is not None
            assert done.stderr is not None
            done.stdout.close()
            assert done.stderr.read() == ""
            assert done.wait(60) == 0


class TestSettings:
    @pytest.mark.parametrize("name", ["config", "made"])
    @pytest.mark.parametrize("where", ["inspected_code", "inspected_code.py"])
    def test_objects_of_modules_and_files(self, name: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert inspected(capsys, f"{where}:{name}")["web"]["rows"] == 48

    def test_a_file_named_like_a_module_that_is_loaded(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("json.py").write_text(Path("inspected_code.py").read_text())
        assert inspected(capsys, "json.py:config")["web"]["rows"] == 48
        assert sys.modules["json"] is json

    def test_a_datamodule(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from megascale_lightning import MegaScaleDataModule

        module = type(sys)("inspected_data")
        module.make = lambda: MegaScaleDataModule(
            sources=[Source("web", "web.parquet")], rows=CollatedRows(2), runtime="local"
        )
        monkeypatch.setitem(sys.modules, "inspected_data", module)
        assert inspected(capsys, "inspected_data:make")["web"]["rows"] == 48

    def test_bare_settings_and_class_paths(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = written({"web": {"data": "web.parquet"}}, wrapped=False)
        assert inspected(capsys, config)["web"]["rows"] == 48
        init_args = {"sources": {"web": {"data": "web.parquet"}}, "rows": ROWS, "tree": None}
        settings = {"data": {"class_path": "megascale_lightning.MegaScaleDataModule", "init_args": init_args}}
        Path("run.yaml").write_text(yaml.safe_dump(settings))
        assert inspected(capsys, "run.yaml")["web"]["rows"] == 48

    @pytest.mark.parametrize("listed", [False, True])
    def test_objects_of_sources(self, listed: bool, capsys: pytest.CaptureFixture[str]) -> None:
        Path("made_code.py").write_text(
            "class Repeated:\n"
            "    def __init__(self, times): self.times = times\n"
            "    def __call__(self, sample): return {'input_ids': [1] * self.times}\n"
        )
        transform = {"class_path": "made_code.Repeated", "init_args": {"times": 3}}
        source = {"data": "web.parquet", "transform": transform}
        sources: Any = [{"name": "web", **source}] if listed else {"web": source}
        web = inspected(capsys, written(sources))["web"]
        assert web["lengths"]["total"] == 3 * 48
        assert web["first"]["transform"] == "Repeated"

    def test_the_example(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Its data are not there, which is what is said: everything before was understood."""
        assert "text/code/*.parquet" in refused(capsys, str(ROOT / "examples" / "lightning_cli.yaml"))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (lambda: "nothing", "is no settings: give a YAML file"),
            (lambda: "inspected_code:nothing", "has no 'nothing'; give a YAML file"),
            (lambda: "inspected_code.py", r"names no attribute: add one, as in inspected_code\.py:config; give a YAML"),
            (lambda: "nowhere.yaml", r"nowhere\.yaml is not there, seen from .*; give a YAML file"),
            (lambda: "inspected_code:number", "is a int; give a YAML file"),
            (lambda: "not_there_at_all:x", "cannot be imported .ModuleNotFoundError"),
            (lambda: "leaves.py:x", "leaves.py cannot be imported .SystemExit: usage"),
            (lambda: "missing.py:x", "missing.py is not there, seen from .*; give a YAML file"),
            (lambda: written({"web": {"data": "web.parquet"}}, wieght=1), r"settings \['wieght'\]"),
            (lambda: written({"web": {"data": "nowhere.parquet"}}), "'web'.*nowhere.parquet"),
            (lambda: written({"web": {"data": "docs.jsonl", "transform": "a.b"}}), "transform='a.b' cannot be"),
            (lambda: written({"web": {"data": "web.parquet"}}, rows={"class_path": "Rowz"}), "'Rowz' cannot be imp"),
            (lambda: written({"web": {"data": "web.parquet"}}, rows={**ROWS, "init_args": {"a": 1}}), "argument 'a'"),
        ],
    )
    def test_what_is_wrong_is_one_line(
        self, config: Callable[[], str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(refused(capsys, config()))

    def test_an_unknown_source(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = written({"web": {"data": "web.parquet"}})
        assert "there is no source 'x'; there are web" in refused(capsys, config, "--source", "x")

    def test_neither_ray_nor_torch_is_loaded(self) -> None:
        config = written({"web": {"data": "web.parquet"}, "docs": DOCS})
        code = (
            "import sys\nfrom megascale_lightning.cli import main\n"
            f"status = main(['inspect', {config!r}]) + main(['inspect', 'inspected_code:listed'])\n"
            "print(status, sorted({'ray', 'torch', 'lightning', 'datasets', 'pandas'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_a_name_that_is_no_text_is_shown(folder: Path) -> None:
    """On a terminal that is strict about its encoding, too."""
    (folder / os.fsdecode(b"\xff.jsonl")).write_text('{"input_ids": [1]}\n')
    config = written({"web": {"data": "*.jsonl", "transform": None}})
    code = f"import sys; from megascale_lightning.cli import main; sys.exit(main(['inspect', {config!r}]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
    (folder / "docs.jsonl").unlink()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\udcff.jsonl" in done.stdout
