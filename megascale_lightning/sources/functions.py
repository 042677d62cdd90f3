"""What the user's functions take and are called, found without calling them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megascale_lightning.errors import DataError, MegaScaleError

__all__ = ["call_data", "function_name", "rng_is_keyword", "takes_rng"]


def call_data(name: str, data: Callable[[], Any]) -> Any:
    """What the callable that source `name` has as its data returns.

    Raises:
        DataError: It failed; names the source.
    """
    try:
        return data()
    except (MegaScaleError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also an exit, or a panic of a library that is written in Rust
        raise DataError(
            f"source {name!r}: its callable {function_name(data)} failed: {type(error).__name__}: {error}"
        ) from error


def takes_rng(transform: Callable[..., Any]) -> bool:
    """Whether it has a parameter `rng`, or needs a second positional argument."""
    try:
        parameters = inspect.signature(transform).parameters
    except (TypeError, ValueError):
        return False
    positional = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return "rng" in parameters or len(positional) >= 2


def rng_is_keyword(transform: Callable[..., Any]) -> bool:
    """Of one that `takes_rng`: whether it is handed over by name."""
    parameter = inspect.signature(transform).parameters.get("rng")
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def function_name(function: Any) -> str:
    """For messages: the name of a function, that of what a `partial` wraps, or that of an object's class."""
    named = getattr(function, "func", function)
    return repr(getattr(named, "__qualname__", type(named).__name__))
