"""From the rows of a step to places: data-parallel group, microbatch, slot; and how even the work then is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_lightning.planning.balancing import lower_bound
from megascale_lightning.planning.costs import cost_of_documents, cost_of_rows
from megascale_lightning.planning.declared import Declared
from megascale_lightning.planning.twolevel import Sync, assign_in_turn, assign_two_levels
from megascale_lightning.rows import PackedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["Distribution", "distribute"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Places of the rows of one step."""

    placement: npt.NDArray[np.int32]
    """int32 [groups, microbatches, rows a microbatch]: row index, -1 for filler."""
    group_costs: FloatArray
    """[groups]; of several costs the one in which the group is above the mean the most, in means of the groups."""
    group_costs_before: FloatArray
    """[groups]: had the rows been dealt in turn."""
    balance: Mapping[str, float]


def distribute(
    spec: StreamSpec,
    lengths: IntArray,
    row_offsets: IntArray,
    metadata: Mapping[str, FloatArray],
    declared: Declared,
) -> Distribution:
    """Give every row of a step a place; every group gets the same number of microbatches, filler makes up the rest.

    Args:
        spec: The stream.
        lengths: Tokens of the pieces, row after row.
        row_offsets: int64 [rows + 1] into `lengths`; empty rows are filler.
        metadata: Name -> float64, of the pieces as `lengths`.
        declared: The costs of a piece, what is made even among whom, and how.

    Raises:
        ConfigError: The groups make no whole buckets, or a cost gives no costs.
    """
    declared.check_buckets(spec.num_groups)
    real = np.flatnonzero(np.diff(row_offsets) > 0)
    rows = np.full(spec.num_groups * spec.num_microbatches * spec.rows.micro_batch_size, -1, dtype=np.int64)
    rows[: len(real)] = real
    if not isinstance(spec.rows, PackedRows):
        return _distribute_by_length(spec, rows, row_offsets, lengths, metadata, declared)
    table = np.zeros((len(rows), len(declared.costs)))
    for at, cost in enumerate(declared.costs):
        table[: len(real), at] = cost_of_rows(cost, lengths, row_offsets, metadata)[real]
    shape = spec.num_groups, spec.num_microbatches, spec.rows.micro_batch_size
    placed, dealt = _assign(table, shape, declared), assign_in_turn(*shape)
    return _report(rows[placed], table[placed].sum(axis=(1, 2)), table[dealt].sum(axis=(1, 2)), table)


def _distribute_by_length(
    spec: StreamSpec,
    rows: IntArray,
    row_offsets: IntArray,
    lengths: IntArray,
    metadata: Mapping[str, FloatArray],
    declared: Declared,
) -> Distribution:
    """Rows sorted by length make the microbatches; every row of a microbatch is as long as its longest."""
    micro = spec.rows.micro_batch_size
    totals = np.concatenate([[0], np.cumsum(lengths)])
    row_lengths = np.append(np.diff(totals[row_offsets]), 0)  # index -1: filler
    # Of rows without a piece, and of filler, nothing is known but that they are as long as the others.
    of_rows = {name: np.append(values, np.zeros(len(row_lengths) - len(values))) for name, values in metadata.items()}
    sized = row_lengths[rows]
    by_length = rows[np.argsort(-sized, kind="stable")].reshape(-1, micro)

    def costs_of(batches: IntArray) -> FloatArray:
        longest = np.broadcast_to(row_lengths[batches].max(axis=-1, keepdims=True), batches.shape)
        known = {name: values[batches].ravel() for name, values in of_rows.items()}
        each = [
            cost_of_documents(cost, longest.ravel(), known).reshape(batches.shape).sum(axis=-1)
            for cost in declared.costs
        ]
        return np.stack(each, axis=-1)

    table = costs_of(by_length)
    # Filler comes last in every group: what is real is dealt by itself, so that it takes as few microbatches as it can.
    each = -(-len(np.flatnonzero(rows >= 0)) // (micro * spec.num_groups))
    due = each * spec.num_groups
    shape = spec.num_groups, each, 1
    real = _assign(table[:due], shape, declared)
    rest = np.arange(due, len(table)).reshape(spec.num_groups, -1)
    groups = np.concatenate([real.reshape(spec.num_groups, -1), rest], axis=1)
    dealt = assign_in_turn(spec.num_groups, spec.num_microbatches, micro)
    before = costs_of(rows[dealt]).sum(axis=1)
    return _report(by_length[groups], table[groups].sum(axis=1), before, table)


def _assign(table: FloatArray, shape: tuple[int, int, int], declared: Declared) -> IntArray:
    """Items for groups x microbatches x slots: as declared, and never worse than dealt in turn."""
    dealt, sync = assign_in_turn(*shape), declared.sync
    if sync is None:
        return dealt
    groups, microbatches, per_microbatch = shape
    placed = assign_two_levels(
        table[:, 0] if table.shape[1] == 1 else table,
        num_groups=groups,
        num_microbatches=microbatches,
        per_microbatch=per_microbatch,
        sync=sync,
        method=declared.method or "greedy",
        group_size=declared.group_size,
    )
    size = declared.group_size or groups
    return dealt if _span(table[dealt], sync, size) < _span(table[placed], sync, size) * (1 - 1e-9) else placed


def _span(costs: FloatArray, sync: Sync, group_size: int) -> float:
    """How long a step takes, in means of the groups, of costs [groups, microbatches, slots, D]."""
    loads = costs.sum(axis=2)
    means = loads.sum(axis=1).mean(axis=0)
    if sync == "microbatch":  # Groups of a bucket wait for each other at each, buckets at the end of the step.
        loads = loads.reshape(-1, group_size, *loads.shape[1:]).max(axis=1)
    return max(map(_ratio, loads.sum(axis=1).max(axis=0), means))


def _report(placed: IntArray, loads: FloatArray, before: FloatArray, table: FloatArray) -> Distribution:
    """Of the loads of the groups, float64 [groups, costs] each, and the costs of what was placed, [items, costs]."""
    num_groups, means = len(loads), loads.mean(axis=0)
    bounds = np.array([lower_bound(column, num_groups, equal_counts=True) for column in table.T])
    balance = {
        "max_over_mean_before": max(map(_ratio, before.max(axis=0), before.mean(axis=0))),
        "max_over_mean": max(map(_ratio, loads.max(axis=0), means)),
        "max_over_bound_before": max(map(_ratio, before.max(axis=0), bounds)),
        "max_over_bound": max(map(_ratio, loads.max(axis=0), bounds)),
    }
    if table.shape[1] > 1:
        units = np.where(means > 0, means, 1.0)
        return Distribution(placed.astype(np.int32), (loads / units).max(axis=1), (before / units).max(axis=1), balance)
    return Distribution(placed.astype(np.int32), loads[:, 0], before[:, 0], balance)


def _ratio(value: float, base: float) -> float:
    return float(value) / float(base) if base > 0 else 1.0
