"""Which records stand in which part, in which order: pure functions of manifest and seed, so that any role can ask.

An epoch permutes the units of a source; `window_units` of them in a row are a window; a window is cut into parts of
about `part_bytes` stored bytes; a part's records are permuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.seeding import derive_permutation

__all__ = ["Segment", "num_windows", "part_permutation", "window_parts", "window_units_of"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Records [row_start, row_stop) of one unit; row_stop -1 is its end."""

    unit: int
    row_start: int
    row_stop: int


def num_windows(manifest: Manifest, window_units: int) -> int:
    """Windows of one epoch."""
    return -(-manifest.num_units // _units_of_a_window(manifest, window_units))


def _units_of_a_window(manifest: Manifest, window_units: int) -> int:
    """A sliced unit is a window by itself: how many parts it has is not known before it was read."""
    return 1 if manifest.sliced else window_units


def window_units_of(
    manifest: Manifest,
    source_name: str,
    stream: str,
    seed: int,
    epoch: int,
    window: int,
    window_units: int,
    shuffle: bool,
) -> npt.NDArray[np.int64]:
    """The units of a window, in reading order: int64 [<= window_units].

    Raises:
        IndexError: The epoch has no such window.
    """
    if not 0 <= window < num_windows(manifest, window_units):
        raise IndexError(f"window {window} of source {source_name!r}, which has {num_windows(manifest, window_units)}")
    size = _units_of_a_window(manifest, window_units)
    first, last = window * size, min((window + 1) * size, manifest.num_units)
    if not shuffle:
        return np.arange(first, last, dtype=np.int64)
    return _epoch_units(manifest.num_units, source_name, stream, seed, epoch)[first:last]


@lru_cache(maxsize=64)
def _epoch_units(n: int, source_name: str, stream: str, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    units = derive_permutation(n, "units", seed, stream, source_name, epoch)
    units.flags.writeable = False
    return units


def window_parts(
    manifest: Manifest,
    source_name: str,
    stream: str,
    seed: int,
    epoch: int,
    window: int,
    window_units: int,
    part_bytes: int,
    shuffle: bool,
) -> list[list[Segment]]:
    """The parts of a window, at least one.

    Units larger than `part_bytes` with a known number of records are cut into slices of equal size, each of which ends
    a part; other units are grouped until a part holds `part_bytes`.

    Raises:
        IndexError: The epoch has no such window.
    """
    parts: list[list[Segment]] = []
    open_part: list[Segment] = []
    held = 0
    for unit in window_units_of(manifest, source_name, stream, seed, epoch, window, window_units, shuffle).tolist():
        rows, size = int(manifest.units[unit]["rows"]), int(manifest.units[unit]["bytes"])
        segments = _cut(unit, rows, size, part_bytes)
        for segment in segments:
            open_part.append(segment)
            held += size
            if len(segments) > 1 or held >= part_bytes:
                parts.append(open_part)
                open_part, held = [], 0
    if open_part:
        parts.append(open_part)
    return parts


def _cut(unit: int, rows: int, size: int, part_bytes: int) -> list[Segment]:
    if rows <= 1 or size <= part_bytes:
        return [Segment(unit, 0, -1)]
    step = -(-rows // -(-size // part_bytes))
    return [Segment(unit, start, min(start + step, rows)) for start in range(0, rows, step)]


def part_permutation(
    n: int, source_name: str, stream: str, seed: int, epoch: int, window: int, part: int, shuffle: bool
) -> npt.NDArray[np.int64]:
    """Order of the n records of a part: int64 [n], entry i is record `order[i]` of its segments in turn."""
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    return derive_permutation(n, "part", seed, stream, source_name, epoch, window, part)
