"""What a test has to do in a process of its own: what it saw it says in lines of JSON."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from megascale_lightning.errors import MegaScaleError, NotOpenError
from megascale_lightning.runtime.ray_runtime import RayRuntime
from megascale_lightning.types import BatchWindow
from tests.runtime.fakes import fake_plan, numbers, state

SMALL = {"object_store_memory": 100 << 20}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def read(port: Any, first: int, *, group: int = 0, client: int = 0, limit_s: float = 90.0) -> list[int]:
    """One window's numbers; opens again when a role has forgotten us."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            window = port.fetch("train", "g", group, client, first, first - 1)
        except NotOpenError:
            port.open("train", "g", client, state(first))
            continue
        if isinstance(window, BatchWindow):
            return [int(value) for value in numbers(window)]
    raise TimeoutError(f"no window from step {first}")


def family() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def rank(address_file: str) -> None:
    """Connect to another process's roles and read."""
    with open(address_file, "rb") as file:
        address = pickle.load(file)
    begun = time.monotonic()
    try:
        runtime = RayRuntime.connect(address)
    except MegaScaleError as error:
        say(error=type(error).__name__, message=str(error), took=time.monotonic() - begun)
        return
    port = runtime.port()
    port.open("train", "g", 1, None)
    say(numbers=read(port, 0, group=1, client=1), roles=sorted(runtime.stats()))
    port.consumed("train", "g", 1, 3)
    port.close("train", "g", 1)
    runtime.close()
    say(left=sorted(name for name in os.environ if name.startswith("RAY_AUTH")))


def watch(address_file: str) -> None:
    """Read, and wait for what never comes; say how it ended."""
    with open(address_file, "rb") as file:
        runtime = RayRuntime.connect(pickle.load(file))
    port = runtime.port()
    port.open("train", "g", 2, None)
    say(numbers=read(port, 0, client=2))
    while True:
        begun = time.monotonic()
        try:
            port.fetch("train", "g", 0, 2, 4000, -1)
        except MegaScaleError as error:
            say(error=type(error).__name__, message=str(error), took=time.monotonic() - begun)
            break
    begun = time.monotonic()
    runtime.close()
    say(closed=time.monotonic() - begun)


def host(address_file: str, end: str) -> None:
    """Start the roles, publish the address, and end as told."""
    handled = threading.Event()

    def mine(*_: Any) -> None:
        handled.set()

    if end != "sigterm":
        signal.signal(signal.SIGTERM, mine)
    before = sorted(os.listdir("/dev/shm"))
    runtime = RayRuntime.start(fake_plan(), ray_init=SMALL)
    kept = end == "sigterm" or signal.getsignal(signal.SIGTERM) is mine
    with open(address_file + ".tmp", "wb") as file:
        pickle.dump(runtime.address(), file)
    os.replace(address_file + ".tmp", address_file)
    port = runtime.port()
    port.open("train", "g", 0, None)
    say(numbers=read(port, 0), family=family(), kept=kept, shm=before)
    sys.stdin.readline()
    if end == "close":
        os.kill(os.getpid(), signal.SIGTERM)
        handled.wait(5)
        begun = time.monotonic()
        runtime.close()
        runtime.close()
        alive = family()
        say(
            handled=handled.is_set(),
            took=time.monotonic() - begun,
            alive=alive,
            left=sorted(name for name in os.environ if name.startswith("RAY_") and name != "RAY_CLIENT_MODE"),
            shm=sorted(os.listdir("/dev/shm")),
        )


def imported() -> None:
    """Ray was imported first, without a token; two runs after another, and a Ray of the user's own at last."""
    os.environ.pop("RAY_AUTH_MODE", None)
    import ray

    for _ in range(2):
        runtime = RayRuntime.start(fake_plan(), ray_init=SMALL)
        port = runtime.port()
        port.open("train", "g", 0, None)
        say(numbers=read(port, 0), address=runtime.address().address)
        runtime.close()
        say(initialized=ray.is_initialized())
    ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False, **SMALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = RayRuntime.start(fake_plan(), ray_init={"num_cpus": 3})
    port = runtime.port()
    port.open("train", "g", 0, None)
    say(numbers=read(port, 0), warned=[str(w.message) for w in caught if w.category.__name__ == "MegaScaleWarning"])
    runtime.close()
    say(initialized=ray.is_initialized())


def joined(address_file: str) -> None:
    """A run of its own in a cluster that somebody else started."""
    with open(address_file, "rb") as file:
        address = pickle.load(file)
    os.environ.update(RAY_ADDRESS=address.address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=address.token)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # that Ray listens on 127.0.0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = RayRuntime.start(fake_plan("other"), ray_init={"num_cpus": 3, "object_store_memory": 1 << 30})
    port = runtime.port()
    port.open("train", "g", 0, None)
    say(
        numbers=read(port, 0),
        warned=[str(w.message) for w in caught if w.category.__name__ == "MegaScaleWarning"],
        pids=[stats["pid"] for stats in runtime.stats().values()],
    )
    runtime.close()
    say(left=sorted(name for name in os.environ if name.startswith("RAY_AUTH")))


if __name__ == "__main__":
    scenario = {"rank": rank, "watch": watch, "host": host, "imported": imported, "joined": joined}[sys.argv[1]]
    scenario(*sys.argv[2:])
