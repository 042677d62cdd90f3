"""`show_sample`, `find_life`: one sample by its id, without running loaders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index as as_int
from typing import Any

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.lives import SampleLife, life_of
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.finding import RecordFinder
from megascale_lightning.loading.loader import LoadedSource
from megascale_lightning.loading.showing import SampleShower, ShownSample
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.survey import build_manifest
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import LoaderState

__all__ = ["find_life", "show_sample"]


def show_sample(
    config: LoaderConfig, stream: str, sample_id: Sequence[Any], manifests: Sequence[Manifest] | None = None
) -> ShownSample:
    """Read one sample, and transform it as in the run, in this process.

    Args:
        config: The settings of the run.
        stream: Name of the stream.
        sample_id: `(source, epoch, unit, row)`, or a piece with `start, stop` behind.
        manifests: Files of the stream's sources, as the run found them; None looks for them now.

    Raises:
        ConfigError: There is no such stream, source, unit or row.
        DataError: The unit cannot be read.
    """
    at, numbers = _checked(config, stream, sample_id)
    return SampleShower(*_loaded(config, stream, at, manifests), **_order_of(config, stream)).show(*numbers)


def find_life(
    config: LoaderConfig,
    spec: StreamSpec,
    sample_id: Sequence[Any],
    state: LoaderState,
    handed: Iterable[BatchInfo] = (),
    manifests: Sequence[Manifest] | None = None,
) -> SampleLife:
    """What became of one sample: see `MegaScaleLoader.lineage`.

    Args:
        config: The settings of the run.
        spec: The stream.
        sample_id: See `show_sample`.
        state: Where the stream stands.
        handed: Of the microbatches handed out since.
        manifests: See `show_sample`.

    Raises:
        ConfigError: There is no such source, unit or row.
        DataError: The part that it is in cannot be read.
    """
    at, numbers = _checked(config, spec.name, sample_id)
    loaded = _loaded(config, spec.name, at, manifests)
    finder = RecordFinder(*loaded, **_order_of(config, spec.name), metadata=spec.metadata)
    return life_of(numbers, at, finder, spec, state, handed)


def _loaded(
    config: LoaderConfig, stream: str, at: int, manifests: Sequence[Manifest] | None
) -> tuple[LoadedSource, Rows]:
    source, rows = replace(config.streams()[stream][at], executor="inline"), config.rows_of(stream)
    if manifests is None:
        manifest = build_manifest(source, needs_tokens=not isinstance(rows, CollatedRows))
    else:
        manifest = manifests[at]
    return LoadedSource(source, manifest), rows


def _order_of(config: LoaderConfig, stream: str) -> dict[str, Any]:
    sizes = {"window_units": config.window_units, "part_bytes": config.part_bytes}
    return {"stream": stream, "seed": config.seed, **sizes}


def _checked(config: LoaderConfig, stream: str, sample_id: Sequence[Any]) -> tuple[int, list[int]]:
    """The source in the stream, and the numbers of an id."""
    if stream not in config.streams():
        raise ConfigError(f"there is no stream {stream!r}; the config has {sorted(config.streams())}")
    try:
        name, *numbers = sample_id
        numbers = [as_int(number) for number in numbers]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (3, 5) or not isinstance(name, str):
        raise ConfigError(
            f"{sample_id!r} is no sample id: give (source, epoch, unit, row), or with start and stop of a piece behind"
        )
    names = [source.name for source in config.streams()[stream]]
    if name not in names:
        raise ConfigError(f"there is no source {name!r} in stream {stream!r}, which has {names}")
    return names.index(name), numbers
