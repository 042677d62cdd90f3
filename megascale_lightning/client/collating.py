"""`CollatedRows` on the rank: samples go through the user's `collate_fn`, in the read-ahead thread."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.nn import Module
from torch.utils.data import default_collate

from megascale_lightning.client.describing import WindowInfos
from megascale_lightning.client.info import BatchInfo
from megascale_lightning.errors import ConfigError, DataError, StreamError
from megascale_lightning.runtime.pickling import dump
from megascale_lightning.sources.pickled import ByteCounter, TooLargeError
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import BatchWindow, Ragged

__all__ = ["MAX_PICKLED_BYTES", "CollateFn", "check_collate_fn", "collate"]

CollateFn = Callable[[list[Any]], Any]

MAX_PICKLED_BYTES: Final = 10_000_000
_DEPTH: Final = 3
_MANY: Final = 100
"""Items of a container that are looked at."""
_TIES: Final = ("trainer", "_trainer")
"""Attributes by which Lightning ties a DataModule to its trainer, and so to the model."""
_OWN_FUNCTION: Final = "move what it needs into a function of its own, or an object that holds nothing else"


def collate(
    window: BatchWindow, spec: StreamSpec, collate_fn: CollateFn | None, *, first_step: int | None = None
) -> Iterator[tuple[Any, BatchInfo]]:
    """Give the microbatches of a window one after another, each made when it is asked for.

    Args:
        window: Batches of one data-parallel group, of `CollatedRows`.
        spec: The stream.
        collate_fn: From the list of a microbatch's samples to its batch; None: torch's `default_collate`.
        first_step: Step to begin with, where it lies inside the window; None begins at its start.

    Returns:
        Per microbatch exactly what `collate_fn` returned, and its `BatchInfo`. Filler is collated, and described, only
        where a microbatch has no real sample: a last batch is short, as a DataLoader's is.

    Raises:
        StreamError: The window does not fit the rows of the stream.
        DataError: A sample cannot be unpickled here, or `collate_fn` fails; names step, microbatch and sample ids.
    """
    infos = WindowInfos(window, spec)
    if window.payload is None:
        raise StreamError("a window without samples: it was made for other rows than CollatedRows")
    size = spec.rows.micro_batch_size
    function = default_collate if collate_fn is None else collate_fn
    for index in infos.indices(first_step):
        info, rows = infos.short_info(index)
        samples = _samples(window.payload, index * size + rows, info)
        yield _collated(function, samples, info), info


def _samples(payload: Ragged, rows: npt.NDArray[np.int64], info: BatchInfo) -> list[Any]:
    bounds = zip(payload.offsets[rows].tolist(), payload.offsets[rows + 1].tolist(), strict=True)
    try:
        return [pickle.loads(payload.values[start:stop].data) for start, stop in bounds]
    except Exception as error:
        raise DataError(
            f"a sample of {_place(info)} cannot be unpickled on this rank: {type(error).__name__}: {error}; its class "
            "must be importable here as in the loaders' processes"
        ) from error


def _collated(collate_fn: CollateFn, samples: list[Any], info: BatchInfo) -> Any:
    try:
        return collate_fn(samples)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"collate_fn {_name(collate_fn)} failed on {_place(info)}: {type(error).__name__}: {error}"
        ) from error


def _place(info: BatchInfo) -> str:
    shown = ", ".join(
        f"{source!r} epoch {epoch} unit {unit} row {row}"
        for pieces in info.sample_ids()
        for source, epoch, unit, row, *_ in pieces
    )
    return f"step {info.step}, microbatch {info.microbatch}, samples [{shown or 'filler'}]"


def check_collate_fn(collate_fn: CollateFn | None) -> None:
    """Refuse a function that drags the model along, or a lot of memory; one that does not pickle is fine.

    Raises:
        ConfigError: It is bound to, closes over or holds a LightningModule or a module with parameters, or it is over
            10 MB pickled; names what does, and the ways out.
    """
    if collate_fn is None or _holds_nothing(collate_fn):
        return
    for path, value in _held(collate_fn, f"collate_fn {_name(collate_fn)}"):
        if _is_model(value):
            raise ConfigError(
                f"{path} is a {type(value).__name__}: a collate_fn runs in the read-ahead thread, beside the training "
                f"step that changes the model, and must not reach it; {_OWN_FUNCTION}"
            )
    # Tokenizers do not count: those of today's models alone are larger, and a collator needs one.
    limit = MAX_PICKLED_BYTES + sum(_size(value) for _, value in _held(collate_fn, "") if _is_tokenizer(value))
    if _too_large(_untied(collate_fn), limit):
        raise ConfigError(
            f"collate_fn {_name(collate_fn)} is larger than {MAX_PICKLED_BYTES / 1e6:.0f} MB pickled"
            f"{_largest(collate_fn)}; every rank would hold it: {_OWN_FUNCTION}, or load what is large from a file "
            "inside it, or let the source's transform do that work, which runs once in the loaders"
        )


def _holds_nothing(function: Any) -> bool:
    """Whether it is a plain function that closes over nothing."""
    return isinstance(function, FunctionType) and next(_parts(function), None) is None


def _is_model(value: Any) -> bool:
    if any(base.__name__ == "LightningModule" for base in type(value).__mro__):
        return True
    return isinstance(value, Module) and next(value.parameters(), None) is not None


def _is_tokenizer(value: Any) -> bool:
    return any(base.__name__ == "PreTrainedTokenizerBase" for base in type(value).__mro__)


def _held(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a callable reaches, with the way to it in words; as deep as `_DEPTH`."""
    seen: set[int] = set()
    level = [(name, function)]
    for _ in range(_DEPTH + 1):
        inner = []
        for path, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield path, value
            if not _is_model(value) and not _is_tokenizer(value):
                inner += [(f"{path}: its {part}", item) for part, item in _parts(value)]
        level = inner


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield "bound object", value.__self__
        yield "function", value.__func__
    elif isinstance(value, partial):
        yield "function", value.func
        yield from ((f"argument {index}", item) for index, item in enumerate(value.args))
        yield from ((f"argument {name!r}", item) for name, item in value.keywords.items())
    elif isinstance(value, FunctionType):
        yield from _closed_over(value)
        yield from ((f"default {index}", item) for index, item in enumerate(value.__defaults__ or ()))
        yield from ((f"default {name!r}", item) for name, item in (value.__kwdefaults__ or {}).items())
    elif isinstance(value, Mapping):
        yield from ((f"entry {name!r}", item) for name, item in list(value.items())[:_MANY])
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {index}", item) for index, item in enumerate(list(value)[:_MANY]))
    elif not isinstance(value, type):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"attribute {name!r}", item) for name, item in attributes.items() if name not in _TIES)


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name!r}", cell.cell_contents
        except ValueError:
            continue  # not assigned yet


def _untied(function: Any) -> Any:
    """What of a callable counts: of a DataModule's method all but the trainer."""
    owner = getattr(function, "__self__", None)
    attributes = getattr(owner, "__dict__", {})
    if not any(name in attributes for name in _TIES):
        return function
    return function.__func__, {name: value for name, value in attributes.items() if name not in _TIES}


def _too_large(value: Any, limit: int) -> bool:
    return _size(value, limit) > limit


def _size(value: Any, limit: int = sys.maxsize) -> int:
    """Bytes pickled, no more than just above `limit` of them counted; 0 if it does not pickle."""
    for write in (pickle.dump, dump):
        counter = ByteCounter(limit)
        try:
            write(value, counter)  # type: ignore[arg-type]
        except TooLargeError:
            return counter.size
        except Exception:
            continue  # what is defined in a function pickles by value alone, for which Ray has to be imported
        return counter.size
    return 0


def _largest(function: Any) -> str:
    """The innermost thing that holds more than half of what is allowed, for the message."""
    found = ""
    for path, value in _held(function, ""):
        if value is not function and not _is_tokenizer(value) and _too_large(value, MAX_PICKLED_BYTES // 2):
            found = f" ({path.removeprefix(': ')}, a {type(value).__name__})"
    return found


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return repr(getattr(function, "__qualname__", None) or type(function).__qualname__)
