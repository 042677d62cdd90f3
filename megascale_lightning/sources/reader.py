"""`make_reader`: the reader of a source, by its format."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_lightning.sources.formats import Resources, load_format
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.records import SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.diskcache import DiskCache
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.sources.stores.storage import Storage

__all__ = ["make_reader"]


def make_reader(
    source: Source,
    manifest: Manifest,
    columns: Sequence[str] | None,
    *,
    pool: FilePool | None = None,
    cache: DiskCache | None = None,
) -> SourceReader:
    """A reader of `source`; opens nothing yet.

    Args:
        source: What the user declared.
        manifest: What `build_manifest` found.
        columns: What to read; None reads all.
        pool: Open files, shared by the readers of one role; None makes one.
        cache: Blocks of remote files on this machine; None: every read goes to the store.
    """
    resources = Resources(Storage.of(source, cache=cache), pool or FilePool())
    return load_format(manifest.format).make_reader(source, manifest, columns, resources)
