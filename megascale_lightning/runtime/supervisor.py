"""Creates the actors of a run, notices when one dies, and replaces it under the same name."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray import exceptions as ray_errors

from megascale_lightning.errors import RoleMissingError
from megascale_lightning.runtime.ray_handles import describe_death

__all__ = ["Spawn", "Supervisor"]

logger = logging.getLogger(__name__)

Spawn = Callable[[str, "Exception | None"], Any]
"""`spawn(role, failure)` creates the role's actor and gives its handle; with a failure, an actor that raises it."""

_TICK_S: Final = 0.5
_PING_EVERY_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Watched:
    """One role's actor. The only handle that keeps it alive is here."""

    handle: Any = None
    hold: Any = None
    ping: Any = None
    pinged: float = 0.0
    deaths: deque[float] = field(default_factory=deque)
    num_deaths: int = 0
    due: float | None = None
    """When the replacement is to be created; None while there is an actor."""
    cause: str = ""
    given_up: bool = False


class Supervisor:
    """Keeps one actor per role.

    Args:
        roles: Names of the roles.
        spawn: Creates an actor.
        max_deaths: A role that dies more often than this within `period_s` is given up: calls on it raise the cause.
        period_s: Seconds.
        hang_s: An actor that does not answer a ping for so many seconds is killed.
    """

    def __init__(
        self,
        roles: tuple[str, ...],
        spawn: Spawn,
        *,
        max_deaths: int = 5,
        period_s: float = 60.0,
        hang_s: float = 60.0,
    ) -> None:
        self._spawn = spawn
        self._max_deaths = max_deaths
        self._period_s = period_s
        self._hang_s = hang_s
        self._watched = {name: _Watched() for name in roles}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="megascale-supervisor", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Create all actors and wait until they are there.

        Raises:
            Exception: Why a role cannot be made.
            RoleMissingError: The actors did not start in time.
        """
        for name, watched in self._watched.items():
            self._create(name, watched)
        waiting = {watched.handle.ready.remote(): name for name, watched in self._watched.items()}
        ready, missing = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout_s)
        for reference in ready:
            try:
                ray.get(reference)
            except ray_errors.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from error
            except ray_errors.RayError as error:
                raise RoleMissingError(f"role {waiting[reference]!r} did not start: {error}") from error
        if missing:
            names = sorted(waiting[reference] for reference in missing)
            raise RoleMissingError(
                f"the processes of roles {names} did not start within {timeout_s:g} s; Ray's logs are in its session "
                "folder (/tmp/ray/session_latest/logs)"
            )
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the watch, then the actors: they are asked to stop, and then killed."""
        self._stopping.set()
        with self._lock:
            handles = [watched.handle for watched in self._watched.values() if watched.handle is not None]
            self._watched.clear()
        if not ray.is_initialized():
            return
        try:
            stops = [handle.stop.remote() for handle in handles]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=timeout_s)
            if self._thread.is_alive():
                self._thread.join(timeout_s)
            for handle in handles:
                ray.kill(handle, no_restart=True)
        except ray_errors.RayError as error:
            logger.debug("Ray was gone before the actors were stopped: %s", error)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Role -> how often it died, and why the last time."""
        with self._lock:
            return {name: {"deaths": w.num_deaths, "last_death": w.cause} for name, w in self._watched.items()}

    def _create(self, name: str, watched: _Watched, failure: Exception | None = None) -> None:
        watched.handle = self._spawn(name, failure)
        watched.hold = watched.handle.hold.remote()
        watched.ping, watched.pinged = None, time.monotonic()
        watched.due = None

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._watch()
        except Exception as error:
            if not self._stopping.is_set():
                logger.error("the actors are no longer watched, a role that dies now stays away: %r", error)

    def _watch(self) -> None:
        with self._lock:
            soon = min((w.due for w in self._watched.values() if w.due is not None), default=None)
        pause = _TICK_S if soon is None else min(_TICK_S, max(0.0, soon - time.monotonic()))
        dead = self._wait_for_death(pause)
        with self._lock:
            if self._stopping.is_set():
                return
            for name in dead:
                self._bury(name, self._watched[name])
            for name, watched in self._watched.items():
                if watched.due is not None:
                    self._replace(name, watched)
                else:
                    self._check_ping(name, watched)

    def _wait_for_death(self, pause_s: float) -> list[str]:
        """Roles whose actor is gone. Keeps no reference: that would keep the actor's name taken."""
        with self._lock:
            holds = {w.hold: name for name, w in self._watched.items() if w.hold is not None}
        if not holds:
            self._stopping.wait(pause_s)
            return []
        gone, _ = ray.wait(list(holds), num_returns=1, timeout=pause_s, fetch_local=False)
        return [holds[reference] for reference in gone]

    def _bury(self, name: str, watched: _Watched) -> None:
        """Note a death, and drop all that would keep the actor's name taken."""
        try:
            ray.get(watched.hold, timeout=1.0)
            watched.cause = "it was stopped from outside"
        except Exception as error:
            watched.cause = describe_death(error)
        watched.handle = watched.hold = watched.ping = None
        now = time.monotonic()
        watched.num_deaths += 1
        watched.deaths.append(now)
        while watched.deaths[0] < now - self._period_s:
            watched.deaths.popleft()
        again = len(watched.deaths) - 1
        watched.due = now + (min(5.0, 0.1 * 2**again) if again else 0.0)
        logger.warning("role %s died (%s), starting its replacement", name, watched.cause)

    def _replace(self, name: str, watched: _Watched) -> None:
        if watched.due is None or watched.due > time.monotonic():
            return
        failure = None
        if len(watched.deaths) > self._max_deaths and not watched.given_up:
            watched.given_up = True
            logger.error("role %s died %d times in %g s: given up", name, len(watched.deaths), self._period_s)
        if watched.given_up:
            failure = RoleMissingError(
                f"role {name!r} died {watched.num_deaths} times and was given up; the last time: {watched.cause}"
            )
        try:
            self._create(name, watched, failure)
        except (ValueError, ray_errors.RayError) as error:
            # The name is free a moment after the old actor is.
            logger.debug("role %s cannot be created yet: %s", name, error)
            watched.handle = watched.hold = None
            watched.due = time.monotonic() + 0.05

    def _check_ping(self, name: str, watched: _Watched) -> None:
        now = time.monotonic()
        if watched.ping is None:
            if now - watched.pinged > _PING_EVERY_S:
                watched.ping, watched.pinged = watched.handle.ping.remote(), now
        elif ray.wait([watched.ping], timeout=0, fetch_local=False)[0]:
            watched.ping = None
        elif now - watched.pinged > self._hang_s:
            logger.warning("role %s has not answered a ping for %g s: killing its process", name, self._hang_s)
            watched.pinged = now
            ray.kill(watched.handle, no_restart=True)
