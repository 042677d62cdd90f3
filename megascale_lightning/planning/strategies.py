"""How a step is planned: the choices a user has, each a declaration of a `DGraph`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import ConfigError
from megascale_lightning.planning.buffer import Drawn
from megascale_lightning.planning.costs import AttentionCost, CostFunction
from megascale_lightning.planning.declared import Declared, require
from megascale_lightning.planning.dgraph import DGraph, declare
from megascale_lightning.planning.twolevel import Method, Sync
from megascale_lightning.streams import StreamSpec

__all__ = ["Balanced", "Curriculum", "HybridVLM", "LongShort", "RoundRobin", "Strategy", "declared_by"]


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
    method: Method = "greedy"
    """"greedy" or "karmarkar_karp", as of `DGraph.balance`."""

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        return graph.mix().pack().distribute("dp").cost(self.cost).balance(self.method, sync=self.sync)


@dataclass(frozen=True)
class LongShort(Strategy):
    """For many short documents and few very long ones: rows that hold one cost no more than others, nor do groups.

    A step that is few rows for each group leaves `Balanced` little to choose from: a row of long documents stays the
    dearest. Here the long ones are spread over the rows, and the short ones fill them. Rows should hold two of the
    longest at least. The cost is part of the order, as of `DGraph.pack`.
    """

    cost: CostFunction = field(default_factory=AttentionCost)
    """What a document costs, by its length."""
    sync: Sync = "step"
    """As of `Balanced`."""

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        rows = graph.mix().pack(even=self.cost)
        return rows.distribute("dp").cost(self.cost).balance(sync=self.sync)


@dataclass(frozen=True)
class HybridVLM(Strategy):
    """Equal work for every group in an encoder and in its backbone, since ranks wait for each other behind either.

    Where both run on a rank without such a wait in between, add them instead: `Balanced(encoder_cost + backbone_cost)`.
    """

    encoder_cost: CostFunction
    """What a document costs the encoder, such as `ViTCost(...)` by its field `patches`."""
    backbone_cost: CostFunction
    """What it costs the backbone, such as `TransformerCost(...)` by its tokens, those of images among them."""
    sync: Sync = "step"
    """What is made even: the sum of a "step", or every "microbatch" among the groups."""

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        placed = graph.mix().pack().distribute("dp").cost(self.encoder_cost, self.backbone_cost)
        return placed.balance("greedy", sync=self.sync)


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Rows are dealt in turn, as they come; costs are only reported."""

    cost: CostFunction = field(default_factory=AttentionCost)
    """What a document costs, by its length."""

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        return graph.mix().pack().distribute("dp").cost(self.cost)


@dataclass(frozen=True)
class Curriculum(Strategy):
    """From easy to hard: a quantile of a number of the samples follows a schedule. Work is even as with `Balanced`.

    Raises:
        ConfigError: The schedule is none.
    """

    field: str
    """"length", or another number that every sample has."""
    schedule: Sequence[tuple[int, float]]
    """(step, value of the quantile): the first of step 0, the steps rising. Behind the last it stays."""
    quantile: float = 0.9
    """The share of the samples whose number is at most the value."""
    interpolate: Literal["step", "linear"] = "linear"
    """Between two points: the value of the one before, or that on the line between the two."""
    cost: CostFunction = dataclasses.field(default_factory=AttentionCost)
    """What a document costs, by its length."""
    sync: Sync = "step"
    """What is made even: the sum of a "step", or every "microbatch" among the groups."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", self._declared().schedule)

    def __call__(self, graph: DGraph) -> DGraph:
        """See `Strategy`."""
        mixed = graph.mix(curriculum=self._declared())
        return mixed.pack().distribute("dp").cost(self.cost).balance("greedy", sync=self.sync)

    def _declared(self) -> QuantileSchedule:
        return QuantileSchedule(self.field, self.schedule, quantile=self.quantile, interpolate=self.interpolate)


def declared_by(strategy: Any) -> Declared:
    """What a strategy declares for a step of a run.

    Raises:
        ConfigError: It is no function of a graph, or leaves out what a plan needs.
    """
    if not callable(strategy) or isinstance(strategy, type):
        raise ConfigError(
            "strategy must be Balanced() or another of the ready ones, or a function that declares a DGraph, not "
            f"{strategy!r}"
        )
    graph = declare(strategy, _Nothing())
    require("plan", graph.declared.done)
    return graph.declared


class _Nothing:
    """A step of a run, to be declared and not to be planned."""

    in_run = True
    step = 0

    def draw(self, declared: Declared) -> tuple[StreamSpec, Drawn]:
        raise ConfigError("strategy: a step has no samples yet while it is declared; decide by graph.step alone")
