"""`SampleMaker`: parts of collated rows: a record is one sample, kept whole, pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index as as_int
from typing import Any, Final, NamedTuple

import numpy as np

from megascale_lightning.errors import DataError
from megascale_lightning.loading.partmaker import PartMaker
from megascale_lightning.loading.parts import Part
from megascale_lightning.loading.payload import pickled
from megascale_lightning.loading.reasons import KEPT, READ_ERROR, REASONS, TRANSFORM_ERROR
from megascale_lightning.loading.transforms import Failed
from megascale_lightning.sources.order import Segment
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.types import PIECE, IntArray, MetaBlock, PartKey, Ragged

__all__ = ["SampleMaker"]

_MAX_LENGTH: Final = np.iinfo(np.int32).max


class _Kept(NamedTuple):
    """What is kept of a record."""

    code: int
    """Of `reasons`."""
    length: int
    content: bytes


class _NoColumnError(Exception):
    """A record lacks a declared column."""


class SampleMaker(PartMaker):
    """See `PartMaker`.

    Where nothing has to be known of a dataset's samples before they are due, they are fetched when they are taken, one
    by one, and a part holds none of them. Otherwise it holds each of them pickled.
    """

    @property
    def fetches_late(self) -> bool:
        """Samples are fetched by `fetch`, and not when a part is made."""
        source = self.source
        plain = source.transform is None and source.length is None
        return plain and self._manifest.format == "dataset" and source.on_error == "raise"

    def _columns(self) -> Sequence[str] | None:
        source = self.source
        if source.columns is None or self._manifest.format == "dataset":
            return None
        length = [source.length] if isinstance(source.length, str) else []
        return list(dict.fromkeys([*source.columns, *length]))

    def make(self, key: PartKey) -> Part:
        """Settle one part, and read it unless samples are fetched late; see `PartMaker.make`."""
        if self.fetches_late:
            segments, is_last = self._segments(key)
            return self._assemble(key, [self._rows_of(segment) for segment in segments], None, is_last)
        places, kept, is_last = [], [], False
        for block, ends in self._blocks(key):
            with self._placing(block.unit):
                kept += self.runner.run_each(block, range(block.num_rows), key.epoch, partial(self._kept, block))
            places.append((block.unit, range(block.row_start, block.row_start + block.num_rows)))
            is_last = ends
        return self._assemble(key, places, kept, is_last)

    def fetch(self, epoch: int, pieces: IntArray) -> list[bytes]:
        """The samples of these pieces, pickled, each fetched now.

        Args:
            epoch: Of the pieces.
            pieces: PIECE [k], of this source.

        Raises:
            DataError: A sample cannot be fetched, or does not pickle; names source, index, unit and row.
        """
        found: list[bytes] = [b""] * len(pieces)
        order = np.argsort(pieces["unit"], kind="stable")
        units, starts = np.unique(pieces["unit"][order], return_index=True)
        for unit, members in zip(units.tolist(), np.split(order, starts[1:]), strict=True):
            block = self._reader.read(unit)
            rows = pieces["row"][members].tolist()
            contents = self.runner.run_each(block, rows, epoch, partial(self._fetched, block))
            for at, content in zip(members.tolist(), contents, strict=True):
                found[at] = content
        return found

    def _fetched(self, block: RecordBlock, row: int, sample: Any) -> bytes:
        if isinstance(sample, Failed):
            index = int(self._manifest.units[block.unit]["start"]) + row
            raise DataError(
                f'{self.locate(block.unit, row)}, index {index}: {sample.message}; on_error="skip" drops such samples, '
                "for which all of them are fetched before they are planned"
            ) from sample.error
        return self._pickled(block, row, sample)

    def _rows_of(self, segment: Segment) -> tuple[int, range]:
        stop = segment.row_stop
        return segment.unit, range(
            segment.row_start, int(self._manifest.units[segment.unit]["rows"]) if stop < 0 else stop
        )

    def _kept(self, block: RecordBlock, index: int, sample: Any) -> _Kept:
        length = 1
        if not isinstance(sample, Failed):
            reason = READ_ERROR if self.source.transform is None else TRANSFORM_ERROR
            try:
                length = _length_of(sample, self.source.length)
                sample = self._picked(sample)
            except _NoColumnError as error:
                sample = Failed(reason, str(error))
            except Exception as error:
                sample = Failed(reason, f"'length' failed: {type(error).__name__}: {error}", error)
        row = block.row_start + index
        if not isinstance(sample, Failed):
            return _Kept(KEPT, length, self._pickled(block, row, sample))
        if sample.message and self.source.on_error == "raise":
            raise self._failed(block.unit, row, sample) from sample.error
        return _Kept(sample.reason, 0, b"")

    def _picked(self, sample: Any) -> Any:
        """A record of a file with `Source.columns` alone; what a dataset or a transform gave stays as it is."""
        columns = self.source.columns
        if columns is None or self.source.transform is not None or self._manifest.format == "dataset":
            return sample
        missing = [name for name in columns if name not in sample]
        if missing:
            raise _NoColumnError(f"{missing[0]!r} is not among its keys {sorted(sample)}")
        return {name: sample[name] for name in columns}

    def _pickled(self, block: RecordBlock, row: int, sample: Any) -> bytes:
        try:
            return pickled(sample)
        except Exception as error:
            raise DataError(
                f"{self.locate(block.unit, row)}: the sample, a {type(sample).__name__}, does not pickle "
                f"({type(error).__name__}: {error}), and so cannot be sent to a rank; give plain data: numbers, "
                "strings, arrays, tensors, images, or objects of classes that a module defines"
            ) from error

    def _assemble(
        self, key: PartKey, places: Sequence[tuple[int, range]], kept: Sequence[_Kept] | None, is_last: bool
    ) -> Part:
        count = sum(len(rows) for _, rows in places)
        pieces = np.zeros(count, PIECE)
        for name in ("source", "epoch", "window", "part"):
            pieces[name] = getattr(key, name)
        pieces["unit"] = np.repeat([unit for unit, _ in places], [len(rows) for _, rows in places])
        pieces["row"] = np.concatenate([np.asarray(rows) for _, rows in places])
        pieces["stop"] = -1
        codes = np.full(count, KEPT, np.uint8)
        pieces["length"] = 1
        payload, payload_bytes = None, 0
        if kept is not None:
            codes[:] = [entry.code for entry in kept]
            pieces["length"] = [entry.length for entry in kept]
            payload = _joined([entry.content for entry in kept])
            payload_bytes = payload.values.nbytes + payload.offsets.nbytes
        pieces["loss_tokens"] = codes == KEPT
        order = self._permutation(key, count)
        pieces, codes = pieces[order], codes[order]
        pieces["entry"] = np.arange(count)
        meta = MetaBlock(
            key=key,
            pieces=pieces,
            first=np.ones(count, np.bool_),
            kept=codes == KEPT,
            reason=codes,
            reasons=REASONS,
            last_in_window=is_last,
            payload_bytes=payload_bytes + pieces.nbytes,
        )
        nowhere = np.zeros(count, np.int64)
        return Part(
            meta=meta,
            tokens={},
            starts=nowhere,
            chunks=nowhere.astype(np.int32),
            samples={},
            records=order,
            payload=payload,
        )


def _length_of(sample: Any, length: Any) -> int:
    """At least 1: what `Source.length` says, else the number of `input_ids` of a dict that has them, else 1."""
    if length is not None:
        found = as_int(sample[length] if isinstance(length, str) else length(sample))
        if not 0 <= found <= _MAX_LENGTH:
            raise ValueError(f"{found} is no length, which is from 0 to {_MAX_LENGTH}")
        return max(found, 1)
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    shape = getattr(ids, "shape", None)
    if shape is not None:
        return max(int(shape[-1]), 1) if len(shape) else 1
    return max(len(ids), 1) if isinstance(ids, (list, tuple)) else 1


def _joined(contents: Sequence[bytes]) -> Ragged:
    offsets = np.zeros(len(contents) + 1, np.int64)
    np.cumsum([len(content) for content in contents], out=offsets[1:])
    return Ragged(np.frombuffer(bytearray().join(contents), np.uint8), offsets)
