"""Cases that users of other loaders reported, for tables: each docstring says what goes wrong there.

Those that concern whole runs are in tests/acceptance/test_reports.py.
"""

import gc
import json
import os
import time
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.sources import build_manifest, make_reader
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.sources.stores.storage import FileInfo

pytestmark = pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")


def write_arrow(path, table):
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)


def write_feather(path, table):
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


WRITERS = {"parquet": pq.write_table, "arrow": lambda table, path: write_arrow(path, table)}
WRITERS["feather"] = lambda table, path: write_feather(path, table)


def tokens_of(sources, **more):
    settings = {"rows": PackedRows(16, 2, pack_ahead=4), "global_batch_size": 2, "runtime": "local", "part_bytes": 500}
    found: Counter[int] = Counter()
    with MegaScaleLoader(LoaderConfig(sources=sources, **(settings | more))) as loader:
        for batch in loader:
            found.update(batch["input_ids"][batch["input_ids"] > 0].tolist())
    return found


def noted(sample):
    return {"input_ids": [sample["n"], len(sample.get("note") or "")]}


def test_rows_without_some_keys_have_nothing_there(tmp_path):
    """huggingface/datasets#7169: the keys of the first rows are demanded of all that follow."""
    lines = [{"n": n} | ({"note": "xxx"} if n % 3 else {"note": None} if n % 2 else {}) for n in range(1, 40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with_notes = pa.Table.from_pylist([line for line in lines if line.get("note")])
    without = pa.Table.from_pylist([{"n": line["n"]} for line in lines if not line.get("note")])
    expected = Counter(line["n"] for line in lines) + Counter({3: sum(1 for line in lines if line.get("note"))})
    assert tokens_of([Source("s", str(tmp_path / "a.jsonl"), epochs=1, transform=noted)]) == expected
    for kind, write in WRITERS.items():
        write(with_notes, tmp_path / f"1.{kind}")
        write(without, tmp_path / f"2.{kind}")
        assert tokens_of([Source("s", str(tmp_path / f"*.{kind}"), epochs=1, transform=noted)]) == expected


@pytest.mark.parametrize("kinds", [("parquet", "parquet"), ("parquet", "arrow"), ("feather", "arrow")])
def test_list_and_large_list_mix(tmp_path, kinds):
    """foundation-model-stack/fms-hf-tuning#551: sources with list and large_list columns cannot be interleaved."""
    types = [pa.list_(pa.int64()), pa.large_list(pa.int32())]
    expected: Counter[int] = Counter()
    for index, kind in enumerate(kinds):
        for file, list_type in enumerate((types[index], types[1 - index])):
            rows = [[100 * index + 50 * file + n + 1] * (n % 3 + 1) for n in range(20)]
            expected.update(token for row in rows for token in row)
            (tmp_path / str(index)).mkdir(exist_ok=True)
            table = pa.table({"input_ids": pa.array(rows, list_type)})
            WRITERS[kind](table, tmp_path / str(index) / f"{file}.{kind}")
    sources = [Source(f"s{i}", str(tmp_path / str(i) / f"*.{kind}"), epochs=1) for i, kind in enumerate(kinds)]
    assert tokens_of(sources) == expected


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_file_without_rows_gives_none(tmp_path, kind, place):
    """pola-rs/polars#15747: a file of the same schema and no row breaks the reading of all files together."""
    table = pa.table({"input_ids": pa.array([[n] for n in range(1, 31)], pa.list_(pa.int32())), "t": ["x"] * 30})
    for index in range(3):
        part = table.slice(0, 0) if index == place else table.slice(15 * (index - (index > place)), 15)
        WRITERS[kind](part, tmp_path / f"{index}.{kind}")
    source = Source("s", str(tmp_path / f"*.{kind}"), epochs=1)
    assert tokens_of([source]) == Counter(range(1, 31))
    rows = [sample["t"] for batch in collated(source) for sample in batch]
    assert rows == ["x"] * 30


def collated(source):
    config = LoaderConfig(sources=[source], rows=CollatedRows(5, list), global_batch_size=5, runtime="local")
    with MegaScaleLoader(config) as loader:
        yield from loader


def test_collated_rows_ask_for_no_column_of_tokens(tmp_path):
    """Rows that are collated have no need of `input_ids`: a file without is as good as any other."""
    for kind, write in WRITERS.items():
        write(pa.table({"n": list(range(20))}), tmp_path / f"a.{kind}")
        source = Source("s", str(tmp_path / f"a.{kind}"), epochs=1)
        assert sorted(sample["n"] for batch in collated(source) for sample in batch) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WRITERS, "csv"])
def test_thousands_of_small_files_cost_little(tmp_path, kind):
    """ray#44754: the metadata of 24,000 files fill the memory, for each file's footer is kept."""
    count = 2000
    if kind == "csv":
        (tmp_path / "0.csv").write_text(",".join(f"column-{n}" for n in range(60)) + "\n" + ",".join("1" * 60) + "\n")
    else:
        columns = {f"column-{number}": [1.0] for number in range(60)}
        WRITERS[kind](pa.table({"input_ids": [[1, 2, 3]], **columns}), tmp_path / f"0.{kind}")
    for number in range(1, count):
        os.link(tmp_path / f"0.{kind}", tmp_path / f"{number}.{kind}")
    source = Source("s", str(tmp_path / f"*.{kind}"), transform=dict)
    build_manifest(Source("s", str(tmp_path / f"0.{kind}"), transform=dict))
    gc.collect()
    handles = len(os.listdir("/proc/self/fd"))
    before_arrow = pa.total_allocated_bytes()
    started = time.perf_counter()
    tracemalloc.start()
    try:
        manifest = build_manifest(source)
        held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before_arrow
    finally:
        tracemalloc.stop()
    assert manifest.num_units == len(manifest.files) == count
    assert held / count < 600
    assert manifest.units.nbytes == 36 * count
    assert len(os.listdir("/proc/self/fd")) <= handles
    assert time.perf_counter() - started < 60
    pool = FilePool(4)
    reader = make_reader(source, manifest, None, pool=pool)
    for unit in range(0, count, 100):
        assert reader.read(unit).num_rows == 1
        assert pool.num_open <= 4
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= handles


def test_a_pool_keeps_files_of_one_name_in_two_stores_apart():
    """Two sources may name different files by one path of their filesystems."""

    class Remote:
        def is_remote(self, path):
            return True

        def check_unchanged(self, info):
            return None

    class Handle:
        closed = False

        def close(self):
            self.closed = True

    pool, info, stores = FilePool(4), FileInfo("a.parquet", 1, 0), (Remote(), Remote())
    made = {}

    def opener(info, storage):
        return made.setdefault(storage, Handle())

    for _ in range(2):
        for store in stores:
            with pool.lease(info, store, opener) as handle:
                assert handle is made[store]
    assert pool.num_open == 2
    with pytest.raises(OSError, match="disk"), pool.lease(info, stores[0], opener):
        raise OSError("disk")
    assert (pool.num_open, made[stores[0]].closed) == (1, True)
    pool.close()
    assert (pool.num_open, made[stores[1]].closed) == (0, True)
