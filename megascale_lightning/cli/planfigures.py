"""`PlanFigures`: the steps of a dry run added up, as plain values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.cli.dryrun import DryRun, PlannedStep
from megascale_lightning.cli.inspection import bin_edges
from megascale_lightning.planning.strategies import declared_by
from megascale_lightning.rows import CollatedRows, PackedRows, PaddedRows, Rows
from megascale_lightning.sources.stores.secrets import redact
from megascale_lightning.types import FloatArray, IntArray, StepPlan

__all__ = ["PlanFigures", "token_slots"]

_BALANCE: Final = ("max_over_mean_before", "max_over_mean", "max_over_bound_before", "max_over_bound")
_KEPT: Final = "truncated"


class PlanFigures:
    """Takes the steps one after another and keeps a few numbers of each; no plan is held.

    Args:
        run: Where they come from.
    """

    def __init__(self, run: DryRun) -> None:
        self._run = run
        self._spec = run.spec
        self._counted = 0 if self._spec.mixture_unit == "samples" else 1
        self._given: list[IntArray] = []
        """int64 [samples and tokens, sources], of each step."""
        self._targets: list[FloatArray] = []
        self._slots: list[int] = []
        self._filler = 0
        self._balance: list[list[float]] = []
        self._costs: list[tuple[float, float]] = []
        self._seconds: list[float] = []
        self._lengths: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def add(self, step: PlannedStep) -> None:
        """The next step."""
        plan, num_sources = step.plan, len(self._spec.sources)
        sources, lengths = plan.pieces["source"], plan.pieces["length"]
        begun = np.bincount(sources[plan.pieces["start"] == 0], minlength=num_sources)
        tokens = np.bincount(sources, weights=lengths, minlength=num_sources).astype(np.int64)
        self._given.append(np.stack([begun, tokens]))
        self._targets.append(step.target)
        self._slots.append(token_slots(self._spec.rows, plan))
        self._filler += plan.placement.size - int((np.diff(plan.row_offsets) > 0).sum())
        self._balance.append([float(plan.balance[name]) for name in _BALANCE])
        self._costs.append((float(plan.group_costs_before.max()), float(plan.group_costs.max())))
        self._seconds.append(step.seconds)
        for length, count in zip(*(found.tolist() for found in np.unique(lengths, return_counts=True)), strict=True):
            self._lengths[length] = self._lengths.get(length, 0) + count
        for index, source in enumerate(self._spec.sources):
            limit = None if self._spec.passes else source.epochs
            if limit is not None and int(step.after.sources[index]["epoch"]) >= limit and not step.after.waiting[index]:
                self._ended.setdefault(index, plan.step + 1)

    def result(self) -> dict[str, Any]:
        """Values that JSON has, once the last step was added; there was one at least."""
        spec, run = self._spec, self._run
        assert run.state is not None
        given = np.stack(self._given)
        samples, tokens = given.sum(axis=2).T
        before, after = np.array(self._costs).sum(axis=0).tolist()
        return {
            "stream": spec.name,
            "steps": len(self._given),
            "ended": run.ended,
            "passes": run.state.passes if spec.passes else None,
            "rows_per_step": spec.rows_per_step,
            "groups": spec.num_groups,
            "microbatches": spec.num_microbatches,
            "micro_batch_size": spec.rows.micro_batch_size,
            "samples": _spread(samples),
            "tokens": _spread(tokens),
            "unit": spec.mixture_unit,
            "scheduled": spec.schedule is not None,
            "sources": self._sources(given),
            "padding": self._padding(tokens),
            "balance": self._balances(),
            "speed_up": before / after if after > 0 else 1.0,
            "strategy": _name(spec.strategy),
            "cost": declared_by(spec.strategy).cost_names,
            "planning_ms": float(np.median(self._seconds)) * 1e3,
            "lengths": self._histogram(),
            "notes": [redact(note) for note in (*run.notes, *self._notes())],
            "each_step": self._each_step(given),
        }

    def _notes(self) -> list[str]:
        """Where shares are not counted as the mixture counts: a plan does not tell which records stay together."""
        names = [source.name for source in self._spec.sources if source.together]
        if not names or self._spec.mixture_unit != "samples" or len(self._spec.sources) == 1:
            return []
        return [
            f"samples and shares given of {names} are of records, and the mixture counts those that stay together as "
            "one sample: more is given of these sources than their target says"
        ]

    def _shares(self, given: IntArray) -> FloatArray:
        """[steps, sources]: of the samples or tokens of a step, as the mixture counts them; but see `_notes`."""
        amounts = given[:, self._counted].astype(np.float64)
        shares: FloatArray = amounts / np.maximum(amounts.sum(axis=1, keepdims=True), 1)
        return shares

    def _sources(self, given: IntArray) -> list[dict[str, Any]]:
        """Each source; its target is the mean of those of the steps, by how much a step took."""
        after = self._run.state
        assert after is not None
        totals = given.sum(axis=0)
        counted, took = totals[self._counted], given[:, self._counted].sum(axis=1)
        targets = np.stack(self._targets)
        mean = (targets * took[:, None]).sum(axis=0) / max(int(took.sum()), 1)
        waiting = np.bincount(after.carry["source"][after.carry["start"] == 0], minlength=len(self._spec.sources))
        found = []
        for index, (source, records) in enumerate(zip(self._spec.sources, self._run.records, strict=True)):
            dropped = {reason: count for reason, count in after.dropped[index].items() if count and reason != _KEPT}
            found.append(
                {
                    "name": source.name,
                    "weight": source.weight,
                    "target": float(mean[index]),
                    "target_first": float(targets[0, index]),
                    "target_last": float(targets[-1, index]),
                    "share": int(counted[index]) / max(int(counted.sum()), 1),
                    "samples": int(totals[0, index]),
                    "tokens": int(totals[1, index]),
                    "waiting": int(waiting[index]),
                    "epochs": records.epochs,
                    "epochs_are_exact": records.is_exact,
                    "records": records.num_records if records.is_exact else None,
                    "ended_after": self._ended.get(index),
                    "dropped": dict(sorted(dropped.items())),
                    "truncated": int(after.dropped[index].get(_KEPT, 0)),
                }
            )
        return found

    def _padding(self, tokens: IntArray) -> dict[str, Any] | None:
        if isinstance(self._spec.rows, CollatedRows):
            return None
        slots = sum(self._slots)
        padding = slots - int(tokens.sum())
        return {"share": padding / slots, "tokens": padding, "slots": slots, "filler_rows": self._filler}

    def _balances(self) -> dict[str, dict[str, float]]:
        values = np.array(self._balance)
        return {
            name: {"mean": float(values[:, index].mean()), "worst": float(values[:, index].max())}
            for index, name in enumerate(_BALANCE)
        }

    def _histogram(self) -> list[dict[str, int]] | None:
        """Of the pieces in rows; None where lengths say nothing."""
        if isinstance(self._spec.rows, CollatedRows) and set(self._lengths) == {1}:
            return None
        values = np.array(sorted(self._lengths), np.int64)
        counts = np.array([self._lengths[value] for value in values.tolist()], np.int64)
        return [
            {"from": start, "to": stop - 1, "count": int(counts[(values >= start) & (values < stop)].sum())}
            for start, stop in pairwise(bin_edges(int(values[0]), int(values[-1])))
        ]

    def _each_step(self, given: IntArray) -> dict[str, Any]:
        """One number per step, lists by name; those of sources by source name."""
        names = [source.name for source in self._spec.sources]
        by_source = {"share": self._shares(given), "target": np.stack(self._targets)}
        samples, tokens = given.sum(axis=2).T
        balance = dict(zip(_BALANCE, np.array(self._balance).T.tolist(), strict=True))
        padding = None
        if not isinstance(self._spec.rows, CollatedRows):
            padding = (1 - tokens / np.array(self._slots)).tolist()
        return {
            "samples": samples.tolist(),
            "tokens": tokens.tolist(),
            "padding": padding,
            **balance,
            **{what: dict(zip(names, values.T.tolist(), strict=True)) for what, values in by_source.items()},
        }


def token_slots(rows: Rows, plan: StepPlan) -> int:
    """Tokens that the rows of a step have room for as handed out to all ranks; of collated rows, those they hold."""
    if isinstance(rows, PackedRows):
        return int(plan.placement.size) * rows.width
    totals = np.concatenate([[0], np.cumsum(plan.pieces["length"], dtype=np.int64)])
    if not isinstance(rows, PaddedRows):
        return int(totals[-1])
    tokens: npt.NDArray[np.int64] = np.append(np.diff(totals[plan.row_offsets]), 0)  # index -1: filler
    multiple = rows.pad_to_multiple_of or 1
    widths = -(-np.maximum(tokens[plan.placement].max(axis=2), 1) // multiple) * multiple
    return int(widths.sum()) * rows.micro_batch_size


def _spread(values: IntArray) -> dict[str, Any]:
    return {
        "total": int(values.sum()),
        "mean": float(values.mean()),
        "min": int(values.min()),
        "max": int(values.max()),
    }


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))
