"""Several runs at once, on one machine and on one cluster: what becomes of one is nothing to the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.processes import MARK, SCRIPT, marked_processes, read_log, steps_of
from tests.integrations.scripts import ends

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12
HELD = 7
"""The microbatch at which all stand still: the fourth step."""


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the steps of a run without others are made of."""
    out = tmp_path_factory.mktemp("whole")
    ends.fit(corpus, out, steps=STEPS, save=False)
    return steps_of(read_log(out / "whole"))


class Run:
    """A training that stands still in its fourth step while there is a file `hold`."""

    def __init__(self, corpus: Path, out: Path, environment: Mapping[str, str]) -> None:
        out.mkdir()
        (out / "hold").touch()
        self.out, self.mark = out, uuid.uuid4().hex
        command = [sys.executable, str(SCRIPT.with_name("ends.py")), "--corpus", str(corpus), "--out", str(out)]
        command += ["--steps", str(STEPS), "--hold-step", str(HELD)]
        with (out / "output.txt").open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def held(self) -> None:
        """Wait until it stands still."""
        self.until((self.out / "reached0").exists, "it stood still")

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"not within 120 s: {what}: {self.output()}"
            time.sleep(0.05)

    def finish(self) -> dict[int, Any]:
        """Let it go on to its end; gives its steps."""
        (self.out / "hold").unlink()
        assert self.process.wait(120) == 0, self.output()
        return steps_of(read_log(self.out / "whole"))

    def alive(self) -> list[str]:
        return marked_processes(self.mark, self.process.pid)

    def gone_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while found := self.alive():
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def output(self) -> str:
        return (self.out / "output.txt").read_text()[-4000:]


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Whatever of them is left is ended behind the test."""
    started: list[Run] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        for line in run.alive():
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)


def only(found: list[str], what: str) -> list[str]:
    return [line for line in found if what in line]


def test_three_runs_on_one_machine(corpus: Path, tmp_path: Path, whole: dict[int, Any], runs: list[Run]) -> None:
    runs += [Run(corpus, tmp_path / str(number), {}) for number in range(3)]
    for run in runs:
        run.held()
    raylets = [only(run.alive(), "raylet/raylet") for run in runs]
    assert [len(found) for found in raylets] == [1, 1, 1], "each has a Ray of its own"
    folders = {re.search(r"session_[^/]+", found[0]).group() for found in raylets}  # type: ignore[union-attr]
    assert len(folders) == 3
    runs[1].process.kill()
    runs[1].gone_within(30)
    for run in (runs[0], runs[2]):
        assert run.finish() == whole
        run.gone_within(10)


@pytest.fixture
def cluster() -> Iterator[tuple[dict[str, str], int]]:
    """The variables by which a run joins a cluster of two nodes, and the session that its processes are in."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT.with_name("cluster.py"))],
        env=os.environ | token,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("at ")).split()[1]
        yield {**token, "RAY_ADDRESS": address}, process.pid
    finally:
        process.communicate("")


def test_two_runs_on_one_cluster(
    corpus: Path, tmp_path: Path, whole: dict[int, Any], runs: list[Run], cluster: tuple[dict[str, str], int]
) -> None:
    variables, session = cluster
    runs += [Run(corpus, tmp_path / str(number), variables) for number in range(2)]
    for run in runs:
        run.held()
        assert not only(run.alive(), "raylet"), "it started nothing"
    killed, other = runs

    def planners() -> int:
        return len(only(marked_processes(killed.mark, session), "ray::PlannerActor"))

    assert planners() == 2, "each has actors of its own"
    killed.process.kill()
    killed.gone_within(30)
    other.until(lambda: planners() == 1, "the killed run's actors were gone")
    assert other.finish() == whole
    deadline = time.monotonic() + 30
    while planners():
        assert time.monotonic() < deadline, "actors are left in the cluster"
        time.sleep(0.1)
