"""`megascale inspect CONFIG`: what the sources of a run hold, how long samples are, and what is wrong with them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from megascale_lightning.cli.configs import load_config
from megascale_lightning.cli.inspection import inspect_source
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, MegaScaleError
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.secrets import named_variables, redact, remember_secrets

__all__ = ["add_parser", "remember_all_secrets"]

_SCAN: Final = 1000
_BAR: Final = 40
_REASONS: Final = {
    "filtered": "the transform gave None",
    "empty": "no tokens",
    "read_error": "cannot be read",
    "transform_error": "the transform raised an error",
    "partner": "a record that stays together with it is dropped",
    "unpaired": "what is to be joined to it is not there",
}


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="look at the sources of a run: sizes, lengths, the first sample, what is bad",
        description=f"{__doc__} Exit status: 0; 1: bad records were found by --scan all; 2: it cannot be looked at.",
    )
    parser.add_argument(
        "config",
        help="a YAML file (LightningCLI's, or one with sources: and rows:), module:attribute or file.py:attribute",
    )
    parser.add_argument("--source", metavar="NAME", help="only the sources of this name")
    parser.add_argument(
        "--scan",
        metavar="N|all",
        type=_scan,
        default=_SCAN,
        help=f"records of each source to look at (default {_SCAN}, from units all over it)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _scan(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, or all; not {text!r}")
    return int(text)


def _run(chosen: argparse.Namespace) -> int:
    try:
        found = _inspect(chosen)
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except (MegaScaleError, OSError) as error:
        print(f"megascale: {redact(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    if chosen.json:
        json.dump({"sources": found}, sys.stdout, indent=2)
        print()
    return int(chosen.scan is None and any(one["num_bad"] for one in found))


def _inspect(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """All reports, shown as they are made unless they are wanted as JSON."""
    config = load_config(chosen.config)
    pairs = [(stream, source) for stream, sources in config.streams().items() for source in sources]
    remember_all_secrets(config, [source for _, source in pairs])
    wanted = [(stream, source) for stream, source in pairs if chosen.source in (None, source.name)]
    if not wanted:
        names = ", ".join(dict.fromkeys(source.name for _, source in pairs))
        raise ConfigError(f"there is no source {chosen.source!r}; there are {names}")
    found = []
    for stream, source in wanted:
        found.append(inspect_source(config, stream, source, chosen.scan))
        if not chosen.json:
            print("\n".join(_lines(found[-1])), flush=True)
    return found


def remember_all_secrets(config: LoaderConfig, sources: Sequence[Source]) -> None:
    """Records may hold the credentials of any of them: none is shown."""
    names = list(config.env)
    for source in sources:
        for options in source.all_storage_options():
            remember_secrets(options)
            names += named_variables(options)
    remember_secrets([os.environ[name] for name in names if name in os.environ])


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    share = f"{found['share']:.1%} of the {found['share_unit']} of {found['stream']}"
    yield f"{found['stream']}  {found['source']}: {found['format']}, weight {found['weight']:g} ({share})"
    if found["files"] is not None:
        yield f"  files     {_files_text(found)}"
        yield f"  stored    {_bytes(found['stored_bytes'])}"
    for joined in found["joined"]:
        fields = "all fields" if joined["columns"] is None else ", ".join(joined["columns"])
        yield f"  joined    {fields} by {joined['on']!r} of {joined['format']}, {_bytes(joined['stored_bytes'])}"
        yield f"            {_files_text(joined)}"
    yield f"  units     {found['units']:,}" + (", read in slices" if found["read_in_slices"] else "")
    yield f"  rows      {_rows_text(found)}"
    yield f"  order     {_order_text(found)}"
    for note in found["notes"]:
        yield f"  note      {note}"
    yield f"  looked at {_scanned_text(found)}"
    if found["lengths"] is not None:
        yield from _length_lines(found["lengths"])
    yield from _dropped_lines(found)
    yield from _first_lines(found["first"])
    yield ""


def _files_text(found: Mapping[str, Any]) -> str:
    more = found["files"] - len(found["paths"])
    return f"{found['files']:,}: {', '.join(found['paths'])}" + (f", and {more:,} more" if more else "")


def _rows_text(found: Mapping[str, Any]) -> str:
    rows = f"{found['rows']:,}"
    if found["rows_are"] == "estimated":
        return f"~{rows} (estimated from the units that were counted)"
    return rows if found["rows_are"] == "counted" else f"at least {rows} (how many more is known only by reading all)"


def _order_text(found: Mapping[str, Any]) -> str:
    number = found["epochs"]
    epochs = "endless" if number is None else "once" if number == 1 else f"{number} epochs"
    return f"{'shuffled' if found['shuffle'] else 'as stored'}, {epochs}"


def _scanned_text(found: Mapping[str, Any]) -> str:
    scanned = found["scanned"]
    if scanned["all"]:
        return f"all {scanned['records']:,} records"
    text = f"{scanned['records']:,} records from {scanned['units']} of {found['units']:,} units"
    return text + (", then the time was up; --scan all takes as long as it takes" if scanned["ran_out_of_time"] else "")


def _length_lines(lengths: Mapping[str, Any]) -> Iterator[str]:
    numbers = "".join(f", {name} {lengths[name]:,}" for name in ("median", "p95"))
    span = f"{lengths['min']:,} to {lengths['max']:,}, mean {lengths['mean']:,.1f}{numbers}"
    yield f"  lengths   {span}, {lengths['total']:,} in all ({lengths['of']})"
    most = max(entry["count"] for entry in lengths["histogram"])
    names = [_span(entry) for entry in lengths["histogram"]]
    width, digits = max(map(len, names)), len(f"{most:,}")
    for name, entry in zip(names, lengths["histogram"], strict=True):
        bar = "#" * -(-entry["count"] * _BAR // most)
        yield f"    {name:>{width}}  {entry['count']:>{digits},}  {bar}".rstrip()
    if lengths["overlong"]:
        done = {"split": "are split", "truncate": "are cut off", "drop": "are dropped", "error": "end the run"}
        policy = lengths["overlong_policy"]
        yield (
            f"  overlong  {lengths['overlong']:,} are longer than a row ({lengths['row_holds']:,}): "
            f"they {done[policy]} (overlong={policy!r})"
        )


def _span(entry: Mapping[str, Any]) -> str:
    return f"{entry['from']:,}" if entry["from"] == entry["to"] else f"{entry['from']:,}-{entry['to']:,}"


def _dropped_lines(found: Mapping[str, Any]) -> Iterator[str]:
    for reason, count in sorted(found["dropped"].items()):
        yield f"  dropped   {count:,} {reason}" + (f" ({_REASONS[reason]})" if reason in _REASONS else "")
    if not found["num_bad"]:
        yield "  bad       none found"
        return
    done = {
        "raise": 'the first of them ends the run; on_error="skip" or "quarantine" leaves them out',
        "skip": "they are left out",
        "quarantine": "they are left out and listed",
    }
    yield f"  bad       {found['num_bad']:,}: {done[found['on_error']]}"
    for entry in found["bad"]:
        row = "all rows" if entry["row"] is None else f"row {entry['row']}"
        yield f"    {entry['file']}, unit {entry['unit']}, {row}: {entry['reason']}: {_one_line(entry['message'])}"
    if found["bad_not_listed"]:
        yield f"    and {found['bad_not_listed']:,} more; --scan all lists every one"


def _first_lines(first: Mapping[str, Any]) -> Iterator[str]:
    yield f"  first     unit {first['unit']}, row {first['row']}"
    if "raw" in first:
        yield from _field_lines(first["raw"])
    if "transform" in first:
        yield f"  after     {first['transform']}"
    if "error" in first:
        yield f"    {_one_line(first['error'])}"
    elif "transformed" in first:
        yield from ["    dropped"] if first["transformed"] is None else _field_lines(first["transformed"])


def _field_lines(fields: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for name, field in fields.items():
        name = f"{name}: " if name else ""
        yield f"    {name}{field['type']}: {field['value']}" if field["type"] != "none" else f"    {name}none"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _bytes(number: int) -> str:
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number:,} B" if unit == "B" else f"{size:.1f} {unit}"
