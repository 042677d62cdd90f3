"""What a sample costs a rank to compute, as a function of its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.types import FloatArray, IntArray

__all__ = ["AttentionCost", "CostFunction", "TokenCost"]


class CostFunction(Protocol):
    """Cost of documents, in any unit: only ratios matter."""

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> cost, float64 [n]."""
        ...


@dataclass(frozen=True)
class TokenCost:
    """A token costs the same wherever it stands."""

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> cost, float64 [n]."""
        return np.asarray(lengths, dtype=np.float64)


@dataclass(frozen=True)
class AttentionCost:
    """Matrix products grow with the length l, attention with its square: cost = l + l^2 / crossover.

    For a causal transformer of L layers with hidden size h the two terms are equal at about 12 h tokens (6 W l for
    the weights W = 12 L h^2 against 6 L h l^2 / 12 for the attention core, forward and backward alike); the default is
    that of h = 4096.

    Raises:
        ConfigError: `crossover` is not above 0.
    """

    crossover: float = 49152.0
    """Length in tokens at which attention costs as much as everything else."""

    def __post_init__(self) -> None:
        if not self.crossover > 0:
            raise ConfigError(f"AttentionCost: crossover must be above 0 tokens, not {self.crossover!r}")

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> cost, float64 [n]."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens + tokens * tokens / self.crossover
