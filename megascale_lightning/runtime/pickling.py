"""How values travel to the roles' processes."""

from __future__ import annotations

from typing import IO, Any

__all__ = ["dump"]


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickle a value the way Ray sends it to an actor: functions and classes of a script or notebook by value."""
    from ray import cloudpickle

    write: Any = cloudpickle.dump
    write(value, file)
