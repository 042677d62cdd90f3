"""Folders of images: a unit is a range of files; a record has the stored bytes, the path, the class and the caption."""

from __future__ import annotations

import glob
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats import FORMATS, Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.images.captions import METADATA_NAMES, Captions, is_text, stem_of
from megascale_lightning.sources.formats.optionsets import IS_BOOL, check_options
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader, missing_key
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import expanded_paths, find_files
from megascale_lightning.sources.stores.secrets import without_secrets
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_web

__all__ = ["FORMAT", "UNIT_BYTES", "UNIT_FILES", "ImagesFormat", "ImagesReader", "walk_files"]

logger = logging.getLogger(__name__)

UNIT_BYTES: Final = 64 << 20
UNIT_FILES: Final = 256

_REMOTE_THREADS: Final = 8
_FIELDS: Final = ("image", "path", "label")


def _is_image(path: str) -> bool:
    return FORMATS["images"].ends(path)


class ImagesFormat(SourceFormat):
    """A unit is a range of consecutive images, sorted by path; captions lie beside them."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """The images, then the captions and metadata that belong to them; hidden files and others are left out."""
        _check(source)
        images: dict[str, FileInfo] = {}
        beside: dict[str, FileInfo] = {}
        for root, found in _listed(source, storage):
            own = [info for info in found if _is_image(info.path)]
            images.update({info.path: info for info in sorted(own, key=lambda info: info.path[len(root) :])})
            beside.update({info.path: info for info in found if not _is_image(info.path)})
        if not images:
            raise ConfigError(
                f"source {source.name!r}: there is no image in {without_secrets(source.data)!r}; known: "
                f"{', '.join(FORMATS['images'].suffixes)}"
            )
        stems = {stem_of(path) for path in images}
        wanted = source.format_options.get("captions", True)
        used = [info for path, info in beside.items() if wanted and _is_metadata(path)]
        texts = [info for path, info in beside.items() if wanted and is_text(path)]
        used += [info for info in texts if stem_of(info.path) in stems]
        logger.info(
            "source %r: %d images; %d captions without an image and %d other files are left out",
            source.name,
            len(images),
            sum(stem_of(info.path) not in stems for info in texts),
            sum(not _is_metadata(path) and not is_text(path) for path in beside),
        )
        return (*images.values(), *sorted(used, key=lambda info: info.path))

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`."""
        _check(source)
        images = [info for info in files if _is_image(info.path)]
        captions = Captions(source.name, files, images, storage)
        if captions.num_unused:
            logger.warning("source %r: %d entries of its metadata name no image", source.name, captions.num_unused)
        known = (*_FIELDS, *captions.columns, "caption")
        missing = [column for column in source.columns or () if column not in known]
        if missing:
            raise ConfigError(
                f"source {source.name!r}: columns names {', '.join(map(repr, missing))}; its images have "
                f"{', '.join(dict.fromkeys(known))}"
            )
        found = []
        start = held = 0
        for index, info in enumerate(images):
            if index > start and (index - start == UNIT_FILES or held + info.size > UNIT_BYTES):
                found.append((start, start, index, index - start, held))
                start, held = index, 0
            held += info.size
        if images:
            found.append((start, start, len(images), len(images) - start, held))
        return Listing(np.array(found, UNIT))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> ImagesReader:
        """See `SourceFormat`."""
        return ImagesReader(source, manifest, columns, resources.storage)


def _check(source: Source) -> None:
    check_options(source, "images", {"captions": IS_BOOL})


def _is_metadata(path: str) -> bool:
    return os.path.basename(path) in METADATA_NAMES


def _root(item: str, storage: Storage) -> str:
    """The folder that paths are relative to: what is named, or what a pattern or file lies in."""
    if storage.is_remote(item):
        fixed = item.rstrip("/")
    else:
        fixed = os.path.abspath(os.path.expanduser(item))
    if glob.has_magic(fixed):
        parts = fixed.split("/")
        fixed = "/".join(parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))])
    elif _is_image(fixed) and not os.path.isdir(fixed):
        fixed = fixed.rpartition("/")[0]
    if storage.is_remote(item):
        fs, inside = storage.filesystem(fixed)
        return storage.outside(fixed, fs, inside).rstrip("/")
    return fixed


def _listed(source: Source, storage: Storage) -> Iterator[tuple[str, list[FileInfo]]]:
    """(root, files) of every item of `data`: images, and what lies beside them."""
    for item in expanded_paths(source.data, source.name):
        root = _root(item, storage)
        is_folder = not glob.has_magic(item) and not _is_image(item)
        if not storage.is_remote(item):
            is_folder = os.path.isdir(os.path.expanduser(item))
        if is_folder:
            yield root, list(walk_files(root, storage))
            continue
        named = [info for info in find_files(source.name, item, storage) if not _is_hidden(info.path[len(root) :])]
        # A web server need not list folders, and what it says of one must not decide about the records.
        folders = dict.fromkeys(info.path.rpartition("/")[0] for info in named if not is_web(info.path))
        found = {info.path: info for folder in folders for info in walk_files(folder, storage, is_deep=False)}
        beside = [info for path, info in found.items() if is_text(path) or _is_metadata(path)]
        yield root, [*named, *beside]


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def walk_files(root: str, storage: Storage, *, is_deep: bool = True) -> Iterator[FileInfo]:
    """The files in a folder and, if deep, in those below; hidden files and folders are left out.

    Raises:
        DataError: The folder cannot be listed.
    """
    if storage.is_remote(root):
        fs, inside = storage.filesystem(root)
        entries = storage.attempt_at(root, lambda: fs.find(inside, maxdepth=None if is_deep else 1, detail=True))
        for path, entry in sorted(entries.items()):
            info = storage.info_of(storage.outside(root, fs, path), entry)
            if info is not None and not _is_hidden(info.path[len(root) :]):
                yield info
        return
    seen: set[str] = set()
    for folder, below, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        below[:] = sorted(name for name in below if is_deep and not name.startswith(".")) if real not in seen else []
        if real in seen:
            continue
        seen.add(real)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield FileInfo.local(path)


class ImagesReader(SourceReader):
    """`SourceReader` of images. A row is a file.

    Failed records: an empty file, a caption that is no UTF-8, an image with two entries in the metadata.

    Args:
        source: Named in messages; its `data` say what paths are relative to.
        manifest: Its images, and what lies beside them.
        columns: Fields that are needed; None: all. Without "image" no image is opened.
        storage: Opens the files.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        self._source = source
        self._manifest = manifest
        self._columns = None if columns is None else set(columns)
        # A transform may do without some of them.
        self._needed = () if columns is None or source.is_transformed else tuple(columns)
        self._storage = storage
        self._beside: tuple[Captions, list[str]] | None = None
        self._lock = threading.Lock()

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Images of one range; see `SourceReader.read`."""
        entry = self._manifest.units[unit]
        first, last = int(entry["start"]), int(entry["stop"])
        stop = last if row_stop < 0 else min(first + row_stop, last)
        infos = self._manifest.files[min(first + row_start, stop) : stop]
        if infos and self._storage.is_remote(infos[0].path):
            with ThreadPoolExecutor(_REMOTE_THREADS) as threads:
                made = list(threads.map(self._record, infos))
        else:
            made = [self._record(info) for info in infos]
        return RecordBlock(
            unit=unit,
            row_start=row_start,
            num_rows=len(made),
            objects=[None if isinstance(one, str) else one for one in made],
            failures={index: one for index, one in enumerate(made) if isinstance(one, str)},
            raw={index: infos[index].path.encode() for index, one in enumerate(made) if isinstance(one, str)},
        )

    def _record(self, info: FileInfo) -> dict[str, Any] | str:
        """The record, or what is wrong with it."""
        captions, roots = self._opened()
        if info.size == 0:
            return f"image {info.path} is empty"
        root = next((root for root in roots if info.path.startswith(f"{root}/")), os.path.dirname(info.path))
        path = info.path[len(root) + 1 :]
        try:
            columns = captions.of(info.path)
        except DataError:
            raise
        except ValueError as error:
            return f"image {info.path}: {error}"
        found = {"image": b"", "path": path, "label": path.rpartition("/")[0].rpartition("/")[2] or None, **columns}
        missing = next((column for column in self._needed if column not in found), None)
        if missing is not None:
            return f"image {info.path}: {missing_key(missing, found)}"
        if self._columns is not None:
            found = {column: value for column, value in found.items() if column in self._columns}
        if "image" in found:
            with self._storage.open(info) as stream:
                found["image"] = stream.read()
        return found

    def _opened(self) -> tuple[Captions, list[str]]:
        with self._lock:
            if self._beside is None:
                files = self._manifest.files
                images = [info for info in files if _is_image(info.path)]
                roots = [_root(item, self._storage) for item in expanded_paths(self._source.data, self._source.name)]
                self._beside = (Captions(self._source.name, files, images, self._storage), roots)
            return self._beside

    def close(self) -> None:
        """Nothing stays open."""


FORMAT: Final = ImagesFormat()
