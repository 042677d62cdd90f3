"""Whether a value can be sent to another process, and at what price, found without keeping its pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ByteCounter", "TooLargeError", "pickling_problem"]


class TooLargeError(Exception):
    """The pickle is larger than allowed."""


class ByteCounter:
    """A file that keeps nothing of what is written to it but the size.

    Args:
        limit: Bytes it takes; more raise `TooLargeError`.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        """Bytes written."""
        self._limit = limit

    def write(self, data: Any) -> int:
        """Count it."""
        size = memoryview(data).nbytes
        self.size += size
        if self.size > self._limit:
            raise TooLargeError
        return size


def pickling_problem(value: Any, dump: Callable[[Any, Any], None], limit: int) -> str | None:
    """What is wrong with the pickle of a value, to be read behind its name; None if nothing is.

    Args:
        value: Anything.
        dump: `dump(object, file)`, such as `pickle.dump`.
        limit: Bytes it may have.
    """
    try:
        dump(value, ByteCounter(limit))
    except TooLargeError:
        return f"is larger than {limit / 1e6:.0f} MB pickled"
    except Exception as error:
        return f"does not pickle ({type(error).__name__}: {error})"
    return None
