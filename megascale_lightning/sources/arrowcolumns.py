"""Arrow columns as numpy arrays, without copies where Arrow allows it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megascale_lightning.types import Ragged

__all__ = ["is_number_list", "list_column", "scalar_column", "table_rows"]

# pyarrow's stubs type every array class apart; what is read here is any of them.
_Array = Any
_Type = Any

_NUMPY_TYPES = {
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}


def is_number_list(kind: _Type) -> bool:
    """Whether it is a (large, fixed-size) list of integers, floats or booleans."""
    kind = _storage_type(kind)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_number(kind: _Type) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _storage_type(kind: _Type) -> _Type:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _one_chunk(column: _Array) -> _Array:
    """A ChunkedArray as one Array, copied only where it has several chunks."""
    array = column
    if isinstance(column, pa.ChunkedArray):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def list_column(column: _Array) -> tuple[Ragged, dict[int, str]]:
    """A column of number lists, and what is wrong with its records.

    A null record is empty, a null inside a record 0; both are reported. `values` may be read-only memory of Arrow's.

    Args:
        column: ChunkedArray or Array for which `is_number_list`.
    """
    array = _one_chunk(column)
    bad = {int(row): "is null" for row in _null_positions(array)}
    values, offsets = _values_and_offsets(array)
    holes = _null_positions(values)
    if len(holes):
        for row in np.unique(np.searchsorted(offsets, holes, side="right") - 1).tolist():
            bad.setdefault(row, "has a null among its values")
        values = pc.fill_null(values, False if pa.types.is_boolean(values.type) else 0)
    return Ragged(_to_numpy(values), offsets), bad


def _values_and_offsets(array: _Array) -> tuple[_Array, npt.NDArray[np.int64]]:
    """The values of exactly these records, and where each begins; `.values` ignores slicing, hence the care."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return values, np.arange(len(array) + 1, dtype=np.int64) * size
    offsets = _to_numpy(array.offsets).astype(np.int64)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    if not len(offsets):
        offsets = np.zeros(1, np.int64)
    return array.values.slice(first, last - first), offsets - first


def scalar_column(column: _Array) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """A column of one value per record: a numeric array [n], or dtype object; nulls are reported."""
    array = _one_chunk(column)
    bad = {int(row): "is null" for row in _null_positions(array)}
    if _is_number(array.type):
        if bad:
            array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
        return _to_numpy(array), bad
    found = np.empty(len(array), object)
    found[:] = array.to_pylist()
    return found, bad


def _null_positions(array: _Array) -> npt.NDArray[np.int64]:
    if not array.null_count:
        return np.empty(0, np.int64)
    return np.flatnonzero(_to_numpy(array.is_null()))


def _to_numpy(array: _Array) -> npt.NDArray[Any]:
    """Numbers without nulls as a view of Arrow's memory. `Array.to_numpy` would import pandas where it is installed."""
    if pa.types.is_boolean(array.type):
        return _to_numpy(pc.cast(array, pa.uint8())).view(np.bool_)
    dtype = np.dtype(_NUMPY_TYPES[str(array.type)])
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def table_rows(table: pa.Table) -> Sequence[dict[str, Any]]:
    """One dict per record: a writable numpy array for a list of numbers, python objects for the rest, None for null."""
    columns = [_column_rows(table.column(index)) for index in range(table.num_columns)]
    names = table.column_names
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _column_rows(column: _Array) -> list[Any]:
    if not is_number_list(column.type):
        return list(column.to_pylist())
    ragged, bad = list_column(column)
    values = ragged.values if ragged.values.flags.writeable else ragged.values.copy()
    bounds = ragged.offsets.tolist()
    rows: list[Any] = [values[start:stop] for start, stop in pairwise(bounds)]
    for row in bad:
        rows[row] = column[row].as_py()
    return rows
