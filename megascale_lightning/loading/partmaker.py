"""`PartMaker`: makes the parts of one source of one stream; what is common to all kinds of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import DataError
from megascale_lightning.loading.parts import Part
from megascale_lightning.loading.transforms import Failed, SampleRunner
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.order import Segment, part_permutation, window_parts, window_units_of
from megascale_lightning.sources.parquet import FilePool
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.source import Source
from megascale_lightning.types import PartKey

__all__ = ["LoadedSource", "PartMaker"]


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source and what was found of it when the run began."""

    source: Source
    manifest: Manifest


class PartMaker(ABC):
    """Makes any part of one source, the same each time. Safe to call from several threads.

    Args:
        loaded: The source.
        rows: What is kept of a sample, and how long it may be.
        seed: Of the run.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part.
        pool: Open files, shared with other sources.
    """

    def __init__(
        self, loaded: LoadedSource, rows: Rows, *, seed: int, window_units: int, part_bytes: int, pool: FilePool
    ) -> None:
        source = loaded.source
        self.source = source
        self.runner = SampleRunner(source, seed, dicts_only=not isinstance(rows, CollatedRows))
        self._manifest = loaded.manifest
        self._rows = rows
        self._seed = seed
        self._window_units = window_units
        self._part_bytes = part_bytes
        self._reader = make_reader(source, loaded.manifest, self._columns(), pool=pool)

    @abstractmethod
    def _columns(self) -> Sequence[str] | None:
        """What is read of a record; None for all of it."""

    @abstractmethod
    def make(self, key: PartKey) -> Part:
        """Read and settle one part.

        Raises:
            DataError: A record is at fault and `on_error` is "raise", or a unit cannot be read.
        """

    def _blocks(self, key: PartKey) -> Iterator[tuple[RecordBlock, bool]]:
        """The records of a part, block after block, each with whether it ends the window; read when asked for."""
        if self._manifest.sliced:
            source = self.source
            unit = int(
                window_units_of(
                    self._manifest, source.name, key.stream, self._seed, key.epoch, key.window, 1, source.shuffle
                )[0]
            )
            with self._placing(unit):
                found = self._reader.read_slice(unit, key.part, self._part_bytes)
            yield found
            return
        segments, is_last = self._segments(key)
        for index, segment in enumerate(segments):
            with self._placing(segment.unit):
                block = self._reader.read(segment.unit, segment.row_start, segment.row_stop)
            yield block, is_last and index == len(segments) - 1

    def _segments(self, key: PartKey) -> tuple[list[Segment], bool]:
        source = self.source
        order = (self._manifest, source.name, key.stream, self._seed, key.epoch, key.window)
        parts = window_parts(*order, self._window_units, self._part_bytes, source.shuffle)
        if not 0 <= key.part < len(parts):
            raise IndexError(f"part {key.part} of {key}: the window has {len(parts)}")
        return parts[key.part], key.part == len(parts) - 1

    def _permutation(self, key: PartKey, n: int) -> npt.NDArray[np.int64]:
        source = self.source
        return part_permutation(n, source.name, key.stream, self._seed, key.epoch, key.window, key.part, source.shuffle)

    @contextmanager
    def _placing(self, unit: int) -> Iterator[None]:
        """Errors that do not name the source say the place of the unit."""
        try:
            yield
        except DataError as error:
            if repr(self.source.name) in str(error):
                raise
            raise DataError(f"source {self.source.name!r}, {self._manifest.locate(unit)}: {error}") from error

    def _failed(self, unit: int, row: int, failed: Failed) -> DataError:
        """What a record that failed is raised as; the caller chains `failed.error`."""
        return DataError(f'{self.locate(unit, row)}: {failed.message}; on_error="skip" drops such records')

    def locate(self, unit: int, row: int) -> str:
        """A record's source, file, unit and row, for messages."""
        return f"source {self.source.name!r}, {self._manifest.locate(unit, row)}"

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()
