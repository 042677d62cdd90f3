"""MosaicML Streaming folders: what that library wrote and read, compression, damage, streams over them."""

import hashlib
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from megascale_lightning.errors import ConfigError, CorruptDataError, DataError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats.mds.codecs import column_decoder
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

LIBRARY = Library("mds")
FOLDER, source, copy = LIBRARY.folder, LIBRARY.source, LIBRARY.copy
PACKED = ["packed_zstd", "packed_gz", "packed_bz2", "packed_br", "packed_snappy"]


@pytest.mark.parametrize("name", ["scalars", "arrays", "jsonl", "csv", *PACKED])
def test_what_the_library_wrote_is_read_as_it_reads_it(name):
    assert plain(read_all(source(FOLDER / name))) == expected("mds", name)
    check_cuts(source(FOLDER / name))


def pixels_of(data):
    """A jpeg or png, as the library showed it: decoders of other versions may round otherwise."""
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def pixels(entry):
    return np.array(entry["values"]).reshape(entry["shape"])


def test_images_stay_as_they_were_encoded_and_pixels_are_arrays():
    for record, own in zip(read_all(source(FOLDER / "images")), expected("mds", "images"), strict=True):
        assert record["label"] == own["label"]
        assert plain(record["pil"]) == own["pil"]
        for name in ("jpeg", "png"):
            assert np.abs(pixels_of(record[name]) - pixels(own[name])).max() <= 3
    for record, own in zip(read_all(source(FOLDER / "lists")), expected("mds", "lists"), strict=True):
        assert plain(record["pils"]) == own["pils"]
        for name in ("array", "jpegs"):
            assert len(record[name]) == len(own[name])
            for one, entry in zip(record[name], own[name], strict=True):
                assert np.abs(pixels_of(one) - pixels(entry)).max() <= 3


def test_pickles_are_refused_unless_allowed_or_left_out():
    message = r"'s': column 'thing' of shard\.00000\.mds holds pickles.*columns=.*allow_pickle"
    with pytest.raises(ConfigError, match=message):
        build_manifest(source(FOLDER / "pickles", transform=dict))
    with pytest.raises(ConfigError, match=message):
        read_all(source(FOLDER / "pickles"))
    assert tokens(read_all(source(FOLDER / "pickles"), ["input_ids"])) == [[1, 1], [1, 1]]
    allowed = source(FOLDER / "pickles", format_options={"allow_pickle": True})
    assert plain(read_all(allowed)) == expected("mds", "pickles")


def test_only_the_columns_asked_for_are_decoded():
    assert list(read_all(source(FOLDER / "arrays"), ["input_ids"])[3]) == ["input_ids"]
    assert list(read_all(source(FOLDER / "jsonl"), ["number"])[3]) == ["number"]
    assert list(read_all(source(FOLDER / "csv"), ["share"])[3]) == ["share"]
    with pytest.raises(
        ConfigError, match=r"shard\.00000\.mds has no column 'text'; its columns are any, fixed, input_ids"
    ):
        build_manifest(source(FOLDER / "arrays", columns=("text",)))
    with pytest.raises(ConfigError, match="no column 'labels'"):
        read_all(source(FOLDER / "arrays"), ["labels"])


def test_arrays_are_the_readers_own_and_writable():
    of = source(FOLDER / "arrays")
    reader = make_reader(of, build_manifest(of), ["input_ids"])
    reader.read(0).samples()[0]["input_ids"][:] = 7
    assert reader.read(0).samples()[0]["input_ids"].tolist() == [1]


def test_data_names_a_folder_an_index_several_or_what_is_above(tmp_path):
    for name in ("b", "a x"):
        shutil.copytree(FOLDER / "arrays", tmp_path / "streams" / name)
    one = tokens(read_all(source(FOLDER / "arrays")))
    assert tokens(read_all(source(FOLDER / "arrays" / "index.json"))) == one
    assert tokens(read_all(source(f"{FOLDER / 'arrays'}/"))) == one
    for data in ([tmp_path / "streams" / "b", tmp_path / "streams" / "a x" / "index.json"], [tmp_path / "streams"]):
        of = Source("s", [str(path) for path in data], format="mds")
        assert tokens(read_all(of)) == one * 2
    paths = [info.path for info in build_manifest(source(tmp_path / "streams")).files]
    assert paths == sorted(paths)
    with pytest.raises(ConfigError, match=r"'s'.*no index\.json in or below .*nowhere"):
        build_manifest(source(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"litdata/rows/index\.json has no list 'shards', but chunks, config"):
        build_manifest(source(GOLDEN / "litdata" / "rows"))


@pytest.mark.parametrize("name", PACKED)
def test_a_raw_shard_beside_a_compressed_one_is_used_if_it_is_whole(tmp_path, name):
    folder = copy(tmp_path, name)
    index = json.loads((folder / "index.json").read_text())
    shard = index["shards"][0]["raw_data"]
    (folder / shard["basename"]).write_bytes(b"\0" * (shard["bytes"] - 1))
    assert plain(read_all(source(folder))) == expected("mds", name)
    (folder / shard["basename"]).write_bytes(b"\0" * shard["bytes"])
    assert build_manifest(source(folder)).files[1].path.endswith(".mds")


def test_damage_is_found_when_the_run_begins(tmp_path):
    folder = copy(tmp_path, "arrays")
    shard = folder / "shard.00003.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=rf"'s'.*shard\.00003\.mds has {len(whole) - 3} bytes.*says {len(whole)}"):
        build_manifest(source(folder))
    shard.unlink()
    with pytest.raises(DataError, match=r"'s'.*shard\.00003\.mds is missing, which .*index\.json names"):
        build_manifest(source(folder))
    (folder / "index.json").write_text('{"version": 2, "shards": [')
    with pytest.raises(DataError, match=r"'s'.*index\.json cannot be read"):
        build_manifest(source(folder))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda index: index.update(version=3), ConfigError, "is of version 3, not 2"),
        (lambda index: index["shards"][1].update(format="parquet"), ConfigError, "a shard of format 'parquet'"),
        (lambda index: index["shards"][1].pop("samples"), DataError, "is damaged: a shard has no usable 'samples'"),
        (lambda index: index["shards"][1].update(raw_data=None), ConfigError, "without raw_data"),
        (lambda index: index["shards"][1].update(compression="lzma:3"), ConfigError, "'lzma:3'; known are gz, bz2"),
    ],
)
def test_a_wrong_index_is_named(tmp_path, change, error, message):
    folder = copy(tmp_path, "packed_zstd")
    edit_index(folder, change)
    with pytest.raises(error, match=f"'s'.*index.json.*{message}"):
        build_manifest(source(folder))


def test_an_unknown_encoding_is_named(tmp_path):
    folder = copy(tmp_path, "arrays")
    edit_index(folder, lambda index: index["shards"][2]["column_encodings"].__setitem__(0, "torch"))
    with pytest.raises(ConfigError, match=r"column 'any' of shard\.00002\.mds is encoded as 'torch'; known are bytes"):
        read_all(source(folder))
    assert len(read_all(source(folder), ["input_ids"])) == 20


@pytest.mark.parametrize(
    ("at", "message"),
    [(0, "it holds 255 records, and its index says"), (4, "its offsets do not rise"), (9, "its offsets do not rise")],
)
def test_a_shard_with_a_wrong_header_is_named(tmp_path, at, message):
    folder = copy(tmp_path, "arrays")
    data = bytearray((folder / "shard.00001.mds").read_bytes())
    data[at] = 255
    (folder / "shard.00001.mds").write_bytes(data)
    of = source(folder)
    reader = make_reader(of, build_manifest(of), None)
    unit = next(
        u for u, file in enumerate(reader._manifest.units["file"]) if "00001" in reader._manifest.files[file].path
    )
    with pytest.raises(CorruptDataError, match=rf"'s'.*shard\.00001\.mds, unit {unit} cannot be read: {message}"):
        reader.read(unit)


@pytest.mark.parametrize("name", PACKED)
def test_a_damaged_compressed_shard_is_named(tmp_path, name):
    folder = copy(tmp_path, name)
    path = next(path for path in sorted(folder.iterdir()) if ".mds." in path.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    of = source(folder)
    with pytest.raises(CorruptDataError, match=rf"'s'.*{path.name}, unit 0 cannot be read: it "):
        make_reader(of, build_manifest(of), None).read(0)


def test_a_compressed_shard_is_never_unpacked_beyond_its_size(tmp_path):
    folder = copy(tmp_path, "packed_zstd")
    edit_index(folder, lambda index: index["shards"][0]["raw_data"].update(bytes=100))
    of = source(folder)
    with pytest.raises(CorruptDataError, match="it holds more than 100 bytes when decompressed, not 100"):
        make_reader(of, build_manifest(of), None).read(0)


def test_hashes_are_compared_where_that_is_asked_for(tmp_path):
    for name in ("packed_zstd", "scalars"):
        checked = {"validate_hash": "sha1"}
        assert plain(read_all(source(FOLDER / name, format_options=checked))) == expected("mds", name)
        folder = copy(tmp_path, name)
        path = max(path for path in folder.iterdir() if path.name != "index.json")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        found = hashlib.sha1(data).hexdigest()
        with pytest.raises(CorruptDataError, match=rf"{path.name}, unit \d.*its sha1 is {found}, and index\.json says"):
            read_all(source(folder, format_options=checked))
    with pytest.raises(ConfigError, match=r"validate_hash='md5', but the hashes of shard.* are: sha1"):
        build_manifest(source(FOLDER / "packed_zstd", format_options={"validate_hash": "md5"}))
    with pytest.raises(ConfigError, match=r"the name of a hash of hashlib that the shards have, .* not 'crc'"):
        build_manifest(source(FOLDER / "packed_zstd", format_options={"validate_hash": "crc"}))
    with pytest.raises(ConfigError, match="'mds' has no option 'hash'; it has allow_pickle, validate_hash"):
        build_manifest(source(FOLDER / "packed_zstd", format_options={"hash": "sha1"}))


def test_a_record_that_cannot_be_decoded_fails_alone(tmp_path):
    folder = copy(tmp_path, "scalars")
    shard = next(path for path in sorted(folder.iterdir()) if "zażółć".encode() in path.read_bytes())
    data = shard.read_bytes()
    shard.write_bytes(data.replace("zażółć".encode(), b"za\xc5\xbc\xc3\xb3\xc5" + b"\xff\xff\xff", 1))
    of = source(folder)
    manifest = build_manifest(of)
    reader = make_reader(of, manifest, None)
    blocks = [reader.read(unit) for unit in range(manifest.num_units)]
    ((block, index),) = [(block, index) for block in blocks for index in block.failures]
    assert "column 'str' cannot be decoded: UnicodeDecodeError" in block.failures[index]
    assert b"\xff\xff\xff" in block.raw[index]
    assert block.objects[index] is None
    assert sum(sample is None for block in blocks for sample in block.objects) == 1


@pytest.mark.parametrize(
    ("encoding", "data", "message"),
    [
        ("int32", b"abc", "3 bytes where a int32 has 4"),
        ("ndarray", b"", "no code of a dtype"),
        ("ndarray", b"\x07\x04\x01a", "no code of a dtype"),
        ("ndarray", b"\x08\x08\x01", "ends within the shape"),
        ("ndarray:int32", b"\x04\x02aaaa", "4 bytes of values where int32 .2. has 8"),
        ("ndarray:uint8:2,2", b"abc", "3 bytes of values where uint8 .2, 2. has 4"),
        ("jpegarray", b"\x02\x00\x00\x00\x01\x00\x00\x00", "8 bytes, which is not what its 2 entries need"),
        ("pil", b"\x01\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00XXa", "mode 'XX'"),
        ("pil", b"\x01", "fewer than the header of an image"),
    ],
)
def test_damaged_values_say_what_is_wrong(encoding, data, message):
    with pytest.raises(ValueError, match=message):
        column_decoder(encoding)(memoryview(data))


def test_encodings_that_do_not_exist():
    assert [column_decoder(name) for name in ("", "tensor", "ndarray:str", "ndarray:int8:a", "ndarray:int8:1:2")] == [
        None
    ] * 5


def test_a_missing_line_is_named(tmp_path):
    for name in ("jsonl", "csv"):
        folder = copy(tmp_path, name)
        edit_index(folder, lambda index: index["shards"][0].update(samples=index["shards"][0]["samples"] + 1))
        with pytest.raises(CorruptDataError, match=r"it holds \d lines, and its index says \d"):
            read_all(source(folder))


def test_remote_folders_are_the_same():
    for name in ("arrays", "scalars", "packed_zstd", "packed_snappy", "csv"):
        remote = source(to_memory(FOLDER / name, f"mds {name}"))
        assert plain(read_all(remote)) == expected("mds", name)
        check_cuts(remote)


def test_several_threads_read_at_once():
    of = source(FOLDER / "packed_gz")
    manifest = build_manifest(of)
    reader = make_reader(of, manifest, None)
    want = [plain(list(reader.read(unit).samples())) for unit in range(manifest.num_units)]
    reader.close()
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda n: plain(list(reader.read(n % manifest.num_units).samples())), range(40))
    assert list(found) == [want[n % manifest.num_units] for n in range(40)]
    reader.close()


@pytest.mark.parametrize("name", ["arrays", "packed_zstd"])
def test_a_stream_gives_each_record_once_and_resumes(name):
    records = [entry["input_ids"]["values"] for entry in expected("mds", name)]
    check_stream(source(FOLDER / name, epochs=1), records)


def test_a_remote_stream_with_a_transform():
    url = to_memory(FOLDER / "packed_br", "mds stream")
    records = [entry["input_ids"]["values"] * 2 for entry in expected("mds", "packed_br")]
    check_stream(source(url, epochs=1, transform=twice), records)


def twice(sample):
    return {"input_ids": np.concatenate([sample["input_ids"]] * 2)}


def test_a_broken_shard_is_left_out_where_that_is_declared(tmp_path):
    folder = copy(tmp_path, "packed_zstd")
    path = next(path for path in sorted(folder.iterdir()) if ".mds." in path.name)
    path.write_bytes(bytes(path.stat().st_size))
    of = source(folder, epochs=1, on_error="skip")
    manifest = build_manifest(of)
    lost = int(manifest.units["rows"][0])
    records = [entry["input_ids"]["values"] for entry in expected("mds", "packed_zstd")]
    check_stream(of, [[]] * lost + records[lost:])
    with pytest.raises(CorruptDataError, match=rf"{path.name}, unit 0 cannot be read"):
        check_stream(source(folder, epochs=1), records)


def test_the_files_of_a_frozen_list_are_enough():
    of = source(FOLDER / "arrays")
    whole = build_manifest(of)
    again = build_manifest(of, files=whole.files[:4])
    assert again.units["rows"].tolist() == whole.units["rows"].tolist()[:3]
    assert again.digest() != whole.digest()


def test_an_unknown_encoding_of_text_is_named(tmp_path):
    folder = copy(tmp_path, "csv")
    edit_index(folder, lambda index: [one["column_encodings"].__setitem__(0, "torch") for one in index["shards"]])
    with pytest.raises(ConfigError, match=r"is encoded as 'torch'; known are str, int, float"):
        read_all(source(folder))
    names = json.loads((folder / "index.json").read_text())["shards"][0]["column_names"]
    assert read_all(source(folder), names[1:])
