"""`check_saved`: a saved state field by field, before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from megascale_lightning.checkpointing.packing import unpack_array, unpack_records
from megascale_lightning.errors import StateError
from megascale_lightning.mixtures import is_finite
from megascale_lightning.types import LEVEL_STATE, PIECE

__all__ = ["check_saved", "is_whole"]

_MOST: Final = np.iinfo(np.int32).max
_DIGEST: Final = 32


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_saved(saved: Mapping[str, Any]) -> None:
    """Refuse a state with a field that no state has, whatever the settings and the data are.

    Args:
        saved: A state of the current version (`migrate`).

    Raises:
        StateError: It is incomplete or damaged; names each field, what it holds and what it must be.
    """
    problems = list(_problems(saved))
    if problems:
        raise StateError(f"the loader state is incomplete or damaged: {'; '.join(problems)}")


def _problems(saved: Mapping[str, Any]) -> Iterator[str]:
    for name in ("step", "pass"):
        yield from _whole(saved, name, name)
    if not isinstance(saved.get("ended"), bool):
        yield _said(saved, "ended", "ended", "true or false")
    certificate = saved.get("certificate")
    if not isinstance(certificate, str) or not _is_hex(certificate):
        yield _said(saved, "certificate", "certificate", f"{_DIGEST} bytes in hex")
    given = [name for name in ("files", "fingerprint") if name in saved]  # whoever adds them asks for them
    wrong = [name for name in ("sources", "mixture", "carry", *given) if not isinstance(saved.get(name), Mapping)]
    yield from (_said(saved, name, name, "a mapping") for name in wrong)
    if wrong:
        return
    for source, fields in saved["sources"].items():
        yield from _source_problems(f"sources.{source}", fields)
    yield from _mixture_problems(saved["mixture"], len(saved["sources"]))
    yield from _carry_problems(saved["carry"], len(saved["sources"]))
    if "costs" in saved:
        yield from _cost_problems(saved["costs"])
    if "levels" in saved:
        yield from _level_problems(saved["levels"], len(saved["sources"]))
    for source, digest in saved.get("files", {}).items():
        if not isinstance(digest, str):
            yield f"files.{source} must be a text, not {digest!r}"


def _source_problems(name: str, fields: Any) -> Iterator[str]:
    if not isinstance(fields, Mapping):
        yield f"{name} must be a mapping, not {fields!r}"
        return
    for field in ("epoch", "window", "part", "offset"):
        yield from _whole(fields, field, f"{name}.{field}")
    for field in ("share", "given"):
        if not _is_amount(fields.get(field)):
            yield _said(fields, field, f"{name}.{field}", "a finite number of at least 0")
    if not isinstance(fields.get("dropped"), Mapping):
        yield _said(fields, "dropped", f"{name}.dropped", "a mapping")
    else:
        for reason in fields["dropped"]:
            yield from _whole(fields["dropped"], reason, f"{name}.dropped.{reason}", most=None)
    checked = fields.get("checked", {"records": 0, "bad": 0})
    if not isinstance(checked, Mapping):
        yield f"{name}.checked must be a mapping, not {checked!r}"
    else:
        for field in ("records", "bad"):
            yield from _whole(checked, field, f"{name}.checked.{field}", most=None)


def _mixture_problems(mixture: Mapping[str, Any], num_sources: int) -> Iterator[str]:
    yield from _weight_problems(mixture.get("weights"), "mixture.weights", num_sources)
    if mixture.get("declared") is not None:
        yield from _weight_problems(mixture["declared"], "mixture.declared", num_sources)
    if not isinstance(mixture.get("replaced"), bool):
        yield _said(mixture, "replaced", "mixture.replaced", "true or false")
    changes = mixture.get("changes")
    if not isinstance(changes, Sequence) or isinstance(changes, str):
        yield _said(mixture, "changes", "mixture.changes", "a list")
        return
    for index, change in enumerate(changes):
        name = f"mixture.changes[{index}]"
        if not isinstance(change, Sequence) or len(change) != 2 or not is_whole(change[0]):
            yield f"{name} must be a step and weights, not {change!r}"
        else:
            yield from _weight_problems(change[1], name, num_sources)


def _cost_problems(costs: Any) -> Iterator[str]:
    changes = costs.get("changes") if isinstance(costs, Mapping) else None
    if not isinstance(changes, Sequence) or isinstance(changes, str):
        yield f"costs must be a mapping with a list of changes, not {costs!r}"
        return
    for name, given in (("now", (0, costs.get("now"))), *((f"changes[{at}]", one) for at, one in enumerate(changes))):
        if not isinstance(given, Sequence) or len(given) != 2 or not is_whole(given[0]) or not _are_costs(given[1]):
            yield f"costs.{name} must hold a step, and coefficients by name, finite and at least 0, not {given!r}"


def _are_costs(given: Any) -> bool:
    listed = isinstance(given, Sequence) and all(isinstance(cost, Mapping) for cost in given)
    return listed and all(_is_amount(value) for cost in given for value in cost.values())


def _weight_problems(packed: Any, name: str, num_sources: int) -> Iterator[str]:
    try:
        weights = unpack_array(packed, np.float64)
    except StateError:
        yield f"{name} are no packed numbers"
        return
    if len(weights) != num_sources or not (np.isfinite(weights) & (weights >= 0)).all():
        yield f"{name} must be {num_sources} finite numbers of at least 0, not {weights.tolist()}"


def _carry_problems(carry: Mapping[str, Any], num_sources: int) -> Iterator[str]:
    if not is_whole(carry.get("count")):
        yield _said(carry, "count", "carry.count", "a whole number of at least 0")
        return
    try:
        pieces = unpack_records(carry.get("packed", ""), PIECE, carry["count"])
    except StateError:
        yield f"carry.packed are no packed pieces, carry.count={carry['count']} of them"
        return
    for field in PIECE.names or ():
        wrong = pieces[field] < (-1 if field == "stop" else 0)
        if field == "source":
            wrong |= pieces[field] >= num_sources
        if wrong.any():
            yield f"carry.packed holds a piece whose {field} is {pieces[field][wrong][0]}"


def _level_problems(levels: Any, num_sources: int) -> Iterator[str]:
    if not isinstance(levels, Mapping) or not is_whole(levels.get("count"), 2):
        yield f"levels must be a mapping with the count of them, at least 2, not {levels!r}"
        return
    try:
        places = unpack_records(levels.get("packed", ""), LEVEL_STATE, levels["count"] * num_sources)
    except StateError:
        yield f"levels.packed are no packed places, levels.count={levels['count']} of them for each source"
        return
    for field in LEVEL_STATE.names or ():
        if (places[field] < 0).any():
            yield f"levels.packed holds a place whose {field} is {places[field].min()}"
    if (places["drawn"] > places["seen"]).any():
        yield "levels.packed holds a level that gave more samples than were seen of it"


def _whole(fields: Mapping[str, Any], field: str, name: str, most: int | None = _MOST) -> Iterator[str]:
    value = fields.get(field)
    if not is_whole(value) or (most is not None and value is not None and value > most):
        yield _said(fields, field, name, f"a whole number {'of at least 0' if most is None else f'from 0 to {most}'}")


def _said(fields: Mapping[str, Any], field: str, name: str, wanted: str) -> str:
    return f"{name} must be {wanted}, not {fields[field]!r}" if field in fields else f"{name} is not there"


def _is_amount(value: Any) -> bool:
    return is_finite(value) and value >= 0


def _is_hex(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == _DIGEST
    except ValueError:
        return False
