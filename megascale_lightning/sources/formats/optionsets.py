"""`check_options`, `check_pickles`: refuse wrong settings; `IS_BOOL`, `is_count`: what values may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.source import Source

__all__ = ["IS_BOOL", "check_options", "check_pickles", "is_count"]

IS_BOOL: Final[tuple[str, Callable[[Any], bool]]] = ("True or False", lambda value: isinstance(value, bool))


def is_count(least: int) -> tuple[str, Callable[[Any], bool]]:
    """What a whole number has to be, and whether a value is one of at least `least`."""
    return (
        f"a whole number of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


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


def check_pickles(source: Source, where: str) -> None:
    """Refuse pickles that `format_options` do not allow.

    Args:
        source: What the user declared.
        where: What holds them, for the message.

    Raises:
        ConfigError: As said.
    """
    if not source.format_options.get("allow_pickle", False):
        raise ConfigError(
            f"{where} holds pickles, which run any code when they are read; leave it out with columns=(...), or "
            'trust the data with format_options={"allow_pickle": True}'
        )
