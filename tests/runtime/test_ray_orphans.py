"""What a local Ray would leave behind is ended: by the actors themselves, and by whoever broke off a start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale_lightning.runtime.ray_orphans import children, end_children

ACTOR = """
import os, sys, threading
from megascale_lightning.runtime.ray_orphans import end_with_raylet
end_with_raylet()
print("up", flush=True)
threading.Event().wait()
"""
RAYLET = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {ACTOR!r}], env=os.environ | {{"RAY_RAYLET_PID": str(os.getpid())}}).wait()
"""


@pytest.mark.watchdog(60)
def test_an_actor_ends_with_its_raylet_though_nobody_fetches_the_exit_code() -> None:
    """As in a container whose first process fetches none: the raylet's process id stays."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE, env=environment)
    assert raylet.stdout is not None
    assert raylet.stdout.readline() == b"up\n"
    (actor,) = children(raylet.pid)
    try:
        os.kill(raylet.pid, signal.SIGKILL)
        # The pipe's other end was the actor's, too.
        assert select.select([raylet.stdout], [], [], 20)[0], "the actor is still there after 20 s"
        assert raylet.stdout.read() == b""
    finally:
        if raylet.poll() is None or Path(f"/proc/{actor}").exists():
            os.kill(actor, signal.SIGKILL)
        raylet.stdout.close()
        raylet.wait()


@pytest.mark.watchdog(60)
def test_only_what_a_start_has_brought_is_ended(tmp_path: Path) -> None:
    """Children of the program that were not there before, and what is below them."""
    program = tmp_path / "ray"
    program.mkdir()
    script = program / "head.sh"
    script.write_text("sleep 60 & sleep 60\n")

    def start(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sh", str(path)])

    other = tmp_path / "other.sh"
    other.write_text("exec sleep 60\n")
    older = start(script)
    before = set(children(os.getpid()))
    newer, alien = start(script), start(other)
    try:
        while len(below := children(newer.pid)) < 2:
            pass
        end_children(program, before)
        assert newer.wait(10) == -signal.SIGKILL
        while any(_runs(process) for process in below):
            time.sleep(0.01)
        assert older.poll() is None
        assert alien.poll() is None
    finally:
        for process in (older, newer, alien):
            for child in children(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
            process.wait()


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
