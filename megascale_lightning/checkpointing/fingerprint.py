"""The order config as a flat table, and what a difference at resume means."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, StateError
from megascale_lightning.rows import PackedRows, PaddedRows

__all__ = ["SOURCE_DEFAULTS", "check_fingerprint", "full_table", "order_fingerprint", "restarted_sources"]

SOURCE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "epochs": None,
        "shuffle": True,
        "overlong": "split",
        "together": None,
        "join": None,
        "on_error": "raise",
        "transform": None,
        "transform_batched": None,
        "length": None,
        "format_options": None,
    }
)
"""Settings of a source that the order depends on; one that has this value is not in the table."""

_FREE: Final = ("mixture.", "mixture_schedule")
"""Settings that may change between two runs: they govern what is drawn from then on."""

_POSITIONS: Final = (
    "order_version",
    "seed",
    "window_units",
    "part_bytes",
    "rows.kind",
    "rows.seq_len",
    "rows.max_len",
    "rows.targets",
    "strategy.mix.curriculum",
)
"""Settings that give every position of every source another meaning; `files.*` and `sources.*` do so for one source."""

_CONSEQUENCES: Final = {
    "order_version": "this version orders samples in another way: every source begins its epoch anew",
    "seed": "another order: every source begins its epoch anew",
    "global_batch_size": "steps hold another number of rows from here on",
    "window_units": "another order: every source begins its epoch anew",
    "part_bytes": "another order: every source begins its epoch anew",
    "files": "other data: the source begins its epoch anew",
    "modified": "the files may hold other samples; the stream goes on where it was, as if they were only touched",
    "rows": "samples are cut and packed differently: every source begins its epoch anew",
    "rows.pack_ahead": "rows are packed differently from here on",
    "rows.pad_documents_to": "rows are packed differently from here on",
    "sources": "the source may give other samples: it begins its epoch anew",
    "mixture_unit": "shares are counted differently",
    "strategy.mix.curriculum": "another order: every source begins its epoch anew",
    "mixture_stop": "the end of the stream differs",
    "last_step": "the end of the stream differs",
    "strategy": "rows hold other samples from here on",
    "passes": "epochs end at other steps from here on",
}


def order_fingerprint(
    config: LoaderConfig,
    *,
    stream: str,
    global_batch_size: int,
    passes: bool,
    strategy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What law 1 lets the order depend on, but for files and weights: dotted name -> plain value.

    Args:
        config: The settings.
        stream: The stream.
        global_batch_size: As resolved.
        passes: As resolved.
        strategy: What the strategy declares of the order (`StreamSpec.order`).
    """
    rows = config.rows_of(stream)
    table: dict[str, Any] = {
        "seed": config.seed,
        "global_batch_size": global_batch_size,
        "window_units": config.window_units,
        "part_bytes": config.part_bytes,
        "last_step": config.last_step,
        "passes": passes,
        "mixture_unit": config.shares.unit,
        "rows.kind": type(rows).__name__,
        "rows.targets": sorted({"labels", "loss_mask"} & set(rows.token_fields)),
    }
    if isinstance(rows, PackedRows):
        table |= {"rows.seq_len": rows.seq_len, "rows.pack_ahead": rows.pack_ahead}
        if rows.pad_documents_to not in (None, 1):
            table["rows.pad_documents_to"] = rows.pad_documents_to
    elif isinstance(rows, PaddedRows):
        table["rows.max_len"] = rows.max_len
    schedule = config.schedule_of(stream)
    if schedule is not None:
        table["mixture_schedule"] = {"interpolate": schedule.interpolate, "points": _points(config, stream)}
    if stream == "train" and config.shares.stop != "all":
        table["mixture_stop"] = config.shares.stop if isinstance(config.shares.stop, str) else [*config.shares.stop]
    for source in config.streams()[stream]:
        for field, default in SOURCE_DEFAULTS.items():
            value = getattr(source, field)
            value = _name(value) if field in ("transform", "transform_batched", "length") else value
            value = "skip" if value == "quarantine" else value  # the same samples
            if field == "format_options":
                value = json.dumps(value, sort_keys=True, default=str) if value else None
            if field == "join" and value is not None:
                value = json.dumps([{"on": join.on, "columns": join.columns} for join in source.joins])
            if value != default:
                table[f"sources.{source.name}.{field}"] = value
    return table | {f"strategy.{name}": value for name, value in (strategy or {}).items()}


def full_table(saved: Mapping[str, Any], weights: Mapping[str, float], names: Collection[str]) -> dict[str, Any]:
    """The whole table of a state: with its files and weights, which the state keeps elsewhere.

    Args:
        saved: The state.
        weights: As declared in the run that saved it.
        names: The sources to have in it.
    """
    table = {"order_version": saved["order_version"]} | {
        name: value
        for name, value in saved["fingerprint"].items()
        if not name.startswith("sources.") or name.partition(".")[2].rpartition(".")[0] in names
    }
    if "mixture_schedule" in table:
        table["mixture_schedule"] = _of_sources(table["mixture_schedule"], names)
    for name in names:
        table[f"mixture.{name}"] = weights[name]
        content, _, modified = saved["files"][name].partition("-")
        table[f"files.{name}"] = content
        if modified:
            table[f"modified.{name}"] = modified
    return table


def check_fingerprint(
    saved: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    force: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
) -> list[str]:
    """Compare the tables of a checkpoint and of this run (`full_table`).

    Args:
        saved: Of the checkpoint.
        ours: Of this run.
        force: Names, or beginnings of dotted names, that may differ.
        notes: More to say about a difference, by name.

    Returns:
        Names of the settings that differ and may.

    Raises:
        ConfigError: A name in `force` is none of a setting.
        StateError: Others differ; the message is a table of old | new | consequence.
    """
    names = {name.split(".")[0] for name in (*saved, *ours)} | {"sources", "modified", "costs"}
    unknown = [given for given in force if given not in names and not any(_covers(given, n) for n in (*saved, *ours))]
    if unknown:
        raise ConfigError(
            f"force_resume: {unknown} are no settings of a checkpoint; name one as the refusal shows it, or its "
            f"beginning: {', '.join(sorted(names))}"
        )
    allowed: list[str] = []
    refused: list[str] = []
    for name in sorted({*saved, *ours}):
        old, new = _value(saved, name), _value(ours, name)
        if old == new or (name.startswith("modified.") and None in (old, new)):
            continue
        if name.startswith(_FREE) or any(_covers(given, name) for given in force):
            allowed.append(name)
        else:
            note = (notes or {}).get(name)
            refused.append(f"{name}: {old!r} | {new!r} | {_consequence(name)}" + (f" ({note})" if note else ""))
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
    own = {name.rpartition(".")[0] if name.startswith("sources.") else name for name in changed}
    return [source for source in sources if own & {f"files.{source}", f"sources.{source}"}]


def _points(config: LoaderConfig, stream: str) -> list[list[Any]]:
    """[step, weights that differ from those before it] of a schedule."""
    found: list[list[Any]] = []
    before: dict[str, float] = {}
    for step, weights in config.weight_points(stream):
        found.append([step, {name: weights[name] for name in sorted(weights) if before.get(name) != weights[name]}])
        before = weights
    return found


def _of_sources(schedule: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A schedule without the weights of sources that only one of two runs has."""
    points = [[step, {name: w for name, w in weights.items() if name in names}] for step, weights in schedule["points"]]
    return {**schedule, "points": points}


def _covers(given: str, name: str) -> bool:
    return name == given or name.startswith(given + ".")


def _value(table: Mapping[str, Any], name: str) -> Any:
    if name == "mixture_stop":
        return table.get(name, "all")
    return table.get(name, SOURCE_DEFAULTS.get(name.rsplit(".", 1)[-1]) if name.startswith("sources.") else None)


def _consequence(name: str) -> str:
    found = _CONSEQUENCES.get(name) or _CONSEQUENCES.get(name.split(".")[0])
    return found or "another order of samples from here on"


def _name(value: str | Callable[..., Any] | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
