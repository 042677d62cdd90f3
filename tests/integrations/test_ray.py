"""Real trainers over Ray: the same data as without it, and nothing left behind. Signals are in test_ends.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.processes import left_behind, read_log, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def end(folder: Path, fit: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"end{fit}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("arguments", "code", "num_steps"),
    [
        pytest.param(["--steps", 4], 0, 4, id="normal end"),
        pytest.param(["--epochs", 2, "--limit", 4], 0, 4, id="limit_train_batches"),
        pytest.param(["--steps", 3, "--fits", 2], 0, 6, id="second fit"),
        pytest.param(["--steps", 9, "--fail", "exception", "--fail-at", 2], 1, 2, id="exception"),
        pytest.param(["--steps", 9, "--fail", "interrupt", "--fail-at", 2], 1, 2, id="KeyboardInterrupt"),
    ],
)
def test_one_process_ends_clean(corpus: Path, tmp_path: Path, arguments: list[Any], code: int, num_steps: int) -> None:
    finished = train(corpus, tmp_path, "--runtime", "ray", "--accumulate", 2, *arguments, check=False)
    assert finished.code == code, finished.output[-6000:]
    (lines,) = read_log(tmp_path / "whole")
    assert [(line["step"], line["microbatch"]) for line in lines] == [
        (s, m) for s in range(num_steps) for m in range(2)
    ]
    assert left_behind(finished) == []


@pytest.mark.ddp
def test_ddp_sees_the_same_data_as_without_ray_and_resumes(corpus: Path, tmp_path: Path) -> None:
    setup = ["--strategy", "ddp", "--devices", 2, "--accumulate", 2, "--size", 8, "--steps", 6, "--validate-every", 5]
    train(corpus, tmp_path / "local", *setup)
    finished = train(corpus, tmp_path / "ray", *setup, "--save", "--runtime", "ray")
    assert left_behind(finished) == []
    whole = read_log(tmp_path / "local/whole", 2)
    assert read_log(tmp_path / "ray/whole", 2) == whole
    assert end(tmp_path / "ray/whole") == end(tmp_path / "local/whole")
    paths = [tmp_path / f"ray/whole/step={step}.ckpt" for step in (2, 5)]
    finished = train(corpus, tmp_path / "again", *setup, "--runtime", "ray", "--resume", *paths)
    assert left_behind(finished) == []
    for path in paths:
        first = torch.load(path, weights_only=True)["global_step"]
        folder = tmp_path / "again" / path.stem
        for lines, before in zip(read_log(folder, 2), whole, strict=True):
            trained = [line for line in lines if "microbatch" in line]
            assert trained == [line for line in before if "microbatch" in line and line["step"] >= first]
        assert end(folder) == end(tmp_path / "local/whole")


@pytest.mark.ddp
def test_ddp_ends_clean_after_an_exception(corpus: Path, tmp_path: Path) -> None:
    setup = ["--strategy", "ddp", "--devices", 2, "--steps", 9, "--fail", "exception", "--fail-at", 2]
    finished = train(corpus, tmp_path, "--runtime", "ray", *setup, check=False)
    assert finished.code != 0
    assert left_behind(finished) == []
