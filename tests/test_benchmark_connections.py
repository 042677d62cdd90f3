"""The benchmark of connections runs; what it counts does not depend on how fast the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.ray
@pytest.mark.slow
def test_ours_are_flat_and_those_of_dataloaders_grow():
    pytest.importorskip("aiohttp")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/connections.py"), "--quick", "--json", "--counts", "1,4"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = found["connections"]["megascale/ray"], found["connections"]["dataloader/2"]
    assert ours["4"] == ours["1"] <= 2
    assert theirs["4"] >= 2 * theirs["1"]
    assert found["problems"] == []
    assert {"versions", "machine", "settings", "growth", "measurements"} <= set(found)
