"""`Shard`: what an MDS `index.json` says of one shard, and how its records are found and decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats.columnchecks import check_columns
from megascale_lightning.sources.formats.mds.codecs import Decoder, column_decoder, known_encodings
from megascale_lightning.sources.formats.optionsets import check_pickles
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.storage import FileInfo

__all__ = ["Shard", "StoredFile", "parse_shard"]

_CODECS: Final = {"gz": "gzip", "bz2": "bz2", "zstd": "zstd", "zst": "zstd", "snappy": "snappy", "br": "brotli"}
_SEPARATORS: Final = {"csv": ",", "tsv": "\t"}
_TEXTS: Final[dict[str, Callable[[str], Any]]] = {"str": str, "int": int, "float": float}

Fetch = Callable[[int, int], Any]
"""`fetch(begin, end)` gives these bytes of the decompressed shard as a buffer."""
RecordDecoder = Callable[[memoryview], tuple[Any, str | None]]
"""The bytes of a record -> (record, None), or (None, what is wrong)."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a shard."""

    name: str
    """Relative to the folder."""
    size: int
    """Bytes."""
    hashes: Mapping[str, str]
    """Name of the algorithm -> hexadecimal digest."""

    @classmethod
    def parse(cls, entry: Any) -> StoredFile | None:
        """From its entry in the index; None where there is none."""
        return None if not entry else cls(str(entry["basename"]), int(entry["bytes"]), dict(entry.get("hashes") or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard as its index describes it."""

    kind: str
    """mds, json, csv, tsv or xsv"""
    num_records: int
    raw: StoredFile
    packed: StoredFile | None
    """Compressed."""
    codec: str
    """Arrow's name of the compression; empty without one."""
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    """Bytes of a column's values where all have as many; of mds alone."""
    newline: bytes = b"\n"
    separator: str = ","

    def check_columns(self, name: str, needed: Sequence[str]) -> None:
        """Refuse a shard that lacks a column.

        Raises:
            ConfigError: As said.
        """
        check_columns(name, self.raw.name, self.columns, needed)

    def stored_as(self, info: FileInfo) -> StoredFile:
        """Which of the shard's files this is."""
        if self.packed is not None and info.path.endswith(f"/{self.packed.name}"):
            return self.packed
        return self.raw

    def check_size(self, name: str, info: FileInfo) -> None:
        """Refuse a file that is cut short.

        Raises:
            DataError: It has another size than the index says.
        """
        expected = self.stored_as(info).size
        if info.size != expected:
            raise DataError(
                f"source {name!r}: {info.path} has {info.size} bytes, and its index says {expected}: it is cut short "
                "or of another data set"
            )

    def check_hash_name(self, source: Source) -> None:
        """Refuse `validate_hash` where the shard has no such hash.

        Raises:
            ConfigError: As said.
        """
        name = source.format_options.get("validate_hash")
        stored = [file for file in (self.raw, self.packed) if file is not None]
        if name is not None and any(name not in file.hashes for file in stored):
            there = ", ".join(sorted({one for file in stored for one in file.hashes})) or "none"
            raise ConfigError(
                f"source {source.name!r}: validate_hash={name!r}, but the hashes of {self.raw.name} are: {there}"
            )

    def slice_records(self, fetch: Fetch, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes of records [start, stop).

        Raises:
            ValueError: The shard is damaged: it does not hold the records that the index counts.
        """
        if self.kind != "mds":
            return self._lines(fetch, has_header=self.kind != "json")[start:stop]
        head = np.frombuffer(fetch(0, 4 * (2 + self.num_records)), "<u4")
        offsets = head[1:].astype(np.int64)
        first = 4 * len(head)
        if head[0] != self.num_records:
            raise ValueError(f"it holds {head[0]} records, and its index says {self.num_records}")
        if offsets[0] < first or offsets[-1] != self.raw.size or (np.diff(offsets) < 0).any():
            raise ValueError(f"its offsets do not rise from behind byte {first} to its end at {self.raw.size}")
        if start == stop:
            return []
        begin = int(offsets[start])
        data = memoryview(fetch(begin, int(offsets[stop])))
        return [data[a - begin : b - begin] for a, b in pairwise(offsets[start : stop + 1].tolist())]

    def _lines(self, fetch: Fetch, *, has_header: bool) -> Sequence[memoryview]:
        lines = bytes(fetch(0, self.raw.size)).split(self.newline)
        if lines and not lines[-1]:
            lines.pop()
        del lines[: int(has_header)]
        if len(lines) != self.num_records:
            raise ValueError(f"it holds {len(lines)} lines, and its index says {self.num_records}")
        return [memoryview(line) for line in lines]

    def make_decoder(self, source: Source, columns: Sequence[str] | None) -> RecordDecoder:
        """What turns the bytes of a record into a dict of these columns, None: of all.

        Raises:
            ConfigError: An encoding is unknown, or a pickle and not allowed.
        """
        wanted = set(self.columns if columns is None else columns)
        if self.kind == "json":
            return lambda data: _guard(data, lambda: _json_object(data, wanted))
        if self.kind != "mds":
            for name, kind in zip(self.columns, self.encodings, strict=True):
                if kind not in _TEXTS and name in wanted:
                    raise ConfigError(
                        f"source {source.name!r}: column {name!r} of {self.raw.name} is encoded as {kind!r}; known are "
                        f"{', '.join(_TEXTS)}"
                    )
            texts = [(name, _TEXTS.get(kind, str)) for name, kind in zip(self.columns, self.encodings, strict=True)]
            return lambda data: _guard(data, lambda: _fields(data, texts, self.separator, wanted))
        plan = [
            (name, size, self._decoder(source, name, encoding) if name in wanted else None)
            for name, size, encoding in zip(self.columns, self.sizes, self.encodings, strict=True)
        ]
        head = 4 * sum(not size for size in self.sizes)
        return lambda data: _decode(data, plan, head)

    def _decoder(self, source: Source, name: str, encoding: str) -> Decoder:
        where = f"source {source.name!r}: column {name!r} of {self.raw.name}"
        if encoding == "pkl":
            check_pickles(source, where)
        found = column_decoder(encoding)
        if found is None:
            raise ConfigError(f"{where} is encoded as {encoding!r}; known are {', '.join(known_encodings())}")
        return found


def _decode(
    data: memoryview, plan: Sequence[tuple[str, int | None, Decoder | None]], head: int
) -> tuple[Any, str | None]:
    """A record: the sizes of the columns that have no fixed one, uint32 each, then all values."""
    if len(data) < head:
        return None, f"the record has {len(data)} bytes, fewer than the sizes of its columns"
    sizes = iter(np.frombuffer(data[:head], "<u4").tolist())
    at, record = head, {}
    for name, fixed, decoder in plan:
        end = at + (fixed or next(sizes))
        if end > len(data):
            return None, f"column {name!r} ends at byte {end} of a record of {len(data)} bytes"
        if decoder is not None:
            try:
                record[name] = decoder(data[at:end])
            except Exception as error:
                return None, f"column {name!r} {_say(error)}"
        at = end
    if at != len(data):
        return None, f"the record has {len(data)} bytes, and its columns have {at}"
    return record, None


def _say(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"cannot be decoded: {type(error).__name__}: {error}"


def _guard(data: memoryview, make: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return make(), None
    except (ValueError, RecursionError) as error:
        return None, f"the line {bytes(data[:80])!r} cannot be decoded: {error}"


def _json_object(data: memoryview, wanted: set[str]) -> dict[str, Any]:
    record = json.loads(bytes(data))
    if not isinstance(record, dict):
        raise ValueError(f"it holds a {type(record).__name__}, not an object")
    return {name: value for name, value in record.items() if name in wanted}


def _fields(
    data: memoryview, texts: Sequence[tuple[str, Callable[[str], Any]]], separator: str, wanted: set[str]
) -> dict[str, Any]:
    parts = str(data, "utf-8").split(separator)
    if len(parts) != len(texts):
        raise ValueError(f"it has {len(parts)} fields, not {len(texts)}")
    return {name: make(part) for (name, make), part in zip(texts, parts, strict=True) if name in wanted}


def parse_shard(name: str, path: str, entry: Any) -> Shard:
    """A shard from its entry in an index.

    Args:
        name: Of the source, for messages.
        path: Of the index, for messages.
        entry: One of `shards`.

    Raises:
        ConfigError: It is of another version, format or compression.
        DataError: The index is damaged.
    """
    where = f"source {name!r}: {path}"
    try:
        kind, version = str(entry["format"]), entry["version"]
        if version != 2 or kind not in ("mds", "json", "csv", "tsv", "xsv"):
            raise ConfigError(
                f"{where} has a shard of format {kind!r}, version {version!r}; mds, json, csv, tsv and xsv of version "
                "2 can be read"
            )
        raw, packed = StoredFile.parse(entry["raw_data"]), StoredFile.parse(entry.get("zip_data"))
        if raw is None:
            raise ConfigError(f"{where} has a shard without raw_data")
        return Shard(
            kind=kind,
            num_records=int(entry["samples"]),
            raw=raw,
            packed=packed,
            codec=_codec(where, entry.get("compression")) if packed is not None else "",
            columns=tuple(entry["columns"] if kind == "json" else entry["column_names"]),
            encodings=() if kind == "json" else tuple(entry["column_encodings"]),
            sizes=tuple(entry["column_sizes"]) if kind == "mds" else (),
            newline=str(entry.get("newline", "\n")).encode(),
            separator=str(entry.get("separator", _SEPARATORS.get(kind, ","))),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(f"{where} is damaged: a shard has no usable {error}") from error


def _codec(where: str, compression: Any) -> str:
    name = str(compression).split(":")[0]
    if name not in _CODECS:
        raise ConfigError(f"{where} has shards compressed as {compression!r}; known are {', '.join(_CODECS)}")
    return _CODECS[name]
