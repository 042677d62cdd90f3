"""`Source`: one data set with its own files, format, transform and weight, as the user declares it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from megascale_lightning.errors import ConfigError

__all__ = ["Format", "OnError", "Overlong", "Source"]

Format = Literal["parquet", "jsonl", "dataset"]
OnError = Literal["raise", "skip"]
Overlong = Literal["split", "truncate", "drop", "error"]

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
    """A path, a glob, a brace pattern (`{000..127}`, `{a,b}`) or a list of these; a torch map-style or Hugging Face
    dataset; or a callable without arguments that returns one."""
    _: KW_ONLY
    weight: float = 1.0
    """Share in the mixture, relative to the other sources; 0 is legal and never drawn."""
    format: Format | None = None
    """Found from the file name when None."""
    columns: tuple[str, ...] | None = None
    """What to read; None reads what the rows need: every column where a `transform` is given or rows are collated."""
    transform: Callable[..., Any] | None = None
    """`transform(sample)` or `transform(sample, rng)`, run in the loader before planning: dict in, dict out, or None to
    drop the sample. `rng` is a `numpy.random.Generator` derived from (seed, sample id)."""
    length: str | Callable[[Any], int] | None = None
    """A column with the length in tokens, or a function of the transformed sample; default: that of `input_ids`, or as
    `CollatedRows` says."""
    epochs: int | None = None
    """How often the data are gone through; None is endless."""
    shuffle: bool = True
    """Whether units and records are permuted (seeded)."""
    on_error: OnError = "raise"
    """What happens to a record that cannot be read or transformed."""
    overlong: Overlong = "split"
    """What happens to a sample longer than a row."""
    thread_safe: bool = False
    """The transform may run on several threads at once."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(f"source {self.name!r}: " + "; ".join(problems))
        if isinstance(self.columns, list):
            object.__setattr__(self, "columns", tuple(self.columns))

    def _problems(self) -> list[str]:
        found = []
        if isinstance(self.columns, str):
            found.append(f"columns must be a tuple of names, such as ({self.columns!r},), not a str")
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            found.append("a name is letters, digits, '.', '_' and '-', and begins with a letter or a digit")
        if not (isinstance(self.weight, (int, float)) and math.isfinite(self.weight) and self.weight >= 0):
            found.append(f"weight must be a finite number of at least 0, not {self.weight!r}")
        if self.epochs is not None and (not isinstance(self.epochs, int) or self.epochs < 1):
            found.append(f"epochs must be a whole number of at least 1, or None for endless, not {self.epochs!r}")
        for name, value, choices in (
            ("format", self.format, (None, *get_args(Format))),
            ("on_error", self.on_error, get_args(OnError)),
            ("overlong", self.overlong, get_args(Overlong)),
        ):
            if value not in choices:
                found.append(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        if self.transform is not None and not callable(self.transform):
            found.append(f"transform must be callable, not {type(self.transform).__name__}")
        return found
