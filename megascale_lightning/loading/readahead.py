"""`ReadAhead`: makes the part that comes next while those who asked for the present one are still at it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from megascale_lightning.loading.executors import DaemonThreads
from megascale_lightning.types import PartKey

__all__ = ["ReadAhead"]

_KNOWN: Final = 4
"""Parts of a source of which is known what comes behind them: old ones are read again, when they are taken late."""


@dataclass(slots=True)
class _Stand:
    """Where one source is."""

    asked: PartKey | None = None
    """What was asked for last."""
    begun: PartKey | None = None
    """What was begun for it."""
    read: dict[PartKey, PartKey | None] = field(default_factory=dict)
    """Parts that were read, each with the one behind it."""


class ReadAhead:
    """Begins the part behind the one that was asked for last, as soon as that is read. Thread-safe.

    Workers that encode then go from one part to the next, whose records are read while they are at the last of those
    before. It stays one part ahead of what was asked for, and makes two at a time at most, the first of which may be
    asked for and almost done. An error is left to whoever asks for the part.

    Args:
        make: Makes a part, or finds that it is there.
        has_room: Whether there is room for a part; asked when it is begun.
    """

    def __init__(self, make: Callable[[PartKey], Any], has_room: Callable[[PartKey], bool]) -> None:
        self._make = make
        self._has_room = has_room
        self._stands: dict[tuple[str, int], _Stand] = {}
        self._lock = threading.Lock()
        self._threads = DaemonThreads("megascale-read-ahead")
        self._threads.reserve(2)

    def asked(self, key: PartKey) -> None:
        """Somebody wants this part."""
        with self._lock:
            stand = self._stand(key)
            if stand.asked != key:
                stand.asked, stand.begun = key, None
            self._go_on(stand)

    def read(self, key: PartKey, following: PartKey | None) -> None:
        """All records of a part are read; `following` is the part behind it, if there is one."""
        with self._lock:
            stand = self._stand(key)
            stand.read.pop(key, None)
            stand.read[key] = following
            while len(stand.read) > _KNOWN:
                del stand.read[next(iter(stand.read))]
            self._go_on(stand)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.close()

    def _stand(self, key: PartKey) -> _Stand:
        return self._stands.setdefault((key.stream, key.source), _Stand())

    def _go_on(self, stand: _Stand) -> None:
        following = None if stand.asked is None else stand.read.get(stand.asked)
        if following is not None and stand.begun != following:
            stand.begun = following
            self._threads.submit(self._begin, stand, following)

    def _begin(self, stand: _Stand, key: PartKey) -> None:
        with self._lock:
            if stand.begun != key:
                return  # asked for meanwhile, and perhaps let go again
        if self._has_room(key):
            self._make(key)
