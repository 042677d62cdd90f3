"""The benchmark of connections runs; what it counts does not depend on how fast the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarking import quick_figures

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.ray
@pytest.mark.slow
def test_ours_are_flat_and_those_of_dataloaders_grow():
    pytest.importorskip("aiohttp")
    found = quick_figures("connections.py", "--counts", "1,4")
    ours, theirs = found["connections"]["megascale/ray"], found["connections"]["dataloader/2"]
    assert ours["4"] == ours["1"] <= 2
    assert theirs["4"] >= 2 * theirs["1"]
    assert found["problems"] == []
    assert {"versions", "machine", "settings", "growth", "measurements"} <= set(found)
