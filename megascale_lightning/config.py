"""`LoaderConfig`: everything a user sets, as frozen dataclasses that are checked together."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, Union, get_args

from megascale_lightning.errors import ConfigError
from megascale_lightning.mixtures import (
    Mixture,
    WeightSchedule,
    schedule_problems,
    settle_points,
    stop_problems,
    weight_problems,
)
from megascale_lightning.rows import CollatedRows, ContextParallel, PaddedRows, Rows, context_problems, positive
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.secrets import redact, without_secrets

__all__ = ["EVAL_KINDS", "LoaderConfig", "Mixture", "Sources"]

EVAL_KINDS: Final = ("val", "test", "predict")
"""Kinds of evaluation streams; their names are `val/0`, `val/1`, ..."""

_CHOICES: Final = {
    "runtime": ("ray", "local"),
    "last_step": ("fill", "drop"),
    "context_parallel": get_args(ContextParallel),
}

if TYPE_CHECKING:
    Sources: TypeAlias = Sequence[Source] | Mapping[str, Any]
else:

    class SecretSettings:
        """Stands for settings with secrets where LightningCLI parses and prints: see `mask_printed_settings`."""

    Sources = Union[SecretSettings, Sequence[Source], Mapping[str, Any]]  # noqa: UP007 - evaluated by Python 3.10
"""A list of `Source`, or a mapping by name of these or of their keywords (as a YAML file has them)."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """All settings of a loader, the same keywords as `MegaScaleDataModule`.

    Raises:
        ConfigError: Settings are wrong or contradict each other; all that is wrong is said at once.
    """

    sources: Sources = ()
    """The training mixture; may be empty where there is something to evaluate."""
    rows: Rows
    """`PackedRows`, `PaddedRows` or `CollatedRows`."""
    global_batch_size: int | None = None
    """Rows of one optimizer step: micro_batch_size x data-parallel size x accumulation. None: taken from the trainer at
    the first start, and kept in the state."""
    mixture: Mixture | Mapping[str, Any] | None = None
    """Weights by source name, in place of the sources' own; a `Mixture`, or the mapping of its settings, also says what
    they are shares of, how they change by the step, and what ends the stream."""
    weights: Mapping[str, float] | None = None
    """Single weights by source name, over those of `sources` and `mixture`, at every step; the others stay."""
    strategy: Any = None
    """How rows are placed: `Balanced()` (default), another strategy, or a function of a `DGraph`."""
    context_parallel: ContextParallel = "full"
    """What the ranks of a context-parallel group get of each row: "full", all of it, for trainers that cut it
    themselves; "head_tail", of 2 x cp chunks (of each document, in packed rows) the one from the front and the one from
    the back that make causal attention cost all ranks the same; "contiguous", of cp slices theirs."""
    seed: int = 0
    runtime: Literal["ray", "local"] = "ray"
    """Where the roles run: in Ray actors, or all in this process (notebooks, debuggers)."""
    num_loaders: int | None = None
    """Source loader actors; None chooses."""
    num_constructors: int = 1
    """Data constructor actors on each machine that has ranks; its data-parallel groups are shared between them."""
    prefetch_steps: int | None = None
    """Steps that may be planned and built ahead of the slowest rank; None chooses."""
    plan_window: int | None = None
    """Steps moved by one call; None chooses."""
    mixture_lead_steps: int = 32
    """How many steps after the consumed one `set_mixture` takes effect; nothing is planned further ahead."""
    window_units: int = 8
    """Units of a source that are shuffled together (part of the order)."""
    part_bytes: int = 64 << 20
    """Stored bytes of a part, inside which samples are shuffled (part of the order)."""
    loader_buffer_bytes: int = 1 << 30
    """What one loader may hold beyond what is due."""
    last_step: Literal["fill", "drop"] = "fill"
    """What happens to a last step with too few rows."""
    steps_per_epoch: int | None = None
    """Steps that `len()` and one trainer epoch have; None: the loader is unsized, unless a pass has a known length."""
    val_sources: Sources = ()
    """Sources of the validation streams: a list for one loader, a mapping of lists for several."""
    test_sources: Sources = ()
    """Sources of the test streams, likewise."""
    predict_sources: Sources = ()
    """Sources of the prediction streams, likewise."""
    eval_rows: Rows | Mapping[str, Rows] | None = None
    """Rows of the evaluation streams where they are others than `rows`: of all, or by kind (`val`) or stream
    (`val/0`)."""
    quarantine_dir: str | None = None
    """Folder for the lists of records that `on_error="quarantine"` left out, `<stream>/<source>.jsonl`; None:
    `megascale_quarantine` in the working directory of rank 0."""
    env: Sequence[str] = ()
    """Names of environment variables whose values in rank 0's process the loaders get, on every node: credentials that
    a store's client looks for. Those that `storage_options` name as `env:NAME` need not be here."""
    cache_dir: str | None = None
    """Folder on every node for blocks of remote files, shared by its loaders; None: nothing is kept."""
    cache_bytes: int = 64 << 30
    """What may lie in `cache_dir`; what is used least recently goes first."""
    force_resume: Sequence[str] = ()
    """Names of settings that may differ from those of the checkpoint."""
    restart_timeout: float = 120.0
    """Seconds that a role may be away before the run ends with an error."""
    ray_address: str | None = None
    """An existing cluster; None starts a local Ray, or uses one that is initialised."""
    ray_init: Mapping[str, Any] | None = None
    """Further keywords of `ray.init`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", _settle_sources("sources", self.sources))
        for kind in EVAL_KINDS:
            object.__setattr__(self, f"{kind}_sources", _settle_eval_sources(kind, getattr(self, f"{kind}_sources")))
        object.__setattr__(self, "mixture", Mixture.of(self.mixture))
        found = list(_number_problems(self))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                found.append(f"{name} must be one of {choices}, not {getattr(self, name)!r}")
        found += _storage_problems(self)
        found += self._rows_problems()
        streams = self.streams()
        if not streams:
            found.append("there are no sources: give sources=[...], or val_sources, test_sources or predict_sources")
        for stream, sources in streams.items():
            found += _check_sources(stream, sources)
            found += _together_problems(stream, sources, self.rows_of(stream))
        found += self._weight_problems() + _folder_problems(self)
        if found:
            raise ConfigError("; ".join(found))

    def streams(self) -> dict[str, tuple[Source, ...]]:
        """Stream name -> its sources: "train", "val/0", "val/1", ..., "test/0", ..., "predict/0", ..."""
        train: tuple[Source, ...] = tuple(self.sources)  # type: ignore[arg-type]  # settled
        found = {"train": train} if train else {}
        for kind in EVAL_KINDS:
            for index, sources in enumerate(self.eval_sources(kind).values()):
                found[f"{kind}/{index}"] = sources
        return found

    def eval_sources(self, kind: str) -> dict[str, tuple[Source, ...]]:
        """The evaluation loaders of a kind by the user's names ("0" where there is only a list)."""
        sources = getattr(self, f"{kind}_sources")
        settled: dict[str, tuple[Source, ...]] = sources if isinstance(sources, dict) else {"0": sources}
        return {name: given for name, given in settled.items() if given or isinstance(sources, dict)}

    def rows_of(self, stream: str) -> Rows:
        """The rows of a stream."""
        if stream == "train" or self.eval_rows is None:
            return self.rows
        if isinstance(self.eval_rows, Mapping):
            return self.eval_rows.get(stream) or self.eval_rows.get(stream.split("/")[0]) or self.rows
        return self.eval_rows

    @property
    def shares(self) -> Mixture:
        """The training mixture, settled."""
        assert isinstance(self.mixture, Mixture)
        return self.mixture

    def weights_of(self, stream: str) -> dict[str, float]:
        """Source name -> weight in the stream at its first step, not normalised."""
        return self.weight_points(stream)[0][1]

    def weight_points(self, stream: str) -> list[tuple[int, dict[str, float]]]:
        """(step, source name -> weight from it on) of the stream's schedule; one point where there is none."""
        own = {source.name: float(source.weight) for source in self.streams()[stream]}
        return settle_points(self.shares, own, self.weights or {}) if stream == "train" else [(0, own)]

    def schedule_of(self, stream: str) -> WeightSchedule | None:
        """The schedule of the stream's weights, in the order of its sources; None: they are fixed."""
        if stream != "train" or not self.shares.points:
            return None
        points = self.weight_points(stream)
        names = [source.name for source in self.streams()[stream]]
        weights = tuple(tuple(by_name[name] for name in names) for _, by_name in points)
        return WeightSchedule(tuple(step for step, _ in points), weights, self.shares.interpolate)

    def drawn(self, stream: str) -> list[Source]:
        """The sources of a stream that have a weight above 0 at some step."""
        points = self.weight_points(stream)
        return [source for source in self.streams()[stream] if any(by_name[source.name] > 0 for _, by_name in points)]

    def _rows_problems(self) -> list[str]:
        given: dict[str, Any] = {"rows": self.rows}
        if isinstance(self.eval_rows, Mapping):
            unknown = sorted(set(self.eval_rows) - set(EVAL_KINDS) - set(self.streams()))
            if unknown:
                return [f"eval_rows names {unknown}; the streams are {sorted(set(self.streams()) - {'train'})}"]
            given |= {f"eval_rows[{name!r}]": rows for name, rows in self.eval_rows.items()}
        elif self.eval_rows is not None:
            given["eval_rows"] = self.eval_rows
        found = []
        for name, rows in given.items():
            if not isinstance(rows, Rows) or type(rows) is Rows:
                found.append(f"{name} must be PackedRows, PaddedRows or CollatedRows, not {type(rows).__name__}")
            else:
                found += [f"{name}: {problem}" for problem in context_problems(rows, self.context_parallel)]
        return found

    def _weight_problems(self) -> list[str]:
        if not self.sources:
            return []
        found = []
        names = {source.name for source in self.streams()["train"]}
        whole = self.shares.weights
        if whole is not None and set(whole) != names:
            missing, unknown = sorted(names - set(whole)), sorted(set(whole) - names)
            found.append(f"mixture must name every source once; missing {missing}, unknown {unknown}")
        if set(self.weights or {}) - names:
            found.append(f"weights names {sorted(set(self.weights or {}) - names)}; the sources are {sorted(names)}")
        for given, values in (("mixture", whole), ("weights", self.weights)):
            found += weight_problems(given, values or {})
        if found:
            return found
        own = {source.name: source.weight for source in self.streams()["train"]}
        found += schedule_problems(self.shares, own, self.weights or {})
        if not found and not any(weight > 0 for weight in self.weights_of("train").values()):
            found.append("stream 'train': at least one source needs a weight above 0")
        if not found:
            epochs = {source.name: source.epochs for source in self.streams()["train"]}
            found += stop_problems(self.shares, epochs, [source.name for source in self.drawn("train")])
        return found


def _folder_problems(config: LoaderConfig) -> list[str]:
    folder = config.quarantine_dir
    if folder is None or (isinstance(folder, (str, os.PathLike)) and str(folder) and "://" not in str(folder)):
        return []
    return [f"quarantine_dir must be a folder on a disk of the loaders' machines, not {folder!r}"]


def _number_problems(config: LoaderConfig) -> list[str]:
    names = ("window_units", "part_bytes", "loader_buffer_bytes", "mixture_lead_steps", "cache_bytes")
    found = positive(num_constructors=config.num_constructors, **{name: getattr(config, name) for name in names})
    for name in ("global_batch_size", "num_loaders", "plan_window", "steps_per_epoch"):
        if getattr(config, name) is not None:
            found += positive(**{name: getattr(config, name)})
    ahead = config.prefetch_steps
    if ahead is not None and (not isinstance(ahead, int) or ahead < 0):
        found.append(f"prefetch_steps must be a whole number of at least 0, not {ahead!r}")
    if not isinstance(config.seed, int) or isinstance(config.seed, bool):
        found.append(f"seed must be a whole number, not {config.seed!r}")
    return found


def _storage_problems(config: LoaderConfig) -> list[str]:
    found = []
    names = config.env
    if isinstance(names, (str, Mapping)) or not all(isinstance(name, str) and "=" not in name for name in names):
        found.append("env must be a list of names of environment variables, such as ['AWS_PROFILE']; no values")
    folder = config.cache_dir
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder) or "://" in str(folder)):
        found.append(f"cache_dir must be a folder of this machine, not {without_secrets(folder)!r}")
    if config.runtime != "local":
        for stream, sources in config.streams().items():
            found += [f"stream {stream!r}: {problem}" for source in sources if (problem := _travel_problem(source))]
    return found


def _travel_problem(source: Source) -> str | None:
    """Why the filesystem of a source cannot be handed to the loaders' processes."""
    if source.filesystem is None:
        return None
    try:
        pickle.dumps(source.filesystem)
    except Exception as error:  # whatever the filesystem's own code raises
        return (
            f"source {source.name!r}: its filesystem, a {type(source.filesystem).__name__}, does not pickle "
            f"({redact(str(error))}), and the loaders run in other processes: give a URL and storage_options, or set "
            "runtime='local'"
        )
    return None


def _settle_sources(what: str, sources: Any) -> tuple[Source, ...]:
    """The sources of one stream, whatever form they were given in."""
    if isinstance(sources, Mapping):
        return tuple(_named_source(what, str(name), given) for name, given in sources.items())
    if isinstance(sources, (Source, str)) or not isinstance(sources, Sequence):
        raise ConfigError(f"{what} must be a list of Source, or a mapping by name, not a {type(sources).__name__}")
    return tuple(_one_source(what, given) for given in sources)


def _one_source(what: str, given: Any) -> Source:
    """A source of a list; a mapping has its name inside, and may be in class_path form."""
    if isinstance(given, Source):
        return given
    settings = given.get("init_args", given) if isinstance(given, Mapping) else None
    if not isinstance(settings, Mapping) or "name" not in settings:
        shown = redact(repr(without_secrets(given)))
        raise ConfigError(f"{what} must hold Source, not {type(given).__name__}: {shown}")
    return _named_source(what, str(settings["name"]), settings)


def _named_source(what: str, name: str, given: Any) -> Source:
    if isinstance(given, Source):
        if given.name != name:
            raise ConfigError(f"{what}: the source under {name!r} is named {given.name!r}; the two must agree")
        return given
    if not isinstance(given, Mapping):
        shown = redact(repr(without_secrets(given)))
        raise ConfigError(f"{what}: {name!r} must be a Source, or a mapping of its settings, not {shown}")
    known = {field.name for field in fields(Source)} - {"name"}
    unknown = sorted(set(given) - known - {"name"})
    if unknown:
        raise ConfigError(f"{what}: {name!r} has settings {unknown}; a source has {sorted(known)}")
    if "data" not in given:
        hint = f"; weights= changes one weight alone (--data.weights.{name}=...)" if "weight" in given else ""
        raise ConfigError(f"{what}: {name!r} has no data{hint}")
    settings = {**given, "name": name}
    classes = [key for key, value in settings.items() if isinstance(value, Mapping) and "class_path" in value]
    if classes:
        # Settings come out of checkpoints, too: no code but the user's own call is run.
        raise ConfigError(
            f"{what}: {name!r} has class paths in {classes}, which nobody made objects of. LightningCLI does so where "
            "no literal secret stands in storage_options (write env:NAME); else give a dotted path, or the object"
        )
    for setting in ("transform", "transform_batched"):
        if isinstance(settings.get(setting), str):
            settings[setting] = _imported(name, setting, settings[setting])
    return Source(**settings)


def _imported(source: str, setting: str, path: str) -> Any:
    """What a dotted path names, `package.module.function`."""
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"source {source!r}: {setting}={path!r} cannot be imported ({error}); give package.module.function"
        ) from error


def _settle_eval_sources(kind: str, sources: Any) -> tuple[Source, ...] | dict[str, tuple[Source, ...]]:
    """One stream's sources, or those of several by name: a mapping of lists or of mappings."""
    what = f"{kind}_sources"
    if isinstance(sources, Mapping):
        if any(
            isinstance(given, Source) or (isinstance(given, Mapping) and "data" in given) for given in sources.values()
        ):
            return _settle_sources(what, sources)
        return {str(name): _settle_sources(f"{what}[{str(name)!r}]", given) for name, given in sources.items()}
    return _settle_sources(what, sources)


def _together_problems(stream: str, sources: Sequence[Source], rows: Any) -> list[str]:
    names = [source.name for source in sources if source.together is not None]
    if not names or not isinstance(rows, (PaddedRows, CollatedRows)):
        return []
    return [
        f"stream {stream!r}: together= of {names} puts several records in one row, and a row of {type(rows).__name__} "
        "is one record: take PackedRows, or have one record hold all that stays together"
    ]


def _check_sources(stream: str, sources: Sequence[Source]) -> list[str]:
    names = [source.name for source in sources]
    doubled = sorted({name for name in names if names.count(name) > 1})
    found = [f"stream {stream!r}: source names must differ, {doubled} are there twice"] if doubled else []
    if not sources:
        return [f"stream {stream!r} has no source"]
    if stream != "train" and not any(source.weight > 0 for source in sources):
        found.append(f"stream {stream!r}: at least one source needs a weight above 0")
    return found
