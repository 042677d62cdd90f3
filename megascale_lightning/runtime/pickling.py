"""How values travel to the roles' processes."""

from __future__ import annotations

import pickle
from typing import IO, Any

__all__ = ["dump", "dumps"]


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickle a value the way Ray sends it to an actor: functions and classes of a script or notebook by value."""
    from ray import cloudpickle

    write: Any = cloudpickle.dump
    write(value, file)


def dumps(value: Any) -> bytes:
    """Pickle a value for another process: as `dump` where it needs that, without importing Ray where it does not."""
    try:
        data = pickle.dumps(value)
        if b"__main__" not in data:
            return data
    except Exception:
        data = b""  # what is defined inside a function, for example
    from ray import cloudpickle

    write: Any = cloudpickle.dumps
    by_value: bytes = write(value)
    return by_value
