"""WebDataset: a unit is a tar shard, whose members are grouped into samples by key; also as Energon prepared it."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import DataError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.webdataset import energon
from megascale_lightning.sources.formats.webdataset.fields import SampleMaker, check_tar_options
from megascale_lightning.sources.formats.webdataset.samples import SampleWalk, ShardMemory, TarSample, merge_samples
from megascale_lightning.sources.formats.webdataset.walk import TarStream, TarWalk
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader, block_of
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.plaintext import SLICED_BYTES, Cursors, codec_of
from megascale_lightning.sources.stores.retry import is_refusal, is_transient, is_unsupported
from megascale_lightning.sources.stores.storage import FileInfo, Storage, is_web

__all__ = ["FORMAT", "WebDatasetFormat", "WebDatasetReader"]

logger = logging.getLogger(__name__)

_INDEX: Final = ".idx"
_REMEMBERED: Final = 16
"""Shards of which is kept where their samples begin: 8 to 24 bytes a sample."""

_T = TypeVar("_T")


class WebDatasetFormat(SourceFormat):
    """A unit is a shard.

    Its number of samples is known where `<shard>.tar.idx` of Energon lies beside it. Without, a source with a shard
    over `SLICED_BYTES` is read in slices.
    """

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """The shards; behind those of a folder that Energon prepared the files that describe it."""
        check_tar_options(source)
        folders = energon.energon_folders(source, storage)
        return energon.list_shards(source, folders, storage) if folders else super().list_files(source, storage)

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`. An empty file has none."""
        check_tar_options(source)
        meta = energon.read_meta(source, files, storage)
        SampleMaker(source, source.columns, meta.fields)
        merges = _merges(source)
        rows = {} if merges else _indexed(source, files, storage)
        rows = {path: number for path, number in rows.items() if path not in meta.excluded}
        shards = [(index, info) for index, info in enumerate(files) if info.size > 0 and not energon.is_meta(info)]
        sliced = not merges and any(info.size > SLICED_BYTES and info.path not in rows for _, info in shards)
        found = [(index, 0, info.size, -1 if sliced else rows.get(info.path, -1), info.size) for index, info in shards]
        return Listing(np.array(found, UNIT), sliced)

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> WebDatasetReader:
        """See `SourceFormat`."""
        return WebDatasetReader(source, manifest, columns, resources.storage)


def _merges(source: Source) -> bool:
    return source.format_options.get("interleaved") == "merge"


def _indexed(source: Source, files: Sequence[FileInfo], storage: Storage) -> dict[str, int]:
    """Path of a plain shard with an index beside it -> its number of samples.

    Raises:
        DataError: An index has another number than its folder's description.
    """
    found: dict[str, int] = {}
    listed: dict[str, Mapping[str, int]] = {}
    counts = energon.shard_counts(source, files, storage)
    for info in files:
        if energon.is_meta(info) or codec_of(info.path) is not None:
            continue
        if storage.is_remote(info.path):
            parent = info.path.rpartition("/")[0]
            if parent not in listed:
                listed[parent] = _remote_sizes(parent, storage)
            size = listed[parent].get(os.path.basename(info.path) + _INDEX)
        else:
            size = os.stat(info.path + _INDEX).st_size if os.path.isfile(info.path + _INDEX) else None
        if size is None or size < 8 or size % 8:
            continue
        found[info.path] = size // 8 - 1
        if counts.get(info.path, found[info.path]) != found[info.path]:
            raise DataError(
                f"source {source.name!r}: {info.path} has {found[info.path]} samples by {info.path}{_INDEX} and "
                f"{counts[info.path]} by {energon.META_FOLDER}; prepare the folder again"
            )
    return found


def _remote_sizes(parent: str, storage: Storage) -> Mapping[str, int]:
    """Name -> size of what lies in a folder, by one request; nothing where the store lists no folders, ever."""
    if is_web(parent):
        return {}
    fs, inside = storage.filesystem(parent)

    def look() -> list[Any]:
        try:
            return list(fs.ls(inside, detail=True))
        except Exception as error:
            lasts = isinstance(error, FileNotFoundError) or is_refusal(error) or is_unsupported(error)
            if is_transient(error) or not lasts:
                raise  # the units would depend on a network that fails
            logger.info("%s cannot be listed, so that no index is looked for beside its shards: %s", parent, error)
            return []

    entries = storage.attempt_at(parent, look)
    return {os.path.basename(entry["name"]): int(entry.get("size") or 0) for entry in entries}


class _Tools(NamedTuple):
    """What is known once the descriptions of the folders were read."""

    maker: SampleMaker
    excluded: Mapping[str, frozenset[bytes]]

    def left_out(self, info: FileInfo) -> frozenset[bytes]:
        """Keys of a shard that have no row."""
        return self.excluded.get(info.path, frozenset())


class _Walker:
    """Goes through a shard from a sample that is known on.

    Args:
        info: The shard.
        storage: Opens it.
        memory: What is known of the shard.
        excluded: Keys that are left out, and have no row.
        position: Byte to begin near; 0 reads the shard from its beginning.
    """

    def __init__(
        self, info: FileInfo, storage: Storage, memory: ShardMemory, excluded: frozenset[bytes], position: int = 0
    ) -> None:
        self.row, start = memory.before(position) if position and codec_of(info.path) is None else (0, 0)
        self.next_index = 0
        self._info = info
        self._has_warned = False
        self._memory = memory
        self._excluded = excluded
        self._stream = TarStream(storage, info, start)
        self._walk = TarWalk(self._stream)
        self._samples = SampleWalk(self._walk, memory.keys)

    def next_start(self) -> int | None:
        """See `SampleWalk`."""
        start = self._samples.next_start()
        if start is None and not self._walk.has_end and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s ends without the blocks of zeros that end an archive: it may be cut off", self._info.path
            )
        return start

    def take(self, load: Callable[[str], bool] | None) -> TarSample | None:
        """The next sample; None for one that is left out."""
        sample = self._samples.take(load)
        if sample.key in self._excluded:
            return None
        if self._walk.has_globals:  # for good: another walk may not have come to them yet
            self._memory.can_restart = False
        self._memory.note(self.row, sample.start)
        self.row += 1
        return sample

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()


class WebDatasetReader(SourceReader):
    """`SourceReader` of tar shards. A row is a sample, or what is broken.

    Failed records: a member or header that is broken or cut off, a sample with a member twice, with a name or text that
    is no UTF-8, or without a field that was asked for; and the members of a key that come after another sample.

    Args:
        source: Named in messages.
        manifest: Its shards.
        columns: Fields that are needed; None: all.
        storage: Opens the files.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None, storage: Storage) -> None:
        self._source = source
        self._manifest = manifest
        self._columns = columns
        self._storage = storage
        self._cursors: Cursors[_Walker] = Cursors()
        self._memories: OrderedDict[int, ShardMemory] = OrderedDict()
        self._indexes: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()
        self._found_tools: _Tools | None = None
        self._lock = threading.Lock()

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Samples of one shard; see `SourceReader.read`."""
        tools, info = self._tools(), self._manifest.file_of(unit)
        if int(self._manifest.units[unit]["rows"]) >= 0:
            return self._block(unit, row_start, self._by_index(unit, row_start, row_stop, tools.maker))
        if _merges(self._source):
            with closing(TarStream(self._storage, info)) as stream:
                merged = merge_samples(SampleWalk(TarWalk(stream), None), tools.maker.wants)
                left_out = tools.left_out(info)
                samples = [one for one in merged if one.key not in left_out]
            return self._block(unit, row_start, samples[row_start : None if row_stop < 0 else row_stop])
        walker = _Walker(info, self._storage, ShardMemory(), tools.left_out(info))
        with closing(walker):
            return self._block(unit, row_start, _rows(walker, row_start, row_stop, tools.maker.wants))

    def read_slice(self, unit: int, index: int, slice_bytes: int) -> tuple[RecordBlock, bool]:
        """See `SourceReader.read_slice`."""
        tools, info = self._tools(), self._manifest.file_of(unit)
        start, stop = index * slice_bytes, (index + 1) * slice_bytes
        memory = self._memory(unit)

        def make() -> _Walker:
            return _Walker(info, self._storage, memory, tools.left_out(info), start)

        with memory.lock, self._cursors.at((unit, slice_bytes), index, make) as walker:
            at = walker.next_start()
            while at is not None and at < start:
                walker.take(None)
                at = walker.next_start()
            row, samples = walker.row, []
            while at is not None and at < stop:
                sample = walker.take(tools.maker.wants)
                samples += [] if sample is None else [sample]
                at = walker.next_start()
            walker.next_index = index + 1
        return self._block(unit, row, samples), at is None

    def _by_index(self, unit: int, row_start: int, row_stop: int, maker: SampleMaker) -> Iterator[TarSample]:
        info, start, stop = self._manifest.rows_of(unit, row_start, row_stop)
        offsets = self._index(unit)
        if start >= stop:
            return
        with closing(TarStream(self._storage, info, int(offsets[start]))) as stream:
            for row in range(start, stop):
                begin, end = int(offsets[row]), int(offsets[row + 1])
                stream.seek(begin)
                samples = SampleWalk(TarWalk(stream, end), None)
                if samples.next_start() is None:
                    sample = TarSample(begin)
                    sample.fail(
                        f"{info.path}{_INDEX} has a sample at byte {begin}, where the shard of {info.size} bytes has "
                        "none: it is cut off, or the index is not its own",
                        b"",
                    )
                else:
                    sample = samples.take(maker.wants)
                    if end > info.size:
                        sample.fail(
                            f"the shard ends at byte {info.size}, the sample at byte {end}: it is cut off", sample.raw
                        )
                    elif samples.next_start() is not None:
                        more = samples.take(None)
                        why = more.problem or (
                            f"{info.path}{_INDEX} has one sample from byte {begin} to {end}, where the shard has two: "
                            "the index is not its own; prepare the folder again, or delete the index"
                        )
                        sample.fail(why, more.raw)
                yield sample

    def _block(self, unit: int, row_start: int, samples: Iterable[TarSample]) -> RecordBlock:
        maker, url = self._tools().maker, self._manifest.file_of(unit).path
        # Making a sample may find that it is broken.
        made = ((maker.make(sample, url), sample.problem, sample.raw) for sample in samples)
        return block_of(unit, row_start, made)

    def _tools(self) -> _Tools:
        with self._lock:
            if self._found_tools is None:
                meta = energon.read_meta(self._source, self._manifest.files, self._storage)
                maker = SampleMaker(self._source, self._columns, meta.fields)
                self._found_tools = _Tools(maker, meta.excluded)
            return self._found_tools

    def _memory(self, unit: int) -> ShardMemory:
        with self._lock:
            return _kept(self._memories, unit, ShardMemory)

    def _index(self, unit: int) -> npt.NDArray[np.int64]:
        def load() -> npt.NDArray[np.int64]:
            rows = int(self._manifest.units[unit]["rows"])
            info = FileInfo(self._manifest.file_of(unit).path + _INDEX, 8 * (rows + 1), 0)
            with closing(self._storage.open(info)) as stream:
                offsets = np.frombuffer(stream.read(), "<i8")
            if len(offsets) != rows + 1 or (np.diff(offsets) <= 0).any() or offsets[0] < 0:
                raise DataError(
                    f"source {self._source.name!r}: {self._manifest.locate(unit)}: {info.path} is no index, which has "
                    f"the beginnings of {rows} samples and the end; prepare the folder again, or delete the index"
                )
            return offsets

        with self._lock:
            return _kept(self._indexes, unit, load)

    def close(self) -> None:
        """Let go of files."""
        self._cursors.close()


def _rows(walker: _Walker, row_start: int, row_stop: int, load: Callable[[str], bool]) -> Iterator[TarSample]:
    while walker.next_start() is not None and walker.row != row_stop:
        sample = walker.take(load if walker.row >= row_start else None)
        if sample is not None and walker.row > row_start:
            yield sample


def _kept(cache: OrderedDict[int, _T], unit: int, make: Callable[[], _T]) -> _T:
    """The value of a unit; those used least recently are let go."""
    found = cache.pop(unit, None)
    cache[unit] = make() if found is None else found
    while len(cache) > _REMEMBERED:
        cache.popitem(last=False)
    return cache[unit]


FORMAT: Final = WebDatasetFormat()
