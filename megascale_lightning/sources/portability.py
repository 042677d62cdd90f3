"""Whether the user's code can be sent to another process, found before any is started."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.functions import function_name
from megascale_lightning.sources.pickled import ByteCounter, TooLargeError
from megascale_lightning.sources.source import Source

__all__ = ["MAX_PICKLED_BYTES", "check_code"]

MAX_PICKLED_BYTES: Final = 100_000_000
_DEPTH: Final = 6
_MANY: Final = 1000
"""Items of a container that are looked at for a name of what is wrong."""
_SETTINGS: Final = ("transform", "transform_batched", "length")

_WAYS_OUT: Final = "make it where it is used, for example in a cached function"


def check_code(source: Source, dump: Callable[[Any, Any], None], *, elsewhere: bool) -> None:
    """Refuse functions of a source that another process could not use.

    Args:
        source: What the user declared.
        dump: `dump(object, file)`: how it will be pickled. Asked only where a look at what a function holds finds
            something wrong: it may be dear to call.
        elsewhere: The roles run in other processes.

    Raises:
        ConfigError: A function does not pickle, is over 100 MB pickled, or is of a module that cannot be imported in
            another process; names source, setting and object, what of it is at fault, and the ways out.
    """
    if not elsewhere and source.executor != "processes":
        return
    for setting in _SETTINGS:
        function = getattr(source, setting)
        problem = _problem(function, dump) if callable(function) else None
        if problem:
            other = "" if source.executor != "processes" else ", and executor='inline'"
            raise ConfigError(
                f"source {source.name!r}: {setting} {function_name(function)} has to run in another process, and "
                f"{problem}, or set runtime='local'{other}"
            )


def _problem(function: Any, dump: Callable[[Any, Any], None]) -> str | None:
    try:
        _look(function)
        return None
    except _NotImportableError as error:
        return str(error)
    except Exception as error:
        path, culprit, why = _culprit(function, error)
    # Ray's pickle can do more than a look; of an open file it would send what it holds now.
    if not isinstance(culprit, io.IOBase):
        with suppress(Exception):
            dump(function, ByteCounter(MAX_PICKLED_BYTES))
            return None
    if isinstance(why, TooLargeError):
        size = f"{MAX_PICKLED_BYTES / 1e6:.0f} MB"
        where = path and f" ({path})"
        return f"it is larger than {size} pickled{where}: load what is large where it is used, from a file"
    shown = f"{path}, a {type(culprit).__name__}," if path else "it"
    return f"{shown} does not pickle ({type(why).__name__}: {why}): {_WAYS_OUT}"


def _culprit(value: Any, why: Exception) -> tuple[str, Any, Exception]:
    """The innermost thing for which a value does not pickle, with the way to it in words."""
    path = ""
    for _ in range(_DEPTH):
        for name, part in _parts(value):
            try:
                _look(part, MAX_PICKLED_BYTES // 2 if isinstance(why, TooLargeError) else MAX_PICKLED_BYTES)
            except _NotImportableError:
                continue
            except Exception as error:
                path, value, why = f"{path} > {name}" if path else f"its {name}", part, error
                break
        else:
            break
    return path, value, why


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield "object", value.__self__
    elif isinstance(value, partial):
        yield "function", value.func
        yield from ((f"argument {index}", item) for index, item in enumerate(value.args))
        yield from ((f"argument {name!r}", item) for name, item in value.keywords.items())
    elif isinstance(value, FunctionType):
        if not _is_by_name(value):
            yield from _parts_of_function(value)
    elif isinstance(value, Mapping):
        yield from ((f"entry {name!r}", item) for name, item in list(value.items())[:_MANY])
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {index}", item) for index, item in enumerate(list(value)[:_MANY]))
    elif isinstance(value, type):
        if not _is_by_name(value):
            yield from _parts_of_class(value)
    else:
        yield from ((f"attribute {name!r}", item) for name, item in getattr(value, "__dict__", {}).items())
        yield "class", type(value)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name!r}", cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    yield from ((f"default {index}", item) for index, item in enumerate(function.__defaults__ or ()))
    yield from ((f"default {name!r}", item) for name, item in (function.__kwdefaults__ or {}).items())
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield f"global {name!r}", function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Names that code reads, globals among them."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    yield from ((f"base {base.__name__}", base) for base in kind.__bases__)
    for name, item in vars(kind).items():
        if isinstance(item, (staticmethod, classmethod)):
            item = item.__func__
        elif isinstance(item, property):
            item = [part for part in (item.fget, item.fset, item.fdel) if part is not None]
        is_descriptor = hasattr(type(item), "__get__")  # slots and the like, which Python makes anew
        if isinstance(item, (FunctionType, list)) or not (name.startswith("__") or is_descriptor):
            yield f"attribute {name!r}", item


class _NotImportableError(Exception):
    """Something is found by name, and its module cannot be imported elsewhere."""


def _look(value: Any, limit: int = MAX_PICKLED_BYTES) -> None:
    """Raise why a value cannot travel."""
    pickler: Any = _Looking(ByteCounter(limit), 5)
    pickler.dump(value)


class _Looking(pickle.Pickler):
    """Pickles as cloudpickle would, for no use but to see whether that works: the script's own definitions by value."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        """How `value` is taken apart; NotImplemented: as always."""
        if isinstance(value, ModuleType):
            _check_importable(value.__name__, f"module {value.__name__!r}")
            return _nothing, ()
        if not isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            return NotImplemented
        if _is_by_name(value):
            _check_importable(value.__module__, f"{function_name(value)} of module {value.__module__!r}")
            return NotImplemented
        if isinstance(value, BuiltinFunctionType) or id(value) in self._seen:
            return NotImplemented if isinstance(value, BuiltinFunctionType) else (_nothing, ())
        self._seen.add(id(value))
        parts = _parts_of_function(value) if isinstance(value, FunctionType) else _parts_of_class(value)
        return _nothing, (dict(parts),)


def _nothing(*_: Any) -> None:
    """Stands for what travels by value."""


def _is_by_name(value: Any) -> bool:
    """Whether a pickle holds but the names of module and object: it is to be found there."""
    module = getattr(value, "__module__", None)
    if module in (None, "__main__") or module not in sys.modules:
        return module is None
    found: Any = sys.modules[module]
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _check_importable(module: str, what: str) -> None:
    if module != "__main__" and not _can_be_found(module.partition(".")[0]):
        raise _NotImportableError(
            f"{what} cannot be imported there: the module was made in this process, and is no file on sys.path; move "
            "the code to a file beside the script"
        )


@lru_cache(maxsize=1024)
def _can_be_found(module: str) -> bool:
    """Whether a top-level module could be imported if it were not loaded yet."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and find(module, None) is not None:
            return True
    return False
