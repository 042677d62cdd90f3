"""The orders that loaders give an epoch, each by the code of its own package: one array of stored indices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ORDERS", "Corpus", "Method"]

Fill = Callable[["Corpus", npt.NDArray[np.int64]], None]
"""Writes the stored indices of an epoch into an array, in the order given."""


@dataclass(frozen=True)
class Corpus:
    """Files of equal size, each of which has units (row groups, byte ranges) of equal size."""

    files: int
    units_per_file: int
    records_per_unit: int
    record_bytes: int

    @property
    def records(self) -> int:
        """Of all files."""
        return self.files * self.records_per_file

    @property
    def records_per_file(self) -> int:
        """Of one file."""
        return self.units_per_file * self.records_per_unit

    def group(self, size: int) -> npt.NDArray[np.int64]:
        """int64 [records]: number of the group of each record, groups being so many records in a row."""
        return np.arange(self.records) // size


@dataclass(frozen=True)
class Method:
    """One way to order an epoch."""

    package: str
    """That has to be there; "" for none."""
    fill: Fill
    held: str
    """What is read before it is due: "unit" or "file" (until the last record of it is given), a number of records, or
    "" where every record is read by itself, at random."""


def ours(window_units: int, part_mib: int, *, shuffle: bool = True) -> Method:
    """A source of this package, by the functions that its loaders ask."""

    def fill(corpus: Corpus, out: npt.NDArray[np.int64]) -> None:
        from megascale_lightning.sources.manifest import UNIT, Manifest
        from megascale_lightning.sources.order import num_windows, part_permutation, window_parts
        from megascale_lightning.sources.stores.storage import FileInfo

        rows = corpus.records_per_unit
        units = np.zeros(corpus.files * corpus.units_per_file, UNIT)
        units["file"] = np.arange(len(units)) // corpus.units_per_file
        units["rows"], units["bytes"] = rows, rows * corpus.record_bytes
        infos = tuple(FileInfo(str(n), corpus.records_per_file * corpus.record_bytes, 0) for n in range(corpus.files))
        manifest = Manifest(infos, units, "parquet")
        at = 0
        for window in range(num_windows(manifest, window_units)):
            found = window_parts(manifest, "web", "train", 0, 0, window, window_units, part_mib << 20, shuffle)
            for number, part in enumerate(found):
                stored = np.concatenate(
                    [s.unit * rows + np.arange(s.row_start, rows if s.row_stop < 0 else s.row_stop) for s in part]
                )
                picked = part_permutation(len(stored), "web", "train", 0, 0, window, number, shuffle)
                out[at : at + len(stored)] = stored[picked]
                at += len(stored)

    return Method("", fill, "unit")


def _random_sampler(corpus: Corpus, out: npt.NDArray[np.int64]) -> None:
    import torch
    from torch.utils.data import RandomSampler

    generator = torch.Generator().manual_seed(0)
    for at, index in enumerate(RandomSampler(range(corpus.records), generator=generator)):
        out[at] = index


def webdataset(buffer: int) -> Method:
    """Shards in random order, then WebDataset's own shuffle filter."""

    def fill(corpus: Corpus, out: npt.NDArray[np.int64]) -> None:
        from webdataset import filters

        rng = random.Random(0)
        shards = list(range(corpus.files))
        rng.shuffle(shards)
        size = corpus.records_per_file
        stream = (index for shard in shards for index in range(shard * size, (shard + 1) * size))
        for at, index in enumerate(filters.shuffle(buffer, rng=rng)(stream)):
            out[at] = index

    return Method("webdataset", fill, str(buffer))


def _records(files: list[int], size: int) -> Iterator[dict[str, int]]:
    for file in files:
        for index in range(file * size, (file + 1) * size):
            yield {"index": index}


def hf_datasets(buffer: int) -> Method:
    """An `IterableDataset` of many shards: they and a buffer are shuffled."""

    def fill(corpus: Corpus, out: npt.NDArray[np.int64]) -> None:
        from datasets import IterableDataset

        kwargs: Any = {"files": list(range(corpus.files)), "size": corpus.records_per_file}
        found = IterableDataset.from_generator(_records, gen_kwargs=kwargs).shuffle(seed=0, buffer_size=buffer)
        for at, sample in enumerate(found):
            out[at] = sample["index"]

    return Method("datasets", fill, str(buffer))


def litdata(item_window: int) -> Method:
    """LitData's `FullShuffle` for one worker: chunks are permuted, then the items of each."""

    def fill(corpus: Corpus, out: npt.NDArray[np.int64]) -> None:
        from litdata.streaming.item_loader import Interval
        from litdata.streaming.shuffle import FullShuffle
        from litdata.utilities.env import _DistributedEnv

        size = corpus.records_per_file
        intervals = [Interval(n * size, n * size, (n + 1) * size, (n + 1) * size) for n in range(corpus.files)]
        chunks = [{"chunk_bytes": size * corpus.record_bytes}] * corpus.files
        reader = SimpleNamespace(_config=SimpleNamespace(_chunks=chunks), _max_cache_size=1 << 40)
        cache: Any = SimpleNamespace(get_chunk_intervals=lambda: intervals, _reader=reader)
        shuffle = FullShuffle(cache, seed=0, drop_last=False, item_window=item_window)
        places, spans = shuffle.get_chunks_and_intervals_per_workers(_DistributedEnv(1, 0, 1), 1, 1, 1)
        at = 0
        for chunk, span in zip(places[0], spans[0], strict=True):
            found = shuffle(np.arange(span[1], span[2]), len(places[0]), 1, int(chunk))
            out[at : at + len(found)] = found
            at += len(found)

    return Method("litdata", fill, "file")


def mosaic(algorithm: str, block: int) -> Method:
    """MosaicML Streaming's order for one node."""

    def fill(corpus: Corpus, out: npt.NDArray[np.int64]) -> None:
        from streaming.base.shuffle import get_shuffle

        sizes = np.full(corpus.files, corpus.records_per_file, np.int64)
        out[:] = get_shuffle(algorithm, sizes, 1, 0, 0, block)

    return Method("streaming", fill, "file")


ORDERS: dict[str, Method] = {
    "megascale, defaults (8 units, 64 MiB)": ours(8, 64),
    "megascale, window_units=1": ours(1, 64),
    "megascale, part_bytes=16 MiB": ours(8, 16),
    "megascale, window_units=32, part_bytes=256 MiB": ours(32, 256),
    "megascale, window_units=128, part_bytes=1 GiB": ours(128, 1024),
    "megascale, shuffle=False": ours(8, 64, shuffle=False),
    "torch RandomSampler": Method("torch", _random_sampler, ""),
    "webdataset, shuffle(1000)": webdataset(1000),
    "webdataset, shuffle(10000)": webdataset(10_000),
    "datasets, buffer_size=1000": hf_datasets(1000),
    "datasets, buffer_size=10000": hf_datasets(10_000),
    "litdata, defaults (256 items)": litdata(256),
    "litdata, item_shuffle_window=0": litdata(0),
    "streaming, py1e, 4 M (default)": mosaic("py1e", 4_000_000),
    "streaming, py1e, 256 Ki": mosaic("py1e", 1 << 18),
    "streaming, py1br, 256 Ki": mosaic("py1br", 1 << 18),
}
