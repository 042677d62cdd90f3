"""`Microbatches`: one pass of a loader, which holds no position of its own before its first `next()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megascale_lightning.client.reader import Reader

__all__ = ["Microbatches"]


class Microbatches(Iterator[dict[str, Any]]):
    """Ends with the stream, or with an epoch that it did not begin at the end of.

    Args:
        fetch: `fetch(iterator, reader)` gives the next microbatch, and the reader that it is from; None opens one.
        at_epoch_end: Whether the loader stands between two epochs.
    """

    def __init__(
        self,
        fetch: Callable[[object, Reader | None], tuple[dict[str, Any], Reader]],
        at_epoch_end: Callable[[], bool],
    ) -> None:
        self._fetch = fetch
        self._at_epoch_end = at_epoch_end
        self._reader: Reader | None = None
        self._done = False

    def __next__(self) -> dict[str, Any]:
        if self._done:
            raise StopIteration
        if self._reader is not None and self._at_epoch_end():
            self._done = True
            raise StopIteration
        try:
            batch, self._reader = self._fetch(self, self._reader)
        except StopIteration:
            self._done = True
            raise
        return batch
