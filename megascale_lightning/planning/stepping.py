"""`StepPlanner`: from the state before a step to its rows and places, and the state after it (law 1)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megascale_lightning.config import PackedRows, StreamSpec
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.cursors import SourceCursor
from megascale_lightning.planning.distribution import distribute
from megascale_lightning.planning.mixture import DeadlineMixer
from megascale_lightning.planning.packing import pack
from megascale_lightning.types import ORDER_VERSION, PIECE, SOURCE_STATE, IntArray, LoaderState, PartKey, StepPlan

__all__ = ["StepPlanner", "initial_state"]

_HASHED = ("source", "epoch", "unit", "row", "start", "stop")


def initial_state(spec: StreamSpec) -> LoaderState:
    """The state before the first step of a stream."""
    names = "\0".join([str(ORDER_VERSION), *(source.name for source in spec.sources)])
    return LoaderState(
        step=0,
        ended=False,
        sources=np.zeros(len(spec.sources), SOURCE_STATE),
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

    @property
    def finite(self) -> bool:
        """The stream ends some day."""
        return all(source.epochs is not None for source in self._spec.sources if source.weight > 0)

    def plan(self, state: LoaderState) -> tuple[StepPlan | None, LoaderState]:
        """Plan the step that follows `state`.

        Returns:
            The plan and the state after it; (None, ended state) where no step follows.

        Raises:
            NeedBlocks: A part has to be described first; nothing has changed.
            EmptySourceError: A whole epoch of a source gave nothing.
        """
        if state.ended:
            return None, state
        self._take_up(state)
        try:
            pool, num_carried, mixer = self._draw(state)
        except BaseException:
            self._state = None  # the cursors have moved
            raise
        rows = self._rows(pool["length"].tolist(), num_carried)
        placed = np.array([piece for row in rows for piece in row], dtype=np.int64)
        rest = np.delete(pool, placed)
        after = self._after(state, mixer, rest)
        num_real = sum(1 for row in rows if row)
        if not num_real or (num_real < self._spec.rows_per_step and self._spec.last_step == "drop"):
            self._state = None
            return None, _ended(after, pool)
        plan = self._place(state.step, pool[placed], rows)
        after = replace(after, step=state.step + 1, certificate=_certify(state.certificate, plan))
        self._state = after
        return plan, after

    def upcoming(self, state: LoaderState) -> list[PartKey]:
        """Parts that the next two steps will need as far as can be told, those that are not described yet."""
        self._take_up(state)
        keys = []
        for cursor, source, draws in zip(self._cursors, self._spec.sources, self._draws, strict=True):
            if source.weight > 0:
                keys += [key for key in cursor.upcoming(2 * draws + 1) if key not in self._blocks]
        return keys

    def _take_up(self, state: LoaderState) -> None:
        if self._state is state:
            return
        self._state = state
        self._cursors = [
            SourceCursor(self._spec.name, index, source, self._blocks, state.sources[index], state.dropped[index])
            for index, source in enumerate(self._spec.sources)
        ]

    def _draw(self, state: LoaderState) -> tuple[IntArray, int, DeadlineMixer]:
        """The pool of the step (carried pieces, then new ones in draw order), how many are carried, the mixer after."""
        cursors = self._cursors
        mixer = DeadlineMixer(
            [source.name for source in self._spec.sources],
            [source.weight for source in self._spec.sources],
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

    def _after(self, state: LoaderState, mixer: DeadlineMixer, carry: IntArray) -> LoaderState:
        sources = np.empty(len(self._cursors), SOURCE_STATE)
        for index, cursor in enumerate(self._cursors):
            position = (cursor.epoch, cursor.window, cursor.part, cursor.offset)
            sources[index] = (*position, mixer.share[index], mixer.given[index])
        dropped = tuple(dict(cursor.dropped) for cursor in self._cursors)
        return replace(state, sources=sources, dropped=dropped, carry=carry)

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


def _ended(after: LoaderState, left: IntArray) -> LoaderState:
    """The end of a stream: what is left over too few rows is dropped and counted."""
    dropped = [Counter(counts) for counts in after.dropped]
    for source, count in zip(*np.unique(left["source"], return_counts=True), strict=True):
        dropped[int(source)]["last_step"] += int(count)
    counts: tuple[Mapping[str, int], ...] = tuple(dict(counter) for counter in dropped)
    return replace(after, ended=True, dropped=counts, carry=np.empty(0, PIECE))
