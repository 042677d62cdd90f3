"""Arrow files (Feather 2) and streams (what Hugging Face datasets write): a unit is one record batch, or several small.

Local files are mapped into memory, and what is not compressed is never copied: it stays in the page cache, once for all
processes of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.arrow.checking import check_table
from megascale_lightning.sources.formats.arrow.messages import (
    FEATHER_V1,
    FILE_MAGIC,
    Message,
    MessageKind,
    file_batches,
    stream_messages,
)
from megascale_lightning.sources.formats.columnchecks import check_columns, needed_columns
from megascale_lightning.sources.formats.optionsets import check_options
from megascale_lightning.sources.formats.tablereader import TableReader
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.corruption import is_corruption
from megascale_lightning.sources.stores.storage import FileInfo, Storage
from megascale_lightning.types import IntArray

__all__ = ["FORMAT", "UNIT_BYTES", "ArrowFormat", "ArrowReader"]

UNIT_BYTES: Final = 1 << 20
"""Record batches are put together to units of at least so many stored bytes."""


class ArrowFormat(SourceFormat):
    """A unit is a range of record batches of a file, or of bytes of a stream that begins and ends with a message."""

    def list_units(
        self, source: Source, files: Sequence[FileInfo], storage: Storage, *, unit_bytes: int = UNIT_BYTES
    ) -> Listing:
        """Reads schemas and the headers of record batches, not their bodies; see `SourceFormat`."""
        check_options(source, "arrow", {})
        needed = needed_columns(source)

        def units_of(index: int) -> IntArray:
            info = files[index]
            try:
                file = _OpenArrow(info, storage)
                try:
                    batches, problem = file.batches()
                    names = file.schema.names
                finally:
                    file.close()
            except _FeatherV1Error:
                raise ConfigError(
                    f"source {source.name!r}: {info.path} is a Feather file of version 1, which is not read; write it "
                    "anew with pyarrow: feather.write_feather(feather.read_table(old), new)"
                ) from None
            except (OSError, pa.ArrowException) as error:
                if source.on_error != "raise" and is_corruption(error):
                    # Its rows are unknown: a unit that fails when it is read, and is dropped and counted then.
                    return np.array([(index, 0, info.size, -1, info.size)], UNIT)
                raise DataError(
                    f"source {source.name!r}: {info.path} is no readable Arrow file or stream: {error}"
                ) from error
            check_columns(source.name, info.path, names, needed)
            found = [(index, *unit) for unit in _grouped(batches, unit_bytes)]
            if problem is not None:
                if source.on_error == "raise":
                    raise DataError(f"source {source.name!r}: {info.path} is no readable Arrow stream: {problem}")
                stop = found[-1][2] if found else 0
                found.append((index, stop, info.size, -1, info.size - stop))
            return np.array(found, UNIT)

        with ThreadPoolExecutor(min(8, len(files))) as threads:
            return Listing(np.concatenate(list(threads.map(units_of, range(len(files))))))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> ArrowReader:
        """See `SourceFormat`."""
        return ArrowReader(source, manifest, columns, resources)


class _Batch(NamedTuple):
    start: int
    stop: int
    rows: int
    bytes: int


def _grouped(batches: Sequence[_Batch], unit_bytes: int) -> list[_Batch]:
    """Neighbours put together until they have `unit_bytes`; what is left over stays a unit of its own."""
    found: list[_Batch] = []
    for batch in batches:
        last = found[-1] if found else None
        if last is not None and last.bytes < unit_bytes:
            found[-1] = _Batch(last.start, batch.stop, last.rows + batch.rows, last.bytes + batch.bytes)
        else:
            found.append(batch)
    return found


@contextmanager
def _decoding() -> Iterator[None]:
    """What Arrow says of broken bytes is raised as one kind of error; what a device says has a number, and passes."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        if isinstance(error, (pa.ArrowInvalid, pa.ArrowMemoryError)) or getattr(error, "errno", None) is not None:
            raise
        raise pa.ArrowInvalid(f"corrupt: {error}") from error


class _FeatherV1Error(pa.ArrowInvalid):
    """The file is of a format of another name and no relation."""


class _OpenArrow:
    """One open file or stream. Touched by one thread at a time."""

    def __init__(self, info: FileInfo, storage: Storage) -> None:
        self._size = info.size
        self._mapped: Any = None
        self._stream: Any = None
        if not info.size:
            raise pa.ArrowInvalid("truncated: it has no byte")
        if storage.is_remote(info.path):
            self._stream = storage.open(info)
        else:
            storage.check_unchanged(info)
            with pa.memory_map(info.path) as file:
                self._mapped = file.read_buffer()
        try:
            magic = bytes(self.read_at(0, min(len(FILE_MAGIC), self._size)))
            if magic.startswith(FEATHER_V1):
                raise _FeatherV1Error
            self._is_file = magic == FILE_MAGIC
            self._readers: dict[tuple[str, ...] | None, Any] = {}
            self._first: Message | None = None
            with _decoding():
                self.schema: Any = self._read_schema()
        except BaseException:
            self.close()
            raise
        self._dictionaries: list[Message] = []
        self._searched = 0
        self._decoded: tuple[Any, pa.Table] | None = None

    def read_at(self, start: int, size: int) -> Any:
        """These bytes; of a local file its pages."""
        if self._mapped is not None:
            return self._mapped.slice(start, size)
        self._stream.seek(start)
        return pa.py_buffer(self._stream.read(size))

    def batches(self) -> tuple[list[_Batch], str | None]:
        """All record batches, and what is wrong behind them."""
        if self._is_file:
            found = file_batches(self.read_at, self._size)
            return [_Batch(n, n + 1, one.num_rows, one.stop - one.start) for n, one in enumerate(found)], None
        batches: list[_Batch] = []
        assert self._first is not None
        start = self._first.stop
        try:
            for message in stream_messages(self.read_at, self._size, start):
                if message.kind == MessageKind.BATCH:
                    batches.append(_Batch(start, message.stop, message.num_rows, message.stop - start))
                    start = message.stop
        except pa.ArrowInvalid as error:
            return batches, str(error)
        return batches, None

    def read(self, start: int, stop: int, columns: tuple[str, ...] | None) -> pa.Table:
        """The record batches of a unit; checked, so that no broken offset leads out of their memory."""
        key = (start, stop, columns)
        if self._decoded is not None and self._decoded[0] == key:
            return self._decoded[1]
        self._decoded = None
        with _decoding():
            table = self._read(start, stop, columns)
        self._decoded = (key, table)
        return table

    def _read(self, start: int, stop: int, columns: tuple[str, ...] | None) -> pa.Table:
        if self._is_file:
            reader = self._file_reader(columns)
            batches = [reader.get_batch(index) for index in range(start, stop)]
            schema = reader.schema
        else:
            stream = self._stream_reader(start, stop, columns)
            batches, schema = list(stream), stream.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
            batches = [batch.select(list(columns)) for batch in batches]
        table = pa.Table.from_batches(batches, schema)
        check_table(table)
        return table

    def forget(self) -> None:
        """Let go of what was read last."""
        self._decoded = None

    def _read_schema(self) -> Any:
        if self._is_file:
            return self._file_reader(None).schema
        message = next(stream_messages(self.read_at, self._size), None)
        if message is None or message.kind != MessageKind.SCHEMA:
            raise pa.ArrowInvalid("corrupt: it begins neither as an Arrow file nor with the schema of a stream")
        self._first = message
        return pa.ipc.read_schema(self.read_at(message.start, message.stop - message.start))

    def _options(self, columns: tuple[str, ...] | None) -> pa.ipc.IpcReadOptions:
        fields = None if columns is None else [self.schema.get_field_index(name) for name in columns]
        return pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)

    def _file_reader(self, columns: tuple[str, ...] | None) -> Any:
        # Arrow copies what it reads of a file column by column. Of a mapped file that is worth it only where it spares
        # the decompression of the other columns.
        if columns is not None and self._mapped is not None:
            first = file_batches(self.read_at, self._size, 1)
            columns = columns if first and first[0].is_compressed else None
        if columns not in self._readers:
            content = pa.BufferReader(self._mapped) if self._mapped is not None else pa.PythonFile(self._stream, "r")
            self._readers[columns] = pa.ipc.open_file(content, options=self._options(columns))
        return self._readers[columns]

    def _stream_reader(self, start: int, stop: int, columns: tuple[str, ...] | None) -> Any:
        assert self._first is not None
        ranges = [(self._first.start, self._first.stop)]
        ranges += [(one.start, one.stop) for one in self._dictionaries_before(start)]
        pieces = [self.read_at(first, last - first) for first, last in [*ranges, (start, stop)]]
        joined: Any = _Joined(pieces)
        return pa.ipc.open_stream(pa.PythonFile(joined, "r"), options=self._options(columns))

    def _dictionaries_before(self, stop: int) -> list[Message]:
        """The dictionaries that hold for a record batch behind `stop`, in their order; none where no column has one."""
        assert self._first is not None
        if not any(_has_dictionary(field.type) for field in self.schema):
            return []
        if stop > self._searched:
            first = max(self._searched, self._first.stop)
            if first < stop:
                found = stream_messages(self.read_at, stop, first)
                self._dictionaries += [one for one in found if one.kind == MessageKind.DICTIONARY]
            self._searched = stop
        valid: list[Message] = []
        for message in self._dictionaries:
            if message.stop > stop:
                break
            if not message.is_delta:
                valid = [one for one in valid if one.dictionary != message.dictionary]
            valid.append(message)
        return valid

    def close(self) -> None:
        """Let go of the file; tables keep their part of the mapping."""
        self._decoded, self._mapped = None, None
        self._readers = {}
        if self._stream is not None:
            self._stream.close()


def _has_dictionary(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return any(_has_dictionary(kind.field(index).type) for index in range(kind.num_fields))


class _Joined:
    """Buffers one after the other as a file that Arrow reads without copying."""

    closed = False

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.size]

    def read_buffer(self, size: int) -> Any:
        """At most `size` bytes; Arrow's reads end where a message does, and so does every buffer."""
        if not self._buffers:
            return pa.py_buffer(b"")
        first = self._buffers[0]
        found = first.slice(0, min(size, first.size))
        rest = first.slice(found.size)
        self._buffers[:1] = [rest] if rest.size else []
        return found

    def read(self, size: int) -> bytes:
        return bytes(self.read_buffer(size))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self._buffers = []


class ArrowReader(TableReader):
    """`SourceReader` of Arrow files and streams; see `TableReader`."""

    def _read(self, unit: int, row_start: int, row_stop: int) -> RecordBlock:
        entry = self._manifest.units[unit]
        rows = int(entry["rows"])
        info, start, stop = self._manifest.rows_of(unit, row_start, row_stop)
        with self._pool.lease(info, self._storage, _OpenArrow) as file:
            if rows < 0:
                raise pa.ArrowInvalid(file.batches()[1] or "it was broken when the run began")
            check_columns(self._name, info.path, file.schema.names, self._columns or ())
            table = file.read(int(entry["start"]), int(entry["stop"]), self._columns)
            if table.num_rows != rows:
                raise pa.ArrowInvalid(f"corrupt: it has {table.num_rows} rows, its headers say {rows}")
            if stop == rows:
                file.forget()
        return RecordBlock(unit=unit, row_start=start, num_rows=stop - start, table=table.slice(start, stop - start))


FORMAT: Final = ArrowFormat()
