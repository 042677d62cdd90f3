"""Plain content of compressed files, front to back: slices, cursors, files that are cut short or broken."""

import gzip
import io
import json
import math
import subprocess
import sys
import threading

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.errors import DataError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats import lines as lines_module
from megascale_lightning.sources.stores import plaintext
from megascale_lightning.sources.stores.plaintext import COMPRESSIONS, Cursors, PlainFile, codec_of
from megascale_lightning.sources.stores.storage import FileInfo, Storage

SUFFIXES = list(COMPRESSIONS)


def compress(data, suffix):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, COMPRESSIONS[suffix]) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def plain_file(path, content, position=0):
    path.write_bytes(content)
    return PlainFile(Storage(), FileInfo(str(path), len(content), 0), position)


def read_all(file, size):
    chunks = []
    while chunk := file.read(size):
        chunks.append(chunk)
        assert len(chunk) == size or not file.read(1)
    file.close()
    return b"".join(chunks)


DATA = b"".join(b"%d %d\n" % (i, i * i * 7919 % 65537) for i in range(40_000))


@pytest.mark.parametrize("size", [1000, 65_537, 1 << 24])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_members_are_read(tmp_path, suffix, size):
    content = compress(DATA, suffix) + compress(b"", suffix) + compress(b"the end", suffix)
    file = plain_file(tmp_path / f"a{suffix}", content)
    assert read_all(file, size) == DATA + b"the end"
    assert file.problem is None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_position_is_a_plain_byte(tmp_path, suffix):
    for name, content in ((f"a{suffix}", compress(DATA, suffix)), ("a.txt", DATA)):
        file = plain_file(tmp_path / name, content, 100_001)
        assert file.position == 100_001
        assert file.read(50) == DATA[100_001:100_051]
        file.close()


def broken(suffix):
    content = compress(DATA, suffix)
    half = len(content) // 2
    return {
        "cut in half": content[:half],
        "without its last byte": content[:-1],
        "cut in the second member": content + content[:half],
        "garbage behind": content + b"garbage!" * 3,
        "no such codec": b"plain text",
    }


@pytest.mark.parametrize("case", list(broken(".gz")))
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_broken_files_give_what_is_good_whatever_the_reads(tmp_path, suffix, case):
    content = broken(suffix)[case]
    found = set()
    for size in (999, 65_536, 1 << 24):
        file = plain_file(tmp_path / f"a{suffix}", content)
        good = read_all(file, size)
        assert (DATA + DATA).startswith(good)
        assert f"plain byte {len(good)}" in file.problem
        found.add((good, file.problem))
    assert len(found) == 1
    kind = "ends in the middle" if case.startswith(("cut", "without")) else "breaks"
    assert kind in file.problem
    if suffix == ".gz" and case == "cut in half":
        assert len(good) > len(DATA) // 4


def test_bad_checksums_are_found(tmp_path):
    content = bytearray(gzip.compress(DATA))
    content[-6] ^= 1
    file = plain_file(tmp_path / "a.gz", bytes(content))
    read_all(file, 1 << 20)
    assert "breaks" in file.problem


class FlakyStorage(Storage):
    """The stream of a file fails once it was read up to a byte."""

    def __init__(self, at, error):
        super().__init__()
        self.at, self.error = at, error

    def open(self, info):
        content, at, error = io.BytesIO(super().open(info).read()), self.at, self.error

        class Stream:
            def read(self, size=-1):
                if content.tell() + size > at:
                    if isinstance(error, Exception):
                        raise error
                    return b""
                return content.read(size)

            def seek(self, position):
                content.seek(position)

            def close(self):
                pass

        return Stream()


@pytest.mark.parametrize("error", [DataError("the network is gone"), OSError(5, "the disk is gone"), "short"])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt"])
def test_a_failing_device_is_no_broken_file(tmp_path, suffix, error):
    """What the device does not give must not pass for the end of the file, or on_error would drop good records."""
    content = compress(DATA, suffix) if suffix in COMPRESSIONS else DATA
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    storage = FlakyStorage(len(content) // 2, error)
    file = PlainFile(storage, FileInfo(str(path), len(content), 0))
    with pytest.raises((DataError, OSError), match=r"is gone|gave .* of its"):
        read_all(file, 10_000)
    assert file.problem is None


def test_too_little_memory_is_no_broken_file(tmp_path, monkeypatch):
    class Full:
        def read(self, size):
            raise pa.ArrowMemoryError("malloc of size 1048576 failed")

    monkeypatch.setattr(plaintext, "_arrow_stream", lambda raw, codec: Full())
    file = plain_file(tmp_path / "a.gz", gzip.compress(DATA))
    with pytest.raises(MemoryError):
        file.read(10)
    assert file.problem is None
    file.close()


def test_codecs_by_suffix():
    found = [codec_of(path) for path in ("a.jsonl", "a.jsonl.GZ", "b.tgz", "s3://x/c.tar.zst", "d.bz2", "e.lz4", "gz")]
    assert found == [None, "gzip", "gzip", "zstd", "bz2", "lz4", None]


class Counter:
    made = 0

    def __init__(self):
        self.next_index = 0
        self.closed = False
        Counter.made += 1

    def close(self):
        self.closed = True


class TestCursors:
    def use(self, cursors, key, index):
        with cursors.at(key, index, Counter) as cursor:
            cursor.next_index = index + 1
        return cursor

    def test_going_on_is_free_and_going_back_starts_over(self):
        cursors = Cursors(limit=4)
        first = self.use(cursors, "a", 0)
        assert self.use(cursors, "a", 1) is first
        assert self.use(cursors, "a", 5) is first
        other = self.use(cursors, "a", 2)
        assert other is not first
        assert self.use(cursors, "a", 6) is first, "the nearest before"
        assert self.use(cursors, "a", 4) is other
        assert self.use(cursors, "b", 7) not in (first, other)

    def test_few_stay_open(self):
        cursors = Cursors(limit=2)
        one, two, three = (self.use(cursors, key, 0) for key in "abc")
        assert [one.closed, two.closed, three.closed, cursors.num_open] == [True, False, False, 2]
        cursors.close()
        assert two.closed
        assert three.closed

    def test_one_that_failed_is_closed(self):
        cursors = Cursors()
        with pytest.raises(KeyError), cursors.at("a", 0, Counter) as cursor:
            raise KeyError
        assert cursor.closed
        assert cursors.num_open == 0

    def test_a_slice_that_is_being_read_is_waited_for_by_those_behind_it(self):
        cursors, found = Cursors(), {}

        def use(index):
            found[index] = self.use(cursors, "a", index)

        behind, earlier = (threading.Thread(target=use, args=(index,)) for index in (4, 2))
        with cursors.at("a", 3, Counter) as cursor:
            behind.start()
            earlier.start()
            earlier.join()
            behind.join(0.2)
            assert list(found) == [2], "what lies before it is read from the start"
            assert self.use(cursors, "b", 9) is not cursor
            cursor.next_index = 4
        behind.join()
        assert found[4] is cursor
        assert found[2] is not cursor

    def test_a_slice_that_failed_keeps_nobody_waiting(self):
        cursors = Cursors()
        with pytest.raises(KeyError), cursors.at("a", 0, Counter):
            raise KeyError
        with pytest.raises(TypeError), cursors.at("a", 0, lambda: len(1)):
            pass
        assert self.use(cursors, "a", 1).next_index == 2

    def test_one_in_use_is_closed_when_it_comes_back(self):
        cursors = Cursors()
        with cursors.at("a", 0, Counter) as cursor:
            with cursors.at("a", 0, Counter) as second:
                assert second is not cursor
            cursors.close()
            assert not cursor.closed
        assert cursor.closed
        assert cursors.num_open == 0


def reader_of(path):
    source = Source("s", str(path))
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, None)
    return reader, manifest


def all_slices(reader, unit, slice_bytes):
    records, failures, sizes = [], {}, []
    index, is_last = 0, False
    while not is_last:
        block, is_last = reader.read_slice(unit, index, slice_bytes)
        assert block.row_start == len(records), "rows are numbered through"
        failures.update({block.row_start + at: text for at, text in block.failures.items()})
        records += block.objects
        sizes.append(block.num_rows)
        index += 1
        assert index < 10_000
    return records, failures, sizes


def expected_slices(data, slice_bytes):
    """Slice -> its lines, by the definition alone."""
    found, offset = {}, 0
    for line in data.split(b"\n"):
        if line.strip():
            found.setdefault(offset // slice_bytes, []).append(line)
        offset += len(line) + 1
    return [len(found.get(index, [])) for index in range(max(found, default=0) + 1)]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(-3, 30), max_size=25),
    slice_bytes=st.integers(1, 90),
    suffix=st.sampled_from([*SUFFIXES, ""]),
    chunk=st.sampled_from([1, 7, 64, 1 << 20]),
    ends_with_newline=st.booleans(),
    data=st.data(),
)
def test_slices_give_each_record_once(tmp_path_factory, lengths, slice_bytes, suffix, chunk, ends_with_newline, data):
    lines = [b" " * -n if n < 0 else json.dumps({"n": i, "pad": "x" * n}).encode() for i, n in enumerate(lengths)]
    content = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    stored = compress(content, suffix) if suffix else content
    if not stored:
        return
    path = tmp_path_factory.mktemp("slices") / f"a.jsonl{suffix}"
    path.write_bytes(stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_CHUNK", chunk)
        patch.setattr(plaintext, "_CHUNK", chunk)
        check_slices(path, content, slice_bytes, lengths, data)


def check_slices(path, content, slice_bytes, lengths, data):
    reader, _ = reader_of(path)
    records, failures, sizes = all_slices(reader, 0, slice_bytes)
    assert failures == {}
    assert [record["n"] for record in records] == [i for i, n in enumerate(lengths) if n >= 0]
    assert sizes == expected_slices(content, slice_bytes)
    whole = reader.read(0)
    assert whole.objects == records
    # Any order of asking, on a reader that has cursors at other places, gives the same.
    for index in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=4)):
        block, is_last = reader.read_slice(0, index, slice_bytes)
        assert block.row_start == sum(sizes[:index])
        assert block.objects == records[block.row_start :][: sizes[index]]
        assert is_last == (index == len(sizes) - 1)
    with pytest.raises(IndexError):
        reader.read_slice(0, len(sizes), slice_bytes)
    reader.close()


@pytest.mark.parametrize("slice_bytes", [1000, 50_000, 1 << 24])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_short_ends_with_one_failed_record(tmp_path, suffix, slice_bytes):
    content = b"".join(b'{"n": %d, "x": %d}\n' % (i, i * i * 7919 % 65537) for i in range(40_000))
    stored = compress(content, suffix)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(stored[: len(stored) * 2 // 3])
    reader, _ = reader_of(path)
    records, failures, _ = all_slices(reader, 0, slice_bytes)
    assert [record["n"] for record in records[:-1]] == list(range(len(records) - 1))
    assert list(failures) == [len(records) - 1]
    assert records[-1] is None
    assert "ends in the middle at plain byte" in failures[len(records) - 1]
    whole = reader.read(0)
    assert (whole.objects, dict(whole.failures)) == (records, failures)
    assert content.split(b"\n")[len(records) - 1].startswith(whole.raw[len(records) - 1])
    reader.close()


def test_a_broken_line_that_would_parse_is_no_record(tmp_path):
    """The last line may be a whole object by chance: the file is broken all the same."""
    stored = gzip.compress(b'{"n": 0}\n{"n": 1}')
    (tmp_path / "a.jsonl.gz").write_bytes(stored[:-8])
    reader, _ = reader_of(tmp_path / "a.jsonl.gz")
    block = reader.read(0)
    assert block.objects == [{"n": 0}, None]
    assert block.raw == {1: b'{"n": 1}'}


def test_large_compressed_files_make_a_source_sliced(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 0}\n' * 100)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n' * 100))
    source = Source("s", str(tmp_path / "*"))
    small = build_manifest(source)
    assert not small.sliced
    monkeypatch.setattr(plaintext, "SLICED_BYTES", 10)
    large = build_manifest(source)
    assert large.sliced
    assert large.units.tolist() == small.units.tolist()
    assert large.digest() != small.digest()
    assert not build_manifest(Source("s", str(tmp_path / "a.jsonl"))).sliced, "plain files need no slices"


def test_consecutive_slices_are_decompressed_once(tmp_path, monkeypatch):
    content = b"".join(b'{"n": %d}\n' % i for i in range(5000))
    (tmp_path / "a.jsonl.zst").write_bytes(compress(content, ".zst"))
    opened = []
    real = Storage.open
    monkeypatch.setattr(Storage, "open", lambda self, info: (opened.append(1), real(self, info))[1])
    reader, _ = reader_of(tmp_path / "a.jsonl.zst")
    reader.read_slice(0, 0, 1000)
    assert str(tmp_path / "a.jsonl.zst") in [file.path for file in psutil.Process().open_files()]
    all_slices(reader, 0, 1000)
    assert len(opened) == 2, "the first slice was read before"
    opened.clear()
    all_slices(reader, 0, 999)
    assert len(opened) == 1
    reader.close()
    all_slices(reader, 0, 1000)
    assert str(tmp_path / "a.jsonl.zst") not in [file.path for file in psutil.Process().open_files()], "at its end"
    opened.clear()
    reader.read_slice(0, 0, 1000)
    assert len(opened) == 1, "going back starts over"
    reader.close()


def test_threads_share_a_reader(tmp_path):
    content = b"".join(b'{"n": %d}\n' % i for i in range(3000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    reader, _ = reader_of(tmp_path / "a.jsonl.gz")
    found = {}

    def work(number):
        found[number] = all_slices(reader, 0, 500 + number)[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([record["n"] for record in records] == list(range(3000)) for records in found.values())
    assert len(found) == 6
    assert reader._cursors.num_open <= 4
    reader.close()
    assert reader._cursors.num_open == 0


_MEMORY = """
import sys, json, tracemalloc
from megascale_lightning.sources import Source, build_manifest, make_reader
source = Source("s", sys.argv[1])
manifest = build_manifest(source)
reader = make_reader(source, manifest, None)
reader.read_slice(0, 0, 1 << 20)
tracemalloc.start()
index, is_last, rows = 0, False, 0
while not is_last:
    block, is_last = reader.read_slice(0, index, 8 << 20)
    index += 1
    rows += block.num_rows
    del block
import pyarrow as pa
print(json.dumps([rows, index, tracemalloc.get_traced_memory()[1], pa.default_memory_pool().max_memory()]))
"""


@pytest.mark.slow
def test_memory_is_a_few_slices(tmp_path):
    """200 MB of plain content in slices of 8 MB."""
    line = json.dumps({"text": "lorem ipsum " * 300}).encode() + b"\n"
    count = 200_000_000 // len(line)
    with pa.OSFile(str(tmp_path / "a.jsonl.zst"), "wb") as sink, pa.CompressedOutputStream(sink, "zstd") as stream:
        for _ in range(count // 1000):
            stream.write(line * 1000)
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path / "a.jsonl.zst")], capture_output=True, text=True, check=True
    )
    rows, slices, peak, arrow = json.loads(out.stdout)
    assert rows == count // 1000 * 1000
    assert slices == math.ceil(rows * len(line) / (8 << 20))
    assert peak < 3 * (8 << 20)
    assert arrow < 2 * (8 << 20)


def test_a_line_longer_than_a_slice_is_one_record(tmp_path):
    content = b'{"n": 0}\n' + json.dumps({"n": 1, "x": "y" * 5000}).encode() + b'\n{"n": 2}'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    reader, _ = reader_of(tmp_path / "a.jsonl.gz")
    records, _, sizes = all_slices(reader, 0, 100)
    assert [record["n"] for record in records] == [0, 1, 2]
    assert sizes == [2] + [0] * (len(sizes) - 2) + [1]
    reader.close()
