"""The benchmark of shuffling: its measures say what they claim of known orders, and it runs to its last line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarking import quick_figures

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
N = 6000


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def permuted() -> Any:
    return np.random.default_rng(0).permutation(N)


FILES = np.arange(N) // 600


def test_the_stored_order(permuted: Any) -> None:
    from shuffle_measures import measure_order

    stored = measure_order(np.arange(N), FILES, 100)
    assert stored["rank_correlation"] == pytest.approx(1)
    assert stored["neighbours_1"] == 1
    assert stored["neighbours_in_batch"] == pytest.approx(1 - 59 / (N - 1))
    assert stored["files_per_batch"] == 1
    assert stored["file_spread"] == pytest.approx(0.1, rel=1e-3)
    assert measure_order(np.arange(N)[::-1], FILES, 100)["rank_correlation"] == pytest.approx(-1)


def test_a_full_shuffle(permuted: Any) -> None:
    from shuffle_measures import measure_order

    found = measure_order(permuted, FILES, 100)
    assert abs(found["rank_correlation"]) < 0.05
    assert found["neighbours_1"] < 0.002
    assert 0.01 < found["neighbours_in_batch"] < 0.025
    assert found["files_per_batch"] > 9.9
    assert found["file_spread"] == pytest.approx(1, abs=0.02)


def test_blocks_that_are_shuffled_inside_alone(permuted: Any) -> None:
    """Rank correlation and spread see what the neighbours do not, and the other way round."""
    from shuffle_measures import measure_order

    rng = np.random.default_rng(1)
    inside = np.concatenate([start + rng.permutation(600) for start in range(0, N, 600)])
    found = measure_order(inside, FILES, 100)
    assert found["rank_correlation"] > 0.98
    assert found["neighbours_1"] < 0.01
    moved = np.concatenate([np.arange(start, start + 10) for start in 10 * rng.permutation(N // 10)])
    found = measure_order(moved, FILES, 100)
    assert abs(found["rank_correlation"]) < 0.1
    assert found["neighbours_1"] > 0.89


def test_what_is_held(permuted: Any) -> None:
    from shuffle_measures import held_units

    assert held_units(np.arange(N), FILES) == 1
    assert held_units(np.arange(5), np.arange(5)) == 1
    assert held_units(permuted, FILES) == 10
    pairs = np.arange(N).reshape(10, 600)
    woven = np.concatenate([pairs[at : at + 3].T.reshape(-1) for at in range(0, 9, 3)] + [pairs[9]])
    assert held_units(woven, FILES) == 3


def test_an_order_that_loses_a_record_is_refused() -> None:
    from shuffle_measures import measure_order

    order = np.arange(N)
    order[3] = 4
    with pytest.raises(ValueError, match="missing in the order"):
        measure_order(order, FILES, 100)


def test_ours_mix_better_with_larger_parts_and_windows() -> None:
    from shuffle_measures import measure_order
    from shuffle_orders import Corpus, ours

    corpus = Corpus(files=12, units_per_file=4, records_per_unit=64, record_bytes=1 << 14)

    def found(window_units: int, part_mib: int, *, shuffle: bool = True) -> dict[str, Any]:
        out = np.zeros(corpus.records, np.int64)
        ours(window_units, part_mib, shuffle=shuffle).fill(corpus, out)
        return measure_order(out, corpus.group(corpus.records_per_file), 32)

    one, four, many = (found(n, 1000)["files_per_batch"] for n in (1, 4, 48))
    assert one < four < many
    assert found(48, 1)["files_per_batch"] == pytest.approx(one, abs=0.2), "a part is what is mixed"
    assert found(8, 64, shuffle=False)["neighbours_1"] == 1


@pytest.mark.slow
def test_it_ends_with_one_line_of_json(tmp_path: Path) -> None:
    found = quick_figures("shuffle_quality.py", "--record", "page.md", cwd=tmp_path)
    assert {"orders", "corpus", "batch", "versions", "machine", "problems"} <= set(found)
    assert "torch RandomSampler" in found["orders"]
    assert sum(name.startswith("megascale") for name in found["orders"]) == 6
    assert all(problem.endswith("is not installed") for problem in found["problems"])
    for package, name in (("webdataset", "webdataset, shuffle(1000)"), ("litdata", "litdata, defaults (256 items)")):
        is_missing = found["versions"][package] == "not installed"
        assert is_missing == (name not in found["orders"]) == any(name in problem for problem in found["problems"])
    page = (tmp_path / "page.md").read_text()
    assert all(f"| {name} | " in page for name in found["orders"])
    assert not {"host", "hostname", "node"} & set(found["machine"])
