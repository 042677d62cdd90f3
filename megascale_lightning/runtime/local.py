"""`LocalRuntime`: every role in this process, run inline by whoever asks; for notebooks, debuggers and tests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from megascale_lightning.errors import RuntimeFailure
from megascale_lightning.runtime.plan import RuntimePlan, ToldPlanner
from megascale_lightning.types import BatchWindow, Call, Change, LoaderState, NotYet

__all__ = ["Fault", "LocalRuntime"]

_BUSY_S: Final = 1.0
_MOMENT_S: Final = 0.05

Fault = Callable[[str, str, tuple[Any, ...]], None]
"""`fault(target, method, args)` runs before each call: it may raise in the call's place, or `kill` a role."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that a role wants, until it is answered."""

    asker: str
    call: Call
    refusal: NotYet | None = None
    """What its target said, if nothing changed since."""


class LocalRuntime:
    """Runs the roles of a plan under one lock. Thread-safe; made for a few loaders of one process, not for speed.

    A fetch makes the calls that the roles want, one after another, until its answer is there or nothing moves any more;
    then it waits until another thread changes something, and says `NotYet` after `park_s` seconds.
    """

    def __init__(self, plan: RuntimePlan, *, park_s: float = 1.0, fault: Fault | None = None) -> None:
        """Make all roles.

        Args:
            plan: The roles.
            park_s: How long a fetch waits for other threads, in seconds.
            fault: For tests: may raise before a call, and what it raises is the call's result.
        """
        self._recipes = {recipe.name: recipe for recipe in plan.recipes()}
        self._planner, self._constructor = plan.planner.name, plan.constructor.name
        self._told = ToldPlanner(plan.planner)
        self._park_s = park_s
        self._fault = fault
        self._roles: dict[str, Any] = {name: recipe.build() for name, recipe in self._recipes.items()}
        self._pending: list[_Pending] = []
        self._notices: deque[tuple[str, str, tuple[Any, ...]]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._version = 0
        self._restarts = dict.fromkeys(self._recipes, 0)
        self._closed = False

    def port(self) -> LocalPort:
        """A port; all ports of a runtime are the same."""
        return LocalPort(self)

    def end_roles(self) -> None:
        """See `Runtime.end_roles`: there is nothing else here to end."""
        self.close()

    def close(self) -> None:
        """Drop the roles; whoever waits gets a `RuntimeFailure`. A call that does not come back keeps its roles."""
        self._closed = True
        if not self._changed.acquire(timeout=_BUSY_S):
            return  # inside a transform that may never end; the thread that is in there finds the runtime closed
        try:
            self._pending.clear()
            for role in self._roles.values():
                if hasattr(role, "shutdown"):
                    role.shutdown()
            self._roles.clear()
            self._changed.notify_all()
        finally:
            self._changed.release()

    def stats(self) -> dict[str, Any]:
        """Role name -> its `stats()`, where it has them, and how often it was replaced."""
        with self._changed:
            found: dict[str, Any] = {}
            for name, role in self._roles.items():
                found[name] = {"restarts": self._restarts[name]}
                if hasattr(role, "stats"):
                    found[name]["role"] = role.stats()
            return found

    def kill(self, name: str) -> None:
        """Replace a role by a fresh one, as if its process had died: the calls it was waiting for are forgotten."""
        with self._changed:
            recipe = self._told.recipe() if name == self._planner else self._recipes[name]
            self._roles[name] = recipe.build()
            self._restarts[name] += 1
            self._pending = [pending for pending in self._pending if pending.asker != name]
            self._touch()

    def ask(self, target: str, method: str, *args: Any) -> Any:
        """Call a method of a role; while it says `NotYet`, make the calls that the roles want, then wait for others.

        Raises:
            Exception: What the role raised.
            RuntimeFailure: The runtime is closed.
        """
        deadline = time.monotonic() + self._park_s
        with self._changed:
            while True:
                self._deliver()
                answer = self._invoke(target, method, args)
                if not isinstance(answer, NotYet):
                    self._touch()
                    return answer
                if self._advance(target):
                    continue
                if not self._wait_for_others(deadline):
                    self._hand_back()
                    return self._invoke(target, method, args)

    def tell(self, target: str, method: str, *args: Any) -> None:
        """Call a method of a role for what it changes."""
        with self._changed:
            self._invoke(target, method, args)
            self._touch()

    def notify(self, target: str, method: str, *args: Any) -> None:
        """As `tell`, soon: a call that is being made is not waited for, since it may be a slow transform."""
        self._notices.append((target, method, args))
        # Who holds the lock delivers it; the moment is for one who is about to let go of it.
        if self._changed.acquire(timeout=_MOMENT_S):
            try:
                self._deliver()
            finally:
                self._changed.release()

    def _deliver(self) -> None:
        while self._notices:
            target, method, args = self._notices.popleft()
            self._invoke(target, method, args)
            self._touch()

    def _wait_for_others(self, deadline: float) -> bool:
        """Let other threads in; False when nothing changed in time."""
        seen = self._version
        return self._changed.wait_for(lambda: bool(self._notices) or self._version != seen, deadline - time.monotonic())

    def _touch(self) -> None:
        """Something changed: calls that were refused may be answered now, by whichever thread comes first."""
        self._version += 1
        for pending in self._pending:
            pending.refusal = None
        self._changed.notify_all()

    def _invoke(self, target: str, method: str, args: tuple[Any, ...]) -> Any:
        if self._closed:
            raise RuntimeFailure("the runtime is closed")
        if self._fault is not None:
            self._fault(target, method, args)
        return getattr(self._roles[target], method)(*args)

    def _advance(self, waiting_for: str) -> bool:
        """Make wanted calls until one for `waiting_for` is answered; False when nothing can move."""
        tried = True
        while tried:
            tried = False
            self._collect()
            for pending in list(self._pending):
                if pending.refusal or pending not in self._pending:
                    continue
                tried = True  # even a refused call may have made its target want something
                if self._make(pending) and pending.asker == waiting_for:
                    return True
        return False

    def _hand_back(self) -> None:
        """Tell the askers of refused calls why they wait, so that they can say it or want something else."""
        refused = [pending for pending in self._pending if pending.refusal]
        self._pending = [pending for pending in self._pending if not pending.refusal]
        for pending in refused:
            self._roles[pending.asker].answered(pending.call, pending.refusal)

    def _collect(self) -> None:
        for name, role in self._roles.items():
            if hasattr(role, "wants"):
                self._pending += [_Pending(name, call) for call in role.wants()]

    def _make(self, pending: _Pending) -> bool:
        """Make one call and hand the answer back; False when its target said `NotYet`."""
        call = pending.call
        result: Any
        try:
            result = self._invoke(call.target, call.method, call.args)
        except Exception as error:
            result = error
        if pending not in self._pending:
            return True  # the fault replaced the asker
        if isinstance(result, NotYet):
            pending.refusal = result
            return False
        self._pending.remove(pending)
        self._roles[pending.asker].answered(call, result)
        self._touch()
        return True


class LocalPort:
    """The `BatchPort` of a `LocalRuntime`."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime
        self._planner, self._constructor = runtime._planner, runtime._constructor

    def open(self, stream: str, generation: str, client: int, state: LoaderState | None) -> None:
        """See `BatchPort.open`."""
        self._runtime.tell(self._planner, "open", stream, generation, client, state)

    def fetch(
        self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int
    ) -> BatchWindow | NotYet:
        """See `BatchPort.fetch`."""
        answer: BatchWindow | NotYet = self._runtime.ask(
            self._constructor, "fetch", stream, generation, group, client, first_step, consumed
        )
        return answer

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        """See `BatchPort.consumed`."""
        self._runtime.notify(self._constructor, "consumed", stream, generation, client, step)

    def set_changes(self, stream: str, generation: str, changes: tuple[Change, ...]) -> None:
        """See `BatchPort.set_changes`."""
        self._runtime._told.tell(stream, generation, changes)
        self._runtime.tell(self._planner, "set_changes", stream, generation, changes)

    def close(self, stream: str, generation: str, client: int) -> None:
        """See `BatchPort.close`."""
        self._runtime.tell(self._constructor, "close", stream, generation, client)
        self._runtime.tell(self._planner, "close", stream, generation, client)
