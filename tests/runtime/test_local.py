"""`LocalRuntime`: answers inline, waits for other threads, faults, replaced roles."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megascale_lightning.errors import ConfigError, NotOpenError, RoleMissingError, RuntimeFailure
from megascale_lightning.runtime.local import LocalRuntime
from megascale_lightning.runtime.plan import RuntimePlan
from megascale_lightning.types import BatchWindow, NotYet
from tests.runtime.fakes import expected, fake_plan, numbers, state


def test_a_fetch_is_answered_inline() -> None:
    runtime = LocalRuntime(fake_plan(num_loaders=3))
    port = runtime.port()
    port.open("train", "g", 0, None)
    for first in (0, 4, 8):
        window = port.fetch("train", "g", 1, 0, first, first - 1)
        assert isinstance(window, BatchWindow)
        np.testing.assert_array_equal(numbers(window), expected(first, 1, 3))
        port.consumed("train", "g", 0, first + 3)
    port.close("train", "g", 0)
    assert runtime.stats()["constructor/0"]["role"]["windows"] == 0
    runtime.close()
    with pytest.raises(RuntimeFailure, match="closed"):
        port.fetch("train", "g", 1, 0, 0, -1)


def test_not_yet_comes_after_the_wait_with_the_planners_reason() -> None:
    port = LocalRuntime(fake_plan(ahead=4), park_s=0.1).port()
    port.open("train", "g", 0, None)
    begun = time.monotonic()
    answer = port.fetch("train", "g", 0, 0, 40, -1)
    assert isinstance(answer, NotYet)
    assert "too far ahead" in answer.reason
    assert 0.09 < time.monotonic() - begun < 5


def test_another_thread_wakes_a_waiting_fetch() -> None:
    port = LocalRuntime(fake_plan(ahead=4), park_s=30).port()
    port.open("train", "g", 0, None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(port.fetch, "train", "g", 0, 0, 8, -1)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        port.consumed("train", "g", 0, 7)
        window = waiting.result(10)
    np.testing.assert_array_equal(numbers(window), expected(8, 0, 2))


def test_two_loaders_of_one_process_serve_each_other() -> None:
    port = LocalRuntime(fake_plan(ahead=4), park_s=0.2).port()

    def drain(client: int) -> list[int]:
        seen: list[int] = []
        for first in range(0, 40, 4):
            answer: Any = NotYet("")
            while isinstance(answer, NotYet):
                answer = port.fetch("train", "g", client, client, first, first - 1)
            seen += numbers(answer).tolist()
        port.consumed("train", "g", client, 39)
        return seen

    for client in (0, 1):
        port.open("train", "g", client, None)
    with ThreadPoolExecutor(2) as pool:
        for client, seen in enumerate(pool.map(drain, (0, 1))):
            assert seen == np.concatenate([expected(first, client, 2) for first in range(0, 40, 4)]).tolist()


def test_a_fault_is_the_result_of_its_call() -> None:
    left = {("loader/1", "take"): 1}

    def fault(target: str, method: str, args: tuple[Any, ...]) -> None:
        if left.get((target, method), 0):
            left[target, method] -= 1
            raise RoleMissingError(f"{target} is away")

    port = LocalRuntime(fake_plan(), fault=fault).port()
    port.open("train", "g", 0, None)
    with pytest.raises(RoleMissingError, match="loader/1 is away"):
        port.fetch("train", "g", 0, 0, 0, -1)
    window = port.fetch("train", "g", 0, 0, 0, -1)
    np.testing.assert_array_equal(numbers(window), expected(0, 0, 2))


@pytest.mark.parametrize("victim", ["loader/0", "constructor/0", "planner"])
def test_a_killed_role_changes_no_batch(victim: str) -> None:
    runtime = LocalRuntime(fake_plan())
    port = runtime.port()
    port.open("train", "g", 0, None)
    seen = []
    for first in range(0, 24, 4):
        if first == 12:
            runtime.kill(victim)
        try:
            window = port.fetch("train", "g", 0, 0, first, first - 1)
        except NotOpenError:
            assert victim == "planner"
            port.open("train", "g", 0, state(first))
            window = port.fetch("train", "g", 0, 0, first, first - 1)
        seen.append(numbers(window))
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate([expected(f, 0, 2) for f in range(0, 24, 4)]))
    assert runtime.stats()[victim]["restarts"] == 1


def test_a_role_may_be_killed_in_the_middle_of_a_call() -> None:
    kills = ["constructor/0", "loader/1"]

    def fault(target: str, method: str, args: tuple[Any, ...]) -> None:
        if method == "take" and kills:
            runtime.kill(kills.pop())

    runtime = LocalRuntime(fake_plan(), fault=fault)
    port = runtime.port()
    port.open("train", "g", 0, None)
    window = port.fetch("train", "g", 0, 0, 0, -1)
    np.testing.assert_array_equal(numbers(window), expected(0, 0, 2))
    assert not kills


def test_role_names_differ() -> None:
    plan = fake_plan()
    with pytest.raises(ConfigError, match="loader/0"):
        RuntimePlan(run="r", planner=plan.planner, constructor=plan.constructor, loaders=plan.loaders[:1] * 2)
