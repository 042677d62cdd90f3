"""What a planned step looks like to people: the life of one piece, the whole in figures, a flowchart."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.planning.costs import refuse_missing
from megascale_lightning.planning.declared import PRIMITIVES
from megascale_lightning.rows import PackedRows
from megascale_lightning.types import FloatArray

if TYPE_CHECKING:
    from megascale_lightning.planning.dgraph import DGraph

__all__ = ["Lineage", "flowchart", "lineage_of", "summary_of"]


class Lineage(NamedTuple):
    """What became of one piece in a step."""

    life: str
    """"carried" (it waits for the next step), "packed" (its row has no place yet) or "placed"."""
    row: int = -1
    group: int = -1
    """Data-parallel group."""
    microbatch: int = -1
    slot: int = -1


def lineage_of(graph: DGraph, source: str, unit: int, row: int, start: int) -> Lineage | None:
    """See `DGraph.lineage`."""
    spec, drawn = graph.spec, graph.drawn
    names = [known.name for known in spec.sources]
    if source not in names:
        raise ConfigError(f"lineage(): there is no source {source!r}; there are {names}")
    pieces = drawn.pieces
    here = (pieces["source"] == names.index(source)) & (pieces["unit"] == unit)
    found = np.flatnonzero(here & (pieces["row"] == row) & (pieces["start"] == start))
    if not found.size or (graph.declared.selected is not None and _selected(graph)[found[0]] <= 0):
        return None
    at = next((index for index, members in enumerate(graph.rows) if int(found[0]) in members), None)
    if at is None:
        return Lineage("carried")
    place = np.argwhere(graph.plan().placement == at)
    return Lineage("placed", at, *(int(index) for index in place[0])) if len(place) else Lineage("packed", at)


def summary_of(graph: DGraph) -> dict[str, Any]:
    """See `DGraph.summary`."""
    return _summary(graph) if graph.declared.selected is None else _summary_of_field(graph)


def _summary_of_field(graph: DGraph) -> dict[str, Any]:
    drawn, plan, values = graph.drawn, graph.plan(), _selected(graph)
    row_of = np.repeat(np.arange(len(graph.rows)), np.diff(plan.row_offsets))
    there, placed = values > 0, values[graph.in_rows] > 0
    of_rows = np.bincount(row_of, values[graph.in_rows], minlength=len(graph.rows) + 1)  # the last for filler, -1
    groups = of_rows[plan.placement].sum(axis=(1, 2))
    return {
        "step": graph.step,
        "field": graph.declared.selected,
        "carried_in": int(there[: drawn.num_carried].sum()),
        "mixed": int(there[drawn.num_carried :].sum()),
        "placed": int(placed.sum()),
        "carried_on": int(there.sum() - placed.sum()),
        "rows": len(np.unique(row_of[placed])),
        "total": float(groups.sum()),
        "group_totals": groups.tolist(),
        "max_over_mean": float(groups.max() / groups.mean()) if groups.any() else 1.0,
    }


def _selected(graph: DGraph) -> FloatArray:
    """float64 [pool]: the selected number."""
    name = graph.declared.selected
    assert name is not None
    refuse_missing("select()", (name,), graph.drawn.metadata)
    return graph.drawn.metadata[name]


def _summary(graph: DGraph) -> dict[str, Any]:
    spec, drawn = graph.spec, graph.drawn
    plan = graph.plan()
    tokens = int(plan.pieces["length"].sum(dtype=np.int64))
    found: dict[str, Any] = {
        "step": graph.step,
        "carried_in": drawn.num_carried,
        "mixed": len(drawn.pieces) - drawn.num_carried,
        "placed": len(plan.pieces),
        "carried_on": len(graph.carry),
        "rows": len(graph.rows),
        "tokens": tokens,
    }
    if isinstance(spec.rows, PackedRows):
        found["fill"] = tokens / (len(graph.rows) * spec.rows.capacity)
    if graph.declared.broadcast:
        found["broadcast_at"] = graph.declared.broadcast
    return {**found, **plan.balance}


def flowchart(graph: DGraph) -> str:
    """See `DGraph.to_mermaid`."""
    found = _summary(graph)
    spec, size = graph.spec, graph.declared.group_size
    texts = {
        "init": f"places: {spec.num_groups} groups x {spec.num_microbatches} microbatches",
        "mix": f"mix: {found['carried_in']} carried + {found['mixed']} drawn of {len(spec.sources)} sources",
        "pack": f"pack: {found['placed']} pieces in {found['rows']} rows, {found['carried_on']} carried on",
        "distribute": "distribute over dp" + ("" if size is None else f" in buckets of {size} groups"),
        "cost": f"cost: {graph.declared.cost_names}",
        "balance": f"balance by {graph.declared.sync}: max/mean {found['max_over_mean']:.3f}",
        "broadcast_at": f"broadcast at {', '.join(graph.declared.broadcast)}",
    }
    names = [name for name in PRIMITIVES if name in graph.declared.done]
    nodes = [f'    {name}["{texts[name]}"]' for name in names]
    arrows = [f"    {one} --> {other}" for one, other in pairwise(names)]
    return "\n".join(["flowchart LR", *nodes, *arrows])
