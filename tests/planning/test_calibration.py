"""`CostCalibrator`: known coefficients come back through noise and outliers; what cannot be told apart is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale_lightning.errors import ConfigError
from megascale_lightning.planning import calibration
from megascale_lightning.planning.calibration import FEATURES, CalibratedCost, CostCalibrator, microbatch_features
from megascale_lightning.planning.costs import TokenCount, cost_of_documents

TRUE: dict[str, Any] = dict(zip(FEATURES, (0.05, 0.004, 4e-6, 1e-9, 1e-4, 6e-8, 2e-2), strict=True))


def microbatches(count: int, *, images: bool = True, seed: int = 0) -> np.ndarray[Any, Any]:
    """From many short documents to a single long one; images of 16 to 2,048 patches."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        documents = int(rng.choice([1, 2, 4, 16, 64]))
        lengths = rng.integers(16, 32_768 // documents, documents)
        patches = np.exp(rng.uniform(np.log(16), np.log(2048), int(rng.integers(0, 9)) if images else 0)).round()
        sums = {"patches": patches.sum(), "patch_pairs": (patches**2).sum(), "images": len(patches)}
        rows.append(microbatch_features(lengths, **sums))
    return np.stack(rows)


def filled(features: Any, times: Any, **settings: Any) -> CostCalibrator:
    calibrator = CostCalibrator(**{"skip_steps": 0, **settings})
    for step, (row, seconds) in enumerate(zip(features, times, strict=True)):
        calibrator.add(row, float(seconds), step=step)
    return calibrator


def true_times(features: Any) -> Any:
    return CalibratedCost(**TRUE).seconds(features)


@pytest.mark.parametrize("seed", [0, 1])
def test_coefficients_come_back_through_noise_and_outliers(seed: int) -> None:
    """5 % noise; 4 % of the microbatches took 1.5 to 10 times as long. So many that the noise leaves 0.6 % at most."""
    rng = np.random.default_rng(100 + seed)
    features = microbatches(40_000, seed=seed)
    noisy = true_times(features) * (1 + 0.05 * rng.standard_normal(len(features)))
    slow = rng.random(len(features)) < 0.04
    noisy[slow] *= rng.uniform(1.5, 10, slow.sum())
    cost = filled(features, noisy, max_samples=40_000).fit()
    for name, value in TRUE.items():
        assert getattr(cost, name) == pytest.approx(value, rel=0.02), name
    assert slow.sum() * 0.98 <= cost.num_outliers <= slow.sum() + 0.01 * len(features)
    assert cost.num_samples + cost.num_outliers == len(features)
    assert cost.r2 > 0.95
    assert cost.p95_error == pytest.approx(1.96 * 0.05, rel=0.15)


def test_noise_does_not_make_costs_too_small() -> None:
    """Errors relative to the measured time would, by twice their variance: 4.5 % of the cost at 15 % noise."""
    rng = np.random.default_rng(5)
    features = microbatches(8000, images=False)
    cost = filled(features, true_times(features) * (1 + 0.15 * rng.standard_normal(len(features)))).fit()
    assert np.mean(cost.seconds(features) / true_times(features)) == pytest.approx(1, abs=0.01)


def test_without_noise_it_is_exact() -> None:
    features = microbatches(200)
    cost = filled(features, true_times(features)).fit()
    assert [getattr(cost, name) for name in FEATURES] == pytest.approx(list(TRUE.values()), rel=1e-6)
    assert cost.r2 == pytest.approx(1)
    assert cost.num_outliers == 0


def test_coefficients_are_never_below_zero() -> None:
    """Long documents that come out cheaper than their tokens say would want a negative square."""
    features = microbatches(300, images=False)
    tokens, pairs = features[:, 2], features[:, 3]
    cost = filled(features, 0.1 + 1e-5 * tokens - 1e-10 * pairs).fit()
    assert cost.per_token_pair == 0
    assert cost.crossover == math.inf
    assert cost.fields == ()
    assert cost.per_patch == cost.per_image == 0


def test_the_first_steps_are_not_used() -> None:
    features = microbatches(60)
    calibrator = CostCalibrator(skip_steps=10)
    for index, (row, seconds) in enumerate(zip(features, true_times(features), strict=True)):
        slow = 50 if index < 20 else 1  # steps of two microbatches
        calibrator.add(row, seconds * slow, step=300 + index // 2)
    assert len(calibrator) == 40
    assert calibrator.fit().num_outliers == 0


def test_memory_is_bounded_and_the_latest_stay() -> None:
    features = microbatches(400)
    times = true_times(features) * np.where(np.arange(400) < 300, 2.0, 1.0)
    calibrator = filled(features, times, max_samples=100)
    assert len(calibrator) == 100
    assert calibrator.fit().per_token == pytest.approx(TRUE["per_token"], rel=1e-6)


def test_half_life_follows_a_change() -> None:
    """The machine became twice as slow by the middle; by then all but 2^-20 of the weight is on the later half."""
    rng = np.random.default_rng(3)
    features = microbatches(1200)
    slower = np.where(np.arange(1200) < 600, 1.0, 2.0)
    times = true_times(features) * slower * (1 + 0.1 * rng.standard_normal(1200))
    calibrator = filled(features, times, outlier_mads=1e6)
    probe = microbatches(50, seed=9)
    late = calibrator.fit(half_life=30).seconds(probe) / true_times(probe)
    always = calibrator.fit().seconds(probe) / true_times(probe)
    assert np.median(late) == pytest.approx(2, rel=0.05)
    assert np.median(always) < 1.7


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([microbatch_features(np.full(4, 512))] * 100, "vary in tokens by 0.00%, sums of squared"),
        (
            [microbatch_features(np.full(n % 7 + 1, 512)) for n in range(100)],
            "squared lengths at equal tokens by 0.00%",
        ),
        ([microbatch_features(np.array([256 + n, 768 - n])) for n in range(100)], "vary in tokens by 0.00%"),
        (list(microbatches(20)), "20 microbatches after the first 0 steps, of at least 28"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(features: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filled(features, np.ones(len(features))).fit()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_steps": -1}, "skip_steps must be a whole number of at least 0, not -1"),
        ({"max_samples": 0}, "max_samples must be a whole number of at least 1, not 0"),
        ({"outlier_mads": 0}, "outlier_mads must be above 0, not 0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostCalibrator(**settings)


@pytest.mark.parametrize(
    ("features", "seconds", "message"),
    [
        (np.ones(6), 1.0, "7 numbers of at least 0"),
        (-np.ones(7), 1.0, "7 numbers of at least 0"),
        (np.full(7, np.nan), 1.0, "7 numbers of at least 0"),
        (np.ones(7), 0.0, "seconds must be a finite number above 0, not 0.0"),
        (np.ones(7), math.inf, "seconds must be a finite number above 0, not inf"),
    ],
)
def test_wrong_samples_are_refused(features: Any, seconds: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostCalibrator().add(features, seconds, step=0)


def test_half_life_has_to_be_above_zero() -> None:
    features = microbatches(50)
    with pytest.raises(ConfigError, match="half_life must be above 0 microbatches, not 0"):
        filled(features, true_times(features)).fit(half_life=0)


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    features = microbatches(50)
    monkeypatch.setattr(calibration, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install scipy"):
        filled(features, true_times(features)).fit()


def test_as_a_cost_it_gives_the_part_of_documents() -> None:
    """The sum over documents and the constant are the microbatch, if each document has one image."""
    cost = CalibratedCost(**TRUE)
    assert cost.fields == ("patches", "patch_pairs", "images")
    lengths, patches = np.array([10, 2000, 30_000]), np.array([256, 1024, 64])
    metadata = {"patches": patches, "patch_pairs": patches**2, "images": np.ones(3)}
    whole = microbatch_features(lengths, patches=patches.sum(), patch_pairs=(patches**2).sum(), images=3)
    costs = cost_of_documents(cost, lengths, metadata)
    assert costs.sum() + cost.constant == pytest.approx(float(cost.seconds(whole[None])[0]))
    text = CalibratedCost(per_token=2.0, per_token_pair=0.5)
    assert text(np.array([4])).tolist() == [16.0]
    assert text.crossover == 4
    assert (text + TokenCount())(np.array([4])).tolist() == [20.0]
    with pytest.raises(ConfigError, match=r"CalibratedCost wants the metadata \['patches'"):
        cost(lengths)


def test_file_gives_back_the_same(tmp_path: Path) -> None:
    cost = CalibratedCost(**TRUE, r2=0.98, p95_error=0.1, num_samples=90, num_outliers=2)
    path = tmp_path / "new" / "costs.yaml"
    CalibratedCost(per_token=1.0).to_yaml(path)
    cost.to_yaml(path)
    assert CalibratedCost.from_yaml(path) == cost
    assert [file.name for file in path.parent.iterdir()] == ["costs.yaml"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.yaml"
    CalibratedCost(per_token=1.0).to_yaml(path)

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        CalibratedCost(per_token=2.0).to_yaml(path)
    assert CalibratedCost.from_yaml(path).per_token == 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["costs.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("3", "no file of version 1"),
        ("version: 2\nunit: seconds\n", "no file of version 1"),
        (
            "version: 1\nunit: seconds\nconstant: 1.0\nother: 2\n",
            r"missing are \['num_outliers'.*unknown are \['other'",
        ),
        ("version: 1\nunit: seconds\n7: 1.0\nother: 2\n", r"unknown are \['7', 'other'"),
        ("version: 1\nunit: seconds\nnull: 1.0\nother: 2\n", r"unknown are \['None', 'other'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "costs.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        CalibratedCost.from_yaml(path)


@pytest.mark.parametrize("damaged", ["r2: [1]", "num_samples: many", "p95_error: true", "per_token: '1'", "per_patch:"])
def test_what_is_no_number_is_refused(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "costs.yaml"
    CalibratedCost(per_token=1.0).to_yaml(path)
    name = damaged.partition(":")[0]
    lines = [damaged if line.startswith(f"{name}:") else line for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"must hold numbers alone, not {{'{name}'"):
        CalibratedCost.from_yaml(path)


@pytest.mark.parametrize("value", [-1.0, math.nan, "much"])
def test_coefficients_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="per_token must be a finite number of at least 0"):
        CalibratedCost(per_token=value)
