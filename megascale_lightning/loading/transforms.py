"""Runs the user's code on samples so that a replay gives the same (law 9)."""

from __future__ import annotations

import errno
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from megascale_lightning.errors import DataError
from megascale_lightning.loading.reasons import FILTERED, READ_ERROR, TRANSFORM_ERROR
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.seeding import derive_generator, derive_seed
from megascale_lightning.sources.source import Source

__all__ = ["Failed", "SampleRunner", "takes_rng"]

_T = TypeVar("_T")

_GLOBAL_STATES = threading.RLock()
_ATTEMPTS: Final = 3
_TRANSIENT: Final = frozenset(
    {errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT}
    | {errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ESTALE}
)


@dataclass(frozen=True, slots=True)
class Failed:
    """A record without a sample."""

    reason: int
    """Code of `reasons`."""
    message: str = ""
    error: BaseException | None = None


class _Place(NamedTuple):
    source: str
    unit: int
    row: int

    def __str__(self) -> str:
        return f"source {self.source!r}, unit {self.unit}, row {self.row}"


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


def _is_keyword(transform: Callable[..., Any]) -> bool:
    parameter = inspect.signature(transform).parameters.get("rng")
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


class SampleRunner:
    """Turns the records of one source into samples.

    The user's code gets a `rng` derived from (seed, sample id) if it takes one. Otherwise the global states of random,
    numpy and (if loaded) torch are seeded from the same, under a lock, and restored afterwards; `thread_safe=True` is
    the promise that the code uses none of them. Safe to call from several threads.

    Args:
        source: Its `transform` is what runs.
        seed: Of the run.
        dicts_only: A sample must be a dict; else it may be anything, also a None that no transform made.
    """

    def __init__(self, source: Source, seed: int, *, dicts_only: bool = True) -> None:
        self._name = source.name
        self._seed = seed
        self._transform = source.transform
        self._takes_rng = source.transform is not None and takes_rng(source.transform)
        self._rng_by_name = self._takes_rng and source.transform is not None and _is_keyword(source.transform)
        self._thread_safe = source.thread_safe
        self._dicts_only = dicts_only

    @property
    def transform_name(self) -> str:
        """For messages: "transform 'tokenize'", or what stands in its place."""
        if self._transform is None:
            return "the data"
        named = getattr(self._transform, "func", self._transform)
        return f"transform {getattr(named, '__qualname__', type(named).__name__)!r}"

    def run(self, block: RecordBlock, epoch: int) -> list[Any]:
        """One sample or `Failed` per record; see `run_each`."""
        return self.run_each(block, range(block.num_rows), epoch, lambda _, sample: sample)

    def run_each(
        self, block: RecordBlock, indices: Iterable[int], epoch: int, keep: Callable[[int, Any], _T]
    ) -> list[_T]:
        """What `keep(index, sample)` makes of one sample or `Failed` per index, before the next one is made.

        Raises:
            DataError: The transform gave no dict where one is due, or a device failed more than once.
        """
        samples = block.samples()
        uses_globals = block.lazy or (self._transform is not None and not self._takes_rng)
        if not uses_globals or self._thread_safe:
            return [keep(index, self._one(block, samples, index, epoch)) for index in indices]
        found = []
        with _restored_states():
            for index in indices:
                loaded = _loaded_torch()
                self._seed_states(block.unit, block.row_start + index, epoch)
                sample = self._one(block, samples, index, epoch)
                if loaded is not _loaded_torch():
                    # The first call imported torch: it drew from an unseeded generator, a replay would not.
                    self._seed_states(block.unit, block.row_start + index, epoch)
                    sample = self._one(block, samples, index, epoch)
                found.append(keep(index, sample))
        return found

    def _seed_states(self, unit: int, row: int, epoch: int) -> None:
        seed = derive_seed("sample", self._seed, self._name, epoch, unit, row)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - what the user's code draws from
        torch = _loaded_torch()
        if torch is not None:
            torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)

    def _one(self, block: RecordBlock, samples: Any, index: int, epoch: int) -> Any:
        if index in block.failures:
            return Failed(READ_ERROR, block.failures[index])
        row = block.row_start + index
        place = _Place(self._name, block.unit, row)
        sample = _attempt(lambda: samples[index], READ_ERROR, "fetching it", place) if block.lazy else samples[index]
        if isinstance(sample, Failed):
            return sample
        if self._transform is not None:
            sample = _attempt(
                lambda: self._transformed(sample, block.unit, row, epoch), TRANSFORM_ERROR, self.transform_name, place
            )
        if sample is None and (self._dicts_only or self._transform is not None):
            return Failed(FILTERED)
        if self._dicts_only and not isinstance(sample, (Mapping, Failed)):
            raise DataError(self._no_dict(sample, block.unit, row))
        return sample

    def _transformed(self, sample: Any, unit: int, row: int, epoch: int) -> Any:
        assert self._transform is not None
        if not self._takes_rng:
            return self._transform(sample)
        rng = derive_generator("sample", self._seed, self._name, epoch, unit, row)
        return self._transform(sample, rng=rng) if self._rng_by_name else self._transform(sample, rng)

    def _no_dict(self, sample: Any, unit: int, row: int) -> str:
        what = self.transform_name if self._transform is not None else "the dataset"
        return (
            f"source {self._name!r}: {what} gave a {type(sample).__name__} for unit {unit}, row {row}; a sample is one "
            "dict with input_ids, or None to drop it"
        )


def _attempt(call: Callable[[], Any], reason: int, what: str, where: _Place) -> Any:
    """The call's value, or `Failed`; a failing device or network is tried again and then raised, never skipped."""
    for attempt in range(_ATTEMPTS):
        try:
            return call()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                return Failed(reason, f"{what} failed: {type(error).__name__}: {error}", error)
            if attempt == _ATTEMPTS - 1:
                raise DataError(f"{where}: {what} failed {_ATTEMPTS} times: {error}") from error
        except (Exception, SystemExit) as error:
            # `sys.exit()` in a library must not end the loader's process without a word.
            return Failed(reason, f"{what} failed: {type(error).__name__}: {error}", error)
    raise AssertionError("not reached")


def _loaded_torch() -> Any:
    """Torch if somebody imported it, whole."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


@contextmanager
def _restored_states() -> Iterator[None]:
    """Alone with the global random states, which are put back at the end."""
    with _GLOBAL_STATES:
        python, legacy, torch = random.getstate(), np.random.get_state(), _loaded_torch()  # noqa: NPY002
        bits = None if torch is None else torch.default_generator.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            if torch is not None:
                torch.default_generator.set_state(bits)
