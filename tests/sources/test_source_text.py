"""Text files: lines, paragraphs and whole files; encodings; units of many small files."""

import gzip
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats import lines as lines_module
from megascale_lightning.sources.formats.lines import LINES, PARAGRAPHS, find_cuts
from megascale_lightning.sources.stores import plaintext


def source_of(data, **options):
    return Source("s", data if isinstance(data, list) else str(data), format="text", format_options=options)


def blocks_of(source):
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, None)
    return [reader.read(unit) for unit in range(manifest.num_units)]


def records_of(source):
    blocks = blocks_of(source)
    assert not any(block.failures for block in blocks), blocks
    return [record for block in blocks for record in block.objects]


def test_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone é\r\n\r\n  two  \n \t\nthree".encode())
    source = Source("s", str(tmp_path / "*.txt"))
    assert build_manifest(source).format == "text"
    assert records_of(source) == [{"text": "one é"}, {"text": "  two  "}, {"text": "three"}]
    assert records_of(source_of(tmp_path / "a.txt", text_field="t"))[0] == {"t": "one é"}


def test_any_file_compressed_or_not(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\ny = 2\n")
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"z = 3\n"))
    source = source_of([str(tmp_path / "a.py"), str(tmp_path / "b.py.gz")])
    assert records_of(source) == [{"text": "x = 1"}, {"text": "y = 2"}, {"text": "z = 3"}]


def test_paragraphs(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\none\n  more \n\n \t\n\r\ntwo\r\n\r\nthree\nmore\n  \n")
    source = source_of(tmp_path / "a.txt", records="paragraph")
    assert records_of(source) == [{"text": "one\n  more"}, {"text": "two"}, {"text": "three\nmore"}]


PIECES = st.lists(st.sampled_from([b"a", b"bc", b" ", b"\n", b"\n", b"\r\n", b"\n\n", b"\t"]), max_size=60)


def by_definition(content, records):
    lines = content.split(b"\n")
    if records == "line":
        return [line.rstrip(b"\r").decode() for line in lines if line.strip()]
    found = re.split(rb"\n(?:[ \t\r]*\n)+", b"\n" + content + b"\n\n")
    # The first line of a paragraph keeps its indentation.
    return [re.sub(rb"^(?:[ \t\r]*\n)+", b"", text).rstrip().decode() for text in found if text.strip()]


@settings(max_examples=200, deadline=None)
@given(
    pieces=PIECES,
    unit_bytes=st.integers(1, 30),
    slice_bytes=st.integers(1, 30),
    chunk=st.sampled_from([1, 5, 1 << 20]),
    records=st.sampled_from(["line", "paragraph"]),
)
def test_any_units_and_slices_give_the_same_records(tmp_path_factory, pieces, unit_bytes, slice_bytes, chunk, records):
    content = b"".join(pieces)
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content or b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_CHUNK", chunk)
        source = source_of(path, records=records)
        patch.setattr(lines_module.list_ranges, "__defaults__", (unit_bytes,))
        manifest = build_manifest(source)
        assert int(manifest.units["bytes"].sum()) == max(len(content), 1)
        reader = make_reader(source, manifest, None)
        whole, sliced = [], []
        for unit in range(manifest.num_units):
            whole += reader.read(unit).objects
            index, is_last = 0, False
            while not is_last:
                block, is_last = reader.read_slice(unit, index, slice_bytes)
                sliced += block.objects
                index += 1
        reader.close()
    assert [record["text"] for record in whole] == by_definition(content, records)
    assert sliced == whole


@settings(max_examples=100, deadline=None)
@given(
    pieces=PIECES,
    unit_bytes=st.integers(1, 20),
    records=st.sampled_from([LINES, PARAGRAPHS]),
    chunk=st.sampled_from([1, 2, 3, 1 << 16]),
)
def test_cuts_stand_behind_separators(pieces, unit_bytes, records, chunk):
    content = b"".join(pieces)
    whole = find_cuts(io.BytesIO(content), len(content), unit_bytes, records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_CUT_CHUNK", chunk)
        cuts = find_cuts(io.BytesIO(content), len(content), unit_bytes, records)
    assert cuts == whole
    assert cuts == sorted(set(cuts))
    for cut in cuts[1:]:
        assert cut < len(content)
        line_before = content[:cut].split(b"\n")[-2]
        assert content[cut - 1 : cut] == b"\n"
        assert records is LINES or not line_before.strip()


def test_bytes_that_do_not_decode_are_failures_with_their_place(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\xffo\nthree\n")
    (block,) = blocks_of(source_of(tmp_path / "a.txt"))
    assert block.objects == [{"text": "one"}, None, {"text": "three"}]
    assert re.search("the line at byte 4 is not utf-8: .* position 2", block.failures[1])
    assert block.raw == {1: b"tw\xffo"}
    assert records_of(source_of(tmp_path / "a.txt", errors="replace"))[1] == {"text": "tw\ufffdo"}
    assert records_of(source_of(tmp_path / "a.txt", encoding="latin-1"))[1] == {"text": "twÿo"}


def test_files_as_records(tmp_path):
    for index in range(3000):
        (tmp_path / f"{index:05d} ü.md").write_text(f"# {index}\n\ntext\n" if index else "")
    source = source_of(tmp_path / "*.md", records="file")
    manifest = build_manifest(source)
    assert manifest.num_records == 3000
    assert [(int(u["file"]), int(u["start"]), int(u["stop"])) for u in manifest.units] == [
        (0, 0, 1024),
        (1024, 1024, 2048),
        (2048, 2048, 3000),
    ]
    reader = make_reader(source, manifest, None)
    assert reader.read(0, 0, 1).objects == [{"text": "", "path": str(tmp_path / "00000 ü.md")}]
    block = reader.read(1, 5, 7)
    assert (block.row_start, [record["text"] for record in block.objects]) == (
        5,
        ["# 1029\n\ntext\n", "# 1030\n\ntext\n"],
    )
    assert reader.read(2, 946).num_rows == 6


def test_large_files_have_units_of_their_own(tmp_path, monkeypatch):
    from megascale_lightning.sources.formats import text

    monkeypatch.setattr(text, "UNIT_BYTES", 100)
    for index, size in enumerate([10, 10, 90, 250, 30]):
        (tmp_path / f"{index}.txt").write_text("x" * size)
    source = source_of(tmp_path / "*.txt", records="file")
    units = build_manifest(source).units
    assert [(int(u["start"]), int(u["stop"]), int(u["bytes"])) for u in units] == [(0, 3, 110), (3, 4, 250), (4, 5, 30)]
    assert [len(record["text"]) for record in records_of(source)] == [10, 10, 90, 250, 30]


def test_broken_files_fail_alone(tmp_path):
    whole = gzip.compress(b"some text " * 1000)
    (tmp_path / "a.txt.gz").write_bytes(whole)
    (tmp_path / "b.txt.gz").write_bytes(whole[:-4])
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    (block,) = blocks_of(source_of(tmp_path / "*", records="file"))
    assert block.objects[0]["text"] == "some text " * 1000
    assert re.search(r"b\.txt\.gz: the file ends in the middle at plain byte", block.failures[1])
    assert re.search(r"c\.txt: is not utf-8", block.failures[2])
    assert block.raw[2] == b"\xff\xfe"


def test_wide_encodings(tmp_path):
    (tmp_path / "a.txt").write_bytes("één\n二\n".encode("utf-16"))
    assert records_of(source_of(tmp_path / "a.txt", records="file", encoding="utf-16"))[0]["text"] == "één\n二\n"
    with pytest.raises(ConfigError, match="utf-16 cannot be cut into lines"):
        build_manifest(source_of(tmp_path / "a.txt", encoding="utf-16"))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\ntwo")
    assert records_of(source_of(tmp_path / "b.txt", encoding="utf-8-sig")) == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": "line"}, r"no option 'record'; it has encoding, errors, max_record_bytes, records, text_field"),
        ({"records": "word"}, r"'line', 'paragraph' or 'file', not 'word'"),
        ({"encoding": "utf-9"}, r"encoding.*not 'utf-9'"),
        ({"encoding": "hex"}, r"encoding.*not 'hex'"),
        ({"errors": "explode"}, r"'errors'.*not 'explode'"),
        ({"text_field": ""}, r"a name, not ''"),
        ({"text_field": "path", "records": "file"}, r"take another"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=message):
        build_manifest(source_of(tmp_path / "a.txt", **options))


def test_columns_that_text_has_not_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match="a record of text has text"):
        build_manifest(Source("s", str(tmp_path / "a.txt"), columns=("text", "path")))


def test_large_compressed_text_is_sliced(tmp_path, monkeypatch):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    monkeypatch.setattr(plaintext, "SLICED_BYTES", 10)
    assert build_manifest(source_of(tmp_path / "a.txt.gz")).sliced
    assert build_manifest(source_of(tmp_path / "a.txt.gz", records="paragraph")).sliced
    assert not build_manifest(source_of(tmp_path / "a.txt.gz", records="file")).sliced


def words(sample):
    return {"input_ids": [int(word) for word in sample["text"].split()]}


@pytest.mark.parametrize("records", ["line", "paragraph", "file"])
def test_through_the_loader(tmp_path, records):
    """Exactly once, with a restart in the middle."""
    from megascale_lightning import LoaderConfig, MegaScaleLoader, PaddedRows

    for file in range(40):
        paragraphs = [
            f"{100 * file + 10 * n + 1} {100 * file + 10 * n + 2}\n{100 * file + 10 * n + 3}" for n in range(3)
        ]
        (tmp_path / f"{file:02d}.txt").write_text("\n\n".join(paragraphs))
    source = Source("s", str(tmp_path / "*.txt"), transform=words, epochs=1, format_options={"records": records})
    config = LoaderConfig(sources=[source], rows=PaddedRows(16, 2), global_batch_size=4, runtime="local", part_bytes=99)
    found = []
    with MegaScaleLoader(config) as loader:
        for batch in loader:
            found += batch["input_ids"][batch["attention_mask"].bool()].tolist()
            if batch["megascale"].step == 4 and batch["megascale"].is_last_in_step:
                state = loader.state_dict()
                break
    with MegaScaleLoader(config) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            found += batch["input_ids"][batch["attention_mask"].bool()].tolist()
    assert sorted(found) == sorted(100 * file + 10 * n + k for file in range(40) for n in range(3) for k in (1, 2, 3))


def test_a_record_of_a_unit_of_files_is_located_in_its_own_file(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    manifest = build_manifest(source_of(str(tmp_path / "*.txt"), records="file"))
    assert manifest.file_of(0, 1).path.endswith("b.txt")
    assert manifest.file_of(0, -1).path.endswith("a.txt")
    lines = build_manifest(source_of(str(tmp_path / "*.txt")))
    assert lines.file_of(0, 1).path.endswith("a.txt")


@pytest.mark.parametrize("errors", ["xmlcharrefreplace", "namereplace"])
def test_handlers_that_only_encode_are_refused(tmp_path, errors):
    (tmp_path / "a.txt").write_bytes(b"a\xff\n")
    with pytest.raises(ConfigError, match="option 'errors'"):
        build_manifest(source_of(tmp_path / "a.txt", errors=errors))
    for errors in ("strict", "ignore", "replace", "backslashreplace", "surrogateescape"):
        build_manifest(source_of(tmp_path / "a.txt", errors=errors))
