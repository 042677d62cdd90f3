"""`StepPlanner`: from the state before a step to its rows and places, and the state after it (law 1)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import EmptySourceError
from megascale_lightning.planning.blocks import BlockStore, NeedBlocks
from megascale_lightning.planning.cursors import Ahead, SourceCursor
from megascale_lightning.planning.distribution import distribute
from megascale_lightning.planning.mixture import DeadlineMixer, grouping
from megascale_lightning.planning.packing import pack
from megascale_lightning.rows import PackedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import (
    ORDER_VERSION,
    PIECE,
    SOURCE_STATE,
    FloatArray,
    IntArray,
    LoaderState,
    MixtureChange,
    PartKey,
    StepPlan,
)

__all__ = ["StepPlanner", "initial_state"]

_HASHED = ("source", "epoch", "unit", "row", "start", "stop")


def initial_state(spec: StreamSpec) -> LoaderState:
    """The state before the first step of a stream."""
    names = "\0".join([str(ORDER_VERSION), *(source.name for source in spec.sources)])
    sources = np.zeros(len(spec.sources), SOURCE_STATE)
    sources["weight"] = [source.weight for source in spec.sources]
    return LoaderState(
        step=0,
        ended=False,
        sources=sources,
        dropped=tuple({} for _ in spec.sources),
        carry=np.empty(0, PIECE),
        certificate=hashlib.blake2b(names.encode(), digest_size=32).digest(),
    )


class StepPlanner:
    """Plans the steps of one stream, one after another, from described parts.

    It holds the live cursors of the state it planned last; any other state is taken up from its saved positions, with
    the same result.
    """

    def __init__(self, spec: StreamSpec, blocks: BlockStore) -> None:
        self._spec = spec
        self._blocks = blocks
        self._state: LoaderState | None = None
        self._cursors: list[SourceCursor] = []
        self._draws = [0] * len(spec.sources)
        self._gone: set[int] = set()
        self._per_sample = 512.0  # tokens: a first guess of how many samples a step takes

    def plan(self, state: LoaderState, changes: Mapping[int, FloatArray]) -> tuple[StepPlan | None, LoaderState]:
        """Plan the step that follows `state`.

        Args:
            state: Where the stream stands.
            changes: Weights by the first step that they govern; what lies behind `state` is not looked at.

        Returns:
            The plan and the state after it. Where no step follows: (None, ended state). In passes, where no step of
            this pass follows: (None, the same place at the beginning of the next pass).

        Raises:
            NeedBlocks: A part has to be described first; nothing has changed.
            EmptySourceError: A whole epoch of a source, or a whole pass, gave nothing.
            DataError: More of a source's records are bad than its limit allows.
        """
        if state.ended:
            return None, state
        self._take_up(state)
        weights = self._spec.weights_at(state.step, state, changes)
        to_come = tuple(MixtureChange(step, changes[step]) for step in sorted(changes) if step > state.step)
        try:
            pool, num_carried, mixer = self._draw(state, weights.tolist())
        except BaseException:
            self._state = None  # the cursors have moved
            raise
        rows = self._rows(pool["length"].tolist(), num_carried)
        placed = np.fromiter(chain.from_iterable(rows), np.int64)
        rest = np.delete(pool, placed)
        replaced = state.replaced or state.step in changes
        after = replace(self._after(state, mixer, weights, rest), changes=to_come, replaced=replaced)
        num_real = sum(1 for row in rows if row)
        if not num_real or (num_real < self._spec.rows_per_step and self._spec.last_step == "drop"):
            self._state = None
            return None, self._over(state, after, pool)
        plan = self._place(state.step, pool[placed], rows)
        after = replace(after, step=state.step + 1, certificate=_certify(state.certificate, plan))
        self._state = after
        return plan, after

    def upcoming(self, state: LoaderState) -> list[PartKey]:
        """Parts that the next two steps will need as far as can be told, those that are not described yet.

        A source that joins in one of the steps to come is looked into before.
        """
        self._take_up(state)
        changes = {change.step: change.weights for change in state.changes}
        reach = 2 + self._spec.plan_window if changes or self._spec.schedule is not None else 1
        ahead = [self._spec.weights_at(state.step + offset, state, changes) for offset in range(reach)]
        keys = []
        for cursor, weight, draws in zip(self._cursors, np.max(ahead, axis=0).tolist(), self._draws, strict=True):
            if weight > 0:
                keys += [key for key in cursor.upcoming(2 * draws + 1) if key not in self._blocks]
        return keys

    def _take_up(self, state: LoaderState) -> None:
        if self._state is state:
            return
        self._state = state
        self._cursors = [
            SourceCursor(
                self._spec.name,
                index,
                source,
                self._blocks,
                state.sources[index],
                state.dropped[index],
                state.checked[index] if state.checked else (0, 0),
                state.passes + 1 if self._spec.passes else source.epochs,
            )
            for index, source in enumerate(self._spec.sources)
        ]

    def _draw(self, state: LoaderState, weights: list[float]) -> tuple[IntArray, int, DeadlineMixer]:
        """The pool of the step (carried pieces, then new ones in draw order), how many are carried, the mixer after."""
        cursors = self._cursors
        mixer = DeadlineMixer(
            [source.name for source in self._spec.sources],
            weights,
            share=state.sources["share"].tolist(),
            given=state.sources["given"].tolist(),
            live=[not cursor.exhausted for cursor in cursors],
            unit=self._spec.mixture_unit,
        )
        pool = _Pool(self._spec, state.carry)
        self._gone = {index for index, cursor in enumerate(cursors) if cursor.exhausted}
        while pool.wants_more and mixer.live and not self._spec.stops(self._gone):
            self._draw_some(mixer, pool, self._guess(pool))
        mixer.settle()
        self._draws = np.bincount(pool.piece_sources, minlength=len(cursors)).tolist()
        self._per_sample = pool.drawn_tokens / max(len(pool.sources), 1)
        num_carried = len(state.carry)
        pieces = np.empty(num_carried + len(pool.piece_sources), PIECE)
        pieces[:num_carried] = state.carry
        pieces[num_carried:][grouping(pool.piece_sources)] = self._collect(len(pool.piece_sources))
        return pieces, num_carried, mixer

    def _guess(self, pool: _Pool) -> int:
        """Samples that the pool will probably want; it may take less, or more in a next round."""
        per_sample = pool.drawn_tokens / len(pool.sources) if len(pool.sources) else self._per_sample
        return pool.missing(per_sample)

    def _draw_some(self, mixer: DeadlineMixer, pool: _Pool, count: int) -> None:
        """Draw about so many samples into the pool, or up to a source that has to be looked into first.

        What is drawn depends on neither: more is looked at than taken, and taken is what the pool wants.
        """
        by_tokens = self._spec.mixture_unit == "tokens"
        horizon = count * max(self._per_sample, 1.0) if by_tokens else float(count)
        limits = mixer.expected(horizon).tolist()
        if by_tokens:
            ahead = [cursor.peek(math.inf, limit) for cursor, limit in zip(self._cursors, limits, strict=True)]
        else:
            ahead = [cursor.peek(limit) for cursor, limit in zip(self._cursors, limits, strict=True)]
        costs = [found.tokens() for found in ahead] if by_tokens else []
        sources, blocked = mixer.draw(horizon, [found.num_samples for found in ahead], costs)
        counts, lengths = _in_draw_order(sources, ahead)
        taken = pool.add(sources, counts, lengths)
        tokens = None
        if by_tokens:
            tokens = np.add.reduceat(lengths, np.cumsum(counts) - counts)[:taken] if taken else counts[:0]
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

    def _collect(self, count: int) -> IntArray:
        """The pieces taken by all cursors, source after source: PIECE [count]."""
        pieces = np.empty(count, PIECE)
        at = 0
        for cursor in self._cursors:
            for taken in cursor.collect():
                pieces[at : at + len(taken)] = taken
                at += len(taken)
        return pieces

    def _rows(self, lengths: list[int], num_carried: int) -> list[list[int]]:
        num_rows = self._spec.rows_per_step
        if isinstance(self._spec.rows, PackedRows):
            capacity = self._spec.rows.capacity
            return pack(lengths[:num_carried], lengths[num_carried:], num_rows=num_rows, capacity=capacity)
        return [[piece] if piece < len(lengths) else [] for piece in range(num_rows)]

    def _after(self, state: LoaderState, mixer: DeadlineMixer, weights: FloatArray, carry: IntArray) -> LoaderState:
        sources = np.empty(len(self._cursors), SOURCE_STATE)
        for index, cursor in enumerate(self._cursors):
            position = (cursor.epoch, cursor.window, cursor.part, cursor.offset)
            sources[index] = (*position, mixer.share[index], mixer.given[index], weights[index])
        dropped = tuple(dict(cursor.dropped) for cursor in self._cursors)
        checked = tuple(cursor.checked for cursor in self._cursors)
        return replace(state, sources=sources, dropped=dropped, carry=carry, checked=checked)

    def _over(self, before: LoaderState, after: LoaderState, left: IntArray) -> LoaderState:
        """The end of a stream, or of a pass: what is left over too few rows is dropped and counted."""
        dropped = [Counter(counts) for counts in after.dropped]
        for source, count in zip(*np.unique(left["source"], return_counts=True), strict=True):
            dropped[int(source)]["last_step"] += int(count)
        for index, count in self._spec.left_over(after).items():
            dropped[index]["stopped"] += count
        counts: tuple[Mapping[str, int], ...] = tuple(dict(counter) for counter in dropped)
        done = replace(after, dropped=counts, carry=np.empty(0, PIECE))
        if not self._spec.passes:
            return replace(done, ended=True)
        if len(left) and _begins_pass(before):
            raise EmptySourceError(
                f"stream {self._spec.name!r}: a pass over all sources gives fewer than the {self._spec.rows_per_step} "
                'rows of one step, and last_step="drop" leaves incomplete steps out: nothing is left to train on. '
                'Lower global_batch_size, or set last_step="fill"'
            )
        return replace(done, passes=before.passes + 1)

    def _place(self, step: int, pieces: IntArray, rows: list[list[int]]) -> StepPlan:
        row_offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=row_offsets[1:])
        places = distribute(self._spec, pieces["length"], row_offsets)
        return StepPlan(
            step=step,
            pieces=pieces,
            row_offsets=row_offsets,
            placement=places.placement,
            step_loss_tokens=int(pieces["loss_tokens"].sum(dtype=np.int64)),
            balance=places.balance,
            group_costs=places.group_costs,
            group_costs_before=places.group_costs_before,
        )


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
        self._totals = np.concatenate([[0], np.cumsum(carry["length"], dtype=np.int64)])
        self.sources: IntArray = np.empty(0, np.int64)
        """int64 [drawn samples]"""
        self.piece_sources: IntArray = np.empty(0, np.int64)
        """int64 [drawn pieces]"""

    @property
    def drawn_tokens(self) -> int:
        """Of all that was drawn."""
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

    def add(self, sources: IntArray, counts: IntArray, lengths: IntArray) -> int:
        """Take of these samples as many as it wants.

        Args:
            sources: int64 [n]
            counts: int64 [n]: the pieces of each.
            lengths: int64 [sum of counts]: the tokens of each piece.

        Returns:
            How many it took.
        """
        ends = np.concatenate([[0], np.cumsum(counts)])
        before = len(self._totals) - 1
        totals = np.concatenate([self._totals, self._totals[-1] + np.cumsum(lengths)])
        held, self._totals = self._totals, totals
        enough = np.flatnonzero(self._enough(before + ends))
        taken = int(enough[0]) if enough.size else len(sources)
        self._totals = totals[: before + int(ends[taken]) + 1] if taken else held
        self.sources = np.concatenate([self.sources, sources[:taken]])
        self.piece_sources = np.concatenate([self.piece_sources, np.repeat(sources[:taken], counts[:taken])])
        return taken

    def _enough(self, sizes: IntArray) -> npt.NDArray[np.bool_]:
        """Whether the pool would be full with its first so many pieces."""
        found = self._totals[np.maximum(sizes - self._ahead, 0)] >= self._need if self._packed else sizes >= self._need
        return np.asarray(found, bool)


def _in_draw_order(sources: IntArray, ahead: list[Ahead]) -> tuple[IntArray, IntArray]:
    """Of the samples drawn: int64 [n], the pieces of each; int64 [pieces], the tokens of each piece."""
    drawn = np.bincount(sources, minlength=len(ahead)).tolist()
    found = [(number, *ahead[source].pieces(number)) for source, number in enumerate(drawn) if number]
    counts = np.ones(len(sources), np.int64)
    if not found:
        return counts, counts
    at = order = grouping(sources)
    if any(given is not None for _, given, _ in found):
        grouped = np.concatenate([np.ones(number, np.int64) if given is None else given for number, given, _ in found])
        counts[order] = grouped
        starts = (np.cumsum(counts) - counts)[order]
        at = np.arange(int(grouped.sum())) + np.repeat(starts - (np.cumsum(grouped) - grouped), grouped)
    lengths = np.empty(len(at), np.int64)
    lengths[at] = np.concatenate([given for _, _, given in found])
    return counts, lengths


def _certify(before: bytes, plan: StepPlan) -> bytes:
    """The running hash over (step, row, pieces)."""
    row_of = np.repeat(np.arange(len(plan.row_offsets) - 1, dtype="<i4"), np.diff(plan.row_offsets))
    columns = np.stack([row_of, *(plan.pieces[name] for name in _HASHED)]).astype("<i4")
    content = before + plan.step.to_bytes(8, "little") + columns.tobytes()
    return hashlib.blake2b(content, digest_size=32).digest()


def _begins_pass(state: LoaderState) -> bool:
    """Whether nothing of this pass was given yet."""
    due = state.sources[(state.sources["weight"] > 0) & (state.sources["epoch"] <= state.passes)]
    return not len(state.carry) and not any(due[name].any() for name in ("window", "part", "offset"))
