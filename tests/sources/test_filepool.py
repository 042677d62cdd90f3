"""Open files are shared by turns: each is open once, so that a large row group is decoded once, by whatever threads."""

import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats import parquet
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.sources.stores.storage import FileInfo, Storage

INFO, STORAGE = FileInfo("a", 1, 0), Storage()


class Handle:
    """A file that counts how often it was opened and closed."""

    opened, closed = 0, 0

    def __init__(self, info, storage):
        Handle.opened += 1

    def close(self):
        Handle.closed += 1


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    monkeypatch.setattr(Storage, "check_unchanged", lambda self, info: None)
    monkeypatch.setattr(Handle, "opened", 0)
    monkeypatch.setattr(Handle, "closed", 0)


def test_another_thread_waits_for_its_turn_and_gets_the_same_file():
    pool, got, held = FilePool(), [], threading.Event()

    def other():
        held.wait()
        with pool.lease(INFO, STORAGE, Handle) as handle:
            got.append(handle)

    thread = threading.Thread(target=other)
    thread.start()
    with pool.lease(INFO, STORAGE, Handle) as mine:
        held.set()
        thread.join(0.2)
        assert (got, pool.num_open) == ([], 1)
    thread.join()
    assert (got, Handle.opened, pool.num_open) == ([mine], 1, 1)


def test_other_files_are_not_waited_for():
    pool = FilePool()
    with pool.lease(INFO, STORAGE, Handle), pool.lease(FileInfo("b", 1, 0), STORAGE, Handle):
        assert (pool.num_open, Handle.opened) == (2, 2)


def test_what_fails_is_closed_and_keeps_nobody_waiting():
    pool = FilePool()
    with pytest.raises(ZeroDivisionError), pool.lease(INFO, STORAGE, Handle):
        raise ZeroDivisionError
    assert (Handle.closed, pool.num_open) == (1, 0)

    def refuse(info, storage):
        raise PermissionError

    for _ in range(2):
        with pytest.raises(PermissionError), pool.lease(INFO, STORAGE, refuse):
            pass
    with pool.lease(INFO, STORAGE, Handle):
        assert (Handle.opened, pool.num_open) == (2, 1)


def test_two_threads_decode_a_large_row_group_once(tmp_path, monkeypatch):
    rows = pa.table({"input_ids": pa.array([[i] for i in range(400)])})
    pq.write_table(rows, tmp_path / "a.parquet", 400)
    source = Source("s", str(tmp_path / "a.parquet"))
    reader = make_reader(source, build_manifest(source), ["input_ids"], pool=FilePool())
    begun, found = [], {}
    second = threading.Thread(target=lambda: found.update({100: reader.read(0, 100, 200)}))

    class Cursor(parquet._SliceCursor):
        def __init__(self, *given):
            begun.append(given[1])
            super().__init__(*given)

        def read(self, start, stop):
            if start == 0:  # the next part is asked for while this one is read
                second.start()
                second.join(0.2)
            return super().read(start, stop)

    monkeypatch.setattr(parquet, "_SliceCursor", Cursor)
    found[0] = reader.read(0, 0, 100)
    second.join()
    found[200] = reader.read(0, 200, 400)
    assert [row["input_ids"].item() for start in (0, 100, 200) for row in found[start].samples()] == list(range(400))
    assert len(begun) == 1
