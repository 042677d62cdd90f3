"""Frozen file lists: which files changed, and going on with those that a run began with."""

from __future__ import annotations

import pytest

from megascale_lightning import StateError
from megascale_lightning.checkpointing.filelists import (
    FileChanges,
    compare_lists,
    describe_changes,
    kept_files,
    pack_lists,
    unpack_lists,
)
from megascale_lightning.sources.stores.storage import FileInfo

A, B, C = (FileInfo(f"/data/web/{name}.parquet", size, 5) for name, size in (("a", 10), ("b", 20), ("c", 30)))


def moved(*files: FileInfo) -> tuple[FileInfo, ...]:
    return tuple(FileInfo(info.path.replace("/data/", "/mnt/copy/"), info.size, 9) for info in files)


def test_what_was_packed_comes_back() -> None:
    lists = {"web": (A, B), "code": (C,)}
    assert unpack_lists(pack_lists(lists)) == lists


@pytest.mark.parametrize("damage", [b"", b"nonsense", pack_lists({})[:-3]])
def test_damaged_lists_are_an_error(damage: bytes) -> None:
    with pytest.raises(StateError, match="damaged"):
        unpack_lists(damage)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((A, B, C), "1 added: /data/web/c.parquet"),
        ((A,), "1 gone: /data/web/b.parquet"),
        ((A, FileInfo(B.path, 21, 5)), "1 of another size: /data/web/b.parquet (20 -> 21 bytes)"),
        ((A, FileInfo(B.path, 20, 6)), "1 written since: /data/web/b.parquet"),
        ((B, A), "the same files in another order"),
        (moved(A, B, C), "1 added: c.parquet; 2 written since: a.parquet, b.parquet"),
    ],
)
def test_the_change_is_told(now: tuple[FileInfo, ...], said: str) -> None:
    assert describe_changes((A, B), now) == said


def test_many_files_are_told_in_short() -> None:
    files = tuple(FileInfo(f"/d/{index}", 1, 1) for index in range(9))
    assert describe_changes(files[:1], files) == "8 added: /d/1, /d/2, /d/3 and 5 more"


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ((A, B, C), (A, B)),
        ((C, B, A), (A, B)),
        (moved(A, B, C), moved(A, B)),
        ((A, B), None),
        ((A, C), None),
        ((A, FileInfo(B.path, 21, 5), C), None),
    ],
)
def test_only_additions_can_be_left_out(now: tuple[FileInfo, ...], kept: tuple[FileInfo, ...] | None) -> None:
    assert kept_files((A, B), now) == kept
    assert kept_files((), now) is None


@pytest.mark.parametrize(
    ("saved", "now", "copied"),
    [
        ((A, B), moved(A, B), True),
        ((A, B), (FileInfo(A.path, 10, 6), FileInfo(B.path, 20, 7)), True),
        ((A, B), (A, FileInfo(B.path, 20, 7)), False),
        ((A, B), (FileInfo(A.path, 10, 6), FileInfo(B.path, 21, 7)), False),
        ((A,), moved(A), True),
        ((A,), (FileInfo(A.path, 10, 6),), False),
        ((A, B), (), False),
    ],
)
def test_files_that_were_all_written_anew_are_copies(
    saved: tuple[FileInfo, ...], now: tuple[FileInfo, ...], copied: bool
) -> None:
    """A part of them, or the only one at its old place, may as well have been edited."""
    assert compare_lists({"web": (saved, now)}) == FileChanges({}, ("web",) if copied else ())
