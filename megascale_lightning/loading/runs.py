"""A run: consecutive records of one block that are transformed together, wherever that happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from megascale_lightning.sources.records import RecordBlock

__all__ = ["BATCHED_RECORDS", "COLLATED_RECORDS", "TOKEN_RECORDS", "Run", "cut_block"]

_V = TypeVar("_V")

BATCHED_RECORDS: Final = 256
"""Records that a `transform_batched` gets at most. What it draws depends on this cut: part of the order."""
TOKEN_RECORDS: Final = 250
"""Records of a run where each is transformed by itself, for packed and padded rows."""
COLLATED_RECORDS: Final = 32
"""The same for collated rows, whose samples may be pictures."""


@dataclass(frozen=True, slots=True)
class Run:
    """Records to be transformed in one go, in one place."""

    block: RecordBlock
    epoch: int
    indices: Sequence[int] | None = None
    """Those of the block that are wanted; None: all."""

    @property
    def wanted(self) -> Sequence[int]:
        """Indices in the block."""
        return range(self.block.num_rows) if self.indices is None else self.indices


def cut_block(block: RecordBlock, size: int) -> Iterator[RecordBlock]:
    """The block in blocks of at most `size` records, the cut counted from its first; an empty one as it is."""
    if block.num_rows <= size:
        yield block
        return
    for start in range(0, block.num_rows, size):
        stop = min(start + size, block.num_rows)
        yield replace(
            block,
            row_start=block.row_start + start,
            num_rows=stop - start,
            table=None if block.table is None else block.table.slice(start, stop - start),
            objects=None if block.objects is None else _Slice(block.objects, range(start, stop)),
            failures=_shifted(block.failures, start, stop),
            raw=_shifted(block.raw, start, stop),
            unpaired=frozenset(index - start for index in block.unpaired if start <= index < stop),
        )


def _shifted(entries: Mapping[int, _V], start: int, stop: int) -> dict[int, _V]:
    return {index - start: value for index, value in entries.items() if start <= index < stop}


class _Slice(Sequence[Any]):
    """Items of another sequence, which indexing may run the user's code for."""

    def __init__(self, items: Sequence[Any], indices: range) -> None:
        self._items = items
        self._range = indices

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        return self._items[self._range[index]]
