"""`Manifest`: the frozen list of files and units of a source, made once and handed to every role."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Final

import numpy as np

from megascale_lightning.sources.stores.storage import FileInfo
from megascale_lightning.types import IntArray

__all__ = ["UNIT", "Manifest"]

UNIT: Final = np.dtype(
    [
        ("file", "<i4"),  # index into `files`
        ("start", "<i8"),  # row group, byte or index
        ("stop", "<i8"),
        ("rows", "<i8"),  # records; -1: not known before it is read
        ("bytes", "<i8"),  # stored size
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Files and units of one source. Units are numbered over all files in list order."""

    files: tuple[FileInfo, ...]
    """A dataset has one entry, "<dataset>", whose size is its length."""
    units: IntArray
    """UNIT [num_units]. What a unit is, each format says: a row group, a byte range, a compressed file, ..."""
    format: str
    """A name of `formats.FORMATS`."""
    sliced: bool = False
    """Units are read front to back in slices, whose number is found by reading; then each is a window of its own."""
    joined: tuple[Manifest, ...] = ()
    """Those of `Source.joins`."""

    @property
    def num_units(self) -> int:
        """Units of one epoch."""
        return len(self.units)

    @property
    def num_records(self) -> int:
        """Records of one epoch; -1 where they are not known before they are read."""
        rows = self.units["rows"]
        return -1 if (rows < 0).any() else int(rows.sum())

    def digest(self) -> str:
        """Two hashes in hex, with a dash between: of the content as far as listed, and of when it was written last.

        Files that are joined count, too.

        The first, 12 digits over file names, sizes and units, is equal where the data are the same, wherever they lie.
        The second, 6 digits over the times of local files, is left out where there are none.
        """
        content = self._content()
        times = [info.mtime_ns for one in (self, *self.joined) for info in one.files]
        return content if not any(times) else f"{content}-{hashlib.sha256(repr(times).encode()).hexdigest()[:6]}"

    def _content(self) -> str:
        hasher = hashlib.sha256(self.format.encode())
        for info in self.files:
            # A name that is no UTF-8 has stand-ins for its bytes.
            hasher.update(f"\0{os.path.basename(info.path)}\0{info.size}".encode("utf-8", "surrogateescape"))
        hasher.update(np.ascontiguousarray(self.units, UNIT).tobytes())
        if self.sliced:
            hasher.update(b"sliced")
        for one in self.joined:
            hasher.update(f"joined {one._content()}".encode())
        return hasher.hexdigest()[:12]

    def file_of(self, unit: int, row: int | None = None) -> FileInfo:
        """The file of a unit, its first one where each record has a file of its own; or of a record."""
        entry = self.units[unit]
        index = int(entry["file"])
        has_own = self.format == "images" or (self.format == "text" and int(entry["rows"]) >= 0)
        return self.files[index + row if has_own and row is not None and row >= 0 else index]

    def rows_of(self, unit: int, row_start: int = 0, row_stop: int = -1) -> tuple[FileInfo, int, int]:
        """The file of a unit, and as (start, stop) those of rows [row_start, row_stop) that it has.

        Args:
            unit: Its number. Where it is not known how many rows a unit has, start and stop mean nothing.
            row_start: First row; from behind the last one on there is none.
            row_stop: -1 is the unit's end.
        """
        rows = int(self.units["rows"][unit])
        stop = rows if row_stop < 0 else min(row_stop, rows)
        return self.file_of(unit), min(row_start, stop), stop

    def locate(self, unit: int, row: int | None = None) -> str:
        """Where a record is, for messages: file, unit and row."""
        where = f"{self.file_of(unit, row).path}, unit {unit}"
        return where if row is None else f"{where}, row {row}"
