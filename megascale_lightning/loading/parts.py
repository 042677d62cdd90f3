"""`Part`: one part of a source in memory; `PartStore`: the parts a loader holds, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_lightning.types import MetaBlock, PartKey, Ragged

__all__ = ["Part", "PartStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Metadata and payload of a part. The payload stays in stored order, one chunk per segment read."""

    meta: MetaBlock
    tokens: Mapping[str, Sequence[npt.NDArray[Any]]]
    """Field -> values, one array per chunk, all of one dtype."""
    starts: npt.NDArray[np.int64]
    """int64 [entries]: first value of each entry in its chunk, the same for every field."""
    chunks: npt.NDArray[np.int32]
    """int32 [entries]: chunk of each entry."""
    samples: Mapping[str, npt.NDArray[Any]]
    """Field -> [records, ...]."""
    records: npt.NDArray[np.int64]
    """int64 [entries]: record of each entry."""
    payload: Ragged | None = None
    """`CollatedRows`: each record pickled, uint8; None where samples are fetched when they are taken."""

    @property
    def num_chunks(self) -> int:
        """Segments it was read from."""
        return len(self.tokens["input_ids"])

    @property
    def num_bytes(self) -> int:
        """What it holds, about."""
        return self.meta.payload_bytes

    def views(
        self, field: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], chunks: Sequence[int] | None
    ) -> list[memoryview]:
        """Bytes of values [start, stop) of each span.

        Args:
            field: A per-token field.
            starts: int64 [n]
            stops: int64 [n]
            chunks: [n]; None where the part has one chunk.
        """
        size = self.tokens[field][0].itemsize
        buffers = [values.view(np.uint8).data for values in self.tokens[field]]
        first, last = (starts * size).tolist(), (stops * size).tolist()
        if chunks is None:
            buffer = buffers[0]
            return [buffer[start:stop] for start, stop in zip(first, last, strict=True)]
        return [buffers[chunk][start:stop] for chunk, start, stop in zip(chunks, first, last, strict=True)]


class PartStore:
    """Parts by key, least recently used evicted first, the newest always admitted. Thread-safe.

    A part is made by one thread at a time; others that want it wait for it.

    Args:
        capacity_bytes: What is held at most, but for the newest part.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._parts: OrderedDict[PartKey, Part] = OrderedDict()
        self._being_made: dict[PartKey, threading.Event] = {}
        self._lock = threading.Lock()
        self._bytes = 0
        self._evicted = 0

    def get_or_make(self, key: PartKey, make: Callable[[], Part]) -> Part:
        """The part as held, or as made now by `make`, whose errors are raised."""
        while True:
            with self._lock:
                part = self._parts.get(key)
                if part is not None:
                    self._parts.move_to_end(key)
                    return part
                event = self._being_made.get(key)
                if event is None:
                    done = self._being_made[key] = threading.Event()
                    break
            event.wait()
        try:
            part = make()
            with self._lock:
                self._admit(key, part)
            return part
        finally:
            with self._lock:
                del self._being_made[key]
            done.set()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more can be held without letting go of a part."""
        with self._lock:
            return self._bytes + num_bytes <= self._capacity

    def _admit(self, key: PartKey, part: Part) -> None:
        self._parts[key] = part
        self._bytes += part.num_bytes
        while self._bytes > self._capacity and len(self._parts) > 1:
            self._bytes -= self._parts.popitem(last=False)[1].num_bytes
            self._evicted += 1

    def release(self, keys: Iterable[PartKey]) -> None:
        """Let go of parts; unknown keys are fine."""
        with self._lock:
            for key in keys:
                part = self._parts.pop(key, None)
                if part is not None:
                    self._bytes -= part.num_bytes

    def stats(self) -> dict[str, int]:
        """`parts`, `buffer_bytes` held now and `evicted` so far."""
        with self._lock:
            return {"parts": len(self._parts), "buffer_bytes": self._bytes, "evicted": self._evicted}
