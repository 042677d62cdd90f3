"""`loader.sample(id)`: a record as read and as transformed, with the random numbers that it had in the run."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    CollatedRows,
    ConfigError,
    DataError,
    LoaderConfig,
    MegaScaleDataModule,
    MegaScaleLoader,
    PackedRows,
    Source,
)
from megascale_lightning.sources.stores import plaintext

COUNT = 1500


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    pq.write_table(pa.table({"n": range(COUNT)}), folder / "a.parquet", row_group_size=600)
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"n": n}) + "\n" for n in range(COUNT))
    return folder


def with_rng(sample, rng):
    return {"n": sample["n"], "x": rng.random()}


def with_globals(sample):
    return {"n": sample["n"], "x": random.random() + np.random.random()}  # noqa: NPY002


def batched(columns, rng):
    return {"n": columns["n"], "x": rng.random(len(columns["n"]))}


def batched_with_globals(columns):
    return [{"n": n, "x": random.random()} for n in columns["n"]]


def config_for(data, **more):
    settings = {"epochs": 2, **more}
    return LoaderConfig(
        sources=[Source("web", data, **settings)],
        rows=CollatedRows(50, collate_fn=list),
        runtime="local",
        seed=3,
        part_bytes=3000,
        window_units=2,
    )


@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl.gz", "sliced b.jsonl.gz"])
@pytest.mark.parametrize(
    "made",
    [
        {"transform": with_rng},
        {"transform": with_globals},
        {"transform_batched": batched},
        {"transform_batched": batched_with_globals},
    ],
    ids=["rng", "globals", "batched", "batched-globals"],
)
def test_a_sample_is_as_in_the_run(files, name, made, monkeypatch):
    name, sliced = name.removeprefix("sliced "), "sliced" in name
    if sliced:
        monkeypatch.setattr(plaintext, "SLICED_BYTES", 10)
    with MegaScaleLoader(config_for(str(files / name), **made)) as loader:
        assert loader._session._manifests["train"][0].sliced == sliced
        seen = {}
        for batch in loader:
            ids = [row[0] for row in loader.last_info.sample_ids()]
            seen.update(zip(ids, batch, strict=True))
        assert len(seen) == 2 * COUNT
        for sample_id in random.Random(0).sample(list(seen), 12):
            found = loader.sample(sample_id)
            assert found.transformed == seen[sample_id]
            assert found.raw == {"n": seen[sample_id]["n"]}
            assert found.where.startswith(f"source 'web', {files / name}, unit {sample_id[2]}, row {sample_id[3]}")


class Drawing:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, random.random()


def test_a_dataset_is_seeded_as_in_the_run():
    with MegaScaleLoader(config_for(Drawing())) as loader:
        batch = next(iter(loader))
        before = random.getstate()
        for (sample_id, *_), sample in zip(loader.last_info.sample_ids(), batch, strict=False):
            assert loader.sample(sample_id).raw == loader.sample(sample_id).transformed == sample
        assert random.getstate() == before


def test_the_data_module_needs_no_setup(files):
    config = config_for(str(files / "a.parquet"), transform=with_rng)
    data = MegaScaleDataModule(
        sources=config.sources, val_sources=config.sources, rows=config.rows, seed=3, runtime="ray"
    )
    with MegaScaleLoader(config) as loader:
        assert data.sample(("web", 1, 2, 3)).transformed == loader.sample(("web", 1, 2, 3)).transformed
    assert data.sample(("web", 0, 0, 0), stream="val/0").raw == {"n": 0}
    assert data.sample(["web", 0, 0, np.int64(5), 0, 7]).where.endswith("unit 0, row 5, epoch 0, tokens 0 to 6")
    assert not data.running


@pytest.mark.parametrize(
    ("sample_id", "problem"),
    [
        (("code", 0, 0, 0), r"there is no source 'code' in stream 'train', which has \['web'\]"),
        (("web", 0, 3, 0), "source 'web' has epochs from 0 on and units 0 to 2, not epoch 0, unit 3"),
        (("web", -1, 0, 0), "not epoch -1, unit 0"),
        (("web", 2**31, 0, 0), "not epoch 2147483648, unit 0"),
        (("web", 0, 1, 600), "source 'web': unit 1 has no row 600: its rows are 0 to 599"),
        (("web", 0, 0, -1), "source 'web': unit 0 has no row -1: its rows are 0 to 599"),
        (("web", 0, 0), "is no sample id: give .source, epoch, unit, row."),
        (("web", 0, 0, "x"), "is no sample id"),
        ("web", "is no sample id"),
        (5, "is no sample id"),
    ],
)
@pytest.mark.parametrize("made", [{"transform": with_rng}, {"transform_batched": batched}], ids=["each", "batched"])
def test_ids_that_mean_nothing(files, sample_id, problem, made):
    data = MegaScaleDataModule(sources=[Source("web", str(files / "a.parquet"), **made)], rows=CollatedRows(1))
    with pytest.raises(ConfigError, match=problem):
        data.sample(sample_id)


def test_rows_of_a_compressed_file_end_too(files):
    data = MegaScaleDataModule(
        sources=[Source("web", str(files / "b.jsonl.gz"), transform=with_rng)], rows=CollatedRows(1)
    )
    assert data.sample(("web", 0, 0, COUNT - 1)).raw == {"n": COUNT - 1}
    with pytest.raises(ConfigError, match="unit 0 has no row 1500"):
        data.sample(("web", 0, 0, COUNT))
    with pytest.raises(ConfigError, match=r"there is no stream 'val/0'; the config has \['train'\]"):
        data.sample(("web", 0, 0, 0), stream="val/0")


def failing(sample):
    if sample["n"] == 1203:
        raise ValueError("a bad record")
    return {"input_ids": [1]}


def test_the_error_of_a_record_names_the_call_that_shows_it(files):
    config = LoaderConfig(
        sources=[Source("web", str(files / "a.parquet"), transform=failing)], rows=PackedRows(8, 1), runtime="local"
    )
    with MegaScaleLoader(config) as loader:
        wanted = (
            r"unit 2, row 3: transform 'failing' failed: ValueError: .*; \.sample\(\(.*\)\) of the loader or the data"
        )
        with pytest.raises(DataError, match=wanted) as info:
            list(loader)
        call = str(info.value).partition("; ")[2].partition(" of the loader")[0]
        found = eval(f"loader{call}", {"loader": loader})
        assert found.raw == {"n": 1203}
        with pytest.raises(DataError, match="unit 2, row 3, epoch 0: transform 'failing' failed") as again:
            _ = found.transformed
        assert isinstance(again.value.__cause__, ValueError)
        assert loader.sample(("web", 0, 2, 4)).transformed == {"input_ids": [1]}


def test_a_failing_call_of_a_batch_can_be_made_again(files):
    def fails(columns):
        raise ValueError("a bad batch")

    config = LoaderConfig(
        sources=[Source("web", str(files / "a.parquet"), transform_batched=fails)],
        rows=PackedRows(8, 1),
        runtime="local",
    )
    with MegaScaleLoader(config) as loader:
        with pytest.raises(
            DataError, match=r"rows 0 to 255: .*; \.sample\(\('web', 0, \d, 0\)\)\.transformed of the loader or"
        ):
            list(loader)
        with pytest.raises(
            DataError, match=r"source 'web', .*: rows 0 to 255: transform .* failed: ValueError: a bad batch"
        ):
            _ = loader.sample(("web", 0, 0, 0)).transformed


def test_a_record_that_cannot_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nnot json\n')
    data = MegaScaleDataModule(
        sources=[Source("web", str(tmp_path / "a.jsonl"), transform=failing)], rows=CollatedRows(1)
    )
    found = data.sample(("web", 0, 0, 1))
    assert found.raw in (None, b"not json")
    with pytest.raises(DataError, match=r"unit 0, row 1, epoch 0: "):
        _ = found.transformed


def test_a_dropped_record_is_none(files):
    data = MegaScaleDataModule(
        sources=[Source("web", str(files / "a.parquet"), transform=lambda sample: None)], rows=CollatedRows(1)
    )
    assert data.sample(("web", 0, 0, 1)).transformed is None


def drawing():
    for n in range(120):
        yield {"n": n, "x": random.random()}


@pytest.mark.filterwarnings("ignore:source 'web' is an iterable")
def test_an_iterable_that_draws_is_shown_as_in_the_run():
    with MegaScaleLoader(config_for(drawing, format_options={"slice_records": 50})) as loader:
        seen = {}
        for batch in loader:
            seen.update(zip([row[0] for row in loader.last_info.sample_ids()], batch, strict=True))
        assert {sample_id[1] for sample_id in seen} == {0, 1}
        for sample_id in random.Random(0).sample(list(seen), 6):
            assert loader.sample(sample_id).raw == seen[sample_id]


@pytest.mark.filterwarnings("ignore:source 'web' is an iterable")
@pytest.mark.parametrize(
    ("data", "made", "inline"),
    [
        (drawing, {}, True),
        (drawing, {"thread_safe": True, "transform": with_rng}, True),
        (drawing, {"executor": "processes", "transform": with_globals}, True),
        ([{"n": 1}], {}, True),
        ([{"n": 1}], {"executor": "processes"}, False),
        ([{"n": 1}], {"thread_safe": True}, False),
        ("a.parquet", {"transform": with_globals}, True),
        ("a.parquet", {"transform": with_rng}, False),
    ],
)
def test_code_that_may_draw_does_not_run_beside_the_training_step(files, data, made, inline):
    data = str(files / data) if isinstance(data, str) else data
    with MegaScaleLoader(config_for(data, **made)) as loader:
        assert loader._session.reads_inline == inline
