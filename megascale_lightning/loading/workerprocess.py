"""A worker process: gets works and runs from its parent, answers what came of them, and ends with it."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.processes import packed_answer, unpacked_run

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1


def main(channel: int, lifeline: int, parent: int) -> None:
    """Serve until the parent is gone.

    Args:
        channel: File descriptor of the socket to the parent.
        lifeline: Of a pipe whose other end the parent alone holds.
        parent: Process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C means the parent, which ends us
    _end_with(parent, lifeline)
    connection = Connection(channel)
    # What the transform forks must not answer in our place, nor keep the parent waiting when we are dead.
    os.register_at_fork(after_in_child=connection.close)
    works: dict[int, Any] = {}
    while True:
        try:
            number, is_new = pickle.loads(connection.recv_bytes())
            if is_new:
                works[number] = connection.recv_bytes()
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            return
        answer = packed_answer(partial(_answer, works, number, payload))
        del payload
        try:
            connection.send_bytes(answer)
        except OSError:
            return


def _answer(works: dict[int, Any], number: int, payload: bytes) -> Any:
    work = works[number]
    if isinstance(work, bytes):
        try:
            works[number] = work = pickle.loads(work)
        except Exception as error:
            raise ConfigError(
                f"the transform cannot be loaded in a worker process: {type(error).__name__}: {error}; define it in a "
                "module that can be imported there"
            ) from error
    return work(unpacked_run(payload, work))


def _end_with(parent: int, lifeline: int) -> None:
    """End when the parent does, also in the midst of a call that never comes back, and if it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _watch(lifeline)
    os.register_at_fork(after_in_child=partial(_watch, lifeline))  # what the transform forks ends with us, too


def _watch(lifeline: int) -> None:
    def watch() -> None:
        with suppress(OSError):  # closed, in a fork that wants to be alone
            os.read(lifeline, 1)
            os._exit(1)

    threading.Thread(target=watch, name="megascale-lifeline", daemon=True).start()
