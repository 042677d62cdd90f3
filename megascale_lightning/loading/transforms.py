"""Runs the user's code on samples so that a replay gives the same (law 9)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from megascale_lightning.errors import DataError
from megascale_lightning.loading.owncopies import own_copy
from megascale_lightning.loading.reasons import FILTERED, READ_ERROR, TRANSFORM_ERROR, UNPAIRED
from megascale_lightning.sources.formats.arrowcolumns import column_rows, table_rows
from megascale_lightning.sources.functions import function_name, rng_is_keyword, takes_rng
from megascale_lightning.sources.globalstates import lent_states, seeded
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.seeding import derive_generator, derive_seed
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.retry import is_transient

__all__ = [
    "UNREADABLE",
    "Failed",
    "Place",
    "RemoteError",
    "SampleRunner",
    "attempt",
    "failure_of",
    "records_of",
    "retried",
    "show_call",
    "takes_rng",
    "unreadable_rows",
]

_T = TypeVar("_T")

_ATTEMPTS: Final = 3

UNREADABLE: Final = (ValueError, OverflowError, pa.ArrowException)
"""What Arrow raises for a value that it cannot make a python object of."""

_OF_RECORDS: Final = (UnicodeDecodeError, OverflowError)
"""Those of them that the stored value alone is to blame for."""


class RemoteError(Exception):
    """An exception of another process, as the text of its traceback: it may not pickle, or be unknown here."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A record without a sample. Pickled, its error is a `RemoteError`."""

    reason: int
    """Code of `reasons`."""
    message: str = ""
    error: BaseException | None = None

    def __reduce__(self) -> Any:
        error = self.error
        if error is not None and not isinstance(error, RemoteError):
            error = RemoteError("".join(traceback.format_exception(error)))
        return Failed, (self.reason, self.message, error)


def failure_of(block: RecordBlock, index: int) -> Failed:
    """What is wrong with a failed record of a block."""
    return Failed(UNPAIRED if index in block.unpaired else READ_ERROR, block.failures[index])


class Place(NamedTuple):
    """Where a record is, for messages."""

    source: str
    unit: int
    row: int

    def __str__(self) -> str:
        return f"source {self.source!r}, unit {self.unit}, row {self.row}"


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
        self._rng_by_name = self._takes_rng and source.transform is not None and rng_is_keyword(source.transform)
        self._called = source.transform or source.transform_batched
        self._thread_safe = source.thread_safe
        self._dicts_only = dicts_only

    @property
    def transform_name(self) -> str:
        """For messages: "transform 'tokenize'", or what stands in its place."""
        return "the data" if self._called is None else f"transform {function_name(self._called)}"

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
        samples, unreadable = records_of(block)
        block = replace(block, failures={**unreadable, **block.failures}) if unreadable else block
        uses_globals = block.lazy or (self._transform is not None and not self._takes_rng)
        if not uses_globals or self._thread_safe:
            return [
                keep(index, retried(partial(self._one, block, samples, index, epoch), self._place(block, index)))
                for index in indices
            ]
        found = []
        with lent_states():
            for index in indices:
                seed = derive_seed("sample", self._seed, self._name, epoch, block.unit, block.row_start + index)
                once = partial(seeded, seed, partial(self._one, block, samples, index, epoch))
                found.append(keep(index, retried(once, self._place(block, index))))
        return found

    def _place(self, block: RecordBlock, index: int) -> Place:
        return Place(self._name, block.unit, block.row_start + index)

    def _one(self, block: RecordBlock, samples: Any, index: int, epoch: int) -> Any:
        if index in block.failures:
            return failure_of(block, index)
        row = block.row_start + index
        sample = attempt(lambda: samples[index], READ_ERROR, "fetching it") if block.lazy else samples[index]
        if isinstance(sample, Failed):
            return sample
        if self._transform is not None:
            call = partial(self._transformed, sample, block.unit, row, epoch)
            sample = attempt(call, TRANSFORM_ERROR, self.transform_name)
        if sample is None and (self._dicts_only or self._transform is not None):
            return Failed(FILTERED)
        if self._dicts_only and not isinstance(sample, (Mapping, Failed)):
            raise DataError(self._no_dict(sample, block.unit, row))
        return sample

    def _transformed(self, sample: Any, unit: int, row: int, epoch: int) -> Any:
        assert self._transform is not None
        # For each call: the transform may change it, and the record is needed again.
        sample = own_copy(sample)
        if not self._takes_rng:
            return self._transform(sample)
        rng = derive_generator("sample", self._seed, self._name, epoch, unit, row)
        return self._transform(sample, rng=rng) if self._rng_by_name else self._transform(sample, rng)

    def _no_dict(self, sample: Any, unit: int, row: int) -> str:
        what = self.transform_name if self._transform is not None else "the dataset"
        return (
            f"{what} gave a {type(sample).__name__} for unit {unit}, row {row}; a sample is one dict with input_ids, "
            "or None to drop it"
        )


def records_of(block: RecordBlock) -> tuple[Sequence[Any], dict[int, str]]:
    """One record per row, and what is wrong with those whose values python cannot hold."""
    try:
        return block.samples(), {}
    except UNREADABLE:
        table: Any = block.table
    unreadable = unreadable_rows(table)
    records = [None if row in unreadable else table_rows(table.slice(row, 1))[0] for row in range(block.num_rows)]
    return records, unreadable


def unreadable_rows(table: Any) -> dict[int, str]:
    """Row -> what is wrong with it, of a table whose values cannot all be had as python objects.

    Raises:
        DataError: Something else than a record is at fault, such as a missing package.
    """
    found: dict[int, str] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        for row in range(table.num_rows):
            try:
                column_rows(column.slice(row, 1))
            except UNREADABLE as error:
                problem = f"{name!r} cannot be read: {type(error).__name__}: {error}"
                if not isinstance(error, _OF_RECORDS):
                    raise DataError(problem) from error
                found.setdefault(row, problem)
    return found


def show_call(source: str, epoch: int, unit: int, row: int, attribute: str = "") -> str:
    """What shows a record, for messages: there is a loader in a bare loop, and a data module in a trainer."""
    return f".sample({(source, epoch, unit, row)!r}){attribute} of the loader or the data module"


class _OutsideError(Exception):
    """A device, a network or the memory failed, and not the record."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(what)
        self.what = what
        self.error = error


def attempt(call: Callable[[], Any], reason: int, what: str) -> Any:
    """The call's value, or `Failed`. To be used within `retried`, which settles what is not the record's fault."""
    try:
        return call()
    except Exception as error:
        if isinstance(error, MemoryError) or is_transient(error):
            raise _OutsideError(what, error) from error
        return Failed(reason, f"{what} failed: {type(error).__name__}: {error}", error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # `sys.exit()` in a library, or a panic of one that is written in Rust, is the record's fault, too.
        return Failed(reason, f"{what} failed: {type(error).__name__}: {error}", error)


def retried(call: Callable[[], _T], where: Place | str) -> _T:
    """The value of a call that uses `attempt`; what seeds the random states is part of it, so that it draws the same.

    Raises:
        DataError: A device or a network failed every time, or the memory did not do; it is never skipped.
    """
    times = 0
    while True:
        times += 1
        try:
            return call()
        except _OutsideError as outside:
            what, error = outside.what, outside.error
        if isinstance(error, MemoryError) or times == _ATTEMPTS:
            often = "failed" if times == 1 else f"failed {times} times"
            raise DataError(f"{where}: {what} {often}: {type(error).__name__}: {error}") from error
