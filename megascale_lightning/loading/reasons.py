"""Why a sample is dropped or shortened: codes of `MetaBlock.reason`."""

from __future__ import annotations

from typing import Final

__all__ = [
    "EMPTY",
    "FILTERED",
    "KEPT",
    "OVERLONG",
    "PARTNER",
    "READ_ERROR",
    "REASONS",
    "TRANSFORM_ERROR",
    "TRUNCATED",
    "UNPAIRED",
]

REASONS: Final = (
    "",
    "filtered",
    "empty",
    "overlong",
    "truncated",
    "read_error",
    "transform_error",
    "partner",
    "unpaired",
)
"""`MetaBlock.reasons`: index = code. All but "" and "truncated" are drops."""

KEPT: Final = 0
FILTERED: Final = 1
EMPTY: Final = 2
OVERLONG: Final = 3
TRUNCATED: Final = 4
READ_ERROR: Final = 5
TRANSFORM_ERROR: Final = 6
PARTNER: Final = 7
"""A record that stays together with it is dropped."""
UNPAIRED: Final = 8
"""What is to be joined to it is not there."""
