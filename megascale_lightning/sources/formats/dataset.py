"""Datasets with `__len__` and `__getitem__` (torch map-style, Hugging Face): a unit is a fixed range of indices."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.optionsets import check_options
from megascale_lightning.sources.functions import call_data
from megascale_lightning.sources.globalstates import lent_states
from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.pickled import pickling_problem
from megascale_lightning.sources.records import RecordBlock, SourceReader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = [
    "MAX_PICKLED_BYTES",
    "UNIT_RECORDS",
    "DatasetReader",
    "check_portable",
    "recognise_data",
    "resolve_dataset",
]

UNIT_RECORDS: Final = 1024
RECORD_BYTES: Final = 16 << 10
"""A record's size is not known before it is fetched: parts are cut as if it were this."""
MAX_PICKLED_BYTES: Final = 100_000_000

_WAYS_OUT_OF_CALLABLE: Final = (
    'define it at the top of a module and make what it needs inside the callable, or use runtime="local"'
)
_WAYS_OUT: Final = 'give a callable that returns the dataset (`Source(name, make_dataset)`), or use runtime="local"'


def resolve_dataset(source: Source) -> Any:
    """The dataset itself, made by the callable where one was given.

    Raises:
        ConfigError: It has no length or no items.
        DataError: The callable failed.
    """
    data = source.data
    if _is_called(data):
        with lent_states():  # the callable may draw, and these are the user's own
            data = call_data(source.name, data)
    if not _is_map_style(data):
        raise ConfigError(
            f"source {source.name!r}: a dataset needs __len__ and __getitem__, {type(data).__name__} lacks one; "
            "give a map-style dataset, or a callable without arguments that returns one"
        )
    return data


def recognise_data(source: Source) -> tuple[str, Any]:
    """Whether `data` that name no files are a "dataset" or an "iterable", and what a callable returned.

    Raises:
        ConfigError: They are neither, or an iterable that is no callable.
        DataError: The callable failed.
    """
    data = source.data
    if not _is_called(data):
        if _is_map_style(data):
            return "dataset", None
        if not hasattr(data, "__iter__"):
            raise _neither(source, data)
        from megascale_lightning.sources.formats.iterable import no_callable

        raise no_callable(source)
    with lent_states():  # the callable may draw, and these are the user's own
        made = call_data(source.name, data)
    if _is_map_style(made):
        return "dataset", made
    if hasattr(made, "__iter__"):
        return "iterable", made
    raise _neither(source, made)


def _is_called(data: Any) -> bool:
    return callable(data) and (isinstance(data, type) or not _is_map_style(data))


def _is_map_style(data: Any) -> bool:
    # torch gives `__getitem__` to its iterable datasets, and users `__len__`.
    is_iterable = any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_iterable


def _neither(source: Source, data: Any) -> ConfigError:
    return ConfigError(
        f"source {source.name!r}: a {type(data).__name__} is neither a dataset with __len__ and __getitem__ nor an "
        "iterable; give paths, a map-style dataset, or a callable without arguments that returns one or an iterable"
    )


class DatasetFormat(SourceFormat):
    """A unit is a range of `UNIT_RECORDS` indices."""

    def list_files(self, source: Source, storage: Storage) -> tuple[FileInfo, ...]:
        """One "file", which has the length of the dataset as its size."""
        return (FileInfo("<dataset>", len(resolve_dataset(source)), 0),)

    def list_units(self, source: Source, files: Sequence[FileInfo], storage: Storage) -> Listing:
        """See `SourceFormat`."""
        check_options(source, "dataset", {})
        length = files[0].size
        starts = range(0, length, UNIT_RECORDS)
        stops = [min(start + UNIT_RECORDS, length) for start in starts]
        found = [(0, a, b, b - a, (b - a) * RECORD_BYTES) for a, b in zip(starts, stops, strict=True)]
        return Listing(np.array(found, UNIT))

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> DatasetReader:
        """See `SourceFormat`."""
        return DatasetReader(source, manifest, columns)


def check_portable(source: Source, dump: Callable[[Any, Any], None] = pickle.dump) -> None:
    """Refuse a dataset that cannot be sent to another process, or only at a high price.

    Raises:
        ConfigError: It does not pickle or is over 100 MB; names the attribute and the ways out.
    """
    problem = pickling_problem(source.data, dump, MAX_PICKLED_BYTES)
    if problem is None:
        return
    what = f"source {source.name!r}: {type(source.data).__name__} {problem}"
    for name, value in getattr(source.data, "__dict__", {}).items():
        attribute = pickling_problem(value, dump, MAX_PICKLED_BYTES // 2)
        if attribute is not None:
            what += f"; its attribute {name!r} {attribute}"
            break
    raise ConfigError(f"{what}; {_WAYS_OUT_OF_CALLABLE if _is_called(source.data) else _WAYS_OUT}")


class _Items(Sequence[Any]):
    """Items [start, stop) of a dataset, fetched when indexed."""

    def __init__(self, dataset: Any, start: int, stop: int) -> None:
        self._dataset = dataset
        self._range = range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._range[index]]

    def __iter__(self) -> Iterator[Any]:
        return (self._dataset[index] for index in self._range)


class DatasetReader(SourceReader):
    """`SourceReader` of a dataset; made on first use, so that a callable runs in the role that reads.

    Args:
        source: Its `data` is the dataset, or a callable that returns it.
        manifest: Its units.
        columns: Fields that are needed; None where whole samples are wanted, as the dataset gives them.
    """

    def __init__(self, source: Source, manifest: Manifest, columns: Sequence[str] | None) -> None:
        self._source = source
        self._manifest = manifest
        self._columns = None if columns is None else list(columns)
        self._dataset: Any = None
        self._lock = threading.Lock()

    def read(self, unit: int, row_start: int = 0, row_stop: int = -1) -> RecordBlock:
        """Records of one index range, fetched when the block is indexed; see `SourceReader.read`."""
        dataset = self._opened()
        entry = self._manifest.units[unit]
        first, last = int(entry["start"]), int(entry["stop"])
        stop = last if row_stop < 0 else min(first + row_stop, last)
        start = min(first + row_start, stop)
        size = stop - start
        if self._columns is not None and _is_arrow_backed(dataset, self._columns):
            table = dataset.with_format("arrow", columns=self._columns)[start:stop]
            return RecordBlock(unit=unit, row_start=row_start, num_rows=size, table=table)
        items = _Items(dataset, start, stop)
        return RecordBlock(unit=unit, row_start=row_start, num_rows=size, objects=items, lazy=True)

    def _opened(self) -> Any:
        dataset = self._dataset
        if dataset is not None:
            return dataset
        with lent_states(), self._lock:  # in this order: a thread that has the states may come here
            if self._dataset is None:
                self._dataset = self._selected(resolve_dataset(self._source))
                there, planned = len(self._dataset), self._manifest.files[0].size
                if there != planned:
                    raise ConfigError(
                        f"source {self._source.name!r}: the dataset has {there} records here and {planned} where the "
                        "run began; a callable must return the same data in every process"
                    )
            return self._dataset

    def _selected(self, dataset: Any) -> Any:
        """A Hugging Face dataset with the source's columns alone, where whole samples are wanted."""
        columns = self._source.columns
        if self._columns is not None or columns is None or not hasattr(dataset, "select_columns"):
            return dataset
        return dataset.select_columns(list(columns))

    def close(self) -> None:
        """Let go of a dataset that a callable made."""
        with self._lock:
            self._dataset = None


def _is_arrow_backed(dataset: Any, columns: Sequence[str]) -> bool:
    """A Hugging Face dataset without a custom format, with these columns: slices come as Arrow tables."""
    form, names = getattr(dataset, "format", None), getattr(dataset, "column_names", None)
    if not isinstance(form, Mapping) or not isinstance(names, list) or not hasattr(dataset, "with_format"):
        return False
    return form.get("type") != "custom" and all(column in names for column in columns)


FORMAT: Final = DatasetFormat()
