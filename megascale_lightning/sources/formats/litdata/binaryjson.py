"""LitData's binary form of lists and mappings, the format `json` of a leaf."""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np

__all__ = ["decode_json"]

_JSON, _STRINGS, _INTS, _FLOATS, _BOOLS, _MAPPING, _RECORDS, _STRING, _INT, _FLOAT, _BOOL, _NONE = range(12)
_LAST_TAG: Final = 0x20
"""A first byte above is that of JSON text, which older writers left as it is."""
_FIELD_KINDS: Final = {0x10: _NONE, 0x11: _STRING, 0x12: _INT, 0x13: _FLOAT, 0x14: _BOOL}
"""Kinds of the fields of records -> of values."""


def decode_json(data: memoryview) -> Any:
    """The value of a leaf.

    Raises:
        ValueError: It is damaged.
    """
    if not len(data) or data[0] > _LAST_TAG:
        return json.loads(bytes(data))
    cursor = _Cursor(data)
    value = cursor.value(cursor.byte())
    if cursor.at != len(data):
        raise ValueError(f"has {len(data)} bytes, of which {cursor.at} are a value")
    return value


class _Cursor:
    """Reads front to back; a string is its length, uint32, and UTF-8."""

    def __init__(self, data: memoryview) -> None:
        self.at = 0
        self._data = data

    def take(self, size: int) -> memoryview:
        if self.at + size > len(self._data):
            raise ValueError(f"ends within a value, at byte {len(self._data)}")
        self.at += size
        return self._data[self.at - size : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def count(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def string(self) -> str:
        return str(self.take(self.count()), "utf-8")

    def value(self, tag: int) -> Any:
        """What follows the tag of a value."""
        if tag in (_STRING, _INT, _FLOAT, _BOOL, _NONE):
            return self.scalar(tag)
        size = self.count()
        if tag == _JSON:
            return json.loads(bytes(self.take(size)))
        if tag == _STRINGS:
            return [self.string() for _ in range(size)]
        if tag in (_INTS, _FLOATS):
            return np.frombuffer(self.take(8 * size), "<i8" if tag == _INTS else "<f8").tolist()
        if tag == _BOOLS:
            return [one != 0 for one in self.take(size)]
        if tag == _MAPPING:
            return {self.string(): self.value(self.byte()) for _ in range(size)}
        if tag == _RECORDS:
            names = [self.string() for _ in range(self.count())]
            return [{name: self._field() for name in names} for _ in range(size)]
        raise ValueError(f"has the unknown tag {tag} before byte {self.at}")

    def scalar(self, tag: int) -> Any:
        """What follows the tag of a scalar."""
        if tag == _STRING:
            return self.string()
        if tag == _NONE:
            return None
        form = {_INT: "<q", _FLOAT: "<d", _BOOL: "<?"}[tag]
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def _field(self) -> Any:
        kind = self.byte()
        if kind not in _FIELD_KINDS:
            raise ValueError(f"has a field of the unknown kind {kind} before byte {self.at}")
        return self.scalar(_FIELD_KINDS[kind])
