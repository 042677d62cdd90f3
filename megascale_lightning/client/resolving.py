"""From a config and a tree to resolved streams and the recipes of their roles."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megascale_lightning.checkpointing.filelists import FileLists, list_names
from megascale_lightning.config import LoaderConfig
from megascale_lightning.constructing.constructor import DataConstructor
from megascale_lightning.errors import ConfigError, MegaScaleWarning
from megascale_lightning.loading.loader import LoadedSource, SourceLoader
from megascale_lightning.loading.partners import check_together
from megascale_lightning.loading.quarantine import Quarantine, check_folder, quarantine_path
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.planner import Planner
from megascale_lightning.planning.strategies import Balanced, declared_by
from megascale_lightning.rows import CollatedRows, PackedRows, Rows
from megascale_lightning.runtime.pickling import dump, dumps
from megascale_lightning.runtime.plan import RoleRecipe, RuntimePlan
from megascale_lightning.scaling.assignment import SlotAssignment
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.order import num_windows
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.diskcache import DiskCache
from megascale_lightning.sources.stores.secrets import named_variables, remember_secrets
from megascale_lightning.sources.stores.storage import FileInfo
from megascale_lightning.sources.survey import build_manifest
from megascale_lightning.streams import SourceSpec, StreamSpec

__all__ = [
    "Manifests",
    "Survey",
    "check_quarantine",
    "read_manifests",
    "resolve_streams",
    "runtime_plan",
    "survey",
]

_WINDOW_SLOTS: Final = 4 << 20
"""Token slots that one call should move: enough to make the cost of the call vanish."""
_MAX_PLAN_WINDOW: Final = 16
_SAMPLE_SLOTS: Final = 64 << 10
"""What a collated sample is taken to move: as much as so many tokens."""


_QUARANTINE: Final = "megascale_quarantine"

Manifests = Mapping[str, tuple[Manifest, ...]]
"""Stream -> the frozen file list of each of its sources."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What every rank has to know of the file lists, by stream and source name."""

    windows: Mapping[str, Mapping[str, int]]
    """Windows of one epoch."""
    digests: Mapping[str, Mapping[str, str]]
    """Digest of the frozen file list."""
    records: Mapping[str, Mapping[str, int]]
    """Records of one epoch; -1 where they are not known before they are read."""


def read_manifests(config: LoaderConfig, streams: Collection[str], frozen: FileLists | None = None) -> Manifests:
    """Read the file lists of every source of the streams once.

    Args:
        config: The settings.
        streams: Their names.
        frozen: The files to take, for sources of the training stream that go on with those they began with.

    Raises:
        ConfigError: Files are missing or unreadable, or a dataset cannot be sent to the loaders' processes.
    """
    portable = config.runtime != "local"
    found = {
        stream: tuple(
            build_manifest(
                source,
                portable=portable,
                dump=dump,
                files=chosen[0],
                joined_files=chosen[1:],
                needs_tokens=not isinstance(config.rows_of(stream), CollatedRows),
            )
            for source in sources
            for chosen in [_frozen(frozen, stream, source)]
        )
        for stream, sources in config.streams().items()
        if stream in streams
    }
    for stream, manifests in found.items():
        for source, manifest in zip(config.streams()[stream], manifests, strict=True):
            check_together(source, manifest)
    return found


def _frozen(frozen: FileLists | None, stream: str, source: Source) -> list[tuple[FileInfo, ...] | None]:
    """Of the source's own files, and of each of its joins."""
    lists = frozen if frozen is not None and stream == "train" else {}
    return [lists.get(name) for name in list_names(source)]


def check_quarantine(config: LoaderConfig, streams: Collection[str]) -> None:
    """Make the folders where bad records are to be listed.

    Raises:
        ConfigError: One of them cannot be written.
    """
    for stream in streams:
        for source in config.streams()[stream]:
            place = _quarantine(config, stream, source)
            if place is not None:
                check_folder(place.path)


def _quarantine(config: LoaderConfig, stream: str, source: Source) -> Quarantine | None:
    if source.on_error != "quarantine":
        return None
    folder = os.path.abspath(config.quarantine_dir or _QUARANTINE)
    return Quarantine(quarantine_path(folder, stream, source.name), stream)


def survey(config: LoaderConfig, manifests: Manifests) -> Survey:
    """The part of the file lists that all ranks need."""
    windows: dict[str, dict[str, int]] = {}
    digests: dict[str, dict[str, str]] = {}
    records: dict[str, dict[str, int]] = {}
    for stream, of_sources in manifests.items():
        pairs = list(zip(config.streams()[stream], of_sources, strict=True))
        windows[stream] = {source.name: num_windows(manifest, config.window_units) for source, manifest in pairs}
        digests[stream] = {source.name: manifest.digest() for source, manifest in pairs}
        records[stream] = {source.name: manifest.num_records for source, manifest in pairs}
    return Survey(windows, digests, records)


def resolve_streams(
    config: LoaderConfig, tree: ClientPlaceTree, surveyed: Survey, accumulate: int | None, *, passes: bool = False
) -> dict[str, StreamSpec]:
    """Settle every surveyed stream against the trainer's places and accumulation.

    Raises:
        ConfigError: `global_batch_size` does not fit them, the strategy is none, or the mixture does not go in passes.
    """
    strategy = config.strategy if config.strategy is not None else Balanced()
    declared = declared_by(strategy)
    declared.check_buckets(tree.num_groups)
    if declared.even is not None and not isinstance(config.rows, PackedRows):
        raise ConfigError(
            f"strategy: pack(even=...) evens packed rows, and {type(config.rows).__name__} hold one sample each: leave "
            "it out, or take PackedRows"
        )
    total, num_microbatches = _resolve_step(config, tree, accumulate)
    if passes:
        _check_passes(config)
    found = {}
    for stream, windows in surveyed.windows.items():
        training = stream == "train"
        rows = config.rows_of(stream).portable()
        _check_documents(config, stream, rows, tree)
        rows_per_step = total if training else rows.micro_batch_size * tree.num_groups
        window, ahead = _choose_reach(config, rows_per_step * _row_slots(rows))
        own = declared if training else replace(declared, curriculum=None, selected=None)
        if own.fields and isinstance(rows, CollatedRows):
            raise ConfigError(
                f"strategy: it wants {list(own.fields)} of each sample of stream {stream!r}, which are read of packed "
                "and padded rows only: take a cost or curriculum by length, and let length= of the sources say what a "
                "sample costs, or take other rows"
            )
        found[stream] = StreamSpec(
            name=stream,
            sources=_source_specs(config, stream, windows, surveyed.records[stream]),
            rows=rows,
            rows_per_step=rows_per_step,
            num_groups=tree.num_groups,
            num_microbatches=num_microbatches if training else 1,
            seed=config.seed,
            last_step=config.last_step if training else "fill",
            mixture_unit=config.shares.unit if training else "samples",
            strategy=strategy,
            prefetch_steps=ahead,
            plan_window=window,
            passes=passes and training,
            mixture_lead_steps=config.mixture_lead_steps,
            schedule=config.schedule_of(stream),
            stop=_stop(config) if training else "all",
            metadata=own.fields,
            order=declared.order,
            broadcast=declared.broadcast,
            curriculum=own.curriculum,
            context_parallel=config.context_parallel,
            num_context_ranks=tree.size("cp"),
            num_stages=tree.size("pp"),
        )
    return found


def _check_documents(config: LoaderConfig, stream: str, rows: Rows, tree: ClientPlaceTree) -> None:
    """Documents that are cut must be padded to a number that every chunk divides, and that is declared: law 1."""
    chunks, size = 2 * tree.size("cp"), tree.size("cp")
    if size == 1 or config.context_parallel != "head_tail" or not isinstance(rows, PackedRows):
        return
    padded = rows.pad_documents_to or 1
    if padded % chunks:
        wanted = math.lcm(padded, chunks)
        longer = -(-rows.seq_len // wanted) * wanted
        raise ConfigError(
            f'stream {stream!r}: context_parallel="head_tail" on {size} context-parallel ranks cuts every document of '
            f"packed rows into {chunks} chunks, and pad_documents_to={rows.pad_documents_to} does not divide by "
            f"{chunks}: set PackedRows(pad_documents_to={wanted})"
            + (f" and seq_len={longer}" if longer != rows.seq_len else "")
            + "; it is part of the order, the same on any number of ranks"
        )


def _check_passes(config: LoaderConfig) -> None:
    """A pass gives every source once, so that nothing may come, go, or end it earlier."""
    if not config.sources:
        return
    if config.shares.stop != "all":
        raise ConfigError(
            f"mixture: stop={_stop(config)!r} ends the stream before every source has given its epochs, and in passes "
            "each trainer epoch gives every source once: leave stop out, or set Trainer(max_epochs=-1) with epochs= of "
            "the sources"
        )
    schedule = config.schedule_of("train")
    joining = [] if schedule is None else [config.streams()["train"][index].name for index in schedule.joining]
    if joining:
        raise ConfigError(
            f"mixture: the schedule has sources {joining} join or leave, and in passes each trainer epoch gives every "
            "source once: give them weights above 0 throughout, or set a number of steps (Trainer(max_steps=...), "
            "steps_per_epoch=...) in place of max_epochs"
        )


def _stop(config: LoaderConfig) -> str | tuple[str, ...]:
    stop = config.shares.stop
    return stop if isinstance(stop, str) else tuple(stop)


def _resolve_step(config: LoaderConfig, tree: ClientPlaceTree, accumulate: int | None) -> tuple[int, int]:
    """Rows of a training step, and its microbatches on each rank."""
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
            stacklevel=3,
        )
    return total, num_microbatches


def _row_slots(rows: Rows) -> int:
    """How much a row moves, in token slots; of a collated sample nothing is known before it is read."""
    return _SAMPLE_SLOTS if isinstance(rows, CollatedRows) else rows.capacity


def _choose_reach(config: LoaderConfig, slots: int) -> tuple[int, int]:
    """Steps of a plan window, and steps that may be planned ahead of the slowest rank.

    A step is planned at the latest when the window that holds it is; with one step of lookahead for the end, all of it
    must lie within `mixture_lead_steps`.

    Raises:
        ConfigError: What was set does not lie within.
    """
    lead = config.mixture_lead_steps
    window = config.plan_window or min(max(_WINDOW_SLOTS // slots, 1), _MAX_PLAN_WINDOW, max((lead - 1) // 2, 1))
    # One at least: a trainer that asks for a batch before it has taken the step of the last one would wait for itself.
    ahead = min(2 * window, max(lead - 1 - window, 1)) if config.prefetch_steps is None else config.prefetch_steps
    if ahead + window + 1 > lead:
        raise ConfigError(
            f"prefetch_steps={ahead} and a plan_window of {window} reach {ahead + window + 1} steps ahead, and "
            f"mixture_lead_steps={lead} allows {lead}: lower them, or set mixture_lead_steps={ahead + window + 1}"
        )
    return window, ahead


def runtime_plan(config: LoaderConfig, specs: Mapping[str, StreamSpec], manifests: Manifests, run: str) -> RuntimePlan:
    """The recipes of all roles."""
    streams = {stream: sources for stream, sources in config.streams().items() if stream in specs}
    num_loaders = config.num_loaders or _choose_num_loaders(sum(map(len, streams.values())))
    loader_of = SlotAssignment(num_loaders, {stream: len(sources) for stream, sources in streams.items()})
    cache = None if config.cache_dir is None else DiskCache(os.path.abspath(config.cache_dir), config.cache_bytes)
    loaded = {
        stream: [
            LoadedSource(source, manifest, _quarantine(config, stream, source), cache)
            for source, manifest in zip(sources, manifests[stream], strict=True)
        ]
        for stream, sources in streams.items()
    }
    loader_kwargs = {
        "streams": loaded,
        "rows": {stream: spec.rows for stream, spec in specs.items()},
        "seed": config.seed,
        "window_units": config.window_units,
        "part_bytes": config.part_bytes,
        "buffer_bytes": config.loader_buffer_bytes,
        "dumps": dumps,
        "metadata": {stream: spec.metadata for stream, spec in specs.items()},
    }
    return RuntimePlan(
        run=run,
        environment=_environment(config, streams),
        planner=RoleRecipe(name="planner", factory=Planner, kwargs={"specs": dict(specs), "loader_of": loader_of}),
        constructor=RoleRecipe(
            name="constructor/0", factory=DataConstructor, kwargs={"specs": dict(specs), "loader_of": loader_of}
        ),
        loaders=tuple(
            RoleRecipe(name=f"loader/{index}", factory=SourceLoader, kwargs=loader_kwargs)
            for index in range(num_loaders)
        ),
    )


def _environment(config: LoaderConfig, streams: Mapping[str, Sequence[Source]]) -> dict[str, str]:
    """Variables of this process that the loaders are to have, those that `storage_options` name among them.

    Raises:
        ConfigError: One is not set.
    """
    wanted = dict.fromkeys(config.env, "env")
    for sources in streams.values():
        for source in sources:
            where = f"source {source.name!r}: storage_options"
            for options in source.all_storage_options():
                wanted |= {name: where for name in named_variables(options) if name not in wanted}
    missing = {name: where for name, where in wanted.items() if name not in os.environ}
    if missing:
        raise ConfigError(
            "environment variables are not set in this process: "
            + ", ".join(f"{name} (named by {where})" for name, where in missing.items())
        )
    found = {name: os.environ[name] for name in wanted}
    remember_secrets(list(found.values()))
    return found


def _source_specs(
    config: LoaderConfig, stream: str, windows: Mapping[str, int], records: Mapping[str, int]
) -> tuple[SourceSpec, ...]:
    weights = config.weights_of(stream)
    counts_rest = stream == "train" and config.shares.stop != "all"
    specs = tuple(
        SourceSpec(
            name=source.name,
            num_windows=windows[source.name],
            weight=weights[source.name],
            epochs=source.epochs,
            max_bad_fraction=source.max_bad_fraction,
            bad_reasons=source.bad_reasons,
            together=source.together is not None,
            quarantine=place.path if (place := _quarantine(config, stream, source)) else "",
            num_records=records[source.name] if counts_rest and source.epochs and records[source.name] >= 0 else None,
        )
        for source in config.streams()[stream]
    )
    if stream == "train":
        return specs
    return tuple(replace(spec, epochs=spec.epochs or 1) for spec in specs)


def _choose_num_loaders(num_sources: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_sources, cores // 8))
