"""Saved states of older versions, brought to the layout of today step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from megascale_lightning.checkpointing.fingerprint import SOURCE_DEFAULTS
from megascale_lightning.checkpointing.packing import pack_array, pack_records
from megascale_lightning.errors import StateError
from megascale_lightning.types import PIECE

__all__ = ["STATE_VERSION", "migrate"]

STATE_VERSION: Final = 3
"""Version of the layout that `state.to_json` writes."""


def migrate(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The same state in the layout of this version.

    Raises:
        StateError: It is no state, damaged, or of a newer version.
    """
    if not isinstance(saved, Mapping) or "version" not in saved:
        raise StateError("this is no state of a megascale_lightning loader: it has no 'version'")
    version = saved["version"]
    if version not in (*_MIGRATIONS, STATE_VERSION):
        by = f", saved by megascale_lightning {saved['package']}" if "package" in saved else ""
        raise StateError(
            f"the loader state has version {version!r}{by}; this megascale_lightning reads versions 1 to "
            f"{STATE_VERSION}: load it with the version that saved it, or a newer one"
        )
    found = dict(saved)
    try:
        while found["version"] != STATE_VERSION:
            found = _MIGRATIONS[found["version"]](found)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise StateError(f"the loader state is incomplete or damaged: {type(error).__name__}: {error}") from error
    return found


def _from_1(saved: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no passes and no changes of the mixture, and wrote the carry-over and the fingerprint in full."""
    names = sorted(saved["sources"])
    carry = np.zeros(len(saved["carry"]["source"]), PIECE)
    for field in PIECE.names or ():
        column = saved["carry"][field]
        carry[field] = [names.index(name) for name in column] if field == "source" else column
    fingerprint = {"passes": False}
    for name, value in saved["fingerprint"].items():
        kind, field = name.split(".")[0], name.rsplit(".", 1)[-1]
        if kind in ("mixture", "files") or (kind == "sources" and value == SOURCE_DEFAULTS[field]):
            continue
        fingerprint[name] = value
    weights = pack_array(np.array([saved["mixture"]["weights"][name] for name in names], np.float64))
    return {
        **saved,
        "version": 2,
        "pass": 0,
        "carry": {"count": len(carry), "packed": pack_records(carry)},
        "mixture": {"unit": saved["mixture"]["unit"], "weights": weights, "declared": None, "changes": []},
        "fingerprint": fingerprint,
        "files": {name: digest[:12] for name, digest in saved["files"].items()},
    }


def _from_2(saved: dict[str, Any]) -> dict[str, Any]:
    """Version 2 had no schedules, so that nothing could take the place of one."""
    return {**saved, "version": 3, "mixture": {**saved["mixture"], "replaced": False}}


_MIGRATIONS: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {1: _from_1, 2: _from_2}
