"""`make_reader`: the reader of a source, by its format."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_lightning.sources.dataset import DatasetReader
from megascale_lightning.sources.jsonl import JsonLinesReader
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.parquet import FilePool, ParquetReader
from megascale_lightning.sources.records import SourceReader
from megascale_lightning.sources.source import Source

__all__ = ["make_reader"]


def make_reader(
    source: Source, manifest: Manifest, columns: Sequence[str] | None, *, pool: FilePool | None = None
) -> SourceReader:
    """A reader of `source`; opens nothing yet.

    Args:
        source: What the user declared.
        manifest: What `build_manifest` found.
        columns: What to read; None reads all.
        pool: Open files, shared by the readers of one role; None makes one.
    """
    if manifest.format == "parquet":
        return ParquetReader(source, manifest, columns, pool or FilePool())
    if manifest.format == "jsonl":
        return JsonLinesReader(source, manifest)
    return DatasetReader(source, manifest, columns)
