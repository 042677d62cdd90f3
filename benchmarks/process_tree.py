"""Memory and CPU time of a process and all that it started, read from Linux's /proc."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["adopt_orphans", "cpu_seconds", "process_tree", "pss_bytes"]

_SET_CHILD_SUBREAPER = 36
_PARENT, _CPU_TIMES = 1, slice(11, 15)
"""In /proc/<pid>/stat behind the name: the parent; user and system time, own and of the children waited for."""


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes our child, and so stays in our tree."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def process_tree(root: int) -> list[int]:
    """Ids of `root` and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[_PARENT]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> float:
    """User and system time that the tree has taken so far, with that of its processes that ended."""
    ticks = sum(int(ticks) for pid in process_tree(root) for ticks in _stat(pid)[_CPU_TIMES])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of the processes; what several of them map is shared out among them, so that it counts once."""
    return sum(_pss_kib(pid) for pid in pids) * 1024


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
