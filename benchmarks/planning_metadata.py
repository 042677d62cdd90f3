"""Metadata without data: parts of sources that exist in no file, for benchmarks of the planner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascale_lightning.planning.strategies import Balanced
from megascale_lightning.rows import PackedRows
from megascale_lightning.streams import SourceSpec, StreamSpec
from megascale_lightning.types import PIECE, MetaBlock, PartKey

__all__ = ["Shape", "describe", "stream_of"]

ENTRIES = 2048
"""Samples of a part."""
ZIPF = 1.1
"""Exponent of the sources' weights."""


@dataclass(frozen=True)
class Shape:
    """A trainer and what it trains on."""

    ranks: int
    """All of them, model parallel ones included."""
    groups: int
    """Data-parallel groups."""
    sources: int
    samples: int
    """Of a step, on average."""
    row_tokens: int = 16_384
    mu: float = 6.0
    sigma: float = 1.2
    """Of the log-normal lengths, in tokens, capped at a row."""
    pack_ahead: int = 1024

    @property
    def rows_per_step(self) -> int:
        """A multiple of the groups, so that a step has about so many samples."""
        mean = float(_lengths(np.random.default_rng(0), 100_000, self).mean())
        rows = self.samples * mean / self.row_tokens
        return max(1, round(rows / self.groups)) * self.groups


def stream_of(shape: Shape) -> StreamSpec:
    """The training stream of such a trainer: packed rows of one microbatch each, weights that fall off."""
    weights = np.arange(1, shape.sources + 1) ** -ZIPF
    return StreamSpec(
        name="train",
        sources=tuple(
            SourceSpec(name=f"source{index:03d}", num_windows=1 << 20, weight=float(weight), epochs=None)
            for index, weight in enumerate(weights / weights.sum())
        ),
        rows=PackedRows(shape.row_tokens, 1, pack_ahead=shape.pack_ahead),
        rows_per_step=shape.rows_per_step,
        num_groups=shape.groups,
        num_microbatches=shape.rows_per_step // shape.groups,
        seed=0,
        last_step="fill",
        mixture_unit="samples",
        strategy=Balanced(),
        prefetch_steps=2,
        plan_window=1,
    )


def describe(key: PartKey, shape: Shape) -> MetaBlock:
    """What a loader would say of a part."""
    rng = np.random.default_rng([key.source, key.epoch, key.window, key.part])
    pieces = np.zeros(ENTRIES, PIECE)
    for name in ("source", "epoch", "window", "part"):
        pieces[name] = getattr(key, name)
    pieces["entry"] = pieces["row"] = np.arange(ENTRIES)
    pieces["unit"] = key.window
    pieces["stop"] = -1
    pieces["length"] = _lengths(rng, ENTRIES, shape)
    pieces["loss_tokens"] = pieces["length"] - 1
    return MetaBlock(
        key=key,
        pieces=pieces,
        first=np.ones(ENTRIES, bool),
        kept=np.ones(ENTRIES, bool),
        reason=np.zeros(ENTRIES, np.uint8),
        last_in_window=True,
    )


def _lengths(rng: np.random.Generator, count: int, shape: Shape) -> np.ndarray:
    return np.clip(rng.lognormal(shape.mu, shape.sigma, count), 1, shape.row_tokens).astype(np.int64)
