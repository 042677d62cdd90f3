"""`JoinedReader`: reads the records of a source completed by those that `Source.join` names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.ids import read_ids
from megascale_lightning.loading.joined import Found, JoinedFiles, chosen
from megascale_lightning.loading.transforms import records_of
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.diskcache import DiskCache
from megascale_lightning.sources.stores.filepool import FilePool

__all__ = ["JoinedReader", "make_record_reader", "own_length"]


def make_record_reader(
    source: Source,
    manifest: Manifest,
    columns: Sequence[str] | None,
    *,
    pool: FilePool | None = None,
    cache: DiskCache | None = None,
    fills: bool = False,
) -> SourceReader:
    """As `make_reader`, of records that are completed by what is joined to them; `fills` as in `JoinedReader`."""
    reader = make_reader(source, manifest, columns, pool=pool, cache=cache)
    if not source.joins:
        return reader
    pairs = zip(source.joins, manifest.joined, strict=True)
    joined = [JoinedFiles(source, join, of_join, pool=pool, cache=cache) for join, of_join in pairs]
    return JoinedReader(source, manifest, columns, reader, joined, fills=fills)


def own_length(source: Source) -> list[str]:
    """The column of `Source.length`, where it is one of the source's own files."""
    joined = {name for join in source.joins for name in join.columns or ()}
    return [source.length] if isinstance(source.length, str) and source.length not in joined else []


class JoinedReader(SourceReader):
    """`SourceReader` of completed records.

    One that cannot be completed is a failed one, and in `RecordBlock.unpaired`. Blocks are tables where those of all
    files are, and of one schema; else they hold objects.

    Args:
        source: Whose records they are.
        manifest: Its files.
        columns: What is kept of its own records; None: all.
        reader: Reads its own records.
        joined: By what they are completed.
        fills: Where only some of the joined files have a field it may be null in other records, too: whether it is
            depends on their block. Whoever sees records as they are wants none of that.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        columns: Sequence[str] | None,
        reader: SourceReader,
        joined: Sequence[JoinedFiles],
        *,
        fills: bool = False,
    ) -> None:
        self._name, self._manifest, self._columns = source.name, manifest, columns
        self._reader, self._joined, self._fills = reader, joined, fills

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """See `SourceReader.read`.

        Raises:
            ConfigError: A record and what is joined to it have a field of the same name.
            DataError: What is joined has an id twice.
        """
        with self._hinting():
            block = self._reader.read(unit, row_start, row_stop)
        return self._complete(block)

    def read_slice(self, unit: int, index: int, slice_bytes: int) -> tuple[RecordBlock, bool]:
        """See `SourceReader.read_slice`, and `read`."""
        with self._hinting():
            block, is_last = self._reader.read_slice(unit, index, slice_bytes)
        return self._complete(block), is_last

    def read_epoch_slice(
        self, unit: int, index: int, slice_bytes: int, epoch: tuple[str | int, ...]
    ) -> tuple[RecordBlock, bool]:
        """See `SourceReader.read_epoch_slice`, and `read`."""
        with self._hinting():
            block, is_last = self._reader.read_epoch_slice(unit, index, slice_bytes, epoch)
        return self._complete(block), is_last

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()
        for joined in self._joined:
            joined.close()

    @contextmanager
    def _hinting(self) -> Iterator[None]:
        """A length is looked for in the source's own files where no `Join` names it: nobody knows what theirs have."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{error}. One of what is joined is to be named in columns= of its Join") from error

    def _complete(self, block: RecordBlock) -> RecordBlock:
        if block.objects is not None and self._columns is not None:
            # Formats that read a record as a whole give all of it.
            block = replace(block, objects=[chosen(record, self._columns) for record in block.objects])
        ids = []
        for joined in self._joined:
            found, problems = read_ids(block, joined.on, self._where)
            block = replace(block, failures={**problems, **block.failures})
            ids.append(found)
        for joined, of_join in zip(self._joined, ids, strict=True):
            partners, without = joined.find(of_join, block.failures)
            block = self._merged(block, partners, without, str(joined))
        return block

    def _merged(
        self, block: RecordBlock, partners: Sequence[Found], without: dict[int, str], where: str
    ) -> RecordBlock:
        """The block with the fields of its records' partners.

        Args:
            block: Its failed records have none.
            partners: Of its records.
            without: Why others have none.
            where: The files of the partners, for messages.
        """
        merged = self._as_table(block, partners, where)
        if merged is None:
            merged, unreadable = self._as_objects(block, partners, where)
            without = {**without, **unreadable}
        without = {at: text for at, text in without.items() if at not in merged.failures}
        unpaired = frozenset({*merged.unpaired, *without})
        return replace(merged, failures={**merged.failures, **without}, unpaired=unpaired)

    def _as_table(self, block: RecordBlock, partners: Sequence[Found], where: str) -> RecordBlock | None:
        """The merged block as a table; None where it cannot be one."""
        tables = [one.block.table for one in partners if one.block.table is not None]
        if block.table is None or not tables or len(tables) < len(partners):
            return None
        are_alike = all(table.schema.equals(tables[0].schema) for table in tables)
        if not are_alike and not self._fills:
            return None
        try:
            joined = pa.concat_tables(tables, promote_options="none" if are_alike else "default")
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):  # one field has several types
            return None
        schema = joined.schema
        self._refuse_same(block.table.column_names, schema.names, where)
        at = np.full(block.num_rows, -1, np.int64)
        at[np.concatenate([one.positions for one in partners])] = np.arange(sum(map(len, tables)))
        indices: Any = pa.array(at, mask=at < 0)
        taken = joined.take(indices)
        table = block.table
        for index, column in enumerate(taken.columns):
            table = table.append_column(schema.field(index), column)
        return replace(block, table=table)

    def _as_objects(
        self, block: RecordBlock, partners: Sequence[Found], where: str
    ) -> tuple[RecordBlock, dict[int, str]]:
        """The merged block as objects, and what is wrong with partners whose values python cannot hold."""
        records, unreadable = records_of(block)
        objects, failures = list(records), {**unreadable, **block.failures}
        without: dict[int, str] = {}
        for one in partners:
            fields, problems = records_of(one.block)
            for at, position in enumerate(one.positions):
                if at in problems:
                    without[position] = f"what belongs to it in {where}: {problems[at]}"
                elif position not in failures:
                    self._refuse_same(objects[position], fields[at], where)
                    objects[position] = {**objects[position], **fields[at]}
        return replace(block, table=None, objects=objects, failures=failures), without

    def _refuse_same(self, own: Collection[str], given: Collection[str], where: str) -> None:
        both = [name for name in given if name in own]
        if both:
            raise ConfigError(
                f"source {self._name!r}: its own records have the fields {both}, and so have those of {where} that are "
                "joined: choose what is read of each, by columns= of the source and of the Join"
            )

    def _where(self, unit: int, row: int) -> str:
        return f"source {self._name!r}, {self._manifest.locate(unit, row)}"
