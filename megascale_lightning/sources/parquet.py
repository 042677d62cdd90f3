"""Parquet: a unit is a row group; only the columns asked for are read; few files stay open."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.storage import FileInfo, Storage

__all__ = ["FORMAT", "MAX_OPEN_FILES", "FilePool", "ParquetFormat", "ParquetReader"]

MAX_OPEN_FILES: Final = 16
"""An open file keeps its footer: about 1 MiB for one of 200 columns."""

_ATTEMPTS: Final = 3


class ParquetFormat(SourceFormat):
    """A unit is a row group; `bytes` is its uncompressed stored size over all columns."""

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`."""
        needed = source.columns or (() if source.transform or source.transform_batched else ("input_ids",))

        def units_of(index: int) -> list[tuple[int, int, int, int, int]]:
            info = files[index]
            try:
                with storage.open(info) as stream:
                    footer = pq.read_metadata(stream)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"source {source.name!r}: {info.path} is no readable Parquet file: {error}") from error
            _check_columns(source.name, info, footer.schema.to_arrow_schema().names, needed)
            groups = (footer.row_group(group) for group in range(footer.num_row_groups))
            return [(index, g, g + 1, group.num_rows, group.total_byte_size) for g, group in enumerate(groups)]

        with ThreadPoolExecutor(min(8, len(files))) as threads:
            found = [unit for units in threads.map(units_of, range(len(files))) for unit in units]
        return Listing(np.array(found, UNIT))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> ParquetReader:
        """See `SourceFormat`."""
        return ParquetReader(source, manifest, columns, resources)


def _check_columns(name: str, info: FileInfo, there: Sequence[str], needed: Sequence[str]) -> None:
    missing = [column for column in needed if column not in there]
    if missing:
        raise ConfigError(
            f"source {name!r}: {info.path} has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(there)}. A `transform` can make the missing field from these"
        )


class _OpenParquet:
    """One open file, and where the last slice of a row group ended. Touched by one thread at a time."""

    def __init__(self, info: FileInfo, storage: Storage) -> None:
        storage.check_unchanged(info)
        # A local path is read by Arrow itself, without the interpreter lock.
        self._file = pq.ParquetFile(storage.open(info) if storage.is_remote(info.path) else info.path)
        self.columns: Sequence[str] = self._file.schema_arrow.names
        self._slices: _SliceCursor | None = None

    def read(self, group: int, start: int, stop: int, columns: list[str] | None) -> pa.Table:
        rows = self._file.metadata.row_group(group).num_rows
        if (start, stop) == (0, rows):
            self._slices = None
            return self._file.read_row_group(group, columns=columns, use_threads=False)
        cursor = self._slices
        if cursor is None or not cursor.goes_on(group, start, columns):
            cursor = self._slices = _SliceCursor(self._file, group, max(stop - start, 1), columns)
        table = cursor.read(start, stop)
        if stop >= rows:
            self._slices = None
        return table

    def close(self) -> None:
        self._slices = None
        self._file.close(force=True)


class _SliceCursor:
    """Decodes a large row group front to back, so that consecutive slices of it are decoded once."""

    def __init__(self, file: pq.ParquetFile, group: int, batch_size: int, columns: list[str] | None) -> None:
        self._key = (group, columns)
        self._schema = (
            file.schema_arrow if columns is None else pa.schema([file.schema_arrow.field(c) for c in columns])
        )
        self._batches = file.iter_batches(batch_size, row_groups=[group], columns=columns, use_threads=False)
        self._row = 0
        self._rest: pa.RecordBatch | None = None

    def goes_on(self, group: int, start: int, columns: list[str] | None) -> bool:
        """Whether `start` is still ahead in this row group."""
        return self._key == (group, columns) and start >= self._row

    def read(self, start: int, stop: int) -> pa.Table:
        """Rows [start, stop); `start` is not before the last `stop`."""
        found: list[pa.RecordBatch] = []
        while self._row < stop:
            batch = self._rest if self._rest is not None else next(self._batches)
            self._rest = None
            end = min(stop - self._row, batch.num_rows)
            if end < batch.num_rows:
                self._rest = batch.slice(end)
            if self._row + end > start:
                skipped = max(start - self._row, 0)
                found.append(batch.slice(skipped, end - skipped))
            self._row += end
        return pa.Table.from_batches(found, None if found else self._schema)


class FilePool:
    """Open Parquet files shared by the readers of one role, least recently used closed first. Thread-safe."""

    def __init__(self, limit: int = MAX_OPEN_FILES) -> None:
        self._limit = limit
        self._idle: OrderedDict[str, _OpenParquet] = OrderedDict()
        self._leased = 0
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """Files open now."""
        with self._lock:
            return len(self._idle) + self._leased

    @contextmanager
    def lease(self, info: FileInfo, storage: Storage) -> Iterator[_OpenParquet]:
        """The file for one thread alone; it is closed where the block raises."""
        with self._lock:
            handle = self._idle.pop(info.path, None)
            self._leased += 1
            self._shrink()
        try:
            if handle is None:
                handle = _OpenParquet(info, storage)
            yield handle
        except BaseException:
            if handle is not None:
                handle.close()
            with self._lock:
                self._leased -= 1
            raise
        with self._lock:
            self._leased -= 1
            twin = self._idle.pop(info.path, None)
            self._idle[info.path] = handle
            self._shrink()
        if twin is not None:
            twin.close()

    def _shrink(self) -> None:
        while self._idle and len(self._idle) + self._leased > self._limit:
            self._idle.popitem(last=False)[1].close()

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
        for handle in idle:
            handle.close()


class ParquetReader(SourceReader):
    """`SourceReader` of Parquet files.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        columns: What to read; None reads every column.
        resources: Open files, shared with other readers, and what opens them.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources) -> None:
        self._name = source.name
        self._manifest = manifest
        self._columns = None if columns is None else list(columns)
        self._pool, self._storage = resources.pool, resources.storage

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one row group as a table; see `SourceReader.read`. I/O errors are tried again, then raised."""
        entry = self._manifest.units[unit]
        info, rows = self._manifest.files[int(entry["file"])], int(entry["rows"])
        stop = rows if row_stop < 0 else min(row_stop, rows)
        start = min(row_start, stop)
        errors: list[Any] = []
        while len(errors) < _ATTEMPTS:
            try:
                with self._pool.lease(info, self._storage) as file:
                    _check_columns(self._name, info, file.columns, self._columns or ())
                    table = file.read(int(entry["start"]), start, stop, self._columns)
                return RecordBlock(unit=unit, row_start=start, num_rows=table.num_rows, table=table)
            except (OSError, pa.ArrowException) as error:
                errors.append(error)
        where = self._manifest.locate(unit)
        raise DataError(f"source {self._name!r}: {where} cannot be read: {errors[-1]}") from errors[-1]

    def close(self) -> None:
        """Close the idle files of the pool."""
        self._pool.close()


FORMAT: Final = ParquetFormat()
