"""Blocks of remote files on the disk: asked for once, by all processes; bounded, checked, and never in the way."""

from __future__ import annotations

import fcntl
import io
import logging
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from benchmarks.range_server import RangeServer
from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows
from megascale_lightning.errors import DataError
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.diskcache import DiskCache
from megascale_lightning.sources.stores.filesystems import place_of
from megascale_lightning.sources.stores.storage import FileInfo, Storage

BLOCK = 1000


class Store:
    """A file that counts what is fetched of it."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.data = np.random.default_rng(seed).bytes(size)
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, start: int, stop: int) -> bytes:
        self.fetched.append((start, stop))
        return self.data[start:stop]


def cache_in(folder: Path, blocks: int = 100) -> DiskCache:
    return DiskCache(str(folder / "cache"), blocks * (BLOCK + 4), BLOCK)


def info_of(store: Store, path: str = "s3://b/a.bin", mtime_ns: int = 1) -> FileInfo:
    return FileInfo(path, len(store.data), mtime_ns)


def blocks_in(cache: DiskCache) -> list[Path]:
    return sorted(Path(cache.folder).glob("blocks/*/*"))


def test_blocks_are_fetched_once_and_cut_to_what_is_asked(tmp_path):
    store, cache = Store(3500), cache_in(tmp_path)
    info = info_of(store)
    for start, stop in ((10, 20), (990, 1010), (0, 3500), (3400, 3500), (999, 1000), (2000, 3000)):
        assert cache.read(info, start, stop, store.fetch) == store.data[start:stop]
    assert store.fetched == [(0, 1000), (1000, 2000), (2000, 3000), (3000, 3500)]
    assert cache_in(tmp_path).read(info, 0, 3500, pytest.fail) == store.data, "another process finds them"
    assert len(blocks_in(cache)) == 4


def test_a_file_that_changed_has_other_blocks_and_a_new_signature_has_not(tmp_path):
    cache = cache_in(tmp_path)
    old, new = Store(500), Store(500, seed=1)
    for store, mtime in ((old, 1), (new, 2), (old, 1)):
        assert cache.read(info_of(store, mtime_ns=mtime), 0, 500, store.fetch) == store.data
    assert len(old.fetched) == len(new.fetched) == 1
    signed = "https://h/a?X-Amz-Signature="
    cache.read(info_of(old, signed + "1"), 0, 500, old.fetch)
    cache.read(info_of(old, signed + "2"), 0, 500, pytest.fail)


def test_stores_with_equal_paths_have_blocks_of_their_own(tmp_path):
    class Placed(fsspec.AbstractFileSystem):
        protocol = "placed"

        def __init__(self, endpoint_url: str = "", token: str = "", **more: Any) -> None:
            super().__init__(endpoint_url=endpoint_url, **more)
            self.endpoint = endpoint_url

        def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
            opened.append(self.endpoint)
            return io.BytesIO(self.endpoint.encode())

    opened: list[str] = []
    fsspec.register_implementation("placed", Placed, clobber=True)
    cache = cache_in(tmp_path)

    def read(endpoint: str, storage: Storage) -> None:
        info = FileInfo("placed://b/a" if storage.given is None else "b/a", len(endpoint), 1)
        assert storage.open(info).read() == endpoint.encode()

    for endpoint in ("http://one", "http://two", "http://one"):
        read(endpoint, Storage({"endpoint_url": endpoint, "token": f"of {len(opened)}"}, cache=cache))
    assert opened == ["http://one", "http://two"], "and another token finds the same blocks"
    for endpoint in ("http://one", "http://two", "http://one"):
        read(endpoint, Storage(given=Placed(endpoint_url=endpoint, skip_instance_cache=True), cache=cache))
    assert len(opened) == 4
    assert len(blocks_in(cache)) == 4


def test_pyarrows_filesystems_are_told_apart(tmp_path):
    def place(endpoint: str, folder: str = "b", key: str = "k") -> str:
        store = pyarrow.fs.S3FileSystem(access_key=key, secret_key="5ecret", region="eu", endpoint_override=endpoint)
        return place_of(pyarrow.fs.SubTreeFileSystem(folder, store))

    assert len({place("h:1"), place("h:2"), place("h:1", "c"), place_of(pyarrow.fs.LocalFileSystem())}) == 4
    assert place("h:1") == place("h:1", key="another")
    assert "5ecret" not in place("h:1")


def test_the_folder_is_for_this_user_alone(tmp_path):
    store, cache = Store(10), cache_in(tmp_path)
    cache.read(info_of(store), 0, 10, store.fetch)
    assert os.stat(cache.folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_blocks_are_fetched_again(tmp_path, damage):
    store, cache = Store(BLOCK), cache_in(tmp_path)
    cache.read(info_of(store), 0, BLOCK, store.fetch)
    (block,) = blocks_in(cache)
    data = block.read_bytes()
    block.write_bytes({"cut": data[:-10], "empty": b"", "flip": bytes([data[0] ^ 1]) + data[1:]}[damage])
    assert cache.read(info_of(store), 0, BLOCK, store.fetch) == store.data
    assert len(store.fetched) == 2
    block.unlink()
    assert cache.read(info_of(store), 0, BLOCK, store.fetch) == store.data


def test_the_least_recently_used_go_first(tmp_path):
    store, cache = Store(20 * BLOCK), cache_in(tmp_path, blocks=10)
    info = info_of(store)
    for index in range(20):
        cache.read(info, index * BLOCK, (index + 1) * BLOCK, store.fetch)
        cache.read(info, 0, BLOCK, store.fetch)
        for age, block in enumerate(sorted(blocks_in(cache), key=lambda path: path.stat().st_mtime_ns, reverse=True)):
            os.utime(block, ns=(0, 10**18 - age * 10**9))
        assert sum(block.stat().st_size for block in blocks_in(cache)) <= cache.max_bytes
    assert store.fetched.count((0, BLOCK)) == 1, "what is used all the time stays"
    assert len(store.fetched) == 20
    assert 8 <= len(blocks_in(cache)) <= 10
    assert int(Path(cache.folder, "bytes").read_text()) == sum(block.stat().st_size for block in blocks_in(cache))


def fill(folder: str, number: int) -> None:
    store = Store(40 * BLOCK, seed=number)
    cache = cache_in(Path(folder), blocks=10)
    for round_ in range(2):
        for index in range(40):
            start = index * BLOCK
            found = cache.read(info_of(store, f"s3://b/{number}"), start, start + BLOCK, store.fetch)
            assert found == store.data[start : start + BLOCK], (round_, index)


@pytest.mark.slow
def test_processes_share_the_limit(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=fill, args=(str(tmp_path), number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    cache = cache_in(tmp_path, blocks=10)
    used = sum(block.stat().st_size for block in blocks_in(cache))
    assert used <= cache.max_bytes
    assert used == int(Path(cache.folder, "bytes").read_text())
    assert not list(Path(cache.folder).glob("**/*.tmp"))


def test_whoever_stores_waits_for_the_lock(tmp_path):
    store, cache = Store(2 * BLOCK), cache_in(tmp_path)
    cache.read(info_of(store), 0, BLOCK, store.fetch)
    with open(Path(cache.folder, "lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reader = threading.Thread(target=cache.read, args=(info_of(store), BLOCK, 2 * BLOCK, store.fetch), daemon=True)
        reader.start()
        reader.join(0.3)
        assert reader.is_alive()
        assert len([path for path in blocks_in(cache) if path.suffix != ".tmp"]) == 1
    reader.join(10)
    assert len(blocks_in(cache)) == 2


def test_what_a_dead_process_left_goes(tmp_path):
    store, cache = Store(BLOCK * 3), cache_in(tmp_path, blocks=2)
    cache.read(info_of(store), 0, BLOCK, store.fetch)
    left = blocks_in(cache)[0].with_name("abc.tmp")
    left.write_bytes(b"torn")
    os.utime(left, (0, 0))
    cache.read(info_of(store), BLOCK, 3 * BLOCK, store.fetch)
    assert not left.exists()


def test_a_full_disk_is_said_once_and_reading_goes_on(tmp_path, monkeypatch, caplog):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store, cache = Store(3 * BLOCK), cache_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert cache.read(info_of(store), 0, 3 * BLOCK, store.fetch) == store.data
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert len(store.fetched) == 6
    assert blocks_in(cache) == []


def test_a_failing_store_leaves_nothing_behind(tmp_path):
    def fail(start: int, stop: int) -> bytes:
        raise DataError("no")

    cache = cache_in(tmp_path)
    with pytest.raises(DataError):
        cache.read(info_of(Store(10)), 0, 10, fail)
    assert blocks_in(cache) == []


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "web").mkdir()
    ids = pa.array([[index] * 50 for index in range(400)])
    for name in "ab":
        pq.write_table(pa.table({"input_ids": ids}), tmp_path / "web" / f"{name}.parquet", row_group_size=50)
    with RangeServer(tmp_path / "web") as running:
        yield running


@pytest.mark.slow
def test_a_second_epoch_asks_the_server_for_nothing(server, tmp_path):
    def tokens(epochs: int, cache_dir: Path | None) -> int:
        source = Source("web", f"{server.url}/*.parquet", epochs=epochs)
        folder = None if cache_dir is None else str(cache_dir)
        rows = PackedRows(64, 2, pack_ahead=4)
        config = LoaderConfig(sources=[source], rows=rows, runtime="local", cache_dir=folder, loader_buffer_bytes=1)
        server.reset()
        with MegaScaleLoader(config) as loader:
            return sum(batch["megascale"].num_loss_tokens for batch in loader)

    cached = tmp_path / "cache"
    one = tokens(1, cached)
    assert server.requests
    first = [request for request in server.requests if request.method == "GET"]
    assert tokens(1, cached) == one
    again = len([request for request in server.requests if request.method == "GET"])
    assert tokens(3, cached) == 3 * one
    assert len([request for request in server.requests if request.method == "GET"]) == again, "three epochs as one"
    assert again < len(first), "only the lists are read anew"
    assert tokens(2, None) == 2 * one
    assert len([request for request in server.requests if request.method == "GET"]) > again


def test_a_storage_without_a_cache_reads_the_same(server, tmp_path):
    cache = cache_in(tmp_path)
    path = server.folder / "a.parquet"
    info = FileInfo(f"{server.url}/a.parquet", path.stat().st_size, 0)
    for storage in (Storage(), Storage(cache=cache), Storage(cache=cache)):
        with storage.open(info) as stream:
            stream.seek(100)
            assert stream.read(3000) == path.read_bytes()[100:3100]
            stream.seek(0)
            assert stream.read() == path.read_bytes()
    local = FileInfo(str(path), path.stat().st_size, 0)
    before = len(blocks_in(cache))
    with Storage(cache=cache).open(local) as stream:
        assert stream.read() == path.read_bytes()
    assert len(blocks_in(cache)) == before, "files of this machine are not copied"
