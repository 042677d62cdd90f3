"""`megascale plan CONFIG`: plans the first steps of a run, without a trainer, and says what they are made of."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from megascale_lightning.cli.configs import load_config
from megascale_lightning.cli.dryrun import DryRun, PlannedStep
from megascale_lightning.cli.inspect import remember_all_secrets
from megascale_lightning.cli.planfigures import PlanFigures
from megascale_lightning.cli.planreport import report_html
from megascale_lightning.cli.plantext import text_lines
from megascale_lightning.errors import ConfigError, MegaScaleError
from megascale_lightning.places.axes import AXES
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.sources.stores.secrets import redact
from megascale_lightning.writing import write_whole

__all__ = ["add_parser", "parse_tree"]

_STEPS: Final = 100
_INTERRUPTED: Final = 130


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="plan the first steps of a run: mixture, epochs, padding, balance, predicted speed-up",
        description=f"{__doc__} Sources are read and transformed as in a run, nothing but the report is written. Exit "
        "status: 0; 1: the data would end the run with an error; 2: wrong settings or files.",
    )
    parser.add_argument(
        "config",
        help="a YAML file (LightningCLI's, or one with sources: and rows:), module:attribute or file.py:attribute",
    )
    parser.add_argument(
        "--steps", metavar="N", type=_count, default=_STEPS, help=f"optimizer steps to plan (default {_STEPS})"
    )
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--dp", metavar="N", type=_count, help="data-parallel ranks (default 1)")
    places.add_argument(
        "--tree", metavar="AXIS=N,...", type=parse_tree, help="sizes of all axes, such as dp=8,tp=2; other names fold"
    )
    parser.add_argument(
        "--accumulate", metavar="N", type=_count, help="microbatches of a step on each rank (by global_batch_size)"
    )
    parser.add_argument("--stream", metavar="NAME", default="train", help="train (default), val/0, ...")
    parser.add_argument("--passes", action="store_true", help="in passes over the data, as with Trainer(max_epochs=N)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="write a page with tables and plots, too")
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def parse_tree(text: str) -> ClientPlaceTree:
    """The places that `dp=8,tp=2` means; names are those of `ClientPlaceTree.from_ranks`, outermost first.

    Raises:
        argparse.ArgumentTypeError: It has another form, or an axis is unknown.
    """
    names, sizes = [], []
    for item in text.split(","):
        name, equals, size = item.partition("=")
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(f"{item!r} is no AXIS=N; give such as dp=8,tp=2")
        names.append(name.strip())
        sizes.append(_count(size.strip()))
    try:
        return ClientPlaceTree.from_ranks(np.arange(np.prod(sizes, dtype=np.int64)).reshape(sizes), names)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run(chosen: argparse.Namespace) -> int:
    try:
        return _plan(chosen)
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except KeyboardInterrupt:
        print("megascale: interrupted; nothing was written", file=sys.stderr)
        return _INTERRUPTED
    except (MegaScaleError, OSError) as error:
        print(f"megascale: {redact(' '.join(str(error).split()))}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, OSError)) else 1


def _plan(chosen: argparse.Namespace) -> int:
    if chosen.report is not None:
        _check_report(chosen.report)
    tree = chosen.tree or ClientPlaceTree.from_sizes(dp=chosen.dp or 1)
    config = load_config(chosen.config)
    remember_all_secrets(config, [source for sources in config.streams().values() for source in sources])
    with DryRun(config, tree, chosen.stream, accumulate=chosen.accumulate, passes=chosen.passes) as run:
        figures = PlanFigures(run)
        for step in _counted(run.steps(chosen.steps), chosen.steps):
            figures.add(step)
    found = {
        "config": redact(chosen.config),
        "tree": {axis: tree.size(axis) for axis in AXES},
        "steps_asked": chosen.steps,
        **figures.result(),
    }
    if chosen.json:
        json.dump(found, sys.stdout, indent=2)
        print(flush=True)
    else:
        print("\n".join(text_lines(found)), flush=True)
    if chosen.report is not None:
        write_whole(chosen.report, report_html(found))
        if not chosen.json:
            print(f"  report    {chosen.report}")
    return 0


def _check_report(path: Path) -> None:
    """Refuse a report that could not be written before anything is read.

    Raises:
        ConfigError: It could not.
    """
    if path.is_dir():
        raise ConfigError(f"--report {path} is a folder; give the name of a file, such as {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise ConfigError(f"--report {path}: there is no folder {path.parent}; make it, or name a file elsewhere")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--report {path}: the folder {path.parent} cannot be written; name a file elsewhere")


def _counted(steps: Iterable[PlannedStep], total: int) -> Iterator[PlannedStep]:
    """The steps; how many there are is shown to whoever looks at a terminal, since reading takes its time."""
    is_shown = sys.stderr.isatty()
    try:
        for number, step in enumerate(steps, 1):
            if is_shown:
                print(f"\r{number:,} of {total:,} steps", end="", file=sys.stderr, flush=True)
            yield step
    finally:
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
