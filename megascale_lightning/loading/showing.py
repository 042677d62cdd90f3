"""`SampleShower`: one sample by its id, raw and transformed, as it is in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.loading.batched import BatchRunner
from megascale_lightning.loading.finding import check_place
from megascale_lightning.loading.joins import make_record_reader
from megascale_lightning.loading.partmaker import LoadedSource
from megascale_lightning.loading.partners import Partners
from megascale_lightning.loading.runs import BATCHED_RECORDS, cut_block
from megascale_lightning.loading.transforms import Failed, SampleRunner, failure_of
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.order import Segment, num_windows, window_parts, window_units_of
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.records import RecordBlock, SourceReader

__all__ = ["SampleShower", "ShownSample"]


@dataclass(frozen=True)
class ShownSample:
    """One record and what became of it."""

    where: str
    """Source, file, unit, row and epoch, for people."""
    raw: Any
    """The record as read, with what is joined to it. Of one that could not be read, the bytes as stored, or None."""
    _transform: Callable[[], Any] = field(repr=False)

    @property
    def transformed(self) -> Any:
        """What the transform gives for the record; None where it drops it. It runs anew at each access.

        Raises:
            DataError: The record cannot be read, or the transform raises; chained to what that raised.
        """
        try:
            found = self._transform()
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error
        if not isinstance(found, Failed):
            return found
        if not found.message:
            return None
        raise DataError(f"{self.where}: {found.message}") from found.error


class SampleShower:
    """Reads single records of one source, and transforms them with the random numbers that they have in a run.

    Args:
        loaded: The source.
        rows: Of the stream.
        stream: Its name.
        seed: Of the run.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part.
    """

    def __init__(
        self, loaded: LoadedSource, rows: Rows, *, stream: str, seed: int, window_units: int, part_bytes: int
    ) -> None:
        self._source = loaded.source
        self._manifest = loaded.manifest
        self._dicts_only = not isinstance(rows, CollatedRows)
        self._stream = stream
        self._seed = seed
        self._window_units = window_units
        self._part_bytes = part_bytes

    def show(self, epoch: int, unit: int, row: int, start: int = 0, stop: int = -1) -> ShownSample:
        """The sample, or that of which [start, stop) is a piece.

        Raises:
            ConfigError: There is no such epoch, unit or row.
            DataError: The unit cannot be read.
        """
        name = self._source.name
        check_place(self._source, self._manifest.num_units, epoch, unit)
        columns = self._source.read_columns if self._source.is_transformed or self._source.joins else None
        reader = make_record_reader(self._source, self._manifest, columns)
        try:
            block = self._block(reader, epoch, unit, row)
            index = row - block.row_start
            if not 0 <= index < block.num_rows:
                raise ConfigError(f"source {name!r}: unit {unit} has no row {row}: {self._size_text(unit, block)}")
            where = f"source {name!r}, {self._manifest.locate(unit, row)}, epoch {epoch}"
            if stop >= 0:
                where += f", tokens {start} to {stop - 1}"
            return ShownSample(where, self._raw(block, index, epoch), lambda: self._transformed(block, index, epoch))
        finally:
            reader.close()

    def _size_text(self, unit: int, block: RecordBlock) -> str:
        rows = int(self._manifest.units[unit]["rows"])
        return f"its rows are 0 to {(rows if rows >= 0 else block.row_start + block.num_rows) - 1}"

    def _block(self, reader: SourceReader, epoch: int, unit: int, row: int) -> RecordBlock:
        """Records with the wanted one among them, if it is there: the run that it is transformed in."""
        if self._manifest.sliced:
            place = (self._seed, self._stream, epoch)
            block, is_last, index = *reader.read_epoch_slice(unit, 0, self._part_bytes, place), 0
            while not is_last and row >= block.row_start + block.num_rows:
                index += 1
                block, is_last = reader.read_epoch_slice(unit, index, self._part_bytes, place)
        elif self._source.transform_batched is not None:
            segment = self._segment(epoch, unit, row)
            block = reader.read(unit, segment.row_start, segment.row_stop)
        else:
            return reader.read(unit, row, row + 1) if row >= 0 else reader.read(unit, 0, 1)
        if self._source.transform_batched is not None:
            runs = list(cut_block(block, BATCHED_RECORDS))
            block = next((run for run in runs if row < run.row_start + run.num_rows), runs[-1])
        return block

    def _segment(self, epoch: int, unit: int, row: int) -> Segment:
        """The records of the unit that a part holds together with the row; the last where there is no such row."""
        order = (self._manifest, self._source.name, self._stream, self._seed, epoch)
        for window in range(num_windows(self._manifest, self._window_units)):
            if unit in window_units_of(*order, window, self._window_units, self._source.shuffle):
                parts = window_parts(*order, window, self._window_units, self._part_bytes, self._source.shuffle)
                found = self._settled(unit, [segment for part in parts for segment in part if segment.unit == unit])
                return next((one for one in found if one.row_stop < 0 or row < one.row_stop), found[-1])
        raise AssertionError("every unit is in a window")

    def _settled(self, unit: int, segments: list[Segment]) -> list[Segment]:
        """The segments of a unit as they are read, where records stay together."""
        together = self._source.together
        if together is None:
            return segments
        partners = Partners(self._source, self._manifest, make_reader(self._source, self._manifest, [together]))
        try:
            found = [one for segment in segments for one in partners.settle(segment) if one.unit == unit]
        finally:
            partners.close()
        # What comes before them belongs to the last group of the unit before.
        return [Segment(unit, 0, found[0].row_start if found else -1), *found]

    def _raw(self, block: RecordBlock, index: int, epoch: int) -> Any:
        if index in block.unpaired:
            block = replace(block, failures={})
        elif index in block.failures:
            return block.raw.get(index)
        plain = replace(self._source, transform=None, transform_batched=None)
        (found,) = SampleRunner(plain, self._seed, dicts_only=False).run_each(
            block, [index], epoch, lambda _, record: record
        )
        if isinstance(found, Failed):
            place = self._manifest.locate(block.unit, block.row_start + index)
            raise DataError(f"source {plain.name!r}, {place}: {found.message}") from found.error
        return found

    def _transformed(self, block: RecordBlock, index: int, epoch: int) -> Any:
        if index in block.failures:
            return failure_of(block, index)
        if self._source.transform_batched is not None:
            runner = BatchRunner(self._source, self._seed, dicts_only=self._dicts_only)
            return runner.run(block, epoch).samples()[index]
        single = SampleRunner(self._source, self._seed, dicts_only=self._dicts_only)
        (found,) = single.run_each(block, [index], epoch, lambda _, sample: sample)
        return found
