"""`LevelCursor`: where one source stands whose samples come by level, as a curriculum wants them.

A source's parts are opened in order. Each level has a place of its own among the opened ones, in front of its next
sample; the samples between that place and the last opened part wait. Levels thus go through the data at speeds of their
own, each sample comes once, and what waits is read again where it is due instead of being kept in memory.
"""

from __future__ import annotations

import math
from typing import Any, Final, NoReturn

import numpy as np

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.planning.blocks import PIECE_BYTES, Block, NeedBlocks
from megascale_lightning.planning.cursors import Ahead, SourceCursor
from megascale_lightning.planning.mixture import grouping, numbering
from megascale_lightning.types import PIECE, FloatArray, IntArray, PartKey

__all__ = ["LevelCursor"]

_REACH: Final = 8
"""Parts with something in them that are opened for a draw whose level has nothing waiting; then a neighbouring level
gives."""
_BY_DRAW: Final = 0xC13FA9A902A6328F
_BY_SOURCE: Final = 0x91E10DA5C79E7B1D
"""2^64 over the plastic number, and over its square: points of draw and source that lie evenly in both directions."""
_BITS: Final = 24
"""Shares are rounded to so many. Logarithms and powers may end in another bit on another machine: that moves a share by
some 1e-15, so that a rounded one differs about once in 10^7 times, and then it is one draw in 2^24 that does."""


class LevelCursor(SourceCursor):
    """The next samples of one source, level by level.

    Its own position is the next part to open; what was dropped of a part is counted when it is opened.

    Args:
        curriculum: What sorts the samples.
        levels: LEVEL_STATE [levels], as saved.
        rank: Of the source among all by name.
        cursor: What a `SourceCursor` takes.
    """

    __slots__ = ("_bounds", "_count_taken", "_curriculum", "_is_done", "_rank", "levels")

    def __init__(self, curriculum: QuantileSchedule, levels: IntArray, rank: int, *cursor: Any) -> None:
        super().__init__(*cursor)
        self.offset = 0
        self.levels: IntArray = levels.copy()
        self._curriculum = curriculum
        self._rank = rank
        self._bounds: IntArray | None = None
        self._count_taken = 0
        self._is_done = False
        """Behind what was taken there is nothing: `settle` passes the parts there, which were dropped as a whole."""

    @property
    def exhausted(self) -> bool:
        """Everything was opened and nothing waits."""
        return super().exhausted and not (self.levels["seen"] > self.levels["drawn"]).any()

    def look(self) -> PartKey | None:
        """Open parts until something was seen of the source; the part that is missing for that.

        Raises:
            EmptySourceError: A whole epoch gave nothing.
        """
        if self.levels["seen"].any() or self.exhausted:
            return None
        walk = _Walk(self)
        walk.fill()
        if walk.is_empty:
            self._refuse(walk)
        if walk.missing is None:
            self._stand_behind(walk)
        return walk.missing

    def pace(self, shares: FloatArray) -> None:
        """Say how often each level is to come from here on: float64 [levels], of sum 1."""
        self._bounds = np.rint(np.cumsum(shares)[:-1] * (1 << _BITS)).astype(np.uint64)
        self._count_taken = 0
        self._is_done = False

    def peek(self, limit: float, tokens: float = math.inf) -> Ahead:
        """See `SourceCursor`."""
        if limit <= 0 or tokens <= 0:
            return Ahead(0, np.empty(0, PIECE_BYTES), np.empty(0, np.int32), None, None, False)
        count = 64 if limit == math.inf else int(limit)
        while True:
            walk = _Walk(self)
            pieces, counts = walk.take(self._wanted(self._count_taken + count))
            begin = int(counts[: self._count_taken].sum())
            pieces, counts = pieces[begin:], counts[self._count_taken :]
            lengths = pieces.view(PIECE)["length"]
            is_all = len(counts) < count
            if is_all or limit < math.inf or lengths.sum(dtype=np.int64) >= tokens:
                return Ahead(len(counts), pieces, lengths, counts, walk.missing, is_all)
            count *= 2

    def advance(self, count: int) -> None:
        """See `SourceCursor`."""
        self._count_taken += count

    def settle(self) -> None:
        """See `SourceCursor`."""
        if not self._count_taken and not self._is_done:
            return
        walk = _Walk(self)
        _, counts = walk.take(self._wanted(self._count_taken + self._is_done))
        assert len(counts) == self._count_taken
        self._stand_behind(walk)
        self._count_taken = 0
        self._is_done = False

    def upcoming(self, samples: int) -> list[PartKey]:
        """See `SourceCursor`; of each level that has something waiting."""
        keys: list[PartKey] = []
        walk = _Walk(self)
        wanted = np.full(len(self.levels), samples)
        if self._bounds is not None and walk.next is not None:  # at the end of the data levels stand in for each other
            bounds = [0.0, *self._bounds.tolist(), float(1 << _BITS)]
            wanted = np.ceil(samples * np.diff(bounds) / (1 << _BITS)).astype(np.int64) + 1
        dues = np.minimum(wanted, walk.waiting)
        for level in np.flatnonzero(dues).tolist():
            due = dues[level]
            key, done = walk.place_of(level)
            while due > 0:
                keys.append(key)
                if key not in self._blocks:
                    break
                block = self._blocks.get(key)
                due -= len(block.levels(self._curriculum)[level]) - done
                following = self._following(block)
                if following is None:
                    break
                key, done = following, 0
        if (walk.waiting < wanted).any() and walk.next is not None:
            keys.append(walk.next)
        return list(dict.fromkeys(keys))

    def enter(self) -> bool:
        """See `SourceCursor`."""
        walk = _Walk(self)
        _, counts = walk.take(self._wanted(self._count_taken + 1))
        self._is_done = len(counts) <= self._count_taken
        if self._is_done and walk.missing is not None:
            raise NeedBlocks([walk.missing])
        if self._is_done and walk.is_empty:
            self._refuse(walk)
        return not self._is_done

    def _wanted(self, count: int) -> IntArray:
        """int64 [count]: the levels of the next draws, as far as they have something: evenly spread by their shares."""
        assert self._bounds is not None
        first = int(self.levels["drawn"].sum()) * _BY_DRAW + self._rank * _BY_SOURCE
        spread = np.arange(count, dtype=np.uint64) * np.uint64(_BY_DRAW) + np.uint64(first % 2**64)  # modulo 2^64
        return np.searchsorted(self._bounds, spread >> np.uint64(64 - _BITS), "right")

    def _refuse(self, walk: _Walk) -> NoReturn:
        """Say that nothing at all was in the parts of a whole epoch, which the walk has come to the end of."""
        for block in walk.opened:
            self._pass(block)
        if not walk.opened:
            self.epoch += 1
        raise self._empty()

    def _stand_behind(self, walk: _Walk) -> None:
        for block in walk.opened:
            self._pass(block)
        self.levels = walk.levels
        idle = self.levels["seen"] == self.levels["drawn"]
        for name, value in (("epoch", self.epoch), ("window", self.window), ("part", self.part), ("offset", 0)):
            self.levels[name][idle] = value


class _Walk:
    """A cursor's next draws, tried out: nothing of the cursor is changed."""

    def __init__(self, cursor: LevelCursor) -> None:
        self._cursor = cursor
        self._blocks = cursor._blocks
        self._curriculum = cursor._curriculum
        self.levels: IntArray = cursor.levels.copy()
        self.waiting: IntArray = self.levels["seen"] - self.levels["drawn"]
        self.next: PartKey | None = None if cursor._is_idle(cursor.key) else cursor.key
        """The part to be opened next; None behind the last."""
        self.opened: list[Block] = []
        self.missing: PartKey | None = None
        """The part that would have to be described to go on."""
        self.is_empty = False
        """A whole epoch gave nothing: who has to have what comes behind it refuses the source."""

    def take(self, wanted: IntArray) -> tuple[IntArray, IntArray]:
        """The samples of these levels, or of their neighbours where they have none, in order.

        Returns:
            PIECE_BYTES [pieces]; int64 [samples]: the pieces of each. Fewer samples than wanted where there are no more
            or a part is missing.
        """
        chosen = self._choose(wanted)
        order = grouping(chosen)
        found: list[IntArray] = []
        sizes = [np.empty(0, np.int64)]
        least, missing = len(chosen), self.missing
        for level, count in enumerate(np.bincount(chosen, minlength=len(self.levels)).tolist()):
            got = self._gather(level, count, found, sizes) if count else 0
            if got < count:
                lacking = int(np.flatnonzero(chosen == level)[got])
                least, missing = min((least, missing), (lacking, self.missing), key=lambda found: found[0])
                order = np.delete(order, np.flatnonzero(chosen[order] == level)[got:])
        self.missing = missing  # of the first draw that lacks one, not of the last level
        counts = np.zeros(len(chosen), np.int64)
        counts[order] = np.concatenate(sizes)
        starts = (np.cumsum(counts) - counts)[order]
        grouped = counts[order]
        at = np.arange(int(grouped.sum())) + np.repeat(starts - (np.cumsum(grouped) - grouped), grouped)
        pieces = np.empty(len(at), PIECE_BYTES)
        pieces[at] = np.concatenate([np.empty(0, PIECE_BYTES), *found])
        counts = counts[:least]
        return pieces[: int(counts.sum())], counts

    def fill(self) -> None:
        """Open parts until something waits, if there is anything at all."""
        if not self.waiting.any():
            self._open()

    def place_of(self, level: int) -> tuple[PartKey, int]:
        """The part in which a level goes on, and its samples there that are done with."""
        epoch, window, part, offset, _, _ = self.levels[level].item()
        return PartKey(self._cursor.stream, self._cursor.index, epoch, window, part), offset

    def _choose(self, wanted: IntArray) -> IntArray:
        """int64 [n]: the levels that give, fewer where there are no more or a part is missing."""
        chosen = wanted.copy()
        at = 0
        while at < len(chosen):
            rest = chosen[at:]
            beyond = np.flatnonzero(numbering(rest) >= self.waiting[rest])
            there = int(beyond[0]) if beyond.size else len(rest)
            self.waiting -= np.bincount(rest[:there], minlength=len(self.levels))
            at += there
            if at == len(chosen):
                break
            level = self._instead_of(int(chosen[at]))
            if level is None:
                return chosen[:at]
            chosen[at] = level
            self.waiting[level] -= 1
            at += 1
        return chosen

    def _instead_of(self, level: int) -> int | None:
        """A level that gives where this one has nothing waiting: itself, if it is in the next parts."""
        for _ in range(_REACH):
            if self.waiting[level] or not self._open():
                break
        if self.missing is None and not self.is_empty:
            self.fill()
        if self.missing is not None or self.is_empty or not self.waiting.any():
            return None
        there = np.flatnonzero(self.waiting)
        return int(there[np.abs(there - level).argmin()])

    def _open(self) -> bool:
        """Look into the next parts, up to one that has something; False where there is none, or one is not described.

        So no state lies between the start of an epoch and the first sample in it, and whether an epoch has any is told
        without what was opened before.
        """
        whole_epoch = not self._cursor._spec.num_windows
        while self.next is not None:
            at_start = (self.next.window, self.next.part) == (0, 0)
            if whole_epoch and at_start:
                break
            whole_epoch = whole_epoch or at_start
            if self.next not in self._blocks:
                self.missing = self.next
                return False
            block = self._blocks.get(self.next)
            counts = np.array([len(samples) for samples in block.levels(self._curriculum)])
            self.opened.append(block)
            self.next = self._cursor._following(block)
            if counts.any():
                self.levels["seen"] += counts
                self.waiting += counts
                return True
        self.is_empty = whole_epoch
        return False

    def _gather(self, level: int, count: int, found: list[IntArray], sizes: list[IntArray]) -> int:
        """Take the next samples of a level; how many there were before a part that is missing."""
        key, done = self.place_of(level)
        left = count
        while True:
            if key not in self._blocks:
                if left:
                    self.missing = key
                break
            block = self._blocks.get(key)
            samples = block.levels(self._curriculum)[level]
            taken = samples[done : done + left]
            pieces, counts = block.pieces_of(taken)
            found.append(pieces)
            sizes.append(counts)
            left -= len(taken)
            done += len(taken)
            if done < len(samples):
                break
            following = self._cursor._following(block)
            if following is None:
                break
            key, done = following, 0
            if not left:
                break
        place = self.levels[level]
        place["epoch"], place["window"], place["part"], place["offset"] = key.epoch, key.window, key.part, done
        place["drawn"] += count - left
        return count - left
