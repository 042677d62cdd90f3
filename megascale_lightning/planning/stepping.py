"""`StepPlanner`: from the state before a step to its rows and places, and the state after it (law 1)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megascale_lightning.errors import EmptySourceError
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.cursors import SourceCursor
from megascale_lightning.planning.distribution import distribute
from megascale_lightning.planning.mixture import DeadlineMixer
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
        weights = changes.get(state.step, state.sources["weight"])
        to_come = tuple(MixtureChange(step, changes[step]) for step in sorted(changes) if step > state.step)
        try:
            pool, num_carried, mixer = self._draw(state, weights.tolist())
        except BaseException:
            self._state = None  # the cursors have moved
            raise
        rows = self._rows(pool["length"].tolist(), num_carried)
        placed = np.array([piece for row in rows for piece in row], dtype=np.int64)
        rest = np.delete(pool, placed)
        after = replace(self._after(state, mixer, weights, rest), changes=to_come)
        num_real = sum(1 for row in rows if row)
        if not num_real or (num_real < self._spec.rows_per_step and self._spec.last_step == "drop"):
            self._state = None
            return None, self._over(state, after, pool)
        plan = self._place(state.step, pool[placed], rows)
        after = replace(after, step=state.step + 1, certificate=_certify(state.certificate, plan))
        self._state = after
        return plan, after

    def upcoming(self, state: LoaderState) -> list[PartKey]:
        """Parts that the next two steps will need as far as can be told, those that are not described yet."""
        self._take_up(state)
        keys = []
        for cursor, weight, draws in zip(self._cursors, state.sources["weight"].tolist(), self._draws, strict=True):
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
            head_cost=lambda index: cursors[index].head(),
        )
        lengths: list[int] = state.carry["length"].tolist()
        num_carried = len(lengths)
        sources: list[int] = []
        wanted = _Wanted(self._spec)
        draws = mixer.draws()
        while wanted.more(lengths):
            chosen = next(draws, None)
            if chosen is None:
                break
            taken = cursors[chosen].take(lengths)
            if taken == 1:
                sources.append(chosen)
            elif taken:
                sources += [chosen] * taken
            else:
                mixer.retire(chosen)
                draws = mixer.draws()
        mixer.settle()
        drawn_from = np.array(sources, dtype=np.int64)
        self._draws = np.bincount(drawn_from, minlength=len(cursors)).tolist()
        pool = np.empty(len(lengths), PIECE)
        pool[:num_carried] = state.carry
        pool[num_carried:][np.argsort(drawn_from, kind="stable")] = self._collect(len(sources))
        return pool, num_carried, mixer

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


class _Wanted:
    """Whether the pool of a step needs further draws.

    Packed rows: until the pool without its last `pack_ahead` pieces holds the tokens of all rows. Padded rows: until
    there is a piece for every row.
    """

    __slots__ = ("_ahead", "_need", "_packed", "_seen", "_settled")

    def __init__(self, spec: StreamSpec) -> None:
        self._packed = isinstance(spec.rows, PackedRows)
        self._ahead = spec.rows.pack_ahead if isinstance(spec.rows, PackedRows) else 0
        self._need = spec.rows_per_step * (spec.rows.capacity if self._packed else 1)
        self._seen = 0
        self._settled = 0

    def more(self, lengths: list[int]) -> bool:
        """Lengths of the pool so far, in order; they only ever grow at the end."""
        if not self._packed:
            return len(lengths) < self._need
        stop = len(lengths) - self._ahead
        if stop > self._seen:
            self._settled += sum(lengths[self._seen : stop])
            self._seen = stop
        return self._settled < self._need


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
