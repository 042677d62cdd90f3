"""Which roles a run has and how each is made: the picklable order that a runtime carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_lightning.errors import ConfigError

__all__ = ["RoleRecipe", "RuntimePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRecipe:
    """How a role is made, again and again: it holds no state of its own.

    What `factory` and `kwargs` import is imported by the role's process: it must be free of torch.
    """

    name: str
    """"planner", "constructor/0", "loader/0", ...: the target of a `Call`."""
    factory: Callable[..., Any]
    """Importable by name."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Picklable; never changed by the role."""

    def build(self) -> Any:
        """Make a fresh role."""
        return self.factory(**self.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePlan:
    """All roles of one run.

    Raises:
        ConfigError: Two roles have the same name.
    """

    run: str
    """Name of the run, unique on the cluster."""
    planner: RoleRecipe
    constructor: RoleRecipe
    loaders: tuple[RoleRecipe, ...]

    def __post_init__(self) -> None:
        names = [recipe.name for recipe in self.recipes()]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(f"role names must differ, {doubled} are there twice")

    def recipes(self) -> tuple[RoleRecipe, ...]:
        """Every recipe: loaders first, since the others call them."""
        return (*self.loaders, self.planner, self.constructor)
