"""Folders of MosaicML Streaming (`index.json` and shards), read where they lie: a unit is a shard."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat, folders
from megascale_lightning.sources.formats.mds.shards import Shard, parse_shard
from megascale_lightning.sources.formats.optionsets import IS_BOOL, check_options
from megascale_lightning.sources.formats.spanreader import SpanReader
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, block_of
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.spans import decompress, unit_errors
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "MdsFormat", "MdsReader"]

_OPTIONS: Final = {
    "allow_pickle": IS_BOOL,
    "validate_hash": (
        "the name of a hash of hashlib that the shards have, such as 'sha1'",
        lambda value: value is None or value in hashlib.algorithms_available,
    ),
}


class MdsFormat(SourceFormat):
    """`data` names folders with an `index.json`, or folders above such."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """See `SourceFormat`. Each `index.json` is followed by its shards."""
        found: list[FileInfo] = []
        for index in folders.find_indexes(source.name, source.data, storage):
            is_local = not storage.is_remote(index.path)
            shards = [shard for shard in _shards(source, index, storage) if shard.num_records]
            names = [_stored_name(index, shard, is_local) for shard in shards]
            found += [index, *folders.find_named(source.name, index, names, storage)]
        return tuple(found)

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`."""
        check_options(source, "mds", _OPTIONS)
        transforms = source.is_transformed
        found = []
        shards: dict[str, Shard] = {}
        for number, info in enumerate(files):
            if folders.is_index(info.path):
                shards = _by_path(source, info, storage)
                continue
            shard = shards[info.path]
            shard.check_columns(source.name, source.columns or ())
            if transforms or source.columns:
                shard.make_decoder(source, source.columns)
            shard.check_size(source.name, info)
            shard.check_hash_name(source)
            found.append((number, 0, shard.num_records, shard.num_records, shard.raw.size))
        return Listing(np.array(found, UNIT))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> MdsReader:
        """See `SourceFormat`."""
        return MdsReader(source, manifest, columns, resources.storage)


def _shards(source: Source, info: FileInfo, storage: Storage) -> list[Shard]:
    index = folders.read_index(source.name, info, storage, "shards")
    if index.get("version") != 2:
        raise ConfigError(f"source {source.name!r}: {info.path} is of version {index.get('version')!r}, not 2")
    return [parse_shard(source.name, info.path, entry) for entry in index["shards"]]


def _stored_name(index: FileInfo, shard: Shard, is_local: bool) -> str:
    """Of the compressed file, which is all that its writer keeps; or of the raw one that a reader put beside it."""
    if shard.packed is None:
        return shard.raw.name
    raw = folders.find_local(index, shard.raw.name) if is_local else None
    return shard.raw.name if raw is not None and raw.size == shard.raw.size else shard.packed.name


def _by_path(source: Source, info: FileInfo, storage: Storage) -> dict[str, Shard]:
    """Path of a shard, raw or compressed -> the shard."""
    root = info.path[: -len(folders.INDEX_NAME)]
    found: dict[str, Shard] = {}
    for shard in _shards(source, info, storage):
        found |= {root + stored.name: shard for stored in (shard.raw, shard.packed) if stored is not None}
    return found


class MdsReader(SpanReader):
    """`SourceReader` of shards; see `SpanReader`."""

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        super().__init__(source, manifest, columns, storage)
        self._shards: dict[str, Shard] = {}
        self._verified: set[str] = set()
        self._lock = threading.Lock()

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one shard, a dict each; see `SourceReader.read`."""
        info, start, stop = self._manifest.rows_of(unit, row_start, row_stop)
        shard = self._shard(unit)
        shard.check_columns(self._source.name, self._columns or ())
        with unit_errors(self._source.name, self._manifest, unit):
            self._verify(info, shard)
            records = self._records(info, shard, start, stop)
        decode = shard.make_decoder(self._source, self._columns)
        return block_of(unit, start, ((*decode(record), record) for record in records))

    def _shard(self, unit: int) -> Shard:
        files, file = self._manifest.files, int(self._manifest.units[unit]["file"])
        with self._lock:
            if files[file].path not in self._shards:
                self._shards |= _by_path(self._source, files[folders.index_before(files, file)], self._storage)
            return self._shards[files[file].path]

    def _verify(self, info: FileInfo, shard: Shard) -> None:
        """Compare the hash of a shard's file, once, where that was asked for."""
        name = self._source.format_options.get("validate_hash")
        if name is None or info.path in self._verified:
            return
        expected = shard.stored_as(info).hashes[name]
        found = hashlib.new(name, self._files.read(info), usedforsecurity=False).hexdigest()
        if found != expected:
            raise ValueError(f"its {name} is {found}, and {folders.INDEX_NAME} says {expected}: it is damaged")
        self._verified.add(info.path)

    def _records(self, info: FileInfo, shard: Shard, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes of records [start, stop)."""
        if shard.stored_as(info) is shard.packed:
            codec = shard.codec
            plain = self._files.plain(info, lambda data: decompress(data, codec, shard.raw.size))
            return shard.slice_records(lambda begin, end: plain.slice(begin, end - begin), start, stop)
        return shard.slice_records(lambda begin, end: self._files.read(info, begin, end), start, stop)


FORMAT: Final = MdsFormat()
