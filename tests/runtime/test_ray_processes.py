"""`RayRuntime` over several processes: who starts, who connects, and what is left behind after any end."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megascale_lightning.errors import RayUnreachableError
from megascale_lightning.runtime import ray_session
from megascale_lightning.runtime.ray_session import RayCluster, RaySession
from tests.integrations.processes import opened_files
from tests.runtime.fakes import expected

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FIRST = expected(0, 0, 2).tolist()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone_within(pids: list[int], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while left := alive(pids):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def shared_memory_since(said: dict[str, Any], names: list[str], host: int) -> list[str]:
    """Files that came since the host began, without those that other programs of this machine have open."""
    files = {f"/dev/shm/{name}" for name in set(names) - set(said["shm"])}
    return sorted(files - opened_files(but=host))


def test_close_leaves_nothing_and_sigterm_stays_the_users(scenario: Callable[..., Any], tmp_path: Path) -> None:
    host = scenario("host", str(tmp_path / "address"), "close")
    said = host.hear()
    assert said["numbers"] == FIRST
    assert said["kept"]
    assert len(said["family"]) >= 8
    host.go_on()
    after = host.hear()
    assert after["handled"], "the handler that was there before ran"
    assert after["alive"] == []
    assert after["left"] == [], "the environment is as it was"
    gone_within(said["family"], 10)
    # What the host itself still had open would count.
    assert shared_memory_since(said, after["shm"], host.process.pid) == []
    assert host.process.wait(20) == 0


@pytest.mark.parametrize("end", ["exit", "sigterm", "sigkill"])
def test_nothing_is_left_after_any_end(scenario: Callable[..., Any], tmp_path: Path, end: str) -> None:
    host = scenario("host", str(tmp_path / "address"), end)
    said = host.hear()
    if end == "exit":  # without close()
        host.go_on()
    else:
        host.process.send_signal(signal.SIGTERM if end == "sigterm" else signal.SIGKILL)
    host.process.wait(30)
    gone_within(said["family"], 30 if end == "sigkill" else 10)
    end = time.monotonic() + 10
    while left := shared_memory_since(said, os.listdir("/dev/shm"), host.process.pid):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_the_other_ranks_hear_of_the_first_ones_death(scenario: Callable[..., Any], tmp_path: Path) -> None:
    host = scenario("host", str(tmp_path / "address"), "sigkill")
    host.hear()
    other = scenario("watch", str(tmp_path / "address"))
    assert other.hear()["numbers"] == FIRST
    host.process.kill()
    said = other.hear()
    assert said["error"] == "RayUnreachableError", said
    assert said["took"] < 30
    other.hear()
    assert other.process.wait(30) == 0, "it lives on, and ends as it wants"


def test_a_wrong_token_is_named(scenario: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "address"
    host = scenario("host", str(file), "close")
    host.hear()
    file.write_bytes(pickle.dumps(replace(pickle.loads(file.read_bytes()), token="0" * 64)))
    said = scenario("rank", str(file)).hear()
    assert said["error"] == "RayUnreachableError"
    assert "with the run's token" in said["message"]
    assert said["took"] < 60
    file.write_bytes(pickle.dumps(replace(pickle.loads(file.read_bytes()), host="elsewhere")))
    said = scenario("rank", str(file)).hear()
    assert said["error"] == "RuntimeFailure"
    assert "set ray_address or RAY_ADDRESS" in said["message"]
    host.go_on()
    host.hear()


def test_an_address_where_nobody_listens(scenario: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "address"
    host = scenario("host", str(file), "close")
    host.hear()
    host.go_on()
    host.hear()
    said = scenario("rank", str(file)).hear()
    assert said["error"] == "RayUnreachableError"
    assert "nobody listens" in said["message"]
    assert said["took"] < 40


def test_a_machine_that_does_not_reach_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said names the address, and what to open."""
    monkeypatch.setattr(ray_session, "_KNOCK_S", 0.1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        cluster = RayCluster(address=address, token="0" * 64, host="", ours=True)
        with pytest.raises(RayUnreachableError, match=f"rank 0 at {address}: nobody listens") as caught:
            RaySession.join(cluster, bring_node=True)
    assert socket.gethostname() in str(caught.value)
    assert "let these through between the machines" in str(caught.value)
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_ray_may_be_imported_before_and_initialised_by_the_user(scenario: Callable[..., Any]) -> None:
    process = scenario("imported")
    for _ in range(2):
        said = process.hear()
        assert said["numbers"] == FIRST
        assert said["address"].startswith("127.0.0.1:")
        assert process.hear() == {"initialized": False}
    said = process.hear()
    assert said["numbers"] == FIRST
    assert len(said["warned"]) == 1
    assert "['num_cpus'] has no effect: Ray is initialised already" in said["warned"][0]
    assert process.hear() == {"initialized": True}, "what the user initialised is the user's to end"
    assert process.process.wait(30) == 0
