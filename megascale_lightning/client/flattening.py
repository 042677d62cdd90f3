"""A window as one flat buffer and back: its arrays byte for byte, and whatever is no array pickled before them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Flattener", "Structure", "Unflattener", "fill", "size_of"]

Structure: TypeAlias = list[tuple[np.dtype[Any], tuple[int, ...]]]
"""Of each array its dtype, and its shape without the first dimension."""

_ALIGN: Final = 64


class Flattener:
    """Turns values, one after another, into flat buffers.

    These are the parts of a buffer; each begins at a multiple of 64 bytes.

    1. int64 [arrays]: the length of each array's first dimension;
    2. the structure, pickled: only where it is another than that of the value before;
    3. the value, pickled, with a number in the place of each array: strings, counts and states, and what an array
       cannot hold as plain bytes (columns of Python objects);
    4. the bytes of each array, in the order of their numbers.
    """

    def __init__(self) -> None:
        self._known: Structure | None = None

    def flatten(self, value: Any) -> tuple[list[npt.NDArray[Any]], tuple[int, int, int]]:
        """Take a value apart.

        Returns:
            The parts, to be written by `fill`; arrays are not copied. And what `Unflattener.restore` wants to know:
            the number of arrays, and the bytes of parts 2 and 3.
        """
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        arrays = pickler.arrays
        structure: Structure = [(array.dtype, array.shape[1:]) for array in arrays]
        told = b"" if structure == self._known else pickle.dumps(structure, protocol=5)
        self._known = structure
        lengths = np.array([len(array) for array in arrays], np.int64)
        rest = file.getbuffer()
        parts: list[npt.NDArray[Any]] = [lengths, np.frombuffer(told, np.uint8), np.frombuffer(rest, np.uint8), *arrays]
        return parts, (len(arrays), len(told), rest.nbytes)


class Unflattener:
    """The other side of a `Flattener`: it gets all its buffers, in the same order."""

    def __init__(self) -> None:
        self._known: Structure = []

    def restore(self, buffer: npt.NDArray[np.uint8], sizes: tuple[int, int, int]) -> Any:
        """Put a value together. Its arrays lie in the buffer, and keep it in memory.

        Args:
            buffer: uint8 [bytes].
            sizes: What `Flattener.flatten` returned beside the parts.
        """
        num_arrays, told_bytes, rest_bytes = sizes
        lengths: npt.NDArray[Any] = buffer[: 8 * num_arrays].view(np.int64)
        at = _aligned(8 * num_arrays)
        if told_bytes:
            self._known = pickle.loads(buffer[at : at + told_bytes].data)
        at = _aligned(at + told_bytes)
        rest, at = buffer[at : at + rest_bytes].data, _aligned(at + rest_bytes)
        arrays = []
        for length, (dtype, shape) in zip(lengths.tolist(), self._known, strict=True):
            count = int(np.prod(shape, dtype=np.int64)) * length
            stop = at + count * dtype.itemsize
            arrays.append(buffer[at:stop].view(dtype).reshape(length, *shape))
            at = _aligned(stop)
        return _Unpickler(io.BytesIO(rest), arrays).load()


def size_of(parts: Sequence[npt.NDArray[Any]]) -> int:
    """Bytes of the buffer that parts need."""
    return sum(_aligned(part.nbytes) for part in parts)


def fill(buffer: npt.NDArray[np.uint8], parts: Sequence[npt.NDArray[Any]]) -> None:
    """Write parts into a buffer of `size_of(parts)` bytes."""
    at = 0
    for part in parts:
        buffer[at : at + part.nbytes].view(part.dtype).reshape(part.shape)[...] = part
        at += _aligned(part.nbytes)


def _aligned(position: int) -> int:
    return -(-position // _ALIGN) * _ALIGN


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[npt.NDArray[Any]] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not np.ndarray:
            return None
        if value.dtype.hasobject or not value.dtype.itemsize or not value.ndim:
            # As a whole: what lies in a column of objects is small, and would be an array of its own each.
            return pickle.dumps(value, protocol=5)
        number = self._numbers.setdefault(id(value), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Sequence[npt.NDArray[Any]]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, number: Any) -> Any:
        return pickle.loads(number) if isinstance(number, bytes) else self._arrays[number]
