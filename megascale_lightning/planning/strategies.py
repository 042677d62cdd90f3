"""How rows are spread over data-parallel groups and microbatches: the choices a user has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from megascale_lightning.planning.balancing import assign_greedily
from megascale_lightning.planning.costs import AttentionCost, CostFunction
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["Balanced", "RoundRobin", "Strategy"]


@runtime_checkable
class Strategy(Protocol):
    """Places units of equal count into bins; it never sees more than their costs."""

    @property
    def cost(self) -> CostFunction:
        """What a document costs, by its length."""
        ...

    def assign(self, costs: FloatArray, *, num_bins: int, per_bin: int) -> IntArray:
        """Costs float64 [num_bins x per_bin] -> units of each bin, int64 [num_bins, per_bin]."""
        ...


@dataclass(frozen=True)
class Balanced:
    """Equal cost for every group, and inside it for every microbatch (the default)."""

    cost: CostFunction = field(default_factory=AttentionCost)
    """What a document costs, by its length."""

    def assign(self, costs: FloatArray, *, num_bins: int, per_bin: int) -> IntArray:
        """Costs float64 [num_bins x per_bin] -> units of each bin, int64 [num_bins, per_bin]."""
        return assign_greedily(costs, num_bins=num_bins, per_bin=per_bin)


@dataclass(frozen=True)
class RoundRobin:
    """Rows are dealt in turn, as they come; costs are only reported."""

    cost: CostFunction = field(default_factory=AttentionCost)
    """What a document costs, by its length."""

    def assign(self, costs: FloatArray, *, num_bins: int, per_bin: int) -> IntArray:
        """Costs float64 [num_bins x per_bin] -> units of each bin, int64 [num_bins, per_bin]."""
        return np.arange(num_bins * per_bin, dtype=np.int64).reshape(per_bin, num_bins).T
