"""Arrow columns as numpy arrays, without copies where Arrow allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megascale_lightning.types import Ragged

__all__ = [
    "column_rows",
    "is_number_list",
    "list_column",
    "list_value_type",
    "scalar_column",
    "table_rows",
    "with_inner_types",
]

# pyarrow's stubs type every array class apart; what is read here is any of them.
_compute: Any = pc
_Array = Any
_Type = Any

_NUMPY_TYPES = {
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}

_FINEST_UNITS = {
    "timestamp[ns]": pa.timestamp("us"),
    "duration[ns]": pa.duration("us"),
    "time64[ns]": pa.time64("us"),
}


def is_number_list(kind: _Type) -> bool:
    """Whether it is a (large, fixed-size, view of a) list of integers, floats, booleans or nothing, however encoded."""
    value_type = list_value_type(kind)
    return value_type is not None and (_is_number(value_type) or bool(pa.types.is_null(value_type)))


def list_value_type(kind: _Type) -> _Type | None:
    """The type of a list's values, without their encoding; None for what is no list.

    The null type, of a column or of a list's values, stands where a file has nothing else: it is a list of nulls.
    """
    kind = _plain_type(kind)
    if pa.types.is_null(kind):
        return kind
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return _plain_type(kind.value_type) if is_list or _is_list_view(kind) else None


def _is_number(kind: _Type) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list_view(kind: _Type) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _plain_type(kind: _Type) -> _Type:
    """What an extension, dictionary or run-end encoded type stands for."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    return kind


def _plain(array: _Array) -> _Array:
    """The same values as an array of a `_plain_type`; a view of a list becomes a list."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(_compute.run_end_decode(array))
    return _from_view(array) if _is_list_view(kind) else array


def _from_view(array: _Array) -> _Array:
    lengths = _compute.fill_null(_compute.cast(_compute.list_value_length(array), pa.int64()), 0)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(_to_numpy(lengths), out=offsets[1:])
    mask = array.is_null() if array.null_count else None
    make: Any = pa.LargeListArray.from_arrays
    return make(pa.array(offsets), _compute.list_flatten(array), mask=mask)


def _one_chunk(column: _Array) -> _Array:
    """A ChunkedArray as one plain Array, copied only where it has several chunks or is encoded."""
    if not isinstance(column, pa.ChunkedArray):
        return _plain(column)
    if column.num_chunks == 1:
        return _plain(column.chunk(0))
    if column.num_chunks == 0:
        return pa.array([], _plain_type(column.type))
    # Decoded one by one: chunks may have dictionaries of their own, more than the index type can number together.
    return pa.concat_arrays([_plain(chunk) for chunk in column.chunks])


def list_column(column: _Array) -> tuple[Ragged, dict[int, str]]:
    """A column of number lists, and what is wrong with its records.

    A null record is empty, a null inside a record 0; both are reported. `values` may be read-only memory of Arrow's.

    Args:
        column: ChunkedArray or Array for which `is_number_list`.
    """
    array = _one_chunk(column)
    if pa.types.is_null(array.type):
        offsets = np.zeros(len(array) + 1, np.int64)
        return Ragged(np.empty(0, np.int32), offsets), dict.fromkeys(range(len(array)), "is null")
    bad = {int(row): "is null" for row in _null_positions(array)}
    values, offsets = _values_and_offsets(array)
    holes = _null_positions(values)
    if len(holes):
        for row in np.unique(np.searchsorted(offsets, holes, side="right") - 1).tolist():
            bad.setdefault(row, "has a null among its values")
        values = _filled(values)
    return Ragged(_to_numpy(values), offsets), bad


def _values_and_offsets(array: _Array) -> tuple[_Array, npt.NDArray[np.int64]]:
    """The values of exactly these records, and where each begins; `.values` ignores slicing, hence the care."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return _plain(values), np.arange(len(array) + 1, dtype=np.int64) * size
    offsets = _to_numpy(array.offsets).astype(np.int64)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    if not len(offsets):
        offsets = np.zeros(1, np.int64)
    return _plain(array.values.slice(first, last - first)), offsets - first


def scalar_column(column: _Array) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """A column of one value per record: a numeric array [n], or dtype object; nulls are reported."""
    array = _one_chunk(column)
    bad = {int(row): "is null" for row in _null_positions(array)}
    if _is_number(array.type):
        return _to_numpy(_filled(array) if bad else array), bad
    found = np.empty(len(array), object)
    for row, value in enumerate(_python_values(array)):  # one by one: lists of one length would become a second axis
        found[row] = value
    return found, bad


def _filled(array: _Array) -> _Array:
    """Zero for null; int32 for the null type."""
    if pa.types.is_null(array.type):
        array = _compute.cast(array, pa.int32())
    return _compute.fill_null(array, False if pa.types.is_boolean(array.type) else 0)


def _null_positions(array: _Array) -> npt.NDArray[np.int64]:
    if not array.null_count:
        return np.empty(0, np.int64)
    return np.flatnonzero(_to_numpy(array.is_null()))


def _to_numpy(array: _Array) -> npt.NDArray[Any]:
    """Numbers without nulls as a view of Arrow's memory. `Array.to_numpy` would import pandas where it is installed."""
    if pa.types.is_boolean(array.type):
        return _to_numpy(_compute.cast(array, pa.uint8())).view(np.bool_)
    if pa.types.is_null(array.type):
        return np.empty(0, np.int32)
    dtype = np.dtype(_NUMPY_TYPES[str(array.type)])
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def table_rows(table: pa.Table) -> Sequence[dict[str, Any]]:
    """One dict per record: a writable numpy array for a list of numbers, python objects for the rest, None for null.

    Times are objects of `datetime`, which knows microseconds: what is finer is cut off.
    """
    columns = [column_rows(table.column(index)) for index in range(table.num_columns)]
    names = table.column_names
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def column_rows(column: _Array) -> list[Any]:
    """One value per record: a writable numpy array for a list of numbers, a python object otherwise, None for null."""
    if pa.types.is_null(_plain_type(column.type)):
        return [None] * len(column)
    if not is_number_list(column.type):
        return _python_values(column)
    column = _one_chunk(column)
    ragged, bad = list_column(column)
    values = ragged.values if ragged.values.flags.writeable else ragged.values.copy()
    bounds = ragged.offsets.tolist()
    rows: list[Any] = [values[start:stop] for start, stop in pairwise(bounds)]
    for row in bad:
        rows[row] = column[row].as_py()
    return rows


def _python_values(column: _Array) -> list[Any]:
    """As `to_pylist`, which for nanoseconds would give objects of pandas, or an error where that is not installed."""
    kind = _with_microseconds(column.type)
    return list((column if kind == column.type else column.cast(kind, safe=False)).to_pylist())


def _with_microseconds(kind: _Type) -> _Type:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz) if kind.unit == "ns" else kind
    if str(kind) in _FINEST_UNITS:
        return _FINEST_UNITS[str(kind)]
    if pa.types.is_dictionary(kind):
        inner = _with_microseconds(kind.value_type)
        return kind if inner == kind.value_type else inner
    return with_inner_types(kind, _with_microseconds)


def with_inner_types(kind: _Type, change: Callable[[_Type], _Type]) -> _Type:
    """A struct, a map or a list of what `change` makes of the types inside; any other type as it is."""
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(change(field.type)) for field in fields])
    if pa.types.is_map(kind):
        return pa.map_(change(kind.key_type), change(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(change(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)), kind.list_size)
    return kind
