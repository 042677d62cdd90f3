"""Arrow files and streams: the same records as pyarrow reads, mapped without copies, broken ones named."""

import gc
import os
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.errors import ConfigError, CorruptDataError, DataError, EmptySourceError
from megascale_lightning.loading.transforms import unreadable_rows
from megascale_lightning.sources import build_manifest, make_reader
from megascale_lightning.sources.formats import Resources
from megascale_lightning.sources.formats.arrow.format import FORMAT, ArrowReader
from megascale_lightning.sources.formats.arrow.messages import MessageKind, stream_messages
from megascale_lightning.sources.formats.arrowcolumns import list_column
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.sources.stores.storage import Storage
from tests.sources.remote_files import CountedFileSystem

ROWS = 300
TOKENS = pa.array([[n] * (n % 4) for n in range(ROWS)], pa.list_(pa.int32()))


def table_of(words=None, rows=ROWS):
    words = words or [f"w{n % 7}" for n in range(rows)]
    more = [{"url": f"u{n}", "tags": [str(n)]} for n in range(rows)]
    return pa.table({"input_ids": TOKENS.slice(0, rows), "word": pa.array(words).dictionary_encode(), "more": more})


def write_file(path, table, batch=70, **options):
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema, options=options_of(options)) as writer:
        writer.write_table(table, batch)


def write_stream(path, tables, batch=None, **options):
    schema = tables[0].schema
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, schema, options=options_of(options)) as writer:
        for table in tables:
            writer.write_table(table, batch)


def options_of(options):
    return pa.ipc.IpcWriteOptions(**options)


def replaced(path):
    """Every batch has a dictionary of its own."""
    parts = [
        table_of([f"{n}-{k % 3}" for k in range(50)], 50).set_column(0, "input_ids", TOKENS.slice(n, 50))
        for n in range(0, ROWS, 50)
    ]
    write_stream(path, parts)


def growing(path):
    """Every batch adds to the dictionary of the one before."""
    words = [f"w{n}" for n in range(12)]
    parts = [
        table_of(None, 50).set_column(
            1, "word", pa.DictionaryArray.from_arrays(pa.array([n % top for n in range(50)]), words[:top])
        )
        for top in range(2, 13, 2)
    ]
    write_stream(path, parts, emit_dictionary_deltas=True)


WAYS = {
    "file": lambda path: write_file(path, table_of()),
    "zstd file": lambda path: write_file(path, table_of(), compression="zstd"),
    "feather": lambda path: feather.write_feather(table_of(), path, compression="lz4", chunksize=80),
    "stream": lambda path: write_stream(path, [table_of()], 70),
    "lz4 stream": lambda path: write_stream(path, [table_of()], 70, compression="lz4"),
    "old stream": lambda path: write_stream(path, [table_of()], 70, use_legacy_format=True),
    "replaced dictionaries": replaced,
    "growing dictionary": growing,
}


def expected(path):
    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all().to_pydict()


def manifest_of(source, unit_bytes=1):
    manifest = build_manifest(source)
    units = FORMAT.list_units(source, manifest.files, Storage.of(source), unit_bytes=unit_bytes).units
    return Manifest(manifest.files, units, "arrow")


@pytest.mark.parametrize("unit_bytes", [1, 4000, 1 << 20])
@pytest.mark.parametrize("way", WAYS)
def test_units_in_any_order_give_what_pyarrow_reads(tmp_path, way, unit_bytes):
    path = tmp_path / "a.arrow"
    WAYS[way](path)
    source, wanted = Source("s", str(path)), expected(path)
    manifest = manifest_of(source, unit_bytes)
    assert manifest.num_records == ROWS
    assert (manifest.num_units == 1) == (unit_bytes == 1 << 20)
    for columns in (None, ("word",), ("more", "input_ids")):
        reader = make_reader(source, manifest, columns)
        tables = {unit: reader.read(unit).table for unit in reversed(range(manifest.num_units))}
        found = pa.concat_tables([tables[unit].cast(plain_schema(tables[unit])) for unit in range(manifest.num_units)])
        assert found.to_pydict() == {name: wanted[name] for name in columns or wanted}
        for unit in range(manifest.num_units):
            for start, stop in [(0, 10), (10, 30), (30, -1), (5, 20)]:
                block = reader.read(unit, start, stop)
                assert (
                    block.table.to_pydict() == tables[unit].slice(start, None if stop < 0 else stop - start).to_pydict()
                )
        reader.close()


def plain_schema(table):
    fields = [field.with_type(pa.string()) if field.name == "word" else field for field in table.schema]
    return pa.schema(fields)


def test_a_growing_dictionary_is_written_as_deltas(tmp_path):
    growing(tmp_path / "a.arrow")
    data = (tmp_path / "a.arrow").read_bytes()
    kinds = [(m.kind, m.is_delta) for m in stream_messages(lambda start, size: data[start : start + size], len(data))]
    assert kinds.count((MessageKind.DICTIONARY, True)) == 5


def test_a_local_file_is_mapped_and_not_copied(tmp_path):
    table = pa.table({"input_ids": pa.array([[1, 2, 3]] * 100_000, pa.list_(pa.int32()))})
    write_file(tmp_path / "a.arrow", table, len(table))
    write_stream(tmp_path / "b.arrow", [table])
    for name in ("a.arrow", "b.arrow"):
        source = Source("s", str(tmp_path / name))
        reader = make_reader(source, build_manifest(source), ["input_ids"])
        before = pa.total_allocated_bytes()
        ragged, bad = list_column(reader.read(0).table.column(0))
        assert pa.total_allocated_bytes() - before < 100_000
        assert (bad, int(ragged.values.sum())) == ({}, 2 * len(ragged.values))
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps if str(tmp_path / name) in line]
        address = ragged.values.__array_interface__["data"][0]
        assert any(int(first, 16) <= address < int(last, 16) for first, last in spans)
        reader.close()
        assert int(ragged.values[-1]) == ragged.values.max(), "what was read outlives the file"


def test_open_files_are_bounded_and_closed(tmp_path):
    for n in range(7):
        write_file(tmp_path / f"{n}.arrow", table_of(rows=n + 1))
    source = Source("s", str(tmp_path / "*.arrow"))
    manifest, pool = build_manifest(source), FilePool(3)
    reader = make_reader(source, manifest, ["input_ids"], pool=pool)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for unit in [0, 1, 2, 3, 4, 5, 6, 0, 6]:
        assert reader.read(unit).num_rows == unit + 1
        assert pool.num_open <= 3
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    reader.close()
    assert pool.num_open == 0
    assert len(os.listdir("/proc/self/fd")) <= before


def test_columns_that_files_lack(tmp_path):
    write_file(tmp_path / "a.arrow", table_of())
    write_stream(tmp_path / "b.arrow", [pa.table({"text": ["x"]})])
    with pytest.raises(ConfigError, match=r"'s': .*b\.arrow has no column 'input_ids'; its columns are text"):
        build_manifest(Source("s", str(tmp_path / "*.arrow")))
    source = Source("s", str(tmp_path / "*.arrow"), transform=dict)
    reader = make_reader(source, build_manifest(source), None)
    assert [set(reader.read(unit).samples()[0]) for unit in (0, 1)] == [{"input_ids", "word", "more"}, {"text"}]
    with pytest.raises(ConfigError, match=r"b\.arrow has no column 'word'"):
        make_reader(source, build_manifest(source), ["word"]).read(1)


def test_other_formats_and_empty_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a.feather"
    path.write_bytes(b"FEA1" + bytes(200) + b"FEA1")
    with pytest.raises(ConfigError, match=r"'s': .*a\.feather is a Feather file of version 1.*write_feather"):
        build_manifest(Source("s", str(path)))
    for content, problem in ((b"", "no byte"), (b"PAR1" + bytes(40), "corrupt"), (b"a", "truncated")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"'s': .*a\.feather is no readable Arrow file or stream: .*{problem}"):
            build_manifest(Source("s", str(path)))
    write_stream(path, [table_of(rows=0)])
    with pytest.raises(EmptySourceError):
        build_manifest(Source("s", str(path)))
    with pytest.raises(ConfigError, match="format 'arrow' has no option 'columns'"):
        build_manifest(Source("s", str(path), format_options={"columns": 1}))


@pytest.mark.parametrize("way", ["file", "stream", "feather", "lz4 stream"])
def test_a_file_that_is_cut_short_anywhere_is_found(tmp_path, way):
    path = tmp_path / "a.arrow"
    WAYS[way](path)
    data = path.read_bytes()
    ends = {m.stop for m in stream_messages(lambda start, size: data[start : start + size], len(data))} if (
        "stream" in way
    ) else set()  # fmt: skip
    for cut in [*range(1, len(data), 97), len(data) - 1]:
        if cut in ends or len(data) - cut <= 8 * ("stream" in way):
            continue  # a stream may end behind any message, and needs no marker there
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"'s': .*a\.arrow is no readable Arrow"):
            build_manifest(Source("s", str(path)))


def test_what_is_whole_of_a_cut_stream_is_read_where_errors_are_skipped(tmp_path):
    path = tmp_path / "a.arrow"
    WAYS["stream"](path)
    path.write_bytes(path.read_bytes()[:-2000])
    source = Source("s", str(path), on_error="skip")
    manifest = manifest_of(source)
    assert manifest.units["rows"].tolist() == [70, 70, 70, -1]
    reader = make_reader(source, manifest, ["input_ids"])
    assert reader.read(2).num_rows == 70
    with pytest.raises(
        CorruptDataError, match=r"'s': .*a\.arrow, unit 3 cannot be read: truncated or corrupt: the mess"
    ):
        reader.read(3)


def outcome_of(reader, unit, rows):
    try:
        block = reader.read(unit)
    except (CorruptDataError, ConfigError):
        return "refused"
    try:
        assert len(block.samples()) == block.num_rows == rows
    except UnicodeDecodeError:
        assert unreadable_rows(block.table)
    return "read"


TEXT = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc"))
LONG_TEXT = pa.LargeStringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3])), pa.py_buffer(b"a\xffc"))
BROKEN_TEXT = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 99, 2, 3], np.int32)), pa.py_buffer(b"a\xffc"))
TEXTS = {
    "text": lambda text: text,
    "long text": lambda text: LONG_TEXT if text is TEXT else text,
    "dictionary": lambda text: pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), text),
    "list": lambda text: pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), text),
    "long list": lambda text: pa.LargeListArray.from_arrays(pa.array([0, 1, 2, 3]), text),
    "fixed list": lambda text: pa.FixedSizeListArray.from_arrays(text, 1),
    "struct": lambda text: pa.StructArray.from_arrays([text, pa.array([1, 2, 3])], ["text", "n"]),
    "map": lambda text: pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), text, text),
}


@pytest.mark.parametrize("way", [write_file, lambda path, table: write_stream(path, [table])], ids=["file", "stream"])
@pytest.mark.parametrize("kind", TEXTS)
def test_text_that_is_no_utf8_breaks_its_record_alone(tmp_path, kind, way):
    path = str(tmp_path / "a.arrow")
    way(path, pa.table({"input_ids": [[1], [2], [3]], "more": TEXTS[kind](TEXT)}))
    source = Source("s", path, columns=("more",))
    block = make_reader(source, build_manifest(source), ("more",)).read(0)
    assert list(unreadable_rows(block.table)) == [1]


@pytest.mark.parametrize("kind", TEXTS)
def test_an_offset_that_leads_out_of_the_text_breaks_the_unit(tmp_path, kind):
    path = str(tmp_path / "a.arrow")
    write_file(path, pa.table({"input_ids": [[1], [2], [3]], "more": TEXTS[kind](BROKEN_TEXT)}))
    source = Source("s", path, columns=("more",))
    with pytest.raises(CorruptDataError, match=r"'s': .*unit 0 cannot be read"):
        make_reader(source, build_manifest(source), ("more",)).read(0)


@pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
def test_records_beside_text_that_is_no_utf8_are_delivered(tmp_path):
    path = str(tmp_path / "a.arrow")
    write_file(path, pa.table({"input_ids": [[1], [2], [3]], "text": TEXT}))
    source = Source("s", path, transform=dict, on_error="skip", epochs=1)
    rows = PackedRows(8, 1)
    with MegaScaleLoader(LoaderConfig(sources=[source], rows=rows, global_batch_size=1, runtime="local")) as loader:
        ids = [sample for batch in loader for row in batch["megascale"].sample_ids() for sample in row]
        dropped = loader.state_dict()["sources"]["s"]["dropped"]
    assert (sorted(sample[3] for sample in ids), dropped["read_error"]) == ([0, 2], 1)


def test_broken_bytes_never_give_records_of_their_own_making(tmp_path):
    path = tmp_path / "a.arrow"
    table = table_of().drop_columns("more")
    rng = np.random.default_rng(0)
    for write in (write_file, lambda path, table, **how: write_stream(path, [table], 70, **how)):
        write(path, table)
        data = path.read_bytes()
        source = Source("s", str(path))
        manifest = manifest_of(source)
        outcomes = Counter()
        for _ in range(300):
            broken = bytearray(data)
            at = int(rng.integers(8, len(data)))
            broken[at : at + 8] = rng.bytes(len(broken[at : at + 8]))
            path.write_bytes(broken)
            reader = ArrowReader(source, manifest, None, Resources(Storage(), FilePool()))
            for unit in range(manifest.num_units):
                outcomes[outcome_of(reader, unit, manifest.units[unit]["rows"])] += 1
            reader.close()
        assert outcomes["refused"] > 50
        assert outcomes["read"] > 50


@pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
@pytest.mark.parametrize("way", ["zstd file", "stream", "replaced dictionaries"])
def test_every_record_once_through_the_loader(tmp_path, way):
    WAYS[way](tmp_path / "a.arrow")
    WAYS["feather"](tmp_path / "b.feather")
    source = Source("s", [str(tmp_path / "a.arrow"), str(tmp_path / "b.feather")], epochs=1)
    config = LoaderConfig(
        sources=[source], rows=PackedRows(64, 2, pack_ahead=16), global_batch_size=2, runtime="local", part_bytes=2000
    )
    seen = []
    with MegaScaleLoader(config) as loader:
        for batch in loader:
            seen += [sample[:4] for row in batch["megascale"].sample_ids() for sample in row]
        dropped = loader.state_dict()["sources"]["s"]["dropped"]
    assert len(set(seen)) == len(seen)
    assert len(seen) + dropped["empty"] == 2 * ROWS


def test_of_remote_files_only_what_is_needed_is_read(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table({"input_ids": TOKENS, "blob": [rng.bytes(60_000) for _ in range(ROWS)]})
    write_file(tmp_path / "a.arrow", table, 50)
    write_stream(tmp_path / "b.arrow", [table], 50)
    write_file(tmp_path / "c.arrow", table_of(), 50)
    replaced(tmp_path / "d.arrow")
    files = {name: (tmp_path / name).read_bytes() for name in ("a.arrow", "b.arrow", "c.arrow", "d.arrow")}
    fs = CountedFileSystem(files)
    source = Source("s", [f"/{name}" for name in files], filesystem=fs, transform=dict)
    manifest = manifest_of(source)
    assert max(fs.read["a.arrow"], fs.read["b.arrow"]) < len(files["a.arrow"]) // 4, "listed twice"
    fs.read.clear()
    reader = make_reader(source, manifest, ["input_ids"])
    for unit in (5, 0, 11, 7):
        local = TOKENS.slice(50 * (unit % 6), 50)
        assert reader.read(unit).table["input_ids"].to_pylist() == local.to_pylist()
    assert fs.read["a.arrow"] < len(files["a.arrow"]) // 10, "of a file, two batches of one column"
    assert fs.read["b.arrow"] < len(files["b.arrow"]) // 2, "of a stream, two whole batches of six"
    every = make_reader(source, manifest, None)
    for unit in range(manifest.num_units):
        path = str(tmp_path) + manifest.files[int(manifest.units[unit]["file"])].path
        offset = 50 * (unit % 6)
        wanted = expected(path)
        found = every.read(unit).table.to_pydict()
        assert found == {name: values[offset : offset + 50] for name, values in wanted.items()}
    reader.close()
    every.close()
