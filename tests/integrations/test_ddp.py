"""Real processes under DDP: started as scripts and by spawning, resumed, on fewer ranks too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.processes import read_log, steps_of, train

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(600)]


def end(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "end0.json").read_text())
    return found


def batches(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "microbatch" in line]


def test_script_launch_resumes_from_every_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """Epochs of 3 steps, checkpoints in the middle and at the end, a schedule that asks how many steps there are."""
    setup = ["--strategy", "ddp", "--devices", 2, "--accumulate", 2, "--size", 8, "--limit", 6, "--epochs", 2]
    setup += ["--one-cycle", "--save"]
    train(corpus, tmp_path, *setup)
    whole = read_log(tmp_path / "whole", 2)
    assert end(tmp_path / "whole")["global_step"] == end(tmp_path / "whole")["next_step"] == 6
    for lines in whole:
        assert [(line["step"], line["microbatch"]) for line in lines] == [(s, m) for s in range(6) for m in range(2)]
        assert [line["stepped"] for line in lines] == [False, True] * 6
    assert not samples(whole[0]) & samples(whole[1]), "the ranks share no sample"

    paths = [tmp_path / f"whole/step={step}.ckpt" for step in (1, 3, 4, 6)]
    train(corpus, tmp_path / "again", *setup[:-1], "--resume", *paths)
    for path in paths:
        first = torch.load(path, weights_only=True)["global_step"]
        folder = tmp_path / "again" / path.stem
        for lines, before in zip(read_log(folder, 2), whole, strict=True):
            # Rows, optimizer steps, learning rates and weights.
            assert lines == [line for line in before if line["step"] >= first], path.name
        assert end(folder) == end(tmp_path / "whole")


def samples(lines: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {tuple(piece) for line in lines for row in line["ids"] for piece in row}


@pytest.mark.slow
def test_four_ranks_resume_as_two_with_twice_the_accumulation(corpus: Path, tmp_path: Path) -> None:
    size = ["--size", 16, "--micro", 1, "--steps", 6, "--strategy", "ddp"]
    train(corpus, tmp_path, *size, "--devices", 4, "--accumulate", 4, "--limit", 12, "--save")
    whole = read_log(tmp_path / "whole", 4)
    for lines in whole:
        assert [line["stepped"] for line in batches(lines)] == [False, False, False, True] * 6
    paths = [tmp_path / f"whole/step={step}.ckpt" for step in (2, 3)]
    fewer = ["--devices", 2, "--accumulate", 8, "--limit", 24, "--resume", *paths]
    train(corpus, tmp_path / "fewer", *size, *fewer)
    expected = steps_of(whole)
    for path in paths:
        folder = tmp_path / "fewer" / path.stem
        first = torch.load(path, weights_only=True)["global_step"]
        log = read_log(folder, 2)
        assert steps_of(log) == {step: rows for step, rows in expected.items() if step >= first}
        for lines in log:
            assert [(line["step"], line["microbatch"]) for line in lines] == [
                (step, microbatch) for step in range(first, 6) for microbatch in range(8)
            ]
            assert [line["stepped"] for line in lines] == ([False] * 7 + [True]) * (6 - first)
        assert end(folder) == end(tmp_path / "whole")
        # The same gradient, whoever held the rows: the same weights.
        weights = [line["weight"] for line in whole[0] if line["stepped"] and line["step"] >= first]
        assert [line["weight"] for line in log[0] if line["stepped"]] == pytest.approx(weights, rel=1e-9)


def test_filler_rows_change_no_gradient(corpus: Path, tmp_path: Path) -> None:
    """Three rows a step on two ranks: one microbatch of the four holds nothing to learn from."""
    setup = ["--size", 3, "--micro", 1, "--steps", 6]
    train(corpus, tmp_path / "one", *setup, "--accumulate", 3)
    train(corpus, tmp_path / "two", *setup, "--accumulate", 2, "--strategy", "ddp", "--devices", 2)
    one, two = read_log(tmp_path / "one/whole"), read_log(tmp_path / "two/whole", 2)
    assert sum(line["ids"] == [[]] for lines in two for line in lines) == 6
    real = {step: [row for row in rows if row[0]] for step, rows in steps_of(two).items()}
    assert real == steps_of(one)
    weights = [line["weight"] for line in one[0] if line["stepped"]]
    for lines in two:
        assert [line["weight"] for line in lines if line["stepped"]] == pytest.approx(weights, rel=1e-9)


def test_spawned_ranks_with_validation_in_the_middle(corpus: Path, tmp_path: Path) -> None:
    setup = ["--strategy", "ddp_spawn", "--devices", 2, "--accumulate", 2, "--size", 8, "--steps", 4]
    train(corpus, tmp_path / "plain", *setup)
    train(corpus, tmp_path / "validated", *setup, "--validate-every", 3)
    plain, validated = read_log(tmp_path / "plain/whole", 2), read_log(tmp_path / "validated/whole", 2)
    for lines, others in zip(plain, validated, strict=True):
        assert batches(others) == lines
        rounds: dict[int, list[Any]] = {}
        for line in others:
            if "validation" in line:
                rounds.setdefault(line["of"], []).append((line["validation"], line["step"], line["ids"]))
        first, *later = rounds.values()
        assert len(later) == 1
        assert later[0] == first
    seen = {
        tuple(piece[:4])
        for lines in validated
        for line in lines
        if "validation" in line and line["of"] == 1
        for row in line["ids"]
        for piece in row
    }
    assert len(seen) == 7 + 12
