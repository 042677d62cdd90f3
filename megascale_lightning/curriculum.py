"""`QuantileSchedule`: a quantile of a number of the samples by the step, and how often each level of it is to come."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.mixtures import is_finite, is_number, is_step, step_problem
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["QuantileSchedule"]

_RATIO: Final = 1.2
"""Between two edges of levels: fine enough for a quantile between them, and few enough for a small state."""
_MOST_EDGES: Final = 15
_MOST_OFTEN: Final = 8.0
"""No level comes more often than so many times its natural share: every such draw reads so many samples."""
_DOUBLINGS: Final = 20.0
"""Hard samples are taken up to 2^20 times as often as easy ones, or as seldom, before the limit above."""


@dataclass(frozen=True)
class QuantileSchedule:
    """A quantile of a number of the samples as a function of the step.

    Samples are sorted into levels by the number, at edges that follow from the schedule alone. Each level goes through
    its source's data in their order; the schedule says how often each is drawn, so that the quantile is met with as
    little change of the natural shares as can be.

    Raises:
        ConfigError: The settings make no schedule; all that is wrong is said at once.
    """

    field: str
    """"length" (tokens of a whole sample), or another number that every sample has. Of records that stay together
    (`together`) it is the sum for "length", and that of the first record otherwise."""
    schedule: Sequence[tuple[int, float]]
    """(step, value of the quantile): the first of step 0, the steps rising. Behind the last it stays."""
    _: KW_ONLY
    quantile: float = 0.9
    """The share of the samples whose number is at most the value."""
    interpolate: Literal["step", "linear"] = "linear"
    """Between two points: the value of the one before, or that on the line between the two."""

    def __post_init__(self) -> None:
        found = list(_problems(self.field, self.schedule, self.quantile, self.interpolate))
        if found:
            raise ConfigError("; ".join(f"curriculum: {problem}" for problem in found))
        points = tuple((int(step), float(value)) for step, value in self.schedule)
        object.__setattr__(self, "schedule", points)
        object.__setattr__(self, "quantile", float(self.quantile))  # one of NumPy's is no plain value

    @property
    def table(self) -> dict[str, Any]:
        """All of it as plain values."""
        points = [[step, value] for step, value in self.schedule]
        return {
            "field": self.field,
            "schedule": points,
            "quantile": self.quantile,
            "interpolate": self.interpolate,
        }

    @cached_property
    def edges(self) -> FloatArray:
        """float64 [levels - 1], rising: level b has the numbers above edge b - 1 and up to edge b."""
        values = np.unique([value for _, value in self.schedule])
        if self.interpolate == "linear":
            spans = [_between(low, high) for low, high in pairwise(values.tolist())]
            values = np.concatenate([*spans, values[-1:]])
        if len(values) > _MOST_EDGES:
            values = values[np.linspace(0, len(values) - 1, _MOST_EDGES).round().astype(np.int64)]
        return values

    @property
    def num_levels(self) -> int:
        """So many that every number has one."""
        return len(self.edges) + 1

    def at(self, step: int) -> float:
        """The value that the quantile has at a step."""
        index = bisect_right(self.schedule, step, key=lambda point: point[0]) - 1
        start, value = self.schedule[index]
        if self.interpolate == "step" or index + 1 == len(self.schedule):
            return value
        stop, then = self.schedule[index + 1]
        return value + (then - value) * ((step - start) / (stop - start))

    def levels_of(self, numbers: FloatArray) -> IntArray:
        """int64 [n]: the level of each number, float64 [n]."""
        return np.searchsorted(self.edges, numbers, "left")

    def shares(self, seen: IntArray, weights: FloatArray, step: int) -> FloatArray:
        """How often every source is to give each of its levels.

        Of all shares with this quantile over the sources together, those nearest to the natural ones (of the least
        relative entropy): below the value and above it, levels keep their proportions, and one factor for all sources
        says how much more, or less, comes from above. A source that has samples on one side only gives what it has, and
        the others make up for it.

        Args:
            seen: int64 [sources, levels]: the samples of each, as far as was looked; their natural shares.
            weights: float64 [sources]: how often each source is drawn, not normalised.
            step: The step.

        Returns:
            float64 [sources, levels]: the sum over the levels is 1, but 0 for a source that nothing was seen of.
        """
        totals = seen.sum(axis=1)
        natural = seen / np.maximum(totals, 1)[:, None]
        hard = self._above(self.at(step))
        weights = np.where(totals > 0, weights, 0.0)
        weights = weights / (weights.sum() or 1.0)
        low, high = -_DOUBLINGS, _DOUBLINGS
        while high - low > 1e-9:
            middle = (low + high) / 2
            above = (_tilted(natural, hard, middle) * hard).sum(axis=1)
            low, high = (middle, high) if (weights * above).sum() < 1 - self.quantile else (low, middle)
        wanted = _tilted(natural, hard, high)
        wanted = np.minimum(wanted, _MOST_OFTEN * natural)
        shares: FloatArray = wanted + (1 - wanted.sum(axis=1, keepdims=True)) * natural
        return shares

    def _above(self, value: float) -> FloatArray:
        """float64 [levels]: how much of each is above the value, taken as even inside a level."""
        edges = self.edges
        if edges[0] > 0:
            edges, value = np.log(edges), math.log(value)
        above: FloatArray = np.empty(self.num_levels)
        above[0], above[-1] = 0.0, 1.0
        above[1:-1] = 1 - np.clip((value - edges[:-1]) / np.diff(edges), 0.0, 1.0)
        return above


def _tilted(natural: FloatArray, hard: FloatArray, doublings: float) -> FloatArray:
    """Natural shares, float64 [sources, levels], with hard levels so many doublings more often than easy ones."""
    found: FloatArray = natural * 2.0 ** (doublings * hard)
    found /= np.maximum(found.sum(axis=1, keepdims=True), 1e-300)
    return found


def _between(low: float, high: float) -> FloatArray:
    """Edges from `low` on, up to `high` which is none of them: at equal ratios, or if there are none, evenly."""
    if low > 0:
        count = math.ceil(math.log(min(high / low, sys.float_info.max), _RATIO) - 1e-9)
        between = np.geomspace(low, high, count + 1)[1:-1].tolist()
        # Powers may end in another bit on another machine, and samples of 1024 tokens be on another side of the edge.
        return np.array([low, *(float(f"{edge:.9g}") for edge in between)])
    return np.linspace(low, high, _MOST_EDGES + 1)[:-1]


def _problems(field: Any, schedule: Any, quantile: Any, interpolate: Any) -> Iterator[str]:
    if not isinstance(field, str) or not field:
        yield f'field must be "length" or the name of another number of the samples, not {field!r}'
    if not is_number(quantile) or not 0 < quantile < 1:
        yield f"quantile must be above 0 and below 1, such as 0.9, not {quantile!r}"
    if interpolate not in ("step", "linear"):
        yield f"interpolate must be 'step' or 'linear', not {interpolate!r}"
    if not isinstance(schedule, Sequence) or isinstance(schedule, str) or not schedule:
        yield f"schedule must be a list of (step, value), such as [(0, 512), (1000, 4096)], not {schedule!r}"
        return
    before = -1
    for point in schedule:
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            yield f"a point of the schedule must be (step, value), not {point!r}"
            continue
        step, value = point
        if not is_finite(value):
            yield f"step {step!r} of the schedule: the value must be a finite number, not {value!r}"
        problem = step_problem(step, before)
        if problem is not None:
            yield problem
        if is_step(step):
            before = step
