"""`LossFeedback`: weights of the sources from the losses that training logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from megascale_lightning.checkpointing.state import weights_by_name
from megascale_lightning.errors import ConfigError, StateError

__all__ = ["LossFeedback"]


class LossFeedback:
    """A rule for `MixtureCallback`: sources whose loss is above its reference get more, by multiplicative weights.

    It is the online update of DoReMi (Xie et al., 2023, arXiv 2305.10429, algorithm 1) on logged, smoothed losses. At
    every call, for each of the k sources that had a weight above 0 at the first one, with loss l and share p:

        m <- smoothing x m + (1 - smoothing) x l            (the first l as it is)
        q = p x exp(step_size x max(m - reference, 0))
        p <- floor + (1 - k x floor) x q / sum(q)

    A source without a loss so far has an excess of 0. The losses are averaged over those ranks that have logged one, so
    that all ranks compute the same; log them without `sync_dist`, at least as often as the callback asks. What it knows
    is in the checkpoint, with the state of the callback.

    Args:
        metric: Name of the logged loss of a source, with `{source}` for the source's name.
        reference: Losses by source name that would do, such as those of a smaller model; one for all; 0 by default.
        step_size: How fast shares move.
        smoothing: What is kept of the losses before, in [0, 1).
        floor: The least share of each source; k of them have to be less than 1.

    Raises:
        ConfigError: A setting is out of its range; all that is wrong is said at once.
    """

    def __init__(
        self,
        metric: str = "train_loss/{source}",
        reference: Mapping[str, float] | float = 0.0,
        step_size: float = 0.1,
        smoothing: float = 0.9,
        floor: float = 0.001,
    ) -> None:
        found = []
        if not isinstance(metric, str) or "{source}" not in metric:
            found.append(f"metric must hold {{source}}, as 'train_loss/{{source}}' does, not {metric!r}")
        given = reference.values() if isinstance(reference, Mapping) else [reference]
        if not all(_is_finite(value) for value in given):
            found.append(f"reference must be a finite number, or these by source name, not {reference!r}")
        if not (_is_finite(step_size) and step_size > 0):
            found.append(f"step_size must be a number above 0, not {step_size!r}")
        for name, value in (("smoothing", smoothing), ("floor", floor)):
            if not (_is_finite(value) and 0 <= value < 1):
                found.append(f"{name} must be a number of at least 0 and less than 1, not {value!r}")
        if found:
            raise ConfigError("; ".join(f"LossFeedback: {problem}" for problem in found))
        self._metric = metric
        self._reference = dict(reference) if isinstance(reference, Mapping) else float(reference)
        self._step_size = float(step_size)
        self._smoothing = float(smoothing)
        self._floor = float(floor)
        self._total = 0.0
        self.shares: dict[str, float] = {}
        """Of the sources that it steers, summing to 1; empty before the first call."""
        self.losses: dict[str, float] = {}
        """Smoothed, of the sources that have one."""

    def __call__(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> dict[str, float]:
        """The weights of the sources that it steers; together they keep what these had.

        Raises:
            ConfigError: No rank has logged any of the losses, or the floor leaves nothing to move.
        """
        if not self.shares:
            self._begin(trainer)
        names = sorted(self.shares)
        for name, loss in self._logged(trainer, module, names).items():
            before = self.losses.get(name, loss)
            self.losses[name] = self._smoothing * before + (1 - self._smoothing) * loss
        excess = {name: max(self.losses[name] - self._reference_of(name), 0.0) for name in names if name in self.losses}
        most = max(excess.values())  # taken off all exponents, which changes no share and keeps them from overflowing
        grown = {name: self.shares[name] * math.exp(self._step_size * (excess.get(name, 0.0) - most)) for name in names}
        total = math.fsum(grown.values())
        free = 1 - len(names) * self._floor
        self.shares = {name: self._floor + free * grown[name] / total for name in names}
        return {name: self._total * share for name, share in self.shares.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on, as plain numbers."""
        return {"total": self._total, "shares": dict(self.shares), "losses": dict(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            StateError: It is none.
        """
        tables = (state.get("shares"), state.get("losses"))
        whole = all(isinstance(table, Mapping) and all(map(_is_finite, table.values())) for table in tables)
        if not whole or not _is_finite(state.get("total")):
            raise StateError(f"this is no state of a LossFeedback: {dict(state)!r}")
        self._total = float(state["total"])
        self.shares = {str(name): float(share) for name, share in state["shares"].items()}
        self.losses = {str(name): float(loss) for name, loss in state["losses"].items()}

    def _begin(self, trainer: L.Trainer) -> None:
        """Take the shares in force, which are the same on all ranks."""
        position = trainer.datamodule.position()  # type: ignore[attr-defined]  # MixtureCallback has checked it
        weights = {name: weight for name, weight in weights_by_name(position, "weights").items() if weight > 0}
        if len(weights) * self._floor >= 1:
            raise ConfigError(
                f"LossFeedback: a floor of {self._floor} for each of {len(weights)} sources leaves nothing to move: it "
                f"must be less than {1 / len(weights):.4g}"
            )
        self._total = math.fsum(weights.values())
        self.shares = {name: weight / self._total for name, weight in weights.items()}

    def _logged(self, trainer: L.Trainer, module: L.LightningModule, names: list[str]) -> dict[str, float]:
        """The losses by source name, averaged over the ranks that have one."""
        metrics = trainer.callback_metrics
        values = [float(metrics.get(self._metric.format(source=name), math.nan)) for name in names]
        there = [math.isfinite(value) for value in values]
        mine = [[value if ok else 0.0 for value, ok in zip(values, there, strict=True)], [float(ok) for ok in there]]
        sums, counts = trainer.strategy.reduce(torch.tensor(mine, device=module.device), reduce_op="sum").tolist()
        found = {name: sums[index] / counts[index] for index, name in enumerate(names) if counts[index]}
        if not found and not self.losses:
            raise ConfigError(
                f"LossFeedback: none of {[self._metric.format(source=name) for name in names]} is logged; logged are "
                f"{sorted(metrics)}. Log them in training_step: self.log('{self._metric}', loss_of_source)"
            )
        return found

    def _reference_of(self, name: str) -> float:
        return self._reference.get(name, 0.0) if isinstance(self._reference, dict) else self._reference


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
