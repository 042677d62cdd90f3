"""Files of stores: lists, byte ranges, what changed, what fails; against a web server of our own."""

from __future__ import annotations

import pickle
import threading
from datetime import datetime, timezone
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from benchmarks.range_server import RangeServer
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores import filesystems
from megascale_lightning.sources.stores.files import find_files
from megascale_lightning.sources.stores.filesystems import modified_ns
from megascale_lightning.sources.stores.retry import RetryPolicy
from megascale_lightning.sources.stores.storage import FileInfo, Storage
from megascale_lightning.sources.survey import build_manifest
from tests.acceptance.remote_corpus import write_remote_corpus

pytest.importorskip("aiohttp")


@pytest.fixture
def server(tmp_path):
    (tmp_path / "web").mkdir()
    with RangeServer(tmp_path / "web") as running:
        yield running


def quick(**more: Any) -> Storage:
    return Storage(name="web", retry=RetryPolicy(sleep=lambda _: None), **more)


def write(server: RangeServer, name: str, data: bytes) -> str:
    (server.folder / name).write_bytes(data)
    return f"{server.url}/{name}"


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(0).bytes(count)


class TestLists:
    """One listing has the sizes; only web servers are asked for each file."""

    @pytest.fixture
    def memory(self):
        fs = fsspec.filesystem("memory")
        for index in range(40):
            fs.pipe(f"/lists/part-{index:02}.bin", bytes(index + 1))
        fs.pipe("/lists/deeper/x.bin", b"1")
        yield fs
        fs.rm("/lists", recursive=True)

    def test_globs_and_braces_take_one_listing(self, memory, monkeypatch):
        asked: list[str] = []
        info = type(memory).info
        monkeypatch.setattr(type(memory), "info", lambda self, path, **_: asked.append(path) or info(self, path))
        names = [info.path for info in find_files("web", "memory://lists/part-*.bin")]
        assert names == [f"memory:///lists/part-{index:02}.bin" for index in range(40)]
        braces = find_files("web", "memory://lists/part-{00..39}.bin")
        assert [info.size for info in braces] == list(range(1, 41))
        assert all(info.mtime_ns > 1_700_000_000_000_000_000 for info in braces)
        assert not [path for path in asked if "part-" in path and "*" not in path]

    def test_a_name_missing_among_many_is_named(self, memory):
        with pytest.raises(ConfigError, match=r"'web': no file matches memory://lists/part-40.bin \(of the pattern"):
            find_files("web", "memory://lists/part-{00..40}.bin")
        with pytest.raises(ConfigError, match="memory://lists/deeper is a directory; name its files"):
            find_files("web", "memory://lists/deeper")
        with pytest.raises(ConfigError, match=r"no file matches memory://lists/\*.txt$"):
            find_files("web", "memory://lists/*.txt")

    def test_index_pages_match_and_lists_keep_their_order(self, server):
        for name in ("b.bin", "a.bin", "c.txt"):
            write(server, name, b"12345")
        found = find_files("web", f"{server.url}/*.bin")
        assert [info.path for info in found] == [f"{server.url}/a.bin", f"{server.url}/b.bin"]
        assert {info.size for info in found} == {5}
        assert found[0].mtime_ns == int((server.folder / "a.bin").stat().st_mtime) * 1_000_000_000
        listed = find_files("web", [f"{server.url}/c.txt", f"{server.url}/{{b,a}}.bin"])
        assert [info.path.rpartition("/")[2] for info in listed] == ["c.txt", "b.bin", "a.bin"]
        with pytest.raises(ConfigError, match=f"no file matches {server.url}/none.bin$"):
            find_files("web", f"{server.url}/none.bin")

    def test_a_pattern_without_an_index_page_is_told_apart_from_no_match(self, server):
        write(server, "index.html", b"<html>nothing here</html>")
        with pytest.raises(ConfigError, match=rf"no file matches {server.url}/\*\.bin; .* index page .* by braces"):
            find_files("web", f"{server.url}/*.bin")

    def test_a_fragment_is_no_part_of_a_name(self, server):
        write(server, "a", b"another file")
        write(server, "a#b.bin", b"12345")
        with pytest.raises(ConfigError, match=rf"source 'web': .* the '#' in {server.url}/a#b\.bin: write %23"):
            Source("web", [f"{server.url}/a#b.bin"])
        source = Source("web", f"{server.url}/a%23b.bin")
        storage = Storage.of(source)
        with storage.open(*find_files("web", source.data, storage)) as stream:
            assert stream.read() == b"12345"

    def test_a_refusal_is_no_missing_file(self, server):
        url = write(server, "a.bin", b"1")
        server.fault = lambda _: 403
        with pytest.raises(DataError, match=r"'web': http.*a\.bin cannot be read.*403.*refuses.*storage_options"):
            find_files("web", url, quick())
        server.fault = lambda _: 503
        with pytest.raises(DataError, match=r"5 attempts.*503"):
            find_files("web", url, quick())
        with pytest.raises(DataError, match=r"\*\.bin cannot be read"):
            find_files("web", f"{server.url}/*.bin", quick())

    def test_ten_thousand_names_in_one_listing(self):
        class Many(fsspec.AbstractFileSystem):
            calls = 0

            def ls(self, path, detail=True, **_):
                type(self).calls += 1
                return [{"name": f"b/{i:05}.bin", "size": i, "type": "file", "ETag": f'"{i}"'} for i in range(10_000)]

        storage = Storage(given=Many(), name="web")
        found = find_files("web", "b/{00000..09999}.bin", storage)
        assert [info.size for info in found] == list(range(10_000))
        assert len({info.mtime_ns for info in found}) == 10_000
        assert Many.calls == 1
        assert len(find_files("web", "b/*.bin", storage)) == 10_000
        assert Many.calls < 10

    def test_when_a_file_was_written_is_told_in_many_ways(self):
        moment = datetime(2026, 1, 2, 3, 4, 5, 250_000, tzinfo=timezone.utc)
        expected = int(moment.timestamp() * 1000) * 1_000_000
        assert modified_ns({"LastModified": moment}) == expected
        assert modified_ns({"mtime": moment.replace(tzinfo=None)}) == expected
        assert modified_ns({"mtime": moment.timestamp()}) == pytest.approx(expected, abs=1000)
        assert modified_ns({"updated": "2026-01-02T03:04:05.250Z"}) == expected
        assert modified_ns({"Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}) == expected - 250_000_000
        assert modified_ns({"ETag": '"abc"'}) == modified_ns({"ETag": 'W/"abc"'}) != modified_ns({"ETag": '"abd"'})
        assert modified_ns({"ETag": '"abc"'}) > 0
        assert modified_ns({"size": 3, "mtime": None}) == 0


class TestReading:
    """Only what is needed is fetched, over few connections."""

    def test_a_stream_is_a_file(self, server):
        data = random_bytes(3_000_000)
        url = write(server, "a.bin", data)
        storage = quick()
        (info,) = find_files("web", url, storage)
        server.reset()
        with storage.open(info) as stream:
            stream.seek(1_000_000)
            assert stream.read(1000) == data[1_000_000:1_001_000]
            assert server.bytes_sent < 300_000, "a range, not the file"
            stream.seek(-10, 2)
            assert stream.read() == data[-10:]
            assert stream.read(1) == b""
            stream.seek(0)
            assert b"".join(iter(lambda: stream.read(70_000), b"")) == data
        assert all(request.range for request in server.requests)
        assert len(server.requests) < 10, "read front to back it is fetched in ever larger pieces"

    def test_parquet_reads_the_columns_it_needs(self, server):
        table = pa.table({"input_ids": [[1, 2]] * 1000, "blob": [random_bytes(4000)] * 1000})
        pq.write_table(table, server.folder / "a.parquet", row_group_size=250, use_dictionary=False, compression=None)
        source = Source("web", f"{server.url}/a.parquet", columns=("input_ids",))
        manifest = build_manifest(source)
        reader = make_reader(source, manifest, ["input_ids"])
        assert reader.read(2).table.num_rows == 250
        reader.close()
        assert server.bytes_sent < 1_500_000 < manifest.files[0].size // 2

    def test_connections_are_shared_and_closed(self, server):
        data = random_bytes(200_000)
        infos = [FileInfo(write(server, f"{index}.bin", data), len(data), 0) for index in range(20)]
        storage, twin = quick(), quick()
        fs = storage.filesystem(infos[0].path)[0]
        assert fs is twin.filesystem(infos[1].path)[0]
        assert fs is in_thread(lambda: quick().filesystem(infos[0].path)[0]), "one for the process, not for a thread"
        assert fs is not quick(options={"headers": {"a": "b"}}).filesystem(infos[0].path)[0]
        for info in infos:
            with storage.open(info) as stream, twin.open(info) as other:
                assert stream.read() == other.read() == data
        assert server.peak_connections <= 2
        del storage, twin, fs
        until(lambda: server.open_connections == 0)
        assert not filesystems._shared

    def test_sizes_of_an_open_file_that_changed_are_refused(self, server, tmp_path):
        storage = quick()
        url = write(server, "a.bin", b"12345")
        (info,) = find_files("web", url, storage)
        write(server, "a.bin", b"123456")
        with pytest.raises(DataError, match=r"'web': .*a\.bin.*it has 6 bytes and had 5 when the run began"):
            storage.open(info).read()
        write(server, "a.bin", b"1")
        with pytest.raises(DataError, match="it has 1 bytes and had 5"):
            storage.open(info).read()
        write(server, "a.bin", b"54321")
        older = FileInfo(info.path, 5, info.mtime_ns - 5_000_000_000)
        with pytest.raises(DataError, match="was written since"):
            storage.open(older).read()
        (server.folder / "a.bin").unlink()
        with pytest.raises(DataError, match="FileNotFoundError"):
            storage.open(info).read()

    def test_a_server_without_ranges_is_for_small_files(self, server):
        small, large = random_bytes(50_000), random_bytes(9 << 20)
        urls = [write(server, "small.bin", small), write(server, "large.bin", large)]
        server.fault = lambda _: "whole"
        storage = quick()
        infos = find_files("web", urls, storage)
        with storage.open(infos[0]) as stream:
            stream.seek(40_000)
            assert stream.read(100) == small[40_000:40_100]
        with storage.open(infos[1]) as stream, pytest.raises(DataError, match="must know HTTP ranges"):
            stream.read(100)

    def test_faults_on_the_way_are_mended(self, server):
        data = random_bytes(2_000_000)
        url = write(server, "a.bin", data)
        storage = quick()
        (info,) = find_files("web", url, storage)
        faults: list[Any] = ["drop", 503, "cut", None, "short", 429, None, "cut", "cut", "drop", 500]
        server.fault = lambda _: faults.pop(0) if faults else None
        with storage.open(info) as stream:
            assert stream.read(500_000) == data[:500_000]
            assert stream.read() == data[500_000:]
        assert faults == []

    def test_a_stream_never_ends_early(self, server):
        url = write(server, "a.bin", random_bytes(100_000))
        storage = quick()
        (info,) = find_files("web", url, storage)
        for fault, message in (("short", "bytes 0 to 100000 were asked for"), ("cut", "5 attempts"), (503, "503")):
            server.fault = lambda _, fault=fault: fault
            server.reset()
            with storage.open(info) as stream, pytest.raises(DataError, match=f"'web': .*a.bin .*{message}"):
                stream.read()
            assert len(server.requests) == 5

    def test_a_failing_disk_is_mended_and_a_missing_file_is_not(self, tmp_path, monkeypatch):
        path = tmp_path / "a.bin"
        path.write_bytes(b"0123456789" * 1000)
        storage = quick()
        (info,) = find_files("web", str(path))
        calls: list[int] = []

        def pread(fd: int, count: int, start: int) -> bytes:
            calls.append(start)
            if len(calls) in (1, 3):
                raise OSError(5, "device")
            return true_pread(fd, min(count, 4000), start)

        true_pread = filesystems.os.pread
        monkeypatch.setattr("megascale_lightning.sources.stores.remote.os.pread", pread)
        with storage.open(info) as stream:
            assert stream.read() == path.read_bytes()
        monkeypatch.setattr("megascale_lightning.sources.stores.remote.os.pread", lambda *_: b"")
        with storage.open(info) as stream, pytest.raises(DataError, match=r"5 attempts.*and 0 came"):
            stream.read()
        path.unlink()
        with pytest.raises(DataError, match=r"'web': .*a.bin cannot be read: FileNotFoundError"):
            storage.open(info)

    @pytest.mark.parametrize("name", ["web/*.parquet", "code/0.jsonl.zst", "pairs/0.tar"])
    def test_what_a_store_refuses_is_no_broken_file(self, tmp_path, name):
        """`on_error` decides about broken bytes; what a store says goes through every library as it is."""
        write_remote_corpus(tmp_path / "corpus")
        with RangeServer(tmp_path / "corpus") as server:
            source = Source("web", f"{server.url}/{name}", on_error="skip")
            manifest = build_manifest(source)
            reader = make_reader(source, manifest, None)
            assert reader.read(0).num_rows > 0
            reader.close()
            server.fault = lambda _: 403
            with pytest.raises(DataError, match=rf"^source 'web': {server.url}/\S+ cannot be read: .*403") as caught:
                make_reader(source, manifest, None).read(0)
        assert type(caught.value) is DataError

    @pytest.mark.parametrize("kind", ["pyarrow", "fsspec", "memory", "asynchronous"])
    def test_a_filesystem_reads_the_paths(self, tmp_path, kind):
        (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": [2, 3]}\n')
        if kind == "memory":
            fs: Any = fsspec.filesystem("memory")
            fs.pipe(f"{tmp_path}/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
        elif kind == "asynchronous":
            fs = pytest.importorskip("fsspec.implementations.asyn_wrapper").AsyncFileSystemWrapper(
                fsspec.filesystem("file")
            )
        else:
            fs = pyarrow.fs.LocalFileSystem() if kind == "pyarrow" else fsspec.filesystem("file")
        source = pickle.loads(pickle.dumps(Source("web", f"{tmp_path}/*.jsonl", filesystem=fs)))
        manifest = build_manifest(source)
        assert [info.path for info in manifest.files] == [f"{tmp_path}/a.jsonl"]
        assert manifest.files[0].mtime_ns > 0
        read = make_reader(source, manifest, None).read(0).objects
        assert [list(row["input_ids"]) for row in read] == [[1], [2, 3]]
        (info,) = manifest.files
        with pytest.raises(DataError, match=r"'web'.*it has 41 bytes and had 42"):
            Storage.of(source).open(FileInfo(info.path, info.size + 1, 0)).read()


def in_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def until(condition: Any, timeout_s: float = 10.0) -> None:
    waited = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        waited.wait(0.02)
    raise AssertionError("it never came true")
