"""The quarantine file: whole lines, each record once, whoever writes; what a kill or a full disk leaves is mended."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megascale_lightning.cli import main
from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.quarantine import (
    BadRecord,
    Quarantine,
    QuarantineFile,
    check_folder,
    digest_of,
    quarantine_path,
    read_lines,
)
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.stores.secrets import remember_secrets
from megascale_lightning.sources.stores.storage import FileInfo

UNITS = np.array([(0, 0, 1, -1, 100), (1, 0, 1, -1, 100)], UNIT)


def manifest_of(size: int = 10) -> Manifest:
    return Manifest((FileInfo("/data/a.jsonl", size, 0), FileInfo("/data/ü b.jsonl", size, 0)), UNITS, "jsonl")


def writer_of(path: Path, **changes: int) -> QuarantineFile:
    return QuarantineFile(Quarantine(str(path), "train"), "web", manifest_of(**changes))


def bad(row: int, unit: int = 0, epoch: int = 0, message: str = "'input_ids' is null") -> BadRecord:
    return BadRecord(unit=unit, row=row, epoch=epoch, reason="read_error", message=message, digest="ab" * 16, size=12)


def listed(path: Path) -> list[tuple[int, int]]:
    """(unit, row) of every line, all of which must be whole."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.read_bytes().endswith(b"\n")
    return [(entry["unit"], entry["row"]) for entry in entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train" / "web.jsonl"


def test_a_line_says_all_there_is_to_know(path: Path) -> None:
    writer_of(path).add([bad(7, unit=1, message="no\nJSON\u2028 at \udcff all")])
    (entry,) = read_lines(path)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "source": "web",
        "stream": "train",
        "file": "/data/ü b.jsonl",
        "unit": 1,
        "row": 7,
        "epoch": 0,
        "reason": "read_error",
        "message": "no\nJSON\u2028 at \udcff all",
        "digest": "ab" * 16,
        "size": 12,
        "data": manifest_of().digest(),
    }
    assert path.read_bytes().count(b"\n") == 1


def test_no_secret_is_written_down(path: Path) -> None:
    """Neither one that the process knows of, nor what signs a URL."""
    remember_secrets({"secret": "hunter2-hunter2"})
    remote = FileInfo("https://me:letmein9@host/a.jsonl?version=2&X-Amz-Signature=f00f00", 10, 0)
    writer = QuarantineFile(Quarantine(str(path), "train"), "web", Manifest((remote, remote), UNITS, "jsonl"))
    writer.add([bad(1, message="401 for hunter2-hunter2 at https://me:letmein9@host/a.jsonl")])
    (entry,) = read_lines(path)
    assert "/a.jsonl?version=2" in entry["file"]
    for secret in ("hunter2", "letmein9", "f00f00"):
        assert secret not in path.read_text()


def test_a_record_is_listed_once(path: Path) -> None:
    """Read again, in the next epoch, by a replacement that begins anew; other data are other records."""
    first = writer_of(path)
    first.add([bad(1), bad(2)])
    first.add([bad(2), bad(1, epoch=1), bad(3)])
    writer_of(path).add([bad(3), bad(4)])
    first.add([bad(4)])
    assert listed(path) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    writer_of(path, size=11).add([bad(4)])
    assert listed(path)[4:] == [(0, 4)]


def test_several_writers_at_once(path: Path) -> None:
    """As many loaders, each with a view of its own: no line is torn, none is there twice."""
    start = threading.Barrier(4)

    def write() -> None:
        writer = writer_of(path)
        start.wait()
        for row in range(60):
            writer.add([bad(row, message="x" * 900), bad(row, unit=1)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(listed(path)) == {(unit, row): 1 for unit in range(2) for row in range(60)}


WRITER = """
import sys
from pathlib import Path
from tests.loading.test_loading_quarantine import bad, writer_of
writer = writer_of(Path(sys.argv[1]))
for row in range(100_000):
    writer.add([bad(row, message="x" * 900)])
"""


@pytest.mark.slow
def test_a_writer_that_is_killed(path: Path) -> None:
    """Three of them one after another, each in the middle of its work; the next one goes on with what is missing."""
    for goal in (200, 400, 600):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=Path(__file__).parents[2])
        while child.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < goal):
            pass
        assert child.poll() is None
        child.kill()
        child.wait()
    writer_of(path).add([bad(row) for row in range(700)])
    found = listed(path)
    assert sorted(found) == [(0, row) for row in range(max(700, len(found)))]


@pytest.mark.parametrize("cut", [1, 5, 150])
def test_a_line_that_a_kill_cut_short(path: Path, cut: int) -> None:
    """The record is listed again, whole; readers of the torn file leave it out."""
    writer_of(path).add([bad(1), bad(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [entry["row"] for entry in read_lines(path)][:1] == [1]
    writer_of(path).add([bad(1), bad(2), bad(3)])
    assert listed(path) == [(0, 1), (0, 2), (0, 3)]


def test_lines_of_others_are_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('hello\n{"unit": "none"}\n[1]\n')
    writer_of(path).add([bad(1)])
    assert path.read_text().startswith('hello\n{"unit": "none"}\n[1]\n{"source"')


def test_a_file_that_was_taken_away(path: Path) -> None:
    writer = writer_of(path)
    writer.add([bad(1)])
    path.unlink()
    writer.add([bad(1), bad(2)])
    assert listed(path) == [(0, 1), (0, 2)]


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of this process may have `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, no torn line; what could not be listed is listed when it is met again."""
    caplog.set_level(logging.WARNING)
    writer = writer_of(path)
    writer.add([bad(1)])
    with full_disk(path.stat().st_size + 50):
        writer.add([bad(2)])
        writer.add([bad(3)])
        assert listed(path) == [(0, 1)]
    writer.add([bad(2), bad(3)])
    assert listed(path) == [(0, 1), (0, 2), (0, 3)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "'web'" in said[0]
    assert str(path) in said[0]
    assert "cannot be listed" in said[1]
    assert "still left out" in said[1]


@pytest.mark.parametrize("occupied", ["folder", "file"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, occupied: str) -> None:
    place = tmp_path / "q"
    if occupied == "folder":
        place.write_text("a file where a folder should be")
    else:
        (place / "val" / "0" / "web.jsonl").mkdir(parents=True)
    path = quarantine_path(str(place), "val/0", "web")
    with pytest.raises(ConfigError, match=r"quarantine_dir.*skip") as caught:
        check_folder(path)
    assert path in str(caught.value)


@pytest.mark.watchdog(20)
@pytest.mark.parametrize("target", ["/dev/full", "nowhere/web.jsonl", "pipe"])
def test_a_link_to_what_is_no_file(path: Path, target: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is read of /dev/full never ends, and a pipe waits for somebody."""
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path.parent / "pipe")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=rf"{path}, which cannot be written: .*quarantine_dir"):
        check_folder(str(path))
    writer_of(path).add([bad(1)])
    assert f"cannot be listed in {path}" in caplog.text


def test_looking_at_a_folder_leaves_nothing_in_it(path: Path) -> None:
    check_folder(str(path))
    assert list(path.parent.iterdir()) == []


def test_the_digest_is_that_of_the_record() -> None:
    """Of its stored bytes where the reader has them; else equal for equal values, and for no others."""
    objects = [None, {"b": 1, "a": [1, 2]}, {"a": [1, 2], "b": 1}, {"a": [1, 2], "b": "1"}, {"a": [12], "b": 1}]
    block = RecordBlock(unit=0, row_start=0, num_rows=5, objects=objects, raw={0: b"{broken"})
    found = [digest_of(block, index) for index in range(5)]
    assert found[0] == (blake2b(b"{broken", digest_size=16).hexdigest(), 7)
    assert found[1] == found[2]
    assert len({digest for digest, _ in found}) == 4
    table = pa.table({"input_ids": pa.array([[1, 2], None, [1, 2], [1, 3]], pa.list_(pa.int32()))})
    of_table = [digest_of(RecordBlock(unit=0, row_start=0, num_rows=4, table=table), index) for index in range(4)]
    assert of_table[0] == of_table[2]
    assert len({digest for digest, _ in of_table}) == 3
    assert digest_of(RecordBlock(unit=0, row_start=0, num_rows=1, objects=[1], lazy=True), 0) == (None, 0)


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer_of(path).add([bad(1), bad(2), bad(-1, unit=1, message="the file is cut short")])
    assert main(["quarantine", str(path.parent.parent)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "source 'web' of stream 'train': 3 entries"
    assert shown[1].split()[:3] == ["2", "read_error", "/data/a.jsonl,"]
    assert "row 1: 'input_ids' is null" in shown[1]
    assert "unit 1, all rows: the file is cut short" in shown[2]
    assert main(["quarantine", str(path), "--json"]) == 0
    assert [entry["row"] for entry in json.loads(capsys.readouterr().out)] == [1, 2, -1]
    assert main(["quarantine", str(path.with_name("none"))]) == 1
    assert "none" in capsys.readouterr().err
