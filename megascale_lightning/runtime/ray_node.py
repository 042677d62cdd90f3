"""`RayNode`: the node that a machine other than rank 0's brings into the run's Ray, and that ends with its rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megascale_lightning.errors import RuntimeFailure
from megascale_lightning.runtime.ray_environment import available_cpus
from megascale_lightning.runtime.ray_machines import is_own_address, route_to
from megascale_lightning.runtime.ray_orphans import OrphanGuard

__all__ = ["RayNode", "node_address"]

_JOIN_S: Final = 60.0
_POLL_S: Final = 0.05
_JOINED: Final = b"Ray runtime started"

_FLAGS: Final[Mapping[str, str]] = {
    "num_cpus": "num-cpus",
    "num_gpus": "num-gpus",
    "resources": "resources",
    "labels": "labels",
    "object_store_memory": "object-store-memory",
    "object_spilling_directory": "object-spilling-directory",
    "_memory": "memory",
    "_plasma_directory": "plasma-directory",
    "_metrics_export_port": "metrics-export-port",
    "_temp_dir": "temp-dir",
}
"""Keyword of `ray.init` -> option of `ray start`."""


class RayNode:
    """`ray start --block` as a child of this process, which is gone soon after this process is.

    Args:
        head: host:port of the run's Ray. The environment holds its token.
        options: Keywords of `ray.init`; those that a node can have are passed on.

    Raises:
        RuntimeFailure: It did not join.
    """

    def __init__(self, head: str, options: Mapping[str, Any]) -> None:
        self.address = node_address(head, options)
        """By which the others reach this node."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the node
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}"]
        command += [f"--node-ip-address={self.address}", "--block", *_arguments(options)]
        # A session of its own: the whole of it is ended by one signal, and Ctrl-C does not reach it before us.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._guard = OrphanGuard([-self._process.pid])
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill the node with all that is below it; a second call does nothing.

        Asked to stop, it would wait half a minute for actors, which rank 0 has ended before, or never will.
        """
        if self._output.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.dismiss()
        self._output.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + _JOIN_S
        while _JOINED not in (said := self._said()):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                what = f"ended with {code}" if code is not None else f"has not joined after {_JOIN_S:g} s"
                last = b"\n".join(said.strip().splitlines()[-15:]).decode(errors="replace")
                raise RuntimeFailure(f"the node of Ray at {self.address} {what}; `ray start` said:\n{last}")
            time.sleep(_POLL_S)

    def _said(self) -> bytes:
        return os.pread(self._output.fileno(), 1 << 20, 0)


def node_address(head: str, options: Mapping[str, Any]) -> str:
    """The address of this machine that its node has, or is to have. Raises: OSError: There is no way to the head."""
    given = str(options.get("_node_ip_address") or "")
    return given if given and is_own_address(given) else route_to(head.rpartition(":")[0].strip("[]"))


def _arguments(options: Mapping[str, Any]) -> list[str]:
    defaults = {"num_cpus": available_cpus(), "num_gpus": 0, "_temp_dir": _folder()}
    found = []
    for name, value in {**defaults, **options}.items():
        if name in _FLAGS and value is not None:
            if name == "labels":
                value = ",".join(f"{key}={label}" for key, label in value.items())
            elif name == "resources":
                value = json.dumps(value)
            found.append(f"--{_FLAGS[name]}={value}")
    return found


def _folder() -> str:
    """Not Ray's usual folder: there `ray start` would say that whoever looks for any Ray is to find this one.

    A short name, since paths of sockets may have 107 bytes.
    """
    return str(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"ms{os.getuid()}")
