"""File lists of a source: paths, globs, brace patterns, lists of these; local or by fsspec URL."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.stores.globbing import match_local
from megascale_lightning.sources.stores.secrets import masked, without_secrets
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_url, is_web

__all__ = ["NoFilesError", "expand_braces", "expanded_paths", "find_files", "flat_paths", "is_file_data"]

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_LISTED_FROM: Final = 16
"""So many names of one folder are looked up by a listing of it, fewer one by one."""
_ASKING_THREADS: Final = 8

_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")


class NoFilesError(ConfigError):
    """A path or a pattern of a source names no file."""


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

    A file of this machine whose name is a pattern, such as `a[1].jsonl`, is meant itself if it is all there is.

    Args:
        name: Of the source, for messages.
        data: As in `Source.data`: a path, a pattern, or a list of these.
        storage: Where they lie; None: on this machine, or where their URLs say.

    Raises:
        NoFilesError: A pattern matches nothing, or a path is a directory or missing.
        ConfigError: A list holds something else, a store cannot be set up, or a pattern is also the name of a file.
        DataError: A store does not answer, or refuses.
    """
    storage = storage or Storage()
    known = storage.listed.get(repr(data))
    if known is not None:
        return known
    found: dict[str, FileInfo] = {}
    wanted = [(path, pattern) for pattern in flat_paths(data, name) for path in _alternatives(pattern, storage)]
    named = [pair for pair in wanted if storage.is_remote(pair[0]) and not _is_pattern(pair[0])]
    looked_up = _look_up(name, named, storage)
    for alternative, pattern in wanted:
        if alternative in looked_up:
            infos = [looked_up[alternative]]
        elif storage.is_remote(alternative):
            infos = _match_remote(name, alternative, pattern, storage)
        else:
            infos = _match_local(name, alternative, pattern)
        for info in infos:
            found.setdefault(info.path, info)
    if not found:
        raise ConfigError(
            f"source {name!r}: data={without_secrets(data)!r} names no file; give a path, a pattern or a list of these"
        )
    storage.listed[repr(data)] = tuple(found.values())
    return storage.listed[repr(data)]


def _alternatives(pattern: str, storage: Storage) -> list[str]:
    """What a pattern with braces stands for; a local file that is named so is itself."""
    is_file = not storage.is_remote(pattern) and os.path.isfile(os.path.expanduser(pattern))
    return [pattern] if is_file else expand_braces(pattern)


def flat_paths(data: Any, name: str | None = None) -> Iterator[str]:
    """The paths, patterns and URLs in `Source.data`, in list order.

    Args:
        data: One, or nested lists of them.
        name: Of the source, whose data may hold nothing else; None leaves out what is something else.

    Raises:
        ConfigError: There is something else.
    """
    if isinstance(data, (str, os.PathLike)):
        yield os.fspath(cast("str", data))
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from flat_paths(item, name)
    elif name is not None:
        raise ConfigError(
            f"source {name!r}: a file list holds paths, patterns and lists of these, not {type(data).__name__}"
        )


def expanded_paths(data: Any, name: str) -> Iterator[str]:
    """`flat_paths` of source `name`, with braces written out.

    Raises:
        ConfigError: There is something else.
    """
    for path in flat_paths(data, name):
        yield from expand_braces(path)


def _match_local(name: str, path: str, pattern: str) -> list[FileInfo]:
    path = os.path.abspath(os.path.expanduser(path))
    is_file = os.path.isfile(path)
    if is_file and not glob.has_magic(path):
        return [FileInfo.local(path)]
    paths = [found for found in match_local(path) if os.path.isfile(found)]
    other = next((found for found in paths if found != path), None)
    if is_file and other is not None:
        raise ConfigError(
            f"source {name!r}: {path} is a file, and a pattern that also matches {other}: write {glob.escape(path)} "
            "for that file, or give it another name to read all that the pattern matches"
        )
    if is_file:
        paths = [path]
    if not paths:
        raise _nothing(name, path, pattern, is_dir=os.path.isdir(path))
    return [FileInfo.local(found) for found in paths]


def _is_pattern(path: str) -> bool:
    # A question mark in a web address begins its query.
    return any(sign in path for sign in "*[") if is_web(path) else glob.has_magic(path)


def _match_remote(name: str, url: str, pattern: str, storage: Storage) -> list[FileInfo]:
    """What a pattern matches, with the sizes that its one listing gives."""
    fs, path = storage.filesystem(url)

    def look() -> dict[str, Any]:
        try:
            found: dict[str, Any] = fs.glob(path, detail=True)
        except FileNotFoundError as error:
            if error.__cause__ is not None:
                raise  # fsspec's HTTP says so whatever the server said
            return {}
        return found

    entries = storage.attempt_at(url, look)
    names = {inside: storage.outside(url, fs, inside) for inside in sorted(entries)}
    # An index page has no sizes.
    missing = [inside for inside, entry in entries.items() if entry["type"] == "file" and entry.get("size") is None]
    asked = dict(zip(missing, _ask_each(storage, [names[inside] for inside in missing]), strict=True))
    infos = [asked[inside] if inside in asked else storage.info_of(names[inside], entries[inside]) for inside in names]
    files = [info for info in infos if info is not None]
    if not files:
        raise _nothing(name, url, pattern, is_dir=bool(entries))
    return files


def _look_up(name: str, wanted: list[tuple[str, str]], storage: Storage) -> dict[str, FileInfo]:
    """Remote files by name. Those of a folder that is asked for often are found in one listing of it."""
    folders: dict[str, list[str]] = {}
    for url in dict.fromkeys(url for url, _ in wanted):
        folders.setdefault(url.rpartition("/")[0], []).append(url)
    found: dict[str, FileInfo | None] = {}
    single = []
    for folder, urls in folders.items():
        listed = {} if is_web(folder) or len(urls) < _LISTED_FROM else _list_folder(folder, storage)
        found |= {url: listed.get(url) for url in urls if url in listed}
        single += [url for url in urls if url not in listed]
    found |= dict(zip(single, _ask_each(storage, single), strict=True))
    for url, pattern in wanted:
        if found[url] is None:
            raise _nothing(name, url, pattern, is_dir=_is_folder(url, storage))
    return {url: info for url, info in found.items() if info is not None}


def _list_folder(folder: str, storage: Storage) -> dict[str, FileInfo]:
    fs, inside = storage.filesystem(folder)

    def look() -> list[Any]:
        try:
            return list(fs.ls(inside, detail=True))
        except FileNotFoundError:
            return []

    entries = storage.attempt_at(folder, look)
    names = {f"{folder}/{str(entry['name']).rstrip('/').rpartition('/')[2]}": entry for entry in entries}
    infos = {url: storage.info_of(url, entry) for url, entry in names.items() if entry.get("size") is not None}
    return {url: info for url, info in infos.items() if info is not None}


def _ask_each(storage: Storage, urls: list[str]) -> list[FileInfo | None]:
    if not urls:
        return []
    with ThreadPoolExecutor(min(_ASKING_THREADS, len(urls))) as threads:
        return list(threads.map(storage.info, urls))


def _is_folder(url: str, storage: Storage) -> bool:
    fs, inside = storage.filesystem(url)
    try:
        return not is_web(url) and bool(fs.isdir(inside))
    except Exception:  # only the message depends on it
        return False


def _nothing(name: str, path: str, pattern: str, *, is_dir: bool) -> NoFilesError:
    path, pattern = masked(path), masked(pattern)
    if is_dir:
        return NoFilesError(f"source {name!r}: {path} is a directory; name its files, such as {path}/*.parquet")
    of_pattern = "" if pattern == path else f" (of the pattern {pattern!r})"
    more = "" if is_url(path) else f"; paths are relative to {os.getcwd()}"
    if is_web(path) and _is_pattern(path):
        more = (
            "; of a web server only the files are found that its index page of the folder links to: where there is no "
            "such page, name the files in a list or by braces, such as {000..127}"
        )
    return NoFilesError(f"source {name!r}: no file matches {path}{of_pattern}{more}")
