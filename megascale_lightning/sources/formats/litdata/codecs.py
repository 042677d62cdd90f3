"""Leaves of LitData items, by their `data_format`. Encoded media stay bytes; tensors and pixels become arrays."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from megascale_lightning.sources.formats.litdata.binaryjson import decode_json
from megascale_lightning.sources.formats.mds.codecs import raw_image, split_blobs

__all__ = ["Decoder", "known_formats", "leaf_decoder", "token_dtype"]

Decoder = Callable[[memoryview], Any]
"""The bytes of a leaf -> the value, which holds none of them. Raises ValueError where they are damaged."""

# bfloat16 is left out: numpy has none, and LitData cannot write it.
_TORCH_DTYPES: Final = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
_NUMPY_DTYPES: Final = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)
_AS_STORED: Final = ("bytes", "file", "jpeg", "image", "video", "audio", "tifffile", "nifti", "mesh", "pdf")


def _dtype(code: int, names: tuple[str, ...]) -> str:
    if code >= len(names) or not names[code]:
        raise ValueError(f"has the dtype code {code}, which is unknown")
    return names[code]


def _values(data: memoryview, dtype: str, shape: tuple[int, ...] | None) -> Any:
    kind = np.dtype(dtype)
    count = len(data) // kind.itemsize if shape is None else math.prod(shape)
    if count * kind.itemsize != len(data):
        raise ValueError(f"has {len(data)} bytes of values, and {dtype} {list(shape or (count,))} needs others")
    values = np.frombuffer(data, kind, count).copy()
    return values if shape is None else values.reshape(shape)


def _with_header(order: str, names: tuple[str, ...]) -> Decoder:
    """Dtype code, number of axes and sizes, uint32 each, then the values."""

    def decode(data: memoryview) -> Any:
        try:
            code, num_axes = struct.unpack_from(f"{order}II", data)
            shape = struct.unpack_from(f"{order}{num_axes}I", data, 8)
        except struct.error as error:
            raise ValueError(f"ends within the header of the array: {error}") from error
        return _values(data[8 + 4 * num_axes :], _dtype(code, names), shape)

    return decode


def _number(form: str) -> Decoder:
    def decode(data: memoryview) -> Any:
        if len(data) != struct.calcsize(form):
            raise ValueError(f"has {len(data)} bytes where a number has {struct.calcsize(form)}")
        return struct.unpack(form, data)[0]

    return decode


_PLAIN: Final[dict[str, Decoder]] = {
    "str": lambda data: str(data, "utf-8"),
    "text": lambda data: str(data, "utf-8"),
    "bool": _number("<?"),
    "int": _number("<q"),
    "float": _number("<d"),
    "tensor": _with_header(">", _TORCH_DTYPES),
    "numpy": _with_header("<", _NUMPY_DTYPES),
    "pil": raw_image,
    "jpeg_array": lambda data: [bytes(blob) for blob in split_blobs(data)],
    "json": decode_json,
    "pickle": lambda data: pickle.loads(bytes(data)),
    **dict.fromkeys(_AS_STORED, bytes),
}


def known_formats() -> list[str]:
    """Names that `leaf_decoder` knows, for messages."""
    return sorted({*_PLAIN, "no_header_numpy", "no_header_tensor"})


def leaf_decoder(name: str) -> Decoder | None:
    """The decoder of a `data_format` such as `int`, `image:png` or `no_header_tensor:17`; None if it is unknown.

    `pickle` is decoded: whether that is allowed, the caller asks before.
    """
    dtype = token_dtype(name)
    if dtype is not None:
        return lambda data: _values(data, dtype, None)
    return _PLAIN.get(name.split(":")[0])


def token_dtype(name: str) -> str | None:
    """The dtype of a `data_format` that is an array of one axis; None if it is another, or its code is unknown."""
    kind, _, code = name.partition(":")
    names = {"no_header_tensor": _TORCH_DTYPES, "no_header_numpy": _NUMPY_DTYPES}.get(kind)
    if names is None or not code.isdigit() or int(code) >= len(names):
        return None
    return names[int(code)] or None
