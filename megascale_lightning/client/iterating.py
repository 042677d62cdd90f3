"""`Microbatches`: one pass of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megascale_lightning.client.reader import StreamReader

if TYPE_CHECKING:
    from megascale_lightning.client.loader import MegaScaleLoader

__all__ = ["Microbatches"]


class Microbatches(Iterator[dict[str, Any]]):
    """One pass of a loader; it holds no position of its own before its first `next()`."""

    def __init__(self, loader: MegaScaleLoader) -> None:
        self._loader = loader
        self._reader: StreamReader | None = None
        self._done = False

    def __next__(self) -> dict[str, Any]:
        if self._done:
            raise StopIteration
        mid_step = self._loader.last_info is not None and not self._loader.last_info.is_last_in_step
        if self._reader is not None and not mid_step and self._loader._at_epoch_end():
            self._done = True
            raise StopIteration
        try:
            batch, self._reader = self._loader._next(self, self._reader)
        except StopIteration:
            self._done = True
            raise
        return batch
