"""Records that `Source.together` keeps in one row: who belongs to whom, and where parts are cut between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import ConfigError, CorruptDataError, DataError
from megascale_lightning.loading.reasons import KEPT, OVERLONG, PARTNER, READ_ERROR, REASONS
from megascale_lightning.rows import Rows
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.order import Segment
from megascale_lightning.sources.records import RecordBlock, SourceReader, missing_key
from megascale_lightning.sources.source import Source
from megascale_lightning.types import IntArray

__all__ = ["Partners", "check_together", "settle_partners"]

_AHEAD: Final = 64
"""Records that are looked at at once for the end of a group."""
_MOST: Final = 4096
"""Records that are looked at for it in all: behind them it is no group that somebody meant."""
_SCANNED: Final = 4096
"""Records whose ids are read at once to see whether those of a unit can be read."""
_UNKNOWN: Final = object()
"""Id of a record that cannot be read: it may belong to the records on either side, and is taken to. So a unit whose ids
are broken belongs, as a whole, to the group before it, and to that goes the group behind it."""


def check_together(source: Source, manifest: Manifest) -> None:
    """Refuse what does not say which records stand beside each other before it is read.

    Raises:
        ConfigError: The source's records cannot be kept together.
    """
    if source.together is None or not (manifest.sliced or manifest.format == "dataset"):
        return
    kind = "a dataset" if manifest.format == "dataset" else f"{manifest.format} that is read in slices"
    raise ConfigError(
        f"source {source.name!r}: together={source.together!r} is for files whose records can be looked up (Parquet, "
        f"Arrow, plain JSON Lines, ...), not for {kind}: give such files, or have one record hold all "
        "that stays together"
    )


class Partners:
    """Finds the groups of one source: consecutive records of a file with an equal id, whatever units they are in.

    A group belongs to the part and unit that its first record is in. Safe to call from several threads.

    Args:
        source: With `together`.
        manifest: Its files.
        reader: Of that column alone.
    """

    def __init__(self, source: Source, manifest: Manifest, reader: SourceReader) -> None:
        assert source.together is not None
        self._source, self._manifest, self._reader = source, manifest, reader
        self._name: str = source.together
        self._last: dict[int, list[Any]] = {}
        self._broken: set[int] = set()

    def settle(self, segment: Segment) -> list[Segment]:
        """The records from the first group that begins in the segment to the end of the last that does.

        Raises:
            DataError: A group has no end within thousands of records, or the ids cannot be read.
        """
        unit, stop = segment.unit, segment.row_stop
        at_end = stop < 0 or stop == int(self._manifest.units["rows"][unit])
        first = self._begin(unit, segment.row_start)
        last = self._begin(unit + 1, 0) if at_end else self._begin(unit, stop)
        found = [
            Segment(at, first[1] if at == first[0] else 0, last[1] if at == last[0] else -1)
            for at in range(first[0], last[0] + 1)
            if (at, 0) != last
        ]
        return [one for one in found if one.row_start != one.row_stop] or [Segment(unit, 0, 0)]

    def ids(self, block: RecordBlock) -> list[Any]:
        """What the records of a block belong to, each.

        Raises:
            DataError: A record names none, or something that is no id.
        """
        name, unread = self._name, block.failures.keys() - set(block.unpaired)
        if block.table is not None:
            ids = block.table.column(name).to_pylist()
        else:
            assert block.objects is not None
            ids = [_UNKNOWN if i in unread else self._id(block, i) for i in range(block.num_rows)]
        for index, found in enumerate(ids):
            if index in unread:
                ids[index] = _UNKNOWN
            elif not isinstance(found, Hashable):
                raise DataError(
                    f"{self._where(block, index)}: together={name!r} names ids such as numbers and texts, not a "
                    f"{type(found).__name__}"
                )
        return ids

    def continued(self, blocks: Sequence[RecordBlock], ids: Sequence[list[Any]]) -> npt.NDArray[np.bool_]:
        """Whether each record belongs to the group of the one before it: bool [records of all blocks].

        Args:
            blocks: In order; only where they are is looked at.
            ids: Of each.
        """
        found = [np.empty(0, np.bool_)]
        before: list[Any] = []
        last = None
        for block, own in zip(blocks, ids, strict=True):
            if last is not None and block.unit != last.unit:
                is_next = block.unit == last.unit + 1 and block.row_start == 0 and self._follows(block.unit)
                before = before if is_next else []
            found.append(_joined([*before, *own])[len(before) :])
            before, last = own[-1:] or before, block
        return np.concatenate(found)

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()

    def _follows(self, unit: int) -> bool:
        """Whether a unit goes on with the file of the one before it."""
        files = self._manifest.units["file"]
        return 0 < unit < len(files) and bool(files[unit] == files[unit - 1])

    def _begin(self, unit: int, row: int) -> tuple[int, int]:
        """Unit and row of the first record, from this one on, that begins a group, or a file."""
        before, start, seen = self._before(unit, row), (unit, row), 0
        while before:
            if self._is_broken(unit):
                unit, row, before = unit + 1, 0, [_UNKNOWN]
                if not self._follows(unit):
                    break
                continue
            block = self._reader.read(unit, row, row + _AHEAD)
            ids = self.ids(block)
            begins = np.flatnonzero(~_joined([*before, *ids])[1:])
            if begins.size:
                return unit, row + int(begins[0])
            row, seen, before = row + block.num_rows, seen + block.num_rows, ids[-1:] or before
            if seen > _MOST:
                raise DataError(
                    f"source {self._source.name!r}, {self._manifest.locate(*start)}: more than {_MOST} records from "
                    f"here on have an equal {self._name!r}, and together= keeps them in one row: correct the column"
                )
            if block.num_rows < _AHEAD:
                unit, row = unit + 1, 0
                if not self._follows(unit):
                    break
        return unit, row

    def _before(self, unit: int, row: int) -> list[Any]:
        """The id of the record before this one; empty where there is none in the file."""
        if row:
            return [_UNKNOWN] if self._is_broken(unit) else self.ids(self._reader.read(unit, row - 1, row))
        return self._last_of(unit - 1) if self._follows(unit) else []

    def _is_broken(self, unit: int) -> bool:
        self._last_of(unit)
        return unit in self._broken

    def _last_of(self, unit: int) -> list[Any]:
        """The id of the last record of a unit, or of one before it in the file; empty where there is none.

        All ids of the unit are read for it, once: whether they are broken must not depend on where one looks.
        """
        if unit not in self._last:
            rows = int(self._manifest.units["rows"][unit])
            found: list[Any] = []
            try:
                for start in range(0, max(rows, 1), _SCANNED):
                    block = self._reader.read(unit, start, -1 if rows < 0 else min(start + _SCANNED, rows))
                found = self.ids(block)[-1:]
            except CorruptDataError:
                self._broken.add(unit)
                found = [_UNKNOWN]
            self._last[unit] = found or self._before(unit, 0)
        return self._last[unit]

    def _id(self, block: RecordBlock, index: int) -> Any:
        assert block.objects is not None
        record = block.objects[index]
        if not isinstance(record, dict) or self._name not in record:
            keys = record if isinstance(record, dict) else ()
            raise DataError(f"{self._where(block, index)}: together: {missing_key(self._name, keys)}")
        return record[self._name]

    def _where(self, block: RecordBlock, index: int) -> str:
        return f"source {self._source.name!r}, {self._manifest.locate(block.unit, block.row_start + index)}"


def settle_partners(
    lengths: IntArray,
    codes: npt.NDArray[np.uint8],
    joined: npt.NDArray[np.bool_],
    *,
    rows: Rows,
    source: Source,
    where: Callable[[int], str],
) -> tuple[IntArray, npt.NDArray[np.uint8]]:
    """Lengths and codes of which whole groups are kept or dropped.

    Args:
        lengths: int64 [n], before any was cut or dropped.
        codes: uint8 [n], of `reasons`.
        joined: bool [n]: belongs to the group of the record before it.
        rows: What they are packed into.
        source: Its policies.
        where: Record index -> its place, for messages.

    Raises:
        DataError: A group is longer than a row under `overlong="error"`, or has lost a record under `on_error="raise"`.
    """
    groups = np.cumsum(~joined) - 1
    # Where a record cannot be read, there may be two groups in one, each of which would fit.
    totals = np.bincount(groups, rows.room(lengths))
    over = (totals > rows.capacity) & (np.bincount(groups, codes == READ_ERROR) == 0)
    over = over[groups] & (codes == KEPT)
    if over.any() and source.overlong == "error":
        at = int(np.flatnonzero(over)[0])
        raise DataError(
            f"{where(at)}: the records that stay together with it have {int(totals[groups[at]])} "
            f'tokens and a row holds {rows.capacity}; set overlong="drop", or longer rows'
        )
    codes = np.where(over, OVERLONG, codes).astype(np.uint8)
    gone = codes != KEPT
    left = (np.bincount(groups, gone) > 0)[groups] & ~gone
    if left.any() and source.on_error == "raise":
        at = int(np.flatnonzero(left)[0])
        lost = int(np.flatnonzero(gone & (groups == groups[at]))[0])
        raise DataError(
            f"{where(lost)}: this record is left out ({REASONS[codes[lost]]}), and {where(at)} stays together with it; "
            'on_error="skip" leaves out all of them'
        )
    codes = np.where(left, PARTNER, codes).astype(np.uint8)
    return np.where(codes == KEPT, lengths, 0), codes


def _joined(ids: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Whether each is of the group of the one before it: bool [n]."""
    found = np.zeros(len(ids), np.bool_)
    for at in range(1, len(ids)):
        one, other = ids[at - 1], ids[at]
        found[at] = one is _UNKNOWN or other is _UNKNOWN or (one is not None and one == other)
    return found
