"""`RoleHost`: one thread that runs one sans-IO role, parks requests the role may not serve yet, and makes its calls."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from megascale_lightning.errors import RuntimeFailure
from megascale_lightning.types import Call, NotYet

__all__ = ["Caller", "RoleHost"]

logger = logging.getLogger(__name__)

_SATURATED: Final = NotYet("too many requests wait at this role already")
_HASTY_S: Final = 0.05
"""A `NotYet` that comes sooner is held back this long, so that two roles cannot spin."""


class Caller(Protocol):
    """Makes one call on another role: blocks, and retries over deaths."""

    def __call__(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        """Return what the role answered, which may be `NotYet`; raise its own error, or a `RuntimeFailure`."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    method: str
    args: tuple[Any, ...]
    deadline: float
    future: Future[Any] | None
    """None: nobody waits for the answer."""
    answer: NotYet = _SATURATED
    tried: int = -1
    """The version of the role that gave `answer`."""


@dataclass(slots=True, eq=False)
class _Result:
    call: Call
    value: Any


class RoleHost:
    """Runs one role on one thread of its own.

    Methods may be called from any thread. The role answers, raises, or says `NotYet`; then the request is parked and
    tried again after everything that may have changed the role: another request, a notice, the result of a call. A role
    with `wants()` and `answered(call, result)` has its calls made on a small pool of threads.
    """

    def __init__(
        self, role: Any, *, name: str = "role", caller: Caller | None = None, max_parked: int = 24, max_calls: int = 16
    ) -> None:
        """Start the thread.

        Args:
            role: The sans-IO role; nobody else may touch it from now on.
            name: For messages and thread names.
            caller: Makes the role's calls; needed where the role has `wants`.
            max_parked: Requests that may wait at once; further ones are answered `NotYet` without waiting.
            max_calls: Calls made at the same time.
        """
        self._role = role
        self._name = name
        self._wants: Callable[[], list[Call]] | None = getattr(role, "wants", None)
        self._inbox: queue.SimpleQueue[_Request | _Result | None] = queue.SimpleQueue()
        self._parked: list[_Request] = []
        self._max_parked = max_parked
        self._version = 0
        self._error: BaseException | None = None
        self._gate = threading.Lock()
        self._stopping = threading.Event()
        self._calls = _CallPool(name, caller, self._inbox.put, self._stopping, max_calls)
        self._counts = {"requests": 0, "notices": 0, "results": 0, "not_yet": 0}
        self._thread = threading.Thread(target=self._run, name=f"{name}-host", daemon=True)
        self._thread.start()

    def request(self, method: str, *args: Any, wait_s: float = 1.0) -> Any:
        """Ask the role and wait for its answer, for `wait_s` seconds at most while it says `NotYet`.

        Raises:
            RuntimeFailure: The host is stopped.
            Exception: What the role's method raised.
        """
        future: Future[Any] = Future()
        self._put(_Request(method, args, time.monotonic() + wait_s, future))
        return future.result()

    def notify(self, method: str, *args: Any) -> None:
        """Tell the role something, without waiting; what it answers is dropped, what it raises is logged."""
        self._put(_Request(method, args, 0.0, None))

    def stats(self) -> dict[str, Any]:
        """Counters of the host and, under "role", those of the role where it has `stats()`."""
        found: dict[str, Any] = {**self._counts, "parked": len(self._parked), "calls": self._calls.num_open}
        if hasattr(self._role, "stats"):
            found["role"] = self.request("stats")
        return found

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the threads and fail what is parked; a second call does nothing more.

        A method or call that is running is waited for `timeout_s` at most; its thread is a daemon.
        """
        with self._gate:
            if not self._stopping.is_set():
                self._stopping.set()
                self._inbox.put(None)
                self._calls.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _put(self, request: _Request) -> None:
        # Under the gate, so that nothing that somebody waits for comes after the None that ends the thread.
        with self._gate:
            if self._stopping.is_set():
                raise RuntimeFailure(f"role {self._name!r} is stopped")
            self._inbox.put(request)

    def _run(self) -> None:
        # What came is gone with the call that handles it: a host that waits keeps no payload alive.
        while self._handle_all(self._receive()):
            self._expire_parked()

    def _handle_all(self, messages: list[_Request | _Result | None]) -> bool:
        """Handle what came; False once the host is to end."""
        for message in messages:
            if message is None:
                self._fail_parked(RuntimeFailure(f"role {self._name!r} was stopped while a request waited for it"))
                return False
            self._handle(message)
        if messages:
            self._retry_parked()
            self._issue_calls()
        return True

    def _receive(self) -> list[_Request | _Result | None]:
        """All messages there are; waits for the first one until a parked request runs out of time."""
        timeout = None
        if self._parked:
            timeout = max(0.0, min(request.deadline for request in self._parked) - time.monotonic())
        found: list[_Request | _Result | None] = []
        try:
            found.append(self._inbox.get(timeout=timeout))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    def _handle(self, message: _Request | _Result) -> None:
        self._version += 1
        if isinstance(message, _Result):
            self._counts["results"] += 1
            try:
                self._role.answered(message.call, message.value)
            except BaseException as error:
                self._break(error, f"it could not take the answer of {message.call.target}.{message.call.method}")
            return
        self._counts["requests" if message.future else "notices"] += 1
        if self._try(message):
            return
        if len(self._parked) < self._max_parked and message.deadline > time.monotonic():
            self._parked.append(message)
        else:
            self._answer_not_yet(message)

    def _try(self, request: _Request) -> bool:
        """Call the role for the request; True when that is settled."""
        try:
            answer = getattr(self._role, request.method)(*request.args)
        except BaseException as error:
            if request.future is None:
                logger.warning("%s: %s() failed: %r", self._name, request.method, error)
            else:
                request.future.set_exception(error)
            return True
        if request.future is None:
            return True
        if not isinstance(answer, NotYet):
            request.future.set_result(answer)
            return True
        if self._error is not None:
            request.future.set_exception(self._error)
            return True
        request.answer, request.tried = answer, self._version
        return False

    def _retry_parked(self) -> None:
        while stale := [request for request in self._parked if request.tried != self._version]:
            settled = {id(request) for request in stale if self._try(request)}
            self._parked = [request for request in self._parked if id(request) not in settled]
            self._version += bool(settled)

    def _expire_parked(self) -> None:
        now = time.monotonic()
        late = [request for request in self._parked if request.deadline <= now]
        if late:
            self._parked = [request for request in self._parked if request.deadline > now]
            for request in late:
                self._answer_not_yet(request)

    def _answer_not_yet(self, request: _Request) -> None:
        self._counts["not_yet"] += 1
        if request.future is not None:
            request.future.set_result(request.answer)

    def _issue_calls(self) -> None:
        if self._wants is None:
            return
        try:
            for call in self._wants():
                self._calls.submit(call)
        except BaseException as error:
            self._break(error, "it could not say what it wants")

    def _break(self, error: BaseException, what: str) -> None:
        """Keep the error for whoever would wait from now on: the role has lost something that may never come again."""
        logger.error("role %s: %s: %r", self._name, what, error)
        self._error = error
        self._fail_parked(error)

    def _fail_parked(self, error: BaseException) -> None:
        waiting, self._parked = self._parked, []
        for request in waiting:
            if request.future is not None:
                request.future.set_exception(error)


class _CallPool:
    """Daemon threads, started as needed, that make calls and put what comes back into the inbox."""

    def __init__(
        self,
        name: str,
        caller: Caller | None,
        deliver: Callable[[_Result], None],
        stopping: threading.Event,
        max_calls: int,
    ) -> None:
        self._name = name
        self._caller = caller
        self._deliver = deliver
        self._stopping = stopping
        self._max_calls = max_calls
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self.num_open = 0
        """Calls that have not been answered."""

    def submit(self, call: Call) -> None:
        if self._caller is None:
            raise RuntimeFailure(f"role {self._name!r} wants {call.target}.{call.method}, but was given no caller")
        with self._lock:
            self.num_open += 1
            grow = self.num_open > self._threads and self._threads < self._max_calls
            self._threads += grow
            number = self._threads
        self._queue.put(call)
        if grow:
            threading.Thread(target=self._run, name=f"{self._name}-call-{number}", daemon=True).start()

    def stop(self) -> None:
        for _ in range(self._max_calls):
            self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None and not self._stopping.is_set():
            value = self._make(call)
            with self._lock:
                self.num_open -= 1
            self._deliver(_Result(call, value))
            del call, value  # an idle thread must not keep a payload alive

    def _make(self, call: Call) -> Any:
        assert self._caller is not None
        begun = time.monotonic()
        try:
            value = self._caller(call.target, call.method, call.args)
        except BaseException as error:
            return error
        if isinstance(value, NotYet) and time.monotonic() - begun < _HASTY_S:
            self._stopping.wait(_HASTY_S)
        return value
