"""`DiskCache`: blocks of remote files on the disk of this machine, shared by all its processes."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megascale_lightning.sources.stores.secrets import strip_signature

if TYPE_CHECKING:
    from megascale_lightning.sources.stores.storage import FileInfo

__all__ = ["BLOCK_BYTES", "DiskCache"]

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 4 << 20

_CHECK_BYTES: Final = 4
_KEPT_SHARE: Final = 0.9
"""Of the limit; what is used least recently goes until so much is left, so that not every block looks through all."""
_ABANDONED_S: Final = 600.0
"""A temporary file of that age was left by a process that died."""


@dataclass(eq=False)
class DiskCache:
    """A folder of fixed-size blocks, each with a checksum; those used least recently go when the limit is reached.

    A block is found by the store, the file's path without its signature, its size and when it was written: a file that
    changed has other blocks. A damaged block is read anew. Where the disk is full or cannot be written, reading goes on
    without. Picklable; processes meet in the folder alone.
    """

    folder: str
    """Made when it is missing, readable for this user alone."""
    max_bytes: int
    """Of all blocks together; each process may have one more in the making."""
    block_bytes: int = BLOCK_BYTES
    _failed: bool = field(default=False, repr=False)

    def read(self, info: FileInfo, start: int, stop: int, fetch: Callable[[int, int], bytes], place: str = "") -> bytes:
        """Bytes [start, stop) of a file.

        Args:
            info: The file.
            start: First byte.
            stop: Behind the last byte; at most its size.
            fetch: Gives the bytes [start, stop) of the store.
            place: Names the store where the path does not.
        """
        key = hashlib.sha256(
            f"{place}\0{strip_signature(info.path)}\0{info.size}\0{info.mtime_ns}\0{self.block_bytes}".encode()
        ).hexdigest()
        chunks = []
        for index in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            begin = index * self.block_bytes
            block = self._block(key, index, begin, min(begin + self.block_bytes, info.size), fetch)
            chunks.append(block[max(start - begin, 0) : stop - begin])
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _block(self, key: str, index: int, start: int, stop: int, fetch: Callable[[int, int], bytes]) -> bytes:
        path = Path(self.folder) / "blocks" / key[:2] / f"{key}-{index}"
        found = _load(path, stop - start)
        if found is not None:
            return found
        data = fetch(start, stop)
        if not self._failed and len(data) + _CHECK_BYTES <= self.max_bytes:
            try:
                self._store(path, data)
            except OSError as error:
                self._failed = True
                logger.warning("the cache in %s is given up, and files are read from afar: %s", self.folder, error)
        return data

    def _store(self, path: Path, data: bytes) -> None:
        os.makedirs(self.folder, mode=0o700, exist_ok=True)  # `mkdir` gives its mode to the last folder alone
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = path.with_name(f"{uuid.uuid4().hex}.tmp")
        try:
            made.write_bytes(data + _check(data))
            with self._locked():
                if not path.exists():
                    self._make_room(len(data) + _CHECK_BYTES)
                made.replace(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(Path(self.folder) / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, num_bytes: int) -> None:
        """Count a new block, and drop old ones where it would be too much; under the lock."""
        count = Path(self.folder) / "bytes"
        try:
            used = int(count.read_text())
        except (OSError, ValueError):
            used = self._shrink(self.max_bytes)
        if used + num_bytes > self.max_bytes:
            used = self._shrink(min(int(self.max_bytes * _KEPT_SHARE), self.max_bytes - num_bytes))
        count.write_text(str(used + num_bytes))

    def _shrink(self, limit: int) -> int:
        """Drop blocks, those used least recently first, until at most `limit` bytes are left; the bytes left."""
        blocks, used = [], 0
        for path in (Path(self.folder) / "blocks").glob("*/*"):
            try:
                stat = path.stat()
                if path.suffix == ".tmp":
                    if time.time() - stat.st_mtime > _ABANDONED_S:
                        path.unlink()
                    continue
            except FileNotFoundError:
                continue
            blocks.append((stat.st_mtime_ns, stat.st_size, path))
            used += stat.st_size
        for _, size, path in sorted(blocks):
            if used <= limit:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used


def _load(path: Path, size: int) -> bytes | None:
    """The block, which is used just now; None where there is none, or it is damaged."""
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    found, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    return found if len(found) == size and check == _check(found) else None


def _check(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECK_BYTES, "little")
