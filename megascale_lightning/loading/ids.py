"""`IdIndex`: where the record with an id is, in 12 bytes a record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascale_lightning.errors import CorruptDataError, DataError
from megascale_lightning.loading.transforms import UNREADABLE, unreadable_rows
from megascale_lightning.sources.formats.arrowcolumns import column_rows, scalar_column
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader, missing_key

__all__ = ["IdIndex", "Ids", "build_index", "read_ids"]

logger = logging.getLogger(__name__)

_SCANNED: Final = 1 << 16
"""Records whose ids are read at once, where it is known how many there are."""
_MOST: Final = np.iinfo(np.uint32).max
_INT64: Final = np.iinfo(np.int64)
_PLAIN: Final = frozenset({int, str, bytes, type(None)})

Ids = Sequence[Any] | npt.NDArray[Any]
"""One id per record: an int, a str or bytes; None where there is none."""


class _Keys(NamedTuple):
    """Sorted keys, and the number of the record that each is of."""

    keys: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.uint32]

    def find(self, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of a record with each key, -1 where there is none: int64 [n]."""
        if not len(self.keys):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[at] == wanted, self.numbers[at].astype(np.int64), -1)


class IdIndex:
    """Finds records by id. Whole numbers are kept as they are, of texts a hash: whoever reads a record compares its id.

    Args:
        ints: Keys are the ids.
        texts: Keys are the hashes of the ids, each but once.
        same: Ids of different texts with one hash -> number of the record.
        starts: int64 [units + 1]: number of the first record of each unit.
    """

    def __init__(self, ints: _Keys, texts: _Keys, same: Mapping[Any, int], starts: npt.NDArray[np.int64]) -> None:
        self._ints, self._texts, self._same = ints, texts, same
        self.starts = starts

    def __len__(self) -> int:
        return len(self._ints.keys) + len(self._texts.keys)

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        arrays = (*self._ints, *self._texts, self.starts)
        return sum(array.nbytes for array in arrays)

    @property
    def kind(self) -> str:
        """What the ids are, for messages."""
        names = {"whole numbers": self._ints, "texts": self._texts}
        return " and ".join(name for name, of in names.items() if len(of.keys)) or "none"

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Number of the only record that may have each id, -1 where there is none: int64 [n].

        Args:
            ids: None has no record.
        """
        found = np.full(len(ids), -1, np.int64)
        for of, (positions, keys) in zip((self._ints, self._texts), _keys_of(ids), strict=True):
            found[positions] = of.find(keys)
        if self._same:
            known = [(at, self._same[value]) for at, value in enumerate(ids) if value in self._same]
            for at, number in known:
                found[at] = number
        return found

    def place(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Unit and row of records: int64 [n] each."""
        units = np.searchsorted(self.starts, numbers, side="right") - 1
        return units, numbers - self.starts[units]


def read_ids(block: RecordBlock, name: str, where: Callable[[int, int], str]) -> tuple[Ids, dict[int, str]]:
    """The ids of the records of a block, and what is wrong with those that have none and should; null is no fault.

    Args:
        block: Its failed records have none.
        name: The field.
        where: Unit and row -> place, for messages.

    Raises:
        DataError: An id is of another kind, or a record has no fields.
    """
    if block.table is not None:
        column: Any = block.table.column(name)
        if str(column.type) in ("int8", "int16", "int32", "int64") and not column.null_count and not block.failures:
            return scalar_column(column)[0], {}
        ids, problems = _of_table(block, name)
    else:
        ids, problems = _of_objects(block, name, where)
    if set(map(type, ids)) <= _PLAIN:
        return ids, problems
    for index, value in enumerate(ids):
        if isinstance(value, np.generic):
            ids[index] = value = value.item()
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str, bytes))):
            place = where(block.unit, block.row_start + index)
            raise DataError(
                f"{place}: join by {name!r} takes whole numbers and texts as ids, not a {type(value).__name__}"
            )
    return ids, problems


def _of_table(block: RecordBlock, name: str) -> tuple[list[Any], dict[int, str]]:
    column: Any = block.table.column(name) if block.table is not None else None
    problems: dict[int, str] = {}
    try:
        ids = column_rows(column)
    except UNREADABLE:
        problems = unreadable_rows(pa.table({name: column}))
        ids = [None if row in problems else column_rows(column.slice(row, 1))[0] for row in range(block.num_rows)]
    return [None if index in block.failures else value for index, value in enumerate(ids)], problems


def _of_objects(block: RecordBlock, name: str, where: Callable[[int, int], str]) -> tuple[list[Any], dict[int, str]]:
    assert block.objects is not None
    ids: list[Any] = [None] * block.num_rows
    problems: dict[int, str] = {}
    for index, record in enumerate(block.objects):
        if index in block.failures:
            continue
        if not isinstance(record, Mapping):
            place = where(block.unit, block.row_start + index)
            raise DataError(f"{place}: join wants records with fields, not a {type(record).__name__}")
        if name in record:
            ids[index] = record[name]
        else:
            problems[index] = missing_key(name, record)
    return ids, problems


def build_index(reader: SourceReader, manifest: Manifest, name: str, *, source: str, skips: bool) -> IdIndex:
    """Read all ids once.

    While it is made it takes up to 20 bytes a record more than it holds, and the texts of some ten thousand records.

    Args:
        reader: Of the field alone, as far as the format allows.
        manifest: What it reads.
        name: The field.
        source: The source that it is joined to, for messages.
        skips: What cannot be read is left out; else it is an error.

    Raises:
        DataError: An id is there twice: names both places; or is none.
        CorruptDataError: Something cannot be read.
    """
    gathered: tuple[list[_Keys], list[_Keys]] = ([], [])
    starts = [0]
    bad: list[str] = []

    def where(unit: int, row: int) -> str:
        return f"source {source!r}, {manifest.locate(unit, row)}"

    for unit in range(manifest.num_units):
        count = 0
        try:
            for block in _blocks(reader, manifest, unit):
                ids, problems = read_ids(block, name, where)
                problems = {**problems, **block.failures}
                bad += [f"{where(unit, block.row_start + index)}: {problems[index]}" for index in sorted(problems)[:1]]
                if problems and not skips:
                    raise DataError(f'{bad[0]}; on_error="skip" leaves out the records that want it')
                for of, (positions, keys) in zip(gathered, _keys_of(ids), strict=True):
                    if len(keys):
                        of.append(_Keys(keys, (starts[-1] + block.row_start + positions).astype(np.uint32)))
                count = block.row_start + block.num_rows
        except CorruptDataError as error:
            if not skips:
                raise
            bad.append(str(error))
        starts.append(starts[-1] + max(count, int(manifest.units["rows"][unit])))
        if starts[-1] > _MOST:
            raise DataError(
                f"source {source!r}: more than {_MOST} records are joined to it: make several sources of it"
            )
    if bad:
        logger.warning(
            "source %r: something that is joined to it cannot be read, such as %s; records that want it are left out",
            source,
            bad[0],
        )
    return _made(gathered, np.array(starts, np.int64), reader, name, where)


def _blocks(reader: SourceReader, manifest: Manifest, unit: int) -> Iterator[RecordBlock]:
    rows = int(manifest.units["rows"][unit])
    if rows < 0:
        yield reader.read(unit)
    for start in range(0, rows, _SCANNED):
        yield reader.read(unit, start, min(start + _SCANNED, rows))


def _keys_of(ids: Ids) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Positions and keys, int64 [n], of the ids that are numbers, and of those that are texts, or numbers beyond."""
    nothing = np.empty(0, np.int64)
    if isinstance(ids, np.ndarray):
        return (np.arange(len(ids)), ids.astype(np.int64)), (nothing, nothing)
    if set(map(type, ids)) <= {str, bytes}:
        return (nothing, nothing), (np.arange(len(ids)), np.fromiter(map(hash, ids), np.int64, len(ids)))
    are_ints = [type(value) is int and _INT64.min <= value <= _INT64.max for value in ids]
    ints = np.flatnonzero(are_ints)
    texts = np.flatnonzero([value is not None and not is_int for value, is_int in zip(ids, are_ints, strict=True)])
    return (
        (ints, np.fromiter((ids[at] for at in ints.tolist()), np.int64, len(ints))),
        (texts, np.fromiter((hash(ids[at]) for at in texts.tolist()), np.int64, len(texts))),
    )


def _made(
    gathered: tuple[list[_Keys], list[_Keys]],
    starts: npt.NDArray[np.int64],
    reader: SourceReader,
    name: str,
    where: Callable[[int, int], str],
) -> IdIndex:
    ints, texts = map(_sorted, gathered)
    index = IdIndex(ints, texts, {}, starts)

    def place(number: int) -> tuple[int, int]:
        units, rows = index.place(np.array([number]))
        return int(units[0]), int(rows[0])

    def refuse(value: Any, one: int, other: int) -> DataError:
        places = " and ".join(where(*place(number)) for number in sorted((one, other)))
        return DataError(f"{places}: both have the {name!r} {value!r}, and an id names one record that is joined")

    again = np.flatnonzero(ints.keys[1:] == ints.keys[:-1])
    if again.size:
        at = int(again[0])
        raise refuse(int(ints.keys[at]), int(ints.numbers[at]), int(ints.numbers[at + 1]))
    again = np.flatnonzero(texts.keys[1:] == texts.keys[:-1])
    same: dict[Any, int] = {}
    for number in np.unique(np.concatenate([texts.numbers[again], texts.numbers[again + 1]])).tolist():
        unit, row = place(number)
        (value,), _ = read_ids(reader.read(unit, row, row + 1), name, where)
        if value in same:
            raise refuse(value, same[value], number)
        same[value] = number
    return IdIndex(ints, texts, same, starts)


def _sorted(gathered: list[_Keys]) -> _Keys:
    """All in one; what was gathered is let go of."""
    if not gathered:
        return _Keys(np.empty(0, np.int64), np.empty(0, np.uint32))
    numbers = np.concatenate([of.numbers for of in gathered])
    keys = np.concatenate([of.keys for of in gathered])
    gathered.clear()
    if (keys[1:] >= keys[:-1]).all():
        return _Keys(keys, numbers)
    order = np.argsort(keys, kind="stable")
    return _Keys(keys[order], numbers[order])
