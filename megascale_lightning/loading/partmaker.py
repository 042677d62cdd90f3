"""`PartMaker`: makes the parts of one source of one stream; what is common to all kinds of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import CorruptDataError, DataError, StateError
from megascale_lightning.loading.executors import Executors
from megascale_lightning.loading.joins import make_record_reader
from megascale_lightning.loading.partners import Partners
from megascale_lightning.loading.parts import Part
from megascale_lightning.loading.quarantine import WHOLE_UNIT, BadRecord, Quarantine, QuarantineFile, digest_of
from megascale_lightning.loading.reasons import READ_ERROR, REASONS
from megascale_lightning.loading.runs import Run
from megascale_lightning.loading.transforms import Failed, SampleRunner, show_call
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.order import Segment, num_windows, part_permutation, window_parts, window_units_of
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.diskcache import DiskCache
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.types import PartKey

__all__ = ["LoadedSource", "PartMaker"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source and what was found of it when the run began."""

    source: Source
    manifest: Manifest
    quarantine: Quarantine | None = None
    """Where its bad records are listed, if `on_error` says so."""
    cache: DiskCache | None = None
    """Keeps what is read of remote files on this machine."""


class PartMaker(ABC):
    """Makes any part of one source, the same each time. Safe to call from several threads.

    Args:
        loaded: The source.
        rows: What is kept of a sample, and how long it may be.
        seed: Of the run.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part.
        pool: Open files, shared with other sources.
        executors: Threads and processes for the user's code, shared with other sources; None makes some.
        metadata: Fields that are described: a number for each sample.
        on_read: Is called once all records of a part are read, with its key and that of the part behind it.
    """

    _needs_samples: bool = True
    """Records are seen one by one, and not only their fields as columns."""

    def __init__(
        self,
        loaded: LoadedSource,
        rows: Rows,
        *,
        seed: int,
        window_units: int,
        part_bytes: int,
        pool: FilePool,
        executors: Executors | None = None,
        metadata: Sequence[str] = (),
        on_read: Callable[[PartKey, PartKey | None], None] | None = None,
    ) -> None:
        source = loaded.source
        self.source = source
        self.runner = SampleRunner(source, seed, dicts_only=not isinstance(rows, CollatedRows))
        self._manifest = loaded.manifest
        self._rows = rows
        self._seed = seed
        self._window_units = window_units
        self._part_bytes = part_bytes
        self._metadata = tuple(metadata)
        self._on_read = on_read
        self._quarantine: QuarantineFile | None = None
        if loaded.quarantine is not None:
            self._quarantine = QuarantineFile(loaded.quarantine, source.name, loaded.manifest)
        self._executors = executors or Executors()
        self._reader = make_record_reader(
            source, loaded.manifest, self._columns(), pool=pool, cache=loaded.cache, fills=not self._needs_samples
        )
        self._partners: Partners | None = None
        if source.together is not None:
            reader = make_reader(source, loaded.manifest, [source.together], pool=pool, cache=loaded.cache)
            self._partners = Partners(source, loaded.manifest, reader)

    @abstractmethod
    def _columns(self) -> Sequence[str] | None:
        """What is read of a record; None for all of it."""

    @abstractmethod
    def make(self, key: PartKey) -> Part:
        """Read and settle one part.

        Raises:
            DataError: A record is at fault, or the bytes of a unit are broken, and `on_error` is "raise"; or a unit
                cannot be read now.
            StateError: There is no such part.
        """

    def following(self, key: PartKey, is_last: bool) -> PartKey | None:
        """The part behind another in the same epoch; None behind the last.

        Args:
            key: The part before it.
            is_last: That part ends its window.
        """
        if not is_last:
            return replace(key, part=key.part + 1)
        if key.window + 1 < num_windows(self._manifest, self._window_units):
            return replace(key, window=key.window + 1, part=0)
        return None

    def _blocks(self, key: PartKey) -> Iterator[tuple[RecordBlock, bool]]:
        """The records of a part, block after block, each with whether it ends the window; read when asked for."""
        is_last = False
        for block, is_last in self._read_blocks(key):
            yield block, is_last
        if self._on_read is not None:
            self._on_read(key, self.following(key, is_last))

    def _read_blocks(self, key: PartKey) -> Iterator[tuple[RecordBlock, bool]]:
        if self._manifest.sliced:
            source = self.source
            unit = int(
                window_units_of(
                    self._manifest, source.name, key.stream, self._seed, key.epoch, key.window, 1, source.shuffle
                )[0]
            )
            try:
                with self._placing(unit):
                    epoch = (self._seed, key.stream, key.epoch)
                    found = self._reader.read_epoch_slice(unit, key.part, self._part_bytes, epoch)
            except CorruptDataError as error:
                # Where the next slice would begin is not known, if there is one.
                found = self._lost(Segment(unit, 0, -1), key.epoch, error), True
            except IndexError as error:
                raise self._no_part(key) from error
            yield found
            return
        segments, is_last = self._segments(key)
        for index, segment in enumerate(segments):
            is_end = is_last and index == len(segments) - 1
            try:
                with self._placing(segment.unit):
                    settled = [segment] if self._partners is None else self._partners.settle(segment)
            except CorruptDataError as error:
                yield self._lost(segment, key.epoch, error), is_end
                continue
            for one in settled:
                try:
                    with self._placing(one.unit):
                        block = self._reader.read(one.unit, one.row_start, one.row_stop)
                except CorruptDataError as error:
                    block = self._lost(one, key.epoch, error)
                yield block, is_end

    def _segments(self, key: PartKey) -> tuple[list[Segment], bool]:
        source = self.source
        order = (self._manifest, source.name, key.stream, self._seed, key.epoch, key.window)
        parts = window_parts(*order, self._window_units, self._part_bytes, source.shuffle)
        if not 0 <= key.part < len(parts):
            raise self._no_part(key)
        return parts[key.part], key.part == len(parts) - 1

    def _no_part(self, key: PartKey) -> StateError:
        return StateError(
            f"source {self.source.name!r} of stream {key.stream!r} has no part {key.part} in window {key.window} of "
            f"epoch {key.epoch}: the loader state that was loaded is damaged, or was saved with other data; go on from "
            "another checkpoint"
        )

    def _permutation(self, key: PartKey, n: int) -> npt.NDArray[np.int64]:
        source = self.source
        return part_permutation(n, source.name, key.stream, self._seed, key.epoch, key.window, key.part, source.shuffle)

    @contextmanager
    def _placing(self, unit: int) -> Iterator[None]:
        """Errors that do not name the source say the place of the unit."""
        try:
            yield
        except DataError as error:
            if f"source {self.source.name!r}" in str(error):
                raise
            raise type(error)(f"source {self.source.name!r}, {self._manifest.locate(unit)}: {error}") from error

    def _placed(self, made: Iterable[tuple[Run, Callable[[], _T]]]) -> Iterator[tuple[Run, _T]]:
        """The runs with what was made of them, errors with the place of the unit."""
        for run, result in made:
            with self._placing(run.block.unit):
                found = result()
            yield run, found

    def _lost(self, segment: Segment, epoch: int, error: CorruptDataError) -> RecordBlock:
        """What stands for records whose bytes are broken: all that are known of, each of them failed, or else one."""
        unit, start = segment.unit, segment.row_start
        if self.source.on_error == "raise":
            raise CorruptDataError(f'{error}; on_error="skip" leaves out what is broken') from error
        known = int(self._manifest.units[unit]["rows"])
        count = (known if segment.row_stop < 0 else segment.row_stop) - start
        if known < 0 and segment.row_stop:
            start, count = WHOLE_UNIT, 1
        if self._quarantine is not None:
            size = int(self._manifest.units[unit]["bytes"])
            self._quarantine.add(
                [
                    BadRecord(
                        unit=unit,
                        row=WHOLE_UNIT,
                        epoch=epoch,
                        reason=REASONS[READ_ERROR],
                        message=str(error),
                        digest=None,
                        size=size,
                    )
                ]
            )
        return RecordBlock(
            unit=unit,
            row_start=start,
            num_rows=count,
            objects=[None] * count,
            failures=dict.fromkeys(range(count), str(error)),
            is_lost=True,
        )

    def _settle(self, block: RecordBlock, failures: Mapping[int, Failed], epoch: int) -> None:
        """Raise the first record that failed, or list them all, or do nothing, as `on_error` says.

        Args:
            block: What they are records of.
            failures: Index in the block -> what happened; those without a message are no failures.
            epoch: That is being read.
        """
        bad = {index: failures[index] for index in sorted(failures) if failures[index].message}
        if not bad or block.is_lost:
            return
        if self.source.on_error == "raise":
            index, failed = next(iter(bad.items()))
            raise self._failed(block.unit, block.row_start + index, failed, epoch) from failed.error
        quarantine = self._quarantine
        if quarantine is not None:
            fresh = [index for index in bad if not quarantine.lists(block.unit, block.row_start + index)]
            quarantine.add([self._bad_record(block, index, bad[index], epoch) for index in fresh])

    def _bad_record(self, block: RecordBlock, index: int, failed: Failed, epoch: int) -> BadRecord:
        digest, size = digest_of(block, index)
        return BadRecord(
            unit=block.unit,
            row=block.row_start + index,
            epoch=epoch,
            reason=REASONS[failed.reason],
            message=failed.message,
            digest=digest,
            size=size,
        )

    def _failed(self, unit: int, row: int, failed: Failed, epoch: int) -> DataError:
        """What a record that failed is raised as; the caller chains `failed.error`."""
        shown = show_call(self.source.name, epoch, unit, row)
        return DataError(
            f'{self.locate(unit, row)}: {failed.message}; {shown} shows it; on_error="skip" drops such records'
        )

    def locate(self, unit: int, row: int) -> str:
        """A record's source, file, unit and row, for messages."""
        return f"source {self.source.name!r}, {self._manifest.locate(unit, row)}"

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()
        if self._partners is not None:
            self._partners.close()
