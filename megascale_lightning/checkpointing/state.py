"""`LoaderState` to plain JSON and back (law 3): dict, list, str, int, float, bool and None only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from megascale_lightning.checkpointing.checking import check_saved
from megascale_lightning.checkpointing.migrations import STATE_VERSION, migrate
from megascale_lightning.checkpointing.packing import pack_array, pack_records, unpack_array, unpack_records
from megascale_lightning.errors import StateError
from megascale_lightning.streams import initial_levels
from megascale_lightning.types import (
    LEVEL_STATE,
    ORDER_VERSION,
    PIECE,
    SOURCE_STATE,
    Change,
    CostChange,
    FloatArray,
    IntArray,
    LoaderState,
    MixtureChange,
    change_key,
)

__all__ = [
    "STATE_KEY",
    "STATE_VERSION",
    "from_json",
    "migrate",
    "pack_weights",
    "readable",
    "restart",
    "to_json",
    "weights_by_name",
]

STATE_KEY: Final = "megascale_lightning"
"""The fixed key of the state in a checkpoint."""

_POSITION: Final = ("epoch", "window", "part", "offset")


def to_json(state: LoaderState, names: Sequence[str]) -> dict[str, Any]:
    """The state by source name; what describes the run (`fingerprint`, `files`, ...) is added by the caller.

    What is packed refers to sources by their rank in the sorted names.
    """
    sources = {}
    checked = state.checked or [(0, 0)] * len(names)
    for name, saved, dropped, (records, bad) in zip(names, state.sources, state.dropped, checked, strict=True):
        position = {field: int(saved[field]) for field in _POSITION}
        debts = {"share": float(saved["share"]), "given": float(saved["given"])}
        sources[name] = {**position, **debts, "dropped": {reason: int(n) for reason, n in dropped.items()}}
        if records:
            sources[name]["checked"] = {"records": records, "bad": bad}
    by_name = np.argsort(names, kind="stable")
    cost_changes = [[change.step, _plain(change.costs)] for change in state.changes if isinstance(change, CostChange)]
    costs = {"now": _plain(state.costs), "changes": cost_changes}
    levels = {} if state.levels is None else {"levels": _levels_to_json(state.levels[by_name])}
    return {
        "version": STATE_VERSION,
        "order_version": ORDER_VERSION,
        "step": state.step,
        "ended": state.ended,
        "pass": state.passes,
        "sources": sources,
        "carry": _carry_to_json(state.carry, by_name),
        **levels,
        "mixture": {
            "weights": pack_weights(state.sources["weight"], names),
            "changes": [
                [change.step, pack_weights(change.weights, names)]
                for change in state.changes
                if isinstance(change, MixtureChange)
            ],
            "replaced": state.replaced,
        },
        "certificate": state.certificate.hex(),
        **({"costs": costs} if any(costs.values()) else {}),
    }


def from_json(saved: Mapping[str, Any], names: Sequence[str], *, sources_may_differ: bool = False) -> LoaderState:
    """The state for the sources of this run, in their order.

    Args:
        saved: A state of the current version (`migrate`).
        names: Sources of this run.
        sources_may_differ: A source that is not in the state begins now; one that is no longer there is left out, with
            what was carried of it.

    Raises:
        StateError: It is incomplete, or of other sources.
    """
    check_saved(saved)
    try:
        _check_names(sorted(saved["sources"]), sorted(names), sources_may_differ)
        known = sorted(saved["sources"])
        weights = weights_by_name(saved, "weights")
        sources = np.zeros(len(names), SOURCE_STATE)
        for index, name in enumerate(names):
            if name not in saved["sources"]:
                sources[index]["epoch"] = saved["pass"]
                continue
            sources[index]["weight"] = weights[name]
            for field in (*_POSITION, "share", "given"):
                sources[index][field] = saved["sources"][name][field]
        costs = saved.get("costs", {"now": [], "changes": []})
        changes: list[Change] = [
            *(
                MixtureChange(int(step), _weights_of(unpack_array(packed, np.float64), known, names))
                for step, packed in saved["mixture"]["changes"]
            ),
            *(CostChange(int(step), tuple(given)) for step, given in costs["changes"]),
        ]
        return LoaderState(
            step=int(saved["step"]),
            ended=saved["ended"],
            sources=sources,
            dropped=tuple(dict(saved["sources"][n]["dropped"]) if n in saved["sources"] else {} for n in names),
            carry=_carry_from_json(saved["carry"], known, names),
            certificate=bytes.fromhex(saved["certificate"]),
            passes=int(saved["pass"]),
            checked=tuple(_checked(saved["sources"].get(n, {})) for n in names),
            changes=tuple(sorted(changes, key=change_key)),
            replaced=saved["mixture"]["replaced"],
            costs=tuple(costs["now"]),
            levels=_levels_from_json(saved["levels"], known, names, sources) if "levels" in saved else None,
        )
    except StateError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise StateError(f"the loader state is incomplete or damaged: {type(error).__name__}: {error}") from error


def pack_weights(weights: FloatArray, names: Sequence[str]) -> str:
    """Weights in the order of the sorted names, packed."""
    return pack_array(weights[np.argsort(names, kind="stable")])


def weights_by_name(saved: Mapping[str, Any], entry: str) -> dict[str, float]:
    """Source name -> weight, of an entry of the `mixture` of a state."""
    return dict(zip(sorted(saved["sources"]), unpack_array(saved["mixture"][entry], np.float64).tolist(), strict=True))


def readable(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state for people: weights by name, and no packed numbers."""
    mixture = dict(saved["mixture"])
    changes = {
        step: dict(zip(sorted(saved["sources"]), unpack_array(packed, np.float64).tolist(), strict=True))
        for step, packed in mixture["changes"]
    }
    for entry in ("weights", "declared"):
        if mixture.get(entry) is not None:
            mixture[entry] = weights_by_name(saved, entry)
    levels = {"levels": f"{saved['levels']['count']} a source"} if "levels" in saved else {}
    carry = f"{saved['carry']['count']} pieces"
    return {**saved, "mixture": {**mixture, "changes": changes}, "carry": carry, **levels}


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
    levels = state.levels
    if levels is not None:
        anew = list(sources)
        # Samples wait in the epochs before, too: better some twice than some never.
        positions["epoch"][anew] = levels["epoch"][anew].min(axis=1)
        levels = levels.copy()
        levels[anew] = initial_levels(positions, levels.shape[1])[anew]
        if len(anew) == len(positions):
            levels = None  # those of another curriculum mean nothing
    kept = ~np.isin(state.carry["source"], list(sources))
    # Other data, or other settings: what was bad before says nothing about them.
    checked = tuple((0, 0) if index in sources else counts for index, counts in enumerate(state.checked))
    state = replace(state, sources=positions, dropped=tuple(dropped), carry=state.carry[kept], checked=checked)
    return replace(state, levels=levels)


def _plain(costs: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    return [dict(cost) for cost in costs]


def _checked(source: Mapping[str, Any]) -> tuple[int, int]:
    """Not in the state of a source without a limit, nor in those of before there were limits."""
    found = source.get("checked", {"records": 0, "bad": 0})
    return int(found["records"]), int(found["bad"])


def _check_names(saved: Sequence[str], ours: Sequence[str], may_differ: bool) -> None:
    added, gone = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if (added or gone) and not may_differ:
        raise StateError(
            f"the state is of sources {saved}, the config has {ours}: added {added}, gone {gone}. Give the sources as "
            'they were, or say force_resume=["sources"]: an added source then begins now, one that is gone is left out '
            "with what was carried of it, and the others go on where they stood"
        )


def _carry_to_json(carry: IntArray, by_name: IntArray) -> dict[str, Any]:
    rank = np.empty(len(by_name), np.int32)
    rank[by_name] = np.arange(len(by_name))
    packed = carry.copy()
    packed["source"] = rank[carry["source"]]
    return {"count": len(carry), "packed": pack_records(packed)}


def _carry_from_json(saved: Mapping[str, Any], known: Sequence[str], names: Sequence[str]) -> IntArray:
    carry = unpack_records(saved["packed"], PIECE, int(saved["count"]))
    ours = {name: index for index, name in enumerate(names)}
    index_of = np.array([ours.get(name, -1) for name in known], np.int32)
    carry["source"] = index_of[carry["source"]]
    return carry[carry["source"] >= 0]


def _levels_to_json(levels: IntArray) -> dict[str, Any]:
    """Of LEVEL_STATE [sources by name, levels]."""
    return {"count": levels.shape[1], "packed": pack_records(levels.ravel())}


def _levels_from_json(
    saved: Mapping[str, Any], known: Sequence[str], names: Sequence[str], sources: IntArray
) -> IntArray:
    """The levels of our sources; one that is new begins where it stands."""
    count = int(saved["count"])
    packed = unpack_records(saved["packed"], LEVEL_STATE, len(known) * count)
    by_name = dict(zip(known, packed.reshape(len(known), count), strict=True))
    levels = initial_levels(sources, count)
    for index, name in enumerate(names):
        if name in by_name:
            levels[index] = by_name[name]
    return levels


def _weights_of(saved: FloatArray, known: Sequence[str], names: Sequence[str]) -> FloatArray:
    """Weights by the rank of saved names as weights of our sources; a source that is new has 0 until it is settled."""
    by_name = dict(zip(known, saved.tolist(), strict=True))
    return np.array([by_name.get(name, 0.0) for name in names])
