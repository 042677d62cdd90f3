"""The order config as a flat table, and what a difference at resume means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from megascale_lightning.config import LoaderConfig, PackedRows
from megascale_lightning.errors import ConfigError, StateError

__all__ = ["check_fingerprint", "order_fingerprint", "restarted_sources"]

_FREE: Final = ("mixture.",)
"""Settings that may change between two runs: they govern what is drawn from then on."""

_POSITIONS: Final = ("seed", "window_units", "part_bytes", "rows.kind", "rows.seq_len", "rows.max_len", "rows.targets")
"""Settings that give every position of every source another meaning; `files.*` and `sources.*` do so for one source."""

_CONSEQUENCES: Final = {
    "seed": "another order: every source begins its epoch anew",
    "global_batch_size": "steps hold another number of rows from here on",
    "window_units": "another order: every source begins its epoch anew",
    "part_bytes": "another order: every source begins its epoch anew",
    "files": "other data: the source begins its epoch anew",
    "rows": "samples are cut and packed differently: every source begins its epoch anew",
    "rows.pack_ahead": "rows are packed differently from here on",
    "sources": "the source may give other samples: it begins its epoch anew",
    "mixture_unit": "shares are counted differently",
    "last_step": "the end of the stream differs",
}


def order_fingerprint(
    config: LoaderConfig, *, stream: str, global_batch_size: int, files: Mapping[str, str]
) -> dict[str, Any]:
    """What law 1 lets the order depend on: dotted name -> plain value.

    Args:
        config: The settings.
        stream: The stream.
        global_batch_size: As resolved.
        files: Source name -> digest of its frozen file list.
    """
    rows = config.rows
    table: dict[str, Any] = {
        "seed": config.seed,
        "global_batch_size": global_batch_size,
        "window_units": config.window_units,
        "part_bytes": config.part_bytes,
        "last_step": config.last_step,
        "mixture_unit": config.shares.unit,
        "rows.kind": type(rows).__name__,
        "rows.targets": sorted({"labels", "loss_mask"} & set(rows.token_fields)),
    }
    if isinstance(rows, PackedRows):
        table |= {"rows.seq_len": rows.seq_len, "rows.pack_ahead": rows.pack_ahead}
    else:
        table["rows.max_len"] = rows.max_len
    for name, weight in config.weights(stream).items():
        table[f"mixture.{name}"] = weight
    for source in config.streams()[stream]:
        for field in ("epochs", "shuffle", "overlong", "on_error"):
            table[f"sources.{source.name}.{field}"] = getattr(source, field)
        for field in ("transform", "length"):
            table[f"sources.{source.name}.{field}"] = _name(getattr(source, field))
        table[f"files.{source.name}"] = files[source.name]
    return table


def check_fingerprint(saved: Mapping[str, Any], ours: Mapping[str, Any], *, force: Sequence[str] = ()) -> list[str]:
    """Compare the order config of a checkpoint with that of this run.

    Args:
        saved: Of the checkpoint.
        ours: Of this run.
        force: Names, or beginnings of dotted names, that may differ.

    Returns:
        Names of the settings that differ and may.

    Raises:
        ConfigError: A name in `force` is none of a setting.
        StateError: Others differ; the message is a table of old | new | consequence.
    """
    unknown = [given for given in force if not any(_covers(given, name) for name in (*saved, *ours))]
    if unknown:
        known = sorted({name.split(".")[0] for name in ours})
        raise ConfigError(
            f"force_resume: {unknown} are no settings of a checkpoint; name one as the refusal shows it, or its "
            f"beginning: {', '.join(known)}"
        )
    allowed: list[str] = []
    refused: list[str] = []
    for name in sorted({*saved, *ours}):
        old, new = saved.get(name), ours.get(name)
        if old == new:
            continue
        if name.startswith(_FREE) or any(_covers(given, name) for given in force):
            allowed.append(name)
        else:
            refused.append(f"{name}: {old!r} | {new!r} | {_consequence(name)}")
    if refused:
        raise StateError(
            "the checkpoint was written with other settings (setting: old | new | consequence):\n  "
            + "\n  ".join(refused)
            + "\nSet them as they were, or name them in force_resume=[...] to go on regardless."
        )
    return allowed


def restarted_sources(changed: Sequence[str], sources: Sequence[str]) -> list[str]:
    """The sources whose saved positions mean nothing under settings that changed."""
    if any(name in _POSITIONS for name in changed):
        return list(sources)
    prefixes = {source: (f"files.{source}", f"sources.{source}.") for source in sources}
    return [source for source in sources if any(name.startswith(prefixes[source]) for name in changed)]


def _covers(given: str, name: str) -> bool:
    return name == given or name.startswith(given + ".")


def _consequence(name: str) -> str:
    found = _CONSEQUENCES.get(name) or _CONSEQUENCES.get(name.split(".")[0])
    return found or "another order of samples from here on"


def _name(value: str | Callable[..., Any] | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
