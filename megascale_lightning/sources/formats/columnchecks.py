"""`check_columns`: the columns that a file must have."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.source import Source

__all__ = ["check_columns", "needed_columns"]


def needed_columns(source: Source) -> Sequence[str]:
    """Columns that every file must have, as far as the source alone tells."""
    if source.columns is not None:
        return source.columns
    return () if source.is_transformed else ("input_ids",)


def check_columns(name: str, path: str, there: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse a file that lacks a column, or has it twice.

    Args:
        name: Of the source, for the message.
        path: The file.
        there: Its columns.
        needed: Those that are wanted.

    Raises:
        ConfigError: As said.
    """
    missing = [column for column in needed if column not in there]
    if missing:
        raise ConfigError(
            f"source {name!r}: {path} has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(there)}. A `transform` can make the missing field from these"
        )
    twice = [column for column in needed if there.count(column) > 1]
    if twice:
        raise ConfigError(
            f"source {name!r}: {path} has the column {twice[0]!r} {there.count(twice[0])} times; nobody can tell which "
            "is meant: rename one"
        )
