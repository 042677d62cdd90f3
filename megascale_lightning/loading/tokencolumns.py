"""Per-token values of many records as one array, whatever form the user's code gave them in."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.loading.batched import is_encoding
from megascale_lightning.sources.formats.arrowcolumns import column_rows, is_number_list, list_column
from megascale_lightning.types import Ragged

__all__ = ["token_column"]

_INT32: Final = np.iinfo(np.int32)


def token_column(field: str, column: Any) -> tuple[Ragged, dict[int, str]]:
    """The values of a per-token field, and what is wrong with records, which are empty then.

    Args:
        field: Its name.
        column: One sequence of numbers for each of n records: a list of lists, of arrays or of tokenizers' `Encoding`,
            an array of two dimensions, an Arrow array of lists.

    Returns:
        Values of n records, and index -> problem.
    """
    if hasattr(column, "null_count"):
        if is_number_list(column.type):
            return list_column(column)
        column = column_rows(column)
    if not isinstance(column, (list, tuple)):
        column = np.asarray(column)
        if column.ndim == 2 and column.dtype.kind in _kinds(field) and column.dtype != np.uint64:
            offsets = np.arange(len(column) + 1, dtype=np.int64) * column.shape[1]
            return Ragged(np.ascontiguousarray(column).reshape(-1), offsets), {}
    return _from_encodings(column) or _from_lists(column) or _one_by_one(field, column)


def _kinds(field: str) -> str:
    return "iu" if field == "input_ids" else "iubf"


def _from_encodings(column: Sequence[Any]) -> tuple[Ragged, dict[int, str]] | None:
    if not len(column) or not is_encoding(column[0]) or not all(map(is_encoding, column)):
        return None
    return _joined((encoding.ids for encoding in column), "I")


def _from_lists(column: Sequence[Any]) -> tuple[Ragged, dict[int, str]] | None:
    """Lists of whole numbers that fit int32, the usual case; None for all else."""
    for item in column:
        if type(item) is not list or (item and isinstance(item[0], (bool, np.bool_))):
            return None
    # Python takes numbers as "I" four times as fast as "i", which is for negative ones.
    return _joined(column, "I") or _joined(column, "i")


def _joined(lists: Iterable[list[Any]], code: str) -> tuple[Ragged, dict[int, str]] | None:
    """The lists one after another, taken by an `array` of this type code; None if that or int32 does not hold them."""
    taken = array(code)
    lengths = []
    try:
        for item in lists:
            taken.fromlist(item)
            lengths.append(len(item))
    except (TypeError, OverflowError):
        return None
    values = np.frombuffer(taken, code) if len(taken) else np.empty(0, code)
    if values.size and values.max() > _INT32.max:
        return None
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(values.view(np.int32), offsets), {}


def _one_by_one(field: str, column: Sequence[Any]) -> tuple[Ragged, dict[int, str]]:
    lengths = np.zeros(len(column), np.int64)
    bad: dict[int, str] = {}
    arrays = []
    for row, value in enumerate(column):
        array, problem = _array_of(field, value)
        if problem:
            bad[row] = problem
        if array is not None and array.size:
            lengths[row] = array.size
            arrays.append(array)
    values = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(values, offsets), bad


def _array_of(field: str, value: Any) -> tuple[npt.NDArray[Any] | None, str]:
    """The values of one record, or what is wrong with them."""
    if value is None:
        return None, "is null"
    try:
        array = np.asarray(value.ids if is_encoding(value) else value)
    except (TypeError, ValueError, OverflowError) as error:
        return None, f"is no array: {error}"
    if array.ndim != 1:
        return None, f"has shape {list(array.shape)}; a token field has one dimension"
    if array.size and array.dtype.kind not in _kinds(field):
        return None, f"holds {array.dtype}, not " + ("token ids" if field == "input_ids" else "numbers")
    if array.dtype == np.uint64 and array.size and array.max() > _INT32.max:
        return None, f"has the value {array.max()}, which does not fit int32"
    return array.astype(np.int64) if array.dtype == np.uint64 else array, ""
