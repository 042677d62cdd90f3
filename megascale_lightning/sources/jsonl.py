"""JSON lines: a unit is a byte range of about 8 MB cut at newlines, or a whole compressed file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, cast

import numpy as np
import pyarrow as pa

from megascale_lightning.errors import DataError
from megascale_lightning.sources.formats import COMPRESSIONS, Listing, Resources, SourceFormat
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.storage import FileInfo, Storage

__all__ = ["FORMAT", "UNIT_BYTES", "JsonLinesFormat", "JsonLinesReader", "find_cuts"]

UNIT_BYTES: Final = 8 << 20
_ATTEMPTS: Final = 3


class JsonLinesFormat(SourceFormat):
    """A unit is a byte range of about 8 MB cut at newlines, or a whole compressed file."""

    def list_units(
        self, source: Source, files: Sequence[FileInfo], storage: Storage, *, unit_bytes: int = UNIT_BYTES
    ) -> Listing:
        """Units of every file, their rows -1; see `SourceFormat`. An empty file has none."""
        found = []
        for index, info in enumerate(files):
            if info.size == 0:
                continue
            cuts = [0]
            if _codec(info) is None:
                try:
                    with storage.open(info) as stream:
                        cuts = find_cuts(stream, info.size, unit_bytes)
                except OSError as error:
                    raise DataError(f"source {source.name!r}: {info.path} cannot be read: {error}") from error
            found += [
                (index, start, stop, -1, stop - start) for start, stop in zip(cuts, [*cuts[1:], info.size], strict=True)
            ]
        return Listing(np.array(found, UNIT))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> JsonLinesReader:
        """See `SourceFormat`."""
        return JsonLinesReader(source, manifest, resources.storage)


def find_cuts(stream: BinaryIO, size: int, unit_bytes: int) -> list[int]:
    """Where units begin: 0, and behind the first newline at or after each multiple of `unit_bytes` less one."""
    cuts = [0]
    for target in range(unit_bytes, size, unit_bytes):
        if target <= cuts[-1]:
            continue
        cut = _behind_newline(stream, target - 1)
        if cut is None or cut >= size:
            break
        cuts.append(cut)
    return cuts


def _behind_newline(stream: BinaryIO, position: int) -> int | None:
    stream.seek(position)
    while chunk := stream.read(1 << 16):
        at = chunk.find(b"\n")
        if at >= 0:
            return position + at + 1
        position += len(chunk)
    return None


def _codec(info: FileInfo) -> Any:
    return next((codec for suffix, codec in COMPRESSIONS.items() if info.path.endswith(suffix)), None)


class JsonLinesReader(SourceReader):
    """`SourceReader` of JSON lines. A row is a line that is not blank.

    A line that is no UTF-8, no JSON or no object is a failed record; its message has the line's first byte.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        storage: Opens the files.
    """

    def __init__(self, source: Source, manifest: Manifest, storage: Storage) -> None:
        self._name = source.name
        self._manifest = manifest
        self._storage = storage

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one byte range; see `SourceReader.read`. I/O errors are tried again, then raised."""
        entry = self._manifest.units[unit]
        start = int(entry["start"])
        data = self._bytes(unit, self._manifest.files[int(entry["file"])], start, int(entry["stop"]))
        objects: list[Any] = []
        failures: dict[int, str] = {}
        for row, (offset, line) in enumerate(_lines(data)):
            if row < row_start:
                continue
            if row == row_stop:
                break
            record, problem = _parse(line, is_first=start + offset == 0)
            if problem is not None:
                failures[len(objects)] = f"the line at byte {start + offset} {problem}"
            objects.append(record)
        return RecordBlock(unit=unit, row_start=row_start, num_rows=len(objects), objects=objects, failures=failures)

    def _bytes(self, unit: int, info: FileInfo, start: int, stop: int) -> bytes:
        errors: list[Exception] = []
        while len(errors) < _ATTEMPTS:
            try:
                with self._storage.open(info) as stream:
                    codec = _codec(info)
                    if codec is not None:
                        with pa.CompressedInputStream(cast("Any", stream), codec) as plain:
                            return bytes(plain.read())
                    stream.seek(start)
                    return stream.read(stop - start)
            except (OSError, pa.ArrowException) as error:
                errors.append(error)
        where = self._manifest.locate(unit)
        raise DataError(f"source {self._name!r}: {where} cannot be read: {errors[-1]}") from errors[-1]

    def close(self) -> None:
        """Nothing stays open."""


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every line that is not blank."""
    offset = 0
    while offset < len(data):
        end = data.find(b"\n", offset)
        end = len(data) if end < 0 else end
        line = data[offset:end]
        if line and not line.isspace():
            yield offset, line
        offset = end + 1


def _parse(line: bytes, *, is_first: bool) -> tuple[Any, str | None]:
    try:
        record = json.loads(line.decode("utf-8-sig" if is_first else "utf-8"))
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"is not JSON: {error}"
    if not isinstance(record, dict):
        return None, f"holds a {type(record).__name__}, not an object"
    return record, None


FORMAT: Final = JsonLinesFormat()
