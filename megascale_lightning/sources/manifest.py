"""`Manifest`: the frozen list of files and units of a source, made once and handed to every role."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError, EmptySourceError
from megascale_lightning.sources.files import FileInfo, find_files, is_file_data
from megascale_lightning.sources.source import Source
from megascale_lightning.types import IntArray

__all__ = ["UNIT", "FileInfo", "Manifest", "build_manifest", "find_format"]

UNIT: Final = np.dtype(
    [
        ("file", "<i4"),  # index into `files`
        ("start", "<i8"),  # row group, byte or index
        ("stop", "<i8"),
        ("rows", "<i8"),  # records; -1: not known before it is read
        ("bytes", "<i8"),  # stored size
    ]
)

_SUFFIXES: Final = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_COMPRESSED: Final = (".gz", ".zst", ".bz2", ".lz4")


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Files and units of one source. Units are numbered over all files in list order."""

    files: tuple[FileInfo, ...]
    """A dataset has one entry, "<dataset>", whose size is its length."""
    units: IntArray
    """UNIT [num_units]. Parquet: row groups; JSONL: byte ranges, or a whole compressed file; dataset: index ranges."""
    format: str
    """ "parquet", "jsonl" or "dataset"."""

    @property
    def num_units(self) -> int:
        """Units of one epoch."""
        return len(self.units)

    def digest(self) -> str:
        """Sha256 (hex) over file names, sizes and units: equal where the data are the same, wherever they lie."""
        hasher = hashlib.sha256(self.format.encode())
        for info in self.files:
            hasher.update(f"\0{os.path.basename(info.path)}\0{info.size}".encode())
        hasher.update(np.ascontiguousarray(self.units, UNIT).tobytes())
        return hasher.hexdigest()

    def locate(self, unit: int, row: int | None = None) -> str:
        """Where a record is, for messages: file, unit and row."""
        path = self.files[int(self.units[unit]["file"])].path
        where = f"{path}, unit {unit}"
        return where if row is None else f"{where}, row {row}"


def build_manifest(
    source: Source,
    *,
    portable: bool = False,
    dump: Callable[[Any, Any], None] = pickle.dump,
) -> Manifest:
    """List the files and units of a source. Reads Parquet footers and looks for newlines; runs once, on one process.

    Args:
        source: What the user declared.
        portable: A dataset must pickle, since roles of other processes read it.
        dump: `dump(object, file)`: how it will be pickled.

    Raises:
        ConfigError: Files are missing, of no known format, or lack a column; a dataset is none, or does not pickle.
        EmptySourceError: There is no record at all.
        DataError: A file cannot be read.
    """
    kind = find_format(source)
    if kind == "dataset":
        from megascale_lightning.sources import dataset

        if portable:
            dataset.check_portable(source, dump)
        files, units = dataset.list_units(source)
    elif kind == "parquet":
        from megascale_lightning.sources import parquet

        files = find_files(source.name, source.data)
        units = parquet.list_units(source, files)
    else:
        from megascale_lightning.sources import jsonl

        files = find_files(source.name, source.data)
        units = jsonl.list_units(source, files)
    if not units["rows"].any():
        raise EmptySourceError(f"source {source.name!r}: its {len(files)} files hold no record ({files[0].path}, ...)")
    return Manifest(files, units, kind)


def find_format(source: Source) -> str:
    """The format as declared, or by the first file's name.

    Raises:
        ConfigError: The name does not tell.
    """
    if source.format is not None:
        return source.format
    if not is_file_data(source.data):
        return "dataset"
    path = find_files(source.name, source.data)[0].path
    stem, suffix = os.path.splitext(path)
    if suffix in _COMPRESSED:
        stem, suffix = os.path.splitext(stem)
        found = "jsonl" if _SUFFIXES.get(suffix) == "jsonl" else None
    else:
        found = _SUFFIXES.get(suffix)
    if found is None:
        known = ", ".join(_SUFFIXES)
        raise ConfigError(
            f"source {source.name!r}: the format of {path} is not told by its name (known: {known}; .jsonl also with "
            f'{", ".join(_COMPRESSED)}); set format="parquet" or "jsonl"'
        )
    return found
