"""`RayCaller` without a Ray: how long it looks for a role, and that every wait ends with one clear error."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from ray import exceptions as ray_errors

from megascale_lightning.errors import RayUnreachableError, RoleMissingError, RuntimeFailure
from megascale_lightning.runtime import ray_handles
from megascale_lightning.runtime.ray_handles import RayCaller, bounded

pytestmark = pytest.mark.timeout(30)


class Clock:
    """Time that passes only while somebody looks at it, 3 s each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 3.0
        return self.now


class Hasty:
    """An event that nobody sets and nobody waits for."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        return False


class Method:
    """A method of an actor's handle."""

    def remote(self, *args: Any) -> None:
        return None


class Handle:
    """An actor that answers."""

    request = Method()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(ray_handles, "time", found)
    monkeypatch.setattr(ray_handles.ray, "nodes", list)
    return found


def caller(monkeypatch: pytest.MonkeyPatch, find: Any, restart_timeout: float = 120.0) -> RayCaller:
    made = RayCaller("run", "namespace", restart_timeout)
    monkeypatch.setattr(made, "_find", lambda target, limit_s=15.0: find())
    monkeypatch.setattr(made, "_get", lambda handle, reference: 7)
    monkeypatch.setattr(made, "_stopping", Hasty())
    return made


def failing(error: Exception) -> Any:
    def find() -> Any:
        raise error

    return find


def test_a_role_that_stays_away_is_reported_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    away = caller(monkeypatch, failing(ray_handles._Away("no actor 'run/loader/0'")))
    with caplog.at_level(logging.WARNING), pytest.raises(RoleMissingError, match=r"'loader/0'.*restart_timeout 120 s"):
        away("loader/0", "take", ())
    assert 120 < clock.now < 140
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "role loader/0 has been away for 12 s, waiting up to 120 s"
    ]


def test_a_role_that_comes_back_is_asked_again(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    deaths: list[Exception] = [ray_errors.ActorDiedError(), ray_errors.ActorUnavailableError("away", None)]

    def find() -> Any:
        if deaths:
            raise deaths.pop()
        return Handle()

    assert caller(monkeypatch, find).ask("planner", "request") == 7
    assert not deaths
    assert clock.now < 15


def test_a_ray_that_fails_for_fifteen_seconds_is_an_error(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    broken = caller(monkeypatch, failing(ray_errors.RaySystemError("no head")))
    with pytest.raises(RayUnreachableError, match="not answered for 15 s while role 'planner' was called"):
        broken("planner", "plan", ())
    assert 15 < clock.now < 60


def test_a_ray_that_stands_still_while_a_role_is_away_is_an_error(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Names cannot be found for want of the head, not of the actor: no waiting for `restart_timeout`."""
    gate = threading.Event()
    monkeypatch.setattr(ray_handles, "_UNREACHABLE_S", ray_handles._DOUBT_S + 0.05)
    monkeypatch.setattr(ray_handles.ray, "nodes", lambda: gate.wait(20))
    with pytest.raises(RayUnreachableError, match="'planner' was away"):
        caller(monkeypatch, failing(ray_handles._Away("no actor")))("planner", "plan", ())
    assert clock.now < 15
    gate.set()


def test_a_look_into_ray_that_never_returns_is_an_error() -> None:
    gate = threading.Event()
    with pytest.raises(RayUnreachableError, match="looking up 'run/planner'"):
        bounded(lambda: gate.wait(20), 0.05, "looking up 'run/planner'")
    gate.set()
    assert bounded(lambda: 3, 10, "") == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}[1], 10, "")


def test_a_stopped_caller_ends_every_wait() -> None:
    stopped = RayCaller("run", "namespace", 120.0)
    stopped.stop()
    with pytest.raises(RuntimeFailure, match="closed"):
        stopped("loader/0", "take", ())
