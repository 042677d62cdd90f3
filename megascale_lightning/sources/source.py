"""`Source`: one data set with its own files, format, transform and weight, as the user declares it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, get_args

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.choices import Executor, Format, OnError, Overlong, path_problems
from megascale_lightning.sources.functions import function_name, takes_rng
from megascale_lightning.sources.join import Join
from megascale_lightning.sources.stores.filesystems import is_filesystem
from megascale_lightning.sources.stores.secrets import without_secrets
from megascale_lightning.types import BAD_REASONS

__all__ = ["Source"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Source:
    """One data set of a mixture.

    Raises:
        ConfigError: A value is out of range; the message names the source.
    """

    name: str
    """Unique in its stream: its name in the state, the reports and the sample ids."""
    data: Any
    """A path, a glob, a brace pattern (`{000..127}`, `{a,b}`), an fsspec URL or a list of these; a torch map-style or
    Hugging Face dataset; or a callable without arguments that returns one, or an iterable."""
    _: KW_ONLY
    weight: float = 1.0
    """Share in the mixture, relative to the other sources; 0 is legal and never drawn."""
    format: Format | None = None
    """Found from the file name, or from what lies in the folder, when None."""
    format_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the format, such as `{"delimiter": ";"}` for CSV; see docs/sources.md."""
    columns: tuple[str, ...] | None = None
    """What to read; None reads what the rows need: every column where a `transform` is given or rows are collated."""
    transform: Callable[..., Any] | None = None
    """`transform(sample)` or `transform(sample, rng)`, run in the loader before planning: dict in, dict out, or None to
    drop the sample. `rng` is a `numpy.random.Generator` derived from (seed, sample id)."""
    transform_batched: Callable[..., Any] | None = None
    """The same over up to 256 records at once, in place of `transform`: `transform_batched(columns)` or
    `transform_batched(columns, rng)`. In: a dict of one list per field, of numpy arrays for lists of numbers, of python
    objects for the rest, None where a record lacks the field. Out: a mapping of one sequence per field, with a value
    for each record (a list of lists or arrays, an array, an Arrow array, what `tokenizer.encode_batch` gives), or a
    list of one dict per record; None, in every field, drops a record. A call that raises is repeated record by record
    where `on_error` is not "raise". `rng` is derived from (seed, source, epoch, unit, first row)."""
    length: str | Callable[[Any], int] | None = None
    """A column with the length in tokens, or a function of the transformed sample; default: that of `input_ids`, or as
    `CollatedRows` says."""
    epochs: int | None = None
    """How often the data are gone through; None is endless."""
    shuffle: bool = True
    """Whether units and records are permuted (seeded)."""
    on_error: OnError = "raise"
    """What happens to a record that cannot be read or transformed, and to all records of stored bytes that are broken
    for good (a file cut short). "quarantine" drops them as "skip" does, and writes down which they were and why."""
    max_bad_fraction: float | None = None
    """A larger share than this of bad records (what `on_error` drops, not what a policy drops) among those that the
    stream has passed, at least 100 or a whole epoch, ends the run; None: no limit."""
    overlong: Overlong = "split"
    """What happens to a sample longer than a row."""
    together: str | None = None
    """A column: consecutive records of a file with an equal value in it are one sample of several records, such as a
    preference pair. They share a row, and are dropped together; null stands alone. Needs `overlong="drop"` or "error",
    and packed rows; see docs/sources.md."""
    join: Join | Sequence[Join] | None = None
    """Further files by whose records those of this source are completed, before any transform: see `Join`. A record
    without a partner there is treated as one that cannot be read (`on_error`), and counted as "unpaired"."""
    thread_safe: bool = False
    """The transform may run on several threads at once."""
    executor: Executor = "inline"
    """Where transforms (and a dataset's `__getitem__`) run: in the loader's thread, on threads beside it (for code that
    releases the interpreter lock; needs `thread_safe=True` or a transform that takes `rng`), or in processes. The
    samples are the same. Items of a dataset without `thread_safe=True` are fetched one at a time on threads, too: each
    has the global random states to itself."""
    num_workers: int | None = None
    """Threads or processes of a loader at once, about; None: as many as there are cores."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Keywords of the fsspec filesystem, credentials among them: handed to the loaders, and written down nowhere. A
    text `env:NAME` stands for the value of an environment variable of rank 0's process."""
    filesystem: Any = field(default=None, repr=False)
    """An fsspec or pyarrow filesystem to read with, in place of the one that the URL names. It has to pickle, unless
    the loaders run in this process."""

    def __post_init__(self) -> None:
        if self.join is not None:
            object.__setattr__(self, "join", Join.all_of(self.join) or None)
        problems = list(self._problems())
        if problems:
            raise ConfigError(f"source {self.name!r}: " + "; ".join(problems))
        if isinstance(self.columns, list):
            object.__setattr__(self, "columns", tuple(self.columns))

    def __repr__(self) -> str:
        shown = {field.name: without_secrets(getattr(self, field.name)) for field in fields(self) if field.repr}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def is_transformed(self) -> bool:
        """Whether records go through the user's code before they are samples."""
        return self.transform is not None or self.transform_batched is not None

    @property
    def joins(self) -> tuple[Join, ...]:
        """`join`, settled."""
        return Join.all_of(self.join)

    @property
    def read_columns(self) -> tuple[str, ...] | None:
        """`columns`, with that of `together` and those of the ids of `join`."""
        if self.columns is None:
            return None
        together = () if self.together is None else (self.together,)
        return tuple(dict.fromkeys([*self.columns, *together, *(join.on for join in self.joins)]))

    @property
    def bad_reasons(self) -> tuple[str, ...]:
        """Reasons for which a record is dropped by `on_error`, and not by a policy."""
        return (*BAD_REASONS, "unpaired") if self.joins else BAD_REASONS

    def all_storage_options(self) -> Iterator[Mapping[str, Any]]:
        """`storage_options`, and those of `join`."""
        for options in (self.storage_options, *(join.storage_options for join in self.joins)):
            if options is not None:
                yield options

    def _problems(self) -> list[str]:
        found = []
        if isinstance(self.columns, str):
            found.append(f"columns must be a tuple of names, such as ({self.columns!r},), not a str")
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            found.append("a name is letters, digits, '.', '_' and '-', and begins with a letter or a digit")
        if not (isinstance(self.weight, (int, float)) and 0 <= self.weight <= sys.float_info.max):
            found.append(f"weight must be a finite number of at least 0, not {self.weight!r}")
        if self.epochs is not None and (not isinstance(self.epochs, int) or self.epochs < 1):
            found.append(f"epochs must be a whole number of at least 1, or None for endless, not {self.epochs!r}")
        found += self._numbers_and_kinds()
        found += self._storage_problems()
        for name, value, choices in (
            ("format", self.format, (None, *get_args(Format))),
            ("on_error", self.on_error, get_args(OnError)),
            ("executor", self.executor, get_args(Executor)),
            ("overlong", self.overlong, get_args(Overlong)),
        ):
            if value not in choices:
                found.append(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        return found

    def _storage_problems(self) -> list[str]:
        found = path_problems(self.data, self.storage_options, has_filesystem=self.filesystem is not None)
        if self.filesystem is not None and not is_filesystem(self.filesystem):
            kind = type(self.filesystem).__name__
            found.append(f"filesystem must be a filesystem of fsspec or pyarrow, or None, not a {kind}")
        return found + self._executor_problems()

    def _executor_problems(self) -> list[str]:
        function = self.transform or self.transform_batched
        if self.executor != "threads" or self.thread_safe or not callable(function) or takes_rng(function):
            return []
        return [
            f"executor='threads' needs a transform that takes `rng`, or thread_safe=True: {function_name(function)} "
            "may draw from the global random states, which several threads cannot have to themselves. Declare "
            "thread_safe=True if it does not, or set executor='processes'"
        ]

    def _numbers_and_kinds(self) -> list[str]:
        found = [
            f"{name} must be callable, not {type(value).__name__}"
            for name in ("transform", "transform_batched")
            if (value := getattr(self, name)) is not None and not callable(value)
        ]
        found += [
            f"{name} must be a mapping, not {type(value).__name__}"
            for name in ("format_options", "storage_options")
            if (value := getattr(self, name)) is not None and not isinstance(value, Mapping)
        ]
        if self.transform is not None and self.transform_batched is not None:
            found.append("transform and transform_batched are two ways to say the same; give one")
        bad = self.max_bad_fraction
        if bad is not None and not (isinstance(bad, (int, float)) and 0 <= bad < 1):
            found.append(f"max_bad_fraction must be a number from 0 to below 1, not {bad!r}")
        elif bad is not None and self.on_error == "raise":
            found.append('max_bad_fraction needs on_error="skip" or "quarantine": else one bad record ends the run')
        if self.together is not None and not (isinstance(self.together, str) and self.together):
            found.append(f"together must be the name of a column, not {self.together!r}")
        elif self.together is not None and self.overlong not in ("drop", "error"):
            found.append(
                f"records that stay together are not cut: together={self.together!r} needs overlong='drop' or 'error', "
                f"not {self.overlong!r}"
            )
        found += self._join_problems()
        workers = self.num_workers
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            found.append(f"num_workers must be a whole number of at least 1, not {workers!r}")
        return found

    def _join_problems(self) -> list[str]:
        if not self.joins:
            return []
        keys = {join.on for join in self.joins}
        names = [name for columns in (self.columns, *(join.columns for join in self.joins)) for name in columns or ()]
        twice = sorted({name for name in names if names.count(name) > 1} - keys)
        return (
            [f"columns of the source and of its join name {twice} more than once: choose one origin"] if twice else []
        )
