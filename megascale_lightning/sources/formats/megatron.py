r"""Megatron-LM and NeMo indexed datasets (`.bin` and `.idx`): a unit is consecutive documents of about 8 MB.

An `.idx` file, little-endian: `MMIDIDX\0\0`, version uint64 = 1, dtype code uint8, number of sequences n uint64,
number of document indices d uint64, lengths int32 [n] in tokens, pointers int64 [n] in bytes of the `.bin`, document
indices int64 [d] (sequence numbers from 0 to n where documents begin, then n), and for multimodal data modes int8 [n].
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.columnchecks import check_columns
from megascale_lightning.sources.formats.optionsets import check_options
from megascale_lightning.sources.formats.spanreader import SpanReader
from megascale_lightning.sources.formats.tokentables import token_lists
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import find_files, flat_paths
from megascale_lightning.sources.stores.secrets import without_secrets
from megascale_lightning.sources.stores.spans import SpanFiles, unit_errors
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "UNIT_BYTES", "MegatronFormat", "MegatronReader"]

UNIT_BYTES: Final = 8 << 20

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_OPTIONS: Final = {"records": ('"document" or "sequence"', lambda value: value in ("document", "sequence"))}
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Index:
    """An `.idx` file, of which nothing but the header was read."""

    info: FileInfo
    files: SpanFiles
    dtype: np.dtype[Any]
    num_sequences: int
    num_indices: int

    @classmethod
    def open(cls, info: FileInfo, files: SpanFiles) -> _Index:
        """Read the header.

        Raises:
            ValueError: It is not of this format; the caller says of which source.
            DataError: It cannot be read.
        """
        if info.size < _HEADER.size:
            raise ValueError(f"{info.path} has {info.size} bytes, fewer than the header of a Megatron index")
        magic, version, code, sequences, indices = _HEADER.unpack(files.read(info, 0, _HEADER.size))
        if magic != _MAGIC:
            raise ValueError(
                f"{info.path} begins with {magic!r}, not with {_MAGIC!r}: it is no Megatron index of the mmap kind"
            )
        if version != 1:
            raise ValueError(f"{info.path} is of version {version} of the Megatron index; version 1 can be read")
        if code not in _DTYPES:
            known = ", ".join(f"{code} ({name})" for code, name in _DTYPES.items())
            raise ValueError(f"{info.path} has the dtype code {code}; known are {known}")
        index = cls(info, files, np.dtype(_DTYPES[code]), sequences, indices)
        if info.size not in (index._modes_start, index._modes_start + sequences):
            raise ValueError(
                f"{info.path} has {info.size} bytes; an index of {sequences} sequences and {indices} document indices "
                f"has {index._modes_start}, or {index._modes_start + sequences} with modes: it is cut short or damaged"
            )
        return index

    @property
    def _modes_start(self) -> int:
        return _HEADER.size + 12 * self.num_sequences + 8 * self.num_indices

    @property
    def has_modes(self) -> bool:
        return self.num_sequences > 0 and self.info.size > self._modes_start

    def lengths(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """int32 [stop - start]: tokens of sequences."""
        return self._array(np.int32, _HEADER.size, start, stop)

    def pointers(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64 [stop - start]: first bytes of sequences."""
        return self._array(np.int64, _HEADER.size + 4 * self.num_sequences, start, stop)

    def documents(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64 [stop - start]: first sequences of documents; the last index is the number of sequences."""
        return self._array(np.int64, _HEADER.size + 12 * self.num_sequences, start, stop)

    def modes(self, start: int, stop: int) -> npt.NDArray[np.int8]:
        """int8 [stop - start]: modes of sequences."""
        return self._array(np.int8, self._modes_start, start, stop)

    def _array(self, dtype: Any, base: int, start: int, stop: int) -> npt.NDArray[Any]:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self.files.read(self.info, base + start * size, base + stop * size), dtype)

    def check(self, data: FileInfo) -> None:
        """See that sequences follow each other through the whole `.bin`, and documents through all sequences.

        Raises:
            ValueError: They do not.
        """
        end = 0
        for start, stop in _chunks(self.num_sequences):
            lengths = self.lengths(start, stop).astype(np.int64)
            if (lengths < 0).any():
                raise ValueError(
                    f"{self.info.path}: sequence {start + int(np.argmax(lengths < 0))} is of negative length"
                )
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            wrong = self.pointers(start, stop) != ends - lengths * self.dtype.itemsize
            if wrong.any():
                at = start + int(np.argmax(wrong))
                raise ValueError(f"{self.info.path}: sequence {at} does not begin where the one before it ends")
            end = int(ends[-1])
        if data.size != end:
            raise ValueError(
                f"{data.path} has {data.size} bytes, and its index {self.info.path} speaks of {end}: one of the two is "
                "cut short, or they do not belong together"
            )
        last = 0
        for start, stop in _chunks(self.num_indices):
            indices = self.documents(start, stop)
            if (start == 0 and indices[0] != 0) or indices[0] < last or (np.diff(indices) < 0).any():
                raise ValueError(f"{self.info.path}: its document indices do not rise from 0")
            last = int(indices[-1])
        if not self.num_indices or last != self.num_sequences:
            raise ValueError(
                f"{self.info.path}: its document indices end at sequence {last} of {self.num_sequences}; what wrote it "
                "did not end its last document"
            )


def _chunks(n: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK, n)) for start in range(0, n, _CHUNK))


class MegatronFormat(SourceFormat):
    """`data` names `.bin` or `.idx` files, or what both begin with. A record is a document, or a sequence."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """See `SourceFormat`. Each `.idx` is followed by its `.bin`."""
        pairs: dict[str, tuple[FileInfo, FileInfo]] = {}
        for pattern in flat_paths(source.data, source.name):
            for info in find_files(source.name, _with_suffix(pattern, storage), storage):
                stem, suffix = os.path.splitext(info.path)
                if suffix not in (".bin", ".idx"):
                    raise ConfigError(f"source {source.name!r}: {info.path} is neither a .bin nor an .idx file")
                if stem not in pairs:
                    partner = find_files(source.name, stem + (".bin" if suffix == ".idx" else ".idx"), storage)[0]
                    pairs[stem] = (info, partner) if suffix == ".idx" else (partner, info)
        if not pairs:
            raise ConfigError(
                f"source {source.name!r}: data={without_secrets(source.data)!r} names no .bin or .idx file"
            )
        return tuple(chain.from_iterable(pairs.values()))

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`. Looks at every length, pointer and document index once."""
        check_options(source, "megatron", _OPTIONS)
        spans = SpanFiles(storage)
        found = []
        for number in range(0, len(files), 2):
            info, data = files[number : number + 2]
            try:
                index = _Index.open(info, spans)
                index.check(data)
                _check_columns(source.name, info, index, source.columns or ())
                found.append(_units(index, data, number + 1, _by_document(source)))
            except (OSError, ValueError) as error:
                if isinstance(error, ConfigError) or repr(source.name) in str(error):
                    raise
                raise DataError(f"source {source.name!r}: {error}") from error
        spans.close()
        return Listing(np.concatenate(found))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> MegatronReader:
        """See `SourceFormat`."""
        return MegatronReader(source, manifest, columns, resources.storage)


def _with_suffix(pattern: str, storage: Storage) -> str:
    if pattern.endswith((".bin", ".idx")):
        return pattern
    if not storage.is_remote(pattern) and os.path.isdir(os.path.expanduser(pattern)):
        return os.path.join(pattern, "*.idx")
    return f"{pattern}.idx"


def _by_document(source: Source) -> bool:
    return bool(source.format_options.get("records", "document") == "document")


def _check_columns(name: str, info: FileInfo, index: _Index, needed: Sequence[str]) -> None:
    there = ["input_ids", "mode", "sequence_lengths"] if index.has_modes else ["input_ids"]
    check_columns(name, info.path, there, needed)


def _buffer(array: npt.NDArray[Any]) -> Any:
    return pa.py_buffer(cast("Any", array))


def _units(index: _Index, data: FileInfo, number: int, by_document: bool) -> npt.NDArray[Any]:
    """UNIT [n]: a unit ends before the first record that begins in another multiple of `UNIT_BYTES`."""
    records = index.num_indices - 1 if by_document else index.num_sequences
    cuts, begins, last = [], [], -1
    for start, stop in _chunks(records):
        firsts = _starts(index, data, start, stop, by_document)
        blocks = firsts // UNIT_BYTES
        at = np.flatnonzero(np.diff(blocks, prepend=last))
        cuts.append(start + at)
        begins.append(firsts[at])
        last = int(blocks[-1])
    starts = np.concatenate([*cuts, [records]]).astype(np.int64)
    units = np.zeros(len(starts) - 1, UNIT)
    units["file"], units["start"], units["stop"] = number, starts[:-1], starts[1:]
    units["rows"] = np.diff(starts)
    units["bytes"] = np.diff(np.concatenate([*begins, [data.size]]))
    return units


def _starts(index: _Index, data: FileInfo, start: int, stop: int, by_document: bool) -> npt.NDArray[np.int64]:
    """int64 [stop - start]: first bytes of records; empty documents at the end begin behind the last byte."""
    if not by_document:
        return index.pointers(start, stop)
    sequences = index.documents(start, stop)
    first, last = int(sequences[0]), min(int(sequences[-1]) + 1, index.num_sequences)
    if first == last:
        return np.full(stop - start, data.size)
    pointers = index.pointers(first, last)
    return np.where(sequences < index.num_sequences, pointers[np.minimum(sequences, last - 1) - first], data.size)


class MegatronReader(SpanReader):
    """`SourceReader` of indexed datasets: tables whose `input_ids` are the pages of the `.bin` file.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        columns: Of `input_ids`, `mode` and `sequence_lengths`, the last two only where the index has modes; None: all.
        storage: Opens the files.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        super().__init__(source, manifest, columns, storage)
        self._by_document = _by_document(source)

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of a run of documents; see `SourceReader.read`."""
        entry = self._manifest.units[unit]
        first = int(entry["start"])
        _, start, stop = self._manifest.rows_of(unit, row_start, row_stop)
        with unit_errors(self._source.name, self._manifest, unit):
            table = self._table(int(entry["file"]), first + start, first + stop)
        return RecordBlock(unit=unit, row_start=start, num_rows=stop - start, table=table)

    def _table(self, file: int, start: int, stop: int) -> pa.Table:
        info, data = self._manifest.files[file - 1], self._manifest.files[file]
        index = _Index.open(info, self._files)
        _check_columns(self._source.name, info, index, self._columns or ())
        bounds = index.documents(start, stop + 1) if self._by_document else np.arange(start, stop + 1, dtype=np.int64)
        first, last = int(bounds[0]), int(bounds[-1])
        lengths = index.lengths(first, last).copy()  # where they lie in the file, they are not aligned
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        begin = int(index.pointers(first, first + 1)[0]) if last > first else 0
        values = self._files.read(data, begin, begin + int(ends[-1]) * index.dtype.itemsize)
        columns: dict[str, Any] = {"input_ids": token_lists(values, index.dtype, ends[bounds - first])}
        if index.has_modes:
            columns |= self._modes(index, lengths, bounds - first, first)
        return pa.table({name: columns[name] for name in self._columns or columns})

    def _modes(
        self, index: _Index, lengths: npt.NDArray[np.int32], bounds: npt.NDArray[np.int64], first: int
    ) -> dict[str, Any]:
        modes = index.modes(first, first + len(lengths))
        if not self._by_document:
            return {"mode": pa.array(modes), "sequence_lengths": pa.array(lengths)}
        return {
            "mode": token_lists(_buffer(modes), np.int8, bounds),
            "sequence_lengths": token_lists(_buffer(lengths), np.int32, bounds),
        }


FORMAT: Final = MegatronFormat()
