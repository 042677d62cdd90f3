"""Every setting of a trainer over real data, on one rank and on two: as with a `DataLoader`, or a named error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.bench import Bench, write_records
from tests.integrations.knobs import KNOBS, knobs_for
from tests.integrations.processes import train

TABLE = [(rows, name) for rows in ("packed", "collated") for name in knobs_for(rows)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder)
    return folder


@pytest.fixture(scope="module", params=["packed", "collated"])
def two_ranks(root: Path, request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """What both ranks wrote down of all knobs, from one launch for each kind of rows."""
    rows: str = request.param
    train(root, root / "two", "--rows", rows, script="knobs.py")
    return rows, [json.loads((root / f"two/{rows}-rank{rank}.json").read_text()) for rank in range(2)]


def plain(found: Any) -> Any:
    """As the script writes it."""
    return json.loads(json.dumps(found))


@pytest.mark.parametrize(("rows", "name"), TABLE)
def test_one_rank(root: Path, rows: str, name: str) -> None:
    KNOBS[name].check([plain(KNOBS[name].run(Bench(root, 1, rows, name)))])


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("name", list(KNOBS))
def test_two_ranks(two_ranks: tuple[str, list[dict[str, Any]]], name: str) -> None:
    rows, found = two_ranks
    if KNOBS[name].only in ("", rows):
        for rank in found:
            assert "failed" not in rank[name], rank[name]["failed"]
        KNOBS[name].check([rank[name] for rank in found])


@pytest.mark.ddp
@pytest.mark.slow
def test_metrics_of_two_ranks_are_those_of_one(root: Path, two_ranks: tuple[str, list[dict[str, Any]]]) -> None:
    """Held-out records that do not divide: filler rows weigh nothing, and nobody stops earlier."""
    rows, found = two_ranks
    one = KNOBS["uneven validation"].run(Bench(root, 1, rows, "one"))["metrics"]
    for rank in found:
        for alone, together in zip(one, rank["uneven validation"]["metrics"], strict=True):
            assert together == pytest.approx(alone, rel=1e-12)
