"""A node ends with its rank, however that ends, and says why it did not join; with a stand-in for `ray start`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale_lightning.errors import RuntimeFailure
from megascale_lightning.runtime import ray_node
from megascale_lightning.runtime.ray_node import RayNode, node_address
from megascale_lightning.runtime.ray_orphans import children

pytestmark = pytest.mark.watchdog(60)

JOINS = """
echo $$ > {pids}/ray
(trap '' TERM; echo > {pids}/raylet; exec sleep 60) &
echo "$@"
echo "Ray runtime started."
wait
"""
RANK = """
import sys, threading
from megascale_lightning.runtime.ray_node import RayNode
sys.executable = sys.argv[1]
node = RayNode("127.0.0.1:1", {})
print("up", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Makes `ray start` a shell script, found in place of Python."""

    def write(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text("#!/bin/sh\n" + script.format(pids=tmp_path))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return path

    yield write
    for pid in running(tmp_path):
        os.kill(pid, signal.SIGKILL)


def running(folder: Path) -> list[int]:
    """The stand-in and what it started, as far as they run; they are one process group."""
    if not (folder / "ray").exists():
        return []
    group = int((folder / "ray").read_text())
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and int(its_group) == group:
            found.append(int(entry.name))
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_it_joins_and_is_ended_with_all_below_it(stand_in: Callable[[str], Path], tmp_path: Path) -> None:
    stand_in(JOINS)
    node = RayNode("127.0.0.1:6379", {"num_cpus": 3, "_temp_dir": "/t"})
    said = node._said().decode()
    assert said.startswith("-m ray.scripts.scripts start --address=127.0.0.1:6379 --node-ip-address=127.0.0.1 --block")
    assert "--num-cpus=3 --num-gpus=0 --temp-dir=/t" in said
    until(lambda: len(running(tmp_path)) == 2)
    before = set(children(os.getpid()))
    node.end()
    node.end()
    until(lambda: not running(tmp_path))
    assert len(before - set(children(os.getpid()))) == 2, "the guard went with it"


def test_it_says_why_it_did_not_join(stand_in: Callable[[str], Path], tmp_path: Path) -> None:
    stand_in("echo $$ > {pids}/ray; sleep 60 &\necho RuntimeError: Version mismatch: Ray 2.1 >&2; exit 3")
    before = set(children(os.getpid()))
    with pytest.raises(RuntimeFailure, match=r"(?s)127\.0\.0\.1 ended with 3; .*Version mismatch: Ray 2\.1"):
        RayNode("127.0.0.1:6379", {})
    until(lambda: not running(tmp_path))
    assert set(children(os.getpid())) <= before


def test_it_does_not_wait_for_ever(
    stand_in: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "_JOIN_S", 0.3)
    stand_in("echo $$ > {pids}/ray; sleep 60")
    with pytest.raises(RuntimeFailure, match=r"has not joined after 0\.3 s"):
        RayNode("127.0.0.1:6379", {})
    until(lambda: not running(tmp_path))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_rank_that_is_killed(stand_in: Callable[[str], Path], tmp_path: Path, end: int) -> None:
    python, script = sys.executable, stand_in(JOINS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    rank = subprocess.Popen([python, "-c", RANK, str(script)], stdout=subprocess.PIPE, env=environment)
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"up\n"
    until(lambda: len(running(tmp_path)) == 2)
    rank.send_signal(end)
    assert rank.wait(10) == -end
    rank.stdout.close()
    until(lambda: not running(tmp_path))


def test_the_address_of_a_node() -> None:
    assert node_address("127.0.0.1:1", {}) == "127.0.0.1"
    assert node_address("127.0.0.1:1", {"_node_ip_address": "127.0.0.2"}) == "127.0.0.2"
    assert node_address("127.0.0.1:1", {"_node_ip_address": "192.0.2.1"}) == "127.0.0.1", "rank 0's, not this one's"
