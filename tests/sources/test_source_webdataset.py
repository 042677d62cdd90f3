"""Tar shards: grouping, fields, slices, damage, and whole runs over them."""

import io
import re
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources import build_manifest, make_reader
from megascale_lightning.sources.formats.webdataset import format as webdataset
from megascale_lightning.sources.formats.webdataset import samples as tarsamples
from megascale_lightning.sources.formats.webdataset import walk as tarwalk
from megascale_lightning.sources.formats.webdataset.samples import ShardMemory, split_name
from megascale_lightning.sources.stores.storage import FileInfo, Storage
from tests.sources.tars import header_at, keys, open_source, pairs, read_tar, tar_bytes, write

GOLDEN = Path(__file__).parents[1] / "golden" / "webdataset"
SUFFIXES = [".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.lz4"]


class TestShardsOfWebDataset:
    def test_every_member_is_there(self):
        reader, manifest = open_source(str(GOLDEN / "shard-{000000..000001}.tar"))
        assert (manifest.format, manifest.sliced, manifest.num_records) == ("webdataset", False, -1)
        samples = [sample for unit in range(manifest.num_units) for sample in reader.read(unit).objects]
        names = [f"sample_{n:03}" for n in range(4)] + ["folder/" + "k" * 130]
        assert [sample["__key__"] for sample in samples] == names
        for n, sample in enumerate(samples):
            assert sorted(sample) == ["__key__", "cls", "json", "png", "txt"]
            assert sample["txt"] == f"caption {n} é"
            assert sample["json"] == {"n": n, "text": f"text {n}"}
            assert sample["cls"] == n % 2
            assert sample["png"].startswith(b"\x89PNG")

    def test_a_compressed_one(self):
        reader, _ = open_source(str(GOLDEN / "packed.tar.gz"))
        assert [sample["txt"] for sample in reader.read(0).objects] == [f"caption {n} é" for n in range(3)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_suffixes(tmp_path, suffix):
    reader, manifest = open_source(write(tmp_path / f"ä b{suffix}", tar_bytes(pairs(3))))
    assert manifest.format == "webdataset"
    assert [sample["txt"] for sample in reader.read(0).objects] == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"a.jpg", (b"a", b"jpg")),
        (b"./x/a.seg.PNG", (b"./x/a", b"seg.png")),
        (b"x.y/a.b/c.d.e", (b"x.y/a.b/c", b"d.e")),
        (b"a.", (b"a", b"")),
        (b"README", None),
        (b"x/.hidden", None),
        (b"._a.jpg", None),
        (b"__meta__/a.jpg", None),
        (b"__index__", None),
        (b"__a.jpg", (b"__a", b"jpg")),
        (b"\xff.jpg", (b"\xff", b"jpg")),
    ],
)
def test_names_are_split_as_webdataset_does(name, expected):
    assert split_name(name) == expected


LENGTHS = (90, 99, 100, 101, 128, 129, 255, 256, 700)


@pytest.mark.parametrize(
    ("tar_format", "length"),
    [
        *[(tar_format, length) for tar_format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT) for length in LENGTHS],
        *[(tarfile.USTAR_FORMAT, length) for length in LENGTHS if length < 250],
    ],
)
def test_long_keys_stay_with_their_members(tmp_path, tar_format, length):
    """webdataset#428: keys that are cut to one length, and an index that is off by one from there."""
    stems = [f"{'f' * (length // 2)}/{n}".ljust(length, "e") for n in range(4)]
    entries = [(f"{stem}.{ext}", f"{ext}{n}".encode()) for n, stem in enumerate(stems) for ext in ("jpg", "txt")]
    block = read_tar(tmp_path, tar_bytes(entries, tar_format))
    assert keys(block) == stems
    assert [(sample["jpg"], sample["txt"]) for sample in block.objects] == [(b"jpg%d" % n, f"txt{n}") for n in range(4)]


def test_what_is_no_sample_is_passed_over(tmp_path):
    folder, link, hard = tarfile.TarInfo("d.x/"), tarfile.TarInfo("b.jpg"), tarfile.TarInfo("c.jpg")
    folder.type, link.type, hard.type = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    link.linkname = hard.linkname = "0.jpg"
    odd = [("README", b"r" * 600), folder, ("__meta__/x.json", b"{"), link, hard, (".x.jpg", b"")]
    data = tar_bytes([*odd, *pairs(2), *odd], tarfile.PAX_FORMAT, pax_headers={"comment": "global"})
    block = read_tar(tmp_path, data)
    assert keys(block) == ["000", "001"]
    assert not block.failures


def test_empty_ones(tmp_path):
    paths = [tmp_path / name for name in ("a.tar", "b.tar", "c.tar")]
    paths[0].write_bytes(b"")
    write(paths[1], tar_bytes([]))
    write(paths[2], tar_bytes(pairs(1)))
    reader, manifest = open_source([str(path) for path in paths])
    assert [reader.read(unit).num_rows for unit in range(manifest.num_units)] == [0, 1]


class TestFields:
    ENTRIES = (
        ("a.JPG", b"\xff"),
        ("a.caption.txt", "é".encode()),
        ("a.json", b'{"text": ["x", "y"], "n": 1}'),
        ("a.cls", b"7\n"),
        ("a.bin", b"\x00"),
    )

    def sample(self, tmp_path, columns=None, entries=ENTRIES, **options):
        block = read_tar(tmp_path, tar_bytes(entries), columns, format_options=options)
        assert not block.failures
        return block.objects[0]

    def test_text_json_and_numbers_are_decoded(self, tmp_path):
        sink = io.BytesIO()
        np.save(sink, np.arange(3))
        found = self.sample(tmp_path, entries=[*self.ENTRIES, ("a.ids.npy", sink.getvalue())])
        assert found.pop("ids.npy").tolist() == [0, 1, 2]
        assert found == {
            "__key__": "a",
            "jpg": b"\xff",
            "caption.txt": "é",
            "json": {"text": ["x", "y"], "n": 1},
            "cls": 7,
            "bin": b"\x00",
        }

    def test_or_left_as_bytes(self, tmp_path):
        found = self.sample(tmp_path, decode=False, url=True)
        assert found["cls"] == b"7\n"
        assert found["caption.txt"] == "é".encode()
        assert found["__url__"] == str(tmp_path / "a.tar")

    def test_renamed(self, tmp_path):
        fields = {"image": "png;jpg", "text": ["txt", "json[text][1]"], "n": "json[text][5],json[n]"}
        assert self.sample(tmp_path, fields=fields) == {"__key__": "a", "image": b"\xff", "text": "y", "n": 1}
        assert self.sample(tmp_path, ["text"], fields=fields) == {"__key__": "a", "text": "y"}
        assert self.sample(tmp_path, ["cls"]) == {"__key__": "a", "cls": 7}

    def test_of_one_that_is_asked_for_and_missing_all_keys_are_listed(self, tmp_path):
        """Those that were left out, too, for the one that was meant is likely among them."""
        data = tar_bytes(self.ENTRIES)
        there = r"is not among its keys \['__key__', 'bin', 'caption.txt', 'cls', 'jpg', 'json'\]: correct the name"
        (problem,) = read_tar(tmp_path, data, ["cls", "caption"]).failures.values()
        assert re.match(rf"'caption' {there}", problem)
        fields = {"fields": {"image": "jpg", "text": "caption.txt"}}
        (problem,) = read_tar(tmp_path, data, ["input_ids"], format_options=fields).failures.values()
        assert problem.startswith("'input_ids' is not among its keys ['__key__', 'image', 'text']: correct the name")
        # A transform may do without.
        reader, _ = open_source(str(tmp_path / "a.tar"), ["cls", "caption"], transform=dict)
        assert reader.read(0).objects == [{"__key__": "a", "cls": 7}]
        source = Source("s", str(tmp_path / "a.tar"), columns=("cls", "caption"))
        config = LoaderConfig(sources=[source], rows=CollatedRows(1), global_batch_size=1, runtime="local")
        with MegaScaleLoader(config) as loader, pytest.raises(DataError, match=rf"unit 0, row 0: 'caption' {there}"):
            next(iter(loader))

    def test_arrays_with_objects_are_not_unpickled(self, tmp_path):
        sink = io.BytesIO()
        np.save(sink, np.array([{"a": 1}], object), allow_pickle=True)
        block = read_tar(tmp_path, tar_bytes([("a.npy", sink.getvalue())]))
        assert "is not an array of numbers" in block.failures[0]

    def test_a_missing_one_fails_the_record(self, tmp_path):
        entries = [*pairs(1), ("b.txt", b"t")]
        block = read_tar(tmp_path, tar_bytes(entries), format_options={"fields": {"image": "png;jpg"}})
        assert keys(block) == ["000", None]
        assert block.failures == {1: "field 'image' has no png or jpg in it; its members are txt"}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"decod": False}, "has no option 'decod'; it has decode, fields, interleaved, split, url"),
            ({"decode": "no"}, "'decode' of format 'webdataset' is True or False, not 'no'"),
            ({"interleaved": "sort"}, 'is "report" or "merge", not'),
            ({"fields": {"image": "jpg["}}, "'fields' of format"),
            ({"fields": {"image": []}}, "'fields' of format"),
            ({"fields": {"image": "jpg"}}, "columns names 'text', which is not among the fields 'image'"),
        ],
    )
    def test_wrong_options(self, tmp_path, options, message):
        path = write(tmp_path / "a.tar", tar_bytes(pairs(1)))
        columns = ("text",) if options.get("fields") == {"image": "jpg"} else None
        with pytest.raises(ConfigError, match=message):
            build_manifest(Source("s", path, columns=columns, format_options=options))


class TestBadRecords:
    """One record fails, those around it are good."""

    def middle(self, tmp_path, entries, **options):
        """(message, raw) of the one that failed, between two good ones."""
        block = read_tar(tmp_path, tar_bytes([("0.txt", b""), *entries, ("9.txt", b"")]), format_options=options)
        assert keys(block) == ["0", None, "9"]
        assert list(block.failures) == list(block.raw) == [1]
        return block.failures[1], block.raw[1]

    def test_the_same_member_twice(self, tmp_path):
        message, raw = self.middle(tmp_path, [("1.jpg", b"a"), ("1.txt", b""), ("1.JPG", b"b")])
        assert message == "member '1.JPG' at byte 2048 is there twice: another one is at byte 512"
        assert raw.startswith(b"1.JPG\0")

    def test_a_name_that_is_no_text(self, tmp_path):
        name = "\udcff\udcfe"
        message, raw = self.middle(tmp_path, [(f"{name}.jpg", b"a"), (f"{name}.txt", b"")])
        assert message == r"the name of member b'\xff\xfe.jpg' at byte 512 is not UTF-8"
        assert raw.startswith(b"\xff\xfe.jpg\0")

    @pytest.mark.parametrize(
        ("name", "content", "kind"),
        [
            ("1.txt", b"\xff\xfe", "UTF-8"),
            ("1.json", b'{"a": ', "JSON"),
            ("1.json", b"\xff", "JSON"),
            ("1.cls", b"cat", "a whole number"),
            ("1.npy", b"cat", "an array of numbers"),
            ("1.npz", b"cat", "arrays of numbers"),
        ],
    )
    def test_content_of_another_kind(self, tmp_path, name, content, kind):
        message, raw = self.middle(tmp_path, [("1.jpg", b"x"), (name, content)])
        assert message.startswith(f"member '{name}' at byte 1536 is not {kind}: ")
        assert len(raw) == 512 + len(content)
        assert raw.endswith(content)
        reader, _ = open_source(str(tmp_path / "a.tar"), format_options={"decode": False})
        assert not reader.read(0).failures

    def test_a_sparse_member(self, tmp_path):
        sparse = tarfile.TarInfo("1.bin")
        sparse.type = tarfile.GNUTYPE_SPARSE
        message, _ = self.middle(tmp_path, [sparse])
        assert "no tar header at byte 512: a sparse file, '1.bin'" in message


class TestInterleaved:
    ENTRIES = tuple((f"{key}.{ext}", f"{key}{ext}".encode()) for ext in ("jpg", "txt") for key in "abc")

    def test_both_places_are_named(self, tmp_path):
        block = read_tar(tmp_path, tar_bytes(self.ENTRIES))
        assert keys(block) == ["a", "b", "c", None, None, None]
        assert block.failures[4].startswith("key 'b' at byte 4096 came before, at byte 1024: the members")
        assert "'interleaved': 'merge'" in block.failures[4].replace('"', "'")

    def test_a_memory_of_any_number_of_keys(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tarsamples, "_RECENT_KEYS", 5)
        entries = [(f"{n}.{ext}", b"") for ext in ("jpg", "txt") for n in range(33)]
        block = read_tar(tmp_path, tar_bytes(entries))
        assert sorted(block.failures) == list(range(33, 66))
        for n in range(33):
            assert f"at byte {(33 + n) * 512} came before, at byte {n * 512}:" in block.failures[33 + n]

    def test_merged(self, tmp_path, monkeypatch):
        monkeypatch.setattr(webdataset, "SLICED_BYTES", 100)
        reader, manifest = open_source(
            write(tmp_path / "a.tar", tar_bytes(self.ENTRIES)), format_options={"interleaved": "merge"}
        )
        assert not manifest.sliced
        block = reader.read(0)
        assert keys(block) == ["a", "b", "c"]
        assert [(sample["jpg"], sample["txt"]) for sample in block.objects] == [
            (f"{key}jpg".encode(), f"{key}txt") for key in "abc"
        ]
        assert keys(reader.read(0, 1, 2)) == ["b"]
        assert keys(reader.read(0, 2)) == ["c"]

    def test_merged_twice(self, tmp_path):
        block = read_tar(tmp_path, tar_bytes([*self.ENTRIES, ("b.txt", b"")]), format_options={"interleaved": "merge"})
        assert keys(block) == ["a", None, "c"]
        assert "member 'b.txt' at byte 6144 is there twice: another one is at byte 4096" in block.failures[1]


def test_a_file_that_changed_is_named(tmp_path):
    path = write(tmp_path / "a.tar", tar_bytes(pairs(3)))
    reader, _ = open_source(path)
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"a\.tar.* had 10240 "):
        reader.read(0)


def config(paths, rows, **settings):
    source = Source("pairs", paths, epochs=1, **settings)
    return LoaderConfig(sources=[source], rows=rows, global_batch_size=2, seed=3, runtime="local", part_bytes=4000)


def tokens_of(sample):
    return {"input_ids": [int(sample["__key__"])] * (1 + len(sample["jpg"]) % 3)}


def items_of(batch):
    return list(batch) if isinstance(batch, list) else batch["input_ids"].tolist()


def run(config, state=None, steps=None):
    """(what each step gave, the state behind it) until the end."""
    found = []
    with MegaScaleLoader(config) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            found.append((items_of(batch), loader.state_dict()))
            if len(found) == steps:
                break
    return found


@pytest.fixture(params=["whole", "sliced", "compressed"])
def corpus(request, tmp_path, monkeypatch):
    """Three shards of 30 samples in all, read in each of the ways."""
    if request.param != "whole":
        monkeypatch.setattr(webdataset, "SLICED_BYTES", 100)
    suffix = ".tar.zst" if request.param == "compressed" else ".tar"
    entries = pairs(30)
    for n in range(3):
        write(tmp_path / f"{n}{suffix}", tar_bytes(entries[20 * n : 20 * n + 20]))
    return str(tmp_path / f"*{suffix}")


@pytest.mark.parametrize(
    "rows", [CollatedRows(micro_batch_size=2, collate_fn=list), PackedRows(seq_len=8, micro_batch_size=2)]
)
def test_every_step_can_be_resumed(corpus, rows):
    transform = tokens_of if isinstance(rows, PackedRows) else None
    settings = config(corpus, rows, transform=transform)
    whole = run(settings)
    items = [item for step, _ in whole for item in step]
    if transform is None:
        assert sorted(item["__key__"] for item in items) == [f"{n:03}" for n in range(30)]
        assert all(item["txt"] == f"t{int(item['__key__'])}" for item in items)
    else:
        ids = np.concatenate(items)
        assert sorted(set(ids.tolist())) == list(range(30))
    for done, (_, state) in enumerate(whole):
        assert [step for step, _ in run(settings, state)] == [step for step, _ in whole[done + 1 :]]


def test_bad_records_are_dropped_and_counted(tmp_path):
    data = bytearray(tar_bytes([*pairs(12), ("x.txt", b"\xff")]))
    data[header_at(data, "005.txt") + 110] ^= 0xFF
    path = write(tmp_path / "a.tar", bytes(data))
    rows = CollatedRows(micro_batch_size=2, collate_fn=list)
    with MegaScaleLoader(config(path, rows, on_error="skip"), passes=True) as loader:
        found = [item["__key__"] for batch in loader for item in batch]
        dropped = loader.state_dict()["sources"]["pairs"]["dropped"]
    assert sorted(found) == [f"{n:03}" for n in range(12) if n != 5]
    assert sum(dropped.values()) == 2
    with (
        pytest.raises(DataError, match=r"source 'pairs', .*a\.tar, unit 0, row \d+: (no tar|member)"),
        MegaScaleLoader(config(path, rows), passes=True) as loader,
    ):
        list(loader)


def test_tokens_need_no_transform(tmp_path):
    entries = []
    for n in range(6):
        sink = io.BytesIO()
        np.save(sink, np.full(3, n))
        entries += [(f"{n}.ids.npy", sink.getvalue()), (f"{n}.jpg", b"j")]
    path = write(tmp_path / "a.tar", tar_bytes(entries))
    rows = PackedRows(seq_len=4, micro_batch_size=1)
    source = Source("s", path, epochs=1, format_options={"fields": {"input_ids": "ids.npy"}})
    settings = LoaderConfig(sources=[source], rows=rows, global_batch_size=1, runtime="local")
    with MegaScaleLoader(settings, passes=True) as loader:
        found = np.concatenate([batch["input_ids"].flatten() for batch in loader])
    assert {n: int((found == n).sum()) for n in range(1, 6)} == dict.fromkeys(range(1, 6), 3)


def test_a_reader_of_a_manifest_that_travelled(tmp_path):
    """Roles of other processes read by the manifest alone."""
    reader, manifest = open_source(write(tmp_path / "a.tar", tar_bytes(pairs(3))))
    source = Source("s", str(tmp_path / "moved-*.tar"))
    assert make_reader(source, manifest, None).read(0).objects == reader.read(0).objects


@pytest.mark.parametrize("name", ["0.npz", "0.npy"])
def test_arrays_that_are_damaged_in_any_way_fail_alone(tmp_path, name):
    sink = io.BytesIO()
    if name.endswith("z"):
        np.savez_compressed(sink, a=np.arange(1000))
        data = bytearray(sink.getvalue())
        data[100:110] = bytes(10)
    else:
        np.save(sink, np.arange(1000))
        data = bytearray(sink.getvalue().replace(b"(1000,)", b"(9" + b"0" * 18 + b",)")[:200])
    block = read_tar(tmp_path, tar_bytes([(name, bytes(data)), ("1.txt", b"x")]))
    assert keys(block) == [None, "1"]
    assert f"member '{name}'" in block.failures[0]


def test_pax_numbers_without_end_are_damage(tmp_path):
    for record in (b"9" * 5000 + b" path=a\n", b"5012 size=" + b"9" * 5001 + b"\n"):
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, len(record)
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            archive.addfile(info, io.BytesIO(record))
        header = sink.getvalue()[: 512 + len(record) + -len(record) % 512]
        block = read_tar(tmp_path, header + tar_bytes([("0.txt", b"a"), ("1.txt", b"b")]))
        assert block.failures[0]
        assert keys(block)[-1] == "1"


def test_no_restart_behind_global_records_once_seen(tmp_path):
    data = tar_bytes(pairs(3)) + tar_bytes(pairs(3), tarfile.PAX_FORMAT, pax_headers={"comment": "c"})
    path = write(tmp_path / "a.tar", data)
    memory = ShardMemory()

    def walk(count):
        walker = webdataset._Walker(FileInfo(path, len(data), 0), Storage.of(Source("s", path)), memory, frozenset())
        with closing(walker):
            while count and walker.next_start() is not None:
                walker.take(None)
                count -= 1

    walk(1)
    assert memory.can_restart
    walk(-1)
    assert not memory.can_restart
    walk(1)
    assert not memory.can_restart


def test_an_archive_that_gives_too_little_is_named(monkeypatch):
    monkeypatch.setattr(Storage, "open", lambda self, info: io.BytesIO(bytes(512)))
    storage = Storage.of(Source("s", "a.tar"))
    stream = tarwalk.TarStream(storage, FileInfo("/a.tar", 1 << 20, 0))
    with closing(stream), pytest.raises(DataError, match=r"source 's': /a\.tar gave 512 of its 1048576 bytes"):
        stream.read(1024)
