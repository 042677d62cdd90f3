"""`FilePool`: files that stay open between reads, few of them, shared by the readers of one role."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar, cast

import pyarrow as pa

from megascale_lightning.errors import MegaScaleError
from megascale_lightning.sources.stores.corruption import reading_error
from megascale_lightning.sources.stores.retry import is_transient
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["MAX_OPEN_FILES", "FilePool", "OpenFile", "attempt_read"]

MAX_OPEN_FILES: Final = 16
"""An open file keeps its footer: about 1 MiB for a Parquet file of 200 columns."""


class OpenFile(Protocol):
    """What the pool keeps."""

    def close(self) -> None:
        """Let go of the file; what was read from it stays valid."""


_F = TypeVar("_F", bound=OpenFile)
_T = TypeVar("_T")


class FilePool:
    """Open files, least recently used closed first. Thread-safe; a file is open once, and serves one thread at a time.

    Of a file that is decoded front to back two threads would each decode all of it; by turns they decode it once.

    Args:
        limit: Files that stay open; one that is in use is not closed.
    """

    def __init__(self, limit: int = MAX_OPEN_FILES) -> None:
        self._limit = limit
        self._idle: OrderedDict[Hashable, tuple[OpenFile, Storage]] = OrderedDict()
        self._leased: set[Hashable] = set()
        self._turns = threading.Condition()

    @property
    def num_open(self) -> int:
        """Files open now."""
        with self._turns:
            return len(self._idle) + len(self._leased)

    @contextmanager
    def lease(self, info: FileInfo, storage: Storage, opener: Callable[[FileInfo, Storage], _F]) -> Iterator[_F]:
        """The file for one thread alone, which waits for its turn; it is closed where the block raises.

        Args:
            info: The file.
            storage: Where it lies.
            opener: Opens it; files of another opener are others.
        """
        # Two sources may mean different files by one remote path; the entry keeps its storage, and so its id.
        key = (opener, info.path, id(storage) if storage.is_remote(info.path) else None)
        with self._turns:
            self._turns.wait_for(lambda: key not in self._leased)
            found = self._idle.pop(key, None)
            self._leased.add(key)
            self._shrink()
        handle = None if found is None else cast("_F", found[0])
        is_fine = False
        try:
            if handle is None:
                handle = opener(info, storage)
            else:
                storage.check_unchanged(info)
            yield handle
            is_fine = True
        finally:
            if handle is not None and not is_fine:
                handle.close()
            with self._turns:
                self._leased.discard(key)
                if handle is not None and is_fine:
                    self._idle[key] = (handle, storage)
                self._shrink()
                self._turns.notify_all()

    def _shrink(self) -> None:
        while self._idle and len(self._idle) + len(self._leased) > self._limit:
            _, (handle, _) = self._idle.popitem(last=False)
            handle.close()

    def close(self) -> None:
        """Close what is idle."""
        with self._turns:
            idle: list[Any] = [handle for handle, _ in self._idle.values()]
            self._idle.clear()
        for handle in idle:
            handle.close()


def attempt_read(storage: Storage, what: str, call: Callable[[], _T]) -> _T:
    """The value of a call by which Arrow reads a file; made again after an error that may pass.

    Args:
        storage: Says how often, and how soon.
        what: Begins the message: source, file and unit.
        call: Reads.

    Raises:
        CorruptDataError: The bytes are broken.
        DataError: They cannot be had.
    """

    def once() -> _T:
        try:
            return call()
        except MegaScaleError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            if is_transient(error):
                raise
            raise reading_error(what, error) from error

    return storage.retry.run(once, what)
