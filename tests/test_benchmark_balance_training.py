"""The benchmark of balanced training: its sums are right on made-up times, and it runs to its last line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarking import quick_figures

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
HEAVY = {"2048", "4096", "8192"}


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run_of(seconds: list[float], planned: list[float], losses: list[float]) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "cpu_seconds": [second / 2 for second in seconds[:2]] + [1.0],
        "planned": planned,
        "planned_in_turn": [4.0, 4.0, 6.0],
        "row_costs": [[3.0, 1.0, 1.0, 1.0]] * 3,
        "losses": losses,
    }


def leg_of(turn: dict[str, Any], balanced: dict[str, Any]) -> dict[str, Any]:
    return {
        "strategies": {"round_robin": turn, "balanced": balanced},
        "cost": {"per_token": 1.0, "per_token_pair": 0.5},
        "leg": {"warmup": 1},
    }


def test_the_sums_leave_the_warm_up_out_and_weigh_the_gain_by_the_plan() -> None:
    from balance_training import summarise

    turn = run_of([100.0, 3.0, 6.0], [4.0, 4.0, 6.0], [5.0, 4.0, 2.0])
    balanced = run_of([1.0, 2.0, 5.5], [9.0, 3.0, 3.25], [5.0, 4.0, 2.5])
    found = summarise({name: leg_of(turn, balanced) for name in (*HEAVY, "equal")})
    assert found["speedup"] == dict.fromkeys(HEAVY, 1.2)
    assert found["predicted"] == dict.fromkeys(HEAVY, 1.6)
    assert found["equal_lengths"] == 1.2
    assert found["loss_rel_diff"] == 0.25
    assert found["legs"]["8192"]["cpu_speedup"] == 1.25
    assert found["legs"]["8192"]["gain_share"] == pytest.approx(0.333)
    assert found["legs"]["8192"]["predicted_dealt_at_random"] == pytest.approx(8 / 6.25)


def test_a_rank_that_was_dealt_other_rows_than_the_plan_compares_with_is_found() -> None:
    from balance_training import summarise

    turn = run_of([1.0] * 3, [4.0, 4.0, 7.0], [5.0] * 3)
    balanced = run_of([1.0] * 3, [3.0] * 3, [5.0] * 3)
    with pytest.raises(AssertionError, match="dealt in turn"):
        summarise({name: leg_of(turn, balanced) for name in (*HEAVY, "equal")})


def test_of_each_step_the_fastest_round_counts() -> None:
    from balance_ranks import _fastest

    one = {"seconds": [1.0, 4.0], "cpu_seconds": [1.0, 1.0], "losses": [2.0, 1.0]}
    two = {"seconds": [3.0, 2.0], "cpu_seconds": [0.5, 2.0], "losses": [2.0, 1.0]}
    assert _fastest([one, two]) == {"seconds": [1.0, 2.0], "cpu_seconds": [0.5, 1.0], "losses": [2.0, 1.0]}


def test_documents_do_not_see_one_another() -> None:
    torch = pytest.importorskip("torch")
    from balance_model import ByteTransformer

    torch.manual_seed(0)
    model = ByteTransformer(width=32, layers=2)
    ids = torch.randint(0, 256, (40,))
    others = torch.cat([(ids[:15] + 1) % 256, ids[15:]])
    alone, together, beside = (
        model(ids[15:], [0, 25]),
        model(ids, [0, 15, 40])[15:],
        model(others, [0, 15, 40])[15:],
    )
    assert torch.allclose(alone, together, atol=1e-5)
    assert torch.allclose(together, beside, atol=1e-5)
    assert not torch.allclose(together, model(ids, [0, 40])[15:], atol=1e-3), "bounds count"


def test_the_plot_draws_every_curve_in_full() -> None:
    from balance_plot import loss_plot

    curves = {"round_robin": [5.0, 4.0, 3.5, 3.0], "balanced": [5.0, 4.0, 3.5, 3.0]}
    drawn = loss_plot({"2048": curves, "equal": curves})
    points = re.findall(r'points="([^"]*)"', drawn)
    assert len(points) == 4
    assert points[0] == points[1], "the same losses lie over each other"
    heights = [float(point.split(",")[1]) for point in points[0].split()]
    assert len(heights) == 4
    assert heights == sorted(heights), "a loss that falls goes down"


@pytest.mark.ddp
@pytest.mark.slow
def test_it_ends_with_one_line_of_json(tmp_path: Path) -> None:
    found = quick_figures("balance_training.py", "--record", "page.md", cwd=tmp_path)
    assert {"speedup", "predicted", "equal_lengths", "loss_rel_diff", "versions", "machine"} <= set(found)
    assert set(found["speedup"]) == set(found["predicted"]) == HEAVY
    numbers = [*found["speedup"].values(), found["equal_lengths"]]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert all(number >= 1 for number in found["predicted"].values())
    assert found["legs"]["equal"]["predicted"] == 1, "rows of equal cost leave nothing to gain"
    assert found["loss_rel_diff"] < 1e-3, "both strategies train on the same rows"
    assert not {"host", "hostname", "node"} & set(found["machine"])
    assert "| equal lengths |" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.svg").read_text().count("<polyline") == 8
