"""`DGraph`: one step of a stream, declared: which samples, in which rows, at which places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, get_args

import numpy as np

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import ConfigError
from megascale_lightning.places.axes import AXES
from megascale_lightning.places.tree import ClientPlaceTree, check_broadcast
from megascale_lightning.planning.buffer import Drawn
from megascale_lightning.planning.costs import CostFunction, cost_of_documents
from megascale_lightning.planning.declared import Declared, calls, require
from megascale_lightning.planning.distribution import distribute
from megascale_lightning.planning.evenpacking import pack_evenly
from megascale_lightning.planning.given import GivenSamples
from megascale_lightning.planning.packing import pack, placed_as_one
from megascale_lightning.planning.twolevel import Method, Sync
from megascale_lightning.planning.views import Lineage, flowchart, lineage_of, summary_of
from megascale_lightning.rows import PackedRows, Rows, positive
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import FloatArray, IntArray, StepPlan

__all__ = ["DGraph", "StepSource", "declare"]


class StepSource(Protocol):
    """Where a graph gets the samples of its step from."""

    @property
    def in_run(self) -> bool:
        """Places, mixture and rows are those of a run."""
        ...

    @property
    def step(self) -> int:
        """The step that is planned."""
        ...

    def draw(self, declared: Declared) -> tuple[StreamSpec, Drawn]:
        """The stream, and the pool of the step."""
        ...


class DGraph:
    """One step, declared by primitives; each gives a new graph, and nothing is computed before a result is asked for.

    A strategy gets the graph of the step that is planned and declares `mix`, `pack`, `distribute` and what else it
    wants. Outside of a run, `from_buffer_infos` and `init` make a graph of given samples. The order of samples and
    their rows depends on the data and the config alone, never on places, nor on costs but that of `pack(even=...)`.

    Args:
        source: Where the samples come from.
        declared: What is declared so far.
    """

    def __init__(self, source: StepSource, declared: Declared | None = None) -> None:
        self._source = source
        self.declared = declared or Declared(done=("init",) if source.in_run else ())

    @classmethod
    def from_buffer_infos(cls, infos: Mapping[str, Any]) -> DGraph:
        """A graph of given samples.

        Args:
            infos: Source -> lengths of its samples in tokens, int [n], in order; or a mapping of columns [n], `length`
                and the numbers that costs want beside it.

        Raises:
            ConfigError: There is no source, a length is no whole number of at least 1, or a column is no n numbers.
        """
        return cls(GivenSamples(infos))

    @property
    def step(self) -> int:
        """The step that is planned; 0 outside of a run."""
        return self._source.step

    # What is declared

    def init(self, tree: ClientPlaceTree, *, global_batch_size: int | None = None) -> DGraph:
        """Say what places there are; in a run they are known.

        Args:
            tree: The places.
            global_batch_size: Rows of the step; None: one microbatch for every data-parallel group.
        """
        if self._source.in_run:
            raise ConfigError("init(): the trainer's places are known in a run; a strategy begins with mix()")
        if not isinstance(tree, ClientPlaceTree):
            raise ConfigError(f"init(): a ClientPlaceTree is wanted, such as from_sizes(dp=2), not {tree!r}")
        if global_batch_size is not None and (wrong := positive(global_batch_size=global_batch_size)):
            raise ConfigError(f"init(): {wrong[0]}")
        return self._declare("init", tree=tree, global_batch_size=global_batch_size)

    def mix(self, weights: Mapping[str, float] | None = None, *, curriculum: QuantileSchedule | None = None) -> DGraph:
        """Draw samples from the sources in proportion to their weights, earliest deadline first.

        Args:
            weights: Source -> weight; None: equal ones. In a run the mixture is the config's, with its schedule and
                `set_mixture`, so that it is in the state.
            curriculum: Which of their samples the sources give first; None: in their order. A run has one for all of
                its steps; evaluations have none.
        """
        if curriculum is not None and not isinstance(curriculum, QuantileSchedule):
            raise ConfigError(
                'mix(): curriculum must be a QuantileSchedule, such as QuantileSchedule("length", [(0, 512), '
                f"(1000, 4096)]), not {curriculum!r}"
            )
        if weights is not None and not isinstance(weights, Mapping):
            raise ConfigError(f"mix(): weights are a mapping by source name, not {weights!r}")
        if weights is not None and self._source.in_run:
            raise ConfigError(
                "mix(): the weights of a run are those of its config, so that they are saved with its state: set "
                "Source(weight=...) or mixture=, and call mix() without weights"
            )
        return self._declare("mix", weights=None if weights is None else dict(weights), curriculum=curriculum)

    def pack(self, rows: Rows | None = None, *, even: CostFunction | None = None) -> DGraph:
        """Put the drawn samples into rows.

        Args:
            rows: Their kind and capacity; in a run they are the config's, and it is left out.
            even: A function as of `cost` by which packed rows are to cost alike, as far as their room allows. It
                belongs to the order: the same at every step, named by checkpoints, refused at a resume if it differs.
        """
        if (rows is None) != self._source.in_run:
            raise ConfigError(
                "pack(): the rows of a run are those of its config (rows=), call pack() without any"
                if self._source.in_run
                else "pack(): the kind of rows is wanted, such as PackedRows(4096, micro_batch_size=1)"
            )
        if rows is not None and not isinstance(rows, Rows):
            raise ConfigError(f"pack(): rows must be PackedRows, PaddedRows or CollatedRows, not {rows!r}")
        if even is not None and (not callable(even) or isinstance(even, type)):
            raise ConfigError(f"pack(): even must be a function of lengths, such as TransformerCost(...), not {even!r}")
        if even is not None and rows is not None and not isinstance(rows, PackedRows):
            raise ConfigError(
                f"pack(): even evens packed rows; {type(rows).__name__} hold one sample each, leave it out"
            )
        return self._declare("pack", rows=rows, even=even)

    def distribute(self, axis: str = "dp", group_size: int | None = None) -> DGraph:
        """Spread the rows over the places of an axis; without `balance`, they are dealt in turn.

        Args:
            axis: "dp": ranks of one data-parallel group get the same rows.
            group_size: Neighbouring data-parallel groups that share a bucket of rows: those that wait for each other at
                every microbatch, such as the ranks that shard a model among them (HSDP). `balance(sync="microbatch")`
                evens each microbatch inside a bucket, and the buckets over the step; with "step" all groups are even
                anyway. A divisor of the number of groups; None: one bucket for all.
        """
        if axis != "dp":
            raise ConfigError(
                f'distribute({axis!r}): rows are spread over "dp"; the ranks of the other axes share the rows of their '
                "data-parallel group"
            )
        if group_size is not None and positive(group_size=group_size):
            raise ConfigError(f"distribute(): {positive(group_size=group_size)[0]}")
        return self._declare("distribute", group_size=group_size)

    def cost(self, *costs: CostFunction) -> DGraph:
        """Say what a document costs a rank to compute; left out, its tokens.

        Args:
            costs: Lengths int [n] -> float64 [n], such as `TransformerCost`. Several are to be even at once, such as an
                encoder's and a backbone's where ranks wait for each other behind either; costs in one unit that run one
                after the other are added instead (`encoder + backbone`).
        """
        odd = [cost for cost in costs if not callable(cost) or isinstance(cost, type)]
        if odd or not costs:
            given = repr(odd[0]) if odd else "nothing"
            raise ConfigError(f"cost(): functions of lengths are wanted, such as TransformerCost(...), not {given}")
        return self._declare("cost", costs=costs)

    def balance(self, method: Method = "greedy", *, sync: Sync = "step") -> DGraph:
        """Make the work of the groups even; all get the same number of rows, and never less even than dealt in turn.

        Args:
            method: "greedy": longest processing time first, with swaps. "karmarkar_karp": largest differencing, then
                counts made equal, with the same swaps; slower, and seldom better. Several costs take "greedy".
            sync: "step": the sum over a step; "microbatch": at every microbatch, for what waits for all groups at each
                (FSDP, expert parallelism, pipelines).
        """
        if method not in get_args(Method):
            raise ConfigError(f"balance({method!r}): the methods are {get_args(Method)}")
        if method != "greedy" and len(self.declared.costs) > 1:
            raise ConfigError(f'balance({method!r}) evens one cost, and cost() was given several: take "greedy"')
        if sync not in get_args(Sync):
            raise ConfigError(f"balance(sync={sync!r}): one of {get_args(Sync)} is wanted")
        return self._declare("balance", method=method, sync=sync)

    def broadcast_at(self, *axes: str) -> DGraph:
        """Say that of the ranks along these axes only the first fetches batches, and hands them to the others.

        Args:
            axes: "pp", "cp", "tp" or aliases of them. An axis with one place changes nothing.

        Raises:
            ConfigError: There is none, one is unknown, or is "dp", whose ranks have batches of their own.
        """
        folded = check_broadcast(axes)
        if not folded:
            raise ConfigError('broadcast_at(): an axis is wanted, such as broadcast_at("tp")')
        return self._declare("broadcast_at", broadcast=tuple(axis for axis in AXES if axis in folded))

    def select(self, field: str) -> DGraph:
        """The same step, of which `summary` and `lineage` show the samples alone that have a number above 0.

        Args:
            field: Name of the number, such as that of the images or patches of a sample.
        """
        if not isinstance(field, str):
            raise ConfigError(f"select(): the name of a number of the samples is wanted, not {field!r}")
        return self._declare("select", selected=field)

    def _declare(self, name: str, **values: Any) -> DGraph:
        done = self.declared.done
        if name in done:
            raise ConfigError(f"{name}() is declared twice: {calls(done)}.{name}()")
        require(name, done)
        return DGraph(self._source, replace(self.declared, done=(*done, name), **values))

    def is_of(self, source: StepSource) -> bool:
        """Whether it is about the step that this source is of."""
        return self._source is source

    # What comes of it

    @cached_property
    def _drawn(self) -> tuple[StreamSpec, Drawn]:
        require("plan", self.declared.done)
        return self._source.draw(self.declared)

    @property
    def spec(self) -> StreamSpec:
        """The stream that the step is one of."""
        return self._drawn[0]

    @property
    def drawn(self) -> Drawn:
        """The pool that the step chooses from."""
        return self._drawn[1]

    @cached_property
    def rows(self) -> list[list[int]]:
        """For each row its pieces, in order, as indices into the pool."""
        spec, drawn, even = self.spec, self.drawn, self.declared.even
        lengths = drawn.pieces["length"].astype(np.int64)
        if not isinstance(spec.rows, PackedRows):
            return [[piece] if piece < len(lengths) else [] for piece in range(spec.rows_per_step)]
        costs = None if even is None else cost_of_documents(even, lengths, drawn.metadata)
        room = spec.rows.room(lengths)
        if drawn.joined is None:
            return self._packed(room, costs, drawn.num_carried)
        return placed_as_one(self._packed, room, costs, drawn.joined, drawn.num_carried)

    def _packed(self, lengths: IntArray, costs: FloatArray | None, num_carried: int) -> list[list[int]]:
        assert isinstance(self.spec.rows, PackedRows)
        shape = {"num_rows": self.spec.rows_per_step, "capacity": self.spec.rows.capacity}
        carried, new = lengths[:num_carried], lengths[num_carried:]
        return pack(carried, new, **shape) if costs is None else pack_evenly(carried, new, costs, **shape)

    @property
    def edges(self) -> IntArray:
        """int64 [n, 2]: neighbours in the pool that have to be in one row, as indices into it (`Source.together`)."""
        joined = self.drawn.joined
        later = np.empty(0, np.int64) if joined is None else np.flatnonzero(joined)
        return np.stack([later - 1, later], axis=1)

    @cached_property
    def in_rows(self) -> IntArray:
        """int64 [n]: indices into the pool, row after row."""
        return np.fromiter(chain.from_iterable(self.rows), np.int64)

    @cached_property
    def carry(self) -> IntArray:
        """PIECE [n]: what is in no row, in draw order; the next step has it first."""
        left = np.ones(len(self.drawn.pieces), np.bool_)
        left[self.in_rows] = False
        return self.drawn.pieces.compress(left)

    def plan(self) -> StepPlan:
        """The rows of the step and their places.

        Raises:
            ConfigError: A declaration is missing, or the cost gives no costs.
        """
        return self._plan

    @cached_property
    def _plan(self) -> StepPlan:
        drawn = self.drawn
        pieces = drawn.pieces.take(self.in_rows)
        row_offsets = np.zeros(len(self.rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in self.rows], out=row_offsets[1:])
        metadata = {name: values[self.in_rows] for name, values in drawn.metadata.items()}
        places = distribute(self.spec, pieces["length"], row_offsets, metadata, self.declared)
        return StepPlan(
            step=self.step,
            pieces=pieces,
            row_offsets=row_offsets,
            placement=places.placement,
            step_loss_tokens=int(pieces["loss_tokens"].sum(dtype=np.int64)),
            balance=places.balance,
            group_costs=places.group_costs,
            group_costs_before=places.group_costs_before,
        )

    # What can be looked at

    def lineage(self, source: str, unit: int, row: int, start: int = 0) -> Lineage | None:
        """What became of a sample, or of the piece of it that begins at `start`; None: it is not in this step.

        Args:
            source: Name of its source.
            unit: Its unit; outside of a run 0.
            row: Its row in the unit; outside of a run its number in the source.
            start: First token of the piece.

        Raises:
            ConfigError: There is no such source, or the selected field is not known.
        """
        return lineage_of(self, source, unit, row, start)

    def summary(self) -> dict[str, Any]:
        """What the step is made of: pieces by life, rows, how full they are, and how even the work is.

        Of a selected field: the same of the samples that have it, its sum over each data-parallel group, and how even
        these sums are.
        """
        return summary_of(self)

    def to_mermaid(self) -> str:
        """The declarations and what comes of them as a Mermaid flowchart."""
        return flowchart(self)


def declare(strategy: Callable[[DGraph], DGraph], source: StepSource) -> DGraph:
    """The step of a source as a strategy declares it.

    Raises:
        ConfigError: It gave something else than that step, declared.
    """
    graph = strategy(DGraph(source))
    if not isinstance(graph, DGraph):
        raise ConfigError(f"strategy: {strategy!r} gave {type(graph).__name__}: return the graph that you declared")
    if not graph.is_of(source):
        raise ConfigError(
            f"strategy: {strategy!r} gave the graph of other samples: declare the one that it gets, and return that"
        )
    return graph
