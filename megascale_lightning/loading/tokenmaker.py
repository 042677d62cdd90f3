"""`TokenMaker`: parts of packed and padded rows: fields as arrays, overlong samples settled, targets counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import DataError
from megascale_lightning.loading.columns import Fields, Fragment, from_table
from megascale_lightning.loading.joins import own_length
from megascale_lightning.loading.partmaker import LoadedSource, PartMaker
from megascale_lightning.loading.partners import settle_partners
from megascale_lightning.loading.parts import Part
from megascale_lightning.loading.pieces import apply_overlong, count_loss_tokens, cut_records, permute_entries
from megascale_lightning.loading.reasons import KEPT, REASONS, TRUNCATED
from megascale_lightning.loading.runs import BATCHED_RECORDS, TOKEN_RECORDS, Run, cut_block
from megascale_lightning.loading.samplefields import join_samples, sample_bytes
from megascale_lightning.loading.transforms import failure_of
from megascale_lightning.loading.works import TokenWork
from megascale_lightning.rows import Rows
from megascale_lightning.sources.formats.columnchecks import check_columns
from megascale_lightning.sources.records import RecordBlock
from megascale_lightning.sources.source import Source
from megascale_lightning.types import FloatArray, IntArray, MetaBlock, PartKey

__all__ = ["TokenMaker"]


class TokenMaker(PartMaker):
    """See `PartMaker`."""

    def __init__(
        self, loaded: LoadedSource, rows: Rows, *, seed: int, metadata: Sequence[str] = (), **more: Any
    ) -> None:
        source = loaded.source
        self._fields = Fields(rows.token_columns, tuple(dict.fromkeys([*rows.sample_fields, *metadata])), source.length)
        self._needs_samples = source.is_transformed or callable(source.length)
        self._work = TokenWork(
            source=source, seed=seed, manifest=loaded.manifest, columns=self._columns_of(source), fields=self._fields
        )
        super().__init__(loaded, rows, seed=seed, metadata=metadata, **more)

    def _columns(self) -> Sequence[str] | None:
        return self._columns_of(self.source)

    def _columns_of(self, source: Source) -> Sequence[str] | None:
        if self._needs_samples or (source.joins and source.columns is None):
            return source.read_columns
        if source.joins:
            return list(dict.fromkeys([*(source.read_columns or ()), *own_length(source)]))
        together = [] if source.together is None else [source.together]
        length = [source.length] if isinstance(source.length, str) else []
        return list(dict.fromkeys([*self._fields.tokens, *self._fields.samples, *length, *together]))

    def make(self, key: PartKey) -> Part:
        """Read and settle one part; see `PartMaker.make`."""
        read: list[tuple[RecordBlock, Fragment]] = []
        ends: list[bool] = []
        ids: list[list[Any]] = []
        for run, fragment in self._made(key, ends):
            self._settle(run.block, fragment.failures, key.epoch)
            if self._partners is not None:
                ids.append(self._partners.ids(run.block))
            # Where they are is all that is needed from now on: text is many times as long as its tokens.
            read.append((replace(run.block, table=None, objects=None, raw={}), fragment))
        return self._assemble(key, read, ids, ends[-1])

    def _made(self, key: PartKey, ends: list[bool]) -> Iterator[tuple[Run, Fragment]]:
        """The runs of a part in order, with their fields; `ends` gets whether each block read ends the window."""
        runs = self._runs(key, ends)
        if self._needs_samples:
            yield from self._placed(self._executors.each(self._work, runs))
            return
        # A dataset's `__getitem__` is the user's code, too.
        for is_called, group in groupby(runs, lambda run: run.block.lazy):
            if is_called:
                yield from self._placed(self._executors.each(self._work, group))
                continue
            for run in group:
                with self._placing(run.block.unit):
                    fragment = self._plain(run)
                yield run, fragment

    def _plain(self, run: Run) -> Fragment:
        """The fields of a run that none of the user's code is needed for."""
        block = run.block
        if block.table is None:
            return self._work(run)
        where = f"source {self.source.name!r}, {self._manifest.locate(block.unit)}"
        if self.source.joins:
            fields = self._fields
            length = [fields.length] if isinstance(fields.length, str) else []
            path = f"{self._manifest.locate(block.unit)}, with what is joined to it,"
            check_columns(self.source.name, path, block.table.column_names, [*fields.tokens, *fields.samples, *length])
        return from_table(
            where, block.table, self._fields, {index: failure_of(block, index) for index in block.failures}
        )

    def _runs(self, key: PartKey, ends: list[bool]) -> Iterator[Run]:
        size = BATCHED_RECORDS if self.source.transform_batched is not None else TOKEN_RECORDS
        for block, is_last in self._blocks(key):
            ends.append(is_last)
            is_whole = block.table is not None and not self._needs_samples
            for cut in [block] if is_whole else cut_block(block, size):
                yield Run(cut, key.epoch)

    def _assemble(
        self, key: PartKey, read: Sequence[tuple[RecordBlock, Fragment]], ids: Sequence[list[Any]], is_last: bool
    ) -> Part:
        blocks, fragments = [block for block, _ in read], [fragment for _, fragment in read]
        units = np.concatenate([np.full(block.num_rows, block.unit) for block in blocks])
        rows = np.concatenate([block.row_start + np.arange(block.num_rows) for block in blocks])
        capacity, whole = self._rows.capacity, np.concatenate([fragment.lengths for fragment in fragments])

        def where(record: int) -> str:
            return self.locate(int(units[record]), int(rows[record]))

        codes = np.concatenate([fragment.codes for fragment in fragments])
        lengths, codes = apply_overlong(whole, codes, capacity, self.source.overlong, where)
        joined = None if self._partners is None else self._partners.continued(blocks, ids)
        if joined is not None:
            policies: dict[str, Any] = {"rows": self._rows, "source": self.source, "where": where}
            lengths, codes = settle_partners(whole, codes, joined, **policies)
        pieces, records, first = cut_records(lengths, codes, capacity)
        for name in ("source", "epoch", "window", "part"):
            pieces[name] = getattr(key, name)
        pieces["unit"], pieces["row"] = units[records], rows[records]
        chunks = np.repeat(np.arange(len(read), dtype=np.int32), [block.num_rows for block in blocks])[records]
        starts = np.concatenate([fragment.offsets[:-1] for fragment in fragments])[records] + pieces["start"]
        pieces["loss_tokens"] = _loss_tokens(fragments, pieces, starts, chunks)
        # Records that stay together are never cut, so that a record is an entry.
        moved = records if joined is None else np.cumsum(~joined) - 1
        order = permute_entries(moved, self._permutation(key, int(moved[-1]) + 1 if len(moved) else 0))
        pieces, codes = pieces[order], codes[records[order]]
        pieces["entry"] = np.arange(len(pieces))
        tokens = {field: _of_one_type([f.tokens[field] for f in fragments]) for field in self._fields.tokens}
        samples = {field: join_samples([f.samples[field] for f in fragments]) for field in self._fields.samples}
        numbers = {name: self._numbers(name, samples[name], units, rows) for name in self._metadata}
        samples = {field: samples[field] for field in self._rows.sample_fields}
        meta = MetaBlock(
            key=key,
            pieces=pieces,
            first=first[order],
            kept=(codes == KEPT) | (codes == TRUNCATED),
            reason=codes,
            reasons=REASONS,
            last_in_window=is_last,
            payload_bytes=_num_bytes(tokens, samples) + pieces.nbytes,
            metadata={name: values[records][order] for name, values in numbers.items()},
            joined=None if joined is None else joined[order],
        )
        return Part(
            meta=meta,
            tokens=tokens,
            starts=starts[order],
            chunks=chunks[order],
            samples=samples,
            records=records[order],
        )

    def _numbers(self, name: str, values: npt.NDArray[Any], units: IntArray, rows: IntArray) -> FloatArray:
        """One number for each record; 0 for those that are dropped and have none."""
        if values.dtype == object and values.ndim == 1:
            values = np.array([0 if value is None else value for value in values.tolist()])
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise DataError(
                f"source {self.source.name!r}: the strategy wants a number {name!r} of each sample, not "
                f"{values.dtype} of shape {list(values.shape[1:])}: correct the field, or the cost that names it"
            )
        numbers = values.astype(np.float64)
        odd = np.flatnonzero(~np.isfinite(numbers))
        if odd.size:
            place = self.locate(int(units[odd[0]]), int(rows[odd[0]]))
            raise DataError(f"{place}: {name!r}, which the strategy wants, is {numbers[odd[0]]}: make it finite")
        return numbers


def _of_one_type(chunks: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """The same values with the dtype that holds all of them; chunks without values have no say."""
    filled = [values.dtype for values in chunks if values.size] or [values.dtype for values in chunks[:1]]
    return [np.ascontiguousarray(values, np.result_type(*filled)) for values in chunks]


def _num_bytes(tokens: Mapping[str, Sequence[npt.NDArray[Any]]], samples: Mapping[str, npt.NDArray[Any]]) -> int:
    payload = sum(values.nbytes for arrays in tokens.values() for values in arrays)
    return int(payload) + sum(sample_bytes(values) for values in samples.values())


def _loss_tokens(
    fragments: Sequence[Fragment], pieces: IntArray, starts: npt.NDArray[np.int64], chunks: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    lengths = pieces["length"].astype(np.int64)
    bounds = np.searchsorted(chunks, np.arange(len(fragments) + 1))
    found = [
        count_loss_tokens(fragment.tokens, starts[a:b], lengths[a:b])
        for fragment, a, b in zip(fragments, bounds[:-1], bounds[1:], strict=True)
    ]
    return np.concatenate(found)
