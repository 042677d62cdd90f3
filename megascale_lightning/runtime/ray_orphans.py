"""Ends what a local Ray leaves behind: when this process dies without a chance to, or when a start is broken off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["OrphanGuard", "children", "end_children", "end_with_raylet"]

_LOOK_S: Final = 1.0


class OrphanGuard:
    """A shell that waits for this process to end, and then kills what Ray would leave behind for up to a minute.

    The kernel takes Ray's head processes along with us, but not the two agents of the raylet: they first try to report
    its death to a head that is gone as well. The shell waits for the end of a pipe that only this process holds, and
    costs about a megabyte. Linux only: elsewhere it does nothing.
    """

    def __init__(self, doomed: Sequence[int] | None = None) -> None:
        """Guard processes, groups of them where a number is negative.

        Args:
            doomed: None: the agents there are now. Their raylet lives and dies with them, so they never change.
        """
        if doomed is None:
            doomed = [agent for raylet in children(os.getpid(), "raylet") for agent in children(raylet)]
        self._shell: subprocess.Popen[bytes] | None = None
        if doomed:
            command = f"trap '' INT TERM HUP; read _; kill -s KILL -- {' '.join(map(str, doomed))} 2>/dev/null"
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


def end_with_raylet(leave: Callable[[int], Any] = os._exit) -> None:
    """In a process of Ray's: end with the raylet that started it.

    Ray asks whether the raylet's process id is there, which it is for as long as nobody fetches its exit code: in a
    container whose first process fetches none, actors outlive a killed trainer by a minute, and answer its other ranks.
    """
    raylet = os.getppid()
    if os.environ.get("RAY_RAYLET_PID") != str(raylet):
        return
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == raylet:
            never.wait(_LOOK_S)
        leave(1)

    threading.Thread(target=watch, name="megascale-raylet", daemon=True).start()


def end_children(program: Path, but: set[int]) -> None:
    """Kill the children of this process that run a file below `program`, with all below them, except those in `but`."""
    doomed = [child for child in children(os.getpid()) if child not in but and str(program) in _command(child)]
    for process in doomed:  # grows while it is walked
        doomed += children(process)
    for process in doomed:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def children(parent: int, name: str | None = None) -> list[int]:
    """Process ids of the children of a process, those called `name`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, rest = (entry / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == parent and name in (None, head.partition("(")[2]):
                found.append(int(entry.name))
    return found
