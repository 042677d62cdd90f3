import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import ConfigError, DataError, EmptySourceError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.arrowcolumns import list_column, scalar_column, table_rows
from megascale_lightning.sources.parquet import FilePool


def write(path, rows, kind=None, row_group_size=3, **more):
    pq.write_table(pa.table({"input_ids": pa.array(rows, kind or pa.list_(pa.int32())), **more}), path, row_group_size)


def read_all(source, columns=("input_ids",)):
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, columns)
    blocks = [reader.read(unit) for unit in range(manifest.num_units)]
    return [row["input_ids"].tolist() for block in blocks for row in block.samples()]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.list_(pa.int16(), 2)]
)
def test_every_kind_of_list_gives_the_same_rows(tmp_path, kind):
    rows = [[i, i + 1] for i in range(8)]
    write(tmp_path / "a.parquet", rows[:5], kind)
    write(tmp_path / "b.parquet", rows[5:], kind)
    assert read_all(Source("s", str(tmp_path / "*.parquet"))) == rows


def test_files_and_row_groups_without_rows_are_fine(tmp_path):
    write(tmp_path / "a.parquet", [])
    with pq.ParquetWriter(tmp_path / "b.parquet", pa.schema({"input_ids": pa.list_(pa.int32())})) as writer:
        writer.write_table(pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))}))
        writer.write_table(pa.table({"input_ids": pa.array([[1], [2]], pa.list_(pa.int32()))}))
    assert read_all(Source("s", str(tmp_path / "*.parquet"))) == [[1], [2]]
    with pytest.raises(EmptySourceError):
        build_manifest(Source("s", str(tmp_path / "a.parquet")))


def test_slices_of_a_row_group_in_any_order(tmp_path):
    rows = [list(range(i)) for i in range(40)]
    write(tmp_path / "a.parquet", rows, row_group_size=40)
    source = Source("s", str(tmp_path / "a.parquet"))
    reader = make_reader(source, build_manifest(source), ["input_ids"])
    for start, stop in [(0, 13), (13, 26), (26, 40), (5, 9), (9, 30), (31, 33), (0, 40), (7, 7), (39, -1), (2, 3)]:
        got = [row["input_ids"].tolist() for row in reader.read(0, start, stop).samples()]
        assert got == rows[start : 40 if stop < 0 else stop]


def test_only_the_columns_asked_for_are_read(tmp_path):
    write(tmp_path / "a.parquet", [[1]], text=["x"], other=[1.5])
    source = Source("s", str(tmp_path / "a.parquet"), transform=dict)
    manifest = build_manifest(source)
    assert make_reader(source, manifest, ["text"]).read(0).table.column_names == ["text"]
    assert make_reader(source, manifest, None).read(0).table.column_names == ["input_ids", "text", "other"]


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    pq.write_table(pa.table({"text": ["x"], "url": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"'web'.*a\.parquet has no column 'input_ids'.*text, url"):
        build_manifest(Source("web", str(tmp_path / "a.parquet")))
    source = Source("web", str(tmp_path / "a.parquet"), transform=dict)
    with pytest.raises(ConfigError, match="no column 'labels'"):
        make_reader(source, build_manifest(source), ["labels"]).read(0)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"'web'.*a\.parquet"):
        build_manifest(Source("web", str(tmp_path / "a.parquet")))


def test_no_more_files_stay_open_than_allowed(tmp_path):
    for index in range(7):
        write(tmp_path / f"{index}.parquet", [[index]])
    source = Source("s", str(tmp_path / "*.parquet"))
    manifest, pool = build_manifest(source), FilePool(3)
    reader = make_reader(source, manifest, ["input_ids"], pool=pool)
    for unit in [0, 1, 2, 3, 4, 5, 6, 0, 6]:
        assert reader.read(unit).samples()[0]["input_ids"].tolist() == [unit]
        assert pool.num_open <= 3
    reader.close()
    assert pool.num_open == 0


def test_list_columns_are_views_that_mind_slices():
    array = pa.array([[1, 2], [3], [], [4, 5, 6]], pa.list_(pa.int32()))
    ragged, bad = list_column(array.slice(1, 3))
    assert (ragged.values.tolist(), ragged.offsets.tolist(), bad) == ([3, 4, 5, 6], [0, 1, 1, 4], {})
    address = np.frombuffer(array.values.buffers()[1], np.int32).__array_interface__["data"][0]
    assert ragged.values.__array_interface__["data"][0] == address + 8
    chunked, _ = list_column(pa.chunked_array([array.slice(3), array.slice(0, 1)]))
    assert (chunked.values.tolist(), chunked.offsets.tolist()) == ([4, 5, 6, 1, 2], [0, 3, 5])


def test_nulls_are_reported_by_row():
    array = pa.array([[9], [1, None], None, [2, 3], [None]], pa.large_list(pa.int64())).slice(1)
    ragged, bad = list_column(array)
    assert sorted(bad) == [0, 1, 3]
    assert bad[1] == "is null"
    assert ragged.values[ragged.offsets[2] : ragged.offsets[3]].tolist() == [2, 3]
    values, bad = scalar_column(pa.array([1, None, 3]))
    assert (values.tolist(), bad) == ([1, 0, 3], {1: "is null"})


def test_rows_for_transforms_are_writable_and_keep_nulls():
    table = pa.table({"a": pa.array([[1, 2], None, [3, None]]), "b": ["x", None, "z"]})
    rows = table_rows(table)
    rows[0]["a"][0] = 7
    assert [row["b"] for row in rows] == ["x", None, "z"]
    assert (rows[0]["a"].tolist(), rows[1]["a"], rows[2]["a"]) == ([7, 2], None, [3, None])
