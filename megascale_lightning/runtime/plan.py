"""Which roles a run has and how each is made: the picklable order that a runtime carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megascale_lightning.errors import ConfigError
from megascale_lightning.types import Change

__all__ = ["RoleRecipe", "RuntimePlan", "ToldPlanner"]


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


class ToldPlanner:
    """The recipe of the planner, and what it was told since: a replacement knows it from its first moment on."""

    def __init__(self, recipe: RoleRecipe) -> None:
        self._recipe = recipe
        self._changes: dict[str, tuple[str, tuple[Change, ...]]] = {}

    def tell(self, stream: str, generation: str, changes: tuple[Change, ...]) -> None:
        """Keep the changes to come of a stream's newest generation."""
        self._changes = {**self._changes, stream: (generation, changes)}

    def recipe(self) -> RoleRecipe:
        """How the planner is made now."""
        if not self._changes:
            return self._recipe
        return replace(self._recipe, kwargs={**self._recipe.kwargs, "changes": self._changes})


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
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that the loaders' processes are given; secrets."""

    def __post_init__(self) -> None:
        names = [recipe.name for recipe in self.recipes()]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(f"role names must differ, {doubled} are there twice")

    def recipes(self) -> tuple[RoleRecipe, ...]:
        """Every recipe: loaders first, since the others call them."""
        return (*self.loaders, self.planner, self.constructor)
