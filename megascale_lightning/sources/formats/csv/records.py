"""`CsvRecords`: the records of a CSV file, front to back, each with where it stands and what is wrong with it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

from megascale_lightning.sources.stores.plaintext import PlainFile

__all__ = ["CsvRecord", "CsvRecords", "Dialect"]

_CHUNK: Final = 256 << 10
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a file is written."""

    delimiter: str
    quote: str | None
    escape: str | None
    skip_initial_space: bool
    comment: bytes | None
    encoding: str
    max_record_bytes: int

    def reader(self, lines: Iterator[str]) -> Any:
        """Python's reader over these lines."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quotechar=self.quote,
            quoting=csv.QUOTE_MINIMAL if self.quote is not None else csv.QUOTE_NONE,
            escapechar=self.escape,
            skipinitialspace=self.skip_initial_space,
            strict=True,
        )


class CsvRecord(NamedTuple):
    """One record as stored."""

    fields: list[str]
    offset: int
    """Plain byte of the file at which it begins."""
    line: int
    """Number of its first line, from 1."""
    problem: str | None = None
    """What is wrong with it, to be read behind "the record at line ..."."""
    raw: bytes = b""
    """Its bytes, where there is a problem."""


class _TooLongError(Exception):
    """A record has more bytes than it may have."""


class _Lines:
    """The lines of a file, of which a reader takes as many as a record has.

    Lines are held from the record that is being read on, so that it can be shown, or begun anew.
    """

    def __init__(self, file: PlainFile, dialect: Dialect, chunk: int) -> None:
        self.stored: list[bytes] = []
        """From the first line of the record on, and beyond its end."""
        self.offset = 0
        """Plain byte at which `stored` begins."""
        self.number = 1
        """Of the first line of `stored`."""
        self.undecodable: dict[int, str] = {}
        """Number of a line -> why it is no text."""
        self.surplus: dict[int, int] = {}
        """Number of a line that is too long to be held -> its bytes that are left out."""
        self.unfinished = b""
        """What stands behind the last line of a file that breaks off."""
        self.complete = False
        """There are no more than these."""
        self._file = file
        self._dialect = dialect
        self._chunk = chunk
        self._texts: list[str] = []
        self._bytes = 0
        self._rest = b""

    def drop(self, count: int) -> None:
        """Let go of lines."""
        size = sum(map(len, self.stored[:count]))
        self._bytes -= size
        if self.surplus:
            size += sum(self.surplus.pop(self.number + index, 0) for index in range(count))
        if self.undecodable:
            self.undecodable = {
                number: why for number, why in self.undecodable.items() if number >= self.number + count
            }
        self.offset += size
        self.number += count
        del self.stored[:count]
        del self._texts[:count]

    def blocks(self, trim: Callable[[], None]) -> Iterator[list[str]]:
        """The texts of all lines, as far as the file goes; `trim()` is called before more are read.

        Raises:
            _TooLongError: What is held, one record, is too long.
        """
        start = 0
        while True:
            long = min((n - self.number for n in self.surplus if n - self.number >= start), default=None)
            yield self._texts[start:long]
            if long is not None:
                raise _TooLongError
            trim()
            if self._bytes > self._dialect.max_record_bytes:
                raise _TooLongError
            start = len(self._texts)
            if not self.refill():
                return

    def refill(self) -> bool:
        """Read more lines; False if there are none."""
        found: list[bytes] = []
        while not found and (self._rest or not self.complete):
            chunk = self._read_chunk()
            data = self._rest + chunk
            if self._file.position == len(chunk) and self._is_marked(data):
                data = data[len(_BYTE_ORDER_MARK) :]
                self.offset += len(_BYTE_ORDER_MARK)
            found = data.splitlines(keepends=True)
            self._rest = b""
            # Behind a last "\r" there may be the "\n" that belongs to it.
            if found and not data.endswith(b"\n") and not self.complete:
                self._rest = found.pop()
            if len(self._rest) > self._dialect.max_record_bytes and not self._rest.endswith(b"\r"):
                self.surplus[self.number + len(self.stored) + len(found)] = self._skip_line()
                found.append(self._cut)
            if self.complete and self._file.problem is not None and found and not _LINE_END.search(found[-1]):
                self.unfinished = found.pop()
        self._texts += self._decoded(found)
        self.stored += found
        self._bytes += sum(map(len, found))
        return bool(found)

    def _is_marked(self, data: bytes) -> bool:
        return self._dialect.encoding == "utf-8" and data.startswith(_BYTE_ORDER_MARK)

    def _skip_line(self) -> int:
        """Read to the end of the line that `_rest` begins; of it, `_cut` is held. The number of bytes that are not."""
        limit = self._dialect.max_record_bytes
        self._cut, surplus = self._rest[:limit], len(self._rest) - limit
        self._rest = b""
        while not self.complete:
            chunk = self._read_chunk()
            if chunk.endswith(b"\r") and not self.complete:
                chunk += self._read_chunk()
            end = _LINE_END.search(chunk)
            if end is not None:
                self._rest = chunk[end.end() :]
                return surplus + end.end()
            surplus += len(chunk)
        return surplus

    def _read_chunk(self) -> bytes:
        chunk = self._file.read(self._chunk)
        self.complete = len(chunk) < self._chunk
        return chunk

    def _decoded(self, lines: list[bytes]) -> list[str]:
        encoding = self._dialect.encoding
        try:
            return [line.decode(encoding) for line in lines]
        except UnicodeDecodeError:
            return [self._decoded_one(line, encoding, index) for index, line in enumerate(lines, len(self.stored))]

    def _decoded_one(self, line: bytes, encoding: str, index: int) -> str:
        try:
            return line.decode(encoding)
        except UnicodeDecodeError as error:
            self.undecodable[self.number + index] = str(error)
            return line.decode(encoding, "replace")


class CsvRecords:
    """Goes through the records of one file.

    A record that breaks the rules of quoting, or is too long, ends with its first line: what follows is read as a
    record again. So one stray quote costs one record, and not all up to the next quote, or the rest of the file.

    Args:
        file: Closed with this.
        dialect: How it is written.
        skip_rows: Lines at the beginning that are no records.
        chunk: Bytes that are read at once.
    """

    def __init__(self, file: PlainFile, dialect: Dialect, skip_rows: int = 0, chunk: int = _CHUNK) -> None:
        self.row = 0
        """Number of the record that is next."""
        self.next_index = 0
        """The slice that is next, for `Cursors`."""
        self.ended = False
        """There is no record left."""
        self.names: Sequence[str] = ()
        """Of the columns; whoever opened it sets them."""
        self._file = file
        self._dialect = dialect
        self._lines = _Lines(file, dialect, chunk)
        self._first = 0
        """Index of the first line of the record that was read last, in the lines held."""
        self._next = 0
        """Of the line behind it."""
        self._offset = 0
        """Plain byte of that line."""
        self._reader: Any = None
        self._pending: CsvRecord | None = None
        self._is_over = False
        # A module-wide limit, 128 KiB unless somebody raised it; ours is on the whole record.
        csv.field_size_limit(max(csv.field_size_limit(), dialect.max_record_bytes))
        while skip_rows > len(self._lines.stored) and self._lines.refill():
            pass
        self._go_on_at(min(skip_rows, len(self._lines.stored)))

    def header(self) -> CsvRecord | None:
        """The first record, which is not counted; None if there is none."""
        return self._read()

    def peek(self) -> CsvRecord | None:
        """The next record, which stays the next one; None if there is none."""
        if self._pending is None:
            self._pending = self._read()
        return self._pending

    def records(self, limit: float = float("inf")) -> Iterator[CsvRecord]:
        """Those that begin before plain byte `limit` of the file."""
        while True:
            found, self._pending = self._pending or self._read(), None
            if found is None:
                self.ended = True
                return
            if found.offset >= limit:
                self._pending = found
                return
            self.row += 1
            yield found

    def raw(self) -> bytes:
        """The bytes of the record that came last."""
        return b"".join(self._lines.stored[self._first : self._next])

    def _go_on_at(self, line: int) -> None:
        """Read from this line, of those held, on."""
        self._lines.drop(line)
        self._first = self._next = self._base = 0
        self._offset = self._lines.offset
        self._reader = self._dialect.reader(chain.from_iterable(self._lines.blocks(self._trim)))

    def _trim(self) -> None:
        """Let go of the lines before the record that is being read."""
        self._lines.drop(self._next)
        self._base -= self._next
        self._first = self._next = 0
        self._offset = self._lines.offset

    def _read(self) -> CsvRecord | None:
        lines, comment = self._lines, self._dialect.comment
        while not self._is_over:
            try:
                fields = next(self._reader)
            except StopIteration:
                return self._last()
            except csv.Error as error:
                found = self._broken(f"is not well quoted: {error}")
            except _TooLongError:
                found = self._broken(self._too_long())
            else:
                first, offset = self._next, self._offset
                self._first, self._next = first, self._base + self._reader.line_num
                size = len(lines.stored[first])
                if self._next > first + 1:
                    size = sum(map(len, lines.stored[first : self._next]))
                self._offset += size
                if not fields:
                    continue
                if size > self._dialect.max_record_bytes:
                    self._next = self._first
                    found = self._broken(self._too_long())
                elif lines.undecodable or comment is not None:
                    found = self._checked(fields, offset)
                else:
                    return CsvRecord(fields, offset, lines.number + first)
            if found is not None:
                return found
        return None

    def _checked(self, fields: list[str], offset: int) -> CsvRecord | None:
        """A record with bytes that are no text has a problem; a comment is none, and ends with its line."""
        lines, comment = self._lines, self._dialect.comment
        if comment is not None and lines.stored[self._first].startswith(comment):
            if self._next > self._first + 1:
                self._go_on_at(self._first + 1)
            return None
        number = lines.number + self._first
        for line in range(number, lines.number + self._next):
            if line in lines.undecodable:
                problem = f"is not {self._dialect.encoding}: {lines.undecodable[line]}"
                return CsvRecord(fields, offset, number, problem, self.raw())
        return CsvRecord(fields, offset, number)

    def _broken(self, problem: str) -> CsvRecord | None:
        """The record's first line alone; of a file that breaks off in it, all that there is."""
        self._trim()
        lines = self._lines
        is_comment = self._dialect.comment is not None and lines.stored[0].startswith(self._dialect.comment)
        read_all = lines.complete and self._reader.line_num + self._base >= len(lines.stored)
        if self._file.problem is not None and read_all and not is_comment:
            self._is_over = True
            raw = b"".join(lines.stored) + lines.unfinished
            return CsvRecord([], lines.offset, lines.number, self._file.problem, raw)
        raw = lines.stored[0][: self._dialect.max_record_bytes]
        found = CsvRecord([], lines.offset, lines.number, problem, raw)
        self._go_on_at(1)
        return None if is_comment else found

    def _too_long(self) -> str:
        limit = self._dialect.max_record_bytes
        return f"has more than {limit} bytes: a quote is left open, or the option 'max_record_bytes' is too low"

    def _last(self) -> CsvRecord | None:
        """What ends a file that breaks off between two records."""
        self._is_over = True
        if self._file.problem is None:
            return None
        self._trim()
        return CsvRecord([], self._lines.offset, self._lines.number, self._file.problem, self._lines.unfinished)

    def close(self) -> None:
        """Let go of the file, and of what was read of it."""
        self._file.close()
        self._reader = None  # holds lines that hold this
