"""`SourceCursor`: where one source stands, moved sample by sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from megascale_lightning.errors import DataError, EmptySourceError, StateError
from megascale_lightning.planning.blocks import PIECE_BYTES, Block, BlockStore
from megascale_lightning.streams import SourceSpec
from megascale_lightning.types import IntArray, PartKey

__all__ = ["Ahead", "SourceCursor"]

_ENOUGH: Final = 100
"""Records that a share of bad ones is taken of, unless an epoch has fewer."""


class Ahead(NamedTuple):
    """Samples that follow a cursor."""

    num_samples: int
    pieces: IntArray
    """PIECE_BYTES [n]"""
    lengths: IntArray
    """int [n]: their tokens."""
    counts: IntArray | None
    """int64 [num_samples]: the pieces of each; None where each is one."""
    missing: PartKey | None
    """The part that would have to be described to see more."""
    is_all: bool
    """There is no more to see now: behind these the source is exhausted, or a part is missing."""

    def first(self, samples: int) -> tuple[IntArray, IntArray | None]:
        """Of the first so many samples: PIECE_BYTES [n]; int64 [samples], how many each has, or None."""
        if self.counts is None:
            return self.pieces[:samples], None
        counts = self.counts[:samples]
        return self.pieces[: int(counts.sum())], counts

    def tokens(self) -> IntArray:
        """int64 [num_samples]: tokens of each sample."""
        if self.counts is None:
            return self.lengths.astype(np.int64)
        return np.add.reduceat(self.lengths, np.cumsum(self.counts) - self.counts, dtype=np.int64)


class SourceCursor:
    """The next samples of one source, over parts, windows and epochs.

    It stands in front of a sample, or at the start of a part that is not looked into yet: once the last sample of a
    part is taken, what was dropped behind it is counted and the cursor moves on, so that a position depends on the data
    alone.
    """

    __slots__ = (
        "_block",
        "_blocks",
        "_counted",
        "_next",
        "_spec",
        "_start",
        "_stop_epoch",
        "checked",
        "dropped",
        "epoch",
        "index",
        "offset",
        "part",
        "stream",
        "window",
    )

    def __init__(
        self,
        stream: str,
        index: int,
        spec: SourceSpec,
        blocks: BlockStore,
        saved: np.void,
        dropped: Mapping[str, int],
        checked: tuple[int, int],
        stop_epoch: int | None,
    ) -> None:
        self.stream = stream
        self.index = index
        self._spec = spec
        self._blocks = blocks
        self._stop_epoch = stop_epoch
        self.epoch, self.window, self.part, self.offset = (int(saved[n]) for n in ("epoch", "window", "part", "offset"))
        self.dropped = Counter(dropped)
        self.checked = checked
        self._block: Block | None = None
        self._next = 0
        self._start = 0
        self._counted = 0

    @property
    def key(self) -> PartKey:
        """The part it stands in."""
        return PartKey(self.stream, self.index, self.epoch, self.window, self.part)

    @property
    def exhausted(self) -> bool:
        """All epochs are done, or those up to the end of this pass."""
        return self._stop_epoch is not None and self.epoch >= self._stop_epoch

    def peek(self, limit: float, tokens: float = math.inf) -> Ahead:
        """The next samples that are described, without moving: `limit` of them, or as many as have `tokens` tokens."""
        found = 0
        parts: list[tuple[IntArray, IntArray, IntArray | None]] = []
        block, first = self._block, self._next
        key = self.key if block is None else None
        while found < limit and tokens > 0:
            if block is None:
                if key is None or self._is_idle(key):
                    return Ahead(found, *_joined(parts), None, True)
                if key not in self._blocks:
                    return Ahead(found, *_joined(parts), key, True)
                block = self._blocks.get(key)
                first = 0 if found or not self.offset else block.find(self.offset)
                if first == block.num_samples:
                    # Only `enter` goes past what was dropped: it counts and checks it.
                    return Ahead(found, *_joined(parts), None, True)
            count = int(min(block.num_samples - first, limit - found))
            parts.append(block.between(first, first + count))
            found += count
            if tokens < math.inf:
                tokens -= int(parts[-1][1].sum(dtype=np.int64))
            if first + count < block.num_samples:
                break
            key, block = self._following(block), None
        return Ahead(found, *_joined(parts), None, False)

    def advance(self, count: int) -> None:
        """Take the next samples, which `peek` has seen."""
        while count:
            block = self._block
            if block is None:
                is_there = self.enter()
                assert is_there
                continue
            taken = min(count, block.num_samples - self._next)
            self._next += taken
            count -= taken
            if self._next == block.num_samples:
                self._leave(block)

    def settle(self) -> None:
        """Stand, with `offset` and what was dropped, behind what was taken.

        Raises:
            DataError: The share of bad records is above the limit.
        """
        if self._block is not None:
            self._flush(self._block)
            self._check(_ENOUGH)

    def upcoming(self, samples: int) -> list[PartKey]:
        """Parts beyond the one it stands in that hold the next `samples` samples, as far as is known which those are.

        Missing ones included, as is its own part while nothing was looked into.
        """
        if self.exhausted or (self._block is not None and self._block.num_samples - self._next >= samples):
            return []
        keys = [self.key]
        if self.key not in self._blocks:
            return keys
        block = self._blocks.get(self.key)
        left = block.num_samples - (self._next if self._block is not None else block.find(self.offset))
        while left < samples:
            following = self._following(block)
            if following is None:
                break
            keys.append(following)
            if following not in self._blocks:
                break
            block = self._blocks.get(following)
            left += block.num_samples
        return keys

    def enter(self) -> bool:
        """Stand in front of the next sample; False when the source is exhausted.

        Raises:
            NeedBlocks: Its part is not described yet.
            EmptySourceError: A whole epoch gave nothing.
            StateError: The saved offset lies behind the part.
        """
        if self._block is not None:
            return True
        whole_epoch = False
        while not self.exhausted:
            at_start = (self.window, self.part, self.offset) == (0, 0, 0)
            if at_start and whole_epoch:
                raise self._empty()
            whole_epoch = whole_epoch or at_start
            if self._spec.num_windows:
                block = self._blocks.get(self.key)
                if self.offset > block.size:
                    raise self._beyond(block)
                first = block.find(self.offset)
                if first < block.num_samples:
                    self._block, self._next, self._start, self._counted = block, first, first, self.offset
                    return True
                self._counted = self.offset
                self._pass(block)
            else:
                self.epoch += 1
        if whole_epoch:
            raise self._empty()
        return False

    def _empty(self) -> EmptySourceError:
        return EmptySourceError(
            f"source {self._spec.name!r} of stream {self.stream!r}: epoch {self.epoch - 1} gave no sample at all; left "
            f"out: {dict(self.dropped) or 'nothing, it has no records'}. Look at its files, transform, length and "
            "overlong policy, or remove the source."
        )

    def _beyond(self, block: Block) -> StateError:
        return StateError(
            f"source {self._spec.name!r} of stream {self.stream!r}: offset {self.offset} lies behind the {block.size} "
            f"entries of part {self.part} in window {self.window} of epoch {self.epoch}: the loader state that was "
            "loaded is damaged; go on from another checkpoint"
        )

    def _is_idle(self, key: PartKey) -> bool:
        """Whether there is nothing to read at a place: no windows, or an epoch behind the last."""
        return not self._spec.num_windows or (self._stop_epoch is not None and key.epoch >= self._stop_epoch)

    def _flush(self, block: Block) -> None:
        if self._next > self._start:
            self.offset = int(block.ends[block.entry_at(self._next) - 1])
            self._start = self._next
            self._count(block, self.offset)

    def _leave(self, block: Block) -> None:
        self._flush(block)
        self._pass(block)
        self._block = None

    def _pass(self, block: Block) -> None:
        """Move to the start of the next part; what is left of this one was dropped."""
        self._count(block, block.size)
        following = self._following(block)
        self._check(1 if following is None or following.epoch > self.epoch else _ENOUGH)
        if following is None:
            self.epoch, self.window, self.part = self.epoch + 1, 0, 0
        else:
            self.epoch, self.window, self.part = following.epoch, following.window, following.part
        self.offset = self._counted = 0

    def _count(self, block: Block, stop: int) -> None:
        counts = block.count(self._counted, stop)
        if counts:
            self.dropped.update(counts)
        if self._spec.max_bad_fraction is not None or self._spec.num_records is not None:
            records, bad = self.checked
            added = sum(counts.get(reason, 0) for reason in self._spec.bad_reasons)
            self.checked = records + block.records(self._counted, stop), bad + added
        self._counted = stop

    def _check(self, enough: int) -> None:
        """Raise where the limit is passed: a function of the records alone, never of when they were read."""
        limit = self._spec.max_bad_fraction
        records, bad = self.checked
        if limit is None or records < enough or bad <= limit * records:
            return
        listed = f"listed in {self._spec.quarantine}" if self._spec.quarantine else 'on_error="quarantine" lists them'
        raise DataError(
            f"source {self._spec.name!r} of stream {self.stream!r}, epoch {self.epoch}: {bad} of {records} records are "
            f"bad, more than max_bad_fraction={limit} allows; left out so far: {dict(self.dropped)}; {listed}. Mend "
            "the data or the transform, or raise the limit and go on from the last checkpoint"
        )

    def _following(self, block: Block) -> PartKey | None:
        """The part behind a block; None behind the last epoch, or the last of this pass."""
        key = block.key
        if not block.last_in_window:
            return PartKey(key.stream, key.source, key.epoch, key.window, key.part + 1)
        if key.window + 1 < self._spec.num_windows:
            return PartKey(key.stream, key.source, key.epoch, key.window + 1, 0)
        if self._stop_epoch is None or key.epoch + 1 < self._stop_epoch:
            return PartKey(key.stream, key.source, key.epoch + 1, 0, 0)
        return None


def _joined(parts: list[tuple[IntArray, IntArray, IntArray | None]]) -> tuple[IntArray, IntArray, IntArray | None]:
    """What `Block.between` says of samples in several parts, one after another."""
    if len(parts) == 1:
        return parts[0]
    pieces = np.concatenate([np.empty(0, PIECE_BYTES), *(pieces for pieces, _, _ in parts)])
    lengths = np.concatenate([np.empty(0, np.int32), *(lengths for _, lengths, _ in parts)])
    if all(counts is None for _, _, counts in parts):
        return pieces, lengths, None
    each = [np.ones(len(lengths), np.int64) if counts is None else counts for _, lengths, counts in parts]
    return pieces, lengths, np.concatenate(each)
