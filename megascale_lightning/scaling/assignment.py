"""`SlotAssignment`: which loader reads which part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megascale_lightning.types import PartKey

__all__ = ["SlotAssignment"]


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """Sources are dealt to loaders in turn, over all streams; spare loaders become further readers of a source.

    A source with k loaders gives window i to its loader i mod k. Who reads a part changes no sample: any loader serves
    any part.
    """

    num_loaders: int
    num_sources: Mapping[str, int]
    """Stream -> its number of sources, in the order of the streams."""

    def __call__(self, key: PartKey) -> str:
        """Name of the loader role for a part."""
        total = sum(self.num_sources.values())
        first = self._index(key) % self.num_loaders
        extra = max((self.num_loaders - 1 - first) // total, 0)
        return f"loader/{first + total * (key.window % (extra + 1))}"

    def _index(self, key: PartKey) -> int:
        before = 0
        for stream, count in self.num_sources.items():
            if stream == key.stream:
                return before + key.source
            before += count
        raise KeyError(key.stream)
