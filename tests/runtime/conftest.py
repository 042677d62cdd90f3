"""One local Ray for the tests of the Ray runtime, and processes that talk JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning.runtime.ray_runtime import RayRuntime
from tests.runtime.fakes import fake_plan


class Talking:
    """A process that runs a scenario."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("scenarios.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise AssertionError(f"the process ended with {self.process.wait()} and said nothing more")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def scenario() -> Iterator[Callable[..., Talking]]:
    started: list[Talking] = []

    def start(*arguments: str) -> Talking:
        started.append(Talking(*arguments))
        return started[-1]

    yield start
    for talking in started:
        if talking.process.poll() is None:
            talking.process.kill()
        talking.process.communicate()


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[RayRuntime]:
    runtime = RayRuntime.start(fake_plan(), ray_init={"object_store_memory": 100 << 20}, restart_timeout=60.0)
    yield runtime
    runtime.close()


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Poll until something is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
