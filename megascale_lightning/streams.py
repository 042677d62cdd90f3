"""`StreamSpec`: one stream as the roles see it, resolved against a trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.mixtures import WeightSchedule
from megascale_lightning.rows import ContextParallel, Rows
from megascale_lightning.types import (
    BAD_REASONS,
    LEVEL_STATE,
    ORDER_VERSION,
    PIECE,
    SOURCE_STATE,
    Change,
    FloatArray,
    IntArray,
    LoaderState,
    MixtureChange,
)

__all__ = ["SourceSpec", "StreamSpec", "initial_levels", "initial_state", "weights_by_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """What the planner knows of a source beforehand."""

    name: str
    num_windows: int
    """Windows of one epoch."""
    weight: float
    """As declared; what is in force at a step is in the step's state."""
    epochs: int | None
    """None: endless."""
    max_bad_fraction: float | None = None
    """As in `Source`."""
    bad_reasons: tuple[str, ...] = BAD_REASONS
    """What it is a fraction of."""
    quarantine: str = ""
    """The file that lists its bad records, if there is one."""
    together: bool = False
    """Some of its records stay together (`Source.together`)."""
    num_records: int | None = None
    """Records of one epoch, where what a stop rule leaves is to be counted and they are known beforehand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """One stream, resolved against a trainer: all that its order and its places depend on."""

    name: str
    sources: tuple[SourceSpec, ...]
    rows: Rows
    """Without what only the ranks need (`Rows.portable`)."""
    rows_per_step: int
    """Rows of real data in one optimizer step (`global_batch_size`)."""
    num_groups: int
    """Data-parallel groups."""
    num_microbatches: int
    """Microbatches a rank gets in one step; filler makes up for what `rows_per_step` lacks."""
    seed: int
    last_step: Literal["fill", "drop"]
    mixture_unit: Literal["samples", "tokens"]
    strategy: Any
    """A `planning.strategies.Strategy`."""
    prefetch_steps: int
    plan_window: int
    """Steps moved together."""
    passes: bool = False
    """Every source with a weight is given once per pass, and a pass ends with a step of its own; there is no end."""
    mixture_lead_steps: int = 32
    """No step is planned so many steps or more ahead of the lowest consumed one, so that a change can take effect."""
    schedule: WeightSchedule | None = None
    """Weights by the step; None: they are fixed, but for `set_mixture`."""
    stop: str | tuple[str, ...] = "all"
    """What ends the stream, as in `Mixture`."""
    metadata: tuple[str, ...] = ()
    """Names of the numbers of a sample that the strategy wants beside its length."""
    order: Mapping[str, Any] = field(default_factory=dict)
    """What the strategy declares of the order of samples, as checkpoints name it (`Declared.order`)."""
    broadcast: tuple[str, ...] = ()
    """Axes along which, as the strategy declares, only the first place fetches (`ClientPlaceTree.fetchers`)."""
    curriculum: QuantileSchedule | None = None
    """What the strategy declares with `mix`."""
    context_parallel: ContextParallel = "full"
    """As in `LoaderConfig`."""
    num_context_ranks: int = 1
    """Ranks that share a row (cp)."""
    num_stages: int = 1
    """Stages of the pipeline (pp)."""

    def weights_at(self, step: int, state: LoaderState, changes: Mapping[int, FloatArray]) -> FloatArray:
        """float64 [num_sources]: the weights that govern the draws of a step.

        Args:
            step: The step that follows `state`, or one behind it.
            state: Where the stream stands.
            changes: Weights by the first step that they govern; what lies behind `state` is not looked at.
        """
        first = max((at for at in changes if state.step <= at <= step), default=None)
        if first is not None:
            return changes[first]
        if self.schedule is None or state.replaced:
            weights: FloatArray = state.sources["weight"]
            return weights
        return self.schedule.at(step)

    def stops(self, exhausted: Collection[int]) -> bool:
        """Whether nothing more is drawn once these sources have nothing left."""
        if self.stop == "all":
            return False
        ended = {self.sources[index].name for index in exhausted}
        return bool(ended) if self.stop == "first" else ended.issuperset(self.stop)

    def left_over(self, state: LoaderState) -> dict[int, int]:
        """Source -> records of its epochs that a stop rule leaves unread, where they are known."""
        found = {}
        for index, source in enumerate(self.sources):
            if source.num_records is None or source.epochs is None or self.stop == "all":
                continue
            passed = state.checked[index][0] if state.checked else 0
            whole = max(source.epochs - int(state.sources["epoch"][index]), 0)
            # A source that began anew counts from there: what is left lies in the epochs that are.
            left = min(max(source.epochs * source.num_records - passed, 0), whole * source.num_records)
            left += int(state.waiting[index])
            if left:
                found[index] = left
        return found


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


def weights_by_step(changes: Iterable[Change]) -> dict[int, FloatArray]:
    """Of changes those of the mixture: the first step that they govern -> weights, float64 [num_sources]."""
    return {change.step: change.weights for change in changes if isinstance(change, MixtureChange)}


def initial_levels(sources: IntArray, num_levels: int) -> IntArray:
    """LEVEL_STATE [sources, num_levels]: nothing was opened yet of sources that stand there, SOURCE_STATE [sources]."""
    levels = np.zeros((len(sources), num_levels), LEVEL_STATE)
    for name in ("epoch", "window", "part"):
        levels[name] = sources[name][:, None]
    return levels
