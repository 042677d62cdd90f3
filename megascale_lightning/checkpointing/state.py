"""`LoaderState` to plain JSON and back (law 3): dict, list, str, int, float, bool and None only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import StateError
from megascale_lightning.types import ORDER_VERSION, PIECE, SOURCE_STATE, IntArray, LoaderState

__all__ = ["STATE_KEY", "STATE_VERSION", "check_versions", "from_json", "restart", "to_json"]

STATE_KEY: Final = "megascale_lightning"
"""The fixed key of the state in a checkpoint."""
STATE_VERSION: Final = 1
"""Version of the layout below."""

_POSITION: Final = ("epoch", "window", "part", "offset")


def to_json(state: LoaderState, names: Sequence[str]) -> dict[str, Any]:
    """The state by source name; what describes the run (`fingerprint`, `files`, ...) is added by the caller."""
    sources = {}
    for name, saved, dropped in zip(names, state.sources, state.dropped, strict=True):
        position = {field: int(saved[field]) for field in _POSITION}
        debts = {"share": float(saved["share"]), "given": float(saved["given"])}
        sources[name] = {**position, **debts, "dropped": {reason: int(n) for reason, n in dropped.items()}}
    return {
        "version": STATE_VERSION,
        "order_version": ORDER_VERSION,
        "step": state.step,
        "ended": state.ended,
        "sources": sources,
        "carry": _carry_to_json(state.carry, names),
        "certificate": state.certificate.hex(),
    }


def from_json(saved: Mapping[str, Any], names: Sequence[str]) -> LoaderState:
    """The state for the sources of this run, in their order.

    Raises:
        StateError: It is of another version, incomplete, or of other sources.
    """
    check_versions(saved)
    try:
        if sorted(saved["sources"]) != sorted(names):
            raise StateError(
                f"the state is of sources {sorted(saved['sources'])}, the config has {sorted(names)}: a source cannot "
                "be added, removed or renamed in the middle of a stream"
            )
        sources = np.zeros(len(names), SOURCE_STATE)
        for index, name in enumerate(names):
            for field in SOURCE_STATE.names or ():
                sources[index][field] = saved["sources"][name][field]
        certificate = bytes.fromhex(saved["certificate"])
        if int(saved["step"]) < 0 or len(certificate) != 32:
            raise ValueError(f"step {saved['step']!r}, certificate of {len(certificate)} bytes")
        return LoaderState(
            step=int(saved["step"]),
            ended=bool(saved["ended"]),
            sources=sources,
            dropped=tuple(dict(saved["sources"][name]["dropped"]) for name in names),
            carry=_carry_from_json(saved["carry"], names),
            certificate=certificate,
        )
    except StateError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise StateError(f"the loader state is incomplete or damaged: {type(error).__name__}: {error}") from error


def restart(state: LoaderState, sources: Collection[int]) -> LoaderState:
    """The state with some sources at the beginning of their epoch; what is carried of them is dropped and counted."""
    positions = state.sources.copy()
    dropped = [dict(counts) for counts in state.dropped]
    for index in sources:
        for field in ("window", "part", "offset"):
            positions[index][field] = 0
        carried = int((state.carry["source"] == index).sum())
        if carried:
            dropped[index]["forced_resume"] = dropped[index].get("forced_resume", 0) + carried
    kept = ~np.isin(state.carry["source"], list(sources))
    return replace(state, sources=positions, dropped=tuple(dropped), carry=state.carry[kept])


def check_versions(saved: Mapping[str, Any]) -> None:
    """Refuse a state of another layout or another order. Raises: StateError."""
    if not isinstance(saved, Mapping) or "version" not in saved:
        raise StateError("this is no state of a megascale_lightning loader: it has no 'version'")
    for field, ours in (("version", STATE_VERSION), ("order_version", ORDER_VERSION)):
        if saved.get(field) != ours:
            raise StateError(
                f"the loader state has {field} {saved.get(field)!r}, this version of megascale_lightning reads {ours}: "
                "load it with the version that saved it"
            )


def _carry_to_json(carry: IntArray, names: Sequence[str]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {field: carry[field].tolist() for field in PIECE.names or ()}
    columns["source"] = [names[index] for index in columns["source"]]
    return columns


def _carry_from_json(saved: Mapping[str, Sequence[Any]], names: Sequence[str]) -> IntArray:
    index_of = {name: index for index, name in enumerate(names)}
    carry = np.zeros(len(saved["source"]), PIECE)
    for field in PIECE.names or ():
        carry[field] = [index_of[name] for name in saved["source"]] if field == "source" else saved[field]
    return carry
