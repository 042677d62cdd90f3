"""`RoleHost`: parking, retries, saturation, errors, end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megascale_lightning.errors import DataError, RuntimeFailure
from megascale_lightning.runtime.host import RoleHost
from megascale_lightning.types import NotYet
from tests.runtime.fakes import Asking, Gated

LONG = 30.0


def until(condition: Any, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def parked(host: RoleHost, count: int) -> None:
    until(lambda: host.stats()["parked"] == count)


def test_a_request_is_parked_until_another_one_changes_the_role() -> None:
    role = Gated()
    host = RoleHost(role)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(host.request, "get", "a", wait_s=LONG) for _ in range(3)]
        parked(host, 3)
        host.request("put", "a", 5)
        assert [future.result(5) for future in waiting] == [5, 5, 5]
    assert host.stats()["parked"] == 0
    assert len(role.threads) == 1
    assert threading.get_ident() not in role.threads
    host.stop()


def test_a_notice_unparks_too() -> None:
    host = RoleHost(Gated())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.request, "get", "a", wait_s=LONG)
        parked(host, 1)
        host.notify("put", "a", 7)
        assert waiting.result(5) == 7
    host.stop()


def test_not_yet_comes_after_the_wait_and_says_why() -> None:
    role = Gated()
    host = RoleHost(role)
    begun = time.monotonic()
    assert host.request("get", "a", wait_s=0.2) == NotYet("nothing under a")
    assert 0.19 <= time.monotonic() - begun < 5
    assert role.gets == 1, "time alone is no reason to ask the role again"
    host.stop()


def test_a_saturated_host_answers_at_once_and_goes_on_serving() -> None:
    host = RoleHost(Gated(), max_parked=2)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(host.request, "get", "a", wait_s=LONG) for _ in range(2)]
        parked(host, 2)
        begun = time.monotonic()
        assert isinstance(host.request("get", "b", wait_s=LONG), NotYet)
        assert time.monotonic() - begun < 5
        host.request("put", "a", 1)
        assert [future.result(5) for future in waiting] == [1, 1]
    host.stop()


def test_an_error_goes_to_its_asker_alone() -> None:
    host = RoleHost(Gated())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.request, "get", "a", wait_s=LONG)
        parked(host, 1)
        with pytest.raises(DataError, match="bad record"):
            host.request("fail")
        with pytest.raises(AttributeError):
            host.request("no_such_method")
        host.notify("fail")
        host.request("put", "a", 1)
        assert waiting.result(5) == 1
    host.stop()


def test_calls_are_made_and_answered() -> None:
    threads = set()

    def caller(target: str, method: str, args: tuple[Any, ...]) -> Any:
        threads.add(threading.current_thread().name)
        assert (target, method) == ("other", "value")
        if args[0] == "bad":
            raise DataError("bad record")
        return args[0] * 2

    host = RoleHost(Asking(), caller=caller, name="asker")
    assert host.request("get", "ab", wait_s=LONG) == "abab"
    with pytest.raises(DataError, match="bad record"):
        host.request("get", "bad", wait_s=LONG)
    assert all(name.startswith("asker-call") for name in threads)
    host.stop()


def test_a_slow_call_holds_nobody_else_back() -> None:
    gate = threading.Event()

    def caller(target: str, method: str, args: tuple[Any, ...]) -> Any:
        if args[0] == "slow":
            gate.wait(LONG)
        return args[0]

    host = RoleHost(Asking(), caller=caller)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.request, "get", "slow", wait_s=LONG)
        parked(host, 1)
        assert host.request("get", "fast", wait_s=LONG) == "fast"
        gate.set()
        assert waiting.result(5) == "slow"
    host.stop()


def test_a_refused_call_is_repeated_without_spinning() -> None:
    calls = []

    def caller(target: str, method: str, args: tuple[Any, ...]) -> Any:
        calls.append(args)
        return NotYet("busy")

    host = RoleHost(Asking(), caller=caller)
    assert isinstance(host.request("get", "a", wait_s=0.5), NotYet)
    assert 2 <= len(calls) <= 12
    host.stop()


def test_an_error_in_answered_fails_who_waits_and_not_the_thread() -> None:
    host = RoleHost(Asking(), caller=lambda target, method, args: "poison" if args[0] == "p" else args[0])
    with pytest.raises(ValueError, match="cannot take this"):
        host.request("get", "p", wait_s=LONG)
    # An answer is lost: whoever would wait for it hears of it at once; what the role can serve it serves.
    with pytest.raises(ValueError, match="cannot take this"):
        host.request("get", "p", wait_s=LONG)
    assert host.stats()["results"] == 1
    host.stop()


def test_wants_without_a_caller_is_an_error_for_the_asker() -> None:
    host = RoleHost(Asking())
    with pytest.raises(RuntimeFailure, match="no caller"):
        host.request("get", "a", wait_s=LONG)
    host.stop()


def test_stop_fails_who_waits_and_ends_the_threads() -> None:
    host = RoleHost(Asking(), caller=lambda target, method, args: args[0], name="stopped")
    assert host.request("get", "b", wait_s=LONG) == "b"
    gated = RoleHost(Gated(), name="stopped")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gated.request, "get", "a", wait_s=LONG)
        parked(gated, 1)
        gated.stop()
        with pytest.raises(RuntimeFailure, match="was stopped"):
            waiting.result(5)
    host.stop()
    host.stop()
    with pytest.raises(RuntimeFailure, match="is stopped"):
        host.request("get", "b")
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("stopped")])


def test_nothing_keeps_an_answer_alive() -> None:
    class Payload:
        pass

    host = RoleHost(Gated())
    host.request("put", "a", Payload())
    found = weakref.ref(host.request("get", "a"))
    assert found() is not None
    host.request("put", "a", None)
    gc.collect()
    until(lambda: found() is None)
    host.stop()


def test_a_host_that_waits_keeps_nothing_of_what_a_call_brought() -> None:
    class Payload:
        pass

    class Dropping(Asking):
        def answered(self, call: Any, result: Any) -> None:
            self.known[call.args[0]] = "dropped"

    brought: list[weakref.ref[Payload]] = []

    def bring(*_: Any) -> Payload:
        payload = Payload()
        brought.append(weakref.ref(payload))
        return payload

    host = RoleHost(Dropping(), caller=bring)
    assert host.request("get", "a", wait_s=LONG) == "dropped"
    until(lambda: brought[0]() is None)
    host.stop()
