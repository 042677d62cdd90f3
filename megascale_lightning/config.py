"""`LoaderConfig`: everything a user sets, as frozen dataclasses that are checked together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, TypeAlias

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.source import Source

__all__ = ["LoaderConfig", "Mixture", "PackedRows", "PaddedRows", "Rows", "SourceSpec", "StreamSpec"]

_RESERVED: Final = frozenset(
    {"input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    | {"megascale"}
)


@dataclass(frozen=True)
class PackedRows:
    """Rows of several samples each, at most `seq_len` tokens, never reaching into one another.

    Raises:
        ConfigError: A value is out of range.
    """

    seq_len: int
    """Tokens a row holds."""
    micro_batch_size: int
    """Rows of one `training_step` on one rank."""
    _: KW_ONLY
    pad_to_multiple_of: int | None = None
    """Rows are made as wide as the next multiple of it."""
    pack_ahead: int = 512
    """Samples drawn beyond what a step needs, so that rows fill well."""
    pad_id: int = 0
    """Token id of the padding."""
    token_fields: tuple[str, ...] = ()
    """Per-token fields beside `input_ids` that the batch carries: `loss_mask`, `labels`, ..."""
    sample_fields: tuple[str, ...] = ()
    """Per-sample fields that the batch carries, one entry per piece, in row order."""
    shift_labels: bool = False
    """Labels stand one to the left, so that position i holds the target of position i."""
    flatten: bool = False
    """Hand out [1, rows x width] instead of [rows, width], as variable-length attention wants it."""

    def __post_init__(self) -> None:
        found = _positive(seq_len=self.seq_len, micro_batch_size=self.micro_batch_size)
        if not isinstance(self.pack_ahead, int) or self.pack_ahead < 0:
            found.append(f"pack_ahead must be a whole number of at least 0, not {self.pack_ahead!r}")
        _settle_fields(self, found)

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most."""
        return self.seq_len

    @property
    def width(self) -> int:
        """Tokens of a row as handed out, padding included."""
        return _round_up(self.seq_len, self.pad_to_multiple_of or 1)


@dataclass(frozen=True)
class PaddedRows:
    """Rows of one sample each; rows of similar length share a microbatch, which is as wide as its longest row.

    Raises:
        ConfigError: A value is out of range.
    """

    max_len: int
    """Tokens a row holds at most."""
    micro_batch_size: int
    """Rows of one `training_step` on one rank."""
    _: KW_ONLY
    pad_to_multiple_of: int | None = None
    """Microbatches are made as wide as the next multiple of it."""
    pad_id: int = 0
    """Token id of the padding."""
    token_fields: tuple[str, ...] = ()
    """Per-token fields beside `input_ids` that the batch carries: `loss_mask`, `labels`, ..."""
    sample_fields: tuple[str, ...] = ()
    """Per-sample fields that the batch carries, one entry per row."""
    shift_labels: bool = False
    """Labels stand one to the left, so that position i holds the target of position i."""

    def __post_init__(self) -> None:
        found = _positive(max_len=self.max_len, micro_batch_size=self.micro_batch_size)
        _settle_fields(self, found)

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most."""
        return self.max_len


Rows: TypeAlias = PackedRows | PaddedRows


@dataclass(frozen=True)
class Mixture:
    """Shares of the sources in the training stream.

    Raises:
        ConfigError: The unit is unknown.
    """

    weights: Mapping[str, float] | None = None
    """By source name, not normalised; None: the sources' own."""
    _: KW_ONLY
    unit: Literal["samples", "tokens"] = "samples"
    """What the weights are shares of."""

    def __post_init__(self) -> None:
        if self.unit not in ("samples", "tokens"):
            raise ConfigError(f"Mixture: unit must be 'samples' or 'tokens', not {self.unit!r}")
        if self.weights is not None and not isinstance(self.weights, Mapping):
            raise ConfigError(f"Mixture: weights must be a mapping by source name, not {type(self.weights).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """What the planner knows of a source beforehand."""

    name: str
    num_windows: int
    """Windows of one epoch."""
    weight: float
    epochs: int | None
    """None: endless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """One stream, resolved against a trainer: all that its order and its places depend on."""

    name: str
    sources: tuple[SourceSpec, ...]
    rows: Rows
    rows_per_step: int
    """Rows of real data in one optimizer step (`global_batch_size`)."""
    num_groups: int
    """Data-parallel groups."""
    num_microbatches: int
    """Microbatches a rank gets in one step; filler makes up for what `rows_per_step` lacks."""
    seed: int
    last_step: Literal["fill", "drop"]
    mixture_unit: Literal["samples", "tokens"]
    strategy: Any
    """A `planning.strategies.Strategy`."""
    prefetch_steps: int
    plan_window: int
    """Steps moved together."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """All settings of a loader, the same keywords as `MegaScaleDataModule`.

    Raises:
        ConfigError: Settings are wrong or contradict each other; all that is wrong is said at once.
    """

    sources: Sequence[Source]
    """The training mixture."""
    rows: Rows
    """`PackedRows` or `PaddedRows`."""
    global_batch_size: int | None = None
    """Rows of one optimizer step: micro_batch_size x data-parallel size x accumulation. None: taken from the trainer at
    the first start, and kept in the state."""
    mixture: Mixture | Mapping[str, float] | None = None
    """Weights by source name, in place of the sources' own; a `Mixture` also says what they are shares of."""
    strategy: Any = None
    """How rows are placed: `Balanced()` (default) or `RoundRobin()`."""
    seed: int = 0
    runtime: Literal["ray", "local"] = "ray"
    """Where the roles run: in Ray actors, or all in this process (notebooks, debuggers)."""
    num_loaders: int | None = None
    """Source loader actors; None chooses."""
    prefetch_steps: int | None = None
    """Steps that may be planned and built ahead of the slowest rank; None chooses."""
    plan_window: int | None = None
    """Steps moved by one call; None chooses."""
    window_units: int = 8
    """Units of a source that are shuffled together (part of the order)."""
    part_bytes: int = 64 << 20
    """Stored bytes of a part, inside which samples are shuffled (part of the order)."""
    loader_buffer_bytes: int = 1 << 30
    """What one loader may hold beyond what is due."""
    last_step: Literal["fill", "drop"] = "fill"
    """What happens to a last step with too few rows."""
    steps_per_epoch: int | None = None
    """Steps that `len()` and one trainer epoch have; None: the loader is unsized."""
    val_sources: Sequence[Source] | Mapping[str, Sequence[Source]] = ()
    """Sources of the validation streams: a list for one loader, a mapping of lists for several."""
    force_resume: Sequence[str] = ()
    """Names of settings that may differ from those of the checkpoint."""
    restart_timeout: float = 120.0
    """Seconds that a role may be away before the run ends with an error."""
    ray_address: str | None = None
    """An existing cluster; None starts a local Ray, or uses one that is initialised."""
    ray_init: Mapping[str, Any] | None = None
    """Further keywords of `ray.init`."""

    def __post_init__(self) -> None:
        if isinstance(self.sources, Source) or not isinstance(self.sources, Sequence):
            raise ConfigError(f"sources must be a list of Source, not a {type(self.sources).__name__}")
        object.__setattr__(self, "sources", tuple(self.sources))
        mixture = self.mixture
        if not isinstance(mixture, Mixture):
            object.__setattr__(self, "mixture", Mixture(mixture))
        found = _positive(window_units=self.window_units, part_bytes=self.part_bytes)
        found += _positive(loader_buffer_bytes=self.loader_buffer_bytes)
        for name in ("global_batch_size", "num_loaders", "plan_window", "steps_per_epoch"):
            if getattr(self, name) is not None:
                found += _positive(**{name: getattr(self, name)})
        if self.prefetch_steps is not None and (not isinstance(self.prefetch_steps, int) or self.prefetch_steps < 0):
            found.append(f"prefetch_steps must be a whole number of at least 0, not {self.prefetch_steps!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            found.append(f"seed must be a whole number, not {self.seed!r}")
        for name, choices in (
            ("runtime", ("ray", "local")),
            ("last_step", ("fill", "drop")),
        ):
            if getattr(self, name) not in choices:
                found.append(f"{name} must be one of {choices}, not {getattr(self, name)!r}")
        if not isinstance(self.rows, (PackedRows, PaddedRows)):
            found.append(f"rows must be PackedRows or PaddedRows, not {type(self.rows).__name__}")
        for stream, sources in self.streams().items():
            found += _check_sources(stream, sources, self.shares.weights if stream == "train" else None)
        if found:
            raise ConfigError("; ".join(found))

    def streams(self) -> dict[str, tuple[Source, ...]]:
        """Stream name -> its sources: "train", "val/0", "val/1", ..."""
        found = {"train": tuple(self.sources)}
        for index, sources in enumerate(self.eval_sources().values()):
            found[f"val/{index}"] = sources
        return found

    def eval_sources(self) -> dict[str, tuple[Source, ...]]:
        """The validation loaders by the user's names ("0" where there is only a list)."""
        if isinstance(self.val_sources, Mapping):
            return {str(name): tuple(sources) for name, sources in self.val_sources.items()}
        return {"0": tuple(self.val_sources)} if self.val_sources else {}

    @property
    def shares(self) -> Mixture:
        """The training mixture, settled."""
        assert isinstance(self.mixture, Mixture)
        return self.mixture

    def weights(self, stream: str) -> dict[str, float]:
        """Source name -> weight in the stream, not normalised."""
        own = {source.name: float(source.weight) for source in self.streams()[stream]}
        if stream == "train" and self.shares.weights is not None:
            own = {name: float(self.shares.weights[name]) for name in own}
        return own


def _positive(**values: Any) -> list[str]:
    return [
        f"{name} must be a whole number of at least 1, not {value!r}"
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]


def _settle_fields(rows: Any, found: list[str]) -> None:
    """Finish the checks that both kinds of rows share; raise what was found."""
    if rows.pad_to_multiple_of is not None:
        found += _positive(pad_to_multiple_of=rows.pad_to_multiple_of)
    for name in ("token_fields", "sample_fields"):
        object.__setattr__(rows, name, tuple(getattr(rows, name)))
    declared = [*rows.token_fields, *rows.sample_fields]
    taken = sorted(set(declared) & _RESERVED)
    if taken:
        found.append(f"fields {taken} are made by the loader and cannot be declared")
    if len(set(declared)) < len(declared):
        found.append(f"a field is declared twice in {declared}")
    if found:
        raise ConfigError(f"{type(rows).__name__}: " + "; ".join(found))


def _check_sources(stream: str, sources: Sequence[Source], mixture: Mapping[str, float] | None) -> list[str]:
    found = []
    names = [source.name for source in sources]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        found.append(f"stream {stream!r}: source names must differ, {doubled} are there twice")
    if not sources:
        return [f"stream {stream!r} has no source"]
    weights = dict(zip(names, (source.weight for source in sources), strict=True))
    if mixture is not None:
        missing, unknown = sorted(set(names) - set(mixture)), sorted(set(mixture) - set(names))
        if missing or unknown:
            found.append(f"mixture must name every source once; missing {missing}, unknown {unknown}")
        weights = {name: float(mixture.get(name, 0.0)) for name in names}
        bad = {name: w for name, w in weights.items() if not (0 <= w < float("inf"))}
        if bad:
            found.append(f"mixture weights must be finite and at least 0, not {bad}")
    if not any(weight > 0 for weight in weights.values()):
        found.append(f"stream {stream!r}: at least one source needs a weight above 0")
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
