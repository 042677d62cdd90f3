"""`run_apart`: a measurement in a process of its own, so that one leaves nothing behind for the next."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from process_tree import process_tree

__all__ = ["run_apart"]


def run_apart(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """Run a command with `--result FILE` behind it; whatever it started is killed when the time is up.

    Args:
        command: The program, which writes one JSON object to that file.
        timeout_s: How long it may take.
        environment: Of the process; None: as here.

    Returns:
        What it wrote; or the end of its error output.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        result = Path(folder) / "result.json"
        process = subprocess.Popen(
            [*command, "--result", str(result)], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in process_tree(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            return found
        log.seek(0)
        return f"exit status {process.returncode}: " + " | ".join(log.read().splitlines()[-3:])
