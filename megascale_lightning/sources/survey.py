"""`build_manifest`: looks at the files of a source once, when a run begins."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, Final

from megascale_lightning.errors import ConfigError, EmptySourceError
from megascale_lightning.sources import dataset, jsonl, parquet
from megascale_lightning.sources.files import FileInfo, find_files, is_file_data
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source

__all__ = ["build_manifest", "find_format"]

_SUFFIXES: Final = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_COMPRESSED: Final = (".gz", ".zst", ".bz2", ".lz4")


def build_manifest(
    source: Source,
    *,
    portable: bool = False,
    dump: Callable[[Any, Any], None] = pickle.dump,
    files: tuple[FileInfo, ...] | None = None,
) -> Manifest:
    """List the files and units of a source. Reads Parquet footers and looks for newlines; runs once, on one process.

    Args:
        source: What the user declared.
        portable: A dataset must pickle, since roles of other processes read it.
        dump: `dump(object, file)`: how it will be pickled.
        files: The files to take, of those that the source names; None takes all.

    Raises:
        ConfigError: Files are missing, of no known format, or lack a column; a dataset is none, or does not pickle.
        EmptySourceError: There is no record at all.
        DataError: A file cannot be read.
    """
    kind = find_format(source)
    if kind == "dataset":
        if portable:
            dataset.check_portable(source, dump)
        files, units = dataset.list_units(source)
    elif kind == "parquet":
        files = files or find_files(source.name, source.data)
        units = parquet.list_units(source, files)
    else:
        files = files or find_files(source.name, source.data)
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
