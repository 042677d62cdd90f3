r"""`Chunk`: what a LitData `index.json` says of one chunk, and where its items lie in the file.

A chunk: number of items n uint32, offsets uint32 [n + 1], the items. Behind the last item there may be the same records
as an Arrow file, with its length uint32 and `LDARW01\0` at the end. Compressed in frames it is: `LDFZ01\0\0`, version
uint16, flags uint16, n, items of a frame and number of frames uint32 each, offsets uint32 [n + 1] from 0, and per frame
first item uint32, items uint32, first byte uint64, bytes uint32, decompressed bytes uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascale_lightning.sources.stores.spans import decompress

__all__ = ["Chunk", "Layout", "open_layout"]

_FRAMED: Final = b"LDFZ01\x00\x00"
_FRAMED_HEAD: Final = struct.Struct("<8sHHIII")
_FRAME: Final = np.dtype([("item", "<u4"), ("items", "<u4"), ("start", "<u8"), ("size", "<u4"), ("plain_size", "<u4")])
_FOOTER: Final = b"LDARW01\x00"

Fetch = Callable[[int, int], Any]
"""`fetch(begin, end)` gives these bytes of a chunk as a buffer."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk as its index describes it."""

    name: str
    """Relative to the folder."""
    plain_name: str
    """Of its decompressed twin, where the whole file is compressed."""
    size: int
    """Bytes as the index says, decompressed where the whole file is compressed."""
    num_items: int
    num_tokens: int
    """Of a chunk of tokens; -1 of another."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes that it may have: older writers did not count the offsets."""
        return self.size, self.size + 4 * (self.num_items + 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of an open chunk."""

    fetch: Fetch
    offsets: npt.NDArray[np.int64]
    """int64 [num_items + 1]: where items begin, in the file, or in what the frames hold."""
    frames: npt.NDArray[Any] | None
    """Of `_FRAME`, where there are any."""
    size: int

    @property
    def has_rows(self) -> bool:
        """Whether the records are there as an Arrow file, perhaps as nothing else."""
        return self.frames is None and int(self.offsets[-1]) < self.size

    def items(self, start: int, stop: int, is_packed: bool) -> Iterator[memoryview]:
        """The bytes of items [start, stop).

        Args:
            start: First item.
            stop: Behind the last.
            is_packed: Each is compressed for itself.

        Raises:
            ValueError: The chunk is damaged.
        """
        for first, last in self._spans(start, stop):
            begin = int(self.offsets[first])
            data = memoryview(self._bytes(first, last))
            for a, b in pairwise((self.offsets[first : last + 1] - begin).tolist()):
                yield memoryview(_unpacked(data[a:b])) if is_packed else data[a:b]

    def _spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Items [start, stop), cut where frames begin."""
        if start >= stop:
            return []
        if self.frames is None:
            return [(start, stop)]
        firsts = self.frames["item"].astype(np.int64)
        inside = firsts[(firsts > start) & (firsts < stop)].tolist()
        return list(pairwise([start, *inside, stop]))

    def _bytes(self, first: int, last: int) -> Any:
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        if self.frames is None:
            return self.fetch(begin, end)
        frame = self.frames[int(np.searchsorted(self.frames["item"], first, side="right")) - 1]
        packed = self.fetch(int(frame["start"]), int(frame["start"]) + int(frame["size"]))
        base = int(self.offsets[int(frame["item"])])
        return decompress(packed, "zstd", int(frame["plain_size"])).slice(begin - base, end - begin)

    def rows(self) -> pa.Table:
        """All records, of a chunk that `has_rows`.

        Raises:
            ValueError: What lies behind the last item is something else.
        """
        tail = bytes(self.fetch(max(self.size - 12, 0), self.size))
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != _FOOTER or length > self.size - 12 - int(self.offsets[-1]):
            raise ValueError(f"its last item ends at byte {self.offsets[-1]} of {self.size}, and no Arrow rows follow")
        stream = pa.BufferReader(self.fetch(self.size - 12 - length, self.size - 12))
        is_file = bytes(self.fetch(self.size - 12 - length, self.size - 6 - length)) == b"ARROW1"
        table = pa.ipc.open_file(stream).read_all() if is_file else pa.ipc.open_stream(stream).read_all()
        if table.num_rows != len(self.offsets) - 1:
            raise ValueError(f"it has {table.num_rows} Arrow rows where its header counts {len(self.offsets) - 1}")
        return table


def _unpacked(data: memoryview) -> bytes:
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            return bytes(stream.read())
    except OSError as error:
        raise ValueError(f"an item cannot be decompressed: {error}") from error


def open_layout(chunk: Chunk, fetch: Fetch, size: int) -> Layout:
    """Read the offsets of a chunk.

    Args:
        chunk: As its index says.
        fetch: Reads it, decompressed where the whole file is compressed.
        size: Bytes of what `fetch` reads.

    Raises:
        ValueError: It is damaged: it does not hold the items that the index counts.
    """
    head = _FRAMED_HEAD.size
    begin = bytes(fetch(0, min(head, size)))
    count = chunk.num_items
    if not begin.startswith(_FRAMED):
        if 4 * (count + 2) > size or int.from_bytes(begin[:4], "little") != count:
            found = int.from_bytes(begin[:4], "little")
            raise ValueError(f"it has {size} bytes and {found} items, and its index says {count} items")
        offsets = np.frombuffer(fetch(4, 4 * (count + 2)), "<u4").astype(np.int64)
        _check_rise(offsets, 4 * (count + 2), size)
        return Layout(fetch, offsets, None, size)
    _, version, _, found, _, num_frames = _FRAMED_HEAD.unpack(begin)
    if version != 1 or found != count:
        raise ValueError(f"it has {found} items in frames of version {version}, and its index says {count} items")
    middle = head + 4 * (count + 1)
    end = middle + num_frames * _FRAME.itemsize
    if end > size:
        raise ValueError(f"it has {size} bytes, fewer than its header of {end}")
    offsets = np.frombuffer(fetch(head, middle), "<u4").astype(np.int64)
    frames = np.frombuffer(fetch(middle, end), _FRAME)
    _check_rise(offsets, 0, int(frames["plain_size"].sum()))
    items = frames["items"].astype(np.int64)
    if (np.cumsum(items) - items != frames["item"]).any() or items.sum() != count:
        raise ValueError("its frames do not follow each other")
    return Layout(fetch, offsets, frames, size)


def _check_rise(offsets: npt.NDArray[np.int64], first: int, end: int) -> None:
    if offsets[0] != first or offsets[-1] > end or (np.diff(offsets) < 0).any():
        raise ValueError(f"its offsets do not rise from {first} to at most {end}")
