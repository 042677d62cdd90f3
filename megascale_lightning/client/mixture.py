"""Changes of the mixture on their way from `set_mixture` into the states that the planner makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megascale_lightning.errors import ConfigError
from megascale_lightning.mixtures import weight_problems
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import FloatArray, LoaderState, MixtureChange

__all__ = ["PendingChanges", "merged_weights"]


class PendingChanges:
    """Changes that were asked for here, kept until the state of a batch is behind them."""

    def __init__(self) -> None:
        self._weights: dict[int, FloatArray] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._weights)

    def add(self, step: int, weights: FloatArray) -> None:
        """From this step on; the last word on a step counts."""
        self._weights = {**self._weights, step: weights}

    def passed(self, step: int) -> None:
        """All steps before this one are consumed: what governs them is in the state."""
        if any(at < step for at in self._weights):
            self._weights = {at: weights for at, weights in self._weights.items() if at >= step}

    def clear(self) -> None:
        """Another state was loaded."""
        self._weights = {}

    def into(self, state: LoaderState) -> LoaderState:
        """The state with what is pending at or behind it."""
        pending = self._weights
        if not pending:
            return state
        found = {change.step: change.weights for change in state.changes} | pending
        steps = sorted(step for step in found if step >= state.step)
        return replace(state, changes=tuple(MixtureChange(step, found[step]) for step in steps))


def merged_weights(spec: StreamSpec, given: Mapping[str, float], state: LoaderState, step: int) -> FloatArray:
    """Weights of all sources from a step on, float64 [num_sources]: those given over those in force without them.

    Raises:
        ConfigError: A weight is none, a source is unknown, or nothing is left to draw from.
    """
    names = [source.name for source in spec.sources]
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"set_mixture takes weights by source name, such as {{{names[0]!r}: 0.5}}, not {given!r}; the sources are "
            f"{sorted(names)}"
        )
    unknown = sorted(set(given) - set(names), key=str)
    found = weight_problems("set_mixture", given)
    if unknown:
        found.append(f"set_mixture: there are no sources {unknown}; the sources are {sorted(names)}")
    if found:
        raise ConfigError("; ".join(found))
    weights = spec.weights_at(step, state, {change.step: change.weights for change in state.changes}).copy()
    for index, name in enumerate(names):
        weights[index] = given.get(name, weights[index])
    if not (weights > 0).any():
        raise ConfigError("set_mixture: at least one source needs a weight above 0")
    return weights
