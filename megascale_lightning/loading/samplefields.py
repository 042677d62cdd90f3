"""Per-sample fields: one value per record as one array, of numbers where the shapes allow it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["join_samples", "sample_bytes", "scatter_samples", "stack_samples"]


def stack_samples(values: Sequence[Any], n: int) -> npt.NDArray[Any]:
    """[n, ...] where all values are numbers or arrays of numbers of one shape; else dtype object [n]."""
    values = values[:n]
    arrays = [np.asarray(value) if _is_numeric(value) else None for value in values]
    shapes = {None if array is None or array.dtype.kind not in "iubf" else array.shape for array in arrays}
    if len(shapes) == 1 and None not in shapes:
        return np.stack([array for array in arrays if array is not None])
    return _objects(values)


def _is_numeric(value: Any) -> bool:
    # A torch tensor has __array__ too; a list may be ragged, and str has neither.
    return isinstance(value, (bool, int, float, np.generic, np.ndarray)) or hasattr(value, "__array__") or _flat(value)


def _flat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float)) for item in value)


def _objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    found = np.empty(len(values), object)
    for index, value in enumerate(values):
        found[index] = value
    return found


def scatter_samples(values: npt.NDArray[Any], rows: npt.NDArray[np.int64], n: int) -> npt.NDArray[Any]:
    """Put `values` at `rows` of an array of n records; the others are 0 or None."""
    found: npt.NDArray[Any] = np.zeros((n, *values.shape[1:]), values.dtype)
    if values.dtype == object:
        found = np.full((n, *values.shape[1:]), None, object)
    found[rows] = values
    return found


def join_samples(blocks: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One after another; dtype object where shapes or kinds differ. None alone, of dropped records, is of any kind."""
    filled = [block for block in blocks if len(block)]
    if not filled:
        return blocks[0] if blocks else np.empty(0, object)
    kept = [block for block in filled if not _is_blank(block)]
    if kept and len(kept) < len(filled) and kept[0].dtype != object:
        blank = kept[0]
        filled = [np.zeros((len(b), *blank.shape[1:]), blank.dtype) if _is_blank(b) else b for b in filled]
    same = len({block.shape[1:] for block in filled}) == 1
    if same and len({block.dtype == object for block in filled}) == 1:
        return filled[0] if len(filled) == 1 else np.concatenate(filled)
    return _objects([value for block in filled for value in block])


def _is_blank(block: npt.NDArray[Any]) -> bool:
    return block.dtype == object and all(value is None for value in block)


def sample_bytes(values: npt.NDArray[Any]) -> int:
    """What the array holds, about."""
    if values.dtype != object:
        return int(values.nbytes)
    return int(values.nbytes) + sum(getattr(value, "nbytes", None) or sys.getsizeof(value) for value in values)
