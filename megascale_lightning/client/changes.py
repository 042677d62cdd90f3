"""Changes of the mixture and of costs on their way from rank 0 into the states that the planner makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megascale_lightning.errors import ConfigError
from megascale_lightning.mixtures import is_step, weight_problems
from megascale_lightning.planning.calibration import CalibratedCost
from megascale_lightning.planning.strategies import declared_by
from megascale_lightning.streams import StreamSpec, weights_by_step
from megascale_lightning.types import Change, CostChange, FloatArray, LoaderState, change_key

__all__ = ["PendingChanges", "cost_change", "cost_problem", "first_step", "merged_weights"]


class PendingChanges:
    """Changes that were asked for here, kept until the state of a batch is behind them."""

    def __init__(self) -> None:
        self._changes: dict[tuple[int, str], Change] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._changes)

    def add(self, change: Change) -> None:
        """From its step on; the last word on a step counts."""
        self._changes = {**self._changes, change_key(change): change}

    def passed(self, step: int) -> None:
        """All steps before this one are consumed: what governs them is in the state."""
        if any(change.step < step for change in self._changes.values()):
            self._changes = {key: change for key, change in self._changes.items() if change.step >= step}

    def clear(self) -> None:
        """Another state was loaded."""
        self._changes = {}

    def into(self, state: LoaderState) -> LoaderState:
        """The state with what is pending at or behind it."""
        pending = self._changes
        if not pending:
            return state
        found = {change_key(change): change for change in state.changes} | pending
        to_come = (found[key] for key in sorted(found))
        return replace(state, changes=tuple(change for change in to_come if change.step >= state.step))


def first_step(method: str, at_step: int | None, state: LoaderState, spec: StreamSpec) -> int:
    """The step from which on a change counts.

    Args:
        method: What was called, for people.
        at_step: The step that was asked for; None: the first that is possible.
        state: Where the stream stands.
        spec: The stream.

    Raises:
        ConfigError: It is no step, or may be planned already.
    """
    if at_step is not None and not is_step(at_step):
        raise ConfigError(f"{method}(at_step={at_step!r}): a step is a whole number of at least 0")
    first = state.step + spec.mixture_lead_steps
    if at_step is not None and at_step < first:
        raise ConfigError(
            f"{method}(at_step={at_step}): steps up to {first - 1} may be planned already ({state.step} are consumed, "
            f"mixture_lead_steps={spec.mixture_lead_steps}): give a later step, or none"
        )
    return first if at_step is None else at_step


def cost_change(spec: StreamSpec, costs: Sequence[CalibratedCost], step: int) -> CostChange:
    """Costs in the place of those that the strategy of a stream declares, from a step on.

    Raises:
        ConfigError: They do not fit it.
    """
    problem = cost_problem(spec, costs)
    if problem is not None:
        raise ConfigError(f"set_cost: {problem}")
    return CostChange(step, tuple(cost.coefficients for cost in costs))


def cost_problem(spec: StreamSpec, costs: Sequence[CalibratedCost]) -> str | None:
    """Why costs cannot take the place of those that the strategy of a stream declares; None: they can."""
    odd = [cost for cost in costs if not isinstance(cost, CalibratedCost)]
    if odd:
        return f"a CalibratedCost is wanted, whose coefficients are kept in the state, not {odd[0]!r}"
    declared = declared_by(spec.strategy)
    if costs and len(costs) != len(declared.costs):
        return f"the strategy declares {len(declared.costs)} costs ({declared.cost_names}), {len(costs)} are given"
    missing = sorted({name for cost in costs for name in cost.fields} - set(spec.metadata))
    if missing:
        return (
            f"they are by {missing} of the samples, and the loaders describe what the strategy's own costs are by: "
            f"{list(spec.metadata) or 'lengths alone'}"
        )
    return None


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
    weights = spec.weights_at(step, state, weights_by_step(state.changes)).copy()
    for index, name in enumerate(names):
        weights[index] = given.get(name, weights[index])
    if not (weights > 0).any():
        raise ConfigError("set_mixture: at least one source needs a weight above 0")
    return weights
