"""Folders that an `index.json` describes: where they are, and the files that it names."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.stores.files import NoFilesError, find_files, flat_paths
from megascale_lightning.sources.stores.secrets import masked, without_secrets
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_web

__all__ = ["INDEX_NAME", "find_indexes", "find_local", "find_named", "index_before", "is_index", "read_index"]

INDEX_NAME: Final = "index.json"

_STAT_THREADS: Final = 8


def find_indexes(name: str, data: Any, storage: Storage) -> list[FileInfo]:
    """Every `index.json` that `Source.data` names, in list order, those of one pattern sorted.

    Args:
        name: Of the source, for messages.
        data: A folder, an `index.json`, a pattern of these, or a list; a folder without an index gives those below it.
        storage: Where they lie.

    Raises:
        ConfigError: There is none.
    """
    found: dict[str, FileInfo] = {}
    for pattern in flat_paths(data, name):
        infos = _in_or_below(name, pattern, storage)
        if not infos:
            raise ConfigError(
                f"source {name!r}: there is no {INDEX_NAME} in or below {masked(pattern)}; give the folder that it "
                "lies in, or another format="
            )
        for info in infos:
            found.setdefault(info.path, info)
    if not found:
        raise ConfigError(f"source {name!r}: data={without_secrets(data)!r} names no folder")
    return list(found.values())


def _in_or_below(name: str, pattern: str, storage: Storage) -> Sequence[FileInfo]:
    folder = pattern.rstrip("/").removesuffix(INDEX_NAME).rstrip("/") if pattern.endswith(INDEX_NAME) else pattern
    folder = folder.rstrip("/") or "."
    for below in ("", "/**"):
        if below and is_web(folder):
            break  # cannot be listed
        try:
            return find_files(name, f"{folder}{below}/{INDEX_NAME}", storage)
        except NoFilesError:
            continue
    return ()


def is_index(path: str) -> bool:
    """Whether a path or URL is that of an `index.json`."""
    return os.path.basename(path) == INDEX_NAME


def index_before(files: Sequence[FileInfo], number: int) -> int:
    """Number of the `index.json` that file `number` of a source, which it names, comes behind."""
    return next(at for at in range(number, -1, -1) if is_index(files[at].path))


def find_named(name: str, index: FileInfo, basenames: Sequence[str], storage: Storage) -> list[FileInfo]:
    """The files of these names beside an index.

    Args:
        name: Of the source, for messages.
        index: The `index.json`.
        basenames: Relative to its folder.
        storage: Where it lies.

    Raises:
        DataError: One is missing.
    """
    paths = [_beside(index, basename) for basename in basenames]
    if not paths:
        return []
    try:
        if storage.is_remote(index.path):
            return list(find_files(name, paths, storage))
        with ThreadPoolExecutor(_STAT_THREADS) as threads:
            return list(threads.map(FileInfo.local, paths))
    except FileNotFoundError as error:
        raise DataError(
            f"source {name!r}: {error.filename} is missing, which {index.path} names; restore it"
        ) from error
    except NoFilesError as error:
        raise DataError(f"{error}, which {index.path} names; restore it") from error


def find_local(index: FileInfo, basename: str) -> FileInfo | None:
    """A file on this machine beside an index, None where there is none."""
    try:
        return FileInfo.local(_beside(index, basename))
    except FileNotFoundError:
        return None


def _beside(index: FileInfo, basename: str) -> str:
    return index.path[: -len(INDEX_NAME)] + basename


def read_index(name: str, info: FileInfo, storage: Storage, key: str) -> dict[str, Any]:
    """The content of an `index.json`.

    Args:
        name: Of the source, for messages.
        info: The file.
        storage: Opens it.
        key: A key that it has to have, whose value is a list.

    Raises:
        ConfigError: It is of another format.
        DataError: It is no JSON object.
    """
    try:
        with storage.open(info) as stream:
            index = json.loads(stream.read())
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"source {name!r}: {info.path} cannot be read: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get(key), list):
        keys = ", ".join(sorted(index)) if isinstance(index, dict) else type(index).__name__
        raise ConfigError(f"source {name!r}: {info.path} has no list {key!r}, but {keys}: it is of another format")
    return index
