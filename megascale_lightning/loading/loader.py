"""`SourceLoader`: the role that owns sources. It reads, transforms, buffers, and publishes metadata."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from megascale_lightning.errors import ReplayError
from megascale_lightning.loading.executors import Executors
from megascale_lightning.loading.partmaker import LoadedSource, PartMaker
from megascale_lightning.loading.parts import Part, PartStore
from megascale_lightning.loading.readahead import ReadAhead
from megascale_lightning.loading.samplemaker import SampleMaker
from megascale_lightning.loading.taking import TakenSamples, TakenTokens, Taking
from megascale_lightning.loading.tokenmaker import TokenMaker
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.types import MetaBlock, PartKey, SampleBlock, TakeRequest

__all__ = ["LoadedSource", "SourceLoader"]


class SourceLoader:
    """Serves any part of any source, by reading it again if it must: the same metadata and the same bytes.

    Safe to call from several threads; a part is made by one of them while the others wait.

    Args:
        streams: Stream name -> its sources, in the order of `PartKey.source`.
        rows: Stream name -> what is kept of its samples, and how long they may be.
        seed: Of the run.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part.
        buffer_bytes: What may be held beyond the newest part. As far as it goes, the part behind one that was asked for
            is made in advance where `Source.executor` allows to run the user's code beside.
        metadata: Stream name -> what is described of a sample beside its length; see `MetaBlock.metadata`.
        dumps: Pickles the user's code for the worker processes of `Source.executor`.
    """

    def __init__(
        self,
        streams: Mapping[str, Sequence[LoadedSource]],
        rows: Mapping[str, Rows],
        seed: int,
        window_units: int,
        part_bytes: int,
        buffer_bytes: int,
        dumps: Callable[[Any], bytes] = pickle.dumps,
        metadata: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._pool = FilePool()
        self._executors = Executors(dumps)
        self._ahead = ReadAhead(self._part, self._has_room)
        self._rows = dict(rows)
        settings: dict[str, Any] = {
            "seed": seed,
            "window_units": window_units,
            "part_bytes": part_bytes,
            "pool": self._pool,
            "executors": self._executors,
            "on_read": self._ahead.read,
        }
        self._makers: dict[tuple[str, int], PartMaker] = {
            (stream, index): _maker_of(rows[stream])(
                loaded, rows[stream], metadata=(metadata or {}).get(stream, ()), **settings
            )
            for stream, sources in streams.items()
            for index, loaded in enumerate(sources)
        }
        self._sizes = dict.fromkeys(self._makers, part_bytes)
        self._buffer_bytes = buffer_bytes
        self._store = PartStore(buffer_bytes)
        self._counts = {"described": 0, "made": 0, "taken_pieces": 0, "taken_tokens": 0}
        self._lock = threading.Lock()
        self._inline = threading.Lock()

    def describe(self, key: PartKey) -> MetaBlock:
        """Metadata of a part; its payload is held from now on, as far as the buffer goes.

        Raises:
            DataError: A record, file or transform is at fault; names source, file, unit and row.
            StateError: There is no such part.
        """
        maker = self._maker(key)
        if maker.source.executor != "inline":
            self._ahead.asked(key)
        part = self._part(key)
        self._sizes[key.stream, key.source] = part.num_bytes
        self._ahead.read(key, maker.following(key, part.meta.last_in_window))
        self._count(described=1)
        return part.meta

    def take(self, requests: Sequence[TakeRequest]) -> SampleBlock:
        """Payload of the pieces, in request order; all requests are of one stream.

        Raises:
            ReplayError: A part that was read again is not as described; names transform and sample.
            DataError: As in `describe`.
        """
        if not requests:
            return SampleBlock(num_pieces=0, tokens={}, samples={})
        rows = self._rows[requests[0].key.stream]
        taking: Taking = TakenSamples() if isinstance(rows, CollatedRows) else TakenTokens(rows)
        held = 0
        for request in requests:
            part = self._part(request.key)
            held += part.num_bytes
            if held > self._buffer_bytes:
                # Views keep their part in memory: copy out what was gathered, so that old parts can go.
                taking.flush()
                held = part.num_bytes
            self._check(part, request)
            taking.add(self._makers[request.key.stream, request.key.source], part, request)
        block = taking.block()
        tokens = sum(int(request.pieces["length"].sum(dtype=np.int64)) for request in requests)
        self._count(taken_pieces=block.num_pieces, taken_tokens=tokens)
        return block

    def release(self, keys: Sequence[PartKey]) -> None:
        """Let go of parts that nobody will ask for soon; asking is still fine, and slow."""
        self._store.release(keys)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is held now (`parts`, `buffer_bytes`, `open_files`)."""
        with self._lock:
            counts = dict(self._counts)
        return {**counts, **self._store.stats(), "open_files": self._pool.num_open}

    def shutdown(self) -> None:
        """Let go of files and parts, and end the threads and processes of `Source.executor`."""
        self._ahead.close()
        self._executors.close()
        for maker in self._makers.values():
            maker.close()

    def _maker(self, key: PartKey) -> PartMaker:
        maker = self._makers.get((key.stream, key.source))
        if maker is None:
            raise IndexError(f"no source {key.source} in stream {key.stream!r}")
        return maker

    def _has_room(self, key: PartKey) -> bool:
        """For a part and the one before it, which may be in the making, if they are like the newest of their source."""
        return self._store.has_room(2 * self._sizes[key.stream, key.source])

    def _part(self, key: PartKey) -> Part:
        maker = self._maker(key)
        # Code of the user that asked for no threads never runs on two of them at a time.
        alone: AbstractContextManager[Any] = self._inline if maker.source.executor == "inline" else nullcontext()

        def make() -> Part:
            self._count(made=1)
            with alone:
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
            now = self._measure(key, found)
        return (
            f"{where}: {maker.runner.transform_name} gives {now} where it gave {self._measure(key, wanted)} when the "
            "plan was made. The same sample must give the same each time: files may not change during a run; a "
            "transform draws from its argument `rng` and depends on nothing else"
        )

    def _measure(self, key: PartKey, piece: Any) -> str:
        if isinstance(self._rows[key.stream], CollatedRows):
            return f"a sample of length {piece['length']}"
        return f"{piece['length']} tokens with {piece['loss_tokens']} targets"

    def _count(self, **added: int) -> None:
        with self._lock:
            for name, number in added.items():
                self._counts[name] += number


def _maker_of(rows: Rows) -> Callable[..., PartMaker]:
    return SampleMaker if isinstance(rows, CollatedRows) else TokenMaker
