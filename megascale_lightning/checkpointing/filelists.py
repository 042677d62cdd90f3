"""The frozen file lists of a run: kept beside its state, to tell which files changed and to go on without new ones."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from megascale_lightning.errors import StateError
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.storage import FileInfo

__all__ = [
    "FILES_KEY",
    "FileChanges",
    "FileLists",
    "compare_lists",
    "describe_changes",
    "kept_files",
    "list_names",
    "lists_of",
    "pack_lists",
    "unpack_lists",
]

logger = logging.getLogger(__name__)

FileLists: TypeAlias = Mapping[str, tuple[FileInfo, ...]]
"""Source name, or `name/join/0` and so on for what is joined to it -> files, in list order."""

FILES_KEY: Final = "megascale_lightning_files"
"""The fixed key of the file lists in a checkpoint."""

_SHOWN: Final = 3


def list_names(source: Source) -> list[str]:
    """Names of the lists of a source: of its own files, and of those of each of its joins."""
    return [source.name, *(f"{source.name}/join/{index}" for index in range(len(source.joins)))]


def lists_of(source: Source, manifest: Manifest) -> FileLists:
    """The lists of a source."""
    manifests = (manifest, *manifest.joined)
    return {name: one.files for name, one in zip(list_names(source), manifests, strict=True)}


def pack_lists(lists: FileLists) -> bytes:
    """The lists as compressed JSON."""
    table = {name: [[info.path, info.size, info.mtime_ns] for info in files] for name, files in lists.items()}
    return zlib.compress(json.dumps(table).encode())


def unpack_lists(packed: bytes) -> dict[str, tuple[FileInfo, ...]]:
    """Lists as they were packed. Raises: StateError: they are damaged."""
    try:
        table = json.loads(zlib.decompress(packed))
        return {
            name: tuple(FileInfo(str(path), int(size), int(mtime)) for path, size, mtime in files)
            for name, files in table.items()
        }
    except (zlib.error, ValueError, TypeError, AttributeError) as error:
        raise StateError(f"the file lists beside the loader state are damaged: {error}") from error


@dataclass(frozen=True)
class FileChanges:
    """What became of the files of some sources since their lists were saved, where the run can go on all the same."""

    kept: FileLists = field(default_factory=dict)
    """Files to keep to, of sources that got further ones."""
    copied: tuple[str, ...] = ()
    """Sources whose files were written anew, at equal sizes, all of a list: copied or fetched once more."""


def compare_lists(pairs: Mapping[str, tuple[Sequence[FileInfo], Sequence[FileInfo]]]) -> FileChanges:
    """Tell what can be gone on with, and say so in the log.

    Args:
        pairs: Name of a list -> files then and now.
    """
    kept, copied, edited = {}, [], set()
    for name, (saved, now) in pairs.items():
        source = name.partition("/")[0]
        files = kept_files(saved, now)
        if files is not None:
            kept[name] = files
            logger.warning(
                "source %r goes on with the files that the run began with: %s; "
                'force_resume=["files.%s"] takes in all that there are and begins the source\'s epoch anew',
                source,
                describe_changes(saved, now),
                source,
            )
        found = now if files is None else files
        if not _all_written_anew(saved, found):
            edited |= set() if list(saved) == list(found) else {source}
        else:
            copied.append(source)
            logger.warning(
                "source %r: all %d files were written since the state was saved, each with its size of then: taken for "
                "copies",
                source,
                len(saved),
            )
    return FileChanges(kept, tuple(source for source in dict.fromkeys(copied) if source not in edited))


def _all_written_anew(saved: Sequence[FileInfo], now: Sequence[FileInfo]) -> bool:
    """A single file at its old path may as well have been edited."""
    pairs = list(_pairs(saved, now).values())
    same = all(a is not None and b is not None and a.size == b.size and a.mtime_ns != b.mtime_ns for a, b in pairs)
    return same and (len(pairs) > 1 or [info.path for info in saved] != [info.path for info in now])


def kept_files(saved: Sequence[FileInfo], now: Sequence[FileInfo]) -> tuple[FileInfo, ...] | None:
    """The files of today's list that the saved one has, in its order; None where one is gone or has another size.

    None also where there was no list.
    """
    pairs = [pair for pair in _pairs(saved, now).values() if pair[0] is not None]
    kept = tuple(
        after for before, after in pairs if after is not None and before is not None and after.size == before.size
    )
    return kept if 0 < len(kept) == len(saved) < len(now) else None


def describe_changes(saved: Sequence[FileInfo], now: Sequence[FileInfo]) -> str:
    """What became of the files of a source since the list was saved, for messages."""
    added, gone, resized, rewritten = [], [], [], []
    for name, (before, after) in _pairs(saved, now).items():
        if before is None:
            added.append(name)
        elif after is None:
            gone.append(name)
        elif before.size != after.size:
            resized.append(f"{name} ({before.size} -> {after.size} bytes)")
        elif before.mtime_ns != after.mtime_ns:
            rewritten.append(name)
    kinds = (("added", added), ("gone", gone), ("of another size", resized), ("written since", rewritten))
    return "; ".join(_some(kind, files) for kind, files in kinds if files) or "the same files in another order"


def _pairs(saved: Sequence[FileInfo], now: Sequence[FileInfo]) -> dict[str, tuple[FileInfo | None, FileInfo | None]]:
    """Name -> the file then and now, those of then first; data that were moved are the same data."""
    before, after = {info.path: info for info in saved}, {info.path: info for info in now}
    if not before.keys() & after.keys():
        before, after = _below(saved), _below(now)
    return {
        name: (before.get(name), after.get(name)) for name in [*before, *(name for name in after if name not in before)]
    }


def _below(files: Sequence[FileInfo]) -> dict[str, FileInfo]:
    """By the path below the folder that all files have in common."""
    paths = [info.path.split("/") for info in files]
    depth = 0
    for names in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        depth += 1
    return {"/".join(path[depth:]): info for path, info in zip(paths, files, strict=True)}


def _some(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{more}"
