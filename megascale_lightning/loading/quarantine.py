"""The quarantine: one file of JSON lines per source of a stream, which lists the records that were left out and why."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.transforms import UNREADABLE
from megascale_lightning.sources.formats.arrowcolumns import table_rows
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.stores.secrets import redact

__all__ = ["BadRecord", "Quarantine", "QuarantineFile", "check_folder", "digest_of", "quarantine_path", "read_lines"]

logger = logging.getLogger(__name__)

WHOLE_UNIT: Final = -1
"""The row that stands for all records of a unit."""

_MAX_LINES: Final = 1_000_000
_MAX_MESSAGE: Final = 1_000
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Where the bad records of one source of one stream are listed."""

    path: str
    """Absolute: the roles that write it may run on another machine."""
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A record that was left out, or all of a unit's where `row` is -1."""

    unit: int
    row: int
    epoch: int
    """The first in which it was met."""
    reason: str
    """"read_error", "transform_error", or "unpaired" where what is to be joined to it is not there."""
    message: str
    digest: str | None
    """Of the record as stored, or of the sample it was read as; None where neither is there."""
    size: int
    """Bytes that the digest is of; for a unit its stored bytes."""


def quarantine_path(folder: str, stream: str, source: str) -> str:
    """The file of one source of one stream below the quarantine folder."""
    return os.path.join(folder, *stream.split("/"), f"{source}.jsonl")


def check_folder(path: str) -> None:
    """Make the folder of a quarantine file, and try to write into it.

    Raises:
        ConfigError: That is not possible.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with tempfile.TemporaryFile(dir=os.path.dirname(path)):
            pass
        if os.path.exists(path):
            _check_regular(os.stat(path))
        if os.path.lexists(path):
            with open(path, "ab"):
                pass
    except OSError as error:
        raise ConfigError(
            f'on_error="quarantine" lists what it leaves out in {path}, which cannot be written: {error}; set '
            'quarantine_dir to a folder that can be, or on_error="skip"'
        ) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a quarantine file, or of all files below a folder; a line that was cut short is left out.

    Raises:
        OSError: It cannot be read.
    """
    if path.is_dir():
        for inner in sorted(path.rglob("*.jsonl")):
            yield from read_lines(inner)
        return
    with path.open("rb") as file:
        for line in file:
            entry = _parsed(line)
            if entry is not None:
                yield entry


class QuarantineFile:
    """Appends whole lines to the quarantine of one source, each record once, whoever else writes there.

    A record is known by (`data`, `unit`, `row`), `data` being the digest of the file list: not again when its part is
    read again, in another process, in the next epoch, or after a resume. Safe to call from several threads.

    What cannot be written (a full disk) is said once; the records are counted all the same.
    """

    def __init__(self, place: Quarantine, source: str, manifest: Manifest) -> None:
        self._place = place
        self._source = source
        self._manifest = manifest
        self._data = manifest.digest()
        self._lock = threading.Lock()
        self._known: set[tuple[int, int]] = set()
        self._file = (0, 0)
        self._end = 0
        self._said: set[str] = set()

    @property
    def path(self) -> str:
        """Where it is."""
        return self._place.path

    def lists(self, unit: int, row: int) -> bool:
        """Whether the record is there already, as far as is known without looking."""
        with self._lock:
            return (unit, row) in self._known

    def add(self, records: Sequence[BadRecord]) -> None:
        """List the records that are not listed yet."""
        with self._lock:
            by_key = {(record.unit, record.row): record for record in records}
            if by_key.keys() <= self._known:
                return
            try:
                self._append(by_key)
            except OSError as error:
                self._say("failed", f"cannot be listed in {self.path}: {error}; they are still left out and counted")

    def _append(self, records: Mapping[tuple[int, int], BadRecord]) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _check_regular(os.fstat(descriptor))
            with _alone(descriptor) as is_alone:
                self._catch_up(descriptor, is_alone)
                fresh = {key: record for key, record in records.items() if key not in self._known}
                if fresh and len(self._known) + len(fresh) > _MAX_LINES:
                    self._say("full", f"are no longer listed in {self.path}, which has {len(self._known)} of them")
                    return
                if fresh:
                    _write(descriptor, b"".join(self._line(record) for record in fresh.values()))
                    self._known |= fresh.keys()
                    self._end = os.fstat(descriptor).st_size if is_alone else self._end
                    self._say("listed", f"are left out, and listed in {self.path}")
        finally:
            os.close(descriptor)

    def _catch_up(self, descriptor: int, is_alone: bool) -> None:
        """Learn what others, or a run before, have listed since; mend a last line that a kill has cut short."""
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._end:
            self._file, self._end = (found.st_dev, found.st_ino), 0
            self._known.clear()
        rest = b""
        while chunk := os.pread(descriptor, _CHUNK, self._end + len(rest)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._end += len(line) + 1
                entry = _parsed(line)
                if entry is not None and entry.get("data") == self._data:
                    self._known.add((entry["unit"], entry["row"]))
        if rest and is_alone:
            os.ftruncate(descriptor, self._end)
        elif rest:
            os.write(descriptor, b"\n")

    def _line(self, record: BadRecord) -> bytes:
        info = self._manifest.file_of(record.unit, record.row)
        entry = {
            "source": self._source,
            "stream": self._place.stream,
            "file": redact(info.path),
            "unit": record.unit,
            "row": record.row,
            "epoch": record.epoch,
            "reason": record.reason,
            "message": redact(record.message)[:_MAX_MESSAGE],
            "digest": record.digest,
            "size": record.size,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "data": self._data,
        }
        return json.dumps(entry).encode("ascii") + b"\n"

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("source %r of stream %r: bad records %s", self._source, self._place.stream, text)


def _check_regular(found: os.stat_result) -> None:
    """What is read back of a device, such as /dev/full, may never end. Raises: OSError."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An entry; None for what is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(entry, dict) and isinstance(entry.get("unit"), int) and isinstance(entry.get("row"), int)
    return entry if whole else None


@contextmanager
def _alone(descriptor: int) -> Iterator[bool]:
    """Nobody else writes meanwhile; False where the filesystem has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        yield False
        return
    # Closing the descriptor, or the end of the process, lets go of it.
    yield True


def _write(descriptor: int, content: bytes) -> None:
    """All of it at the end of the file, or nothing as far as that is possible."""
    begin = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, content)
        while written < len(content):
            written += os.write(descriptor, content[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, begin)
        raise


def digest_of(block: RecordBlock, index: int) -> tuple[str | None, int]:
    """Digest (32 hex digits) and size of a record: of its stored bytes, else of the values it was read as.

    (None, 0) where there is neither, and where getting the values would run the user's code once more.
    """
    if index in block.raw:
        content = block.raw[index]
        return hashlib.blake2b(content, digest_size=16).hexdigest(), len(content)
    if block.table is not None:
        try:
            sample = table_rows(block.table.slice(index, 1))[0]
        except UNREADABLE:
            return None, 0
    elif block.objects is None or block.lazy or block.objects[index] is None:
        return None, 0
    else:
        sample = block.objects[index]
    if index in block.unpaired and isinstance(sample, Mapping):
        # The fields of what it lacks are null where its neighbours in the block have them, and else are not there.
        sample = {name: value for name, value in sample.items() if value is not None}
    content = b"".join(_canonical(sample))
    return hashlib.blake2b(content, digest_size=16).hexdigest(), len(content)


def _canonical(value: Any) -> Iterator[bytes]:
    """Bytes that are the same for the same value, in any process."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield f"{key!s}:".encode(errors="surrogatepass")
            yield from _canonical(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _canonical(item)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype.str}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, bytes):
        yield value
    elif value is None or isinstance(value, (str, bool, int, float)):
        yield f"{type(value).__name__}{value!s};".encode(errors="surrogatepass")
    else:
        yield f"<{type(value).__name__}>".encode()
