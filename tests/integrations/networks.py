"""Two networks of one machine that reach each other by a cable: what two machines are to Ray, torch and us."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.integrations.processes import MARK

__all__ = ["CABLE", "Networks", "Pair", "missing_right", "two_networks"]

ADDRESSES = ("10.209.0.1", "10.209.0.2")
CABLE = "cable0"


def missing_right() -> str:
    """What this process lacks to make networks; "" where it lacks nothing."""
    if shutil.which("ip") is None:
        return "two networks need the program ip (iproute2)"
    name = f"msl{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"two networks need the right to make one (CAP_SYS_ADMIN): {made.stderr.strip()}"
    try:
        cable = ["ip", "-n", name, "link", "add", "name", "msl0", "type", "veth", "peer", "name", "msl1"]
        made = subprocess.run(cable, capture_output=True, text=True)
        return f"two networks need the right to join them (CAP_NET_ADMIN): {made.stderr.strip()}" * bool(
            made.returncode
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class Networks:
    """Names of the two."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def processes(self) -> list[list[int]]:
        """Ids of the processes in each network."""
        found = []
        for name in self.names:
            said = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
            found.append([int(line) for line in said.split() if _runs(int(line))])
        return found

    def commands(self) -> list[list[str]]:
        """Command lines of the processes in each network, as far as they still run."""
        return [[line for pid in pids if (line := command_of(pid))] for pids in self.processes()]

    def left_behind(self, within_s: float) -> list[list[str]]:
        """What is still there after so many seconds."""
        deadline = time.monotonic() + within_s
        while any(self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.commands()

    def clear(self) -> None:
        """Kill everything in them."""
        while any(found := self.processes()):
            for pid in (pid for pids in found for pid in pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def two_networks() -> Iterator[Networks]:
    """Two networks, each with its own 127.0.0.1, joined by a cable; removed at the end with all that runs in them."""
    names = [f"msl{os.getpid()}{side}" for side in "ab"]
    networks = Networks(names)
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", names[0], "link", "add", "name", CABLE, "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", name, "link", "set", device, "up")
        yield networks
    finally:
        if len(made) == len(names):
            networks.clear()
        for name in made:
            _ip("netns", "del", name)


class Pair:
    """The two halves of a `torchrun --nnodes 2`, one rank each: nobody started Ray on either side."""

    def __init__(self, networks: Networks, script: Path, out: Path, *arguments: Any) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.logs = [out / f"output{side}.txt" for side in (0, 1)]
        dropped = ("MASTER_", "RAY_", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        # Gloo looks for the interface by the host's name, which is outside of both networks.
        variables |= {MARK: uuid.uuid4().hex, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE}
        self.processes = []
        for side, name in enumerate(networks.names):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            launch += [f"--node-rank={side}", f"--master-addr={ADDRESSES[0]}", "--master-port=29511"]
            command = ["ip", "netns", "exec", name, *launch, str(script), *map(str, arguments)]
            with self.logs[side].open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes of both."""
        deadline = time.monotonic() + timeout_s
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def output(self) -> str:
        """The end of what both said."""
        return "\n".join(f"--- side {log.stem[-1]}\n{log.read_text()[-5000:]}" for log in self.logs)


def command_of(pid: int) -> str:
    """The command line of a process, empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode().strip()
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
