"""Parquet: a unit is a row group; only the columns asked for are read; few files stay open."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_lightning.errors import DataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.columnchecks import check_columns, needed_columns
from megascale_lightning.sources.formats.optionsets import check_options
from megascale_lightning.sources.formats.tablereader import TableReader
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.corruption import is_corruption
from megascale_lightning.sources.stores.storage import FileInfo, Storage
from megascale_lightning.types import IntArray

__all__ = ["FORMAT", "ParquetFormat", "ParquetReader"]

_BUFFER_BYTES: Final = 64 << 20
"""Over all columns, when a row group is read in slices."""
_COLUMN_BUFFER: Final = (64 << 10, 8 << 20)
"""At least and at most, for one column."""


class ParquetFormat(SourceFormat):
    """A unit is a row group; `bytes` is its uncompressed stored size over all columns."""

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """Reads the footers; see `SourceFormat`."""
        check_options(source, "parquet", {})
        needed = needed_columns(source)

        def units_of(index: int) -> IntArray:
            info = files[index]
            try:
                with storage.open(info) as stream:
                    footer = pq.read_metadata(stream)
                names = footer.schema.to_arrow_schema().names
            except (OSError, pa.ArrowException) as error:
                if source.on_error != "raise" and is_corruption(error):
                    # Its rows are unknown: a unit that fails when it is read, and is dropped and counted then.
                    return np.array([(index, 0, 1, -1, info.size)], UNIT)
                raise DataError(f"source {source.name!r}: {info.path} is no readable Parquet file: {error}") from error
            check_columns(source.name, info.path, names, needed)
            groups = (footer.row_group(group) for group in range(footer.num_row_groups))
            found = [(index, g, g + 1, group.num_rows, group.total_byte_size) for g, group in enumerate(groups)]
            return np.array(found, UNIT)

        with ThreadPoolExecutor(min(8, len(files))) as threads:
            return Listing(np.concatenate(list(threads.map(units_of, range(len(files))))))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> ParquetReader:
        """See `SourceFormat`."""
        return ParquetReader(source, manifest, columns, resources)


class _OpenParquet:
    """One open file, and where the last slice of a row group ended. Touched by one thread at a time."""

    def __init__(self, info: FileInfo, storage: Storage) -> None:
        is_remote = storage.is_remote(info.path)
        if not is_remote:
            storage.check_unchanged(info)
        # A local file is read by Arrow itself, without the interpreter lock; of a remote one, ranges near each other
        # are read at once.
        self._stream: Any = storage.open(info) if is_remote else pa.OSFile(info.path, "rb")
        try:
            self._file = pq.ParquetFile(self._stream, pre_buffer=is_remote, page_checksum_verification=True)
        except BaseException:
            self._stream.close()
            raise
        self.columns: Sequence[str] = self._file.schema_arrow.names
        self._slices: _SliceCursor | None = None

    def read(self, group: int, start: int, stop: int, columns: list[str] | None) -> pa.Table:
        rows = self._file.metadata.row_group(group).num_rows
        if (start, stop) == (0, rows):
            self._slices = None
            table = self._file.read_row_group(group, columns=columns, use_threads=False)
        else:
            cursor = self._slices
            if cursor is None or not cursor.goes_on(group, start, columns):
                cursor = self._slices = _SliceCursor(self._unbuffered(columns), group, max(stop - start, 1), columns)
            table = cursor.read(start, stop)
            if stop >= rows:
                self._slices = None
        # A name with a dot in it also stands for a field inside of a column.
        return table if columns is None else table.select(columns)

    def _unbuffered(self, columns: list[str] | None) -> pq.ParquetFile:
        """The same file, without holding all stored bytes of a row group at once."""
        width = self._file.metadata.num_columns if columns is None else max(len(columns), 1)
        size = min(max(_BUFFER_BYTES // max(width, 1), _COLUMN_BUFFER[0]), _COLUMN_BUFFER[1])
        return pq.ParquetFile(
            self._stream,
            metadata=self._file.metadata,
            buffer_size=size,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    def close(self) -> None:
        self._slices = None
        self._file.close(force=True)
        self._stream.close()


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
            batch = self._rest if self._rest is not None else next(self._batches, None)
            self._rest = None
            if batch is None:
                raise pa.ArrowInvalid(f"the row group ends after {self._row} rows, its footer says otherwise")
            end = min(stop - self._row, batch.num_rows)
            if end < batch.num_rows:
                self._rest = batch.slice(end)
            if self._row + end > start:
                skipped = max(start - self._row, 0)
                found.append(batch.slice(skipped, end - skipped))
            self._row += end
        return pa.Table.from_batches(found, None if found else self._schema)


class ParquetReader(TableReader):
    """`SourceReader` of Parquet files; see `TableReader`."""

    def _read(self, unit: int, row_start: int, row_stop: int) -> RecordBlock:
        entry = self._manifest.units[unit]
        info, start, stop = self._manifest.rows_of(unit, row_start, row_stop)
        columns = None if self._columns is None else list(self._columns)
        with self._pool.lease(info, self._storage, _OpenParquet) as file:
            if int(entry["rows"]) < 0:
                raise pa.ArrowInvalid("corrupt: its footer could not be read when the run began")
            check_columns(self._name, info.path, file.columns, columns or ())
            table = file.read(int(entry["start"]), start, stop, columns)
        return RecordBlock(unit=unit, row_start=start, num_rows=table.num_rows, table=table)


FORMAT: Final = ParquetFormat()
