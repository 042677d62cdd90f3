"""What is made of a run of records, here or in another process: fields as arrays, or samples pickled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import index as as_int
from typing import Any, Final, NamedTuple

import numpy as np

from megascale_lightning.loading.batched import BatchRunner
from megascale_lightning.loading.columns import Fields, Fragment, from_columns, from_samples
from megascale_lightning.loading.joins import own_length
from megascale_lightning.loading.payload import pickled
from megascale_lightning.loading.reasons import KEPT, READ_ERROR, TRANSFORM_ERROR
from megascale_lightning.loading.runs import Run
from megascale_lightning.loading.transforms import Failed, SampleRunner
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.records import RecordBlock, SourceReader, missing_key
from megascale_lightning.sources.source import Source

__all__ = ["Kept", "SampleWork", "TokenWork", "Work"]

_MAX_LENGTH: Final = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class Work(ABC):
    """Runs the user's code: the same wherever it runs. Safe to call from several threads."""

    source: Source
    seed: int
    manifest: Manifest
    columns: Sequence[str] | None
    """What is read of a record; None for all of it."""

    @abstractmethod
    def __call__(self, run: Run) -> Any:
        """What the run became; picklable."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def portable(self) -> Work:
        """The work for another process, without what it does not need there: where files are, and the keys to them."""
        joins = tuple(replace(join, data=(), storage_options=None) for join in self.source.joins)
        source = replace(self.source, storage_options=None, filesystem=None, executor="inline", join=joins or None)
        if self.manifest.format == "dataset":
            return replace(self, source=source)
        return replace(
            self,
            source=replace(source, data=None),
            manifest=replace(self.manifest, files=(), units=self.manifest.units[:0], joined=()),
        )

    def read(self, unit: int, row_start: int, row_stop: int) -> RecordBlock:
        """Records of a dataset."""
        return self._reader.read(unit, row_start, row_stop)

    @cached_property
    def _reader(self) -> SourceReader:
        return make_reader(self.source, self.manifest, self.columns)


@dataclass(frozen=True, kw_only=True)
class TokenWork(Work):
    """Gives the `Fragment` of a run, for packed and padded rows."""

    fields: Fields

    @cached_property
    def _samples(self) -> SampleRunner:
        return SampleRunner(self.source, self.seed)

    @cached_property
    def _batches(self) -> BatchRunner | None:
        return None if self.source.transform_batched is None else BatchRunner(self.source, self.seed)

    def __call__(self, run: Run) -> Fragment:
        """See `BatchRunner.run` and `SampleRunner.run_each` for what is raised."""
        if self._batches is not None:
            return from_columns(self._batches.run(run.block, run.epoch), self.fields, self._batches.transform_name)
        name = None if self.source.transform is None else self._samples.transform_name
        return from_samples(self._samples.run(run.block, run.epoch), self.fields, name)


class Kept(NamedTuple):
    """What is kept of a record of collated rows."""

    length: int = 0
    content: bytes = b""
    """The sample, pickled."""
    failed: Failed | None = None
    """Why there is none."""
    fatal: bool = False
    """It ends the run whatever `on_error` says."""

    @property
    def code(self) -> int:
        """Of `reasons`."""
        return KEPT if self.failed is None else self.failed.reason


class _NoColumnError(Exception):
    """A record lacks a declared column."""


@dataclass(frozen=True, kw_only=True)
class SampleWork(Work):
    """Gives one `Kept` for each wanted record of a run, for collated rows."""

    @cached_property
    def _samples(self) -> SampleRunner:
        return SampleRunner(self.source, self.seed, dicts_only=False)

    @cached_property
    def _batches(self) -> BatchRunner | None:
        batched = self.source.transform_batched
        return None if batched is None else BatchRunner(self.source, self.seed, dicts_only=False)

    @cached_property
    def _aside(self) -> frozenset[str]:
        """Fields that are read for something else: ids of what is joined, and the length of the source's own files."""
        joins = self.source.joins
        return frozenset([*(join.on for join in joins), *own_length(self.source)]) if joins else frozenset()

    def __call__(self, run: Run) -> list[Kept]:
        """See `BatchRunner.run` and `SampleRunner.run_each` for what is raised."""
        if self._batches is not None:
            samples = self._batches.run(run.block, run.epoch).samples()
            return [self._kept(index, samples[index]) for index in run.wanted]
        return self._samples.run_each(run.block, run.wanted, run.epoch, self._kept)

    def _kept(self, index: int, sample: Any) -> Kept:
        if isinstance(sample, Failed):
            return Kept(failed=sample)
        reason = TRANSFORM_ERROR if self.source.is_transformed else READ_ERROR
        try:
            length = _length_of(sample, self.source.length)
            sample = self._picked(sample)
        except _NoColumnError as error:
            return Kept(failed=Failed(reason, str(error)))
        except Exception as error:
            return Kept(failed=Failed(reason, f"'length' failed: {type(error).__name__}: {error}", error))
        try:
            return Kept(length, pickled(sample))
        except Exception as error:
            problem = (
                f"the sample, a {type(sample).__name__}, does not pickle ({type(error).__name__}: {error}), and so "
                "cannot be sent to a rank; give plain data: numbers, strings, arrays, tensors, images, or objects of "
                "classes that a module defines"
            )
            return Kept(failed=Failed(reason, problem, error), fatal=True)

    def _picked(self, sample: Any) -> Any:
        """A record of a file with `Source.columns` alone, and what is joined to it; other samples stay as they are."""
        columns = self.source.columns
        if columns is None or self.source.is_transformed or self.manifest.format == "dataset":
            return sample
        missing = [name for name in columns if name not in sample]
        if missing:
            raise _NoColumnError(missing_key(missing[0], sample))
        if self._aside:
            return {name: value for name, value in sample.items() if name in columns or name not in self._aside}
        return {name: sample[name] for name in columns}


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
