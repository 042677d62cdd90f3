"""Callables that return an iterable, such as generator functions: one unit, read in slices of 1024 records."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from inspect import isgenerator, isgeneratorfunction
from itertools import islice
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError, DataError, MegaScaleWarning
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.optionsets import check_options, is_count
from megascale_lightning.sources.functions import call_data
from megascale_lightning.sources.globalstates import OwnStates, lent_states
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.seeding import derive_seed
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.plaintext import Cursors
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "SLICE_RECORDS", "IterableReader", "make_iterator", "no_callable"]

SLICE_RECORDS: Final = 1024
RECORD_BYTES: Final = 16 << 10
"""A record's size is not known before it is there."""

_KNOWN: Final = {"slice_records": is_count(1)}


def make_iterator(source: Source) -> Iterator[Any]:
    """A new iterator over all records.

    Raises:
        ConfigError: `data` is no callable, or what it returned is no iterable.
        DataError: It failed.
    """
    if not callable(source.data):
        raise no_callable(source)
    made = call_data(source.name, source.data)
    if not hasattr(made, "__iter__"):
        raise ConfigError(
            f"source {source.name!r}: the callable returned a {type(made).__name__}, which is no iterable"
        )
    return iter(made)


def no_callable(source: Source) -> ConfigError:
    """What an iterable itself is refused with."""
    kind = type(source.data).__name__
    return ConfigError(
        f"source {source.name!r}: data is a {kind}, an iterable; give a callable without arguments that returns a new "
        "one for each epoch and after each restart, such as a generator function or "
        f"Source({source.name!r}, lambda: {kind}(...))"
    )


class IterableFormat(SourceFormat):
    """One unit, in slices of `slice_records` records. It may never end: then `epochs` must be None."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """One "file", whose size is not known. Makes iterators, and takes nothing from them.

        Raises:
            ConfigError: `data` is no callable, returns no iterable, or the same iterator each time.
        """
        with lent_states():  # the callable may draw, and these are the user's own
            iterator = make_iterator(source)
            again = None if isgeneratorfunction(source.data) else make_iterator(source)
        if again is iterator:
            raise ConfigError(
                f"source {source.name!r}: the callable returns the same {type(iterator).__name__} each time, which can "
                "be gone through once; it must make a new one in each call, for each epoch and after each restart"
            )
        return (FileInfo("<iterable>", 0, 0),)

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`. Warns of what a resume costs."""
        check_options(source, "iterable", _KNOWN)
        warnings.warn(
            f"source {source.name!r} is an iterable: a resume, and a loader that is replaced, goes through all "
            "that was consumed of the epoch, and the callable must give the same sequence each time; files or a "
            "map-style dataset are read from where they were",
            MegaScaleWarning,
            stacklevel=2,
        )
        return Listing(np.array([(0, 0, 0, -1, SLICE_RECORDS * RECORD_BYTES)], UNIT), sliced=True)

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> IterableReader:
        """See `SourceFormat`."""
        return IterableReader(source)


class _IteratorCursor:
    """Takes slices from one iterator, whose draws from global random states nobody else disturbs."""

    def __init__(self, source: Source, seed: int, slice_records: int) -> None:
        self.next_index = 0
        self.ended = False
        self._name = source.name
        self._slice_records = slice_records
        self._states = OwnStates(seed)
        with self._states.lent():
            self._iterator = make_iterator(source)
        self._check_torch()

    def take(self) -> list[Any]:
        """The records of the next slice.

        Raises:
            DataError: The iterator raised an error; names source and record.
        """
        records: list[Any] = []
        try:
            with self._states.lent():
                records.extend(islice(self._iterator, self._slice_records))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also an exit, or a panic of a library that is written in Rust
            row = self.next_index * self._slice_records + len(records)
            raise DataError(
                f"source {self._name!r}: its iterable failed at record {row}: {type(error).__name__}: {error}; what "
                "comes after is lost, so on_error cannot drop it: catch it in the iterable, or do the work that "
                "fails in transform"
            ) from error
        self._check_torch()
        self.next_index += 1
        self.ended = len(records) < self._slice_records
        return records

    def _check_torch(self) -> None:
        if self._states.torch_came:
            raise _TorchCameError

    def close(self) -> None:
        iterator, self._iterator = self._iterator, iter(())
        if isgenerator(iterator):
            with self._states.lent():
                iterator.close()


class _TorchCameError(Exception):
    """The iterable imported torch just now: what it drew from it, a replay would not draw."""


class IterableReader(SourceReader):
    """`SourceReader` of an iterable. Reading on costs nothing extra; going back makes a new iterator and skips.

    Args:
        source: Its `data` is the callable.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._slice_records = int(source.format_options.get("slice_records", SLICE_RECORDS))
        self._cursors: Cursors[_IteratorCursor] = Cursors(limit=2)

    def read_slice(self, unit: int, index: int, slice_bytes: int) -> tuple[RecordBlock, bool]:
        """Records of one slice, a fixed number of them; see `SourceReader.read_slice`."""
        return self.read_epoch_slice(unit, index, slice_bytes, ())

    def read_epoch_slice(
        self, unit: int, index: int, slice_bytes: int, epoch: tuple[str | int, ...]
    ) -> tuple[RecordBlock, bool]:
        """The same, of one epoch; see `SourceReader.read_epoch_slice`.

        Raises:
            DataError: The iterable raised an error; names source and record.
            IndexError: There is no such slice.
        """
        records, is_last = self._take(index, epoch)
        start = index * self._slice_records
        return RecordBlock(unit=unit, row_start=start, num_rows=len(records), objects=records), is_last

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records [row_start, row_stop); see `SourceReader.read`. An endless iterable has no end to read to."""
        first = index = row_start // self._slice_records
        found: list[Any] = []
        is_last = False
        while not is_last and (row_stop < 0 or index * self._slice_records < row_stop):
            records, is_last = self._take(index, ())
            found += records
            index += 1
        skipped = row_start - first * self._slice_records
        stop = None if row_stop < 0 else skipped + row_stop - row_start
        objects = found[skipped:stop]
        return RecordBlock(unit=unit, row_start=row_start, num_rows=len(objects), objects=objects)

    def _take(self, index: int, epoch: tuple[str | int, ...]) -> tuple[list[Any], bool]:
        def make() -> _IteratorCursor:
            seed = derive_seed("iterable", self._source.name, *epoch)
            return _IteratorCursor(self._source, seed, self._slice_records)

        while True:
            try:
                with self._cursors.at(epoch, index, make) as cursor:
                    while not cursor.ended:
                        records = cursor.take()
                        if cursor.next_index > index:
                            return records, cursor.ended
                    raise IndexError(f"slice {index} of source {self._source.name!r}: it has {cursor.next_index}")
            except _TorchCameError:
                continue  # once: it is loaded now

    def close(self) -> None:
        """Let go of the iterators."""
        self._cursors.close()


FORMAT: Final = IterableFormat()
