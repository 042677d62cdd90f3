"""Runs the training script as a user would, and looks for what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "Finished",
    "left_behind",
    "marked_processes",
    "read_log",
    "shared_memory_files",
    "steps_of",
    "train",
    "wait_for_lines",
]

SCRIPT = Path(__file__).with_name("scripts") / "train.py"
MARK = "MEGASCALE_TEST_RUN"


class Finished:
    """A program that has ended: its exit code, its output, and what its processes are known by."""

    def __init__(self, code: int, output: str, mark: str, shared_memory: set[str], session: int = 0) -> None:
        self.code, self.output, self.mark, self.shared_memory = code, output, mark, shared_memory
        self.session = session


def train(
    corpus: Path,
    out: Path,
    *arguments: Any,
    timeout_s: float = 280.0,
    check: bool = True,
    script: str = "train.py",
    environment: Mapping[str, str] | None = None,
    meanwhile: Callable[[subprocess.Popen[bytes], str], None] | None = None,
) -> Finished:
    """Run a script to its end; kill all of it after `timeout_s`.

    `meanwhile` gets the process, which leads a session and a process group, and the mark.
    """
    mark = uuid.uuid4().hex
    variables = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "PYTEST_CURRENT_TEST"):
        variables.pop(name, None)
    variables |= environment or {}
    before = shared_memory_files()
    command = [
        sys.executable,
        str(SCRIPT.with_name(script)),
        "--corpus",
        str(corpus),
        "--out",
        str(out),
        *map(str, arguments),
    ]
    out.mkdir(parents=True, exist_ok=True)
    log = out / "output.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=variables, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if meanwhile is not None:
                meanwhile(process, mark)
            code = process.wait(timeout_s)
        except BaseException as error:
            # Whatever went wrong here, nothing of it may run beside the next test.
            _kill(mark, process)
            if not isinstance(error, (subprocess.TimeoutExpired, AssertionError)):
                raise
            raise AssertionError(f"{error}; the output:\n{log.read_text()[-6000:]}") from None
    finished = Finished(code, log.read_text(), mark, before, process.pid)
    if check:
        assert code == 0, finished.output[-6000:]
    return finished


def _kill(mark: str, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    while found := marked_processes(mark, process.pid):
        for line in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        time.sleep(0.01)
    process.wait()


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes], within_s: float = 120.0) -> None:
    """Wait until a log has so many lines."""
    deadline = time.monotonic() + within_s
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, f"the program ended before {path.name} had {count} lines"
        assert time.monotonic() < deadline, f"{path.name} has no {count} lines after {within_s} s"
        time.sleep(0.05)


def read_log(folder: Path, num_ranks: int = 1) -> list[list[dict[str, Any]]]:
    """The lines of each rank."""
    return [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(num_ranks)
    ]


def steps_of(log: list[list[dict[str, Any]]]) -> dict[int, list[Any]]:
    """Step -> its rows over all ranks and microbatches, as sorted (ids, tokens)."""
    found: dict[int, list[Any]] = defaultdict(list)
    for lines in log:
        for line in lines:
            if "microbatch" in line:
                found[line["step"]] += zip(line["ids"], line["tokens"], strict=True)
    return {step: sorted(rows) for step, rows in found.items()}


def left_behind(finished: Finished, *, within_s: float = 10.0) -> list[str]:
    """What of a run is still there after `within_s`: processes, and files in shared memory that nobody has open."""
    deadline = time.monotonic() + within_s
    while True:
        found = marked_processes(finished.mark, finished.session)
        new = shared_memory_files() - finished.shared_memory
        if new:
            found += sorted(new - opened_files())
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def marked_processes(mark: str, session: int = 0) -> list[str]:
    """Processes that carry a mark, or are in a session (0: none): some of Ray's write their title over the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (
                (session and int(its_session) == session)
                or f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            ):
                found.append(
                    f"{folder.name}: {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:150]}"
                )
        except OSError:
            continue
    return found


def shared_memory_files() -> set[str]:
    return {entry.path for entry in os.scandir("/dev/shm")}


def opened_files(but: int = 0) -> set[str]:
    """Files in shared memory that a living process other than `but` has open or mapped: those of others."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if descriptor.parts[2] != str(but) and (file := os.readlink(descriptor)).startswith("/dev/shm/"):
                found.add(file)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parts[2] == str(but):
            continue
        try:
            found |= {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        except (OSError, IndexError):
            continue
    return found
