"""How a step is planned: the choices a user has, each a declaration of a `DGraph`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from megascale_lightning.planning.costs import AttentionCost, CostFunction
from megascale_lightning.planning.dgraph import DGraph
from megascale_lightning.planning.twolevel import Sync

__all__ = ["Balanced", "RoundRobin", "Strategy"]


class Strategy(ABC):
    """Declares a step. Any function of a graph that gives a graph does, too; this is the base of the ready ones."""

    @abstractmethod
    def __call__(self, graph: DGraph) -> DGraph:
        """The graph of a step that is to be planned -> what is declared of it."""


@dataclass(frozen=True)
class Balanced(Strategy):
    """Equal cost for every group, and inside it for every microbatch (the default)."""

    cost: CostFunction = field(default_factory=AttentionCost)
    """What a document costs, by its length."""
    sync: Sync = "step"
    """What is made even: the sum of a "step", or every "microbatch" among the groups."""

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        return graph.mix().pack().distribute("dp").cost(self.cost).balance("greedy", sync=self.sync)


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Rows are dealt in turn, as they come; costs are only reported."""

    cost: CostFunction = field(default_factory=AttentionCost)
    """What a document costs, by its length."""

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        return graph.mix().pack().distribute("dp").cost(self.cost)
