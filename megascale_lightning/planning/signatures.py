"""`signature`: a cost as text that is the same in another process, so that a checkpoint can name it."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import isfunction
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError

__all__ = ["signature"]

_PLAIN: Final = (bool, int, float, str, type(None))


def signature(what: str, value: Any) -> str:
    """Describe a cost, or what one is made of.

    Of a dataclass it is what was set: fields that have their default are left out, so that a later version may add
    some. Functions are known by their path, not by what they do.

    Args:
        what: The declaration that it belongs to, for the error.
        value: A dataclass, a function of a module, a plain value, or a tuple of such.

    Raises:
        ConfigError: It could not be recognised: a lambda, a function inside another, an object of some other kind.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(signature(what, one) for one in value)})"
    if is_dataclass(value) and not isinstance(value, type):
        given = [f"{field.name}={signature(what, getattr(value, field.name))}" for field in _set(what, value)]
        return f"{_path(what, type(value), value)}({', '.join(given)})"
    if isfunction(value) or isinstance(value, np.ufunc):
        return _path(what, value, value)
    raise _refused(what, value)


def _set(what: str, value: Any) -> list[Field[Any]]:
    """The fields of a dataclass that do not have their default."""
    return [
        field
        for field in fields(value)
        if field.compare
        and not (
            field.default is not MISSING
            and signature(what, getattr(value, field.name)) == signature(what, field.default)
        )
    ]


def _path(what: str, named: Any, value: Any) -> str:
    """Where a function or a class is found; those of this package may move inside it."""
    name = getattr(named, "__qualname__", getattr(named, "__name__", "<"))
    if "<" in name:
        raise _refused(what, value)
    module = getattr(named, "__module__", None) or "numpy"
    return name if module.partition(".")[0] == __name__.partition(".")[0] else f"{module}.{name}"


def _refused(what: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{what}: {value!r} cannot be recognised when a checkpoint is resumed, and the order of samples depends on it: "
        "take a dataclass such as TransformerCost(...), or a function that is defined at the top of a module"
    )
