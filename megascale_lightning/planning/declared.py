"""`Declared`: what a graph was told of a step, and which primitive needs which before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import ConfigError
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.costs import CostFunction, TokenCount, fields_of
from megascale_lightning.planning.twolevel import Sync
from megascale_lightning.rows import Rows

__all__ = ["PRIMITIVES", "Declared", "calls", "require"]

PRIMITIVES: Final = ("init", "mix", "pack", "distribute", "cost", "balance")
_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "mix": ("init",),
    "pack": ("mix",),
    "distribute": ("pack",),
    "balance": ("distribute", "cost"),
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
    costs: tuple[CostFunction, ...] = (TokenCount(),)
    method: str | None = None
    sync: Sync | None = None
    """None: rows are dealt in turn."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The numbers of a sample that the costs and the curriculum want beside its length."""
        curriculum = () if self.curriculum is None or self.curriculum.field == "length" else (self.curriculum.field,)
        return tuple(dict.fromkeys([*curriculum, *(name for cost in self.costs for name in fields_of(cost))]))

    @property
    def order(self) -> dict[str, Any]:
        """What the order of samples depends on, as plain values by name; empty where nothing special is declared."""
        return {} if self.curriculum is None else {"curriculum": self.curriculum.table}

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
