"""`show_sample`: one sample by its id, without running loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index as as_int
from typing import Any

from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.loader import LoadedSource
from megascale_lightning.loading.showing import SampleShower, ShownSample
from megascale_lightning.rows import CollatedRows
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.survey import build_manifest

__all__ = ["show_sample"]


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
    if stream not in config.streams():
        raise ConfigError(f"there is no stream {stream!r}; the config has {sorted(config.streams())}")
    name, *numbers = _checked(sample_id)
    names = [source.name for source in config.streams()[stream]]
    if name not in names:
        raise ConfigError(f"there is no source {name!r} in stream {stream!r}, which has {names}")
    at = names.index(name)
    source, rows = replace(config.streams()[stream][at], executor="inline"), config.rows_of(stream)
    if manifests is None:
        manifest = build_manifest(source, needs_tokens=not isinstance(rows, CollatedRows))
    else:
        manifest = manifests[at]
    shower = SampleShower(
        LoadedSource(source, manifest),
        rows,
        stream=stream,
        seed=config.seed,
        window_units=config.window_units,
        part_bytes=config.part_bytes,
    )
    return shower.show(*numbers)


def _checked(sample_id: Sequence[Any]) -> tuple[Any, ...]:
    """The name and the numbers of an id."""
    try:
        name, *numbers = sample_id
        numbers = [as_int(number) for number in numbers]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (3, 5) or not isinstance(name, str):
        raise ConfigError(
            f"{sample_id!r} is no sample id: give (source, epoch, unit, row), or with start and stop of a piece behind"
        )
    return (name, *numbers)
