"""CSV and TSV: the same records whatever the slices, every option, each kind of bad record named where it stands."""

import bz2
import csv
import gzip
import io
import json
import tracemalloc
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.errors import ConfigError, CorruptDataError, DataError, EmptySourceError
from megascale_lightning.sources import build_manifest, make_reader
from megascale_lightning.sources.formats.csv.records import CsvRecords, Dialect
from megascale_lightning.sources.stores import plaintext as plain_files
from megascale_lightning.sources.stores.plaintext import PlainFile
from megascale_lightning.sources.stores.storage import FileInfo, Storage
from tests.sources.remote_files import CountedFileSystem


def source_of(path, data=None, columns=None, **options):
    if data is not None:
        path.write_bytes(data)
    return Source("s", str(path), transform=dict, columns=columns, format_options=options)


def read_all(source, columns=None):
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, columns)
    blocks = [reader.read(unit) for unit in range(manifest.num_units)]
    return [row for block in blocks for row in block.objects], {
        (block.unit, index): message for block in blocks for index, message in block.failures.items()
    }


def slices_of(reader, slice_bytes, unit=0):
    found, is_last = [], False
    while not is_last:
        block, is_last = reader.read_slice(unit, len(found), slice_bytes)
        assert block.row_start == sum(one.num_rows for one in found)
        found.append(block)
    return found


def content(block):
    return block.objects, dict(block.failures), dict(block.raw)


def joined(blocks):
    rows, failures, raw = [], {}, {}
    for block in blocks:
        failures |= {len(rows) + index: message for index, message in block.failures.items()}
        raw |= {len(rows) + index: data for index, data in block.raw.items()}
        rows += block.objects
    return rows, failures, raw


def test_values_are_text_unless_types_say_otherwise(tmp_path):
    data = b"id,score,ok,text\n007,1.5,TRUE,x\n-1,,0,\n+2,1e3,1,NA\n"
    assert read_all(source_of(tmp_path / "a.csv", data))[0][:2] == [
        {"id": "007", "score": "1.5", "ok": "TRUE", "text": "x"},
        {"id": "-1", "score": "", "ok": "0", "text": ""},
    ]
    typed = {"types": {"id": "int", "score": "float", "ok": "bool"}, "null_values": ["NA"]}
    assert read_all(source_of(tmp_path / "a.csv", **typed)) == (
        [
            {"id": 7, "score": 1.5, "ok": True, "text": "x"},
            {"id": -1, "score": None, "ok": False, "text": ""},
            {"id": 2, "score": 1000.0, "ok": True, "text": None},
        ],
        {},
    )


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("a.tsv", b"a\tb\n1\tx,y\n", {}),
        ("a.csv", b"a;b\n1;x,y\n", {"delimiter": ";"}),
        ("a.csv", b"a,b\n1,'x,y'\n", {"quote": "'"}),
        ("a.csv", b"a,b\r\n1,\"x,y\"\r\n", {}),
        ("a.csv", b"a,b\r1,\"x,y\"", {}),
        ("a.csv", b"a,b\n1,x\\,y\n", {"quote": None, "escape": "\\"}),
        ("a.csv", b"a,b\n1,  \"x,y\"\n", {"skip_initial_space": True}),
        ("a.csv", b"# \"made by\n\na,b\n# 1,\"2\n\n1,\"x,y\"\n#\n", {"comment": "#"}),
        ("a.csv", b'1,"x,y"\n', {"header": ["a", "b"]}),
        ("a.csv", b'A,A\n1,"x,y"\n', {"header": ["a", "b"], "skip_rows": 1}),
        ("a.csv", b"\xef\xbb\xbfa,b\n1,\"x,y\"\n", {}),
        ("a.csv", b"\xef\xbb\xbfa,b\n1,\"x,y\"\n", {"encoding": "utf-8-sig"}),
    ],
)  # fmt: skip
def test_ways_to_write_the_same(tmp_path, name, data, options):
    assert read_all(source_of(tmp_path / name, data, **options)) == ([{"a": "1", "b": "x,y"}], {})


def test_headers_without_and_with_odd_names(tmp_path):
    source = source_of(tmp_path / "a.csv", b"1,2\n3,4\n", header=False)
    assert read_all(source)[0] == [{"f0": "1", "f1": "2"}, {"f0": "3", "f1": "4"}]
    assert read_all(source_of(tmp_path / "b.csv", b",x\n0,1\n"))[0] == [{"f0": "0", "x": "1"}]
    with pytest.raises(ConfigError, match=r"'s'.*c\.csv names the column 'x' more than once"):
        build_manifest(source_of(tmp_path / "c.csv", b"x,y,x\n1,2,3\n"))


def test_encodings(tmp_path):
    for encoding in ("latin-1", "cp1252", "shift_jis", "gb18030"):
        text = (
            "名,b\n日本,é\n" if encoding == "gb18030" else "名,b\n日本,x\n" if encoding == "shift_jis" else "ä,b\né,ü\n"
        )
        (row,) = read_all(source_of(tmp_path / "a.csv", text.encode(encoding), encoding=encoding))[0]
        assert [*row, *row.values()] == text.replace("\n", ",").split(",")[:4]
    for encoding in ("utf-16", "utf-32", "cp037", "nothing", 3):
        with pytest.raises(ConfigError, match=r"'encoding'.*ASCII"):
            build_manifest(source_of(tmp_path / "a.csv", encoding=encoding))
    with pytest.raises(DataError, match=r"'s'.*a\.csv.*UTF-16: write it anew"):
        build_manifest(source_of(tmp_path / "a.csv", "a,b\n1,2\n".encode("utf-16")))


@pytest.mark.parametrize(
    ("option", "value"),
    [("delimiter", ",,"), ("quote", ""), ("header", ["a", "a"]), ("header", "a"), ("skip_rows", -1), ("types", ["a"]),
     ("null_values", "NA"), ("types", {"a": "date"}), ("max_record_bytes", 0), ("comment", "//"), ("escape", "\n")],
)  # fmt: skip
def test_wrong_options_are_refused(tmp_path, option, value):
    with pytest.raises(ConfigError, match=rf"source 's': the option '{option}' of format 'csv' is .*, not "):
        build_manifest(source_of(tmp_path / "a.csv", b"a\n1\n", **{option: value}))


def test_unknown_options_and_columns_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no option 'seperator'; it has comment, delimiter, encoding"):
        build_manifest(source_of(tmp_path / "a.csv", b"a\n1\n", seperator=";"))
    with pytest.raises(ConfigError, match=r"'types' names 'x', which no file has; there are a"):
        build_manifest(source_of(tmp_path / "a.csv", types={"x": "int"}))
    (tmp_path / "b.csv").write_bytes(b"b\n1\n")
    with pytest.raises(ConfigError, match=r"'s': .*b\.csv has no column 'a'; its columns are b"):
        build_manifest(source_of(tmp_path / "*.csv", columns=("a",)))
    reader = make_reader(source_of(tmp_path / "*.csv"), build_manifest(source_of(tmp_path / "*.csv")), ["a"])
    assert reader.read(0).objects == [{"a": "1"}]
    with pytest.raises(ConfigError, match=r"b\.csv has no column 'a'"):
        reader.read(1)


def test_columns_are_told_by_name_in_every_file(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\n1,2\n")
    (tmp_path / "b.csv").write_bytes(b"z,y,x\n5,4,3\n")
    (tmp_path / "c.csv").write_bytes(b"x,y\n")
    (tmp_path / "d.csv").write_bytes(b"")
    assert read_all(source_of(tmp_path / "*.csv"), ["y", "x"])[0] == [{"y": "2", "x": "1"}, {"y": "4", "x": "3"}]
    assert build_manifest(source_of(tmp_path / "*.csv")).num_units == 3
    with pytest.raises(EmptySourceError):
        build_manifest(source_of(tmp_path / "d.csv"))


BAD = (
    b'a,b\n1,x\n2\n3,y,z\n4,"m\nn"\n5,"x"y\n6,\xff\n\n7,"open\n8,x\n9,y\n'
)  # fmt: skip


def test_bad_records_are_failures_with_their_line_and_bytes(tmp_path):
    source = source_of(tmp_path / "a.csv", BAD, types={"a": "int"})
    manifest = build_manifest(source)
    block = make_reader(source, manifest, None).read(0)
    assert [row and row["a"] for row in block.objects] == [1, None, None, 4, None, None, None, 8, 9]
    assert {index: block.raw[index] for index in sorted(block.raw)} == {
        1: b"2\n", 2: b"3,y,z\n", 4: b'5,"x"y\n', 5: b"6,\xff\n", 6: b'7,"open\n',
    }  # fmt: skip
    assert block.failures[1] == (
        "the record at line 3, byte 8, has 1 fields where the header, or the first record, has 2"
    )
    assert block.failures[2].startswith("the record at line 4, byte 10, has 3 fields")
    assert "line 7, byte 24, is not well quoted" in block.failures[4]
    assert "line 8, byte 31, is not utf-8" in block.failures[5]
    assert "line 10, byte 36, is not well quoted" in block.failures[6]
    failures = read_all(source_of(tmp_path / "b.csv", b"a\n1\n1.5\n1_0\n\xd9\xa3\n", types={"a": "int"}))[1]
    assert sorted(index for _, index in failures) == [1, 2, 3]
    assert failures[0, 1] == "the record at line 3, byte 4, has '1.5' in the column 'a', which is no int"


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst", ".lz4"])
def test_any_slice_size_gives_the_same_records(tmp_path, suffix):
    path = tmp_path / f"a.csv{suffix}"
    if suffix:
        codec = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}[suffix]
        with pa.CompressedOutputStream(str(path), codec) as out:
            out.write(BAD)
    source = source_of(path, None if suffix else BAD)
    reader = make_reader(source, build_manifest(source), None)
    whole = content(reader.read(0))
    for slice_bytes in range(1, len(BAD) + 2):
        blocks = slices_of(reader, slice_bytes)
        assert joined(blocks) == whole
        for index, block in enumerate(blocks):
            starts = [int(text.split("byte ")[1].split(",")[0]) for text in block.failures.values()]
            assert all(start // slice_bytes == index for start in starts)
        for index in (len(blocks) - 1, 0, len(blocks) // 2):
            assert content(reader.read_slice(0, index, slice_bytes)[0]) == content(blocks[index])
        with pytest.raises(IndexError):
            reader.read_slice(0, len(blocks) + 1, slice_bytes)
    for start, stop in [(0, 3), (2, 5), (5, -1), (8, 9), (9, 20)]:
        block = reader.read(0, start, stop)
        assert (block.row_start, block.objects) == (start, whole[0][start : None if stop < 0 else stop])
    reader.close()


def reference(data, limit):
    """The rule in its simplest form: from each line, take as few lines as make a record; else that line fails."""
    lines, at, found = data.splitlines(keepends=True), 0, []
    while at < len(lines):
        if not lines[at].strip(b"\r\n"):
            at += 1
            continue
        reader = csv.reader((line.decode("utf-8", "replace") for line in lines[at:]), strict=True)
        try:
            fields, count = next(reader), reader.line_num
        except csv.Error:
            fields, count = None, 1
        if sum(map(len, lines[at : at + count])) > limit:
            fields, count = None, 1
        raw = b"".join(lines[at : at + count])
        try:
            raw.decode()
        except UnicodeDecodeError:
            fields = None
        found.append((sum(map(len, lines[:at])), at + 1, fields))
        at += count
    return found


pieces = st.sampled_from(
    [b"a", b",", b'"', b"\n", b"\r\n", b"\r", b"\xff", "é".encode(), b"xxxxxxx", b'"p\nq",', b"1,2\n"]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=30), st.integers(1, 12), st.integers(3, 40))
def test_records_do_not_depend_on_what_is_read_at_once(tmp_path_factory, parts, chunk, limit):
    data = b"".join(parts)
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(data)
    dialect = Dialect(delimiter=",", quote='"', escape=None, skip_initial_space=False, comment=None, encoding="utf-8",
                      max_record_bytes=limit)  # fmt: skip
    records = CsvRecords(PlainFile(Storage(), FileInfo(str(path), len(data), 0)), dialect, chunk=chunk)
    found = [(one.offset, one.line, None if one.problem else one.fields) for one in records.records()]
    records.close()
    assert found == reference(data, limit)


def test_records_beyond_the_limit_cost_one_line_and_little_memory(tmp_path):
    long = b"2," + b"x" * (24 << 20) + b"\n"
    data = b"a,b\n1,x\n" + long + b'3,"never closed\n' + (b"4," + b"y" * 97 + b"\n") * 20_000 + b"5,z\n"
    source = source_of(tmp_path / "a.csv", data, max_record_bytes=1 << 20)
    reader = make_reader(source, build_manifest(source), None)
    tracemalloc.start()
    try:
        blocks = [reader.read_slice(0, index, 1 << 20)[0] for index in range(23)]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    is_last = False
    while not is_last:
        block, is_last = reader.read_slice(0, len(blocks), 1 << 20)
        blocks.append(block)
    rows, failures, raw = joined(blocks)
    assert failures[1].startswith("the record at line 3, byte 8, has more than 1048576 bytes")
    assert raw[1] == long[: 1 << 20]
    assert failures[2].startswith(f"the record at line 4, byte {8 + len(long)}, ")
    assert len(rows) == 20_004
    assert rows[-1] == {"a": "5", "b": "z"}
    assert sorted(failures) == [1, 2]


def test_a_compressed_file_that_breaks_off_ends_with_one_failed_record(tmp_path):
    data = b"a,b\n" + b"".join(b'%d,"x\n%d"\n' % (n, n * n) for n in range(3000))
    packed = gzip.compress(data)
    for cut in (len(packed) // 2, len(packed) - 3):
        source = source_of(tmp_path / "a.csv.gz", packed[:cut])
        reader = make_reader(source, build_manifest(source), None)
        block = reader.read(0)
        assert list(block.failures) == [block.num_rows - 1]
        assert "its last bytes are missing" in block.failures[block.num_rows - 1]
        assert [row["a"] for row in block.objects[:-1]] == [str(n) for n in range(block.num_rows - 1)]
        assert joined(slices_of(reader, 5000)) == content(block)


def test_a_header_that_cannot_be_read_is_the_fault_of_the_file(tmp_path):
    source = source_of(tmp_path / "a.csv", b'"a,b\n1,2\n')
    with pytest.raises(CorruptDataError, match=r"'s': the header of .*a\.csv is not well quoted"):
        build_manifest(source)
    source = Source("s", str(tmp_path / "a.csv"), transform=dict, on_error="skip")
    reader = make_reader(source, build_manifest(source), None)
    with pytest.raises(CorruptDataError, match=r"the header of .*a\.csv"):
        reader.read(0)


def test_large_files_are_read_in_slices(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_bytes(b"a\n" + b"1\n" * 100)
    assert not build_manifest(source_of(tmp_path / "a.csv")).sliced
    monkeypatch.setattr("megascale_lightning.sources.formats.csv.format.SLICED_BYTES", 150)
    assert build_manifest(source_of(tmp_path / "a.csv")).sliced
    assert plain_files.SLICED_BYTES == 8 << 20


def tokens(sample):
    return {"input_ids": json.loads(sample["ids"])}


@pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
@pytest.mark.parametrize("sliced", [False, True])
def test_every_record_once_through_the_loader(tmp_path, monkeypatch, sliced):
    if sliced:
        monkeypatch.setattr("megascale_lightning.sources.formats.csv.format.SLICED_BYTES", 0)
    expected = Counter()
    for name, size in (("a.csv", 40), ("b.csv.bz2", 25), ("c.tsv", 0)):
        text = io.StringIO()
        writer = csv.writer(text, delimiter="\t" if name.endswith("tsv") else ",")
        writer.writerow(["note", "ids"])
        for n in range(size):
            writer.writerow([f'say "{n}",\nthen', [n + 1] * (n % 5 + 1)])
            expected[n + 1] += n % 5 + 1
        data = text.getvalue().encode()
        (tmp_path / name).write_bytes(bz2.compress(data) if name.endswith("bz2") else data)
    source = Source("s", [str(tmp_path / name) for name in ("a.csv", "b.csv.bz2", "c.tsv")], transform=tokens, epochs=1)
    config = LoaderConfig(
        sources=[source], rows=PackedRows(16, 2), global_batch_size=2, runtime="local", part_bytes=300
    )
    seen, found = [], Counter()
    with MegaScaleLoader(config) as loader:
        for batch in loader:
            seen += [sample[:4] for row in batch["megascale"].sample_ids() for sample in row]
            found.update(batch["input_ids"][batch["input_ids"] > 0].tolist())
    assert len(set(seen)) == len(seen) == 65
    assert found == expected


@pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
def test_collated_rows_need_no_tokens_and_bad_records_are_dropped(tmp_path):
    data = b"a,n\n" + b"".join(b"x%d,%d\n" % (n, n) + (b"broken\n" if n % 5 == 0 else b"") for n in range(20))
    (tmp_path / "a.csv").write_bytes(data)
    source = Source("s", str(tmp_path / "a.csv"), epochs=1, on_error="skip", format_options={"types": {"n": "int"}})
    config = LoaderConfig(sources=[source], rows=CollatedRows(4, list), global_batch_size=4, runtime="local")
    with MegaScaleLoader(config) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert sorted(sample["n"] for sample in samples if isinstance(sample, dict)) == list(range(20))


def test_remote_files_are_read_front_to_back_once(tmp_path):
    data = b"a,b\n" + b"".join(b"%d,%s\n" % (n, b"x" * 200) for n in range(20_000))
    fs = CountedFileSystem({"a.csv": data, "b.csv.gz": gzip.compress(data)})
    for name, size in (("a.csv", len(data)), ("b.csv.gz", len(fs.cat_file("/b.csv.gz")))):
        source = Source("s", f"/{name}", filesystem=fs, transform=dict)
        manifest = build_manifest(source)
        assert fs.read[name] <= min(size, 1 << 20)
        fs.read.clear()
        reader = make_reader(source, manifest, ["a"])
        rows = joined(slices_of(reader, 300_000))[0]
        assert rows == [{"a": str(n)} for n in range(20_000)]
        assert fs.read[name] == size
        reader.close()


def test_a_file_that_is_empty_when_unpacked_has_no_record(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "b.csv").write_bytes(b"a,b\n1,2\n")
    rows, failures = read_all(Source("s", str(tmp_path / "*"), transform=dict, columns=["b"]), ["b"])
    assert (rows, failures) == ([{"b": "2"}], {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": '"'}, r"'delimiter' and 'quote' are both '\"'"),
        ({"quote": ","}, r"'delimiter' and 'quote' are both ','"),
        ({"delimiter": "\\", "escape": "\\"}, r"'delimiter' and 'escape' are both"),
        ({"escape": '"'}, r"'quote' and 'escape' are both"),
        ({"delimiter": " ", "skip_initial_space": True}, r"skip_initial_space.*' '"),
    ],
)
def test_characters_that_stand_for_two_things_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=f"source 's': .*{message}"):
        build_manifest(source_of(tmp_path / "a.csv", b"a,b\n1,2\n", **options))
