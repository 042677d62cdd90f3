"""`LineReader`: records that are lines or paragraphs of plain or compressed files, in whole units or in slices."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np

from megascale_lightning.sources.formats import Listing
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.plaintext import Cursors, PlainFile, codec_of, is_large
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["LINES", "PARAGRAPHS", "UNIT_BYTES", "LineReader", "Separator", "find_cuts", "list_ranges", "pick_rows"]

UNIT_BYTES: Final = 8 << 20
MAX_RECORD_BYTES: Final = 64 << 20
"""Default of the option: where no separator comes, so much is held before the record is given up."""
_CHUNK: Final = 1 << 20
_CUT_CHUNK: Final = 1 << 16
_TEXT: Final = re.compile(rb"\S")
_TEXT_OR_NEWLINE: Final = re.compile(rb"[\S\n]")


@dataclass(frozen=True, slots=True)
class Separator:
    """What stands between two records. Blank lines before a record belong to none."""

    pattern: re.Pattern[bytes]
    """Begins with a newline."""
    find: Callable[[bytes, int], tuple[int, int] | None]
    """`find(data, start)`: where the record at `start` ends, and where the next may begin; None: not within `data`."""


def _find_newline(data: bytes, start: int) -> tuple[int, int] | None:
    end = data.find(b"\n", start)
    return None if end < 0 else (end, end + 1)


def _find_blank_line(data: bytes, start: int) -> tuple[int, int] | None:
    match = _BLANK_LINE.search(data, start)
    return None if match is None else match.span()


_BLANK_LINE: Final = re.compile(rb"\n[ \t\r\x0b\x0c]*\n")
LINES: Final = Separator(re.compile(rb"\n"), _find_newline)
PARAGRAPHS: Final = Separator(_BLANK_LINE, _find_blank_line)


def list_ranges(
    files: Sequence[FileInfo], storage: Storage, separator: Separator, unit_bytes: int = UNIT_BYTES
) -> Listing:
    """Units of every file: byte ranges of about `unit_bytes` cut at separators, or a whole compressed file.

    Sliced if any of them is large and compressed. Their rows are -1; an empty file has none.

    Raises:
        DataError: A file cannot be read.
    """
    found = []
    for index, info in enumerate(files):
        cuts = [0]
        if codec_of(info.path) is None and info.size > unit_bytes:
            with storage.open(info) as stream:
                cuts = find_cuts(stream, info.size, unit_bytes, separator)
        if info.size:
            stops = [*cuts[1:], info.size]
            found += [(index, start, stop, -1, stop - start) for start, stop in zip(cuts, stops, strict=True)]
    return Listing(np.array(found, UNIT), any(map(is_large, files)))


def find_cuts(stream: BinaryIO, size: int, unit_bytes: int, separator: Separator = LINES) -> list[int]:
    """Where units begin: 0, and behind the first separator at or after each multiple of `unit_bytes` less one."""
    cuts = [0]
    for target in range(unit_bytes, size, unit_bytes):
        if target <= cuts[-1]:
            continue
        cut = _behind(stream, target - 1, separator.pattern)
        if cut is None or cut >= size:
            break
        cuts.append(cut)
    return cuts


def _behind(stream: BinaryIO, position: int, pattern: re.Pattern[bytes]) -> int | None:
    stream.seek(position)
    data = b""
    while chunk := stream.read(_CUT_CHUNK):
        data += chunk
        match = pattern.search(data)
        if match is not None:
            return position + match.end()
        # Of what was searched, only a newline with nothing but blanks behind it may begin a separator.
        kept = data.rfind(b"\n")
        kept = len(data) if kept < 0 or _TEXT.search(data, kept) else kept
        if len(data) - kept > _CUT_CHUNK:
            position, data = position + len(data) - 1, b"\n"  # blanks without end: the newline is enough
        else:
            position, data = position + kept, data[kept:]
    return None


_Any = TypeVar("_Any")
_Found = tuple[int, bytes, "str | None"]
"""A record: the plain byte of the file at which it begins, its bytes, and why it fails: too long, or broken off."""


def pick_rows(records: Iterator[_Any], row_start: int, row_stop: int) -> Iterator[_Any]:
    """Rows [row_start, row_stop) of these records, to the end if `row_stop` is -1. Asks for one more at most."""
    for row, found in enumerate(records):
        if row == row_stop:
            return
        if row >= row_start:
            yield found


class _RecordCursor:
    """Goes through the records of one unit, front to back.

    Args:
        file: At the first byte of the unit.
        stop: Byte behind its last one; None: the end of the content.
        separator: What stands between records.
        word: What a record is, for messages.
        max_bytes: Of a record; of a longer one no more is held.
    """

    def __init__(self, file: PlainFile, stop: int | None, separator: Separator, word: str, max_bytes: int) -> None:
        self.next_index = 0
        self.row = 0
        """Number in the unit of the record that is next."""
        self.ended = False
        """There is no record left."""
        self._file = file
        self._stop = stop
        self._separator = separator
        self._word = word
        self._max_bytes = max_bytes
        self._data = b""
        self._base = file.position
        self._pos = 0
        self._complete = False
        self._long: tuple[int, bytes] | None = None
        """Where a record that is too long begins, and what is held of it; the rest of it is read on from `_pos`."""

    def records(self, limit: float = float("inf")) -> Iterator[_Found]:
        """Those that begin before plain byte `limit` of the file."""
        while not self.ended:
            if self._separator is LINES and self._long is None:
                yield from self._plain_lines(limit)
            start = self._start()
            problem = self._file.problem if self._complete else None
            if start == len(self._data) and problem is None:
                self.ended = True
            offset = self._base + start if self._long is None else self._long[0]
            if self.ended or offset >= limit:
                return
            self._pos = start
            span = self._separator.find(self._data, start)
            while span is None and not self._complete:
                self._hold(offset)
                self._more()
                span = self._separator.find(self._data, self._pos)
            if span is None:
                # A last record needs no separator behind it, unless the file breaks off there.
                end, after, problem = len(self._data), len(self._data), self._file.problem
                size = self._text_end() - self._pos
                self.ended = True
            else:
                (end, after), problem = span, None
                size = end - self._pos
            data = self._data[self._pos : end]
            if self._long is not None or size > self._max_bytes:
                data = data[: self._max_bytes] if self._long is None else self._long[1]
                problem = problem or self._too_long(offset)
            self._pos, self._long = after, None
            self.row += 1
            yield offset, data, problem

    def _plain_lines(self, limit: float) -> Iterator[_Found]:
        """The same, of what was read already: most lines take this short way."""
        data, base, most = self._data, self._base, self._max_bytes
        while base + self._pos < limit:
            start = self._pos
            end = data.find(b"\n", start)
            if end < 0 or end - start > most:
                return
            self._pos = end + 1
            line = data[start:end]
            if line and not line.isspace():
                self.row += 1
                yield base + start, line, None

    def _start(self) -> int:
        """Where the next record begins in the data: the first line with text; or the end of all data.

        Blanks without end are not held: where text follows on the line, it is too long.
        """
        if self._long is not None:
            return self._pos
        found = _TEXT.search(self._data, self._pos)
        while found is None and not self._complete:
            self._pos = max(self._data.rfind(b"\n", self._pos) + 1, self._pos)
            if len(self._data) - self._pos > self._max_bytes:
                self._long = self._base + self._pos, self._data[self._pos : self._pos + self._max_bytes]
                while found is None and not self._complete:
                    self._pos = len(self._data)
                    self._more()
                    found = _TEXT_OR_NEWLINE.search(self._data)
                self._pos = len(self._data) if found is None else found.start()
                if found is not None and found.group() != b"\n":
                    return self._pos
                self._long = None
            else:
                self._more()
            found = _TEXT.search(self._data, self._pos)
        if found is None:
            return len(self._data)
        return max(self._data.rfind(b"\n", self._pos, found.start()) + 1, self._pos)

    def _text_end(self) -> int:
        """Where the record ends, as far as it is read: before a newline that may begin what separates it."""
        if self._separator is LINES:
            return len(self._data)
        newline = self._data.rfind(b"\n", self._pos)
        return len(self._data) if newline < 0 or _TEXT.search(self._data, newline) else newline

    def _hold(self, offset: int) -> None:
        """Let go of what is read of a record, but for the part that is held of one that is too long."""
        if len(self._data) - self._pos <= self._max_bytes:
            return
        end = self._text_end()
        if self._long is None and end - self._pos > self._max_bytes:
            self._long = offset, self._data[self._pos : self._pos + self._max_bytes]
        kept = self._data[self._pos : end] if self._long is None else b""
        # Of blanks behind a newline the newline is enough, to see the next one.
        self._data, self._pos = kept + self._data[end : end + 1], 0
        self._base = self._file.position - len(self._data)

    def _too_long(self, offset: int) -> str:
        return (
            f"the {self._word} at byte {offset} has more than {self._max_bytes} bytes; if that is right, raise the "
            "option 'max_record_bytes'"
        )

    def _more(self) -> None:
        rest = self._data[self._pos :]
        size = max(_CHUNK, min(len(rest), self._max_bytes + 1 - len(rest)))
        if self._stop is not None:
            size = min(size, self._stop - self._file.position)
        read = self._file.read(size)
        self._base += self._pos
        self._data, self._pos = rest + read, 0
        self._complete = len(read) < size or self._file.position == self._stop

    def close(self) -> None:
        self._file.close()
        self._data, self._pos = b"", 0


class LineReader(SourceReader):
    """`SourceReader` of files made of lines. A record that cannot be parsed is a failure with its first byte.

    So is one of more bytes than the option `max_record_bytes`; the next begins behind the next separator.
    A compressed file that is cut short or corrupt ends with one failed record.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        storage: Opens the files.
        separator: What stands between records.
    """

    _word = "line"
    """What a record is, for messages."""

    def __init__(self, source: Source, manifest: Manifest, storage: Storage, separator: Separator = LINES) -> None:
        self._name = source.name
        self._manifest = manifest
        self._storage = storage
        self._separator = separator
        self._max_bytes: int = source.format_options.get("max_record_bytes") or MAX_RECORD_BYTES
        self._cursors: Cursors[_RecordCursor] = Cursors()

    @abstractmethod
    def _parse(self, data: bytes, *, is_first: bool) -> tuple[Any, str | None]:
        """The record, or what is wrong with it, to be read behind "the record".

        Args:
            data: As stored, without the separator.
            is_first: It begins the file, and may have a byte order mark.
        """

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one unit; see `SourceReader.read`."""
        cursor = self._open(unit)
        try:
            return self._block(unit, row_start, pick_rows(cursor.records(), row_start, row_stop))
        finally:
            cursor.close()

    def read_slice(self, unit: int, index: int, slice_bytes: int) -> tuple[RecordBlock, bool]:
        """Records that begin in one slice; see `SourceReader.read_slice`.

        Raises:
            IndexError: The unit has no such slice.
        """
        begin = int(self._manifest.units[unit]["start"])
        with self._cursors.at((unit, slice_bytes), index, lambda: self._open(unit)) as cursor:
            for _ in cursor.records(begin + index * slice_bytes):
                pass
            if cursor.ended and index > 0:
                raise IndexError(f"slice {index} of unit {unit} of source {self._name!r}: it has fewer")
            first = cursor.row
            block = self._block(unit, first, cursor.records(begin + (index + 1) * slice_bytes))
            cursor.next_index = index + 1
            if cursor.ended:
                cursor.close()
            return block, cursor.ended

    def _block(self, unit: int, row_start: int, records: Iterator[_Found]) -> RecordBlock:
        objects: list[Any] = []
        failures: dict[int, str] = {}
        raw: dict[int, bytes] = {}
        for offset, data, broken in records:
            record, problem = (None, broken) if broken else self._parse(data, is_first=offset == 0)
            if problem is not None:
                failures[len(objects)] = broken or f"the {self._word} at byte {offset} {problem}"
                raw[len(objects)] = data
            objects.append(record)
        return RecordBlock(
            unit=unit, row_start=row_start, num_rows=len(objects), objects=objects, failures=failures, raw=raw
        )

    def _open(self, unit: int) -> _RecordCursor:
        entry = self._manifest.units[unit]
        info = self._manifest.file_of(unit)
        stop = None if codec_of(info.path) else int(entry["stop"])
        file = PlainFile(self._storage, info, int(entry["start"]))
        return _RecordCursor(file, stop, self._separator, self._word, self._max_bytes)

    def close(self) -> None:
        """Close the files that are open between slices."""
        self._cursors.close()
