"""`SampleBuffer`: the described samples that follow a state, and the draws that a step makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megascale_lightning.planning.blocks import PIECE_BYTES, BlockStore, NeedBlocks
from megascale_lightning.planning.cursors import Ahead, SourceCursor
from megascale_lightning.planning.levels import LevelCursor
from megascale_lightning.planning.mixture import DeadlineMixer, grouping
from megascale_lightning.rows import PackedRows
from megascale_lightning.streams import StreamSpec, initial_levels
from megascale_lightning.types import (
    PIECE,
    SOURCE_STATE,
    FloatArray,
    IntArray,
    LoaderState,
    PartKey,
)

__all__ = ["Drawn", "SampleBuffer"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step chooses its rows from."""

    pieces: IntArray
    """PIECE [n]: those carried over, then the new ones in draw order."""
    num_carried: int
    metadata: Mapping[str, FloatArray]
    """Name -> float64 [n], as the stream's `metadata` names them."""
    sources: IntArray
    """SOURCE_STATE [sources]: where they stand behind it."""
    joined: npt.NDArray[np.bool_] | None = None
    """bool [n]: has to be in the row of the piece before it; None: no piece has."""


class SampleBuffer:
    """Draws the samples of one stream, step after step.

    It holds the live cursors of the state that it drew from last; any other state is taken up from its saved
    positions, with the same result.

    Args:
        spec: The stream.
        blocks: Its described parts.
    """

    def __init__(self, spec: StreamSpec, blocks: BlockStore) -> None:
        self.spec = spec
        self._blocks = blocks
        self._state: LoaderState | None = None
        self._cursors: list[SourceCursor] = []
        self._together = np.array([source.together for source in spec.sources])
        self._draws = [0] * len(spec.sources)
        self._gone: set[int] = set()
        self._per_sample = 512.0  # tokens: a first guess of how many samples a step takes

    def draw(self, state: LoaderState, weights: FloatArray) -> Drawn:
        """The pool of the step that follows `state`.

        Args:
            state: Where the stream stands.
            weights: float64 [sources]: in force for this step.

        Raises:
            NeedBlocks: A part has to be described first.
            EmptySourceError: A whole epoch of a source gave nothing.
            DataError: More of a source's records are bad than its limit allows.
        """
        carried = self._blocks.metadata_of(self.spec.name, state.carry, self.spec.metadata)
        before = self._joined(state.carry)
        self._take_up(state)
        self._state = None  # until it is known to have gone well: the cursors move
        cursors = self._cursors
        self._pace(state.step, weights)
        ended = np.array([cursor.exhausted for cursor in cursors])
        mixer = DeadlineMixer(
            [source.name for source in self.spec.sources],
            weights,
            share=state.sources["share"],
            given=state.sources["given"],
            live=~ended,
            unit=self.spec.mixture_unit,
        )
        pool = _Pool(self.spec, state.carry)
        self._gone = set(np.flatnonzero(ended).tolist())
        while pool.wants_more and mixer.live and not self.spec.stops(self._gone):
            self._draw_some(mixer, pool, self._guess(pool))
        mixer.settle()
        for cursor in cursors:
            cursor.settle()
        self._draws = np.bincount(pool.sources, minlength=len(cursors)).tolist()
        self._per_sample = pool.drawn_tokens / max(len(pool.sources), 1)
        num_carried, pieces = len(state.carry), pool.pieces
        drawn = self._blocks.metadata_of(self.spec.name, pieces[num_carried:], self.spec.metadata)
        metadata = {name: np.concatenate([carried[name], values]) for name, values in drawn.items()}
        joined = None if before is None else np.concatenate([before, self._joined(pieces[num_carried:])])
        return Drawn(pieces, num_carried, metadata, self._stand(mixer, weights), joined)

    def _joined(self, pieces: IntArray) -> npt.NDArray[np.bool_] | None:
        """See `Drawn.joined`. Raises: NeedBlocks: The part of a piece that may be joined is not described now."""
        if not self._together.any():
            return None
        found = np.zeros(len(pieces), np.bool_)
        asked = self._together[pieces["source"]]
        found[asked] = self._blocks.joined(self.spec.name, pieces[asked])
        return found

    def state_after(self, before: LoaderState, drawn: Drawn, carry: IntArray) -> LoaderState:
        """`before` with the sources where they stand behind the draw made last, and what was left of it."""
        dropped = tuple(dict(cursor.dropped) for cursor in self._cursors)
        checked = tuple(cursor.checked for cursor in self._cursors)
        after = replace(before, sources=drawn.sources, dropped=dropped, carry=carry, checked=checked)
        levels = [cursor.levels for cursor in self._cursors if isinstance(cursor, LevelCursor)]
        return replace(after, levels=np.stack(levels) if levels else None)

    def stands_at(self, state: LoaderState) -> None:
        """The cursors are those of this state: it is what the draw made last led to."""
        self._state = state

    def upcoming(self, state: LoaderState, weights: FloatArray) -> list[PartKey]:
        """Parts that the next two steps will need as far as can be told, described or not.

        Args:
            state: Where the stream stands.
            weights: float64 [sources]: those of weight 0 are not looked into.
        """
        self._take_up(state)
        keys: list[PartKey] = []
        for cursor, weight, draws in zip(self._cursors, weights.tolist(), self._draws, strict=True):
            if weight > 0:
                keys += cursor.upcoming(2 * draws + 1)
        return keys

    def _take_up(self, state: LoaderState) -> None:
        if self._state is state:
            return
        self._state = state
        curriculum, sources = self.spec.curriculum, self.spec.sources
        given = [
            (
                self.spec.name,
                index,
                source,
                self._blocks,
                state.sources[index],
                state.dropped[index],
                state.checked[index] if state.checked else (0, 0),
                state.passes + 1 if self.spec.passes else source.epochs,
            )
            for index, source in enumerate(sources)
        ]
        if curriculum is None:
            self._cursors = [SourceCursor(*one) for one in given]
            return
        levels = initial_levels(state.sources, curriculum.num_levels) if state.levels is None else state.levels
        by_name = np.argsort(np.argsort([source.name for source in sources], kind="stable")).tolist()
        self._cursors = [
            LevelCursor(curriculum, own, rank, *one) for own, rank, one in zip(levels, by_name, given, strict=True)
        ]

    def _pace(self, step: int, weights: FloatArray) -> None:
        """Tell the sources how often each level is to come in this step. Raises: as `draw`."""
        curriculum = self.spec.curriculum
        if curriculum is None:
            return
        cursors = [cursor for cursor in self._cursors if isinstance(cursor, LevelCursor)]
        live = [weight > 0 and not cursor.exhausted for cursor, weight in zip(cursors, weights.tolist(), strict=True)]
        missing = [cursor.look() for cursor, is_live in zip(cursors, live, strict=True) if is_live]
        if any(missing):
            raise NeedBlocks([key for key in missing if key is not None])
        seen = np.stack([cursor.levels["seen"] for cursor in cursors])
        shares = curriculum.shares(seen, np.where(live, weights, 0.0), step)
        for cursor, own in zip(cursors, shares, strict=True):
            cursor.pace(own)

    def _guess(self, pool: _Pool) -> int:
        """Samples that the pool will probably want; it may take less, or more in a next round."""
        per_sample = pool.drawn_tokens / len(pool.sources) if len(pool.sources) else self._per_sample
        return pool.missing(per_sample)

    def _draw_some(self, mixer: DeadlineMixer, pool: _Pool, count: int) -> None:
        """Draw about so many samples into the pool, or up to a source that has to be looked into first.

        What is drawn depends on neither: more is looked at than taken, and taken is what the pool wants.
        """
        by_tokens = self.spec.mixture_unit == "tokens"
        horizon = count * max(self._per_sample, 1.0) if by_tokens else float(count)
        limits = mixer.expected(horizon).tolist()
        if by_tokens:
            ahead = [cursor.peek(math.inf, limit) for cursor, limit in zip(self._cursors, limits, strict=True)]
        else:
            ahead = [cursor.peek(limit) for cursor, limit in zip(self._cursors, limits, strict=True)]
        costs = [found.tokens() for found in ahead] if by_tokens else []
        sources, blocked = mixer.draw(horizon, [found.num_samples for found in ahead], costs)
        pieces, counts = _in_draw_order(sources, ahead)
        taken = pool.add(sources, counts, pieces)
        tokens = None
        if by_tokens:
            lengths = pieces.view(PIECE)["length"]
            tokens = np.add.reduceat(lengths, np.cumsum(counts) - counts, dtype=np.int64)[:taken]
        mixer.book(sources[:taken], tokens)
        if taken < len(sources) or not pool.wants_more or (blocked is not None and not ahead[blocked].is_all):
            blocked = None
        if blocked is not None and (due := ahead[blocked].missing) is not None:
            raise NeedBlocks([due, *(found.missing for found in ahead if found.missing is not None)])
        for source, number in enumerate(np.bincount(sources[:taken], minlength=len(ahead)).tolist()):
            if number:
                self._cursors[source].advance(number)
        if blocked is not None and not self._cursors[blocked].enter():
            mixer.leave(blocked)
            self._gone.add(blocked)

    def _stand(self, mixer: DeadlineMixer, weights: FloatArray) -> IntArray:
        sources = np.empty(len(self._cursors), SOURCE_STATE)
        places = [(cursor.epoch, cursor.window, cursor.part, cursor.offset) for cursor in self._cursors]
        for name, column in zip(("epoch", "window", "part", "offset"), np.array(places).T, strict=True):
            sources[name] = column
        sources["share"], sources["given"], sources["weight"] = mixer.share, mixer.given, weights
        return sources


class _Pool:
    """The pieces that a step chooses from: those carried, then those drawn, in draw order.

    It wants more for packed rows until the pool without its last `pack_ahead` pieces holds the tokens of all rows, for
    others until there is a piece for every row.
    """

    def __init__(self, spec: StreamSpec, carry: IntArray) -> None:
        self._packed = isinstance(spec.rows, PackedRows)
        self._ahead = spec.rows.pack_ahead if isinstance(spec.rows, PackedRows) else 0
        self._need = spec.rows_per_step * (spec.rows.capacity if self._packed else 1)
        self._carried = len(carry)
        self._room = spec.rows.room
        self._totals = np.concatenate([[0], np.cumsum(self._room(carry["length"]))])
        self._pieces = [carry.view(PIECE_BYTES)]
        self.sources: IntArray = np.empty(0, np.int64)
        """int64 [drawn samples]"""

    @property
    def pieces(self) -> IntArray:
        """PIECE [n]: those carried, then those drawn."""
        return np.concatenate(self._pieces).view(PIECE)

    @property
    def drawn_tokens(self) -> int:
        """That all that was drawn takes up."""
        return int(self._totals[-1] - self._totals[self._carried])

    @property
    def wants_more(self) -> bool:
        """Whether another sample is to be drawn."""
        return not self._enough(np.array([len(self._totals) - 1]))[0]

    def missing(self, per_sample: float) -> int:
        """Samples that it probably lacks, at so many tokens each; at least 1."""
        if not self._packed:
            return max(self._need - len(self._totals) + 1, 1)
        lacking = max(self._need - int(self._totals[-1]), 0) / max(per_sample, 1.0)
        return int(lacking * 1.02) + self._ahead + 16

    def add(self, sources: IntArray, counts: IntArray, pieces: IntArray) -> int:
        """Take of these samples as many as it wants.

        Args:
            sources: int64 [n]
            counts: int64 [n]: the pieces of each.
            pieces: PIECE_BYTES [sum of counts]

        Returns:
            How many it took.
        """
        ends = np.concatenate([[0], np.cumsum(counts)])
        before = len(self._totals) - 1
        room = self._room(pieces.view(PIECE)["length"])
        held = self._totals
        self._totals = np.concatenate([held, held[-1] + np.cumsum(room)])
        enough = np.flatnonzero(self._enough(before + ends))
        taken = int(enough[0]) if enough.size else len(sources)
        num_pieces = int(ends[taken])
        self._totals = self._totals[: before + num_pieces + 1]
        self._pieces.append(pieces[:num_pieces])
        self.sources = np.concatenate([self.sources, sources[:taken]])
        return taken

    def _enough(self, sizes: IntArray) -> npt.NDArray[np.bool_]:
        """Whether the pool would be full with its first so many pieces."""
        found = self._totals[np.maximum(sizes - self._ahead, 0)] >= self._need if self._packed else sizes >= self._need
        return np.asarray(found, bool)


def _in_draw_order(sources: IntArray, ahead: list[Ahead]) -> tuple[IntArray, IntArray]:
    """Of the samples drawn: their pieces, PIECE_BYTES [n]; int64 [samples]: how many each has."""
    drawn = np.bincount(sources, minlength=len(ahead)).tolist()
    found = [(number, *ahead[source].first(number)) for source, number in enumerate(drawn) if number]
    counts = np.ones(len(sources), np.int64)
    at = order = grouping(sources)
    if any(given is not None for _, _, given in found):
        grouped = np.concatenate([np.ones(number, np.int64) if given is None else given for number, _, given in found])
        counts[order] = grouped
        starts = (np.cumsum(counts) - counts)[order]
        at = np.arange(int(grouped.sum())) + np.repeat(starts - (np.cumsum(grouped) - grouped), grouped)
    pieces = np.empty(len(at), PIECE_BYTES)
    pieces[at] = np.concatenate([np.empty(0, PIECE_BYTES), *(given for _, given, _ in found)])
    return pieces, counts
