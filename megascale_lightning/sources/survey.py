"""`build_manifest`: looks at the files of a source once, when a run begins."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megascale_lightning.errors import EmptySourceError, MegaScaleWarning
from megascale_lightning.sources.formats import dataset, find_file_format, load_format
from megascale_lightning.sources.formats.folderformats import find_folder_format
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import find_files, flat_paths, is_file_data
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_url

__all__ = ["build_manifest"]


def build_manifest(
    source: Source,
    *,
    portable: bool = False,
    dump: Callable[[Any, Any], None] = pickle.dump,
    files: tuple[FileInfo, ...] | None = None,
    needs_tokens: bool = True,
) -> Manifest:
    """List the files and units of a source. Reads Parquet footers and looks for newlines; runs once, on one process.

    Args:
        source: What the user declared.
        portable: A dataset must pickle, since roles of other processes read it.
        dump: `dump(object, file)`: how it will be pickled.
        files: The files to take, of those that the source names; None takes all.
        needs_tokens: Rows are made of `input_ids`, which files of a source without a transform must have.

    Raises:
        ConfigError: Files are missing, of no known format, or lack a column; data are neither a dataset nor an
            iterable, or do not pickle.
        EmptySourceError: There is no record at all.
        DataError: A file cannot be read.
    """
    _warn_of_ignored(source)
    storage = Storage.of(source)
    kind, made = _recognise(source, storage)
    if kind in ("dataset", "iterable") and portable:
        dataset.check_portable(source, dump)
    form = load_format(kind)
    if kind == "dataset" and made is not None:
        source = replace(source, data=made)
    files = files or form.list_files(source, storage)
    listed = source if needs_tokens or source.columns is not None else replace(source, columns=())
    units, sliced = form.list_units(listed, files, storage)
    if not units["rows"].any():
        if kind == "dataset":
            raise EmptySourceError(f"source {source.name!r}: its dataset is empty")
        raise EmptySourceError(f"source {source.name!r}: its {len(files)} files hold no record ({files[0].path}, ...)")
    return Manifest(files, units, kind, sliced)


def _warn_of_ignored(source: Source) -> None:
    if not source.storage_options or (source.filesystem is None and any(map(is_url, flat_paths(source.data)))):
        return
    why = "filesystem= reads the files" if source.filesystem is not None else "its data name no URL"
    warnings.warn(
        f"source {source.name!r}: storage_options are ignored, since {why}: leave them out",
        MegaScaleWarning,
        stacklevel=3,
    )


def _recognise(source: Source, storage: Storage) -> tuple[str, Any]:
    """The format as declared, or by a file's name, what lies in a folder, or what a callable returns.

    Returns:
        The format, and what the callable returned if it was called, which is once.

    Raises:
        ConfigError: None of these tells.
    """
    if source.format is not None:
        return source.format, None
    if not is_file_data(source.data):
        return dataset.recognise_data(source)
    folder = find_folder_format(source, storage)
    if folder is not None:
        return folder, None
    return find_file_format(source, [info.path for info in find_files(source.name, source.data, storage)]), None
