"""`ReadAhead`: the next part is begun before it is asked for, where workers may run, and no more than one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import DataError
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.loading.readahead import ReadAhead
from megascale_lightning.rows import CollatedRows, PackedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PartKey, TakeRequest

LIMIT_S = 20.0
PARTS = 4
ROWS = 600
"""Of a part: three runs of a batched transform, one more than there are workers."""

PART_BYTES = 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    for part in range(PARTS):
        numbers = range(part * ROWS, (part + 1) * ROWS)
        pq.write_table(pa.table({"n": list(numbers)}), folder / f"{part}.parquet", row_group_size=ROWS)
    return str(folder / "*.parquet")


class Watched:
    """A `transform_batched` that says which parts it saw; `hold` is called with the numbers of each run."""

    def __init__(self, hold=lambda numbers: None):
        self.seen = [threading.Event() for _ in range(PARTS)]
        self.hold = hold

    def __call__(self, columns):
        self.seen[columns["n"][0] // ROWS].set()
        self.hold(columns["n"])
        return {"input_ids": [[n] for n in columns["n"]]}


def key_of(part):
    """Each file is a window of one part."""
    return PartKey("train", 0, 0, part, 0)


def loader_of(files, transform, *, rows=None, buffer_bytes=1 << 30, **options):
    options = {"executor": "threads", "num_workers": 2, "thread_safe": True, **options}
    source = Source("web", files, transform_batched=transform, shuffle=False, **options)
    loaded = LoadedSource(source, build_manifest(source))
    return SourceLoader({"train": [loaded]}, {"train": rows or PackedRows(16, 1)}, 0, 1, PART_BYTES, buffer_bytes)


def wait_for_parts(loader, count):
    end = time.monotonic() + LIMIT_S
    while loader.stats()["parts"] < count:
        assert time.monotonic() < end, loader.stats()
        time.sleep(0.001)


@pytest.mark.parametrize("rows", [PackedRows(16, 1), CollatedRows(1)])
def test_workers_go_from_one_part_to_the_next_before_it_is_done(files, rows):
    late = []

    def hold(numbers):
        part, row = divmod(numbers[0], ROWS)
        # The last run of a part ends when the next part is begun.
        if row >= 2 * 256 and part + 1 < PARTS and not transform.seen[part + 1].wait(LIMIT_S):
            late.append(part)

    transform = Watched(hold)
    loader = loader_of(files, transform, rows=rows)
    try:
        for part in range(PARTS):
            loader.describe(key_of(part))
    finally:
        loader.shutdown()
    assert late == []


def test_it_stays_one_part_ahead(files):
    transform = Watched()
    loader = loader_of(files, transform)
    try:
        for part in range(PARTS - 1):
            loader.describe(key_of(part))
            wait_for_parts(loader, part + 2)
            assert [event.is_set() for event in transform.seen] == [at < part + 2 for at in range(PARTS)]
        loader.describe(key_of(PARTS - 1))
        assert loader.stats()["made"] == PARTS
    finally:
        loader.shutdown()


def test_what_was_read_ahead_is_what_is_read_when_asked_for(files):
    def content(**options):
        loader = loader_of(files, Watched(), **options)
        try:
            metas = [loader.describe(key_of(part)) for part in range(PARTS)]
            block = loader.take([TakeRequest(meta.key, meta.pieces[meta.kept]) for meta in metas])
            return [meta.pieces.tobytes() for meta in metas], block.tokens["input_ids"].values.tobytes()
        finally:
            loader.shutdown()

    assert content() == content(executor="inline", num_workers=None)


def test_the_first_parts_again_are_read_ahead_again(files):
    transform = Watched()
    loader = loader_of(files, transform)
    try:
        for _ in range(2):
            loader.describe(key_of(0))
            wait_for_parts(loader, 2)
            loader.describe(key_of(1))
            wait_for_parts(loader, 3)
            loader.release([key_of(part) for part in range(PARTS)])
        assert loader.stats()["made"] == 6
    finally:
        loader.shutdown()


def test_code_that_asked_for_no_workers_runs_when_it_is_asked_for(files):
    transform = Watched()
    loader = loader_of(files, transform, executor="inline", num_workers=None)
    for part in range(PARTS):
        loader.describe(key_of(part))
        assert loader.stats()["made"] == part + 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megascale-read-ahead")]
    loader.shutdown()


def test_an_error_is_left_to_who_asks(files):
    failed = threading.Event()

    def hold(numbers):
        if numbers[0] == ROWS:
            failed.set()
            raise ValueError("no such number")

    loader = loader_of(files, Watched(hold))
    try:
        meta = loader.describe(key_of(0))
        assert failed.wait(LIMIT_S)
        assert loader.take([TakeRequest(meta.key, meta.pieces)]).num_pieces == ROWS
        with pytest.raises(DataError, match="no such number"):
            loader.describe(key_of(1))
    finally:
        loader.shutdown()


class Recorded:
    """What a `ReadAhead` makes, and whether there is room for it."""

    def __init__(self):
        self.made = []
        self.full = set()
        self.changed = threading.Condition()
        self.ahead = ReadAhead(self.make, lambda key: key not in self.full)

    def make(self, key):
        with self.changed:
            self.made.append(key)
            self.changed.notify_all()

    def wait_for(self, *keys):
        with self.changed:
            assert self.changed.wait_for(lambda: set(keys) <= set(self.made), LIMIT_S), self.made


def test_it_begins_once_and_only_what_is_behind_the_part_asked_for():
    record = Recorded()
    record.ahead.read(key_of(7), key_of(8))  # made again for a late take
    record.ahead.asked(key_of(0))
    for _ in range(3):
        record.ahead.read(key_of(0), key_of(1))
    record.ahead.read(key_of(1), key_of(2))
    record.wait_for(key_of(1))
    record.ahead.asked(key_of(2))
    record.ahead.read(key_of(2), None)
    record.ahead.asked(key_of(1))
    record.wait_for(key_of(2))
    record.ahead.close()
    assert record.made == [key_of(1), key_of(2)]


def test_what_waits_for_its_turn_and_is_asked_for_meanwhile_is_not_begun():
    record = Recorded()
    others = [PartKey("train", source, 0, 0, 0) for source in (1, 2, 3)]
    with record.changed:  # nothing is made before this is let go of
        for key in (*others[:2], key_of(0), others[2]):
            record.ahead.asked(key)
            record.ahead.read(key, replace(key, window=1))
        record.ahead.asked(key_of(1))
    record.wait_for(*(replace(key, window=1) for key in others))
    record.ahead.close()
    assert key_of(1) not in record.made


def test_nothing_is_begun_without_room():
    record = Recorded()
    record.full.add(key_of(1))
    for part in (0, 1):
        record.ahead.asked(key_of(part))
        record.ahead.read(key_of(part), key_of(part + 1))
        record.ahead.asked(PartKey("train", part + 1, 0, 0, 0))  # of other sources, behind it
        record.ahead.read(PartKey("train", part + 1, 0, 0, 0), PartKey("train", part + 1, 0, 1, 0))
    record.wait_for(key_of(2), PartKey("train", 1, 0, 1, 0), PartKey("train", 2, 0, 1, 0))
    record.ahead.close()
    assert key_of(1) not in record.made


def test_there_is_room_where_two_parts_like_the_newest_fit_beside_what_is_held(files):
    def has_room(buffer_bytes, *described):
        loader = loader_of(files, Watched(), buffer_bytes=buffer_bytes, executor="inline", num_workers=None)
        sizes = [loader.describe(key_of(part)).payload_bytes for part in described]
        return loader._has_room(key_of(0)), sum(sizes)

    assert has_room(2 * PART_BYTES) == (True, 0)
    assert has_room(2 * PART_BYTES - 1) == (False, 0)
    _, size = has_room(1 << 30, 0)
    assert size != PART_BYTES
    assert has_room(3 * size, 0) == (True, size)
    assert has_room(3 * size - 1, 0) == (False, size)
