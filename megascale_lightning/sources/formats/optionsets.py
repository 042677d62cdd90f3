"""`check_options`: refuses settings that a format does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.source import Source

__all__ = ["check_options"]


def check_options(source: Source, kind: str, known: Mapping[str, tuple[str, Callable[[Any], bool]]]) -> None:
    """Check `format_options` against what a format knows.

    Args:
        source: What the user declared.
        kind: The format, for messages.
        known: Name -> (what a value has to be, whether it is).

    Raises:
        ConfigError: An option is unknown, or has a wrong value.
    """
    for name, value in source.format_options.items():
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"source {source.name!r}: format {kind!r} has no option {name!r}; it has {has}")
        meaning, is_legal = known[name]
        if not is_legal(value):
            raise ConfigError(
                f"source {source.name!r}: the option {name!r} of format {kind!r} is {meaning}, not {value!r}"
            )
