"""LitData folders: what that library wrote and read, every compression, tokens, damage, streams over them."""

import json
import shutil
import struct
from collections import OrderedDict

import numpy as np
import pyarrow as pa
import pytest

from megascale_lightning.errors import ConfigError, CorruptDataError, DataError
from megascale_lightning.sources import build_manifest, make_reader
from megascale_lightning.sources.formats.litdata.codecs import leaf_decoder
from megascale_lightning.sources.formats.litdata.trees import parse_tree
from tests.sources.binaryfolders import (
    GOLDEN,
    Library,
    check_cuts,
    check_stream,
    edit_index,
    expected,
    plain,
    read_all,
    to_memory,
    tokens,
)

LIBRARY = Library("litdata")
FOLDER, source, copy = LIBRARY.folder, LIBRARY.source, LIBRARY.copy
PACKED = ["zstd_chunk", "zstd_batch", "zstd_sample"]


def values(name):
    return [entry["values"] for entry in expected("litdata", name)]


@pytest.mark.parametrize("name", ["leaves", "images", "mixed", "old_items", "old_zstd", *PACKED])
def test_what_the_library_wrote_is_read_as_it_reads_it(name):
    assert plain(read_all(source(FOLDER / name))) == expected("litdata", name)
    check_cuts(source(FOLDER / name))


@pytest.mark.parametrize("name", ["rows", "rows_zstd"])
def test_rows_that_are_stored_as_arrow_are_a_table(name):
    of = source(FOLDER / name)
    block = make_reader(of, build_manifest(of), ["text", "input_ids"]).read(1, 2, 5)
    assert block.table.column_names == ["text", "input_ids"]
    assert block.table.to_pylist() == [
        {key: row[key] for key in ("text", "input_ids")} for row in expected("litdata", name)[10:13]
    ]
    records = read_all(of)
    assert [record | {"input_ids": record["input_ids"].tolist()} for record in records] == expected("litdata", name)
    check_cuts(of)


def test_an_item_that_is_no_mapping_gets_a_name():
    pairs = [tuple(pair) for pair in expected("litdata", "sequence")]
    assert read_all(source(FOLDER / "sequence")) == [{"item": pair} for pair in pairs]
    named = source(FOLDER / "sequence", format_options={"field": "pair"})
    assert read_all(named, ["pair"]) == [{"pair": pair} for pair in pairs]
    assert tokens(read_all(source(FOLDER / "single"))) == values("single")


def test_items_of_tokens_are_the_documents_that_were_stored(tmp_path):
    of = source(FOLDER / "tokens")
    manifest = build_manifest(of)
    assert manifest.num_units > 1
    table = make_reader(of, manifest, ["input_ids"]).read(0).table
    assert table["input_ids"].type == pa.large_list(pa.int64())
    assert tokens(read_all(of)) == values("tokens")
    assert tokens(
        [{"input_ids": one["t"]} for one in read_all(source(FOLDER / "tokens", format_options={"field": "t"}))]
    ) == (values("tokens"))
    check_cuts(of)


@pytest.mark.parametrize(("name", "size"), [("tokens_blocks", 8), ("tokens_numpy", 8), ("old_tokens", 4)])
def test_blocks_of_tokens_are_those_of_the_library(tmp_path, name, size):
    of = source(FOLDER / name, format_options={"block_size": size})
    assert tokens(read_all(of)) == values(name)
    check_cuts(of)
    flat = [token for document in values("tokens") for token in document]
    assert [token for one in tokens(read_all(source(FOLDER / name))) for token in one] == flat
    with pytest.raises(ConfigError, match=r"not written for TokensLoader.*leave out block_size"):
        build_manifest(source(FOLDER / "single", format_options={"block_size": 8}))
    folder = copy(tmp_path, name)
    edit_index(folder, lambda index: index["chunks"][1].update(dim=None))
    assert tokens(read_all(source(folder))) == tokens(read_all(source(FOLDER / name)))
    with pytest.raises(DataError, match=r"'s'.*does not say how many tokens chunk-0-1\..* has, which block_size needs"):
        build_manifest(source(folder, format_options={"block_size": size}))


def test_tokens_are_the_pages_of_the_file(tmp_path):
    folder = copy(tmp_path, "tokens_blocks")
    of = source(folder)
    reader = make_reader(of, build_manifest(of), ["input_ids"])
    address = reader.read(0, 2).table["input_ids"].chunk(0).values.buffers()[1].address
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if str(folder) in line]
    assert any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)
    reader.close()


def test_pickles_are_refused_unless_allowed_or_left_out():
    message = r"'s': 'thing' of .*pickles/index\.json holds pickles.*columns=.*allow_pickle"
    with pytest.raises(ConfigError, match=message):
        build_manifest(source(FOLDER / "pickles", transform=dict))
    with pytest.raises(ConfigError, match=message):
        read_all(source(FOLDER / "pickles"))
    assert tokens(read_all(source(FOLDER / "pickles"), ["input_ids"])) == [[0, 1, 2]] * 2
    allowed = source(FOLDER / "pickles", format_options={"allow_pickle": True})
    assert plain(read_all(allowed)) == expected("litdata", "pickles")


def test_only_the_columns_asked_for_are_decoded(tmp_path):
    folder = copy(tmp_path, "leaves")
    edit_index(folder, lambda index: index["config"]["data_format"].__setitem__(2, "holograms"))
    want = [{key: record[key] for key in ("meta", "line")} for record in expected("litdata", "leaves")]
    assert plain(read_all(source(folder), ["meta", "line"])) == want
    with pytest.raises(
        ConfigError, match=r"'s': 'flag' of .*index\.json is stored as 'holograms'; known are audio, bool"
    ):
        read_all(source(folder))
    with pytest.raises(ConfigError, match="has no column 'x'; its columns are input_ids, text, flag"):
        build_manifest(source(folder, columns=("x",)))


def test_a_folder_that_the_library_has_unpacked_in_place_is_read(tmp_path):
    folder = copy(tmp_path, "zstd_chunk")
    for path in folder.glob("*.zstd.bin"):
        with pa.CompressedInputStream(pa.OSFile(str(path)), "zstd") as stream:
            (folder / path.name.replace(".zstd", "")).write_bytes(stream.read())
        path.unlink()
    assert plain(read_all(source(folder))) == expected("litdata", "zstd_chunk")
    (folder / "chunk-0-0.bin").unlink()
    with pytest.raises(DataError, match=r"'s'.*chunk-0-0\.zstd\.bin is missing, which .*index\.json names"):
        build_manifest(source(folder))


def test_several_folders_or_one_above(tmp_path):
    for name in ("b", "a x"):
        shutil.copytree(FOLDER / "tokens", tmp_path / "both" / name)
    assert tokens(read_all(source(tmp_path / "both"))) == values("tokens") * 2
    assert tokens(read_all(source(tmp_path / "both" / "*"))) == values("tokens") * 2
    with pytest.raises(ConfigError, match=r"mds/csv/index\.json has no list 'chunks'"):
        build_manifest(source(GOLDEN / "mds" / "csv"))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("leaves", {"encryption": {"algorithm": "fernet"}}, ConfigError, "is encrypted"),
        ("leaves", {"item_loader": "ParquetLoader"}, ConfigError, "needs ParquetLoader.*name the Parquet files"),
        ("leaves", {"item_loader": "Own"}, ConfigError, "needs Own; items of PyTreeLoader and TokensLoader"),
        ("leaves", {"compression": "lz9"}, ConfigError, "compressed by 'lz9'; zstd can be read"),
        ("zstd_batch", {"compression_level": "row"}, ConfigError, "compression level 'row'"),
        ("leaves", {"data_format": ["int"]}, DataError, "1 formats for 12 leaves"),
        ("leaves", {"data_format": None}, DataError, "is damaged"),
        ("leaves", {"data_spec": "[2, {}]"}, DataError, "no pytree of version 1"),
        ("leaves", {"item_loader": "TokensLoader"}, ConfigError, "tokens stored as no_header_tensor:18, str"),
        (
            "single",
            {"data_spec": '[1, {"type": "my.Node", "context": "null", "children_spec": []}]'},
            DataError,
            "a node of type 'my.Node'; known are dict, OrderedDict",
        ),
    ],
)
def test_a_wrong_index_is_named(tmp_path, name, change, error, message):
    folder = copy(tmp_path, name)
    edit_index(folder, lambda index: index["config"].update(change))
    with pytest.raises(error, match=rf"'s': .*{name}/index\.json.*{message}"):
        build_manifest(source(folder))


def test_damage_is_found_when_the_run_begins(tmp_path):
    folder = copy(tmp_path, "leaves")
    chunk = folder / "chunk-0-1.bin"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=rf"'s'.*chunk-0-1\.bin has {len(whole) - 3} bytes.*says {len(whole)}"):
        build_manifest(source(folder))
    chunk.unlink()
    with pytest.raises(DataError, match=r"'s'.*chunk-0-1\.bin is missing, which .*index\.json names"):
        build_manifest(source(folder))
    (folder / "index.json").write_text("[")
    with pytest.raises(DataError, match=r"'s'.*index\.json cannot be read"):
        build_manifest(source(folder))


def damaged(folder, at, data):
    """Overwrite bytes of the first chunk, at a place or at the first such bytes, and read it."""
    path = min(folder.glob("chunk-0-0.*"))
    content = bytearray(path.read_bytes())
    at = content.index(at) if isinstance(at, bytes) else at % len(content)
    content[at : at + len(data)] = data
    path.write_bytes(content)
    of = source(folder)
    return make_reader(of, build_manifest(of), None).read(0)


@pytest.mark.parametrize(
    ("name", "at", "data", "message"),
    [
        ("leaves", 0, b"\xff", "255 items, and its index says"),
        ("leaves", 4, b"\xff\xff", "its offsets do not rise"),
        ("leaves", 9, b"\xff\xff", "its offsets do not rise"),
        ("rows", -1, b"x", "no Arrow rows follow"),
        ("rows", -12, b"\xff\xff\xff\xff", "no Arrow rows follow"),
        ("zstd_chunk", 20, bytes(30), "it "),
        ("zstd_batch", 8, b"\x02", "frames of version 2"),
        ("zstd_batch", 12, b"\x01", "it has 1 items"),
        ("zstd_batch", 32, b"\xff\xff\xff", "its offsets do not rise"),
        ("zstd_batch", b"\x28\xb5\x2f\xfd", b"\0", "it "),
        ("zstd_sample", b"\x28\xb5\x2f\xfd", b"\0", "an item cannot be decompressed"),
        ("tokens", 8, b"\x31", "whole numbers of int64 values"),
    ],
)
def test_a_damaged_chunk_is_named(tmp_path, name, at, data, message):
    with pytest.raises(CorruptDataError, match=rf"'s'.*chunk-0-0\..*, unit 0 cannot be read: .*{message}"):
        damaged(copy(tmp_path, name), at, data)


def test_an_item_that_cannot_be_decoded_fails_alone(tmp_path):
    folder = copy(tmp_path, "leaves")
    first, second = struct.unpack_from("<II", (folder / "chunk-0-0.bin").read_bytes(), 4)
    block = damaged(folder, first, struct.pack("<I", 9))
    assert list(block.failures) == [0]
    assert "bytes, and its leaves have" in block.failures[0]
    assert len(block.raw[0]) == second - first
    assert block.objects[0] is None
    assert block.objects[1]["number"] == -1


@pytest.mark.parametrize(
    ("form", "data", "message"),
    [
        ("int", b"abc", "3 bytes where a number has 8"),
        ("no_header_tensor:17", b"abc", "3 bytes of values"),
        ("tensor", b"abc", "within the header"),
        ("tensor", struct.pack(">III", 17, 1, 3) + b"abc", "3 bytes of values, and int64 .3. needs"),
        ("tensor", struct.pack(">III", 10, 1, 1) + b"ab", "dtype code 10, which is unknown"),
        ("numpy", struct.pack("<II", 99, 0), "dtype code 99"),
        ("jpeg_array", b"\x01\x00\x00\x00", "4 bytes, which is not what its 1 entries need"),
        ("json", b"\x01\x01\x00\x00\x00\x09", "ends within a value"),
        ("json", b"\x1f\x01\x00\x00\x00", "unknown tag 31"),
        ("json", b"\x0b\x0b", "2 bytes, of which 1 are a value"),
        ("json", b"\x06\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00a\x77", "field of the unknown kind 119"),
    ],
)
def test_damaged_values_say_what_is_wrong(form, data, message):
    with pytest.raises(ValueError, match=message):
        leaf_decoder(form)(memoryview(data))


def test_formats_that_do_not_exist():
    assert [leaf_decoder(name) for name in ("", "graph", "no_header_tensor:99", "no_header_numpy:x")] == [None] * 4
    assert leaf_decoder("image:png")(memoryview(b"x")) == b"x"
    assert leaf_decoder("json")(memoryview(b'{"as": ["text"]}')) == {"as": ["text"]}


def test_every_kind_of_nesting_is_built():
    leaf = {"type": None, "context": None, "children_spec": []}

    def node(kind, context, *children):
        return {"type": kind, "context": json.dumps(context), "children_spec": list(children)}

    spec = node(
        "builtins.dict",
        ["o", "d", "l"],
        node("collections.OrderedDict", ["z", "a"], leaf, leaf),
        node("collections.defaultdict", [None, ["k"]], leaf),
        node("builtins.list", None, leaf, node("builtins.tuple", None, leaf)),
    )
    tree = parse_tree(json.dumps([1, spec]))
    assert tree.num_leaves() == 5
    assert list(tree.names()) == ["o.z", "o.a", "d.k", "l.0", "l.1.0"]
    assert tree.build(iter(range(5))) == {"o": OrderedDict(z=0, a=1), "d": {"k": 2}, "l": [3, (4,)]}


def test_options_are_checked():
    for options, message in (
        ({"block": 8}, "'litdata' has no option 'block'; it has allow_pickle, block_size, field"),
        ({"block_size": 0}, "a whole number of tokens of at least 1, not 0"),
        ({"field": ""}, "not ''"),
        ({"allow_pickle": 1}, "True or False, not 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_manifest(source(FOLDER / "tokens", format_options=options))


def test_remote_folders_are_the_same():
    for name in ("leaves", *PACKED):
        remote = source(to_memory(FOLDER / name, f"litdata {name}"))
        assert plain(read_all(remote)) == expected("litdata", name)
        check_cuts(remote)
    remote = source(to_memory(FOLDER / "tokens_numpy", "litdata tokens"), format_options={"block_size": 8})
    assert tokens(read_all(remote)) == values("tokens_numpy")
    rows = read_all(source(to_memory(FOLDER / "rows", "litdata rows")))
    assert [record["text"] for record in rows] == [f"row {n}" for n in range(20)]


@pytest.mark.parametrize("name", [*PACKED, "rows", "tokens", "single"])
def test_a_stream_gives_each_record_once_and_resumes(name):
    entries = [
        entry.get("input_ids", entry) if isinstance(entry, dict) else entry for entry in expected("litdata", name)
    ]
    records = [entry["values"] if isinstance(entry, dict) else entry for entry in entries]
    check_stream(source(FOLDER / name, epochs=1), records)


def test_a_remote_stream_of_blocks():
    url = to_memory(FOLDER / "tokens_blocks", "litdata stream")
    check_stream(source(url, epochs=1, format_options={"block_size": 8}), values("tokens_blocks"))


def test_a_stream_of_items_with_a_transform():
    records = [[*range(n + 1), n] for n in range(12)]
    check_stream(source(FOLDER / "leaves", epochs=1, transform=with_number), records)


def with_number(sample):
    return {"input_ids": np.append(sample["input_ids"], -sample["number"])}
