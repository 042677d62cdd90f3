"""`FORMATS`: the kinds of files and folders that can be read, how they are told apart, and where their code is."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import find_files
from megascale_lightning.sources.stores.plaintext import COMPRESSIONS
from megascale_lightning.types import IntArray

if TYPE_CHECKING:
    from megascale_lightning.sources.manifest import Manifest
    from megascale_lightning.sources.records import SourceReader
    from megascale_lightning.sources.stores.filepool import FilePool
    from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = [
    "FORMATS",
    "FileKind",
    "Listing",
    "Resources",
    "SourceFormat",
    "find_file_format",
    "load_format",
]


class Listing(NamedTuple):
    """The units of a source."""

    units: IntArray
    """UNIT [n]"""
    sliced: bool = False
    """See `Manifest.sliced`."""


class Resources(NamedTuple):
    """What the readers of one role share, and what one of them needs beside its source."""

    storage: Storage
    """Opens the files of the source."""
    pool: FilePool
    """Open files: Parquet and Arrow."""


class SourceFormat(ABC):
    """How the files of one format are listed and read. Holds nothing."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """The files of a source, in the order in which their units are numbered.

        Raises:
            ConfigError: There are none, or what `data` names is not of the format.
        """
        return find_files(source.name, source.data, storage)

    @abstractmethod
    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """The units of these files.

        Raises:
            ConfigError: A column that is needed for sure is missing, or `format_options` are wrong.
            DataError: A file cannot be read.
        """

    @abstractmethod
    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> SourceReader:
        """A reader; opens nothing yet. `columns` None reads all."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """How one kind of data is recognised."""

    suffixes: tuple[str, ...] = ()
    """File names end in one of these."""
    is_compressible: bool = False
    """They may have a suffix of `COMPRESSIONS` behind."""

    def ends(self, path: str) -> bool:
        """Whether a file of this name is of the format."""
        stem, suffix = os.path.splitext(path.lower())
        if self.is_compressible and suffix in COMPRESSIONS:
            suffix = os.path.splitext(stem)[1]
        return suffix in self.suffixes


FORMATS: Final[dict[str, FileKind]] = {
    "parquet": FileKind((".parquet", ".pq")),
    "arrow": FileKind((".arrow", ".feather", ".ipc")),
    "jsonl": FileKind((".jsonl", ".ndjson"), is_compressible=True),
    "csv": FileKind((".csv", ".tsv"), is_compressible=True),
    "text": FileKind((".txt", ".md", ".rst"), is_compressible=True),
    "webdataset": FileKind((".tar", ".tgz"), is_compressible=True),
    "megatron": FileKind((".bin", ".idx")),
    "images": FileKind((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")),
    "mds": FileKind(),
    "litdata": FileKind(),
    "dataset": FileKind(),
    "iterable": FileKind(),
}


def load_format(name: str) -> SourceFormat:
    """The code of a format, the `FORMAT` of the module of its name, loaded when it is needed."""
    return cast("SourceFormat", import_module(f"megascale_lightning.sources.formats.{name}").FORMAT)


def _format_of(path: str) -> str | None:
    return next((name for name, kind in FORMATS.items() if kind.ends(path)), None)


def _belongs(path: str, found: str) -> bool:
    """Whether a file of another format may lie beside: captions of images, the index of a shard."""
    return found == "images" or (found == "webdataset" and path.endswith(".idx"))


def find_file_format(source: Source, paths: Sequence[str]) -> str:
    """The format by the names of files. A file whose name tells nothing is read as the first one is.

    Args:
        source: For messages.
        paths: The files that `data` names.

    Raises:
        ConfigError: The name of the first does not tell, or that of another is of another format.
    """
    found = _format_of(paths[0]) if paths else None
    if found is not None:
        for path in paths:
            other = _format_of(path)
            if other not in (None, found) and not _belongs(path, found):
                raise ConfigError(
                    f"source {source.name!r}: {paths[0]} is {found} and {path} is {other}; make a source of each, with "
                    f"paths that name files of one format, or set format= to read all as that"
                )
        return found
    known = ", ".join(suffix for kind in FORMATS.values() for suffix in kind.suffixes)
    compressed = ", ".join(name for name, kind in FORMATS.items() if kind.is_compressible)
    raise ConfigError(
        f"source {source.name!r}: the format of {paths[0] if paths else source.data!r} is not told by its name (known: "
        f"{known}; {compressed} also with {', '.join(COMPRESSIONS)} behind); set format= to one of {', '.join(FORMATS)}"
    )
