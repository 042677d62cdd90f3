"""`Join`: further files whose records belong to those of a source, by an id that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, get_args

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.choices import Format, path_problems
from megascale_lightning.sources.stores.files import is_file_data
from megascale_lightning.sources.stores.secrets import redact, without_secrets

__all__ = ["Join"]


@dataclass(frozen=True)
class Join:
    """Gives each record of a source the fields of the one record of other files that has the same id.

    Raises:
        ConfigError: A value is none of those that are allowed.
    """

    data: Any
    """Files as in `Source.data`: a path, a glob, a brace pattern, an fsspec URL or a list of these."""
    _: KW_ONLY
    on: str
    """The field that holds the id, in the records of the source and in these: whole numbers or texts. An id stands in
    these files once."""
    columns: tuple[str, ...] | None = None
    """The fields that the source's records get; None: all of them. None may have the name of a field of theirs."""
    format: Format | None = None
    """As in `Source.format`."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """As in `Source.storage_options`, of these files alone."""

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("join: " + "; ".join(problems))
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))

    def __repr__(self) -> str:
        shown = {field.name: without_secrets(getattr(self, field.name)) for field in fields(self) if field.repr}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def all_of(cls, given: Any) -> tuple[Join, ...]:
        """The joins of `Source.join`: one or several, each a `Join` or a mapping of its settings.

        Raises:
            ConfigError: There is something else.
        """
        if given is None:
            return ()
        several = isinstance(given, Sequence) and not isinstance(given, str)
        return tuple(cls._of(one) for one in (given if several else [given]))

    @classmethod
    def _of(cls, given: Any) -> Join:
        if isinstance(given, Join):
            return given
        settings = given.get("init_args", given) if isinstance(given, Mapping) else None
        known = [field.name for field in fields(cls)]
        if not isinstance(settings, Mapping) or set(settings) - set(known) or not {"data", "on"} <= set(settings):
            shown = redact(repr(without_secrets(given)))
            raise ConfigError(f"join must be a Join, or a mapping of its data, on, and others of {known}, not {shown}")
        return cls(**settings)

    @property
    def read_columns(self) -> tuple[str, ...] | None:
        """`columns`, with that of the id."""
        return None if self.columns is None else tuple(dict.fromkeys([*self.columns, self.on]))

    def _problems(self) -> list[str]:
        if not is_file_data(self.data):
            return [
                f"data must be files: a path, a pattern, a URL or a list of these, not a {type(self.data).__name__}"
            ]
        found = path_problems(self.data, self.storage_options, has_filesystem=False)
        if not isinstance(self.on, str) or not self.on:
            found.append(f"on must be the name of the field that holds the id, not {self.on!r}")
        if self.columns is not None and (
            isinstance(self.columns, str)
            or not isinstance(self.columns, Sequence)
            or not all(isinstance(name, str) for name in self.columns)
        ):
            found.append(f"columns must be a tuple of names, not {self.columns!r}")
        if self.format is not None and self.format not in get_args(Format):
            found.append(f"format must be one of {', '.join(map(repr, get_args(Format)))}, not {self.format!r}")
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            found.append(f"storage_options must be a mapping, not {type(self.storage_options).__name__}")
        return found
