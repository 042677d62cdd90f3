"""`SourceLoader`: the role that owns sources. It reads, transforms, buffers, and publishes metadata."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_lightning.config import Rows
from megascale_lightning.errors import ReplayError
from megascale_lightning.loading.partmaker import LoadedSource, PartMaker
from megascale_lightning.loading.parts import Part, PartStore
from megascale_lightning.loading.samplefields import join_samples
from megascale_lightning.sources.parquet import FilePool
from megascale_lightning.types import IntArray, MetaBlock, PartKey, Ragged, SampleBlock, TakeRequest

__all__ = ["LoadedSource", "SourceLoader"]


class SourceLoader:
    """Serves any part of any source, by reading it again if it must: the same metadata and the same bytes.

    Safe to call from several threads; a part is made by one of them while the others wait.

    Args:
        streams: Stream name -> its sources, in the order of `PartKey.source`.
        rows: What fields a sample has, and how long it may be.
        seed: Of the run.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part.
        buffer_bytes: What may be held beyond the newest part.
    """

    def __init__(
        self,
        streams: Mapping[str, Sequence[LoadedSource]],
        rows: Rows,
        seed: int,
        window_units: int,
        part_bytes: int,
        buffer_bytes: int,
    ) -> None:
        self._pool = FilePool()
        self._makers = {
            (stream, index): PartMaker(
                loaded, rows, seed=seed, window_units=window_units, part_bytes=part_bytes, pool=self._pool
            )
            for stream, sources in streams.items()
            for index, loaded in enumerate(sources)
        }
        self._token_fields = ("input_ids", *rows.token_fields)
        self._sample_fields = rows.sample_fields
        self._buffer_bytes = buffer_bytes
        self._store = PartStore(buffer_bytes)
        self._counts = {"described": 0, "made": 0, "taken_pieces": 0, "taken_tokens": 0}
        self._lock = threading.Lock()

    def describe(self, key: PartKey) -> MetaBlock:
        """Metadata of a part; its payload is held from now on, as far as the buffer goes.

        Raises:
            DataError: A record, file or transform is at fault; names source, file, unit and row.
            IndexError: There is no such part.
        """
        meta = self._part(key).meta
        self._count(described=1)
        return meta

    def take(self, requests: Sequence[TakeRequest]) -> SampleBlock:
        """Payload of the pieces, in request order.

        Raises:
            ReplayError: A part that was read again is not as described; names transform and sample.
            DataError: As in `describe`.
        """
        gathered = [_Gathered() for _ in self._token_fields]
        samples: dict[str, list[npt.NDArray[Any]]] = {field: [] for field in self._sample_fields}
        held = 0
        for request in requests:
            part = self._part(request.key)
            held += part.num_bytes
            if held > self._buffer_bytes:
                # Views keep their part in memory: copy out what was gathered, so that old parts can go.
                for output in gathered:
                    output.flush()
                held = part.num_bytes
            self._check(part, request)
            entries = request.pieces["entry"].astype(np.int64)
            starts = part.starts[entries]
            stops = starts + request.pieces["length"]
            chunks = None if part.num_chunks == 1 else part.chunks[entries].tolist()
            for field, output in zip(self._token_fields, gathered, strict=True):
                output.add(part.views(field, starts, stops, chunks), part.tokens[field][0].dtype)
            for field, blocks in samples.items():
                blocks.append(part.samples[field][part.records[entries]])
        offsets = _offsets([request.pieces["length"] for request in requests])
        self._count(taken_pieces=len(offsets) - 1, taken_tokens=int(offsets[-1]))
        return SampleBlock(
            num_pieces=len(offsets) - 1,
            tokens={
                field: Ragged(output.values(), offsets)
                for field, output in zip(self._token_fields, gathered, strict=True)
            },
            samples={field: join_samples(blocks) for field, blocks in samples.items()},
        )

    def release(self, keys: Sequence[PartKey]) -> None:
        """Let go of parts that nobody will ask for soon; asking is still fine, and slow."""
        self._store.release(keys)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is held now (`parts`, `buffer_bytes`, `open_files`)."""
        with self._lock:
            counts = dict(self._counts)
        return {**counts, **self._store.stats(), "open_files": self._pool.num_open}

    def shutdown(self) -> None:
        """Let go of files and parts."""
        for maker in self._makers.values():
            maker.close()

    def _part(self, key: PartKey) -> Part:
        maker = self._makers.get((key.stream, key.source))
        if maker is None:
            raise IndexError(f"no source {key.source} in stream {key.stream!r}")

        def make() -> Part:
            self._count(made=1)
            return maker.make(key)

        return self._store.get_or_make(key, make)

    def _check(self, part: Part, request: TakeRequest) -> None:
        """Refuse to hand out what the plan was not made from."""
        wanted, there = request.pieces, part.meta.pieces
        entries = wanted["entry"]
        inside = entries < len(there)
        found = there[np.where(inside, entries, 0)] if len(there) else np.zeros(len(wanted), there.dtype)
        same = inside.copy()
        for name in ("unit", "row", "start", "length", "loss_tokens"):
            same &= found[name] == wanted[name]
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            raise ReplayError(self._changed(request.key, wanted[at], found[at] if inside[at] else None))

    def _changed(self, key: PartKey, wanted: Any, found: Any) -> str:
        maker = self._makers[(key.stream, key.source)]
        where = f"{maker.locate(int(wanted['unit']), int(wanted['row']))}, epoch {key.epoch}"
        now = "nothing"
        if found is not None and (found["unit"], found["row"]) == (wanted["unit"], wanted["row"]):
            now = f"{found['length']} tokens with {found['loss_tokens']} targets"
        return (
            f"{where}: {maker.runner.transform_name} gives {now} where it gave {wanted['length']} tokens with "
            f"{wanted['loss_tokens']} targets when the plan was made. The same sample must give the same each time: "
            "files may not change during a run; a transform draws from its argument `rng` and depends on nothing else"
        )

    def _count(self, **added: int) -> None:
        with self._lock:
            for name, number in added.items():
                self._counts[name] += number


def _offsets(lengths: Sequence[IntArray]) -> npt.NDArray[np.int64]:
    """Where each piece begins, over all requests: int64 [pieces + 1]."""
    offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    if lengths:
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets


class _Gathered:
    """Values of one field, gathered from many places and joined in one pass.

    `bytearray.join` costs about half as much per piece as `np.concatenate`.
    """

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._dtype: np.dtype[Any] = np.dtype(np.int32)
        self._blocks: list[npt.NDArray[Any]] = []

    def add(self, views: list[memoryview], dtype: np.dtype[Any]) -> None:
        """Put these behind what is there."""
        if dtype != self._dtype:
            self.flush()
            self._dtype = dtype
        self._views += views

    def flush(self) -> None:
        """Copy what the views show, and let go of them."""
        joined = bytearray().join(self._views)
        if joined:
            self._blocks.append(np.frombuffer(joined, self._dtype))
        self._views = []

    def values(self) -> npt.NDArray[Any]:
        """All of it, of the dtype that holds every block."""
        self.flush()
        if not self._blocks:
            return np.empty(0, self._dtype)
        return self._blocks[0] if len(self._blocks) == 1 else np.concatenate(self._blocks)
