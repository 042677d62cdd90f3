"""`SpanReader`: what the readers of binary folders share: byte ranges of files that stay mapped."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.records import SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.spans import SpanFiles
from megascale_lightning.sources.stores.storage import Storage

__all__ = ["SpanReader"]


class SpanReader(SourceReader):
    """`SourceReader` of files that are read by ranges. A value that cannot be decoded makes its record a failed one.

    Args:
        source: Named in messages.
        manifest: Its files and units.
        columns: What to decode; None decodes all.
        storage: Opens the files.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        self._source = source
        self._manifest = manifest
        self._columns = columns
        self._storage = storage
        self._files = SpanFiles(storage)

    def close(self) -> None:
        """Let go of the mapped files."""
        self._files.close()
