"""`Declared`: what a graph was told of a step, and which primitive needs which before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import ConfigError
from megascale_lightning.places.axes import Axis
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.costs import CostFunction, TokenCount, fields_of
from megascale_lightning.planning.signatures import signature
from megascale_lightning.planning.twolevel import Method, Sync
from megascale_lightning.rows import Rows

__all__ = ["PRIMITIVES", "Declared", "calls", "require"]

PRIMITIVES: Final = ("init", "mix", "pack", "distribute", "cost", "balance", "broadcast_at")
_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "mix": ("init",),
    "pack": ("mix",),
    "distribute": ("pack",),
    "balance": ("distribute", "cost"),
    "broadcast_at": ("distribute",),
    "plan": ("init", "mix", "pack", "distribute"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What was declared of a step, primitive by primitive."""

    done: tuple[str, ...] = ()
    """Names of the primitives, in the order of the calls."""
    tree: ClientPlaceTree | None = None
    """Outside of a run."""
    global_batch_size: int | None = None
    """Outside of a run."""
    weights: Mapping[str, float] | None = None
    """Outside of a run."""
    curriculum: QuantileSchedule | None = None
    rows: Rows | None = None
    """Outside of a run."""
    even: CostFunction | None = None
    """What packed rows are to cost alike; None: they are filled as well as can be, and cost what comes of it."""
    group_size: int | None = None
    """Neighbouring data-parallel groups that share a bucket; None: all of them share one."""
    costs: tuple[CostFunction, ...] = (TokenCount(),)
    method: Method | None = None
    sync: Sync | None = None
    """None: rows are dealt in turn."""
    broadcast: tuple[Axis, ...] = ()
    """Axes along which only the first place fetches, in the tree's order."""
    selected: str | None = None
    """The number of a sample that what is looked at is about; None: all samples."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The numbers of a sample that are wanted beside its length: by the curriculum, by costs, or to look at."""
        curriculum = () if self.curriculum is None or self.curriculum.field == "length" else (self.curriculum.field,)
        costs = self.costs if self.even is None else (*self.costs, self.even)
        selected = () if self.selected is None else (self.selected,)
        return tuple(dict.fromkeys([*curriculum, *(name for cost in costs for name in fields_of(cost)), *selected]))

    @property
    def order(self) -> dict[str, Any]:
        """What `mix` and `pack` were told that the order of samples depends on: name -> JSON value; empty for nothing.

        Raises:
            ConfigError: One cannot be recognised at a resume.
        """
        mixed = {} if self.curriculum is None else {"mix.curriculum": self.curriculum.table}
        return mixed if self.even is None else {**mixed, "pack.even": signature("pack(even=...)", self.even)}

    def check_buckets(self, num_groups: int) -> None:
        """Refuse buckets that so many data-parallel groups do not make.

        Raises:
            ConfigError: A bucket would not be full.
        """
        size = self.group_size
        if size is not None and num_groups % size:
            raise ConfigError(
                f'distribute("dp", group_size={size}): {num_groups} data-parallel groups do not make whole buckets of '
                f"{size}: take a divisor of {num_groups}, or leave it out"
            )

    @property
    def cost_names(self) -> str:
        """For people."""
        return ", ".join(getattr(cost, "__name__", type(cost).__name__) for cost in self.costs)


def require(name: str, done: tuple[str, ...]) -> None:
    """Refuse a primitive, or "plan", where one that it needs is not among those done.

    Raises:
        ConfigError: One is missing.
    """
    missing = [needed for needed in _NEEDS.get(name, ()) if needed not in done]
    if missing:
        raise ConfigError(
            f"{name}() needs {' and '.join(f'{one}()' for one in missing)} before it; declared is {calls(done)}"
        )


def calls(done: tuple[str, ...]) -> str:
    """The primitives as a chain of calls, for people."""
    return "graph" + "".join(f".{name}()" for name in done)
