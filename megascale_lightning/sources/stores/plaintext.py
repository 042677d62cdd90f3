"""`PlainFile`: the plain content of a file, compressed or not, front to back; `Cursors`: places to go on from."""

from __future__ import annotations

import bz2
import io
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, Generic, Protocol, TypeVar, cast

import pyarrow as pa

from megascale_lightning.errors import DataError
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["COMPRESSIONS", "SLICED_BYTES", "Cursor", "Cursors", "PlainFile", "codec_of", "is_large"]

COMPRESSIONS: Final[dict[str, Any]] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Suffix of a compressed file -> Arrow's name of the codec."""

SLICED_BYTES: Final = 8 << 20
"""A compressed file that is larger as stored is read in slices."""

_CHUNK: Final = 1 << 20
_TRUNCATED: Final = "Truncated compressed stream"


def codec_of(path: str) -> str | None:
    """Arrow's name of the codec by the file's suffix, None for a file that is stored plain."""
    path = path.lower()
    if path.endswith(".tgz"):
        return "gzip"
    return next((codec for suffix, codec in COMPRESSIONS.items() if path.endswith(suffix)), None)


def is_large(info: FileInfo) -> bool:
    """Whether a file has to be read in slices: compressed, and too large to be held as a whole."""
    return info.size > SLICED_BYTES and codec_of(info.path) is not None


class PlainFile:
    """Reads the plain content of a file front to back; all members or frames of a compressed file, one after the other.

    A compressed file that is cut short or corrupt gives what can be decompressed before; then `problem` says so.

    Args:
        storage: Opens it.
        info: The file.
        position: Plain byte to begin at. A compressed file is decompressed up to there.

    Raises:
        DataError: The file cannot be opened or read, or has another size than when the run began.
    """

    def __init__(self, storage: Storage, info: FileInfo, position: int = 0) -> None:
        self._storage = storage
        self._info = info
        self._codec = codec_of(info.path)
        self._stream: Any = None
        self._raw: _Counted | None = None
        self.position = 0
        """Plain byte that is read next."""
        self.problem: str | None = None
        """What is wrong behind `position`, once reading came there; None: nothing, or not yet known."""
        self._open(position)

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end of the content, or where it breaks off."""
        found = []
        while size > 0 and self.problem is None:
            data = self._read_once(min(size, _CHUNK))
            if not data:
                break
            self.position += len(data)
            size -= len(data)
            found.append(data)
        return found[0] if len(found) == 1 else b"".join(found)

    def close(self) -> None:
        """Let go of the file; closing again is fine."""
        raw, self._raw, self._stream = self._raw, None, None
        if raw is not None:
            raw.close()

    def _open(self, position: int) -> None:
        self.close()
        raw = self._raw = _Counted(self._storage.open(self._info))
        try:
            if self._codec is None:
                raw.start(position)
                self._stream, self.position = raw, position
                return
            self._stream = _Bz2Stream(raw) if self._codec == "bz2" else _arrow_stream(raw, self._codec)
            self.position = 0
            while self.position < position and self.read(min(position - self.position, _CHUNK)):
                pass
        except BaseException:
            self.close()
            raise

    def _read_once(self, size: int) -> bytes:
        try:
            data = self._decompress(size)
        except _BrokenError as error:
            return self._salvage(size, str(error))
        raw = self._raw
        if not data and raw is not None and raw.position < self._info.size:
            raise self._short(raw)
        return data

    def _decompress(self, size: int) -> bytes:
        raw = self._raw
        if raw is None:
            raise ValueError(f"{self._info.path} is closed")
        try:
            return bytes(self._stream.read(size))
        except (OSError, pa.ArrowException) as error:
            if raw.error is not None or self._codec is None or isinstance(error, MemoryError):
                raise
            if _TRUNCATED in str(error) and raw.position < self._info.size:
                raise self._short(raw) from error
            raise _BrokenError(str(error)) from error

    def _short(self, raw: _Counted) -> DataError:
        return DataError(f"{self._info.path} gave {raw.position} of its {self._info.size} bytes")

    def _salvage(self, size: int, reason: str) -> bytes:
        """What comes before the break: a failed call gives nothing of it, so read again in ever smaller steps."""
        start, good = self.position, b""
        for step in (min(size, 4096), 1):
            self._open(start)
            good = self._read_good(len(good), step, size)
        self.position = start
        at = start + len(good)
        if reason == _TRUNCATED:
            self.problem = f"the file ends in the middle at plain byte {at}: its last bytes are missing"
        else:
            self.problem = f"the file breaks at plain byte {at}: {reason}"
        return good

    def _read_good(self, skip: int, step: int, size: int) -> bytes:
        good = b""
        try:
            while len(good) < size:
                data = self._decompress(min(skip - len(good), _CHUNK) if len(good) < skip else step)
                if not data:
                    break
                good += data
        except _BrokenError:
            return good
        raise DataError(f"{self._info.path} gives other bytes each time it is read")


class _BrokenError(Exception):
    """The compressed content is at fault, not the device."""


def _arrow_stream(raw: _Counted, codec: str) -> Any:
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), cast("Any", codec))


class _Bz2Stream:
    """All streams of a bzip2 file; Arrow's reader stumbles over one without content."""

    def __init__(self, raw: _Counted) -> None:
        self._raw = raw
        self._stream: bz2.BZ2Decompressor | None = None
        self._rest = b""
        """Stored bytes behind the stream that ended last."""

    def read(self, size: int) -> bytes:
        """At least one byte of at most `size`, but at the end."""
        data = b""
        while not data:
            stored, self._rest = self._rest, b""
            if not stored and (self._stream is None or self._stream.needs_input):
                stored = self._raw.read(1 << 16)
                if not stored and self._stream is not None:
                    raise OSError(_TRUNCATED)
                if not stored:
                    break
            self._stream = self._stream or bz2.BZ2Decompressor()
            data = self._stream.decompress(stored, size)
            if self._stream.eof:
                self._rest = self._stream.unused_data
                self._stream = None
        return data


class _Counted(io.RawIOBase):
    """A file as Arrow wants it: it knows how far it was read, and which error of the device stopped it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self.position = 0
        self.error: Exception | None = None

    def start(self, position: int) -> None:
        self._stream.seek(position)
        self.position = position

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._stream.read(size)
        except Exception as error:
            self.error = error
            raise
        self.position += len(data)
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        super().close()
        self._stream.close()


class Cursor(Protocol):
    """A place in a unit from which its next slice is read."""

    next_index: int
    """The slice it would read now."""

    def close(self) -> None:
        """Let go of what is open."""


_C = TypeVar("_C", bound=Cursor)


class Cursors(Generic[_C]):
    """A few cursors that stay open, least recently used closed first. Thread-safe; a cursor is used by one at a time.

    Who wants what lies behind a slice that is being read waits for its cursor: another would read all before it again.

    Args:
        limit: Cursors that stay open.
    """

    def __init__(self, limit: int = 4) -> None:
        self._limit = limit
        self._idle: list[tuple[Hashable, _C]] = []
        self._busy: Counter[tuple[Hashable, int]] = Counter()
        self._generation = 0
        self._turns = threading.Condition()

    @property
    def num_open(self) -> int:
        """Cursors that are open and not in use."""
        with self._turns:
            return len(self._idle)

    @contextmanager
    def at(self, key: Hashable, index: int, make: Callable[[], _C]) -> Iterator[_C]:
        """The cursor of `key` that is nearest before slice `index`, else a new one; the caller moves it on.

        A cursor is closed when an error leaves the block, since it then stands nobody knows where.

        Args:
            key: What it goes through: a unit, with all that tells its slices.
            index: The slice that is wanted.
            make: A cursor at slice 0.
        """
        with self._turns:
            self._turns.wait_for(lambda: not any(held == key and at < index for held, at in self._busy))
            generation = self._generation
            fit = [entry for entry in self._idle if entry[0] == key and entry[1].next_index <= index]
            best = max(fit, key=lambda entry: entry[1].next_index, default=None)
            if best is not None:
                self._idle = [entry for entry in self._idle if entry[1] is not best[1]]
            self._busy[key, index] += 1
        try:
            cursor = make() if best is None else best[1]
            try:
                yield cursor
            except BaseException:
                cursor.close()
                raise
            self._put_back(key, cursor, generation)
        finally:
            with self._turns:
                self._busy -= Counter([(key, index)])
                self._turns.notify_all()

    def _put_back(self, key: Hashable, cursor: _C, generation: int) -> None:
        with self._turns:
            if generation == self._generation:
                self._idle.append((key, cursor))
                surplus = self._idle[: -self._limit]
                self._idle = self._idle[-self._limit :]
            else:
                surplus = [(key, cursor)]
        for _, old in surplus:
            old.close()

    def close(self) -> None:
        """Close all of them, those in use when they come back."""
        with self._turns:
            self._generation += 1
            idle, self._idle = self._idle, []
        for _, cursor in idle:
            cursor.close()
