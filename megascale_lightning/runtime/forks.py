"""Handles do not outlive a fork: threads, sockets and Ray stay behind in the parent."""

from __future__ import annotations

import os

from megascale_lightning.errors import ForkError

__all__ = ["check_process"]


def check_process(pid: int) -> None:
    """Raise `ForkError` in a process forked after `pid` made the handle."""
    if os.getpid() != pid:
        raise ForkError(
            f"this loader belongs to process {pid} and was used in process {os.getpid()}, forked from it, where its "
            "threads and Ray do not work (calls would hang). Do not put the loader into a DataLoader with "
            "num_workers > 0 and do not fork while iterating: iterate it directly, its reading is parallel already"
        )
