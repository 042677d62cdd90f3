"""From the rows of a step to places: data-parallel group, microbatch, slot; and how even the work then is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_lightning.planning.balancing import lower_bound
from megascale_lightning.planning.strategies import RoundRobin
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


def distribute(spec: StreamSpec, lengths: IntArray, row_offsets: IntArray) -> Distribution:
    """Give every row of a step a place; every group gets the same number of microbatches, filler makes up the rest.

    Args:
        spec: The stream.
        lengths: Tokens of the pieces, row after row.
        row_offsets: int64 [rows + 1] into `lengths`; empty rows are filler.
    """
    piece_costs = np.concatenate([[0.0], np.cumsum(spec.strategy.cost(lengths))])
    row_costs = np.diff(piece_costs[row_offsets])
    real = np.flatnonzero(np.diff(row_offsets) > 0)
    slots = spec.num_groups * spec.num_microbatches * spec.rows.micro_batch_size
    rows = np.full(slots, -1, dtype=np.int64)
    rows[: len(real)] = real
    if not isinstance(spec.rows, PackedRows):
        return _distribute_by_length(spec, rows, row_offsets, lengths)
    costs = np.zeros(slots)
    costs[: len(real)] = row_costs[real]
    return _distribute_packed(spec, rows, costs)


def _distribute_packed(spec: StreamSpec, rows: IntArray, costs: FloatArray) -> Distribution:
    micro = spec.rows.micro_batch_size
    per_group = spec.num_microbatches * micro

    placed = np.empty((spec.num_groups, spec.num_microbatches, micro), dtype=np.int64)
    for index, members in enumerate(spec.strategy.assign(costs, num_bins=spec.num_groups, per_bin=per_group)):
        batches = spec.strategy.assign(costs[members], num_bins=spec.num_microbatches, per_bin=micro)
        placed[index] = members[batches]
    before = costs[RoundRobin().assign(costs, num_bins=spec.num_groups, per_bin=per_group)].sum(axis=1)
    return _report(rows[placed], costs[placed].sum(axis=(1, 2)), before, lower_bound(costs, spec.num_groups))


def _distribute_by_length(spec: StreamSpec, rows: IntArray, row_offsets: IntArray, lengths: IntArray) -> Distribution:
    """Rows sorted by length make the microbatches; a microbatch costs what its longest row costs, in every row."""
    micro = spec.rows.micro_batch_size
    totals = np.concatenate([[0], np.cumsum(lengths)])
    row_lengths = np.append(np.diff(totals[row_offsets]), 0)  # index -1: filler
    sized = row_lengths[rows]
    by_length = rows[np.argsort(-sized, kind="stable")].reshape(-1, micro)

    def costs_of(batches: IntArray) -> FloatArray:
        found: FloatArray = spec.strategy.cost(row_lengths[batches].max(axis=-1)) * micro
        return found

    costs = costs_of(by_length)
    # Filler comes last in every group: what is real is dealt by itself, so that it takes as few microbatches as it can.
    due = -(-len(np.flatnonzero(rows >= 0)) // (micro * spec.num_groups)) * spec.num_groups
    real = spec.strategy.assign(costs[:due], num_bins=spec.num_groups, per_bin=due // spec.num_groups)
    rest = np.arange(due, len(costs)).reshape(spec.num_groups, -1)
    groups = np.concatenate([np.asarray(real).reshape(spec.num_groups, -1), rest], axis=1)
    dealt = RoundRobin().assign(costs, num_bins=spec.num_groups, per_bin=spec.num_microbatches * micro)
    before = costs_of(rows[dealt].reshape(spec.num_groups, spec.num_microbatches, micro)).sum(axis=1)
    return _report(by_length[groups], costs[groups].sum(axis=1), before, lower_bound(costs, spec.num_groups))


def _report(placed: IntArray, loads: FloatArray, before: FloatArray, bound: float) -> Distribution:
    balance = {
        "max_over_mean_before": _ratio(before.max(), before.mean()),
        "max_over_mean": _ratio(loads.max(), loads.mean()),
        "max_over_bound": _ratio(loads.max(), bound),
    }
    return Distribution(placed.astype(np.int32), loads, before, balance)


def _ratio(value: float, base: float) -> float:
    return float(value) / float(base) if base > 0 else 1.0
