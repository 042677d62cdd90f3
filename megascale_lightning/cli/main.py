"""Parses the command line and hands over to the command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import megascale_lightning
from megascale_lightning.cli import doctor, inspect, plan, quarantine, state
from megascale_lightning.errors import MegaScaleError

__all__ = ["main"]

_COMMANDS = (doctor, inspect, plan, quarantine, state)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows the program's name; None takes it from the process.

    Returns:
        The exit status: 0 when all is well, 1 when the command found or met a problem. (2: wrong usage, or what
        `inspect` and `plan` cannot look at.)
    """
    parser = argparse.ArgumentParser(prog="megascale", description="Looks at loaders, their states and the machine.")
    parser.add_argument("--version", action="version", version=f"megascale_lightning {megascale_lightning.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need be no text
    try:
        return int(chosen.run(chosen))
    except BrokenPipeError:
        # `megascale ... | head` has seen enough; the interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MegaScaleError, OSError) as error:
        print(f"megascale: {error}", file=sys.stderr)
        return 1
