"""`find_folder_format`: the format of a folder, by what lies in it."""

from __future__ import annotations

import glob
import json
import os
from typing import Any, Final

from megascale_lightning.errors import DataError
from megascale_lightning.sources.formats import FORMATS
from megascale_lightning.sources.formats.folders import INDEX_NAME, is_index
from megascale_lightning.sources.formats.images.format import walk_files
from megascale_lightning.sources.formats.webdataset.energon import find_file, is_prepared
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import expand_braces
from megascale_lightning.sources.stores.globbing import match_local
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_web

__all__ = ["find_folder_format"]

_INDEX_KEYS: Final = {"shards": "mds", "chunks": "litdata"}


def find_folder_format(source: Source, storage: Storage) -> str | None:
    """The format of the first folder that `data` names; None if it is a file or a pattern of files, or tells nothing.

    `.nv-meta` in it: webdataset; an `index.json` in or below it, with shards: mds, with chunks: litdata; an image in or
    below it: images.

    Raises:
        DataError: A store does not answer, or refuses.
    """
    path = _first_path(source.data, storage)
    if path is None:
        return None
    if is_index(path):
        found = find_file(path, storage)
        return None if found is None else _of_index(found, storage)
    if _is_file(path, storage):
        return None
    if is_prepared(path, storage):
        return "webdataset"
    index = find_file(f"{path}/{INDEX_NAME}", storage)
    kind = None if index is None else _of_index(index, storage)
    if kind is not None or is_web(path):
        return kind
    return _of_content(path, storage)


def _first_path(data: Any, storage: Storage) -> str | None:
    while isinstance(data, (list, tuple)):
        if not data:
            return None
        data = data[0]
    path = expand_braces(os.fspath(data))[0]
    if storage.is_remote(path):
        return None if glob.has_magic(path) else path.rstrip("/")
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(path) or not glob.has_magic(path):
        return path
    matches = match_local(path)
    return matches[0] if matches and all(os.path.isdir(match) for match in matches) else None


def _is_file(path: str, storage: Storage) -> bool:
    if storage.is_remote(path):
        # Most folders have no such name, and most files do: it spares a request for each of the few questions.
        return any(kind.ends(path) for kind in FORMATS.values())
    return not os.path.isdir(path)


def _of_content(path: str, storage: Storage) -> str | None:
    for info in walk_files(path, storage):
        if FORMATS["images"].ends(info.path):
            return "images"
        kind = _of_index(info, storage) if is_index(info.path) else None
        if kind is not None:
            return kind
    return None


def _of_index(info: FileInfo, storage: Storage) -> str | None:
    try:
        with storage.open(info) as stream:
            content = json.loads(stream.read())
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        return None
    if not isinstance(content, dict):
        return None
    return next((kind for key, kind in _INDEX_KEYS.items() if isinstance(content.get(key), list)), None)
