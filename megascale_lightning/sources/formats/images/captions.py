"""`Captions`: what stands beside the images of a folder: `metadata.jsonl`, `metadata.csv`, `captions.json`, texts."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["METADATA_NAMES", "Captions", "is_text", "stem_of"]

METADATA_NAMES: Final = ("metadata.jsonl", "metadata.csv", "captions.json")

_KEY: Final = "file_name"
_RESERVED: Final = ("image", "path", "label")


def stem_of(path: str) -> str:
    """A path without its extension: that of the text with the caption of an image, too."""
    return os.path.splitext(path)[0]


def is_text(path: str) -> bool:
    """Whether a file may be the caption of an image."""
    return path.lower().endswith(".txt")


class Captions:
    """Columns of the metadata, and captions.

    Args:
        name: Of the source, for messages.
        files: All files of the source.
        images: Those of them that are images.
        storage: Opens them.

    Raises:
        ConfigError: Metadata have no column `file_name`, or one that a record has anyway.
        DataError: Metadata cannot be read.
    """

    def __init__(self, name: str, files: Sequence[FileInfo], images: Sequence[FileInfo], storage: Storage) -> None:
        self._name = name
        self._storage = storage
        self._texts = {stem_of(info.path): info for info in files if is_text(info.path)}
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._places: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self.columns: tuple[str, ...] = ()
        """Of all metadata, in the order found, without `file_name`."""
        for info in files:
            if os.path.basename(info.path) in METADATA_NAMES:
                self._add(info)
        there = {info.path for info in images}
        self.num_unused = sum(path not in there for path in self._rows)
        """Entries of metadata without an image."""

    def of(self, path: str) -> dict[str, Any]:
        """Every column of the metadata and `caption`, None where there is nothing.

        Raises:
            ValueError: There are several entries, or the text is no UTF-8; says what is wrong with it.
            DataError: The text cannot be read.
        """
        if path in self._problems:
            raise ValueError(self._problems[path])
        row = self._rows.get(path, {})
        found = {column: row.get(column) for column in self.columns}
        if found.get("caption") is None:
            found["caption"] = self._text(path)
        return found

    def _text(self, path: str) -> str | None:
        info = self._texts.get(stem_of(path))
        if info is None:
            return None
        with self._storage.open(info) as stream:
            data = stream.read()
        try:
            return data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"its caption {info.path} is not UTF-8: {error}") from error

    def _add(self, info: FileInfo) -> None:
        folder = info.path[: -len(os.path.basename(info.path)) - 1]
        columns = dict.fromkeys(self.columns)
        for place, row in self._read(info):
            key = row.get(_KEY)
            if not isinstance(key, str) or not key:
                raise ConfigError(
                    f"source {self._name!r}: {info.path}, {place} has no {_KEY!r} that names an image of its folder, "
                    f"but {sorted(map(str, row))}"
                )
            reserved = [column for column in _RESERVED if column in row]
            if reserved:
                raise ConfigError(
                    f"source {self._name!r}: {info.path} has the column {reserved[0]!r}, which a record has of the "
                    f"file itself; rename it, or leave it out by format_options={{'captions': False}}"
                )
            path = f"{folder}/{posixpath.normpath(key)}"
            place = f"{info.path}, {place}"
            if path in self._rows:
                self._problems[path] = f"it has two entries: {self._places[path]}, and {place}"
            self._rows.setdefault(path, {column: value for column, value in row.items() if column != _KEY})
            self._places.setdefault(path, place)
            columns.update(dict.fromkeys(self._rows[path]))
        self.columns = tuple(columns)

    def _read(self, info: FileInfo) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(place, entry) of every entry of one file."""
        with self._storage.open(info) as stream:
            data = stream.read()
        try:
            text = data.decode("utf-8-sig")
            if info.path.endswith(".csv"):
                yield from _csv_rows(text)
            elif info.path.endswith(".jsonl"):
                yield from _json_lines(text)
            else:
                yield from _json_entries(json.loads(text))
        except (ValueError, RecursionError, csv.Error) as error:
            if isinstance(error, ConfigError):
                raise
            raise DataError(f"source {self._name!r}: {info.path} cannot be read: {error}") from error


def _csv_rows(text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for row in reader:
        extra = row.pop(None, None)
        if extra is not None:
            raise ValueError(f"line {reader.line_num} has more fields than the header")
        yield f"line {reader.line_num}", row


def _json_lines(text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} holds a {type(row).__name__}, not an object")
        yield f"line {number}", row


def _json_entries(content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """{"a.jpg": "caption" or {...}} or [{"file_name": "a.jpg", ...}]."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield f"entry {key!r}", {**(value if isinstance(value, dict) else {"caption": value}), _KEY: key}
    elif isinstance(content, list) and all(isinstance(row, dict) for row in content):
        yield from ((f"entry {number}", row) for number, row in enumerate(content))
    else:
        raise ValueError("it holds neither captions by file name nor a list of objects")
