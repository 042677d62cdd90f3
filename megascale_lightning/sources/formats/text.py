"""Text files: a record is a line, a paragraph or a whole file."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.lines import LINES, PARAGRAPHS, UNIT_BYTES, LineReader, list_ranges
from megascale_lightning.sources.formats.optionsets import check_options, is_count
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.plaintext import PlainFile
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "MAX_UNIT_FILES", "TextFileReader", "TextFormat", "TextLineReader", "TextOptions"]

MAX_UNIT_FILES: Final = 1024
"""Files of a unit where each is a record."""

_READ_BYTES: Final = 1 << 20
_SEPARATORS: Final = {"line": LINES, "paragraph": PARAGRAPHS}


def _encodes(value: Any) -> bool:
    try:
        return isinstance("".encode(value), bytes)
    except (LookupError, TypeError):
        return False


def _handles_errors(value: Any) -> bool:
    try:
        b"\xff".decode("ascii", value)
    except UnicodeDecodeError:
        return True
    except Exception:  # no handler of this name, or one that encodes alone
        return False
    return True


_KNOWN: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "records": ("'line', 'paragraph' or 'file'", lambda value: value in ("line", "paragraph", "file")),
    "encoding": ("an encoding of text that Python knows", _encodes),
    "errors": ("an error handler of Python for decoding, such as 'strict' or 'replace'", _handles_errors),
    "text_field": ("a name", lambda value: isinstance(value, str) and value != ""),
    "max_record_bytes": is_count(1),
}


@dataclass(frozen=True, slots=True)
class TextOptions:
    """`Source.format_options` of text."""

    records: str = "line"
    """"line", "paragraph" (lines between blank ones) or "file"."""
    encoding: str = "utf-8"
    errors: str = "strict"
    """What to do about bytes that are not of the encoding: "strict" makes the record a failure."""
    text_field: str = "text"
    """Key of the text in a record."""
    max_record_bytes: int | None = None
    """A longer record is a failure; None: 64 MB, and no limit where a record is a file."""

    @classmethod
    def of(cls, source: Source) -> TextOptions:
        """As declared.

        Raises:
            ConfigError: An option is unknown, has a wrong value, or does not fit another.
        """
        check_options(source, "text", _KNOWN)
        options = cls(**source.format_options)
        if codecs.lookup(options.encoding).name == "utf-8-sig":
            options = replace(options, encoding="utf-8")
        if options.records != "file" and "\n".encode(options.encoding) != b"\n":
            raise ConfigError(
                f"source {source.name!r}: files in {options.encoding} cannot be cut into lines or paragraphs; convert "
                "them to UTF-8, or set format_options={'records': 'file', ...}"
            )
        if options.records == "file" and options.text_field == "path":
            raise ConfigError(f"source {source.name!r}: text_field='path' is the key of the file's name; take another")
        if not set(source.columns or ()) <= set(options.fields):
            raise ConfigError(
                f"source {source.name!r}: columns={source.columns!r}: a record of text has {', '.join(options.fields)}"
            )
        return options

    @property
    def fields(self) -> tuple[str, ...]:
        """Keys of a record."""
        return (self.text_field, "path") if self.records == "file" else (self.text_field,)

    def decode(self, data: bytes, *, is_first: bool) -> str:
        """The text, without a byte order mark at the beginning of a file.

        Raises:
            UnicodeError: As `errors` has it.
        """
        encoding = self.encoding
        if is_first and codecs.lookup(encoding).name == "utf-8":
            encoding = "utf-8-sig"
        return data.decode(encoding, self.errors)


class TextFormat(SourceFormat):
    """A unit is a byte range or a compressed file, as of JSON lines; where a record is a file, up to 1024 files."""

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`."""
        options = TextOptions.of(source)
        if options.records == "file":
            return Listing(_group(files))
        return list_ranges(files, storage, _SEPARATORS[options.records])

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> SourceReader:
        """See `SourceFormat`."""
        options = TextOptions.of(source)
        if options.records == "file":
            return TextFileReader(source, manifest, resources.storage, options)
        return TextLineReader(source, manifest, resources.storage, options)


def _group(files: Sequence[FileInfo]) -> Any:
    """Ranges of consecutive files of about 8 MB, by their index: UNIT [n]."""
    found = []
    start, size = 0, 0
    for index, info in enumerate(files):
        size += info.size
        if size >= UNIT_BYTES or index + 1 - start == MAX_UNIT_FILES or index + 1 == len(files):
            found.append((start, start, index + 1, index + 1 - start, size))
            start, size = index + 1, 0
    return np.array(found, UNIT)


class TextLineReader(LineReader):
    """`SourceReader` of text whose records are lines or paragraphs: `{text_field: text}`.

    A line has no line end, a paragraph no white space at its end. Blank lines are none. Text that does not decode is
    a failed record.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        storage: Opens the files.
        options: What a record is, and how it is decoded.
    """

    def __init__(self, source: Source, manifest: Manifest, storage: Storage, options: TextOptions) -> None:
        super().__init__(source, manifest, storage, _SEPARATORS[options.records])
        self._options = options
        self._word = options.records

    def _parse(self, data: bytes, *, is_first: bool) -> tuple[Any, str | None]:
        data = data.rstrip(b"\r") if self._word == "line" else data.rstrip()
        try:
            return {self._options.text_field: self._options.decode(data, is_first=is_first)}, None
        except UnicodeError as error:
            return None, f"is not {self._options.encoding}: {error}"


class TextFileReader(SourceReader):
    """`SourceReader` of text files that are one record each: `{text_field: text, "path": path}`.

    A file that does not decode, is longer than `max_record_bytes`, or whose compressed content is broken, is a failed
    record.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        storage: Opens the files.
        options: How they are decoded.
    """

    def __init__(self, source: Source, manifest: Manifest, storage: Storage, options: TextOptions) -> None:
        self._name = source.name
        self._manifest = manifest
        self._storage = storage
        self._options = options

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Files of one range; see `SourceReader.read`."""
        entry = self._manifest.units[unit]
        first, last = int(entry["start"]), int(entry["stop"])
        stop = last if row_stop < 0 else min(first + row_stop, last)
        objects: list[Any] = []
        failures: dict[int, str] = {}
        raw: dict[int, bytes] = {}
        for info in self._manifest.files[first + row_start : stop]:
            data, problem = self._content(info)
            record = None
            if problem is None:
                record, problem = self._record(info, data)
            if problem is not None:
                failures[len(objects)] = f"{info.path}: {problem}"
                raw[len(objects)] = data
            objects.append(record)
        return RecordBlock(
            unit=unit, row_start=row_start, num_rows=len(objects), objects=objects, failures=failures, raw=raw
        )

    def _content(self, info: FileInfo) -> tuple[bytes, str | None]:
        file = PlainFile(self._storage, info)
        limit = self._options.max_record_bytes
        size, chunks = 0, []
        try:
            while chunk := file.read(_READ_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                if limit is not None and size > limit:
                    return b"".join(chunks)[:limit], f"has more than {limit} bytes, the option 'max_record_bytes'"
            return b"".join(chunks), file.problem
        finally:
            file.close()

    def _record(self, info: FileInfo, data: bytes) -> tuple[Any, str | None]:
        try:
            text = self._options.decode(data, is_first=True)
        except UnicodeError as error:
            return None, f"is not {self._options.encoding}: {error}"
        return {self._options.text_field: text, "path": info.path}, None

    def close(self) -> None:
        """Nothing stays open."""


FORMAT: Final = TextFormat()
