"""Arrays as text: base64 of their compressed bytes, for what would be long as lists of numbers."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import StateError

__all__ = ["pack_array", "pack_records", "unpack_array", "unpack_records"]


def pack_array(values: npt.NDArray[Any]) -> str:
    """The values of an array, without its shape and dtype."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode("ascii")


def unpack_array(text: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The flat array of a text. Raises: StateError: it is damaged."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype).copy()
    except (binascii.Error, zlib.error, ValueError, TypeError) as error:
        raise StateError(f"the loader state is incomplete or damaged: packed numbers do not unpack: {error}") from error


def pack_records(records: npt.NDArray[Any]) -> str:
    """A structured array, field after field: equal fields of neighbours compress best side by side."""
    names = records.dtype.names or ()
    content = b"".join(np.ascontiguousarray(records[name]).tobytes() for name in names)
    return pack_array(np.frombuffer(content, np.uint8))


def unpack_records(text: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """The structured array of a text. Raises: StateError: it is damaged, or of another number of records."""
    content = unpack_array(text, np.uint8)
    if len(content) != count * dtype.itemsize:
        raise StateError(
            f"the loader state is incomplete or damaged: {count} records take {count * dtype.itemsize} bytes, not "
            f"{len(content)}"
        )
    records = np.zeros(count, dtype)
    at = 0
    for name in dtype.names or ():
        stop = at + count * dtype[name].itemsize
        records[name] = content[at:stop].view(dtype[name])
        at = stop
    return records
