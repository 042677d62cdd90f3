"""`build_manifest`: looks at the files of a source once, when a run begins."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from megascale_lightning.errors import EmptySourceError
from megascale_lightning.sources import dataset
from megascale_lightning.sources.files import find_files, is_file_data
from megascale_lightning.sources.formats import find_file_format, load_format
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.storage import FileInfo, Storage

__all__ = ["build_manifest", "find_format"]


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
    storage = Storage.of(source)
    kind = find_format(source, storage)
    if kind == "dataset" and portable:
        dataset.check_portable(source, dump)
    form = load_format(kind)
    files = files or form.list_files(source, storage)
    units, sliced = form.list_units(source, files, storage)
    if not units["rows"].any():
        raise EmptySourceError(f"source {source.name!r}: its {len(files)} files hold no record ({files[0].path}, ...)")
    return Manifest(files, units, kind, sliced)


def find_format(source: Source, storage: Storage) -> str:
    """The format as declared, or by the first file's name.

    Raises:
        ConfigError: The name does not tell.
    """
    if source.format is not None:
        return source.format
    if not is_file_data(source.data):
        return "dataset"
    return find_file_format(source, [info.path for info in find_files(source.name, source.data, storage)])
