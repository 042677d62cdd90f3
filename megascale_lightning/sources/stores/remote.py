"""Byte ranges of one file, of this machine or of a store; and the stream over them that readers get."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from megascale_lightning.sources.stores.filesystems import modified_ns
from megascale_lightning.sources.stores.retry import RefusedError

__all__ = ["AsyncRanges", "HandleRanges", "HttpRanges", "LocalRanges", "RangeStream", "Ranges", "check_size"]

_WHOLE_BYTES: Final = 8 << 20
"""Of a file up to this size, a server that knows no ranges may send the whole."""

_LOCAL_BUFFER: Final = 1 << 20
_REMOTE_BUFFER: Final = 256 << 10
_MAX_AHEAD: Final = 4 << 20


class Ranges(ABC):
    """Reads [start, stop) of a file; anything may be raised, and then `close` and another `read` are fine."""

    buffer_bytes: int = _REMOTE_BUFFER
    """Least that is read at once."""
    ahead_bytes: int = _MAX_AHEAD
    """Most that is read ahead of a reader that goes front to back."""

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """The bytes; fewer where there are no more."""

    def close(self) -> None:
        """Let go of what is open, if anything is."""
        return


class LocalRanges(Ranges):
    """A file of this machine."""

    buffer_bytes = _LOCAL_BUFFER
    ahead_bytes = 0

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def read(self, start: int, stop: int) -> bytes:
        """See `Ranges.read`."""
        if self._file is None:
            self._file = io.FileIO(self._path)
        chunks = []
        while start < stop and (chunk := os.pread(self._file.fileno(), stop - start, start)):
            chunks.append(chunk)
            start += len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        """See `Ranges.close`."""
        if self._file is not None:
            self._file.close()
            self._file = None


class HandleRanges(Ranges):
    """A file that a filesystem opens: pyarrow's, and those of fsspec that are not asynchronous."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs, self._path, self._size = fs, path, size
        self._file: Any = None

    def read(self, start: int, stop: int) -> bytes:
        """See `Ranges.read`."""
        if self._file is None:
            file = self._fs.open(self._path, "rb")
            try:
                check_size(_size_of(file), self._size)
            except BaseException:
                file.close()
                raise
            self._file = file
        self._file.seek(start)
        chunks, left = [], stop - start
        while left > 0 and (chunk := self._file.read(left)):
            chunks.append(bytes(chunk))
            left -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        """See `Ranges.close`."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _size_of(file: Any) -> int | None:
    size = getattr(file, "size", None)
    try:
        size = size() if callable(size) else size
    except (OSError, TypeError, ValueError):
        return None
    return size if isinstance(size, int) else None


class AsyncRanges(Ranges):
    """A file of an asynchronous filesystem of fsspec (s3, gcs, abfs, ...): a request each, no open file."""

    def __init__(self, fs: Any, path: str, check: Callable[[], object]) -> None:
        self._fs, self._path = fs, path
        self._check = check

    def read(self, start: int, stop: int) -> bytes:
        """See `Ranges.read`."""
        self._check()
        return bytes(self._fs.cat_file(self._path, start=start, end=stop))


class HttpRanges(Ranges):
    """A file of a web server: a GET with Range each, over the connections that all files share."""

    def __init__(self, fs: Any, url: str, size: int, mtime_ns: int) -> None:
        self._fs, self._url = fs, url
        self._size, self._mtime_ns = size, mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        """See `Ranges.read`."""
        from fsspec.asyn import sync

        return bytes(sync(self._fs.loop, self._get, start, stop))

    async def _get(self, start: int, stop: int) -> bytes:
        settings = dict(self._fs.kwargs)
        headers = {**settings.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        session = await self._fs.set_session()
        async with session.get(self._fs.encode_url(self._url), headers=headers, **settings) as response:
            if response.status == 416:
                raise RefusedError(f"it has fewer than the {self._size} bytes it had {_CHANGED}")
            self._fs._raise_not_found_for_status(response, self._url)
            said = response.headers
            whole = response.status != 206
            size = said.get("Content-Length", "") if whole else said.get("Content-Range", "").rpartition("/")[2]
            check_size(int(size) if size.isdigit() else None, self._size)
            modified = modified_ns(said)
            if self._mtime_ns and modified and modified != self._mtime_ns:
                raise RefusedError(f"it was written since, and was older {_CHANGED}")
            if whole and self._size > _WHOLE_BYTES and stop - start < self._size:
                raise RefusedError(
                    "the server answers a request for a range with the whole file; it must know HTTP ranges "
                    "(Accept-Ranges: bytes): use another server, or copy the files here"
                )
            data: bytes = await response.read()
            return data[start:stop] if whole else data


_CHANGED: Final = "when the run began; files may not change during a run: restore it, or start a new run"


def check_size(size: int | None, expected: int) -> None:
    """Refuse a file of another size than when the run began; a size of None is not known. Raises: RefusedError."""
    if size is not None and size != expected:
        raise RefusedError(f"it has {size} bytes and had {expected} {_CHANGED}")


def _closed(start: int, stop: int) -> bytes:
    raise ValueError(f"bytes {start} to {stop} were asked of a closed file")


class RangeStream(io.RawIOBase):
    """A seekable file over byte ranges; reads ahead, more and more, while it is read front to back.

    Args:
        fetch: Gives exactly the bytes [start, stop), or raises.
        size: Of the file.
        ahead_bytes: Most that is read ahead.
        close: Called once.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], size: int, ahead_bytes: int, close: Callable[[], object]
    ) -> None:
        super().__init__()
        self._fetch, self._size, self._ahead_bytes = fetch, size, ahead_bytes
        self._on_close: Callable[[], object] | None = close
        self._position = 0
        self._held, self._held_at = b"", 0
        self._ahead = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; reads nothing."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or a beginning of it; 0 at the end."""
        view = memoryview(buffer).cast("B")
        want = min(len(view), self._size - self._position)
        if want <= 0:
            return 0
        at = self._position - self._held_at
        if not 0 <= at < len(self._held):
            self._fill(want)
            at = 0
        got = min(want, len(self._held) - at)
        view[:got] = memoryview(self._held)[at : at + got]
        self._position += got
        return got

    def readall(self) -> bytes:
        """All that is left."""
        at = self._position - self._held_at
        begin = self._held[at:] if 0 <= at < len(self._held) else b""
        start = self._position + len(begin)
        rest = self._fetch(start, self._size) if start < self._size else b""
        self._position = max(self._size, self._position)
        return begin + rest if begin else rest

    def _fill(self, want: int) -> None:
        goes_on = self._position == self._held_at + len(self._held) > 0
        self._ahead = min(max(2 * self._ahead, want), self._ahead_bytes) if goes_on else 0
        stop = min(self._position + max(want, self._ahead), self._size)
        self._held = b""  # before the next range comes
        self._held, self._held_at = self._fetch(self._position, stop), self._position

    def close(self) -> None:
        """Let go of the file."""
        on_close, self._on_close = self._on_close, None
        self._held, self._fetch = b"", _closed  # connections are not kept by a closed stream
        try:
            if on_close is not None:
                on_close()
        finally:
            super().close()
