"""Folders that Megatron-Energon prepared: the shards of a split, what is left out of it, and the fields it gives."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats import FORMATS
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import expand_braces, expanded_paths, find_files
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = [
    "META_FOLDER",
    "EnergonMeta",
    "energon_folders",
    "find_file",
    "is_meta",
    "is_prepared",
    "list_shards",
    "read_meta",
    "shard_counts",
]

META_FOLDER: Final = ".nv-meta"
_INFO: Final = (".info.json", ".info.yaml")
_SPLIT: Final = ("split.yaml", "split.json")
_DATASET: Final = ("dataset.yaml",)


@dataclass(frozen=True, slots=True)
class EnergonMeta:
    """What the descriptions of the folders of a source say of its shards."""

    excluded: Mapping[str, frozenset[bytes]]
    """Path of a shard -> keys of its samples that are left out."""
    fields: Mapping[str, str] | None
    """Field of a sample -> extension, as `field_map` has it; None where there is none, or code makes the sample."""


def is_meta(info: FileInfo) -> bool:
    """Whether a file of a source describes its shards and is none."""
    return f"/{META_FOLDER}/" in info.path.replace(os.sep, "/")


def energon_folders(source: Source, storage: Storage) -> list[str]:
    """The prepared folders that `data` names, absolute or as URLs; none, if it names files."""
    found: list[str] = []
    for item in expanded_paths(source.data, source.name):
        path = item.rstrip("/") if storage.is_remote(item) else os.path.abspath(os.path.expanduser(item))
        is_file = FORMATS["webdataset"].ends(path) and not os.path.isdir(path)
        if not is_file and not glob.has_magic(path) and is_prepared(path, storage):
            found.append(path)
        elif found:
            raise ConfigError(f"source {source.name!r}: {item} is no folder with {META_FOLDER}, as those before it are")
    return found


def is_prepared(folder: str, storage: Storage) -> bool:
    """Whether a folder is one of Energon's."""
    return _first(folder, _INFO, storage) is not None


def _first(folder: str, names: Sequence[str], storage: Storage) -> FileInfo | None:
    paths = [f"{folder}/{META_FOLDER}/{name}" for name in names]
    return next((info for path in paths if (info := find_file(path, storage)) is not None), None)


def find_file(path: str, storage: Storage) -> FileInfo | None:
    """A file by its absolute path or URL, None where there is none."""
    if storage.is_remote(path):
        return storage.info(path)
    try:
        return FileInfo.local(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def list_shards(source: Source, folders: Sequence[str], storage: Storage) -> tuple[FileInfo, ...]:
    """The shards of a split in its order, then the files that describe them.

    Raises:
        ConfigError: There is no such split, or it has no shard.
        DataError: A shard or a description is missing or broken.
    """
    shards: dict[str, FileInfo] = {}
    metas = []
    for folder in folders:
        files = [_first(folder, names, storage) for names in (_INFO, _SPLIT, _DATASET)]
        split = files[1]
        if split is None:
            raise DataError(f"source {source.name!r}: {folder}/{META_FOLDER} has no {_SPLIT[0]}; prepare it again")
        metas += [info for info in files if info is not None]
        paths = list(dict.fromkeys(f"{folder}/{name}" for name in _split(source, split, storage)))
        if storage.is_remote(folder):
            found: list[FileInfo | None] = [*find_files(source.name, paths, storage)] if paths else []
        else:
            found = [find_file(path, storage) for path in paths]
        for path, info in zip(paths, found, strict=True):
            if info is None:
                raise DataError(f"source {source.name!r}: {path} is missing, which {split.path} names")
            shards[path] = info
    if not shards:
        raise ConfigError(f"source {source.name!r}: split {_split_name(source)!r} has no shard")
    return (*shards.values(), *metas)


def _split_name(source: Source) -> str:
    return str(source.format_options.get("split", "train"))


def _split(source: Source, info: FileInfo, storage: Storage) -> list[str]:
    """Shards of a split, relative to the folder."""
    content = _load(source, info, storage)
    parts = content.get("split_parts")
    if not isinstance(parts, Mapping):
        raise DataError(f"source {source.name!r}: {info.path} has no split_parts")
    name = _split_name(source)
    if name not in parts:
        raise ConfigError(
            f"source {source.name!r}: {info.path} has no split {name!r}; "
            f"set format_options={{'split': one of {', '.join(map(repr, parts))}}}"
        )
    excluded = {one for pattern in content.get("exclude") or () for one in expand_braces(pattern)}
    return [one for pattern in parts[name] or () for one in expand_braces(pattern) if one not in excluded]


def read_meta(source: Source, files: Sequence[FileInfo], storage: Storage) -> EnergonMeta:
    """What the descriptions among the files of a source say.

    Raises:
        DataError: One of them is broken, or they have different fields.
    """
    excluded: dict[str, set[bytes]] = {}
    maps = []
    shards = {info.path.replace(os.sep, "/"): info.path for info in files if not is_meta(info)}
    for info in files:
        folder, _, name = info.path.replace(os.sep, "/").rpartition(f"/{META_FOLDER}/")
        if not folder:
            continue
        content = _load(source, info, storage) if name not in _INFO else {}
        if name in _DATASET:
            maps.append(_field_map(content))
        patterns = (content.get("exclude") or ()) if name in _SPLIT else ()
        for one in (one for pattern in patterns for one in expand_braces(pattern)):
            whole = f"{folder}/{one}"
            shard = next((whole[:at] for at in _slashes(whole) if whole[:at] in shards), None)
            if shard is not None:
                excluded.setdefault(shards[shard], set()).add(whole[len(shard) + 1 :].encode())
    if any(one != maps[0] for one in maps):
        raise DataError(f"source {source.name!r}: its folders have different field maps; make a source of each")
    return EnergonMeta({shard: frozenset(keys) for shard, keys in excluded.items()}, maps[0] if maps else None)


def _slashes(path: str) -> Iterator[int]:
    return (at for at, letter in enumerate(path) if letter == "/")


def shard_counts(source: Source, files: Sequence[FileInfo], storage: Storage) -> dict[str, int]:
    """Path of a shard -> its number of samples, as the descriptions say."""
    found = {}
    for info in files:
        folder, _, name = info.path.replace(os.sep, "/").rpartition(f"/{META_FOLDER}/")
        if folder and name in _INFO:
            counts = _load(source, info, storage).get("shard_counts") or {}
            found.update({f"{folder}/{shard}": int(count) for shard, count in counts.items()})
    return found


def _field_map(content: Mapping[str, Any]) -> dict[str, str] | None:
    found = content.get("field_map")
    if not isinstance(found, Mapping) or not all(isinstance(value, str) for value in found.values()):
        return None
    return {str(key): value for key, value in found.items()}


def _load(source: Source, info: FileInfo, storage: Storage) -> Mapping[str, Any]:
    try:
        with storage.open(info) as stream:
            data = stream.read()
        content = json.loads(data) if info.path.endswith(".json") else _load_yaml(data)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"source {source.name!r}: {info.path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise DataError(f"source {source.name!r}: {info.path} holds a {type(content).__name__}, not a mapping")
    return content


def _load_yaml(data: bytes) -> Any:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
