"""`StreamSpec`: one stream as the roles see it, resolved against a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megascale_lightning.rows import Rows

__all__ = ["SourceSpec", "StreamSpec"]


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
    quarantine: str = ""
    """The file that lists its bad records, if there is one."""


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
