"""Lines and paragraphs without end: one failed record each, the same wherever data are cut, and bounded memory."""

import gzip
import io
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats import lines as lines_module
from tests.sources.tars import joined, slices

PIECES = [b"a", b"bcd", b" ", b"   ", b"\n", b"\n", b"\n\n", b"\r\n", b"\t\n"]


def open_text(path, **options):
    source = Source("s", str(path), format="text", format_options=options)
    manifest = build_manifest(source)
    return make_reader(source, manifest, None), manifest


def by_definition(content, records, limit):
    """(text or None where it is too long) of each record."""
    found, held = [], []
    for line in [*content.split(b"\n"), None]:
        if records == "line":
            if line is not None and line.strip():
                found.append(line)
        elif line is not None and line.strip():
            held.append(line)
        elif held:
            found.append(b"\n".join(held))
            held = []
    return [
        None if len(one) > limit else (one.rstrip(b"\r") if records == "line" else one.rstrip()).decode()
        for one in found
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=40),
    st.sampled_from(["line", "paragraph"]),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([b"\n\nx\n\n", b"", b"\n", b"\n  "]),
)
def test_the_same_records_fail_however_data_are_cut(tmp_path_factory, pieces, records, limit, chunk, slice_bytes, end):
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_bytes(b"".join(pieces) + end)
    wanted = by_definition(path.read_bytes(), records, limit)
    reader, _ = open_text(path, records=records, max_record_bytes=limit)
    before, lines_module._CHUNK = lines_module._CHUNK, chunk
    try:
        block = reader.read(0)
        cut = joined(slices(reader, 0, slice_bytes))
    finally:
        lines_module._CHUNK = before
    assert [one and one["text"] for one in block.objects] == wanted
    assert sorted(block.failures) == [row for row, one in enumerate(wanted) if one is None]
    assert (list(block.objects), dict(block.failures), dict(block.raw)) == cut
    assert all(len(raw) <= limit for raw in block.raw.values())


@pytest.mark.slow
def test_a_json_line_without_end_is_one_failed_record(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 0}\n{"x": "' + bytes(200 << 20).replace(b"\0", b"x") + b'"}\n{"n": 1}\n', 1))
    source = Source("s", str(path), format_options={"max_record_bytes": 1 << 20})
    reader = make_reader(source, build_manifest(source), None)
    tracemalloc.start()
    try:
        block = reader.read(0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert list(block.objects) == [{"n": 0}, None, {"n": 1}]
    assert block.failures[1].startswith("the line at byte 9 has more than 1048576 bytes")
    assert "max_record_bytes" in block.failures[1]
    assert len(block.raw[1]) == 1 << 20
    assert peak < 16 << 20


@pytest.mark.slow
def test_blanks_without_end_take_no_memory(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n" + b" " * (40 << 20) + b"\n\ntwo\n" + b"\t" * (20 << 20), 1))
    for records in ("line", "paragraph"):
        reader, _ = open_text(path, records=records, max_record_bytes=1000)
        tracemalloc.start()
        try:
            block = reader.read(0)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert [one["text"] for one in block.objects] == ["one", "two"]
        assert peak < 16 << 20


def test_long_lines_within_the_default_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x": "y" * (9 << 20)}) + "\n")
    source = Source("s", str(path))
    block = make_reader(source, build_manifest(source), None).read(0)
    assert len(block.objects[0]["x"]) == 9 << 20


def test_a_file_that_is_a_record_is_limited_where_that_is_said(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"x" * 5000))
    assert len(open_text(path, records="file")[0].read(0).objects[0]["text"]) == 5000
    block = open_text(path, records="file", max_record_bytes=4999)[0].read(0)
    assert "has more than 4999 bytes" in block.failures[0]
    assert block.raw[0] == b"x" * 4999
    assert not open_text(path, records="file", max_record_bytes=5000)[0].read(0).failures


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1"])
def test_wrong_limits_are_refused(tmp_path, limit):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("{}\n")
        with pytest.raises(ConfigError, match=r"'max_record_bytes' of format .* is a whole number of at least 1"):
            build_manifest(Source("s", str(tmp_path / name), format_options={"max_record_bytes": limit}))


def test_blanks_without_end_are_passed_over_where_units_are_cut():
    stream = io.BytesIO(b"one\n" + b" " * (4 << 20) + b"\n\ntwo\n \nthree")
    tracemalloc.start()
    try:
        cuts = lines_module.find_cuts(stream, len(stream.getvalue()), 4, lines_module.PARAGRAPHS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [stream.getvalue()[cut : cut + 3] for cut in cuts] == [b"one", b"\ntw", b"thr"]
    assert peak < 1 << 20
