"""`RecordBlock`: consecutive records of one unit, as a reader hands them to the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RecordBlock", "SourceReader", "block_of", "missing_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBlock:
    """Records [row_start, row_start + num_rows) of a unit: an Arrow table, or one object per record."""

    unit: int
    row_start: int
    num_rows: int
    table: pa.Table | None = None
    """Where the format is columnar."""
    objects: Sequence[Any] | None = None
    """Otherwise; None at a failed record."""
    lazy: bool = False
    """Indexing `objects` runs the user's code."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Index in the block -> what is wrong with the record, its place not included unless finer than (unit, row)."""
    raw: Mapping[int, bytes] = field(default_factory=dict)
    """Index in the block -> a failed record as stored, as far as it could be told from its neighbours."""
    unpaired: Collection[int] = frozenset()
    """Those of `failures` that could be read, and lack what `Source.join` would complete them by."""
    is_lost: bool = False
    """The bytes it would be read from are broken: every record failed, and none can be told from the next."""

    def samples(self) -> Sequence[Any]:
        """One mapping per record: numpy arrays for lists of numbers, python objects for the rest."""
        if self.objects is not None:
            return self.objects
        from megascale_lightning.sources.formats.arrowcolumns import table_rows

        assert self.table is not None
        return table_rows(self.table)


def block_of(unit: int, row_start: int, decoded: Iterable[tuple[Any, str | None, Any]]) -> RecordBlock:
    """The block of records that were decoded one by one.

    Args:
        unit: Their unit.
        row_start: Row of the first.
        decoded: Of each record its value, None if it failed; what is wrong with it, None if nothing is; and the record
            as stored: bytes, or a buffer that is copied if it failed.
    """
    objects: list[Any] = []
    failures: dict[int, str] = {}
    raw: dict[int, bytes] = {}
    for index, (value, problem, stored) in enumerate(decoded):
        objects.append(value)
        if problem is not None:
            failures[index], raw[index] = problem, bytes(stored)
    return RecordBlock(
        unit=unit, row_start=row_start, num_rows=len(objects), objects=objects, failures=failures, raw=raw
    )


def missing_key(name: str, keys: Iterable[Any]) -> str:
    """What is wrong with a record that lacks a field, for messages."""
    there = sorted(map(str, keys))
    return f"{name!r} is not among its keys {there}: correct the name, or give a transform that makes it"


class SourceReader(ABC):
    """Reads records of one source. Safe to call from several threads."""

    @abstractmethod
    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records [row_start, row_stop) of a unit; row_stop -1 is its end.

        Raises:
            ConfigError: A file lacks a column that is needed.
            DataError: The unit cannot be read; names source, file and unit.
            CorruptDataError: Its stored bytes are broken, so that reading again would fail again.
        """

    def read_slice(self, unit: int, index: int, slice_bytes: int) -> tuple[RecordBlock, bool]:
        """A slice of a unit of a sliced manifest, and whether it is the unit's last.

        Slice i holds the records that begin in bytes [i, i + 1) x `slice_bytes` of the unit's plain content; it may be
        empty. Reading on behind the slice that was read last costs nothing extra; going back starts over.

        Raises:
            DataError: The unit cannot be read; names source, file and unit.
            CorruptDataError: Its stored bytes are broken, which ends the unit where `on_error` drops what is bad.
        """
        raise TypeError(f"{type(self).__name__} reads whole units: it has no slice {index} of unit {unit}")

    def read_epoch_slice(
        self, unit: int, index: int, slice_bytes: int, epoch: tuple[str | int, ...]
    ) -> tuple[RecordBlock, bool]:
        """`read_slice` of one epoch of a run, where a unit may hold other records in the next: iterables may draw.

        Args:
            unit: See `read_slice`.
            index: See `read_slice`.
            slice_bytes: See `read_slice`.
            epoch: Names the epoch: seed, stream and number. What is drawn depends on it alone.
        """
        return self.read_slice(unit, index, slice_bytes)

    @abstractmethod
    def close(self) -> None:
        """Let go of files."""
