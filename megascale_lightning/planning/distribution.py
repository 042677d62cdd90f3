"""From the rows of a step to places: data-parallel group, microbatch, slot; and how even the work then is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_lightning.planning.balancing import lower_bound
from megascale_lightning.planning.costs import CostFunction, cost_of_documents, cost_of_rows
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
    """[groups]"""
    group_costs_before: FloatArray
    """[groups]: had the rows been dealt in turn."""
    balance: Mapping[str, float]


def distribute(
    spec: StreamSpec,
    lengths: IntArray,
    row_offsets: IntArray,
    metadata: Mapping[str, FloatArray],
    cost: CostFunction,
    sync: Sync | None,
) -> Distribution:
    """Give every row of a step a place; every group gets the same number of microbatches, filler makes up the rest.

    Args:
        spec: The stream.
        lengths: Tokens of the pieces, row after row.
        row_offsets: int64 [rows + 1] into `lengths`; empty rows are filler.
        metadata: Name -> float64, of the pieces as `lengths`.
        cost: Of a piece.
        sync: What is made even; None deals the rows in turn.
    """
    real = np.flatnonzero(np.diff(row_offsets) > 0)
    rows = np.full(spec.num_groups * spec.num_microbatches * spec.rows.micro_batch_size, -1, dtype=np.int64)
    rows[: len(real)] = real
    if not isinstance(spec.rows, PackedRows):
        return _distribute_by_length(spec, rows, row_offsets, lengths, metadata, cost, sync)
    costs = np.zeros(len(rows))
    costs[: len(real)] = cost_of_rows(cost, lengths, row_offsets, metadata)[real]
    return _distribute_packed(spec, rows, costs, sync)


def _distribute_packed(spec: StreamSpec, rows: IntArray, costs: FloatArray, sync: Sync | None) -> Distribution:
    shape = spec.num_groups, spec.num_microbatches, spec.rows.micro_batch_size
    dealt = assign_in_turn(*shape)
    placed = dealt if sync is None else _assign(costs, shape, sync)
    before = costs[dealt].sum(axis=(1, 2))
    return _report(rows[placed], costs[placed].sum(axis=(1, 2)), before, lower_bound(costs, spec.num_groups))


def _distribute_by_length(
    spec: StreamSpec,
    rows: IntArray,
    row_offsets: IntArray,
    lengths: IntArray,
    metadata: Mapping[str, FloatArray],
    cost: CostFunction,
    sync: Sync | None,
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
        found: FloatArray = cost_of_documents(cost, longest.ravel(), known).reshape(batches.shape).sum(axis=-1)
        return found

    costs = costs_of(by_length)
    # Filler comes last in every group: what is real is dealt by itself, so that it takes as few microbatches as it can.
    each = -(-len(np.flatnonzero(rows >= 0)) // (micro * spec.num_groups))
    due = each * spec.num_groups
    shape = spec.num_groups, each, 1
    real = assign_in_turn(*shape) if sync is None else _assign(costs[:due], shape, sync)
    rest = np.arange(due, len(costs)).reshape(spec.num_groups, -1)
    groups = np.concatenate([real.reshape(spec.num_groups, -1), rest], axis=1)
    dealt = assign_in_turn(spec.num_groups, spec.num_microbatches, micro)
    before = costs_of(rows[dealt]).sum(axis=1)
    return _report(by_length[groups], costs[groups].sum(axis=1), before, lower_bound(costs, spec.num_groups))


def _assign(costs: FloatArray, shape: tuple[int, int, int], sync: Sync) -> IntArray:
    groups, microbatches, per_microbatch = shape
    return assign_two_levels(
        costs, num_groups=groups, num_microbatches=microbatches, per_microbatch=per_microbatch, sync=sync
    )


def _report(placed: IntArray, loads: FloatArray, before: FloatArray, bound: float) -> Distribution:
    balance = {
        "max_over_mean_before": _ratio(before.max(), before.mean()),
        "max_over_mean": _ratio(loads.max(), loads.mean()),
        "max_over_bound": _ratio(loads.max(), bound),
    }
    return Distribution(placed.astype(np.int32), loads, before, balance)


def _ratio(value: float, base: float) -> float:
    return float(value) / float(base) if base > 0 else 1.0
