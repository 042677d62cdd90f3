"""`StepPlanner`: from the state before a step to its rows and places, and the state after it (law 1)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from megascale_lightning.errors import ConfigError, EmptySourceError
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.buffer import Drawn, SampleBuffer
from megascale_lightning.planning.calibration import CalibratedCost
from megascale_lightning.planning.costs import fields_of
from megascale_lightning.planning.declared import Declared
from megascale_lightning.planning.dgraph import DGraph, declare
from megascale_lightning.streams import StreamSpec, weights_by_step
from megascale_lightning.types import (
    PIECE,
    Change,
    CostChange,
    FloatArray,
    IntArray,
    LoaderState,
    PartKey,
    StepPlan,
    change_key,
)

__all__ = ["StepPlanner"]

_HASHED = ("source", "epoch", "unit", "row", "start", "stop")


class StepPlanner:
    """Plans the steps of one stream, one after another, from described parts, as its strategy declares them."""

    def __init__(self, spec: StreamSpec, blocks: BlockStore) -> None:
        self._spec = spec
        self._buffer = SampleBuffer(spec, blocks)

    def plan(self, state: LoaderState, changes: Collection[Change]) -> tuple[StepPlan | None, LoaderState]:
        """Plan the step that follows `state`.

        Args:
            state: Where the stream stands.
            changes: Of the mixture and of costs; what lies before `state` is in it, and not looked at.

        Returns:
            The plan and the state after it. Where no step follows: (None, ended state). In passes, where no step of
            this pass follows: (None, the same place at the beginning of the next pass).

        Raises:
            NeedBlocks: A part has to be described first; nothing has changed.
            EmptySourceError: A whole epoch of a source, a whole pass, or the whole stream gave nothing.
            DataError: More of a source's records are bad than its limit allows.
            ConfigError: The strategy leaves out what a plan needs, its cost gives no costs, or it changes who fetches.
        """
        if state.ended:
            return None, state
        weights = weights_by_step(changes)
        step = _Step(self._buffer, state, self._spec.weights_at(state.step, state, weights))
        graph = declare(self._spec.strategy, step)
        costs = _costs_at(state, changes)
        if costs:
            graph = DGraph(step, replace(graph.declared, costs=tuple(CalibratedCost.of(given) for given in costs)))
        if graph.declared.broadcast != self._spec.broadcast:
            raise ConfigError(
                f"strategy: step {state.step} declares broadcast_at{graph.declared.broadcast}, the run began with "
                f"broadcast_at{self._spec.broadcast}: which ranks fetch is settled once; declare the same at every step"
            )
        drawn = graph.drawn
        to_come = tuple(sorted((change for change in changes if change.step > state.step), key=change_key))
        after = self._buffer.state_after(state, drawn, graph.carry)
        after = replace(after, changes=to_come, replaced=state.replaced or state.step in weights, costs=costs)
        num_real = sum(1 for row in graph.rows if row)
        if not num_real or (num_real < self._spec.rows_per_step and self._spec.last_step == "drop"):
            return None, self._over(state, after, drawn.pieces)
        plan = graph.plan()
        after = replace(after, step=state.step + 1, certificate=_certify(state.certificate, plan))
        self._buffer.stands_at(after)
        return plan, after

    def upcoming(self, state: LoaderState) -> list[PartKey]:
        """Parts that the next two steps will need as far as can be told, described or not.

        A source that joins in one of the steps to come is looked into before.
        """
        changes = weights_by_step(state.changes)
        reach = 2 + self._spec.plan_window if changes or self._spec.schedule is not None else 1
        ahead = [self._spec.weights_at(state.step + offset, state, changes) for offset in range(reach)]
        return self._buffer.upcoming(state, np.max(ahead, axis=0))

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
            if not before.step:
                raise EmptySourceError(
                    f"stream {self._spec.name!r} ends before its first step: its sources give fewer than the "
                    f'{self._spec.rows_per_step} rows of one, and last_step="{self._spec.last_step}" leaves incomplete '
                    'steps out; lower global_batch_size, or set last_step="fill"'
                )
            return replace(done, ended=True)
        if len(left) and _begins_pass(before):
            raise EmptySourceError(
                f"stream {self._spec.name!r}: a pass over all sources gives fewer than the {self._spec.rows_per_step} "
                'rows of one step, and last_step="drop" leaves incomplete steps out: nothing is left to train on. '
                'Lower global_batch_size, or set last_step="fill"'
            )
        return replace(done, passes=before.passes + 1)


class _Step:
    """A step of a run, for its graph."""

    in_run = True

    def __init__(self, buffer: SampleBuffer, state: LoaderState, weights: FloatArray) -> None:
        self.step = state.step
        self._buffer, self._state, self._weights = buffer, state, weights

    def draw(self, declared: Declared) -> tuple[StreamSpec, Drawn]:
        """See `StepSource`."""
        spec = self._buffer.spec
        if declared.order != spec.order:
            raise ConfigError(
                f"strategy: at step {self.step} it declares {declared.order or 'nothing'} of the order of samples, and "
                f"{spec.order or 'nothing'} before: give mix() and pack() the same at every step; what changes by the "
                "step belongs in a schedule"
            )
        missing = sorted({name for cost in declared.costs for name in fields_of(cost)} - set(spec.metadata))
        if missing:
            raise ConfigError(
                f"strategy: at step {self.step} its costs are by {missing} of the samples, and the run began with "
                f"costs by {list(spec.metadata) or 'lengths alone'}, which the loaders describe: let the first step "
                "declare costs by all of them"
            )
        return spec, self._buffer.draw(self._state, self._weights)


def _certify(before: bytes, plan: StepPlan) -> bytes:
    """The running hash over (step, row, pieces)."""
    row_of = np.repeat(np.arange(len(plan.row_offsets) - 1, dtype="<i4"), np.diff(plan.row_offsets))
    columns = np.stack([row_of, *(plan.pieces[name] for name in _HASHED)]).astype("<i4")
    content = before + plan.step.to_bytes(8, "little") + columns.tobytes()
    return hashlib.blake2b(content, digest_size=32).digest()


def _costs_at(state: LoaderState, changes: Collection[Change]) -> tuple[Mapping[str, float], ...]:
    """What is in the place of the declared costs at the step that follows `state`."""
    found = [change.costs for change in changes if isinstance(change, CostChange) and change.step == state.step]
    return found[0] if found else state.costs


def _begins_pass(state: LoaderState) -> bool:
    """Whether nothing of this pass was given yet."""
    drawn = state.sources[state.sources["weight"] > 0]
    due = drawn[drawn["epoch"] <= state.passes]
    begun = len(due) < len(drawn) or any(due[name].any() for name in ("window", "part", "offset"))
    return not len(state.carry) and not begun and not state.waiting.any()
