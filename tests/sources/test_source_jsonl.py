"""JSON lines: units, rows, what a line may hold."""

import gzip
import io
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats.jsonl import FORMAT, JsonLinesReader
from megascale_lightning.sources.formats.lines import find_cuts
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.stores.storage import Storage


def reader_of(path, data, unit_bytes):
    path.write_bytes(data)
    source = Source("s", str(path))
    manifest = build_manifest(source)
    manifest = Manifest(
        manifest.files,
        FORMAT.list_units(source, manifest.files, Storage.of(source), unit_bytes=unit_bytes).units,
        "jsonl",
    )
    return JsonLinesReader(source, manifest, Storage.of(source)), manifest


def test_any_unit_size_gives_the_same_records(tmp_path):
    data = b'{"n": 0}\n\n{"n": 1, "pad": "xxxxxxx"}\r\n   \n{"n": 2}\n{"n": 3}'
    for unit_bytes in range(1, len(data) + 2):
        reader, manifest = reader_of(tmp_path / "a.jsonl", data, unit_bytes)
        blocks = [reader.read(unit) for unit in range(manifest.num_units)]
        assert [row["n"] for block in blocks for row in block.objects] == [0, 1, 2, 3]
        assert int(manifest.units["bytes"].sum()) == len(data)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(1, 40), st.booleans())
def test_cuts_stand_behind_newlines(lengths, unit_bytes, ends_with_newline):
    data = b"\n".join(b"x" * length for length in lengths) + (b"\n" if ends_with_newline else b"")
    cuts = find_cuts(io.BytesIO(data), len(data), unit_bytes)
    assert cuts[0] == 0
    assert sorted(set(cuts)) == cuts
    assert all(data[cut - 1 : cut] == b"\n" and cut < len(data) for cut in cuts[1:])
    longest = max(lengths) + 1
    assert all(b - a < unit_bytes + longest for a, b in zip(cuts, [*cuts[1:], len(data)], strict=True))


def test_slices_count_the_lines_that_are_not_blank(tmp_path):
    data = b"".join(b'{"n": %d}\n\n' % i for i in range(6))
    reader, _ = reader_of(tmp_path / "a.jsonl", data, 1 << 20)
    block = reader.read(0, 2, 4)
    assert (block.row_start, [row["n"] for row in block.objects]) == (2, [2, 3])
    assert [row["n"] for row in reader.read(0, 4).objects] == [4, 5]


def test_bad_lines_are_failures_with_their_byte(tmp_path):
    good = b'{"n": 0}\n'
    data = good + b'{"n": \n' + good + b'{"n": "\xff"}\n' + b"[1]\n" + good
    reader, _ = reader_of(tmp_path / "a.jsonl", data, 1 << 20)
    block = reader.read(0)
    assert block.num_rows == 6
    assert sorted(block.failures) == [1, 3, 4]
    assert "byte 9 is not JSON" in block.failures[1]
    assert "byte 25 is not UTF-8" in block.failures[3]
    assert "holds a list" in block.failures[4]
    assert block.raw == {1: b'{"n": ', 3: b'{"n": "\xff"}', 4: b"[1]"}


def test_byte_order_marks_and_compressed_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"input_ids": [1], "t": "é"}).encode() + b"\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as stream:
        stream.write(b'{"input_ids": [2]}\n{"input_ids": [3]}')
    source = Source("s", [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")])
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, None)
    rows = [row for unit in range(manifest.num_units) for row in reader.read(unit).objects]
    assert [row["input_ids"] for row in rows] == [[1], [2], [3]]
    assert rows[0]["t"] == "é"


def test_a_missing_file_is_named(tmp_path):
    reader, _ = reader_of(tmp_path / "a.jsonl", b'{"n": 1}\n', 100)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"'s': .*a\.jsonl cannot be read"):
        reader.read(0)


def test_what_json_leaves_open(tmp_path):
    """Missing keys are no failure, NaN and Infinity are numbers, the last of equal keys counts."""
    data = b'{"a": 1}\n{"b": NaN, "c": -Infinity}\n{"a": 1, "a": 2}\n{}\n{"a": null}\n'
    reader, _ = reader_of(tmp_path / "a.jsonl", data, 1 << 20)
    block = reader.read(0)
    assert block.failures == {}
    assert math.isnan(block.objects[1]["b"])
    assert block.objects[1]["c"] == -math.inf
    assert [block.objects[index] for index in (0, 2, 3, 4)] == [{"a": 1}, {"a": 2}, {}, {"a": None}]


def test_very_deep_and_very_large_values_fail_alone(tmp_path):
    data = b'{"n": 0}\n{"n": ' + b"[" * 200_000 + b"}\n" + b'{"n": ' + b"9" * 5000 + b'}\n{"n": 3}\n'
    reader, _ = reader_of(tmp_path / "a.jsonl", data, 1 << 20)
    block = reader.read(0)
    assert sorted(block.failures) == [1, 2]
    assert [block.objects[index] for index in (0, 3)] == [{"n": 0}, {"n": 3}]


def test_a_file_that_changed_is_no_shorter_source(tmp_path):
    path = tmp_path / "a.jsonl"
    reader, _ = reader_of(path, b'{"n": 1}\n' * 9, 20)
    path.write_bytes(b'{"n": 1}\n' * 8)
    with pytest.raises(DataError, match="had 81"):
        reader.read(0)


def test_json_lines_have_one_option(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"no option 'delimiter'; it has max_record_bytes$"):
        build_manifest(Source("s", str(tmp_path / "a.jsonl"), format_options={"delimiter": ";"}))


@pytest.mark.parametrize("suffix", [".gz", ".GZ"])
def test_only_compressed_files_are_there(tmp_path, suffix):
    for shard in range(3):
        (tmp_path / f"ü {shard}.jsonl{suffix}").write_bytes(gzip.compress(b'{"n": %d}\n' % shard))
    source = Source("s", str(tmp_path / "*"))
    manifest = build_manifest(source)
    assert manifest.format == "jsonl"
    reader = make_reader(source, manifest, None)
    assert [reader.read(unit).objects for unit in range(3)] == [[{"n": 0}], [{"n": 1}], [{"n": 2}]]
