"""File lists of a source: paths, globs, brace patterns, lists of these; local or by fsspec URL."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.storage import FileInfo, Storage

__all__ = ["expand_braces", "find_files", "is_file_data"]

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")


def is_file_data(data: Any) -> bool:
    """Whether `Source.data` names files: a path, a pattern, or a list of these."""
    if isinstance(data, (list, tuple)):
        return len(data) == 0 or is_file_data(data[0])
    return isinstance(data, (str, os.PathLike))


def expand_braces(pattern: str) -> list[str]:
    """Write out `{000..127}` and `{a,b}`, in the order written; nested braces work, other braces are left alone.

    >>> expand_braces("s-{08..10}.{x,y}")
    ['s-08.x', 's-08.y', 's-09.x', 's-09.y', 's-10.x', 's-10.y']
    """
    for match in _BRACES.finditer(pattern):
        choices = _choices(match.group(1))
        if choices is not None:
            head, tail = pattern[: match.start()], pattern[match.end() :]
            return list(dict.fromkeys(path for choice in choices for path in expand_braces(head + choice + tail)))
    return [pattern]


def _choices(body: str) -> list[str] | None:
    span = _RANGE.fullmatch(body)
    if span is None:
        return body.split(",") if "," in body else None
    low, high = span.groups()
    digits = len(low) if low.startswith("0") or high.startswith("0") else 0
    step = 1 if int(low) <= int(high) else -1
    return [str(number).zfill(digits) for number in range(int(low), int(high) + step, step)]


def find_files(name: str, data: Any, storage: Storage | None = None) -> tuple[FileInfo, ...]:
    """All files of source `name`, in list order, those of one glob sorted, each once.

    Args:
        name: Of the source, for messages.
        data: As in `Source.data`: a path, a pattern, or a list of these.
        storage: Where they lie; None: on this machine, or where their URLs say.

    Raises:
        ConfigError: A pattern matches nothing, or a path is a directory or missing.
    """
    storage = storage or Storage()
    found: dict[str, FileInfo] = {}
    for pattern in _patterns(name, data):
        for alternative in expand_braces(pattern):
            for info in _matches(name, alternative, pattern, storage):
                found.setdefault(info.path, info)
    if not found:
        raise ConfigError(f"source {name!r}: data={data!r} names no file; give a path, a pattern or a list of these")
    return tuple(found.values())


def _patterns(name: str, data: Any) -> Iterator[str]:
    if isinstance(data, (str, os.PathLike)):
        yield os.fspath(cast("str", data))
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _patterns(name, item)
    else:
        raise ConfigError(
            f"source {name!r}: a file list holds paths, patterns and lists of these, not {type(data).__name__}"
        )


def _matches(name: str, path: str, pattern: str, storage: Storage) -> list[FileInfo]:
    if storage.is_remote(path):
        return _match_remote(name, path, pattern, storage)
    return _match_local(name, path, pattern)


def _match_local(name: str, path: str, pattern: str) -> list[FileInfo]:
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(path):
        paths = [path]
    else:
        paths = sorted(found for found in glob.glob(path, recursive=True) if os.path.isfile(found))
    if not paths:
        raise _nothing(name, path, pattern, is_dir=os.path.isdir(path))
    stats = [(found, os.stat(found)) for found in paths]
    return [FileInfo(found, stat.st_size, stat.st_mtime_ns) for found, stat in stats]


def _match_remote(name: str, url: str, pattern: str, storage: Storage) -> list[FileInfo]:
    fs, path = storage.filesystem(url)
    paths = sorted(fs.glob(path)) if glob.has_magic(path) else [path] if fs.exists(path) else []
    infos = [(found, fs.info(found)) for found in paths]
    files = [FileInfo(fs.unstrip_protocol(found), int(info["size"]), 0) for found, info in infos if _is_file(info)]
    if not files:
        raise _nothing(name, url, pattern, is_dir=bool(infos))
    return files


def _is_file(info: Any) -> bool:
    return bool(info["type"] == "file")


def _nothing(name: str, path: str, pattern: str, *, is_dir: bool) -> ConfigError:
    if is_dir:
        return ConfigError(f"source {name!r}: {path} is a directory; name its files, such as {path}/*.parquet")
    of_pattern = "" if pattern == path else f" (of the pattern {pattern!r})"
    return ConfigError(f"source {name!r}: no file matches {path}{of_pattern}; paths are relative to {os.getcwd()}")
