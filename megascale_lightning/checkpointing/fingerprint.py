"""The order config as a flat table, and what a difference at resume means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from megascale_lightning.config import LoaderConfig, PackedRows
from megascale_lightning.errors import StateError

__all__ = ["check_fingerprint", "order_fingerprint"]

_FREE: Final = ("mixture.",)
"""Settings that may change between two runs: they govern what is drawn from then on."""

_CONSEQUENCES: Final = {
    "seed": "another order of samples from here on",
    "global_batch_size": "steps hold another number of rows from here on",
    "window_units": "positions would point at other samples",
    "part_bytes": "positions would point at other samples",
    "files": "positions would point at other samples",
    "rows": "samples are cut and packed differently from here on",
    "sources": "the source gives other samples from here on",
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
        A line for each difference that was let through.

    Raises:
        StateError: There are others; the message is a table of old | new | consequence.
    """
    allowed: list[str] = []
    refused: list[str] = []
    for name in sorted({*saved, *ours}):
        old, new = saved.get(name), ours.get(name)
        if old == new:
            continue
        line = f"{name}: {old!r} | {new!r} | {_consequence(name)}"
        free = name.startswith(_FREE) or any(name == given or name.startswith(given + ".") for given in force)
        (allowed if free else refused).append(line)
    if refused:
        raise StateError(
            "the checkpoint was written with other settings (setting: old | new | consequence):\n  "
            + "\n  ".join(refused)
            + "\nSet them as they were, or name them in force_resume=[...] to go on regardless."
        )
    return allowed


def _consequence(name: str) -> str:
    return _CONSEQUENCES.get(name.split(".")[0], "another order of samples from here on")


def _name(value: str | Callable[..., Any] | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
