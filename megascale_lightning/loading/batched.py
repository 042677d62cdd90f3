"""`BatchRunner`: runs the user's `transform_batched` on a run of records so that a replay gives the same (law 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megascale_lightning.errors import DataError
from megascale_lightning.loading.owncopies import own_copy
from megascale_lightning.loading.reasons import FILTERED, READ_ERROR, TRANSFORM_ERROR
from megascale_lightning.loading.transforms import (
    UNREADABLE,
    Failed,
    SampleRunner,
    attempt,
    failure_of,
    retried,
    show_call,
    unreadable_rows,
)
from megascale_lightning.sources.formats.arrowcolumns import column_rows
from megascale_lightning.sources.functions import function_name, rng_is_keyword, takes_rng
from megascale_lightning.sources.globalstates import lent_states, seeded
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.seeding import derive_generator, derive_seed
from megascale_lightning.sources.source import Source

__all__ = ["BatchRunner", "Columns", "as_list", "is_encoding"]


@dataclass(frozen=True, slots=True)
class Columns:
    """What a run became, by field or sample by sample."""

    num_rows: int
    rows: Sequence[int]
    """Indices in the run, ascending, of the records that have values."""
    values: Mapping[str, Any] | None
    """Field -> one value for each of `rows`: a list, an array, an Arrow array. None: they are in `whole`."""
    failures: Mapping[int, Failed]
    """The other records."""
    whole: Sequence[Any] = ()
    """One sample for each of `rows`, where the transform gave them so."""

    @classmethod
    def of_samples(cls, samples: Mapping[int, Any], num_rows: int) -> Columns:
        """Of one sample or `Failed` per record."""
        rows = [row for row in range(num_rows) if not isinstance(samples[row], Failed)]
        failures = {row: sample for row, sample in samples.items() if isinstance(sample, Failed)}
        return cls(num_rows, rows, None, failures, [samples[row] for row in rows])

    def samples(self) -> list[Any]:
        """One dict or `Failed` per record."""
        found: list[Any] = [self.failures.get(row) for row in range(self.num_rows)]
        if self.values is None:
            for row, sample in zip(self.rows, self.whole, strict=True):
                found[row] = sample
            return found
        names = list(self.values)
        for row, *values in zip(self.rows, *map(as_list, self.values.values()), strict=True):
            found[row] = dict(zip(names, values, strict=True))
        return found


class BatchRunner:
    """Turns the records of one source into samples, a run at a time.

    The user's code gets a `rng` derived from (seed, source, epoch, unit, first row of the run) if it takes one.
    Otherwise the global random states are seeded from the same, as in `SampleRunner`. Safe to call from several
    threads.

    Args:
        source: Its `transform_batched` is what runs.
        seed: Of the run.
        dicts_only: As in `SampleRunner`.
    """

    def __init__(self, source: Source, seed: int, *, dicts_only: bool = True) -> None:
        assert source.transform_batched is not None
        self._name = source.name
        self._seed = seed
        self._transform = source.transform_batched
        self._takes_rng = takes_rng(self._transform)
        self._rng_by_name = self._takes_rng and rng_is_keyword(self._transform)
        self._lends = not self._takes_rng and not source.thread_safe
        self._raises = source.on_error == "raise"
        self._dicts_only = dicts_only
        self._fetching = SampleRunner(replace(source, transform_batched=None), seed)

    @property
    def transform_name(self) -> str:
        """For messages."""
        return f"transform {function_name(self._transform)}"

    def run(self, block: RecordBlock, epoch: int) -> Columns:
        """The samples of a block that is one run.

        Raises:
            DataError: The transform gave something else than so many values, or raised where `on_error` is "raise", or
                a device failed more than once; names the transform and the rows.
        """
        if block.lazy:
            fetched = self._fetching.run(block, epoch)
            failures = {row: sample for row, sample in enumerate(fetched) if isinstance(sample, Failed)}
            block = replace(block, objects=fetched, lazy=False)
        else:
            failures = {row: failure_of(block, row) for row in block.failures}
        rows = [row for row in range(block.num_rows) if row not in failures]
        if not rows:
            return Columns(block.num_rows, [], {}, failures)
        try:
            found = self._attempted(block, rows, epoch)
        except _UnreadableError:
            bad = unreadable_rows(block.table)
            failures |= {row: Failed(READ_ERROR, message) for row, message in bad.items()}
            rows = [row for row in rows if row not in bad]
            if not rows:
                return Columns(block.num_rows, [], {}, failures)
            found = self._attempted(block, rows, epoch)
        if isinstance(found, Failed):
            if self._raises:
                shown = show_call(self._name, epoch, block.unit, block.row_start + rows[0], ".transformed")
                text = f"{_rows_text(block, rows)}: {found.message}; {shown} makes this call again"
                raise DataError(f'{text}; on_error="skip" finds the records that it fails for, and drops them') from (
                    found.error
                )
            return Columns.of_samples({**failures, **self._singly(block, rows, epoch, found)}, block.num_rows)
        return self._settled(block, rows, found, failures)

    def _singly(self, block: RecordBlock, rows: Sequence[int], epoch: int, whole: Failed) -> dict[int, Any]:
        """One sample or `Failed` per row, each from a call of its own: finds those for which a run failed."""
        if len(rows) == 1:
            return {rows[0]: whole}
        samples = {}
        for row in rows:
            found = self._attempted(block, [row], epoch)
            if not isinstance(found, Failed):
                found = self._settled(block, [row], found, {}).samples()[row]
            samples[row] = found
        return samples

    def _attempted(self, block: RecordBlock, rows: Sequence[int], epoch: int) -> Any:
        """What the transform gave for these rows, or `Failed`. The seed is that of the first record, failed or not."""
        where = f"source {self._name!r}, unit {block.unit}, {_rows_text(block, rows)}"
        make = partial(_columns_of, block, rows, where)
        ready = [make()]
        first = block.row_start + (rows[0] if len(rows) == 1 else 0)
        key = ("sample", self._seed, self._name, epoch, block.unit, first)
        once = partial(attempt, partial(self._called, ready, make, key), TRANSFORM_ERROR, self.transform_name)
        if not self._lends:
            return retried(once, where)
        with lent_states():
            return retried(partial(seeded, derive_seed(*key), once), where)

    def _called(
        self, ready: list[dict[str, Any]], make: Callable[[], dict[str, Any]], key: tuple[str | int, ...]
    ) -> Any:
        # Values of its own for each attempt: the transform may change them.
        columns = ready.pop() if ready else make()
        if not self._takes_rng:
            return self._transform(columns)
        rng = derive_generator(*key)
        return self._transform(columns, rng=rng) if self._rng_by_name else self._transform(columns, rng)

    def _settled(self, block: RecordBlock, rows: Sequence[int], found: Any, failures: Mapping[int, Failed]) -> Columns:
        """Check what the transform gave, and take out the records that it dropped."""
        text = _rows_text(block, rows)
        if isinstance(found, (list, tuple)):
            self._check_count(f"{len(found)} samples", len(found), rows, text)
            if not any(is_encoding(sample) for sample in found):
                return Columns.of_samples({**failures, **self._checked(found, rows, text)}, block.num_rows)
            found = {"input_ids": found}
        if not isinstance(found, Mapping):
            raise DataError(
                f"{self.transform_name} gave a {type(found).__name__} for {text}; give a mapping of one sequence of "
                "values per field, or a list of one dict or None per record"
            )
        values = {str(name): found[name] for name in found}
        for name, column in values.items():
            if isinstance(column, (str, bytes)) or not hasattr(column, "__len__"):
                raise DataError(
                    f"{self.transform_name} gave a {type(column).__name__} as {name!r} for {text}; give a sequence of "
                    "one value per record"
                )
            self._check_count(f"{len(column)} values of {name!r}", len(column), rows, text)
        dropped = _nowhere(list(values.values()), len(rows))
        if dropped:
            kept = [index for index in range(len(rows)) if index not in dropped]
            values = {name: _picked(column, kept) for name, column in values.items()}
            failures = {**failures, **{rows[index]: Failed(FILTERED) for index in dropped}}
            rows = [rows[index] for index in kept]
        return Columns(block.num_rows, rows, values, failures)

    def _check_count(self, what: str, count: int, rows: Sequence[int], text: str) -> None:
        if count != len(rows):
            raise DataError(
                f"{self.transform_name} gave {what} for the {len(rows)} records of {text}; give one each, None to drop "
                "a record"
            )

    def _checked(self, samples: Sequence[Any], rows: Sequence[int], text: str) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for row, sample in zip(rows, samples, strict=True):
            if self._dicts_only and sample is not None and not isinstance(sample, Mapping):
                raise DataError(
                    f"{self.transform_name} gave a {type(sample).__name__} among the samples of {text}; a sample is "
                    "one dict with input_ids, or None to drop it"
                )
            found[row] = Failed(FILTERED) if sample is None else sample
        return found


class _UnreadableError(Exception):
    """A table holds values that python cannot."""


def _rows_text(block: RecordBlock, rows: Sequence[int]) -> str:
    first, last = block.row_start + rows[0], block.row_start + rows[-1]
    return f"row {first}" if first == last else f"rows {first} to {last}"


def _columns_of(block: RecordBlock, rows: Sequence[int], where: str) -> dict[str, list[Any]]:
    """Field -> the values of the rows, a field that a record lacks as None."""
    if block.table is not None:
        table = block.table if len(rows) == block.num_rows else block.table.take(rows)
        try:
            return {name: column_rows(table.column(index)) for index, name in enumerate(table.column_names)}
        except UNREADABLE as error:
            raise _UnreadableError from error
    assert block.objects is not None
    objects = [block.objects[row] for row in rows]
    other = next((record for record in objects if not isinstance(record, Mapping)), None)
    if other is not None:
        raise DataError(
            f"{where}: transform_batched gets the fields of records, which have to be dicts; one of these is a "
            f"{type(other).__name__}: give dicts, or use `transform`, which gets a record as it is"
        )
    names = dict.fromkeys(name for record in objects for name in record)
    return {name: [own_copy(record.get(name)) for record in objects] for name in names}


def _nowhere(columns: Sequence[Any], n: int) -> set[int]:
    """Indices at which every column has None."""
    if not columns:
        return set(range(n))
    found = _nulls(columns[0])
    for column in columns[1:]:
        if not found:
            break
        found &= _nulls(column)
    return found


def _nulls(column: Any) -> set[int]:
    if hasattr(column, "null_count"):
        return {index for index, is_null in enumerate(column.is_null().to_pylist()) if is_null}
    dtype = getattr(column, "dtype", None)
    if dtype is not None and str(dtype) != "object":
        return set()
    return {index for index, value in enumerate(column) if value is None}


def _picked(column: Any, kept: Sequence[int]) -> Any:
    if hasattr(column, "null_count"):
        # There is no taking from a column without a type: all of it is null.
        return column.take(kept) if len(kept) and str(column.type) != "null" else column.slice(0, len(kept))
    return column[kept] if hasattr(column, "dtype") else [column[index] for index in kept]


def is_encoding(value: Any) -> bool:
    """Whether it is what a tokenizer of the tokenizers library gives."""
    return type(value).__name__ == "Encoding" and type(value).__module__.partition(".")[0] == "tokenizers"


def as_list(column: Any) -> list[Any]:
    """One python object per record: arrays for rows of an array and lists of numbers, token ids for an `Encoding`."""
    if hasattr(column, "null_count"):
        return column_rows(column)
    return [value.ids if is_encoding(value) else value for value in column]
