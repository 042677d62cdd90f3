"""Benchmarks as the tests run them: in their short form, for the JSON that they end with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def quick_figures(name: str, *options: str, cwd: Path | None = None, timeout_s: float = 280.0) -> dict[str, Any]:
    """What a script of benchmarks/ prints last."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--json", *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
