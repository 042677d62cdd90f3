"""Described parts as the planner keeps them, and the one exception that says which are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.types import PIECE, FloatArray, IntArray, MetaBlock, PartKey

__all__ = ["PIECE_BYTES", "Block", "BlockStore", "NeedBlocks"]

PIECE_BYTES: Final = np.dtype((np.void, PIECE.itemsize))
"""A PIECE as bytes: numpy copies these at once, and what has fields field by field, which takes 40 times as long."""


class NeedBlocks(Exception):
    """A step cannot be planned before the first of these parts is described; the others will be wanted soon.

    Never leaves the planner.
    """

    def __init__(self, keys: Iterable[PartKey]) -> None:
        self.keys = tuple(keys)
        super().__init__(self.keys)


class Block:
    """One `MetaBlock`, made ready for drawing sample after sample.

    Attributes:
        pieces: PIECE_BYTES [kept entries].
        lengths: int32 [kept entries]: their tokens.
        ends: int64 [kept entries]: entries of the part that are done with once it is taken.
        joined: bool [entries of the part]: stays together with the entry before it; None: none does.
        metadata: Name -> float64 [entries of the part], dropped ones included.
        samples: int64 [samples + 1]: kept entry index at which each sample begins, and one past the last; None where
            every entry is a sample of its own.
        num_samples: Kept ones.
    """

    __slots__ = (
        "_counted",
        "_firsts",
        "_levels",
        "_reasons",
        "ends",
        "joined",
        "key",
        "last_in_window",
        "lengths",
        "metadata",
        "num_samples",
        "pieces",
        "samples",
        "size",
    )

    def __init__(self, meta: MetaBlock) -> None:
        kept = np.flatnonzero(meta.kept)
        self.key = meta.key
        self.size = len(meta.pieces)
        self.last_in_window = meta.last_in_window
        self.metadata = meta.metadata
        pieces = meta.pieces.take(kept)
        self.pieces = pieces.view(PIECE_BYTES)
        self.lengths: IntArray = np.ascontiguousarray(pieces["length"])
        self.ends: IntArray = kept + 1
        self.joined = meta.joined
        first = meta.first[kept] if meta.joined is None else (meta.first & ~meta.joined)[kept]
        self.samples: IntArray | None = None if first.all() else np.append(np.flatnonzero(first), len(kept))
        self.num_samples = len(kept) if self.samples is None else len(self.samples) - 1
        counted = np.where(meta.first, meta.reason, 0)
        self._counted = counted if counted.any() else None
        self._reasons = meta.reasons
        self._levels: list[IntArray] | None = None
        self._firsts = None if meta.first.all() else np.concatenate([[0], np.cumsum(meta.first)])

    def find(self, offset: int) -> int:
        """The first sample at or behind `offset` entries of the part, at which a sample begins; one past the last."""
        entry = int(np.searchsorted(self.ends, offset, "right"))
        return entry if self.samples is None else int(np.searchsorted(self.samples, entry))

    def entry_at(self, sample: int) -> int:
        """Where a sample begins: its first kept entry; one past the last for the end."""
        return sample if self.samples is None else int(self.samples[sample])

    def between(self, start: int, stop: int) -> tuple[IntArray, IntArray, IntArray | None]:
        """Of the samples [start, stop) the pieces, PIECE_BYTES [n]; their tokens, int32 [n]; how many each sample has.

        The last is int64 [samples]; None: one each.
        """
        if self.samples is None:
            return self.pieces[start:stop], self.lengths[start:stop], None
        bounds = self.samples[start : stop + 1]
        first, last = bounds[0], bounds[-1]
        return self.pieces[first:last], self.lengths[first:last], np.diff(bounds)

    @property
    def first_entries(self) -> IntArray:
        """int64 [samples]: where in the part each sample begins."""
        first = np.arange(self.num_samples) if self.samples is None else self.samples[:-1]
        found: IntArray = self.ends[first] - 1
        return found

    def levels(self, curriculum: QuantileSchedule) -> list[IntArray]:
        """For each level its samples, int64 [n], in order; a stream has one curriculum."""
        if self._levels is None:
            if curriculum.field != "length":
                numbers = self.metadata[curriculum.field][self.first_entries]
            elif self.samples is None or not self.num_samples:
                numbers = self.lengths
            else:
                numbers = np.add.reduceat(self.lengths, self.samples[:-1], dtype=np.int64)
            levels = curriculum.levels_of(numbers)
            counts = np.bincount(levels, minlength=curriculum.num_levels)
            self._levels = np.split(np.argsort(levels, kind="stable"), np.cumsum(counts)[:-1])
        return self._levels

    def pieces_of(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """PIECE_BYTES [n] of these samples, int64 [samples], one after another; int64 [samples]: how many each has."""
        if self.samples is None:
            return self.pieces[samples], np.ones(len(samples), np.int64)
        first = self.samples[samples]
        counts = self.samples[samples + 1] - first
        return self.pieces[np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)], counts

    def count(self, start: int, stop: int) -> dict[str, int]:
        """Reason -> samples, of the entries [start, stop)."""
        if self._counted is None or start >= stop:
            return {}
        counts = np.bincount(self._counted[start:stop], minlength=len(self._reasons))
        return {self._reasons[code]: int(n) for code, n in enumerate(counts) if code and n}

    def records(self, start: int, stop: int) -> int:
        """Samples that begin in the entries [start, stop), dropped ones included."""
        return stop - start if self._firsts is None else int(self._firsts[stop] - self._firsts[start])


class BlockStore:
    """The described parts of one stream."""

    def __init__(self) -> None:
        self._blocks: dict[PartKey, Block] = {}

    def __contains__(self, key: PartKey) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[PartKey]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: PartKey) -> Block:
        """The part. Raises: NeedBlocks: it is not described yet."""
        block = self._blocks.get(key)
        if block is None:
            raise NeedBlocks([key])
        return block

    def metadata_of(self, stream: str, pieces: IntArray, names: Iterable[str]) -> dict[str, FloatArray]:
        """Name -> float64 [n], of PIECE [n]. Raises: NeedBlocks: parts of some are not described now."""
        found = {name: np.empty(len(pieces)) for name in names}
        if found:
            for block, mine in self._parts_of(stream, pieces):
                for name, values in found.items():
                    values[mine] = block.metadata[name][pieces["entry"][mine]]
        return found

    def joined(self, stream: str, pieces: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each of PIECE [n] stays together with the one before it. Raises: NeedBlocks: as `metadata_of`."""
        found = np.zeros(len(pieces), np.bool_)
        for block, mine in self._parts_of(stream, pieces):
            if block.joined is not None:
                found[mine] = block.joined[pieces["entry"][mine]]
        return found

    def _parts_of(self, stream: str, pieces: IntArray) -> Iterator[tuple[Block, IntArray]]:
        """The parts of PIECE [n], each with the indices of its pieces."""
        if not len(pieces):
            return
        places = np.stack([pieces[name] for name in ("source", "epoch", "window", "part")])
        order = np.lexsort(places[::-1])
        places = places[:, order]
        starts = np.flatnonzero(np.append(True, (places[:, 1:] != places[:, :-1]).any(axis=0)))
        keys = [PartKey(stream, *place) for place in places[:, starts].T.tolist()]
        missing = [key for key in keys if key not in self._blocks]
        if missing:
            raise NeedBlocks(missing)
        for key, mine in zip(keys, np.split(order, starts[1:]), strict=True):
            yield self._blocks[key], mine

    def add(self, meta: MetaBlock) -> None:
        """Keep a described part."""
        self._blocks[meta.key] = Block(meta)

    def drop(self, keys: Iterable[PartKey]) -> None:
        """Forget parts."""
        for key in keys:
            self._blocks.pop(key, None)
