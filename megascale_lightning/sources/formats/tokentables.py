"""Token ids in binary files as a list column, not copied unless they lie askew."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["token_lists"]


def token_lists(buffer: Any, dtype: npt.DTypeLike, offsets: npt.NDArray[np.int64]) -> Any:
    """A large_list array whose values are the memory of `buffer`.

    Args:
        buffer: `pyarrow.Buffer` that begins with the first value; no shorter than `offsets[-1]` values.
        dtype: Of the values: integers or floats of this machine's byte order.
        offsets: int64 [n + 1], in values, from 0: where the records begin.
    """
    if buffer.address % np.dtype(dtype).itemsize:
        buffer = pa.py_buffer(buffer.to_pybytes())
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    values: Any = pa.Array.from_buffers(kind, int(offsets[-1]), [None, buffer])
    return pa.LargeListArray.from_arrays(cast("Any", pa.array(offsets)), values)
