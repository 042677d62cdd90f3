"""`GivenSamples`: samples that somebody lists, so that a step can be planned of them without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import ConfigError
from megascale_lightning.mixtures import weight_problems
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.buffer import Drawn, SampleBuffer
from megascale_lightning.planning.costs import refuse_missing
from megascale_lightning.rows import PackedRows, Rows
from megascale_lightning.streams import SourceSpec, StreamSpec, initial_state
from megascale_lightning.types import PIECE, FloatArray, IntArray, MetaBlock, PartKey

if TYPE_CHECKING:
    from megascale_lightning.planning.declared import Declared

__all__ = ["GivenSamples"]

_STREAM: Final = "given"


class GivenSamples:
    """The one step that can be planned of listed samples.

    Args:
        infos: Source -> lengths of its samples in tokens, int [n], in order; or a mapping of columns [n], `length` and
            the numbers that costs want beside it, and `together`: neighbours with an equal number share a row.

    Raises:
        ConfigError: There is no source, a length is no whole number of at least 1, or a column is no n numbers.
    """

    in_run = False
    step = 0

    def __init__(self, infos: Mapping[str, Any]) -> None:
        if not isinstance(infos, Mapping) or not all(isinstance(name, str) for name in infos):
            raise ConfigError(
                f"from_buffer_infos(): a mapping is wanted, {{'name': [lengths in tokens]}}, not {infos!r:.80}"
            )
        if not infos:
            raise ConfigError("from_buffer_infos(): no source was given; give {'name': [lengths in tokens]}")
        columns = {
            name: dict(given) if isinstance(given, Mapping) else {"length": given} for name, given in infos.items()
        }
        self._lengths = {name: _lengths_of(name, given.pop("length", None)) for name, given in columns.items()}
        self._metadata = {
            name: {
                column: _numbers_of(name, column, values, len(self._lengths[name])) for column, values in given.items()
            }
            for name, given in columns.items()
        }

        self._joined = {
            name: np.append(False, np.diff(ids) == 0)[: len(ids)]
            for name, columns in self._metadata.items()
            if (ids := columns.pop("together", None)) is not None
        }

    def draw(self, declared: Declared) -> tuple[StreamSpec, Drawn]:
        """See `StepSource`."""
        spec = self._spec(declared)
        blocks = BlockStore()
        for index, (name, lengths) in enumerate(self._lengths.items()):
            joined = self._joined.get(name)
            if joined is not None:
                _check_joined(name, lengths, joined, spec.rows)
            if lengths.max(initial=0) > spec.rows.capacity:
                at = int(lengths.argmax())
                raise ConfigError(
                    f"source {name!r}: sample {at} has {lengths[at]} tokens, a row holds {spec.rows.capacity}"
                )
            if len(lengths):
                refuse_missing(f"source {name!r}: what is declared", spec.metadata, self._metadata[name])
                blocks.add(_described(index, lengths, self._metadata[name], joined))
        state = initial_state(spec)
        return spec, SampleBuffer(spec, blocks).draw(state, state.sources["weight"])

    def _spec(self, declared: Declared) -> StreamSpec:
        weights = declared.weights or dict.fromkeys(self._lengths, 1.0)
        if set(weights) != set(self._lengths):
            raise ConfigError(f"mix(): weights are of {sorted(weights)}, the sources are {sorted(self._lengths)}")
        wrong = weight_problems("mix()", weights)
        if wrong or not any(weights.values()):
            raise ConfigError(
                wrong[0] if wrong else f"mix(): weights are at least 0, one of them above it, not {weights}"
            )
        assert declared.tree is not None
        assert declared.rows is not None
        groups, micro = declared.tree.num_groups, declared.rows.micro_batch_size
        rows = declared.global_batch_size or groups * micro
        sources = tuple(
            SourceSpec(
                name=name,
                num_windows=int(len(lengths) > 0),
                weight=float(weights[name]),
                epochs=1,
                together=name in self._joined,
            )
            for name, lengths in self._lengths.items()
        )
        return StreamSpec(
            name=_STREAM,
            sources=sources,
            rows=declared.rows,
            rows_per_step=rows,
            num_groups=groups,
            num_microbatches=-(-rows // (groups * micro)),
            seed=0,
            last_step="fill",
            mixture_unit="samples",
            strategy=None,
            prefetch_steps=1,
            plan_window=1,
            metadata=declared.fields,
            curriculum=declared.curriculum,
        )


def _lengths_of(name: str, given: Any) -> IntArray:
    lengths = _array_of(given)
    if not lengths.size:
        return np.empty(0, np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.min() < 1:
        raise ConfigError(
            f"from_buffer_infos(): source {name!r}: lengths are whole numbers of at least 1, int [n], not "
            f"{lengths.dtype} {list(lengths.shape)}: {given!r:.80}"
        )
    return lengths.astype(np.int64)


def _array_of(given: Any) -> npt.NDArray[Any]:
    """As it is: what is no array of numbers, such as lists of different lengths, as an array of objects."""
    try:
        return np.asarray(given)
    except ValueError:
        return np.fromiter(given, object, len(given))


def _numbers_of(name: str, column: str, given: Any, count: int) -> FloatArray:
    values = _array_of(given)
    if values.shape != (count,) or values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise ConfigError(
            f"from_buffer_infos(): source {name!r}: {column!r} must be {count} finite numbers, one a length, not "
            f"{values.dtype} {list(values.shape)}"
        )
    return values.astype(np.float64)


def _check_joined(name: str, lengths: IntArray, joined: npt.NDArray[np.bool_], rows: Rows) -> None:
    if not isinstance(rows, PackedRows):
        raise ConfigError(f"source {name!r}: samples that stay together want PackedRows, not {type(rows).__name__}")
    totals = np.bincount(np.cumsum(~joined) - 1, rows.room(lengths))
    if totals.max(initial=0) > rows.capacity:
        at = int(totals.argmax())
        first = int(np.flatnonzero(~joined)[at])
        raise ConfigError(
            f"source {name!r}: sample {first} and those together with it have {int(totals[at])} tokens, a row "
            f"holds {rows.capacity}"
        )


def _described(
    index: int, lengths: IntArray, metadata: Mapping[str, FloatArray], joined: npt.NDArray[np.bool_] | None
) -> MetaBlock:
    pieces = np.zeros(len(lengths), PIECE)
    pieces["source"] = index
    pieces["entry"] = pieces["row"] = np.arange(len(lengths))
    pieces["stop"] = -1
    pieces["length"] = lengths
    pieces["loss_tokens"] = lengths - 1
    everything = np.ones(len(lengths), bool)
    return MetaBlock(
        key=PartKey(_STREAM, index, 0, 0, 0),
        pieces=pieces,
        first=everything,
        kept=everything,
        reason=np.zeros(len(lengths), np.uint8),
        last_in_window=True,
        metadata=metadata,
        joined=joined,
    )
