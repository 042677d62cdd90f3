"""Two machines, as far as one can be two: `torchrun --nnodes 2` in two networks, and no Ray started by hand."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_lightning.runtime.ray_orphans import children
from tests.integrations.networks import Networks, Pair, missing_right, two_networks
from tests.integrations.processes import SCRIPT, opened_files, read_log, shared_memory_files, steps_of, train

pytestmark = [pytest.mark.ray, pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(900)]

SIZE = ["--micro", 2, "--size", 8, "--steps", 4]
TWO = ["--runtime", "ray", "--strategy", "ddp", "--nodes", 2, "--accumulate", 2]


@pytest.fixture
def networks() -> Iterator[Networks]:
    if missing := missing_right():
        pytest.skip(missing)
    with two_networks() as networks:
        yield networks


def end(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "end0.json").read_text())
    return found


def run(networks: Networks, corpus: Path, out: Path, *arguments: Any) -> None:
    pair = Pair(networks, SCRIPT, out, "--corpus", corpus, "--out", out, *arguments)
    assert pair.wait(300) == [0, 0], pair.output()
    assert networks.left_behind(10) == [[], []], pair.output()


def test_two_machines_train_resume_and_leave_nothing(corpus: Path, tmp_path: Path, networks: Networks) -> None:
    train(corpus, tmp_path / "one", *SIZE, "--accumulate", 4)
    before = shared_memory_files()
    run(networks, corpus, tmp_path / "two", *SIZE, *TWO, "--save")
    whole = read_log(tmp_path / "two/whole", 2)
    assert steps_of(whole) == steps_of(read_log(tmp_path / "one/whole"))
    assert end(tmp_path / "two/whole") == end(tmp_path / "one/whole"), "the same certificate as in one process"

    path = tmp_path / "two/whole/step=2.ckpt"
    run(networks, corpus, tmp_path / "again", *SIZE, *TWO, "--resume", path)
    first = torch.load(path, weights_only=True)["global_step"]
    for lines, all_lines in zip(read_log(tmp_path / "again" / path.stem, 2), whole, strict=True):
        assert lines == [line for line in all_lines if line["step"] >= first]
    assert end(tmp_path / "again" / path.stem) == end(tmp_path / "one/whole")
    assert (shared_memory_files() - before) - opened_files() == set()


@pytest.mark.parametrize("side", [0, 1])
def test_a_killed_rank_leaves_nothing_on_either_side(
    corpus: Path, tmp_path: Path, networks: Networks, side: int
) -> None:
    endless = ["--micro", 2, "--size", 8, "--steps", 1_000_000]
    pair = Pair(networks, SCRIPT, tmp_path, "--corpus", corpus, "--out", tmp_path, *endless, *TWO)
    logs = [tmp_path / f"whole/rank{rank}.jsonl" for rank in (0, 1)]
    deadline = time.monotonic() + 240
    while not all(log.exists() and log.read_text().count("\n") > 20 for log in logs):
        assert all(process.poll() is None for process in pair.processes), pair.output()
        assert time.monotonic() < deadline, pair.output()
        time.sleep(0.1)
    for commands in networks.commands():
        assert sum("raylet/raylet" in line for line in commands) == 1, "each side has a node"
        actors = [line for line in commands if line.startswith("ray::")]
        assert sum("ray::ConstructorActor" in line for line in actors) == 1, "and a constructor beside its rank"
    (rank,) = children(pair.processes[side].pid)
    os.kill(rank, signal.SIGKILL)
    assert networks.left_behind(30) == [[], []], pair.output()
    assert all(code != 0 for code in pair.wait(1))
