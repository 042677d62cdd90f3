"""`JoinedFiles`: the records of one `Join`: found by the ids that are wanted, and read unit by unit."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import CorruptDataError
from megascale_lightning.loading.ids import IdIndex, Ids, build_index, read_ids
from megascale_lightning.sources.join import Join
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.records import RecordBlock, missing_key
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.diskcache import DiskCache
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.sources.survey import joined_source

__all__ = ["Found", "JoinedFiles", "chosen"]

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 16 << 20
"""Stored bytes that are read at once, where it is known how many records a unit has."""
_HELD_BYTES: Final = 64 << 20
"""Stored bytes of what is held for the records to come."""
_SHOWN: Final = 100


class Found(NamedTuple):
    """Records of one piece of the files."""

    positions: list[int]
    """Indices of the records that they belong to."""
    block: RecordBlock
    """One for each of these, with the fields that they give."""


class JoinedFiles:
    """The files of one `Join`. The ids are read when first wanted, once. Safe to call from several threads.

    Args:
        source: What their records are joined to.
        join: Names them.
        manifest: What was found of them.
        pool: Open files.
        cache: As in `make_reader`.
    """

    def __init__(
        self,
        source: Source,
        join: Join,
        manifest: Manifest,
        *,
        pool: FilePool | None = None,
        cache: DiskCache | None = None,
    ) -> None:
        self.on = join.on
        self._columns = join.read_columns
        self._manifest = manifest
        self._name, self._skips = source.name, source.on_error != "raise"
        own = joined_source(source, join)
        self._reader = make_reader(own, manifest, join.read_columns, pool=pool, cache=cache)
        self._id_reader = make_reader(own, manifest, [join.on], pool=pool, cache=cache)
        self._lock = threading.Lock()
        self._index: IdIndex | None = None
        self._steps = np.empty(0, np.int64)
        self._held: OrderedDict[tuple[int, int], tuple[RecordBlock, int]] = OrderedDict()

    def __str__(self) -> str:
        files = self._manifest.files
        return files[0].path + (f" and {len(files) - 1} more files" if len(files) > 1 else "")

    def find(self, ids: Ids, left_out: Collection[int]) -> tuple[list[Found], dict[int, str]]:
        """The records with these ids, in the order of their files, and by position why there is none.

        Args:
            ids: One for each position; None has no record.
            left_out: Positions for which none is wanted.

        Raises:
            DataError: An id is there twice, or a unit cannot be read now.
            CorruptDataError: The bytes of a unit are broken, and `on_error` is "raise".
        """
        with self._lock:
            index = self._indexed()
            numbers = index.find(ids)
            wanted = [at for at in range(len(ids)) if at not in left_out]
            without = {at: self._none_text(ids[at]) for at in wanted if numbers[at] < 0}
            positions = np.array([at for at in wanted if numbers[at] >= 0], np.int64)
            units, rows = index.place(numbers[positions])
            order = np.lexsort((rows, units))
            positions, units, rows = positions[order], units[order], rows[order]
            pieces = rows // self._steps[units]
            found = []
            for at in _runs(units, pieces):
                key = int(units[at[0]]), int(pieces[at[0]])
                one = self._taken(key, rows[at], positions[at].tolist(), ids, without)
                if one is not None:
                    found.append(one)
            return found, without

    def close(self) -> None:
        """Let go of files, and of what is held of them."""
        # Whoever reads now, which may take long, holds the lock, and goes on holding what it reads.
        if self._lock.acquire(blocking=False):
            self._held.clear()
            self._lock.release()
        self._reader.close()
        self._id_reader.close()

    def _indexed(self) -> IdIndex:
        if self._index is None:
            self._index = build_index(self._id_reader, self._manifest, self.on, source=self._name, skips=self._skips)
            units = self._manifest.units
            rows = np.maximum(np.diff(self._index.starts), 1)
            # Where it is not known beforehand how many records a unit has, it is read from its beginning each time.
            parts = np.where(units["rows"] < 0, 1, np.maximum(-(-units["bytes"] // _PIECE_BYTES), 1))
            self._steps = -(-rows // parts)
            logger.info(
                "source %r: %d ids of %s, in %d bytes", self._name, len(self._index), self, self._index.num_bytes
            )
        return self._index

    def _taken(
        self,
        key: tuple[int, int],
        rows: npt.NDArray[np.int64],
        positions: list[int],
        ids: Ids,
        without: dict[int, str],
    ) -> Found | None:
        """Records of one piece; why others cannot be had goes into `without`."""
        unit = key[0]
        try:
            piece = self._piece(key)
        except CorruptDataError as error:
            if not self._skips:
                raise
            without.update(dict.fromkeys(positions, f"what belongs to it cannot be read: {error}"))
            return None
        block = _picked(piece, (rows - piece.row_start).tolist())
        theirs, problems = read_ids(block, self.on, self._where)
        problems = {**self._lacking(block), **problems, **block.failures}
        good = []
        for at, position in enumerate(positions):
            if at in problems:
                without[position] = f"what belongs to it, {self._where(unit, int(rows[at]))}: {problems[at]}"
            elif theirs[at] != ids[position]:  # another text with the same hash
                without[position] = self._none_text(ids[position])
            else:
                good.append(at)
        if not good:
            return None
        return Found([positions[at] for at in good], self._without_id(_picked(block, good)))

    def _piece(self, key: tuple[int, int]) -> RecordBlock:
        """Records of a unit that are read at once; those used least recently are let go."""
        assert self._index is not None
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][0]
        unit, part = key
        count, step = int(self._index.starts[unit + 1] - self._index.starts[unit]), int(self._steps[unit])
        start, stop = part * step, min((part + 1) * step, count)
        block = self._reader.read(unit, start, -1 if stop == count else stop)
        if block.objects is not None and self._columns is not None:
            block = replace(block, objects=[chosen(record, self._columns) for record in block.objects])
        self._held[key] = block, int(self._manifest.units["bytes"][unit]) * (stop - start) // max(count, 1)
        while len(self._held) > 1 and sum(size for _, size in self._held.values()) > _HELD_BYTES:
            self._held.popitem(last=False)
        return block

    def _lacking(self, block: RecordBlock) -> dict[int, str]:
        """Index -> the first of the fields asked for that a record does not have."""
        found = {}
        for index, record in enumerate(block.objects or ()):
            if isinstance(record, Mapping):
                missing = [name for name in self._columns or () if name not in record]
                if missing:
                    found[index] = missing_key(missing[0], record)
        return found

    def _without_id(self, block: RecordBlock) -> RecordBlock:
        if block.table is not None:
            return replace(block, table=block.table.drop_columns([self.on]))
        records = block.objects or ()
        return replace(block, objects=[{k: v for k, v in record.items() if k != self.on} for record in records])

    def _none_text(self, value: Any) -> str:
        assert self._index is not None
        if value is None:
            return f"its {self.on!r} is null, so that nothing of {self} belongs to it"
        kind = "texts" if isinstance(value, (str, bytes)) else "whole numbers"
        hint = "" if kind in self._index.kind else f" (the ids there are {self._index.kind})"
        shown = repr(value.item() if isinstance(value, np.generic) else value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        return f"no record of {self} has the {self.on!r} {shown}{hint}"

    def _where(self, unit: int, row: int) -> str:
        return f"source {self._name!r}, {self._manifest.locate(unit, row)}"


def chosen(record: Any, names: Sequence[str]) -> Any:
    """A record with these fields alone, as far as it has them."""
    if not isinstance(record, Mapping):
        return record
    return {name: record[name] for name in names if name in record}


def _runs(units: npt.NDArray[np.int64], pieces: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of neighbours with equal numbers."""
    if len(units):
        cuts = np.flatnonzero((units[1:] != units[:-1]) | (pieces[1:] != pieces[:-1])) + 1
        yield from np.split(np.arange(len(units)), cuts)


def _picked(block: RecordBlock, indices: Sequence[int]) -> RecordBlock:
    """These records of a block, each as often as it is named."""
    table = block.table
    if table is not None:
        # A slice keeps the whole block alive: it is worth that where it is most of it.
        is_most = 2 * len(indices) > table.num_rows
        in_a_row = is_most and list(indices) == list(range(indices[0], indices[0] + len(indices)))
        table = table.slice(indices[0], len(indices)) if in_a_row else table.take(list(indices))
    return replace(
        block,
        row_start=0,
        num_rows=len(indices),
        table=table,
        objects=None if block.objects is None else [block.objects[index] for index in indices],
        failures={at: block.failures[index] for at, index in enumerate(indices) if index in block.failures},
        raw={},
    )
