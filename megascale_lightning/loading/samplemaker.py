"""`SampleMaker`: parts of collated rows: a record is one sample, kept whole, pickled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megascale_lightning.errors import DataError
from megascale_lightning.loading.executors import num_workers_of
from megascale_lightning.loading.joins import own_length
from megascale_lightning.loading.partmaker import LoadedSource, PartMaker
from megascale_lightning.loading.parts import Part
from megascale_lightning.loading.reasons import KEPT, REASONS
from megascale_lightning.loading.runs import BATCHED_RECORDS, COLLATED_RECORDS, Run, cut_block
from megascale_lightning.loading.transforms import show_call
from megascale_lightning.loading.works import Kept, SampleWork
from megascale_lightning.rows import Rows
from megascale_lightning.sources.order import Segment
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.types import PIECE, IntArray, MetaBlock, PartKey, Ragged

__all__ = ["SampleMaker"]


class SampleMaker(PartMaker):
    """See `PartMaker`.

    Where nothing has to be known of a dataset's samples before they are due, they are fetched when they are taken, one
    by one, and a part holds none of them. Otherwise it holds each of them pickled.
    """

    def __init__(self, loaded: LoadedSource, rows: Rows, *, seed: int, **more: Any) -> None:
        super().__init__(loaded, rows, seed=seed, **more)
        self._work = SampleWork(source=loaded.source, seed=seed, manifest=loaded.manifest, columns=self._columns())

    @property
    def fetches_late(self) -> bool:
        """Samples are fetched by `fetch`, and not when a part is made."""
        source = self.source
        plain = not source.is_transformed and source.length is None
        return plain and self._manifest.format == "dataset" and source.on_error == "raise"

    def _columns(self) -> Sequence[str] | None:
        source = self.source
        if source.columns is None or self._manifest.format == "dataset":
            return None
        return list(dict.fromkeys([*(source.read_columns or ()), *own_length(source)]))

    def make(self, key: PartKey) -> Part:
        """Settle one part, and read it unless samples are fetched late; see `PartMaker.make`."""
        if self.fetches_late:
            segments, is_last = self._segments(key)
            return self._assemble(key, [self._rows_of(segment) for segment in segments], None, is_last)
        places: list[tuple[int, range]] = []
        ends: list[bool] = []
        kept: list[Kept] = []
        for run, found in self._placed(self._executors.each(self._work, self._runs(key, ends))):
            block = run.block
            self._check(run, found)
            failures = {index: one.failed for index, one in enumerate(found) if one.failed is not None}
            self._settle(block, failures, key.epoch)
            kept += found
            places.append((block.unit, range(block.row_start, block.row_start + block.num_rows)))
        return self._assemble(key, places, kept, ends[-1])

    def _runs(self, key: PartKey, ends: list[bool]) -> Iterator[Run]:
        """The runs of a part in order; `ends` gets whether each block read ends the window."""
        size = BATCHED_RECORDS if self.source.transform_batched is not None else COLLATED_RECORDS
        for block, is_last in self._blocks(key):
            ends.append(is_last)
            for cut in cut_block(block, size):
                yield Run(cut, key.epoch)

    def _check(self, run: Run, found: Sequence[Kept]) -> None:
        """Raise what is wrong with a sample and no matter of `on_error`."""
        for index, one in zip(run.wanted, found, strict=True):
            if one.fatal and one.failed is not None:
                place = self.locate(run.block.unit, run.block.row_start + index)
                raise DataError(f"{place}: {one.failed.message}") from one.failed.error

    def fetch(self, epoch: int, pieces: IntArray) -> list[bytes]:
        """The samples of these pieces, pickled, each fetched now.

        Args:
            epoch: Of the pieces.
            pieces: PIECE [k], of this source.

        Raises:
            DataError: A sample cannot be fetched, or does not pickle; names source, index, unit and row.
        """
        order = np.argsort(pieces["unit"], kind="stable")
        found: list[bytes] = []
        for run, kept in self._placed(self._executors.each(self._work, self._late_runs(epoch, pieces[order]))):
            self._check(run, kept)
            found += [self._fetched(run.block, epoch, row, one) for row, one in zip(run.wanted, kept, strict=True)]
        return [found[at] for at in np.argsort(order, kind="stable").tolist()]

    def _late_runs(self, epoch: int, pieces: IntArray) -> Iterator[Run]:
        """Runs of the rows of these pieces, which are sorted by unit; so many that each worker gets one."""
        size = COLLATED_RECORDS
        if self.source.executor != "inline":
            size = min(size, -(-len(pieces) // num_workers_of(self.source)))
        units, starts = np.unique(pieces["unit"], return_index=True)
        for unit, rows in zip(units.tolist(), np.split(pieces["row"], starts[1:]), strict=True):
            block = self._reader.read(unit)
            for start in range(0, len(rows), size):
                yield Run(block, epoch, rows[start : start + size].tolist())

    def _fetched(self, block: RecordBlock, epoch: int, row: int, kept: Kept) -> bytes:
        failed = kept.failed
        if failed is not None and not kept.fatal:
            index = int(self._manifest.units[block.unit]["start"]) + row
            shown = show_call(self.source.name, epoch, block.unit, row)
            raise DataError(
                f"{self.locate(block.unit, row)}, index {index}: {failed.message}; {shown} shows it; "
                'on_error="skip" drops such samples, for which all of them are fetched before they are planned'
            ) from failed.error
        return kept.content

    def _rows_of(self, segment: Segment) -> tuple[int, range]:
        stop = segment.row_stop
        return segment.unit, range(
            segment.row_start, int(self._manifest.units[segment.unit]["rows"]) if stop < 0 else stop
        )

    def _assemble(
        self, key: PartKey, places: Sequence[tuple[int, range]], kept: Sequence[Kept] | None, is_last: bool
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


def _joined(contents: Sequence[bytes]) -> Ragged:
    offsets = np.zeros(len(contents) + 1, np.int64)
    np.cumsum([len(content) for content in contents], out=offsets[1:])
    return Ragged(np.frombuffer(bytearray().join(contents), np.uint8), offsets)
