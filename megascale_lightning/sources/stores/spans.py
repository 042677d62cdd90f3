"""`SpanFiles`: byte ranges of binary files, mapped where they are local, read by range where they are remote."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import pyarrow as pa

from megascale_lightning.errors import ConfigError, CorruptDataError, DataError
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.stores.corruption import reading_error
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["MAX_MAPPED_FILES", "SpanFiles", "decompress", "unit_errors"]

MAX_MAPPED_FILES: Final = 16
"""Files mapped by one reader at once. A mapping holds no file descriptor."""

_MAX_PLAIN: Final = 2

Buffer = Any
"""`pyarrow.Buffer`: lives as long as whatever was made from it."""


class SpanFiles:
    """Reads byte ranges; keeps few files mapped, least recently used let go first. Thread-safe.

    Args:
        storage: Opens the files.
        limit: Files mapped at once.
    """

    def __init__(self, storage: Storage, limit: int = MAX_MAPPED_FILES) -> None:
        self._storage = storage
        self._limit = limit
        self._mapped: OrderedDict[str, Buffer] = OrderedDict()
        self._plain: OrderedDict[str, Buffer] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, info: FileInfo, start: int = 0, stop: int = -1) -> Buffer:
        """Bytes [start, stop) of a file; -1 is its end. Those of a local file are its pages, not a copy.

        Raises:
            DataError: The file cannot be read, or has another size than when the run began.
            ValueError: It ends before `stop`.
        """
        stop = info.size if stop < 0 else stop
        if stop > info.size:
            raise ValueError(f"it ends at byte {info.size}, before byte {stop}")
        if start >= stop:
            return pa.py_buffer(b"")
        if self._storage.is_remote(info.path):
            with self._storage.open(info) as stream:
                stream.seek(start)
                return pa.py_buffer(stream.read(stop - start))
        return self._whole(info).slice(start, stop - start)

    def plain(self, info: FileInfo, make: Callable[[Buffer], Buffer]) -> Buffer:
        """`make(bytes of the file)`, such as its decompressed content; the two used last are kept."""
        self._storage.check_unchanged(info)
        with self._lock:
            found = self._plain.pop(info.path, None)
            if found is not None:
                self._plain[info.path] = found
        if found is not None:
            return found
        made = make(self.read(info))
        with self._lock:
            self._plain[info.path] = made
            while len(self._plain) > _MAX_PLAIN:
                self._plain.popitem(last=False)
        return made

    def _whole(self, info: FileInfo) -> Buffer:
        self._storage.check_unchanged(info)
        with self._lock:
            buffer = self._mapped.pop(info.path, None)
            if buffer is None:
                buffer = self._storage.attempt(info, lambda: _map(info.path))
            self._mapped[info.path] = buffer
            while len(self._mapped) > self._limit:
                self._mapped.popitem(last=False)
        return buffer

    def close(self) -> None:
        """Let go of all files. What was read from them stays valid."""
        with self._lock:
            self._mapped.clear()
            self._plain.clear()


def _map(path: str) -> Buffer:
    with pa.memory_map(path) as file:
        return file.read_buffer()


@contextmanager
def unit_errors(name: str, manifest: Manifest, unit: int) -> Iterator[None]:
    """What goes wrong inside is a `DataError` that names source, file and unit.

    A ValueError says that stored bytes are not what they should be, and becomes a `CorruptDataError`.
    """
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, ConfigError) or (isinstance(error, DataError) and repr(name) in str(error)):
            raise
        what = f"source {name!r}: {manifest.locate(unit)}"
        if isinstance(error, ValueError) and not isinstance(error, DataError):
            raise CorruptDataError(f"{what} cannot be read: {error}") from error
        raise reading_error(what, error) from error


def decompress(data: Buffer, codec: str, *sizes: int) -> Buffer:
    """As many bytes as expected; no more than these are ever held.

    Args:
        data: A whole compressed file.
        codec: Arrow's name: gzip, bz2, zstd, brotli, snappy, ...
        sizes: Bytes that it may have decompressed; the first, of snappy.

    Raises:
        ValueError: It is broken, or has another size.
    """
    try:
        if codec == "snappy":  # has no frames, and Arrow no stream of it
            plain = pa.Codec(cast("Any", codec)).decompress(data, sizes[0])
        else:
            with pa.CompressedInputStream(pa.BufferReader(data), cast("Any", codec)) as stream:
                plain = cast("Any", stream).read_buffer(max(sizes) + 1)
    except (OSError, pa.ArrowException) as error:  # of memory: nothing but the bytes can be at fault
        raise ValueError(f"it cannot be decompressed: {error}") from error
    if plain.size not in sizes:
        limit = max(sizes)
        more = "more than " if plain.size > limit else ""
        raise ValueError(f"it holds {more}{min(plain.size, limit)} bytes when decompressed, not {sizes[0]}")
    return plain
