"""Ends the helpers of a local Ray that outlive this process when it dies without a chance to end them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

__all__ = ["OrphanGuard"]


class OrphanGuard:
    """A shell that waits for this process to end, and then kills what Ray would leave behind for up to a minute.

    The kernel takes Ray's head processes along with us, but not the two agents of the raylet: they first try to report
    its death to a head that is gone as well. The shell waits for the end of a pipe that only this process holds, and
    costs about a megabyte. Linux only: elsewhere it does nothing.
    """

    def __init__(self) -> None:
        """Guard the agents there are now: their raylet lives and dies with them, so they never change."""
        agents = [agent for raylet in _children(os.getpid(), "raylet") for agent in _children(raylet)]
        self._shell: subprocess.Popen[bytes] | None = None
        if agents:
            command = f"trap '' INT TERM HUP; read _; kill -KILL {' '.join(map(str, agents))} 2>/dev/null"
            with contextlib.suppress(OSError):
                self._shell = subprocess.Popen(
                    ["/bin/sh", "-c", command], stdin=subprocess.PIPE, start_new_session=True, close_fds=True
                )

    def dismiss(self) -> None:
        """End the guard, once Ray was shut down in good order."""
        if self._shell is not None:
            self._shell.kill()
            if self._shell.stdin is not None:
                self._shell.stdin.close()
            self._shell.wait()
            self._shell = None


def _children(parent: int, name: str | None = None) -> list[int]:
    """Process ids of the children of a process, those called `name`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, rest = (entry / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == parent and name in (None, head.partition("(")[2]):
                found.append(int(entry.name))
    return found
