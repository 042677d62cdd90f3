"""`ray.init` and `ray.shutdown` for a guest: no start that fails leaves a process, no dead Ray takes us along."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from megascale_lightning.runtime.ray_orphans import children, end_children

__all__ = ["init_ray", "is_forked", "is_reachable", "shut_down_ray"]

logger = logging.getLogger(__name__)

_UNDO_S: Final = 5.0
_ANSWER_S: Final = 2.0

_used_by: int | None = None
"""The process in which we have connected to Ray."""


def init_ray(**settings: Any) -> tuple[str, str]:
    """`ray.init` that leaves SIGTERM and `sys.excepthook` as they were, and no process where it fails.

    Returns:
        The cluster's address, host:port, and the socket of this machine's raylet.
    """
    global _used_by
    import ray

    _used_by = os.getpid()
    defaults = {"namespace": "megascale_lightning", "log_to_driver": False, "configure_logging": False}
    before = set(children(os.getpid()))
    try:
        with _signal_kept(signal.SIGTERM):
            context: Any = ray.init(**{**defaults, **settings})
        address: str = ray.get_runtime_context().gcs_address
    except BaseException:
        _undo_init(before)
        raise
    _take_back_excepthook()
    return address, str(context.address_info.get("raylet_socket_name") or "")


def is_forked() -> bool:
    """Whether this process was forked from one that has used Ray, by us or by the user: its threads stayed there."""
    if _used_by is not None:
        return _used_by != os.getpid()
    worker: Any = sys.modules.get("ray._private.worker")
    listener = getattr(getattr(worker, "global_worker", None), "listener_thread", None)
    if not isinstance(listener, threading.Thread) or listener.is_alive():
        return False
    # It ends with ray.shutdown() as well: then only a child of multiprocessing, such as a rank, says that it is one.
    return bool(worker.global_worker.connected) or multiprocessing.parent_process() is not None


def shut_down_ray(raylet: str, head: str = "") -> bool:
    """`ray.shutdown`, unless Ray is dead: then it would end this process, before it can say why.

    Args:
        raylet: The raylet's socket; "" where it is not known.
        head: host:port of a head that may be gone while the raylet is there, on another machine.

    Returns:
        False: this process stays connected to what is dead.
    """
    import ray

    if not ray.is_initialized():
        return True
    if not _answers(raylet) or (head and not is_reachable(head, _ANSWER_S)):
        logger.debug("the raylet at %s, or its head, is gone: Ray is not shut down", raylet)
        return False
    if "wait_for_processes" in inspect.signature(ray.shutdown).parameters:
        ray.shutdown(wait_for_processes=True)
    else:
        ray.shutdown()
    return True


def _answers(raylet: str) -> bool:
    if not raylet.startswith("/"):
        return True
    with suppress(OSError), socket.socket(socket.AF_UNIX) as knocking:
        knocking.settimeout(1.0)
        knocking.connect(raylet)
        return True
    return False


def is_reachable(address: str, timeout_s: float) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
        return True
    return False


def _take_back_excepthook() -> None:
    # Ray's hook tells its head of every uncaught error before it is printed, and waits a minute for one that is gone,
    # as it is when rank 0 was killed.
    worker: Any = sys.modules.get("ray._private.worker")
    if sys.excepthook is getattr(worker, "custom_excepthook", None):
        sys.excepthook = getattr(worker, "normal_excepthook", sys.__excepthook__)


def _undo_init(before: set[int]) -> None:
    """Take back a start that failed or was interrupted: Ray itself keeps what runs by then until this process ends."""
    import ray

    # Whoever presses Ctrl-C once presses it twice.
    with _signal_kept(signal.SIGINT, signal.SIG_IGN):
        # On a thread of its own, since it may wait for what was never there.
        undoing = threading.Thread(target=_shut_down_in_part, name="megascale-undo", daemon=True)
        undoing.start()
        undoing.join(_UNDO_S)
        end_children(Path(ray.__file__).parent, before)


def _shut_down_in_part() -> None:
    import ray

    with suppress(Exception):
        ray.shutdown()


@contextmanager
def _signal_kept(which: signal.Signals, meanwhile: signal.Handlers | None = None) -> Iterator[None]:
    """Put the handler of a signal back: ray.init replaces that of SIGTERM, with which Lightning writes a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(which)
    if meanwhile is not None:
        signal.signal(which, meanwhile)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(which, handler)
