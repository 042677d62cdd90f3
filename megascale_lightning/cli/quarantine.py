"""`megascale quarantine PATH`: counts the bad records that a run left out, by file and reason."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megascale_lightning.loading.quarantine import WHOLE_UNIT, read_lines

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "quarantine", help="count the records that were left out as bad, by file and reason", description=__doc__
    )
    parser.add_argument("path", type=Path, help="a quarantine folder, or one of its files")
    parser.add_argument("--json", action="store_true", help="print all entries as one JSON list")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    entries = read_lines(chosen.path)
    if chosen.json:
        json.dump(list(entries), sys.stdout, indent=2)
        print()
        return 0
    print("\n".join(_lines(entries)))
    return 0


def _lines(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A block per source, a line per file and reason, with the first entry of each."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[Any]]] = {}
    for entry in entries:
        of_source = found.setdefault((str(entry.get("source")), str(entry.get("stream"))), {})
        count = of_source.setdefault((str(entry.get("file")), str(entry.get("reason"))), [0, entry])
        count[0] += 1
    for (source, stream), groups in found.items():
        yield f"source {source!r} of stream {stream!r}: {sum(n for n, _ in groups.values())} entries"
        for (file, reason), (count, first) in groups.items():
            row = "all rows" if first["row"] == WHOLE_UNIT else f"row {first['row']}"
            yield f"  {count:6}  {reason:16}{file}, first: unit {first['unit']}, {row}: {first.get('message')}"
    if not found:
        yield "nothing was left out"
