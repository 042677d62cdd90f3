"""Four real processes over gloo: all ranks find the same tree, and the one that the framework's groups make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.processes import train
from tests.integrations.scripts import places

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("places")
    train(Path(), out, script="places.py", timeout_s=500)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(places.WORLD)]


def test_all_ranks_find_the_same(found: list[dict[str, Any]]) -> None:
    assert all(each == found[0] for each in found)
    assert len(found[0]) == 14


@pytest.mark.parametrize("name", places.LAYOUTS)
def test_megatron(found: list[dict[str, Any]], name: str) -> None:
    """It has no mesh: every rank tells its own coordinates."""
    assert found[0][name] == places.LAYOUTS[name].tolist()


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("deepspeed cp", [[[[0], [3]], [[1], [2]]]]),
        ("deepspeed tp", [[[[0, 1]], [[2, 3]]]]),
        ("model parallel", [[[[0, 1]], [[2, 3]]]]),
        ("ddp", [[[[0]], [[1]], [[2]], [[3]]]]),
        ("fabric", [[[[0, 1]], [[2, 3]]]]),
        ("fsdp", [[[[0]], [[1]], [[2]], [[3]]]]),
        ("accelerate", [[[[0]], [[1]], [[2]], [[3]]]]),
        ("accelerate, a mesh", [[[[0], [2]], [[1], [3]]]]),
        ("a slice", [[[[0], [2]], [[1], [3]]]]),
        ("joined", [[[[0], [2]], [[1], [3]]]]),
    ],
)
def test_frameworks(found: list[dict[str, Any]], name: str, grid: Any) -> None:
    """`grid` is [pp, dp, cp, tp]."""
    assert found[0][name] == grid
