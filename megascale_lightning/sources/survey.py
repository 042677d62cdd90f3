"""`build_manifest`: looks at the files of a source once, when a run begins."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from megascale_lightning.errors import ConfigError, EmptySourceError, MegaScaleWarning
from megascale_lightning.sources.formats import dataset, find_file_format, load_format
from megascale_lightning.sources.formats.folderformats import find_folder_format
from megascale_lightning.sources.join import Join
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import find_files, flat_paths, is_file_data
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_url

__all__ = ["build_manifest", "joined_source"]


def build_manifest(
    source: Source,
    *,
    portable: bool = False,
    dump: Callable[[Any, Any], None] = pickle.dump,
    files: tuple[FileInfo, ...] | None = None,
    joined_files: Sequence[tuple[FileInfo, ...] | None] = (),
    needs_tokens: bool = True,
) -> Manifest:
    """List the files and units of a source, and of what is joined to it; runs once, on one process.

    Reads Parquet footers and looks for newlines.

    Args:
        source: What the user declared.
        portable: A dataset must pickle, since roles of other processes read it.
        dump: `dump(object, file)`: how it will be pickled.
        files: The files to take, of those that the source names; None takes all.
        joined_files: The same of each of `Source.joins`.
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
    units, sliced = form.list_units(_with_listed_columns(source, needs_tokens), files, storage)
    if not units["rows"].any():
        if kind == "dataset":
            raise EmptySourceError(f"source {source.name!r}: its dataset is empty")
        raise EmptySourceError(f"source {source.name!r}: its {len(files)} files hold no record ({files[0].path}, ...)")
    joined = tuple(
        _joined_manifest(source, join, chosen)
        for join, chosen in zip_longest(source.joins, joined_files[: len(source.joins)])
    )
    if joined and kind == "dataset":
        raise ConfigError(f"source {source.name!r}: join is for files, not for a dataset: join it in the dataset")
    return Manifest(files, units, kind, sliced, joined)


def _with_listed_columns(source: Source, needs_tokens: bool) -> Source:
    """The source with what its files are known to need as its columns."""
    if source.joins:
        # Tokens may come from what is joined.
        return replace(
            source, columns=source.read_columns or tuple(dict.fromkeys(join.on for join in source.joins)), join=None
        )
    return source if needs_tokens or source.columns is not None else replace(source, columns=())


def _joined_manifest(source: Source, join: Join, files: tuple[FileInfo, ...] | None) -> Manifest:
    """What is joined, which has to be of a kind whose records can be looked up."""
    joined = joined_source(source, join)
    manifest = build_manifest(replace(joined, columns=join.read_columns or (join.on,)), files=files, needs_tokens=False)
    if manifest.sliced or manifest.format == "iterable":
        raise ConfigError(
            f"source {source.name!r}: join is for files whose records can be looked up (Parquet, Arrow, plain JSON "
            f"Lines, ...), not for {manifest.format} that is read in slices, such as {manifest.files[0].path}: give "
            "such files, or join the other way round"
        )
    return manifest


def joined_source(source: Source, join: Join) -> Source:
    """What is joined, as a source for listing and reading; it is named in messages as the source that it belongs to."""
    return Source(
        source.name,
        join.data,
        format=join.format,
        columns=join.read_columns,
        storage_options=join.storage_options,
        on_error=source.on_error,
    )


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
