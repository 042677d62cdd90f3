"""`RecordFinder`: where one record stands in the order of its source, and whether it is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.partmaker import LoadedSource, PartMaker
from megascale_lightning.loading.reasons import TRUNCATED
from megascale_lightning.loading.samplemaker import SampleMaker
from megascale_lightning.loading.tokenmaker import TokenMaker
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.order import num_windows, window_parts, window_units_of
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.filepool import FilePool
from megascale_lightning.types import MetaBlock, PartKey

__all__ = ["Found", "RecordFinder", "check_place"]

_MOST_EPOCHS: Final = 1 << 31
"""As many as an id has room for."""


class Found(NamedTuple):
    """A record in its part."""

    window: int
    part: int
    entry: int
    """Of its first piece."""
    reason: str
    """Why it is left out; empty: it is not."""
    meta: MetaBlock
    """The part as the planner knows it."""


class RecordFinder:
    """Finds records of one source. What it makes of a part is what the loaders make of it.

    Args:
        loaded: The source.
        rows: Of the stream.
        stream: Its name.
        seed: Of the run.
        window_units: Units of a window.
        part_bytes: Stored bytes of a part.
        metadata: Numbers that the strategy wants of a sample.
    """

    def __init__(
        self,
        loaded: LoadedSource,
        rows: Rows,
        *,
        stream: str,
        seed: int,
        window_units: int,
        part_bytes: int,
        metadata: Sequence[str] = (),
    ) -> None:
        self._loaded, self._rows, self._stream, self._metadata = loaded, rows, stream, metadata
        self._seed, self._window_units, self._part_bytes = seed, window_units, part_bytes
        self._shuffle = loaded.source.shuffle

    def window(self, epoch: int, unit: int) -> int:
        """The window of an epoch that a unit is in; nothing is read.

        Raises:
            ConfigError: There is no such epoch or unit.
        """
        manifest, source = self._loaded.manifest, self._loaded.source
        check_place(source, manifest.num_units, epoch, unit)
        order = (manifest, source.name, self._stream, self._seed, epoch)
        windows = range(num_windows(manifest, self._window_units))
        return next(
            window for window in windows if unit in window_units_of(*order, window, self._window_units, self._shuffle)
        )

    def find(self, epoch: int, unit: int, row: int) -> Found:
        """Read and transform the part that a record is in, and perhaps others that it could be in.

        Raises:
            ConfigError: There is no such record.
            DataError: The part cannot be made.
        """
        kind: Any = SampleMaker if isinstance(self._rows, CollatedRows) else TokenMaker
        maker: PartMaker = kind(
            self._loaded,
            self._rows,
            seed=self._seed,
            window_units=self._window_units,
            part_bytes=self._part_bytes,
            pool=FilePool(),
            metadata=self._metadata,
        )
        try:
            for window, part in self._candidates(epoch, unit, row):
                meta = maker.make(PartKey(self._stream, 0, epoch, window, part)).meta
                here = np.flatnonzero((meta.pieces["unit"] == unit) & (meta.pieces["row"] == row))
                if here.size:
                    code = int(meta.reason[here[0]])
                    return Found(window, part, int(here[0]), "" if code == TRUNCATED else meta.reasons[code], meta)
                if self._loaded.manifest.sliced and meta.last_in_window:
                    break
        finally:
            maker.close()
        raise ConfigError(f"source {self._loaded.source.name!r}: unit {unit} has no row {row} in epoch {epoch}")

    def _candidates(self, epoch: int, unit: int, row: int) -> Iterator[tuple[int, int]]:
        """Windows and parts that may hold a record, the likeliest first."""
        manifest, source = self._loaded.manifest, self._loaded.source
        window = self.window(epoch, unit)
        if manifest.sliced:
            yield from ((window, part) for part in count())
        order = (manifest, source.name, self._stream, self._seed, epoch)
        parts = window_parts(*order, window, self._window_units, self._part_bytes, self._shuffle)
        at = [
            index
            for index, part in enumerate(parts)
            if any(one.unit == unit and (one.row_stop < 0 or row < one.row_stop) for one in part)
        ]
        yield from ((window, part) for part in at[:1])
        if source.together is not None:
            # Its group may have begun in a part, or a unit, before.
            yield from ((window, part) for part in reversed(range(at[0] if at else len(parts))))
            if unit and manifest.units["file"][unit] == manifest.units["file"][unit - 1]:
                yield from self._candidates(epoch, unit - 1, int(np.iinfo(np.int64).max))


def check_place(source: Source, num_units: int, epoch: int, unit: int) -> None:
    """Refuse an epoch or a unit that no sample of a source is of.

    Raises:
        ConfigError: It is one.
    """
    if 0 <= epoch < (source.epochs or _MOST_EPOCHS) and 0 <= unit < num_units:
        return
    epochs = "from 0 on" if source.epochs is None else f"0 to {source.epochs - 1}"
    raise ConfigError(
        f"source {source.name!r} has epochs {epochs} and units 0 to {num_units - 1}, not epoch {epoch}, unit {unit}"
    )
