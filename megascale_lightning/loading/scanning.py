"""`SourceScanner`: reads a source as a loader does, in stored order, and counts what becomes of its records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from megascale_lightning.errors import CorruptDataError
from megascale_lightning.loading.partmaker import LoadedSource, PartMaker
from megascale_lightning.loading.quarantine import WHOLE_UNIT
from megascale_lightning.loading.reasons import KEPT, REASONS
from megascale_lightning.loading.runs import BATCHED_RECORDS, cut_block
from megascale_lightning.loading.samplemaker import SampleMaker
from megascale_lightning.loading.tokenmaker import TokenMaker
from megascale_lightning.loading.transforms import Failed
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.order import Segment, num_windows
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.sources.stores.plaintext import codec_of
from megascale_lightning.types import MetaBlock, PartKey

__all__ = ["SLICE_BYTES", "BadRow", "RowCount", "Scan", "SourceScanner"]

_SPREAD: Final = 8
"""Units that a sample of records is taken from."""
_RUN: Final = 32
"""Records between two looks at the clock; a `transform_batched` gets as many as in a run."""
SLICE_BYTES: Final = 1 << 20
"""Stored bytes that are read at once to look at some records."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that cannot be read or transformed; all of a unit, or what is left of it, where `row` is -1."""

    unit: int
    row: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RowCount:
    """Records of an epoch."""

    rows: int
    is_exact: bool
    """False: estimated from the units that were counted."""
    is_least: bool = False
    """There are at least so many: how many more cannot be told without reading on."""


@dataclass(slots=True)
class Scan:
    """What was found of the records looked at."""

    is_complete: bool = False
    """Every record was looked at."""
    ran_out: bool = False
    """The time was up before all that were asked for."""
    records: int = 0
    units: set[int] = field(default_factory=set)
    lengths: Counter[int] = field(default_factory=Counter)
    """Length of a good sample, before anything is cut -> how many have it."""
    codes: Counter[str] = field(default_factory=Counter)
    """Reason -> records that are dropped for it; overlong samples are in `lengths`."""
    bad: list[BadRow] = field(default_factory=list)


class _Scanning(PartMaker):
    """Mixed into a maker of parts: keeps what is wrong, and may be given the records to look at."""

    given: RecordBlock | None = None
    """Makes a part of these, whatever its key is."""
    scan: Scan

    def _blocks(self, key: PartKey) -> Iterator[tuple[RecordBlock, bool]]:
        if self.given is not None:
            yield self.given, False
        else:
            yield from super()._blocks(key)

    def _settle(self, block: RecordBlock, failures: Mapping[int, Failed], epoch: int) -> None:
        bad = [(index, failures[index]) for index in sorted(failures) if failures[index].message]
        for index, failed in bad[:1] if block.is_lost else bad:
            row = WHOLE_UNIT if block.is_lost else block.row_start + index
            self.scan.bad.append(BadRow(block.unit, row, REASONS[failed.reason], failed.message))

    def read(self, unit: int, start: int, stop: int) -> RecordBlock:
        """Records of a unit, failed ones in place of broken bytes."""
        with self._placing(unit):
            try:
                return self._reader.read(unit, start, stop)
            except CorruptDataError as error:
                return self._lost(Segment(unit, start, stop), 0, error)

    def read_slice(self, unit: int, index: int, stream: str) -> tuple[RecordBlock, bool]:
        """A slice of a unit, one failed record in place of broken bytes."""
        with self._placing(unit):
            try:
                return self._reader.read_epoch_slice(unit, index, self._part_bytes, (self._seed, stream, 0))
            except CorruptDataError as error:
                return self._lost(Segment(unit, 0, -1), 0, error), True


class _TokenScanner(_Scanning, TokenMaker):
    pass


class _SampleScanner(_Scanning, SampleMaker):
    pass


class SourceScanner:
    """Looks at the records of one source, whatever `on_error` says of them. Not thread-safe.

    Args:
        loaded: The source.
        rows: Of its stream.
        stream: Name of the stream.
        seed: Of the run; transforms draw what they draw in its first epoch.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part: what is held at once where all records are looked at.
    """

    def __init__(
        self, loaded: LoadedSource, rows: Rows, *, stream: str, seed: int, window_units: int, part_bytes: int
    ) -> None:
        # Split, an overlong sample keeps its length; skipped, a bad record does not end the scan.
        source = replace(
            loaded.source, shuffle=False, on_error="skip", overlong="split", together=None, executor="inline"
        )
        self._loaded = replace(loaded, source=source, quarantine=None)
        self._manifest = loaded.manifest
        self._rows = rows
        self._stream = stream
        self._seed = seed
        self._window_units = window_units
        self._part_bytes = part_bytes

    def scan_all(self) -> Scan:
        """Look at every record, part by part.

        Raises:
            DataError: A unit cannot be read now, or the transform gives what no `on_error` covers.
        """
        maker = self._maker(self._part_bytes)
        scan = maker.scan
        try:
            for window in range(num_windows(self._manifest, self._window_units)):
                part, is_last = 0, False
                while not is_last:
                    meta = maker.make(PartKey(self._stream, 0, 0, window, part)).meta
                    self._count(scan, meta)
                    part, is_last = part + 1, meta.last_in_window
        finally:
            maker.close()
        scan.is_complete = True
        return scan

    def scan_some(self, limit: int, budget_s: float) -> Scan:
        """Look at the first records of some units all over the source.

        Args:
            limit: Records at most.
            budget_s: Seconds after which nothing further is begun.

        Raises:
            DataError: As in `scan_all`.
        """
        maker = self._maker(SLICE_BYTES)
        scan = maker.scan
        size = _RUN if self._loaded.source.transform_batched is None else BATCHED_RECORDS
        end = time.monotonic() + budget_s
        chosen = sorted(self._spread(_SPREAD))
        whole = True
        try:
            for position, unit in enumerate(chosen):
                if not self._manifest.units[unit]["rows"]:
                    continue
                quota = -(-(limit - scan.records) // (len(chosen) - position))
                if quota <= 0:
                    return scan
                is_last = False
                for block, is_last in self._records(maker, unit, quota):  # noqa: B007 - the last one counts
                    for cut in cut_block(block, size):
                        if scan.records and time.monotonic() > end:
                            scan.ran_out = True
                            return scan
                        maker.given = cut
                        self._count(scan, maker.make(PartKey(self._stream, 0, 0, 0, 0)).meta)
                whole &= is_last
        finally:
            maker.close()
        scan.is_complete = whole and len(chosen) == self._manifest.num_units
        return scan

    def count(self, budget_s: float) -> RowCount:
        """How many records there are: as listed, or counted, or estimated from some units, which are read.

        Args:
            budget_s: Seconds after which no further unit is read.

        Raises:
            DataError: A unit cannot be read now.
        """
        units, known = self._manifest.units, self._manifest.num_records
        if known >= 0:
            return RowCount(known, is_exact=True)
        listed = units["rows"] >= 0
        rows, size, rest = int(units["rows"][listed].sum()), int(units["bytes"][listed].sum()), units["bytes"][~listed]
        maker = self._maker(SLICE_BYTES)
        end = time.monotonic() + budget_s
        counted = 0
        try:
            for unit in [unit for unit in self._spread(len(units)) if not listed[unit]]:
                found, read, ended = self._count_unit(maker, unit, end)
                rows, size, counted = rows + found, size + read, counted + ended
                if time.monotonic() > end:
                    break
        finally:
            maker.close()
        if counted == len(rest):
            return RowCount(rows, is_exact=True)
        if not size or self._manifest.format == "iterable":
            return RowCount(rows, is_exact=False, is_least=True)
        return RowCount(round(rows * int(units["bytes"].sum()) / size), is_exact=False)

    def _count_unit(self, maker: _Scanning, unit: int, end: float) -> tuple[int, int, bool]:
        """Records, stored bytes that they take (0: not known), and whether the unit was read to its end."""
        entry = self._manifest.units[unit]
        if not self._manifest.sliced:
            return maker.read(unit, 0, -1).num_rows, int(entry["bytes"]), True
        rows, index, is_last = 0, 0, False
        while not is_last and (index == 0 or time.monotonic() < end):
            block, is_last = maker.read_slice(unit, index, self._stream)
            rows, index = rows + block.num_rows, index + 1
        if is_last:
            return rows, int(entry["bytes"]), True
        is_plain = codec_of(self._manifest.files[int(entry["file"])].path) is None
        return rows, index * SLICE_BYTES if is_plain else 0, False

    def _records(self, maker: _Scanning, unit: int, quota: int) -> Iterator[tuple[RecordBlock, bool]]:
        """The first records of a unit, each block with whether it reaches the end of the unit."""
        if not self._manifest.sliced:
            known = int(self._manifest.units[unit]["rows"])
            # One more than asked for tells whether there are more.
            block = maker.read(unit, 0, quota + 1 if known < 0 else min(quota, known))
            yield next(cut_block(block, quota)), block.num_rows <= quota if known < 0 else quota >= known
            return
        index, is_last = 0, False
        while not is_last and quota > 0:
            block, is_last = maker.read_slice(unit, index, self._stream)
            first = next(cut_block(block, quota))
            yield first, is_last and first.num_rows == block.num_rows
            quota, index = quota - first.num_rows, index + 1

    def _spread(self, number: int) -> list[int]:
        """So many units in an order that is spread over the source at any time: both ends, the middle, ..."""
        total = self._manifest.num_units
        if number < total:
            return sorted({round(at) for at in np.linspace(0, total - 1, number)})
        return _halved(total)

    def _maker(self, part_bytes: int) -> _Scanning:
        kind: Callable[..., _Scanning] = _SampleScanner if isinstance(self._rows, CollatedRows) else _TokenScanner
        maker = kind(
            self._loaded,
            self._rows,
            seed=self._seed,
            window_units=self._window_units,
            part_bytes=part_bytes,
            pool=FilePool(),
        )
        maker.scan = Scan()
        return maker

    def _count(self, scan: Scan, meta: MetaBlock) -> None:
        pieces, first = meta.pieces, np.flatnonzero(meta.first)
        if not len(pieces):
            return
        lengths, codes = np.add.reduceat(pieces["length"].astype(np.int64), first), meta.reason[first]
        scan.records += len(first)
        scan.units.update(np.unique(pieces["unit"]).tolist())
        scan.lengths.update(lengths[codes == KEPT].tolist())
        scan.codes.update(REASONS[code] for code in codes.tolist() if code != KEPT)


def _halved(n: int) -> list[int]:
    """0 to n - 1, the first few of which are spread over all."""
    bits = max(n - 1, 1).bit_length()
    found = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(1 << bits))
    return [number for number in found if number < n]
