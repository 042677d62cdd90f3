"""CSV and TSV: a unit is a file, read in slices where a file is large; values are text unless `types` says otherwise.

Nothing is inferred from the data: the same text would be a number in one file and none in the next.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError, CorruptDataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.columnchecks import check_columns, needed_columns
from megascale_lightning.sources.formats.csv.records import CsvRecord, CsvRecords, Dialect
from megascale_lightning.sources.formats.lines import pick_rows
from megascale_lightning.sources.formats.optionsets import IS_BOOL, check_options, is_count
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.plaintext import COMPRESSIONS, SLICED_BYTES, Cursors, PlainFile
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "CsvFormat", "CsvReader"]

MAX_RECORD_BYTES: Final = 8 << 20
"""Default of the option: where a quote is left open, so much is read before the record is given up."""

_HEADER_CHUNK: Final = 64 << 10
_BOOLS: Final = {"true": True, "false": False, "1": True, "0": False}


def _to_int(text: str) -> int:
    # `int` alone would also take "1_000" and digits of other scripts.
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return int(text)


def _to_float(text: str) -> float:
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return float(text)


def _to_bool(text: str) -> bool:
    found = _BOOLS.get(text.strip().lower())
    if found is None:
        raise ValueError(text)
    return found


_TYPES: Final[dict[str, Callable[[str], Any] | None]] = {
    "str": None,
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
}


def _is_char(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 1 and value not in "\r\n"


def _is_encoding(value: Any) -> bool:
    """Whether text of it can be cut into lines before it is decoded."""
    try:
        return isinstance(value, str) and bytes(range(1, 128)).decode(value) == "".join(map(chr, range(1, 128)))
    except (LookupError, ValueError):
        return False


def _are_names(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
        and len(set(value)) == len(value)
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(item, str) for item in value)


_OPTIONS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "delimiter": ("one character", _is_char),
    "quote": ("one character, or None where quotes mean nothing", lambda value: value is None or _is_char(value)),
    "escape": ("one character, or None", lambda value: value is None or _is_char(value)),
    "skip_initial_space": IS_BOOL,
    "comment": ("one character, or None", lambda value: value is None or (_is_char(value) and value.isascii())),
    "header": ("True, False, or a list of different names", _are_names),
    "skip_rows": is_count(0),
    "encoding": ('the name of an encoding that has ASCII in it, such as "utf-8" or "latin-1"', _is_encoding),
    "null_values": ("a list of texts", _are_texts),
    "types": (
        f"a mapping of column to one of {', '.join(map(repr, _TYPES))}",
        lambda value: (
            isinstance(value, Mapping) and all(isinstance(kind, str) and kind in _TYPES for kind in value.values())
        ),
    ),
    "max_record_bytes": is_count(1),
}


class _Layout:
    """What `format_options` say."""

    def __init__(self, source: Source) -> None:
        check_options(source, "csv", _OPTIONS)
        options = source.format_options
        self._name = source.name
        self._delimiter: str | None = options.get("delimiter")
        self._comment: str | None = options.get("comment")
        self._quote: str | None = options.get("quote", '"')
        self._escape: str | None = options.get("escape")
        self._space: bool = options.get("skip_initial_space", False)
        self._encoding = codecs.lookup(options.get("encoding", "utf-8")).name
        self._max_record_bytes: int = options.get("max_record_bytes", MAX_RECORD_BYTES)
        self._header: bool | Sequence[str] = options.get("header", True)
        self._skip_rows: int = options.get("skip_rows", 0)
        self.nulls = frozenset(options.get("null_values", ()))
        self.types: Mapping[str, str] = options.get("types", {})

    def open(self, storage: Storage, info: FileInfo, **more: int) -> CsvRecords:
        """The records of a file, its header read and its columns named.

        Raises:
            ConfigError: The header names a column twice.
            CorruptDataError: What tells the columns cannot be read.
            DataError: The file cannot be read.
        """
        records = CsvRecords(PlainFile(storage, info), self._dialect(info.path), self._skip_rows, **more)
        try:
            records.names = self._names(records, info.path)
        except BaseException:
            records.close()
            raise
        return records

    def _dialect(self, path: str) -> Dialect:
        delimiter = self._delimiter
        if delimiter is None:
            stem = path.lower()
            for suffix in COMPRESSIONS:
                stem = stem.removesuffix(suffix)
            delimiter = "\t" if stem.endswith(".tsv") else ","
        self._check_marks(delimiter)
        return Dialect(
            delimiter=delimiter,
            quote=self._quote,
            escape=self._escape,
            skip_initial_space=self._space,
            comment=None if self._comment is None else self._comment.encode(),
            encoding=self._encoding,
            max_record_bytes=self._max_record_bytes,
        )

    def _check_marks(self, delimiter: str) -> None:
        marks = {"delimiter": delimiter, "quote": self._quote, "escape": self._escape}
        for (one, char), (other, second) in combinations(marks.items(), 2):
            if char is not None and char == second:
                raise ConfigError(
                    f"source {self._name!r}: the options {one!r} and {other!r} are both {char!r}; give each a "
                    "character of its own, or None for 'quote' or 'escape' where there is none"
                )
        if self._space and delimiter == " ":
            raise ConfigError(
                f"source {self._name!r}: skip_initial_space passes over spaces, and the delimiter is ' '; leave one out"
            )

    def _names(self, records: CsvRecords, path: str) -> Sequence[str]:
        if not isinstance(self._header, bool):
            return self._header
        found = records.header() if self._header else records.peek()
        if found is None:
            return ()
        where = f"source {self._name!r}: the {'header' if self._header else 'first record'} of {path}"
        if found.problem is not None:
            is_utf16 = found.raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            hint = "it is UTF-16: write it anew as UTF-8" if is_utf16 else "it tells the columns"
            raise CorruptDataError(f"{where} {found.problem}; {hint}")
        if not self._header:
            return [f"f{index}" for index in range(len(found.fields))]
        names = [name or f"f{index}" for index, name in enumerate(found.fields)]
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise ConfigError(
                f"{where} names the column {twice[0]!r} more than once; name them yourself: "
                'format_options={"header": [...], "skip_rows": 1}'
            )
        return names


class CsvFormat(SourceFormat):
    """A unit is a file; those of a source with a file over 8 MB as stored are read in slices."""

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """Reads the header of every file; see `SourceFormat`. An empty file has no unit."""
        layout = _Layout(source)
        needed = needed_columns(source)

        def names_of(info: FileInfo) -> Sequence[str]:
            if not info.size:
                return ()
            try:
                records = layout.open(storage, info, chunk=_HEADER_CHUNK)
            except CorruptDataError:
                if source.on_error == "raise":
                    raise
                return ()
            records.close()
            if records.names:
                check_columns(source.name, info.path, list(records.names), needed)
            return records.names

        with ThreadPoolExecutor(min(8, len(files))) as threads:
            names = {name for found in threads.map(names_of, files) for name in found}
        unknown = [name for name in layout.types if name not in names]
        if unknown and names:
            raise ConfigError(
                f"source {source.name!r}: the option 'types' names {', '.join(map(repr, unknown))}, which no file has; "
                f"there are {', '.join(sorted(names))}"
            )
        units = [(index, 0, info.size, -1, info.size) for index, info in enumerate(files) if info.size]
        return Listing(np.array(units, UNIT), any(info.size > SLICED_BYTES for info in files))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> CsvReader:
        """See `SourceFormat`."""
        return CsvReader(source, manifest, columns, resources.storage)


class _Converter:
    """Makes a sample of a record."""

    def __init__(self, names: Sequence[str], columns: Sequence[str] | None, layout: _Layout) -> None:
        self._num_fields = len(names)
        self._nulls = layout.nulls
        # A file without a header has no record either.
        wanted = names if columns is None or not names else columns
        self._is_plain = not layout.nulls and not layout.types and list(wanted) == list(names)
        self._names = list(wanted)
        self._columns = [(names.index(name), name, layout.types.get(name, "str")) for name in wanted]

    def __call__(self, fields: list[str]) -> tuple[dict[str, Any] | None, str | None]:
        """The sample, or what is wrong with the record."""
        if len(fields) != self._num_fields:
            return None, f"has {len(fields)} fields where the header, or the first record, has {self._num_fields}"
        if self._is_plain:
            return dict(zip(self._names, fields, strict=True)), None
        sample: dict[str, Any] = {}
        for index, name, kind in self._columns:
            text = fields[index]
            convert = _TYPES[kind]
            if text in self._nulls or (convert is not None and not text):
                sample[name] = None
                continue
            try:
                sample[name] = text if convert is None else convert(text)
            except ValueError:
                return None, f"has {text[:100]!r} in the column {name!r}, which is no {kind}"
        return sample, None


class CsvReader(SourceReader):
    """`SourceReader` of CSV files. A row is a record behind the header; lines that are empty are none.

    A record of too many or too few fields, with a value that is not of its column's type, that is not text, not well
    quoted or too long is a failure with its line and its first byte.

    Args:
        source: Its `format_options` say how files are written.
        manifest: Its files and units.
        columns: What to read; None reads every column.
        storage: Opens the files.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        self._name = source.name
        self._layout = _Layout(source)
        self._manifest = manifest
        self._columns = columns
        self._storage = storage
        self._cursors: Cursors[CsvRecords] = Cursors()

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one file; see `SourceReader.read`."""
        records = self._open(unit)
        try:
            return self._block(unit, row_start, records, pick_rows(records.records(), row_start, row_stop))
        finally:
            records.close()

    def read_slice(self, unit: int, index: int, slice_bytes: int) -> tuple[RecordBlock, bool]:
        """Records that begin in one slice; see `SourceReader.read_slice`.

        Raises:
            IndexError: The unit has no such slice.
        """
        with self._cursors.at((unit, slice_bytes), index, lambda: self._open(unit)) as records:
            for _ in records.records(index * slice_bytes):
                pass
            if records.ended and index > 0:
                raise IndexError(f"slice {index} of unit {unit} of source {self._name!r}: it has fewer")
            block = self._block(unit, records.row, records, records.records((index + 1) * slice_bytes))
            records.next_index = index + 1
            return block, records.ended

    def _block(self, unit: int, row_start: int, records: CsvRecords, found: Iterator[CsvRecord]) -> RecordBlock:
        convert = _Converter(records.names, self._columns, self._layout)
        objects: list[Any] = []
        failures: dict[int, str] = {}
        raw: dict[int, bytes] = {}
        for record in found:
            sample, problem = None, record.problem
            if problem is None:
                sample, problem = convert(record.fields)
            if problem is not None:
                failures[len(objects)] = f"the record at line {record.line}, byte {record.offset}, {problem}"
                raw[len(objects)] = record.raw or records.raw()
            objects.append(sample)
        return RecordBlock(
            unit=unit, row_start=row_start, num_rows=len(objects), objects=objects, failures=failures, raw=raw
        )

    def _open(self, unit: int) -> CsvRecords:
        info = self._manifest.file_of(unit)
        records = self._layout.open(self._storage, info)
        if records.names and self._columns is not None:
            try:
                check_columns(self._name, info.path, list(records.names), self._columns)
            except BaseException:
                records.close()
                raise
        return records

    def close(self) -> None:
        """Close the files that are open between slices."""
        self._cursors.close()


FORMAT: Final = CsvFormat()
