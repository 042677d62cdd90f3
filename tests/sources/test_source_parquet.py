"""Parquet: every kind of column and schema, bounded memory, range reads, and what is broken is named."""

import datetime
import decimal
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows
from megascale_lightning.errors import ConfigError, CorruptDataError, DataError, EmptySourceError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats.arrowcolumns import list_column, scalar_column, table_rows
from megascale_lightning.sources.stores.filepool import FilePool
from tests.sources.remote_files import CountedFileSystem


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


def lists_of_dictionary(rows):
    plain = pa.array(rows, pa.list_(pa.int64()))
    return pa.ListArray.from_arrays(plain.offsets, plain.values.dictionary_encode())


def dictionary_of_lists(rows):
    kept = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    numbers = pa.array([kept.index(row) for row in rows], pa.int8())
    return pa.DictionaryArray.from_arrays(numbers, pa.array(kept, pa.list_(pa.int16())))


def list_views(rows):
    return pa.array(rows, pa.large_list_view(pa.int32()))


@pytest.mark.parametrize("make", [lists_of_dictionary, dictionary_of_lists, list_views])
def test_encoded_lists_are_as_plain_ones(make):
    rows = [[7, 7, 8], [], [9], [7]]
    ragged, bad = list_column(pa.chunked_array([make(rows).slice(0, 2), make(rows).slice(2)]))
    assert (ragged.values.tolist(), ragged.offsets.tolist(), bad) == ([7, 7, 8, 9, 7], [0, 3, 3, 4, 5], {})
    assert [row["a"].tolist() for row in table_rows(pa.table({"a": make(rows).slice(1)}))] == rows[1:]


def test_columns_of_nulls_are_lists_of_nothing():
    ragged, bad = list_column(pa.nulls(2))
    assert (ragged.offsets.tolist(), bad) == ([0, 0, 0], {0: "is null", 1: "is null"})
    ragged, bad = list_column(pa.array([[], [None]]))
    assert (ragged.offsets.tolist(), bad) == ([0, 0, 1], {1: "has a null among its values"})
    assert table_rows(pa.table({"a": pa.nulls(1), "b": pa.array([[]])}))[0]["a"] is None


def test_values_of_samples_are_python_objects_of_the_standard_library():
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456)
    stamp = int(moment.replace(tzinfo=datetime.timezone.utc).timestamp()) * 10**9 + 123456789
    inner = pa.struct([("at", pa.timestamp("ns")), ("x", pa.list_(pa.int8()))])
    table = pa.table(
        {
            "ns": pa.array([stamp], pa.timestamp("ns")),
            "zone": pa.array([stamp], pa.timestamp("ns", "UTC")),
            "nested": pa.array([[{"at": stamp, "x": [1]}]], pa.list_(inner)),
            "lasting": pa.array([1500], pa.duration("ns")),
            "price": pa.array([decimal.Decimal("1.50")]),
            "view": pa.array(["a"], pa.string_view()),
            "word": pa.array(["b"]).dictionary_encode(),
            "number": pa.array([5]).dictionary_encode(),
        }
    )  # fmt: skip
    (row,) = table_rows(table)
    assert row["ns"] == moment
    assert row["zone"] == moment.replace(tzinfo=datetime.timezone.utc)
    assert row["nested"] == [{"at": moment, "x": [1]}]
    assert row["lasting"] == datetime.timedelta(microseconds=1)
    assert (row["price"], row["view"], row["word"], row["number"]) == (decimal.Decimal("1.50"), "a", "b", 5)
    values, bad = scalar_column(table["number"])
    assert (values.dtype, bad) == (np.int64, {})
    assert scalar_column(pa.array([[1, 2], [3, 4]]).cast(pa.list_(pa.string())))[0].tolist() == [["1", "2"], ["3", "4"]]


def test_reading_a_file_does_not_import_pandas(tmp_path):
    write(tmp_path / "a.parquet", [[1]], at=pa.array([1001], pa.timestamp("ns")), text=["x"])
    code = (
        "import sys; from megascale_lightning.sources import Source, build_manifest, make_reader\n"
        "source = Source('s', sys.argv[1]); make_reader(source, build_manifest(source), None).read(0).samples()\n"
        "assert 'pandas' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.parquet")], check=True)


def delivered(source, **more):
    settings = {"rows": PackedRows(32, 2, pack_ahead=8), "global_batch_size": 2, "runtime": "local", "part_bytes": 200}
    with MegaScaleLoader(LoaderConfig(sources=[source], **settings, **more)) as loader:
        tokens: Counter[int] = Counter()
        ids: Counter[tuple] = Counter()
        for batch in loader:
            tokens.update(batch["input_ids"][batch["input_ids"] > 0].tolist())
            ids.update(sample[:4] for row in batch["megascale"].sample_ids() for sample in row)
        return tokens, ids, loader.state_dict()["sources"][source.name]["dropped"]


SCHEMAS = [
    pa.list_(pa.int32()),
    pa.large_list(pa.int64()),
    pa.list_(pa.uint16()),
    pa.list_(pa.uint64()),
    pa.list_(pa.int8(), 2),
    pa.large_list(pa.uint32()),
]


@pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
def test_files_of_every_schema_in_one_source_give_each_record_once(tmp_path):
    expected: Counter[int] = Counter()
    for index, kind in enumerate(SCHEMAS):
        rows = [[10 * index + n + 1, 10 * index + n + 1] for n in range(9)]
        expected.update(token for row in rows for token in row)
        more = {"text": ["x"] * 9} if index % 2 else {}
        table = pa.table({"input_ids": pa.array(rows, kind), **more})
        table = table.select(table.column_names[::-1])
        pq.write_table(table, tmp_path / f"{index}.parquet", row_group_size=4)
    pq.write_table(pa.table({"input_ids": pa.nulls(3)}), tmp_path / "nulls.parquet")
    pq.write_table(pa.table({"input_ids": pa.array([[], []])}), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))}), tmp_path / "none.parquet")
    tokens, ids, dropped = delivered(Source("s", str(tmp_path / "*.parquet"), epochs=1, on_error="skip"))
    assert tokens == expected
    assert set(ids.values()) == {1}
    assert dropped["read_error"] == 3
    assert dropped["empty"] == 2
    with pytest.raises(DataError, match=r"'s', .*nulls\.parquet, unit \d+, row \d: 'input_ids' is null"):
        delivered(Source("s", str(tmp_path / "*.parquet"), epochs=1))


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (pa.array([[1.0, 2.0]]), "is list<.*double>, a token field is a list of whole numbers"),
        (pa.array([[True]]), "is list<.*bool>, a token field is a list of whole numbers"),
        (pa.array([["1"]]), "is list<.*string>, a token field"),
        (pa.array(["1 2"]), "is string, a token field"),
        (pa.array([1]), "is int64, a token field"),
    ],
)
def test_a_column_of_a_wrong_type_is_named_with_its_file(tmp_path, column, problem):
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=rf"source 's', .*a\.parquet, unit 0: column 'input_ids' {problem}"):
        delivered(Source("s", str(tmp_path / "a.parquet"), epochs=1, on_error="skip"))


@pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
@pytest.mark.parametrize(("kind", "value"), [(pa.int64(), 2**31), (pa.uint64(), 2**64 - 1), (pa.uint32(), 2**32 - 1)])
def test_token_ids_beyond_int32_are_records_at_fault(tmp_path, kind, value):
    write(tmp_path / "a.parquet", [[1], [2, value], [3]], pa.list_(kind))
    with pytest.raises(
        DataError, match=rf"a\.parquet, unit 0, row 1: 'input_ids' has the value {value}, which does not"
    ):
        delivered(Source("s", str(tmp_path / "a.parquet"), epochs=1))
    tokens, _, dropped = delivered(Source("s", str(tmp_path / "a.parquet"), epochs=1, on_error="skip"))
    assert (tokens, dropped["read_error"]) == ({1: 1, 3: 1}, 1)


def test_a_file_without_a_column(tmp_path):
    write(tmp_path / "a.parquet", [[1]], text=["x"])
    write(tmp_path / "b.parquet", [[2]])
    with pytest.raises(ConfigError, match=r"'s': .*b\.parquet has no column 'text'"):
        build_manifest(Source("s", str(tmp_path / "*.parquet"), columns=("text",), transform=dict))
    source = Source("s", str(tmp_path / "*.parquet"), transform=dict)
    reader = make_reader(source, build_manifest(source), None)
    assert [sorted(reader.read(unit).samples()[0]) for unit in (0, 1)] == [["input_ids", "text"], ["input_ids"]]


def test_names_with_dots_and_names_given_twice(tmp_path):
    pq.write_table(pa.table({"a": [{"b": 1}], "a.b": [[2]]}), tmp_path / "a.parquet")
    source = Source("s", str(tmp_path / "a.parquet"), columns=("a.b",))
    assert make_reader(source, build_manifest(source), ["a.b"]).read(0).table.to_pydict() == {"a.b": [[2]]}
    twice = pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], ["input_ids", "input_ids"])
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet has the column 'input_ids' 2 times"):
        build_manifest(Source("s", str(tmp_path / "b.parquet")))


def test_slices_of_a_row_group_of_very_wide_rows_need_little_memory(tmp_path):
    rng = np.random.default_rng(0)
    wide = [rng.bytes(1 << 20) for _ in range(48)]
    table = pa.table({"input_ids": [[n] for n in range(48)], "blob": wide})
    pq.write_table(table, tmp_path / "a.parquet", write_batch_size=2)  # a page is the least that can be decoded
    source = Source("s", str(tmp_path / "a.parquet"))
    reader = make_reader(source, build_manifest(source), None)
    usual, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(counted)
    try:
        for start in range(0, 48, 4):
            assert reader.read(0, start, start + 4).table["blob"].to_pylist() == wide[start : start + 4]
        assert counted.max_memory() < 30 << 20
    finally:
        pa.set_memory_pool(usual)
        reader.close()


@pytest.mark.parametrize("cut", [0, 3, 200, -1, -9])
def test_truncated_files_are_found(tmp_path, cut):
    path = tmp_path / "a.parquet"
    write(path, [[n] for n in range(100)])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"'s': .*a\.parquet is no readable Parquet file"):
        build_manifest(Source("s", str(path)))
    source = Source("s", str(path), on_error="skip")
    reader = make_reader(source, build_manifest(source), ["input_ids"])
    with pytest.raises(CorruptDataError, match=r"'s': .*a\.parquet, unit 0 cannot be read"):
        reader.read(0)


def test_damaged_pages_are_found_by_their_checksums(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"input_ids": pa.array([[n] for n in range(1000)], pa.list_(pa.int32()))})
    pq.write_table(table, path, use_dictionary=False, compression="none", write_page_checksum=True)
    source = Source("s", str(path))
    manifest = build_manifest(source)
    data = bytearray(path.read_bytes())
    data[data.index((500).to_bytes(4, "little") + (501).to_bytes(4, "little"))] ^= 1
    path.write_bytes(data)
    reader = make_reader(source, manifest, ["input_ids"])
    for rows in ((0, -1), (0, 700)):
        with pytest.raises(CorruptDataError, match=r"'s': .*a\.parquet, unit 0 cannot be read: .*(crc|CRC)"):
            reader.read(0, *rows)


def test_of_remote_files_only_what_is_needed_is_read(tmp_path):
    rng = np.random.default_rng(0)
    blobs = [rng.bytes(50_000) for _ in range(400)]
    write(tmp_path / "a.parquet", [[n] for n in range(400)], row_group_size=100, blob=blobs)
    data = (tmp_path / "a.parquet").read_bytes()
    fs = CountedFileSystem({"a.parquet": data})
    source = Source("s", "/a.parquet", filesystem=fs)
    manifest = build_manifest(source)
    assert fs.read["a.parquet"] < 200_000
    reader = make_reader(source, manifest, ["input_ids"])
    for unit in (3, 0, 2):
        assert [row["input_ids"].tolist() for row in reader.read(unit).samples()] == [
            [n] for n in range(100 * unit, 100 * unit + 100)
        ]
    assert reader.read(1, 20, 30).samples()[0]["input_ids"].tolist() == [120]
    reader.close()
    assert fs.read["a.parquet"] < 2_000_000 < len(data) // 8
    assert fs.opened["a.parquet"] <= 3
