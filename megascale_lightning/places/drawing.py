"""Draws ranks by their places: all of them where there are few, else the first and the last branches of every level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np

from megascale_lightning.places.axes import AXES, Axis
from megascale_lightning.types import IntArray

__all__ = ["draw", "shorten"]

_MAX_LINES: Final = 48
_BRANCHES: Final = (_MAX_LINES, 16, 8, 4, 3, 2)
"""So many branches of a level are drawn; with two of every level a drawing has 21 lines at most."""


def draw(grid: IntArray) -> str:
    """A line for each place along all axes but the innermost, whose ranks stand side by side.

    Args:
        grid: int64 [pp, dp, cp, tp], ranks. Axes of size 1 are left out.
    """
    used = [axis for axis, size in zip(AXES, grid.shape, strict=True) if size > 1] or ["dp"]
    sizes = [grid.shape[AXES.index(axis)] for axis in used]
    noun = "rank" if grid.size == 1 else "ranks"
    head = " x ".join(f"{axis} {size}" for axis, size in zip(used, sizes, strict=True))
    lines: list[str] = []
    for most in _BRANCHES:
        lines = list(islice(_branches(grid.reshape(sizes), used, most, ""), _MAX_LINES + 1))
        if len(lines) <= _MAX_LINES:
            break
    return "\n".join([f"ClientPlaceTree: {grid.size} {noun} = {head}", *lines])


def shorten(ranks: IntArray) -> str:
    """Ranks in order, runs of consecutive ones as `first-last`, the middle of a long list left out."""
    flat = ranks.ravel()
    runs = np.split(flat, np.flatnonzero(np.diff(flat) != 1) + 1)
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run.tolist())) for run in runs]
    return " ".join(words if len(words) <= 16 else [*words[:12], "...", *words[-2:]])


def _branches(grid: IntArray, axes: Sequence[Axis], most: int, indent: str) -> Iterator[str]:
    if len(axes) == 1:
        yield f"{indent}└── {_span(grid, axes[0])}"
        return
    num = len(grid)
    drawn = range(num) if num <= most else [*range(most - 1), num - 1]
    for index in drawn:
        last = index == num - 1
        if last and len(drawn) < num:
            yield f"{indent}├── {axes[0]} {most - 1}-{num - 2}: not drawn"
        branch = f"{indent}{'└──' if last else '├──'} {axes[0]} {index}"
        if len(axes) == 2:
            yield f"{branch}, {_span(grid[index], axes[1])}"
        else:
            yield branch
            yield from _branches(grid[index], axes[1:], most, indent + ("    " if last else "│   "))


def _span(ranks: IntArray, axis: Axis) -> str:
    """The places along the innermost axis, and who stands there."""
    if len(ranks) == 1:
        return f"{axis} 0: rank {ranks[0]}"
    return f"{axis} 0-{len(ranks) - 1}: ranks {shorten(ranks)}"
