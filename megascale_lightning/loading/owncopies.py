"""A record of its own for each call of the user's code, which may change it in place and may be called again."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["own_copy"]

_CHANGEABLE: Final = frozenset({dict, list, bytearray, np.ndarray})


def own_copy(value: Any) -> Any:
    """The value with dicts, lists and arrays of its own, as deep as these go; anything else is what it was."""
    kind = type(value)
    if kind is dict:
        return {name: own_copy(item) if type(item) in _CHANGEABLE else item for name, item in value.items()}
    if kind is list:
        if _CHANGEABLE.isdisjoint(map(type, value)):
            return value.copy()
        return [own_copy(item) for item in value]
    return value.copy() if kind in _CHANGEABLE else value
