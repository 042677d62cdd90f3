"""`Storage`: how the files of a source are opened: on this machine, or by a filesystem behind a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from megascale_lightning.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megascale_lightning.sources.source import Source

__all__ = ["FileInfo", "Storage", "is_url"]

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file as it was when the run began."""

    path: str
    """Absolute, a URL, or a path of `Source.filesystem`."""
    size: int
    """Bytes."""
    mtime_ns: int
    """0 where the store does not say."""


def is_url(path: str) -> bool:
    """Whether fsspec has to open it."""
    return _URL.match(path) is not None


@dataclass(frozen=True, slots=True)
class Storage:
    """Opens files by path; travels to the roles that read."""

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """`Source.storage_options`."""
    given: Any = field(default=None, repr=False)
    """`Source.filesystem`: reads all paths, if there is one."""

    @classmethod
    def of(cls, source: Source) -> Storage:
        """As a source declares it."""
        return cls(dict(source.storage_options or {}), source.filesystem)

    def is_remote(self, path: str) -> bool:
        """Whether a filesystem other than this machine's has to open it."""
        return self.given is not None or is_url(path)

    def filesystem(self, path: str) -> tuple[Any, str]:
        """The fsspec filesystem of a path, and the path as it knows it.

        Raises:
            ConfigError: fsspec, or what it needs for this URL, is not installed.
        """
        if self.given is not None:
            return self.given, path
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(f'reading {path} needs fsspec: pip install "fsspec"') from error
        fs, inside = url_to_fs(path, **self.options)
        return fs, str(inside)

    def open(self, info: FileInfo) -> BinaryIO:
        """Open for reading at byte 0; the caller closes it.

        Raises:
            DataError: The file has another size than when the run began.
            OSError: It cannot be opened.
        """
        if self.is_remote(info.path):
            fs, path = self.filesystem(info.path)
            return cast("BinaryIO", fs.open(path, "rb"))
        self.check_unchanged(info)
        return open(info.path, "rb")

    def check_unchanged(self, info: FileInfo) -> None:
        """Refuse a local file of another size than when the run began.

        Raises:
            DataError: As said.
            OSError: It is gone.
        """
        if self.is_remote(info.path):
            return
        size = os.stat(info.path).st_size
        if size != info.size:
            raise DataError(
                f"file {info.path} has {size} bytes and had {info.size} when the run began; files may not change "
                "during a run: restore it, or start a new run"
            )
