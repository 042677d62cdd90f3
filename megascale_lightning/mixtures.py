"""`Mixture`: the shares of the sources in the training stream, fixed or by the step, and what ends it."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.types import FloatArray

__all__ = [
    "Mixture",
    "WeightSchedule",
    "is_finite",
    "is_number",
    "is_step",
    "settle_points",
    "step_problem",
    "weight_problems",
]

Point = tuple[int, dict[str, float]]
"""A step and the weights by source name from it on."""


@dataclass(frozen=True)
class Mixture:
    """Shares of the sources in the training stream.

    Weights are not normalised. With a schedule, they are those of its points; `Mixture.schedule(...)` makes one. In a
    YAML file: `mixture: {schedule: [[0, {web: 0.9, code: 0.1}], [1000, {code: 0.5}]], interpolate: linear}`.

    Raises:
        ConfigError: A setting is unknown, or the points make no schedule; all that is wrong is said at once.
    """

    weights: Mapping[str, float] | None = None
    """By source name; None: the sources' own, or those of `points`."""
    _: KW_ONLY
    unit: Literal["samples", "tokens"] = "samples"
    """What the weights are shares of."""
    stop: str | Sequence[str] = "all"
    """What ends the stream: "all", every source that is drawn has given its `epochs`; "first", one of them has; or a
    list of names, these have. A source has when it is due and has nothing left; what was drawn before is still
    given."""
    points: Sequence[Any] = ()
    """Of a schedule: (step, weights by source name), from step 0 on, rising."""
    interpolate: Literal["step", "linear"] = "step"
    """Between two points: the weights of the one before, or those on the line between the two."""

    def __post_init__(self) -> None:
        found = []
        for name, choices in (("unit", ("samples", "tokens")), ("interpolate", ("step", "linear"))):
            if getattr(self, name) not in choices:
                found.append(f"{name} must be {choices[0]!r} or {choices[1]!r}, not {getattr(self, name)!r}")
        if self.weights is not None and not isinstance(self.weights, Mapping):
            found.append(f"weights must be a mapping by source name, not {type(self.weights).__name__}")
        if self.weights is not None and self.points:
            found.append("weights and points are both given: the first point of a schedule holds the first weights")
        if self.interpolate == "linear" and not self.points:
            found.append("interpolate='linear' needs the points of a schedule: Mixture.schedule([(0, {...}), ...])")
        found += self._stop_problems()
        found += _point_problems(self.points)
        if found:
            raise ConfigError("; ".join(f"Mixture: {problem}" for problem in found))
        object.__setattr__(self, "points", tuple((step, dict(weights)) for step, weights in self.points))
        if not isinstance(self.stop, str):
            object.__setattr__(self, "stop", tuple(self.stop))

    @classmethod
    def schedule(
        cls,
        points: Sequence[tuple[int, Mapping[str, float]]],
        *,
        interpolate: Literal["step", "linear"] = "step",
        unit: Literal["samples", "tokens"] = "samples",
        stop: str | Sequence[str] = "all",
    ) -> Mixture:
        """Weights as a function of the step.

        The first point names every source; a later one those that change, the others keep what they have. A source
        whose weight is 0 is not read until it rises. Weights are interpolated as they are given; points that sum to
        the same make shares move in straight lines. Behind the last point they stay.

        Args:
            points: (step, weights by source name): the first of step 0, the steps rising.
            interpolate: "step" keeps the weights of a point up to the next; "linear" moves them from one to the other.
            unit: What the weights are shares of.
            stop: What ends the stream; see `Mixture`.

        Raises:
            ConfigError: The points make no schedule; names the step and the source.
        """
        if not isinstance(points, Sequence) or isinstance(points, str) or not points:
            raise ConfigError(f"Mixture: {_form(points)}")
        return cls(unit=unit, stop=stop, points=points, interpolate=interpolate)

    @classmethod
    def of(cls, given: Mixture | Mapping[str, Any] | None) -> Mixture:
        """A mixture from weights by source name, or from its settings as a YAML file has them.

        Raises:
            ConfigError: It is neither.
        """
        if isinstance(given, Mixture):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"mixture must be a Mixture or weights by source name, not {type(given).__name__}")
        known = {field.name for field in fields(cls)} | {"schedule"}
        if not given or set(given) - known or all(is_number(value) for value in given.values()):
            return cls(given)
        settings = dict(given)
        if "schedule" in settings:
            if "points" in settings or "weights" in settings:
                raise ConfigError("mixture: schedule= takes the place of weights= and points=: give one of them")
            return cls.schedule(settings.pop("schedule"), **settings)
        return cls(**settings)

    def _stop_problems(self) -> list[str]:
        stop = self.stop
        if isinstance(stop, str):
            good = stop in ("all", "first")
        else:
            good = isinstance(stop, Sequence) and bool(stop) and all(isinstance(name, str) for name in stop)
        return [] if good else [f"stop must be 'all', 'first' or a list of source names, not {stop!r}"]


@dataclass(frozen=True, slots=True)
class WeightSchedule:
    """Weights of all sources of a stream as a pure function of the step."""

    steps: tuple[int, ...]
    """Of the points, rising from 0."""
    weights: tuple[tuple[float, ...], ...]
    """[points][sources], in the stream's order of sources."""
    interpolate: Literal["step", "linear"]

    def at(self, step: int) -> FloatArray:
        """float64 [sources]: the weights that govern the draws of a step."""
        index = bisect_right(self.steps, step) - 1
        before = np.array(self.weights[index], np.float64)
        if self.interpolate == "step" or step == self.steps[index] or index + 1 == len(self.steps):
            return before
        start, stop = self.steps[index], self.steps[index + 1]
        # One rounding less would not do: a weight that stays must stay the same float.
        return before + (np.array(self.weights[index + 1], np.float64) - before) * ((step - start) / (stop - start))

    @property
    def joining(self) -> list[int]:
        """Sources whose weight is 0 at one point and above at another."""
        drawn = np.array(self.weights) > 0
        return np.flatnonzero(drawn.any(axis=0) & ~drawn.all(axis=0)).tolist()


def settle_points(mixture: Mixture, own: Mapping[str, float], over: Mapping[str, float]) -> list[Point]:
    """The weights of every source at every point; without a schedule there is one, of step 0.

    Args:
        mixture: The mixture.
        own: Weights of the sources by name, all of them.
        over: Single weights that hold throughout, whatever the mixture says.
    """
    weights = {name: float(weight) for name, weight in own.items()}
    found: list[Point] = []
    for step, given in mixture.points or ((0, mixture.weights or {}),):
        weights = {name: float(over.get(name, given.get(name, weight))) for name, weight in weights.items()}
        found.append((step, weights))
    return found


def weight_problems(given: str, weights: Mapping[str, Any]) -> list[str]:
    """What is wrong with weights by name."""
    bad = {name: w for name, w in weights.items() if not _is_weight(w)}
    return [f"{given}: weights must be finite numbers of at least 0, not {bad}"] if bad else []


def schedule_problems(mixture: Mixture, own: Mapping[str, float], over: Mapping[str, float]) -> Iterator[str]:
    """What is wrong with a schedule for these sources; arguments as of `settle_points`."""
    if not mixture.points:
        return
    first = mixture.points[0][1]
    if set(own) - set(first):
        yield (
            f"mixture: the first point of a schedule, step 0, must name every source; missing "
            f"{sorted(set(own) - set(first))} (0 for one that joins later)"
        )
    for step, weights in mixture.points:
        unknown = sorted(set(weights) - set(own))
        if unknown:
            yield f"mixture: step {step} of the schedule names {unknown}; the sources are {sorted(own)}"
    for step, settled in settle_points(mixture, own, over):
        if not any(weight > 0 for weight in settled.values()):
            yield f"mixture: at step {step} of the schedule no source has a weight above 0"


def stop_problems(mixture: Mixture, epochs: Mapping[str, int | None], drawn: Sequence[str]) -> Iterator[str]:
    """What is wrong with a stop rule for these sources.

    Args:
        mixture: The mixture.
        epochs: Of each source.
        drawn: Sources with a weight above 0 at some step.
    """
    if mixture.stop == "all":
        return
    if mixture.stop == "first":
        if not any(epochs[name] is not None for name in drawn):
            yield "mixture: stop='first' ends with a source's epochs=, and no source that is drawn has one"
        return
    for name in mixture.stop:
        if name not in epochs:
            yield f"mixture: stop names {name!r}; the sources are {sorted(epochs)}"
        elif epochs[name] is None:
            yield f"mixture: stop names {name!r}, which has no epochs= and so never ends"
        elif name not in drawn:
            yield f"mixture: stop names {name!r}, whose weight is 0: it never ends"


def is_step(step: Any) -> bool:
    """Whether it is the number of a step: a whole number of at least 0."""
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def step_problem(step: Any, before: int) -> str | None:
    """Why a step of a schedule cannot stand behind the one before it (-1: it is the first); None: it can."""
    if not is_step(step):
        return f"a step of the schedule must be a whole number of at least 0, not {step!r}"
    if before < 0 and step:
        return f"the first step of the schedule must be 0, not {step}"
    return f"the steps of the schedule must rise: {step} comes after {before}" if step <= before else None


def _point_problems(points: Any) -> Iterator[str]:
    if not isinstance(points, Sequence) or isinstance(points, str):
        yield _form(points)
        return
    before = -1
    for point in points:
        if not (isinstance(point, Sequence) and len(point) == 2 and isinstance(point[1], Mapping)):
            yield _form(point)
            continue
        step, weights = point
        problem = step_problem(step, before)
        if problem is not None:
            yield problem
        if not is_step(step):
            continue
        before = step
        yield from weight_problems(f"step {step} of the schedule", weights)


def _form(given: Any) -> str:
    return f"a schedule is a list of (step, weights by source name), such as [(0, {{'web': 1.0}})], not {given!r}"


def is_number(value: Any) -> bool:
    """Whether it is a number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float holds: not infinite, and no whole number beyond all floats."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_weight(value: Any) -> bool:
    return is_finite(value) and value >= 0
