"""Megatron indexed datasets: what their own builder wrote, every dtype, damage, streams over them."""

import json
import os
import struct
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from megascale_lightning import LoaderConfig, PackedRows
from megascale_lightning.errors import ConfigError, CorruptDataError, DataError, EmptySourceError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats import megatron
from tests.acceptance.harness import run_world
from tests.sources.binaryfolders import GOLDEN, check_cuts, check_stream, read_all, to_memory

FOLDER = GOLDEN / "megatron"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write(stem, documents, dtype="uint16", modes=None, /, **wrong):
    """Documents are lists of sequences. `wrong` replaces a part of the index."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", CODES[dtype]),
        "counts": struct.pack("<QQ", len(sequences), len(documents) + 1),
        "lengths": lengths.tobytes(),
        "pointers": ((np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize).tobytes(),
        "documents": np.cumsum([0, *map(len, documents)]).astype(np.int64).tobytes(),
        "modes": b"" if modes is None else np.asarray(modes, np.int8).tobytes(),
    }
    assert wrong.keys() <= parts.keys()
    stem.with_suffix(".idx").write_bytes(b"".join((parts | wrong).values()))
    stem.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    return stem


def own(name):
    """What Megatron's own reader gave: documents, each with its sequences; modes per sequence."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    bounds = found["documents"]
    documents = [found["sequences"][a:b] for a, b in pairwise(bounds)]
    return documents, found


def tokens(records):
    return [record["input_ids"].tolist() for record in records]


def source(data, **more):
    return Source("s", str(data), format="megatron", **more)


DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[], [7]], [[8, 9, 10, 11]]]


@pytest.mark.parametrize("name", ["text_document", "long_document", "mixed_document"])
def test_what_the_builder_wrote_is_read(name, tmp_path):
    documents, found = own(name)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    assert tokens(read_all(source(FOLDER / name), ["input_ids"])) == joined
    sequences = source(FOLDER / name, format_options={"records": "sequence"})
    assert tokens(read_all(sequences, ["input_ids"])) == found["sequences"]
    check_cuts(source(FOLDER / name))
    check_cuts(sequences)
    # and the writer of these tests writes the same
    write(tmp_path / name, documents, found["dtype"], found["modes"])
    for suffix in (".idx", ".bin"):
        assert (tmp_path / name).with_suffix(suffix).read_bytes() == (FOLDER / name).with_suffix(suffix).read_bytes()


def test_modes_are_columns_where_the_index_has_them():
    documents, found = own("mixed_document")
    modes = iter(found["modes"])
    records = read_all(source(FOLDER / "mixed_document"))
    for record, document in zip(records, documents, strict=True):
        assert record["sequence_lengths"].tolist() == [len(sequence) for sequence in document]
        assert record["mode"].tolist() == [next(modes) for _ in document]
    sequences = read_all(source(FOLDER / "mixed_document", format_options={"records": "sequence"}))
    assert [record["mode"] for record in sequences] == found["modes"]
    with pytest.raises(ConfigError, match=r"text_document\.idx has no column 'mode'; its columns are input_ids"):
        build_manifest(source(FOLDER / "text_document", columns=("input_ids", "mode")))


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_stay_as_stored(tmp_path, dtype):
    write(tmp_path / "a", DOCUMENTS, dtype)
    of = source(tmp_path / "a")
    (block,) = [make_reader(of, build_manifest(of), ["input_ids"]).read(0)]
    assert block.table["input_ids"].type == pa.large_list(pa.from_numpy_dtype(dtype))
    assert tokens(block.samples()) == [[1, 2, 3], [4, 5, 6], [], [7], [8, 9, 10, 11]]


def test_values_are_the_pages_of_the_file(tmp_path):
    write(tmp_path / "a", [[range(1000)]] * 20, "int32")
    of = source(tmp_path / "a")
    reader = make_reader(of, build_manifest(of), ["input_ids"])
    values = reader.read(0, 3).table["input_ids"].chunk(0).values
    address = values.buffers()[1].address
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("a.bin")]
    assert any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)
    reader.close()
    assert values[-1].as_py() == 999  # what was read outlives its reader


def test_units_are_runs_of_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "UNIT_BYTES", 40)
    monkeypatch.setattr(megatron, "_CHUNK", 3)
    documents = [[list(range(1, 1 + n % 7))] for n in range(30)] + [[list(range(200))], [], []]
    write(tmp_path / "a", documents)
    of = source(tmp_path / "a")
    manifest = build_manifest(of)
    units = manifest.units
    assert manifest.num_units > 4
    assert units["rows"].sum() == len(documents)
    assert units["bytes"].sum() == manifest.files[1].size
    assert units["start"].tolist() == [0, *units["stop"].tolist()[:-1]]
    assert max(units["bytes"][:-2]) <= 40 + 400
    assert tokens(read_all(of)) == [[token for one in document for token in one] for document in documents]
    check_cuts(of)


def test_data_names_files_prefixes_patterns_or_a_folder(tmp_path):
    for name, start in (("b x", 10), ("ä", 20)):
        write(tmp_path / name, [[[start]], [[start + 1]]])
    both = [[10], [11], [20], [21]]
    names = [
        [tmp_path / "b x.bin", tmp_path / "ä.idx"],
        tmp_path / "*",
        tmp_path / "*.bin",
        tmp_path,
        [tmp_path / "*.idx"],
    ]
    for data in names:
        data = [str(one) for one in data] if isinstance(data, list) else str(data)
        assert tokens(read_all(Source("s", data, format="megatron"))) == both, data
    assert tokens(read_all(source(tmp_path / "ä"))) == both[2:]
    (tmp_path / "ä.bin").unlink()
    with pytest.raises(ConfigError, match=r"'s'.*ä\.bin"):
        build_manifest(source(tmp_path / "ä"))
    with pytest.raises(ConfigError, match=r"nothing\.idx"):
        build_manifest(source(tmp_path / "nothing"))
    (tmp_path / "a.txt.idx").write_bytes(b"")
    with pytest.raises(ConfigError, match="no file matches"):
        build_manifest(source(tmp_path / "a.txt"))


I64 = struct.Struct("<q")
N = sum(map(len, DOCUMENTS))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "begins with b'TNTIDX"),
        ({"version": struct.pack("<Q", 2)}, "version 2"),
        ({"code": b"\x09"}, "dtype code 9; known are 1 .uint8."),
        ({"documents": b""}, "cut short or damaged"),
        (
            {"pointers": np.arange(N, dtype=np.int64).tobytes()},
            "sequence 1 does not begin where the one before it ends",
        ),
        ({"lengths": np.full(N, -1, np.int32).tobytes()}, "sequence 0 is of negative length"),
        ({"documents": np.array([0, 1, 3, 3, 5, 5], np.int64).tobytes()}, "end at sequence 5 of 6"),
        ({"documents": np.array([1, 1, 3, 3, 5, 6], np.int64).tobytes()}, "do not rise from 0"),
        ({"documents": np.array([0, 3, 1, 3, 5, 6], np.int64).tobytes()}, "do not rise from 0"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, wrong, message):
    write(tmp_path / "a", DOCUMENTS, **wrong)
    with pytest.raises(DataError, match=f"'s'.*a.idx.*{message}"):
        build_manifest(source(tmp_path / "a"))


def test_a_bin_of_another_size_is_named(tmp_path):
    data = write(tmp_path / "a", DOCUMENTS).with_suffix(".bin")
    whole = data.read_bytes()
    for other in (whole[:-1], whole + b"xx", b""):
        data.write_bytes(other)
        with pytest.raises(DataError, match=rf"a\.bin has {len(other)} bytes, and its index .* of {len(whole)}"):
            build_manifest(source(data))
    data.with_suffix(".idx").write_bytes(b"MMIDIDX")
    with pytest.raises(DataError, match="7 bytes, fewer than the header"):
        build_manifest(source(data))


def test_a_file_that_changes_later_is_named(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    of = source(tmp_path / "a")
    reader = make_reader(of, build_manifest(of), None)
    reader.read(0)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"'s'.*a\.bin.*0 bytes"):
        reader.read(0)
    write(tmp_path / "a", DOCUMENTS)
    manifest = build_manifest(of)
    write(tmp_path / "a", DOCUMENTS, magic=b"another  ")
    with pytest.raises(CorruptDataError, match=r"'s'.*a\.bin, unit 0.*a\.idx begins with b'another"):
        make_reader(of, manifest, None).read(0)


def test_nothing_but_empty_documents(tmp_path):
    write(tmp_path / "a", [[], [[]]])
    assert tokens(read_all(source(tmp_path / "a"))) == [[], []]
    write(tmp_path / "b", [])
    with pytest.raises(EmptySourceError):
        build_manifest(source(tmp_path / "b"))


def test_options_are_checked(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(ConfigError, match="'megatron' has no option 'record'; it has records"):
        build_manifest(source(tmp_path / "a", format_options={"record": "document"}))
    with pytest.raises(ConfigError, match='"document" or "sequence", not \'docs\''):
        build_manifest(source(tmp_path / "a", format_options={"records": "docs"}))


def num_mapped(folder):
    """Files below a folder that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return len({line.split(maxsplit=5)[5] for line in maps if str(folder) in line})


def test_few_files_stay_mapped_and_none_open(tmp_path):
    for index in range(20):
        write(tmp_path / f"{index:02}", [[[index]]])
    of = source(tmp_path / "*")
    manifest = build_manifest(of)
    reader = make_reader(of, manifest, ["input_ids"])
    before = os.listdir("/proc/self/fd")
    for unit in [*range(20), 0, 19]:
        assert tokens(reader.read(unit).samples()) == [[unit]]
        assert 0 < num_mapped(tmp_path) <= 16
    assert len(os.listdir("/proc/self/fd")) == len(before)
    reader.close()
    assert num_mapped(tmp_path) == 0


@pytest.mark.parametrize("records", ["document", "sequence"])
def test_a_stream_gives_each_record_once_and_resumes(tmp_path, monkeypatch, records):
    monkeypatch.setattr(megatron, "UNIT_BYTES", 100)
    documents = [[[3 * n + 1] * (1 + n % 5), [3 * n + 2] * (n % 3)] for n in range(30)]
    write(tmp_path / "a", documents)
    sequences = [sequence for document in documents for sequence in document]
    joined = [first + second for first, second in documents]
    of = source(tmp_path / "a", epochs=1, format_options={"records": records})
    assert build_manifest(of).num_units > 2
    check_stream(of, joined if records == "document" else sequences)


def test_a_remote_stream_is_the_same(tmp_path):
    write(tmp_path / "a", [[[n + 1] * (1 + n % 5)] for n in range(40)], "int32")
    url = to_memory(tmp_path, "megatron")
    local, remote = source(tmp_path / "a", epochs=1), source(f"{url}/a", epochs=1)
    assert tokens(read_all(remote)) == tokens(read_all(local))
    check_stream(remote, tokens(read_all(local)))


def test_tokens_beyond_int32_are_dropped_or_named(tmp_path):
    write(tmp_path / "a", [[[1, 2]], [[3, 1 << 40]], [[5, 6]]], "int64")

    def delivered(**more):
        rows = PackedRows(seq_len=8, micro_batch_size=1, pack_ahead=2)
        of = source(tmp_path / "a", epochs=1, **more)
        config = LoaderConfig(sources=[of], rows=rows, global_batch_size=1, runtime="local")
        return sorted(piece[3] for step in run_world(config) for piece in step.pieces())

    assert delivered(on_error="skip") == [0, 2]
    with pytest.raises(DataError, match=r"a\.bin, unit 0, row 1.*1099511627776"):
        delivered()
