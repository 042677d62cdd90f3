"""Calls on roles in Ray actors, by name: found, repeated over deaths, and ended with one clear error."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray import exceptions as ray_errors

from megascale_lightning.errors import RayUnreachableError, RoleMissingError, RuntimeFailure

__all__ = ["RayCaller", "bounded", "describe_death"]

logger = logging.getLogger(__name__)

WAIT_S: Final = 1.0
"""How long a role may keep a request before it says `NotYet`."""

_PROBE_S: Final = 5.0
"""An answer that takes longer has its actor pinged."""

_PING_S: Final = 15.0
_UNREACHABLE_S: Final = 15.0
_DOUBT_S: Final = 2.0
"""A role that has been away for longer makes us ask whether Ray itself is there."""

_REPORT_S: Final = 10.0

_LOST: Final = (
    ray_errors.RayActorError,
    ray_errors.ObjectLostError,  # OwnerDiedError, ReferenceCountingAssertionError, ...
    ray_errors.NodeDiedError,
    ray_errors.WorkerCrashedError,
    ray_errors.TaskCancelledError,
)
"""The process that was asked, or the one that held the answer, is gone or cannot be reached: ask again."""

_FULL: Final = (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError)


class RayCaller:
    """Finds the roles of a run and calls them; thread-safe. Every call is repeated, so it must be idempotent.

    Args:
        run: Name of the run, the first part of the actors' names.
        namespace: Ray namespace of the actors.
        restart_timeout: Seconds that a role may be away.
    """

    def __init__(self, run: str, namespace: str, restart_timeout: float) -> None:
        self._run = run
        self._namespace = namespace
        self._restart_timeout = restart_timeout
        self._handles: dict[str, Any] = {}
        self._stopping = threading.Event()

    def __call__(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of a role; the `Caller` of a `RoleHost`.

        Raises:
            Exception: What the role raised.
            RoleMissingError: The role was away for longer than `restart_timeout`.
            RayUnreachableError: Ray does not answer.
            RuntimeFailure: The caller is stopped, or the object store is full.
        """
        group = "take" if method == "take" else None
        return self.ask(target, "request", method, args, WAIT_S, group=group)

    def ask(self, target: str, actor_method: str, *args: Any, group: str | None = None) -> Any:
        """Call a method of the role's actor. An answer that is a list of one reference is followed.

        Raises:
            Exception: As `__call__`.
        """
        outage = _Outage(target, self._restart_timeout, self._stopping)
        while True:
            handle = None
            try:
                handle = self._find(target)
                method = getattr(handle, actor_method)
                answer = self._get(handle, (method.options(concurrency_group=group) if group else method).remote(*args))
                if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], ray.ObjectRef):
                    answer = self._get(handle, answer[0])
                return answer
            except ray_errors.RayTaskError as error:
                raise self._own_error(target, error) from error
            except _FULL as error:
                raise RuntimeFailure(_store_full(target, error)) from error
            except (_Away, *_LOST) as error:
                why = describe_death(error)
            except ray_errors.RayError as error:
                outage.ray_failed(error)
                why = describe_death(error)
            # Outside of the handlers: the exceptions hold references that keep a dead actor's name taken.
            self._forget(target, handle)
            del handle
            outage.wait(why)

    def tell(self, target: str, method: str, *args: Any) -> None:
        """Send a notice to a role without waiting; it is lost if the role is away."""
        with contextlib.suppress(_Away, RayUnreachableError, ray_errors.RayError):
            self._find(target, limit_s=1.0).notify.remote(method, args)

    def stop(self) -> None:
        """Let every call that waits end with a `RuntimeFailure`."""
        self._stopping.set()
        self._handles.clear()

    def _find(self, target: str, limit_s: float = _UNREACHABLE_S) -> Any:
        if self._stopping.is_set():
            raise RuntimeFailure(f"the runtime was closed while {target!r} was called")
        if not ray.is_initialized():  # otherwise Ray would start a cluster by itself
            raise RuntimeFailure(f"Ray was shut down in this process; role {target!r} cannot be called any more")
        handle = self._handles.get(target)
        if handle is None:
            name = f"{self._run}/{target}"
            try:
                handle = bounded(
                    lambda: ray.get_actor(name, namespace=self._namespace), limit_s, f"while {name!r} was looked up"
                )
            except ValueError:
                raise _Away(f"no actor {name!r} in namespace {self._namespace!r}") from None
            self._handles[target] = handle
        return handle

    def _forget(self, target: str, handle: Any) -> None:
        if handle is not None and self._handles.get(target) is handle:
            del self._handles[target]

    def _get(self, handle: Any, reference: Any) -> Any:
        """The value of a reference, for as long as its actor answers a ping."""
        while True:
            try:
                return ray.get(reference, timeout=_PROBE_S)
            except ray_errors.GetTimeoutError:
                if self._stopping.is_set():
                    raise RuntimeFailure("the runtime was closed while an answer was awaited") from None
            try:
                ray.get(handle.ping.remote(), timeout=_PING_S)
            except ray_errors.GetTimeoutError:
                raise _Away(f"its process has not answered a ping for {_PING_S:g} s") from None

    def _own_error(self, target: str, error: ray_errors.RayTaskError) -> Exception:
        """What the role raised, as it was; its remote traceback stays visible as the cause."""
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, ray_errors.RayError):
            return cause
        return RuntimeFailure(f"a call on role {target!r} failed in Ray: {error}")


class _Away(Exception):
    """The role cannot be found now."""


class _Outage:
    """How long one call has been without an answer, and when that is too long."""

    def __init__(self, target: str, restart_timeout: float, stopping: threading.Event) -> None:
        self._target = target
        self._limit = restart_timeout
        self._stopping = stopping
        self._begun: float | None = None
        self._ray_failing: float | None = None
        self._pause = 0.02
        self._reported = False

    def ray_failed(self, error: Exception) -> None:
        """Ray, not the role, failed; raises once that has lasted."""
        now = time.monotonic()
        self._ray_failing = self._ray_failing or now
        if now - self._ray_failing > _UNREACHABLE_S:
            raise RayUnreachableError(
                f"Ray has not answered for {_UNREACHABLE_S:g} s while role {self._target!r} was called: {error}"
            ) from error

    def wait(self, why: str) -> None:
        """Pause before the next try; raises when the role was away for too long."""
        now = time.monotonic()
        self._begun = self._begun or now
        away = now - self._begun
        if away > self._limit:
            raise RoleMissingError(
                f"role {self._target!r} has been away for {away:.0f} s (restart_timeout {self._limit:g} s): {why}. The "
                "log of the process that started the run says what became of it; a larger restart_timeout waits longer"
            )
        if away > _REPORT_S and not self._reported:
            self._reported = True
            logger.warning(
                "role %s has been away for %.0f s, waiting up to %g s: %s", self._target, away, self._limit, why
            )
        if away > _DOUBT_S:
            bounded(ray.nodes, _UNREACHABLE_S - _DOUBT_S, f"after role {self._target!r} was away for {away:.0f} s")
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 1.5, 0.5)


def bounded(function: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Run something that may block for ever inside Ray on a helper thread.

    Raises:
        RayUnreachableError: It took longer than `limit_s` seconds.
    """
    outcome: list[tuple[Any, BaseException | None]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    threading.Thread(target=run, name="ray-probe", daemon=True).start()
    if not done.wait(limit_s):
        raise RayUnreachableError(
            f"Ray has not answered for {limit_s:g} s {what}: its head process is gone, or stands still"
        )
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def describe_death(error: BaseException) -> str:
    """The telling part of one of Ray's long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if line.lower().startswith("the actor is dead because")), None)
    said = (reason or (lines[0] if lines else "no message")).split(" Some common causes include")[0]
    return f"{type(error).__name__}: {said[:300]}"


def _store_full(target: str, error: BaseException) -> str:
    return (
        f"Ray's object store has no room for a batch of role {target!r} ({type(error).__name__}). Give it more "
        "(ray_init={'object_store_memory': bytes}, /dev/shm of that size), or lower prefetch_steps or plan_window"
    )
