"""From a config and a tree to resolved streams and the recipes of their roles."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megascale_lightning.config import LoaderConfig, SourceSpec, StreamSpec
from megascale_lightning.constructing.constructor import DataConstructor
from megascale_lightning.errors import ConfigError, MegaScaleWarning
from megascale_lightning.loading.loader import LoadedSource, SourceLoader
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.planner import Planner
from megascale_lightning.planning.strategies import Balanced, Strategy
from megascale_lightning.runtime.pickling import dump
from megascale_lightning.runtime.plan import RoleRecipe, RuntimePlan
from megascale_lightning.scaling.assignment import SlotAssignment
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.order import num_windows
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.survey import build_manifest

__all__ = ["Manifests", "Survey", "read_manifests", "resolve_streams", "runtime_plan", "survey"]

_WINDOW_SLOTS: Final = 4 << 20
"""Token slots that one call should move: enough to make the cost of the call vanish."""
_MAX_PLAN_WINDOW: Final = 16


Manifests = Mapping[str, tuple[Manifest, ...]]
"""Stream -> the frozen file list of each of its sources."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What every rank has to know of the file lists, by stream and source name."""

    windows: Mapping[str, Mapping[str, int]]
    """Windows of one epoch."""
    digests: Mapping[str, Mapping[str, str]]
    """Digest of the frozen file list."""


def read_manifests(config: LoaderConfig) -> Manifests:
    """Read the file lists of every source once.

    Raises:
        ConfigError: Files are missing or unreadable, or a dataset cannot be sent to the loaders' processes.
    """
    portable = config.runtime != "local"
    return {
        stream: tuple(build_manifest(source, portable=portable, dump=dump) for source in sources)
        for stream, sources in config.streams().items()
    }


def survey(config: LoaderConfig, manifests: Manifests) -> Survey:
    """The part of the file lists that all ranks need."""
    windows, digests = {}, {}
    for stream, sources in config.streams().items():
        pairs = list(zip(sources, manifests[stream], strict=True))
        windows[stream] = {source.name: num_windows(manifest, config.window_units) for source, manifest in pairs}
        digests[stream] = {source.name: manifest.digest() for source, manifest in pairs}
    return Survey(windows, digests)


def resolve_streams(
    config: LoaderConfig, tree: ClientPlaceTree, windows: Mapping[str, Mapping[str, int]], accumulate: int | None
) -> dict[str, StreamSpec]:
    """Settle every stream against the trainer's places and accumulation.

    Raises:
        ConfigError: `global_batch_size` does not fit them, or the strategy is none.
    """
    strategy = config.strategy if config.strategy is not None else Balanced()
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy must be Balanced(), RoundRobin() or alike, not {strategy!r}")
    micro = config.rows.micro_batch_size * tree.num_groups
    total = config.global_batch_size or micro * (accumulate or 1)
    num_microbatches = -(-total // micro)
    if accumulate is not None and num_microbatches != accumulate:
        raise ConfigError(
            f"global_batch_size={total} needs {num_microbatches} microbatches of {config.rows.micro_batch_size} rows "
            f"on each of {tree.num_groups} data-parallel ranks, but the trainer accumulates {accumulate}: set "
            f"accumulate_grad_batches={num_microbatches}, or global_batch_size={micro * accumulate}"
        )
    if total % micro:
        warnings.warn(
            f"global_batch_size={total} is no multiple of {config.rows.micro_batch_size} rows x {tree.num_groups} "
            f"data-parallel ranks: every step is filled up to {num_microbatches * micro} rows with rows of weight 0",
            MegaScaleWarning,
            stacklevel=2,
        )
    found = {}
    for stream, sources in config.streams().items():
        training = stream == "train"
        rows_per_step = total if training else micro
        slots = rows_per_step * config.rows.capacity
        window = config.plan_window or min(max(_WINDOW_SLOTS // slots, 1), _MAX_PLAN_WINDOW)
        found[stream] = StreamSpec(
            name=stream,
            sources=_source_specs(config, stream, sources, windows[stream]),
            rows=config.rows,
            rows_per_step=rows_per_step,
            num_groups=tree.num_groups,
            num_microbatches=num_microbatches if training else 1,
            seed=config.seed,
            last_step=config.last_step if training else "fill",
            mixture_unit=config.shares.unit if training else "samples",
            strategy=strategy,
            prefetch_steps=2 * window if config.prefetch_steps is None else config.prefetch_steps,
            plan_window=window,
        )
    return found


def runtime_plan(config: LoaderConfig, specs: Mapping[str, StreamSpec], manifests: Manifests, run: str) -> RuntimePlan:
    """The recipes of all roles."""
    streams = config.streams()
    num_loaders = config.num_loaders or _choose_num_loaders(sum(map(len, streams.values())))
    loader_of = SlotAssignment(num_loaders, {stream: len(sources) for stream, sources in streams.items()})
    loaded = {
        stream: [LoadedSource(*pair) for pair in zip(sources, manifests[stream], strict=True)]
        for stream, sources in streams.items()
    }
    loader_kwargs = {
        "streams": loaded,
        "rows": config.rows,
        "seed": config.seed,
        "window_units": config.window_units,
        "part_bytes": config.part_bytes,
        "buffer_bytes": config.loader_buffer_bytes,
    }
    return RuntimePlan(
        run=run,
        planner=RoleRecipe(name="planner", factory=Planner, kwargs={"specs": dict(specs), "loader_of": loader_of}),
        constructor=RoleRecipe(
            name="constructor/0", factory=DataConstructor, kwargs={"specs": dict(specs), "loader_of": loader_of}
        ),
        loaders=tuple(
            RoleRecipe(name=f"loader/{index}", factory=SourceLoader, kwargs=loader_kwargs)
            for index in range(num_loaders)
        ),
    )


def _source_specs(
    config: LoaderConfig, stream: str, sources: Sequence[Source], windows: Mapping[str, int]
) -> tuple[SourceSpec, ...]:
    weights = config.weights(stream)
    specs = tuple(
        SourceSpec(
            name=source.name,
            num_windows=windows[source.name],
            weight=weights[source.name],
            epochs=source.epochs,
        )
        for source in sources
    )
    if stream == "train":
        return specs
    return tuple(replace(spec, epochs=spec.epochs or 1) for spec in specs)


def _choose_num_loaders(num_sources: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_sources, cores // 8))
