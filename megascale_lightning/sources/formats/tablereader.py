"""`TableReader`: what the readers of Arrow and of Parquet files share: open files of a pool, and reads made again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from megascale_lightning.sources.formats import Resources
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.filepool import attempt_read

__all__ = ["TableReader"]


class TableReader(SourceReader):
    """`SourceReader` of files that Arrow decodes; blocks are tables.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        columns: What to read; None reads every column.
        resources: Open files, shared with other readers, and what opens them.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources) -> None:
        self._name = source.name
        self._manifest = manifest
        self._columns = None if columns is None else tuple(columns)
        self._pool, self._storage = resources.pool, resources.storage

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one unit as a table; see `SourceReader.read`."""
        what = f"source {self._name!r}: {self._manifest.locate(unit)}"
        return attempt_read(self._storage, what, lambda: self._read(unit, row_start, row_stop))

    @abstractmethod
    def _read(self, unit: int, row_start: int, row_stop: int) -> RecordBlock:
        """One try of `read`, whose errors are Arrow's."""

    def close(self) -> None:
        """Close the idle files of the pool."""
        self._pool.close()
