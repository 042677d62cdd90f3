"""`SourceCursor`: where one source stands, moved sample by sample."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from megascale_lightning.errors import DataError, EmptySourceError, StateError
from megascale_lightning.planning.blocks import Block, BlockStore
from megascale_lightning.streams import SourceSpec
from megascale_lightning.types import BAD_REASONS, IntArray, PartKey

__all__ = ["SourceCursor"]

_ENOUGH: Final = 100
"""Records that a share of bad ones is taken of, unless an epoch has fewer."""


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
        "_taken",
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
        self._taken: list[IntArray] = []

    @property
    def key(self) -> PartKey:
        """The part it stands in."""
        return PartKey(self.stream, self.index, self.epoch, self.window, self.part)

    @property
    def exhausted(self) -> bool:
        """All epochs are done, or those up to the end of this pass."""
        return self._stop_epoch is not None and self.epoch >= self._stop_epoch

    def head(self) -> int | None:
        """Tokens of the next sample; None when the source is exhausted.

        Raises:
            NeedBlocks: Its part is not described yet.
            EmptySourceError: A whole epoch gave nothing.
            StateError: The saved offset lies behind the part.
        """
        if self._block is None and not self._enter():
            return None
        block = self._block
        assert block is not None
        if block.samples is None:
            return block.lengths[self._next]
        return sum(block.lengths[self._next : self._sample_end(block)])

    def take(self, lengths: list[int]) -> int:
        """Take the next sample.

        Args:
            lengths: The tokens of its pieces are appended.

        Returns:
            The number of its pieces; 0 when the source is exhausted.

        Raises:
            NeedBlocks: Its part is not described yet.
            EmptySourceError: A whole epoch gave nothing.
        """
        block = self._block
        if block is None:
            if not self._enter():
                return 0
            block = self._block
            assert block is not None
        at = self._next
        if block.samples is None:
            stop = at + 1
            lengths.append(block.lengths[at])
        else:
            stop = self._sample_end(block)
            lengths += block.lengths[at:stop]
        self._next = stop
        if stop == len(block.lengths):
            self._leave(block)
        return stop - at

    def collect(self) -> list[IntArray]:
        """The pieces taken since the last call, in order, PIECE [n] each; counts what was dropped between them.

        Raises:
            DataError: The share of bad records is above the limit.
        """
        if self._block is not None:
            self._flush(self._block)
            self._check(_ENOUGH)
        taken, self._taken = self._taken, []
        return taken

    def upcoming(self, samples: int) -> list[PartKey]:
        """The parts that hold the next `samples` samples, as far as is known which those are; missing ones included."""
        if self.exhausted:
            return []
        keys = [self.key]
        if self.key not in self._blocks:
            return keys
        block = self._blocks.get(self.key)
        left = len(block.lengths) - (self._next if self._block is not None else block.find(self.offset))
        while left < samples:
            following = self._following(block)
            if following is None:
                break
            keys.append(following)
            if following not in self._blocks:
                break
            block = self._blocks.get(following)
            left += len(block.lengths)
        return keys

    def _enter(self) -> bool:
        """Stand in front of the next sample; False when the source is exhausted."""
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
                at = block.find(self.offset)
                if at < len(block.lengths):
                    self._block, self._next, self._start, self._counted = block, at, at, self.offset
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

    def _sample_end(self, block: Block) -> int:
        assert block.samples is not None
        return block.samples[bisect_right(block.samples, self._next)]

    def _flush(self, block: Block) -> None:
        if self._next > self._start:
            self._taken.append(block.pieces[self._start : self._next])
            self.offset = block.ends[self._next - 1]
            self._start = self._next
        self._count(block, self.offset)
        self._counted = self.offset

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
        self.dropped.update(counts)
        if self._spec.max_bad_fraction is not None:
            records, bad = self.checked
            added = sum(counts.get(reason, 0) for reason in BAD_REASONS)
            self.checked = records + block.records(self._counted, stop), bad + added

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
