"""`megascale state FILE`: shows the loader state inside a checkpoint, without loading weights or running its code."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megascale_lightning.checkpointing.state import STATE_KEY, readable
from megascale_lightning.errors import StateError

__all__ = ["add_parser", "find_states", "read_checkpoint"]

_MARKS: Final = {"version", "order_version"}
"""Keys that together only a loader state has, wherever it lies."""

_MAX_DEPTH: Final = 4


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "state", help="show the loader state inside a checkpoint", description=__doc__
    )
    parser.add_argument(
        "file", type=Path, help="a Lightning checkpoint (file, or folder with meta.pt), or a state as JSON"
    )
    parser.add_argument("--json", action="store_true", help="print the whole state as JSON")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    checkpoint = read_checkpoint(chosen.file)
    states = find_states(checkpoint)
    if not states:
        keys = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise StateError(
            f"{chosen.file} holds no loader state; it holds: {keys}. A checkpoint has one when the trainer ran with "
            "MegaScaleDataModule, or when the state_dict() of a MegaScaleLoader was put into it."
        )
    if chosen.json:
        json.dump(states if len(states) > 1 else next(iter(states.values())), sys.stdout, indent=2, sort_keys=True)
        print()
        return 0
    for where, state in states.items():
        print(f"{where}:")
        print("\n".join(f"  {line}" for line in _lines(_readable(state))))
    return 0


def read_checkpoint(path: Path) -> Any:
    """What a checkpoint file holds; tensors are mapped, not read.

    Raises:
        StateError: The file is no checkpoint that loads with `weights_only=True`.
        OSError: The file cannot be read.
    """
    if path.is_dir():
        path = path / "meta.pt"
    with path.open("rb") as file:
        begin = file.read(64).lstrip()
    if begin.startswith(b"{"):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StateError(f"{path} begins like JSON and is not: {error}") from error
    import torch

    is_zip = begin.startswith(b"PK")  # the older format cannot be mapped
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError:
        raise
    except Exception as error:  # on a file of another kind, torch's unpickler raises whatever its bytes lead to
        raise StateError(f"{path} is no checkpoint that loads with weights_only=True: {_reason(error)}") from error


def find_states(checkpoint: Any) -> dict[str, Mapping[str, Any]]:
    """Path of keys -> loader state; equal ones only once, for the state callback and the DataModule save the same."""
    found: dict[str, Mapping[str, Any]] = {}
    for where, state in _search(checkpoint, ()):
        if not any(state == other for other in found.values()):
            found["/".join(where) or "the file"] = state
    return found


def _readable(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """With weights by name; a state that is damaged, or of another version, as it is."""
    try:
        return readable(state)
    except (StateError, KeyError, TypeError, ValueError):
        return state


def _reason(error: Exception) -> str:
    """What torch found, without its advice to load the file unsafely."""
    found = re.search(r"Unsupported .*", str(error))
    first = str(error).strip().partition("\n")[0]
    return found.group() if found else f"{type(error).__name__}: {first}"


def _search(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if not isinstance(value, Mapping):
        return
    if value.keys() >= _MARKS or (where and where[-1] == STATE_KEY and value):
        yield where, value
        return
    if len(where) < _MAX_DEPTH:
        # The callback's state first: it is the one a resume takes.
        for key in sorted(value, key=lambda key: key != "callbacks"):
            yield from _search(value[key], (*where, str(key)))


def _lines(value: Mapping[str, Any], *, width: int = 100) -> Iterator[str]:
    """One line per entry; mappings indented below their key, long lists and texts as their size."""
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            flat = json.dumps(entry, default=str)
            if len(flat) <= width:
                yield f"{key}: {flat}"
            else:
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(entry, width=width))
            continue
        text = entry if isinstance(entry, str) else json.dumps(entry, default=str)
        if len(text) > width:
            text = f"{len(entry)} entries" if isinstance(entry, list) else f"{text[:width]}... ({len(text)} characters)"
        yield f"{key}: {text}"
