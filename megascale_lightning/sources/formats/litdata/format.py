"""Folders of LitData (`index.json` and chunks), read where they lie: a unit is a chunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from megascale_lightning.errors import DataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat, folders
from megascale_lightning.sources.formats.litdata.chunks import Chunk, Layout, open_layout
from megascale_lightning.sources.formats.litdata.items import ItemPlan, Packing, parse_plan
from megascale_lightning.sources.formats.optionsets import IS_BOOL, check_options
from megascale_lightning.sources.formats.spanreader import SpanReader
from megascale_lightning.sources.formats.tokentables import token_lists
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, block_of
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.spans import decompress, unit_errors
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "LitDataFormat", "LitDataReader"]

_OPTIONS: Final = {
    "allow_pickle": IS_BOOL,
    "field": ("the name that an item which is no mapping gets", lambda value: isinstance(value, str) and value != ""),
    "block_size": (
        "a whole number of tokens of at least 1",
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
    ),
}


class LitDataFormat(SourceFormat):
    """`data` names folders with an `index.json`, or folders above such."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """See `SourceFormat`. Each `index.json` is followed by its chunks."""
        found: list[FileInfo] = []
        for index in folders.find_indexes(source.name, source.data, storage):
            names = [_stored_name(index, chunk, storage) for chunk in _Folder(source, index, storage).chunks]
            found += [index, *folders.find_named(source.name, index, names, storage)]
        return tuple(found)

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`."""
        check_options(source, "litdata", _OPTIONS)
        transforms = source.is_transformed
        found = []
        for number, info in enumerate(files):
            if folders.is_index(info.path):
                folder = _Folder(source, info, storage)
                folder.plan.check_columns(source.name, source.columns or ())
                if transforms or source.columns:
                    folder.plan.make_decoder(source, source.columns)
                continue
            chunk = folder.by_path[info.path]
            folder.plan.check_size(source.name, info, chunk)
            rows = folder.num_records(chunk)
            found.append((number, 0, rows, rows, chunk.size))
        return Listing(np.array(found, UNIT))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> LitDataReader:
        """See `SourceFormat`."""
        return LitDataReader(source, manifest, columns, resources.storage)


def _stored_name(index: FileInfo, chunk: Chunk, storage: Storage) -> str:
    """As written; or of the decompressed file, which LitData puts in its place where it read the folder itself."""
    if (
        chunk.plain_name == chunk.name
        or storage.is_remote(index.path)
        or folders.find_local(index, chunk.name) is not None
    ):
        return chunk.name
    plain = folders.find_local(index, chunk.plain_name)
    return chunk.plain_name if plain is not None and plain.size in chunk.sizes else chunk.name


class _Folder:
    """One index: its chunks and how their items are read."""

    def __init__(self, source: Source, info: FileInfo, storage: Storage) -> None:
        index = folders.read_index(source.name, info, storage, "chunks")
        self.plan: ItemPlan
        self._name = source.name
        self.plan, self.chunks = parse_plan(source, info.path, index)
        root = info.path[: -len(folders.INDEX_NAME)]
        self.by_path = {root + name: chunk for chunk in self.chunks for name in (chunk.name, chunk.plain_name)}
        self.block_size: int | None = source.format_options.get("block_size")

    def num_records(self, chunk: Chunk) -> int:
        """Items of a chunk, or whole blocks of its tokens: what is left behind the last is not read."""
        if self.block_size is None:
            return chunk.num_items
        if chunk.num_tokens < 0:  # as written where the first of its items is empty
            raise DataError(
                f"source {self._name!r}: {self.plan.path} does not say how many tokens {chunk.name} has, which "
                "block_size needs: leave it out to read the items"
            )
        return chunk.num_tokens // self.block_size


class LitDataReader(SpanReader):
    """`SourceReader` of chunks; see `SpanReader`."""

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        super().__init__(source, manifest, columns, storage)
        self._folders: dict[int, _Folder] = {}
        self._lock = threading.Lock()

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one chunk; see `SourceReader.read`. Tokens and Arrow rows are tables, others a dict each."""
        info, start, stop = self._manifest.rows_of(unit, row_start, row_stop)
        with unit_errors(self._source.name, self._manifest, unit):
            folder = self._folder(unit)
            folder.plan.check_columns(self._source.name, self._columns or ())
            layout = self._layout(info, folder)
            if folder.plan.is_tokens or layout.has_rows:
                table = self._table(folder, layout, start, stop)
                return RecordBlock(unit=unit, row_start=start, num_rows=stop - start, table=table)
            items = list(layout.items(start, stop, folder.plan.packing is Packing.ITEM))
        decode = folder.plan.make_decoder(self._source, self._columns)
        return block_of(unit, start, ((*decode(item), item) for item in items))

    def _folder(self, unit: int) -> _Folder:
        files = self._manifest.files
        at = folders.index_before(files, int(self._manifest.units[unit]["file"]))
        with self._lock:
            if at not in self._folders:
                self._folders[at] = _Folder(self._source, files[at], self._storage)
            return self._folders[at]

    def _layout(self, info: FileInfo, folder: _Folder) -> Layout:
        chunk = folder.by_path[info.path]
        if folder.plan.packing is not Packing.FILE or not info.path.endswith(f"/{chunk.name}"):
            return open_layout(chunk, lambda begin, end: self._files.read(info, begin, end), info.size)
        plain = self._files.plain(info, lambda data: decompress(data, "zstd", *chunk.sizes))
        return open_layout(chunk, lambda begin, end: plain.slice(begin, end - begin), plain.size)

    def _table(self, folder: _Folder, layout: Layout, start: int, stop: int) -> pa.Table:
        if not folder.plan.is_tokens:
            table = layout.rows().slice(start, stop - start)
            names = folder.plan.columns if self._columns is None else self._columns
            return pa.table({name: _column(table, name) for name in dict.fromkeys([*names, *self._extra(table)])})
        dtype = folder.plan.token_dtype
        if folder.block_size is None:
            bounds = layout.offsets[start : stop + 1]
        else:
            bounds = layout.offsets[0] + np.arange(start, stop + 1) * (folder.block_size * dtype.itemsize)
        if (bounds % dtype.itemsize != bounds[0] % dtype.itemsize).any() or bounds[-1] > layout.offsets[-1]:
            raise ValueError(f"its items are no whole numbers of {dtype} values")
        buffer = layout.fetch(int(bounds[0]), int(bounds[-1]))
        return pa.table({folder.plan.field: token_lists(buffer, dtype, (bounds - bounds[0]) // dtype.itemsize)})

    def _extra(self, table: pa.Table) -> Sequence[str]:
        """Fields that only some items have: no index names them."""
        return table.column_names if self._columns is None else ()


def _column(table: pa.Table, name: str) -> Any:
    """Nulls where no item of a chunk has the field."""
    return table.column(name) if name in table.column_names else pa.nulls(table.num_rows)


FORMAT: Final = LitDataFormat()
