"""`Fragment`: the declared fields of consecutive records, columnar, whatever form they were read in."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index as as_int
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.loading.batched import Columns, as_list
from megascale_lightning.loading.reasons import KEPT, READ_ERROR, TRANSFORM_ERROR
from megascale_lightning.loading.samplefields import scatter_samples, stack_samples
from megascale_lightning.loading.tokencolumns import token_column
from megascale_lightning.loading.transforms import UNREADABLE, Failed, unreadable_rows
from megascale_lightning.sources.formats.arrowcolumns import is_number_list, list_column, list_value_type, scalar_column
from megascale_lightning.sources.records import missing_key
from megascale_lightning.types import Ragged

__all__ = ["Fields", "Fragment", "from_columns", "from_samples", "from_table", "narrow"]

_INT32: Final = np.iinfo(np.int32)

_TARGETS: Final = ("labels", "loss_mask")
"""Fields that say which tokens are trained on: a sample that has them means it."""


@dataclass(frozen=True, slots=True)
class Fields:
    """What is kept of a sample."""

    tokens: tuple[str, ...]
    """Per-token fields, `input_ids` first."""
    samples: tuple[str, ...]
    """Per-sample fields."""
    length: str | Callable[[Any], int] | None
    """As in `Source.length`."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Fields of n consecutive records of one unit."""

    tokens: Mapping[str, npt.NDArray[Any]]
    """Field -> values, [offsets[-1]] each."""
    offsets: npt.NDArray[np.int64]
    """int64 [n + 1]: where the records begin, the same for every field."""
    samples: Mapping[str, npt.NDArray[Any]]
    """[n, ...]"""
    lengths: npt.NDArray[np.int64]
    """int64 [n]: tokens of the sample, at most those of `input_ids`; 0 for a failed record."""
    codes: npt.NDArray[np.uint8]
    """uint8 [n]: KEPT, or why there is no sample."""
    failures: Mapping[int, Failed]
    """Index -> what happened, for those with a message."""


def narrow(ragged: Ragged) -> tuple[Ragged, dict[int, str]]:
    """int64, uint32 and uint64 become int32; records with a value beyond it are reported, others stay as stored."""
    values = ragged.values
    if values.dtype not in (np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.uint32)):
        return ragged, {}
    bad: dict[int, str] = {}
    if values.size and (int(values.max()) > _INT32.max or int(values.min()) < _INT32.min):
        at = np.flatnonzero((values > _INT32.max) | (values < _INT32.min))
        rows, first = np.unique(np.searchsorted(ragged.offsets, at, side="right") - 1, return_index=True)
        for row, position in zip(rows.tolist(), at[first].tolist(), strict=True):
            bad[row] = f"has the value {values[position]}, which does not fit int32"
    return Ragged(values.astype(np.int32), ragged.offsets), bad


class _Builder:
    """Collects fields and what is wrong with records; the first problem of a record counts."""

    def __init__(self, n: int, reason: int, failures: Mapping[int, Failed]) -> None:
        self.n = n
        self.reason = reason
        self.failures = dict(failures)
        self.tokens: dict[str, Ragged] = {}
        self.samples: dict[str, npt.NDArray[Any]] = {}

    def fail(self, field: str, problems: Mapping[int, str]) -> None:
        for row, problem in problems.items():
            self.failures.setdefault(row, Failed(self.reason, f"{field!r} {problem}"))

    def add_tokens(self, field: str, ragged: Ragged, problems: Mapping[int, str]) -> None:
        if ragged.values.size and ragged.values.dtype.kind not in ("iu" if field == "input_ids" else "iubf"):
            raise DataError(f"field {field!r} holds {ragged.values.dtype}; token ids are whole numbers")
        self.fail(field, problems)
        self.tokens[field], overflow = narrow(ragged)
        self.fail(field, overflow)

    def finish(self, lengths: npt.NDArray[np.int64] | None) -> Fragment:
        """Compare lengths, and put the codes together."""
        offsets = self.tokens["input_ids"].offsets
        whole = np.diff(offsets)
        for field, ragged in self.tokens.items():
            if ragged.offsets is offsets or np.array_equal(ragged.offsets, offsets):
                continue
            other = np.diff(ragged.offsets)
            for row in np.flatnonzero(other != whole).tolist():
                self.fail(field, {row: f"has {other[row]} entries where 'input_ids' has {whole[row]}"})
        if lengths is None:
            lengths = whole
        for row in np.flatnonzero((lengths < 0) | (lengths > whole)).tolist():
            self.fail("length", {row: f"is {lengths[row]} where 'input_ids' has {whole[row]} tokens"})
        codes = np.full(self.n, KEPT, np.uint8)
        if self.failures:
            rows = np.fromiter(self.failures, np.int64, len(self.failures))
            codes[rows] = [failed.reason for failed in self.failures.values()]
            lengths = np.where(codes == KEPT, lengths, 0)
        values, offsets = _aligned(self.tokens, codes == KEPT)
        return Fragment(values, offsets, self.samples, lengths, codes, self.failures)


def _aligned(
    tokens: Mapping[str, Ragged], good: npt.NDArray[np.bool_]
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """The values of every field with offsets that hold for all; where they differ, failed records are left out."""
    offsets = tokens["input_ids"].offsets
    if all(np.array_equal(ragged.offsets, offsets) for ragged in tokens.values()):
        return {field: ragged.values for field, ragged in tokens.items()}, offsets
    kept = {field: ragged.values[np.repeat(good, np.diff(ragged.offsets))] for field, ragged in tokens.items()}
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(good, np.diff(offsets), 0))])
    return kept, offsets


def from_table(where: str, table: Any, fields: Fields, failures: Mapping[int, Failed] | None = None) -> Fragment:
    """Fields of an Arrow table: no python object per record, no copy beyond what Arrow or int32 needs.

    Args:
        where: Source, file and unit, for messages.
        table: `pyarrow.Table` with the columns of `fields`.
        fields: What is kept; its `length` is no function.
        failures: Index -> why the record has failed already.

    Raises:
        ConfigError: A token column is no list of numbers, or `input_ids` none of whole numbers.
    """
    built = _Builder(table.num_rows, READ_ERROR, failures or {})
    for field in fields.tokens:
        column = table.column(field)
        _check_token_type(where, field, column.type)
        built.add_tokens(field, *list_column(column))
    for field in fields.samples:
        column = table.column(field)
        if is_number_list(column.type):
            ragged, bad = list_column(column)
            each = np.split(ragged.values, ragged.offsets[1:-1])
            rows = [row for row in range(table.num_rows) if row not in built.failures and row not in bad]
            built.samples[field] = _stacked(rows, [each[row] for row in rows], table.num_rows)
        else:
            try:
                built.samples[field], bad = scalar_column(column)
            except UNREADABLE:
                unreadable, bad = unreadable_rows(table.select([field])), {}
                built.failures.update({row: Failed(READ_ERROR, problem) for row, problem in unreadable.items()})
                rows = [row for row in range(table.num_rows) if row not in unreadable]
                built.samples[field] = _stacked(rows, as_list(column.take(rows)), table.num_rows)
        built.fail(field, bad)
    lengths = None
    if isinstance(fields.length, str):
        values, bad = scalar_column(table.column(fields.length))
        if len(bad) == len(values):
            values = np.zeros(len(values), np.int64)
        if values.dtype.kind not in "iu":
            raise ConfigError(f"{where}: length column {fields.length!r} is {values.dtype}, not a whole number")
        built.fail(fields.length, bad)
        lengths = values.astype(np.int64)
    return built.finish(lengths)


def _check_token_type(where: str, field: str, kind: Any) -> None:
    """What is wrong with the whole column is no matter of single records."""
    wanted = "a list of whole numbers" if field == "input_ids" else "a list of numbers"
    value_type = str(list_value_type(kind))
    if not is_number_list(kind) or (field == "input_ids" and "int" not in value_type and value_type != "null"):
        raise ConfigError(f"{where}: column {field!r} is {kind}, a token field is {wanted}; a `transform` can make it")


def from_samples(samples: Sequence[Mapping[str, Any] | Failed], fields: Fields, transform: str | None) -> Fragment:
    """Fields of one mapping per record.

    Args:
        samples: One per record.
        fields: What is kept.
        transform: Its name where one made the samples; then a missing field is its fault, and raises.

    Raises:
        DataError: The transform left out a declared field; names the keys it gave.
    """
    reason = READ_ERROR if transform is None else TRANSFORM_ERROR
    built = _Builder(len(samples), reason, {row: s for row, s in enumerate(samples) if isinstance(s, Failed)})
    good = [(row, s) for row, s in enumerate(samples) if not isinstance(s, Failed)]
    if transform is not None:
        _check_ignored({field for field in _TARGETS if any(field in s for _, s in good)}, fields, transform)
    for field in (*fields.tokens, *fields.samples, *([fields.length] if isinstance(fields.length, str) else [])):
        for row, sample in good:
            if sample.get(field) is None:
                if transform is not None and field not in sample:
                    raise DataError(_left_out(transform, field, sample))
                problem = f"{field!r} is null" if field in sample else missing_key(field, sample)
                built.failures.setdefault(row, Failed(reason, problem))
    for field in fields.tokens:
        built.add_tokens(field, *_ragged(field, len(samples), good))
    lengths = _lengths(built, good, fields.length)
    kept = [(row, sample) for row, sample in good if row not in built.failures]
    for field in fields.samples:
        built.samples[field] = _stacked([row for row, _ in kept], [sample[field] for _, sample in kept], len(samples))
    return built.finish(lengths)


def from_columns(columns: Columns, fields: Fields, transform: str) -> Fragment:
    """Fields of what a batched transform gave by field: no python object per record where it gave arrays.

    Args:
        columns: Values of the records of a run.
        fields: What is kept.
        transform: Its name, for messages.

    Raises:
        DataError: The transform left out a declared field; names those it gave.
    """
    values = columns.values
    if values is None or callable(fields.length):
        return from_samples(columns.samples(), fields, transform)
    n, rows = columns.num_rows, np.array(columns.rows, np.int64)
    built = _Builder(n, TRANSFORM_ERROR, columns.failures)
    _check_ignored(values, fields, transform)
    wanted = (*fields.tokens, *fields.samples, *([fields.length] if isinstance(fields.length, str) else []))
    for field in wanted if len(rows) else ():
        if field not in values:
            raise DataError(_left_out(transform, field, values))
    for field in fields.tokens:
        found, bad = token_column(field, values.get(field, ()))
        built.add_tokens(field, _spread(found, rows, n), {int(rows[at]): problem for at, problem in bad.items()})
    for field in fields.samples:
        listed = as_list(values.get(field, ()))
        built.fail(field, {int(rows[at]): "is null" for at, value in enumerate(listed) if value is None})
        kept = [(row, value) for row, value in zip(columns.rows, listed, strict=True) if row not in built.failures]
        built.samples[field] = _stacked([row for row, _ in kept], [value for _, value in kept], n)
    lengths = None
    if isinstance(fields.length, str):
        lengths = np.zeros(n, np.int64)
        for row, value in zip(columns.rows, as_list(values.get(fields.length, ())), strict=True):
            if row not in built.failures:
                _measure(built, lengths, row, partial(as_int, value))
    return built.finish(lengths)


def _spread(found: Ragged, rows: npt.NDArray[np.int64], n: int) -> Ragged:
    """The same values over n records, of which those not in `rows` are empty."""
    if len(rows) == n:
        return found
    lengths = np.zeros(n, np.int64)
    lengths[rows] = np.diff(found.offsets)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(found.values, offsets)


def _stacked(rows: Sequence[int], values: Sequence[Any], n: int) -> npt.NDArray[Any]:
    stacked = stack_samples(values, len(values))
    return stacked if len(values) == n else scatter_samples(stacked, np.array(rows, np.int64), n)


def _check_ignored(given: Container[str], fields: Fields, transform: str) -> None:
    ignored = [field for field in _TARGETS if field not in fields.tokens and field in given]
    if ignored:
        raise DataError(
            f"{transform} gives {', '.join(map(repr, ignored))}, which would be ignored: declare it in the rows, "
            f"token_fields=({', '.join(map(repr, ignored))},), or leave it out of the sample"
        )


def _left_out(transform: str, field: str, sample: Mapping[str, Any]) -> str:
    return (
        f"{transform} gave a sample without {field!r}; its keys are {sorted(map(str, sample))}. "
        f"Return a dict with {field!r}, or None to drop the sample"
    )


def _ragged(field: str, n: int, good: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[Ragged, dict[int, str]]:
    found, bad = token_column(field, [sample.get(field) for _, sample in good])
    rows = np.array([row for row, _ in good], np.int64)
    return _spread(found, rows, n), {int(rows[at]): problem for at, problem in bad.items()}


def _lengths(
    built: _Builder, good: Sequence[tuple[int, Mapping[str, Any]]], length: str | Callable[[Any], int] | None
) -> npt.NDArray[np.int64] | None:
    if length is None:
        return None
    found = np.zeros(built.n, np.int64)
    for row, sample in good:
        if row in built.failures:
            continue
        _measure(built, found, row, partial(_length_of, sample, length))
    return found


def _length_of(sample: Mapping[str, Any], length: str | Callable[[Any], int]) -> int:
    return as_int(sample[length] if isinstance(length, str) else length(sample))


def _measure(built: _Builder, lengths: npt.NDArray[np.int64], row: int, measure: Callable[[], int]) -> None:
    try:
        lengths[row] = measure()
    except Exception as error:
        built.fail("length", {row: f"failed: {type(error).__name__}: {error}"})
