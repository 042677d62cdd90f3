"""Values of MDS columns, by the name of their encoding. Encoded images stay bytes; pixels become arrays."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

__all__ = ["Decoder", "column_decoder", "known_encodings", "raw_image", "split_blobs"]

Decoder = Callable[[memoryview], Any]
"""The bytes of a value -> the value, which holds none of them. Raises ValueError where they are damaged."""

_ARRAY_DTYPES: Final = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_PIXELS: Final = {
    "L": ("uint8", 1),
    "P": ("uint8", 1),
    "LA": ("uint8", 2),
    "RGB": ("uint8", 3),
    "YCbCr": ("uint8", 3),
    "HSV": ("uint8", 3),
    "LAB": ("uint8", 3),
    "RGBA": ("uint8", 4),
    "CMYK": ("uint8", 4),
    "I": ("int32", 1),
    "F": ("float32", 1),
    "I;16": ("uint16", 1),
}


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _scalar(dtype: np.dtype[Any]) -> Decoder:
    def decode(data: memoryview) -> Any:
        if len(data) != dtype.itemsize:
            raise ValueError(f"has {len(data)} bytes where a {dtype} has {dtype.itemsize}")
        return np.frombuffer(data, dtype)[0].item()

    return decode


def _array(dtype: str | None, shape: tuple[int, ...] | None) -> Decoder:
    """Up to two header parts that the encoding's name leaves open come first: dtype (1 byte), then the shape."""

    def decode(data: memoryview) -> Any:
        at = 0
        kind = dtype
        if kind is None:
            kind = _ARRAY_DTYPES.get(data[0]) if len(data) else None
            if kind is None:
                raise ValueError(f"begins with {bytes(data[:1])!r}, which is no code of a dtype")
            at = 1
        size = shape
        if size is None:
            num_axes, width = data[at] >> 2, 1 << (data[at] & 3)
            at += 1
            size = tuple(np.frombuffer(data[at : at + num_axes * width], f"<u{width}").tolist())
            at += num_axes * width
            if len(size) != num_axes:
                raise ValueError("ends within the shape of the array")
        return _shaped(data[at:], np.dtype(kind), size)

    return decode


def _shaped(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise ValueError(f"has {len(data)} bytes of values where {dtype} {list(shape)} has {size}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def raw_image(data: memoryview) -> Any:
    """An image stored as pixels: an array [height, width], or [height, width, channels].

    Args:
        data: Width, height and length of the mode's name, uint32 each, the name as `PIL.Image.Image.mode`, the pixels.

    Raises:
        ValueError: The mode is unknown, or there are more or fewer pixels.
    """
    if len(data) < 12:
        raise ValueError(f"has {len(data)} bytes, fewer than the header of an image")
    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    mode, pixels = bytes(data[12 : 12 + length]).decode("utf-8", "replace"), data[12 + length :]
    if mode == "1":
        bits = _shaped(pixels, np.dtype("uint8"), (height, (width + 7) // 8))
        return np.unpackbits(bits, axis=1)[:, :width].astype(np.bool_)
    if mode not in _PIXELS:
        raise ValueError(f"is an image of mode {mode!r}; {', '.join(_PIXELS)} and '1' can be read")
    dtype, channels = _PIXELS[mode]
    return _shaped(pixels, np.dtype(dtype), (height, width) if channels == 1 else (height, width, channels))


def split_blobs(data: memoryview) -> list[memoryview]:
    """Several values in one: their number and their sizes, uint32 each, then the values.

    Raises:
        ValueError: It is longer or shorter than the sizes say.
    """
    count = int.from_bytes(data[:4], "little")
    sizes = np.frombuffer(data[4 : 4 + 4 * count], "<u4").tolist() if len(data) >= 4 + 4 * count else []
    ends = list(accumulate(sizes, initial=4 + 4 * count))
    if len(data) < 4 or len(sizes) != count or ends[-1] != len(data):
        raise ValueError(f"has {len(data)} bytes, which is not what its {count} entries need")
    return [data[start:stop] for start, stop in pairwise(ends)]


def _blobs(data: memoryview) -> list[bytes]:
    return [bytes(blob) for blob in split_blobs(data)]


_PLAIN: Final[dict[str, Decoder]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": _text,
    "int": _scalar(np.dtype("int64")),
    "json": lambda data: json.loads(bytes(data)),
    "str_int": lambda data: int(_text(data)),
    "str_float": lambda data: float(_text(data)),
    "str_decimal": lambda data: Decimal(_text(data)),
    "pil": raw_image,
    "jpeg_array": _blobs,
    "jpegarray": _blobs,
    # Lists have four bytes before, kept for what may come.
    "list[jpeg]": lambda data: _blobs(data[4:]),
    "list[png]": lambda data: _blobs(data[4:]),
    "list[pil]": lambda data: [raw_image(blob) for blob in split_blobs(data[4:])],
    "ndarray": _array(None, None),
    **{name: _scalar(np.dtype(name)) for name in _ARRAY_DTYPES.values()},
}


def known_encodings() -> list[str]:
    """Names that `column_decoder` knows, for messages."""
    return sorted({*_PLAIN, "ndarray:dtype", "ndarray:dtype:shape", "pkl"})


def column_decoder(encoding: str) -> Decoder | None:
    """The decoder of an encoding such as `str`, `ndarray:int32` or `ndarray:int32:512,2`; None if it is unknown.

    `pkl` is decoded: whether that is allowed, the caller asks before.
    """
    if encoding == "pkl":
        return lambda data: pickle.loads(bytes(data))
    name, *details = encoding.split(":")
    if name != "ndarray" or not details:
        return _PLAIN.get(encoding)
    if details[0] not in _ARRAY_DTYPES.values() or len(details) > 2:
        return None
    try:
        shape = tuple(map(int, details[1].split(","))) if len(details) == 2 else None
    except ValueError:
        return None
    return _array(details[0], shape)
