"""The actors: each holds one role. Imports nothing heavy, since every import is paid in every actor process."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from megascale_lightning.errors import MegaScaleError, RuntimeFailure
from megascale_lightning.runtime.host import RoleHost
from megascale_lightning.runtime.plan import RoleRecipe
from megascale_lightning.runtime.ray_handles import RayCaller
from megascale_lightning.runtime.ray_orphans import end_with_raylet
from megascale_lightning.sources.stores.secrets import remember_secrets
from megascale_lightning.types import NotYet

__all__ = ["ConstructorActor", "LoaderActor", "PlannerActor", "RoleActor", "Wiring", "actor_class"]

_RESERVE: Final = 4
"""Threads of the group `ask` that parked requests leave free."""

_ASK_THREADS: Final = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What an actor needs to find the others."""

    run: str
    namespace: str
    restart_timeout: float
    sys_path: tuple[str, ...]
    """Where the process that made the recipes imports from."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables to set: an argument, since Ray writes those of a `runtime_env` to its logs."""

    def enter(self) -> None:
        """Make this process import what that process can import, keep off the GPUs, and not outlive its Ray."""
        end_with_raylet()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.update(self.environment)
        remember_secrets(list(self.environment.values()))
        # In that order, so that a name means the same module here as there.
        there = [entry for entry in self.sys_path if os.path.exists(entry)]
        sys.path[:] = [*there, *(entry for entry in sys.path if entry not in there)]


class RoleActor(ABC):
    """Holds a role, or the reason why there is none, which every request then gets.

    Args:
        name: Name of the role.
        recipe: Pickled `RoleRecipe`, or pickled exception.
        wiring: How the others are found.
    """

    def __init__(self, name: str, recipe: bytes, wiring: Wiring) -> None:
        self._name = name
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        wiring.enter()
        try:
            found = pickle.loads(recipe)
            if isinstance(found, Exception):
                raise found
            self._begin(found, wiring)
        except MegaScaleError as error:
            self._failure = error
        except Exception as error:
            self._failure = RuntimeFailure(
                f"role {name!r} cannot be made in its process: {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error

    @abstractmethod
    def _begin(self, recipe: RoleRecipe, wiring: Wiring) -> None:
        """Make the role."""

    @abstractmethod
    def _end(self) -> None:
        """End its threads."""

    @abstractmethod
    def _counters(self) -> dict[str, Any]:
        """What it counts."""

    @ray.method(concurrency_group="ctl")
    def ready(self) -> int:
        """The process id, once there is a role; raises why there is none."""
        self._check()
        return os.getpid()

    @ray.method(concurrency_group="ctl")
    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    @ray.method(concurrency_group="ctl")
    def hold(self) -> None:
        """Answer when the actor is stopped: an error before that is its death."""
        self._stopping.wait()

    @ray.method(concurrency_group="ctl")
    def stats(self) -> dict[str, Any]:
        """Counters of the role and its host; `torch`: whether the user's code brought it into this process."""
        self._check()
        return {"pid": os.getpid(), "torch": "torch" in sys.modules, **self._counters()}

    @ray.method(concurrency_group="ctl")
    def stop(self) -> None:
        """End the role's threads; the process ends when its handles go."""
        if self._stopping.is_set():
            return
        try:
            if self._failure is None:
                self._end()
        finally:
            self._stopping.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class PlannerActor(RoleActor):
    """A role with wants of its own, on a `RoleHost`."""

    def _begin(self, recipe: RoleRecipe, wiring: Wiring) -> None:
        self._caller = RayCaller(wiring.run, wiring.namespace, wiring.restart_timeout)
        self._host = RoleHost(recipe.build(), name=recipe.name, caller=self._caller, max_parked=_ASK_THREADS - _RESERVE)

    def _end(self) -> None:
        self._caller.stop()
        self._host.stop(1.0)

    def _counters(self) -> dict[str, Any]:
        return self._host.stats()

    @ray.method(concurrency_group="ask")
    def request(self, method: str, args: tuple[Any, ...], wait_s: float) -> Any:
        """See `RoleHost.request`."""
        self._check()
        return self._host.request(method, *args, wait_s=wait_s)

    @ray.method(concurrency_group="tell")
    def notify(self, method: str, args: tuple[Any, ...]) -> None:
        """See `RoleHost.notify`."""
        if self._failure is None and not self._stopping.is_set():
            self._host.notify(method, *args)


class ConstructorActor(PlannerActor):
    """Shares each built window: every rank that asks gets a reference to the one copy in the node's object store."""

    def _begin(self, recipe: RoleRecipe, wiring: Wiring) -> None:
        self._shared = SharedObjects(ray.put)
        super()._begin(recipe, wiring)

    def _counters(self) -> dict[str, Any]:
        return {**super()._counters(), "shared": len(self._shared)}

    @ray.method(concurrency_group="ask")
    def fetch(self, args: tuple[Any, ...], wait_s: float) -> NotYet | list[Any]:
        """`NotYet`, or a list of one reference to the window."""
        self._check()
        answer = self._host.request("fetch", *args, wait_s=wait_s)
        return answer if isinstance(answer, NotYet) else [self._shared.reference(answer)]


class LoaderActor(RoleActor):
    """A role that only computes, safe to call from two threads: long calls in the group `data`, `take` beside them."""

    def _begin(self, recipe: RoleRecipe, wiring: Wiring) -> None:
        self._role = recipe.build()

    def _end(self) -> None:
        if hasattr(self._role, "shutdown"):
            self._role.shutdown()

    def _counters(self) -> dict[str, Any]:
        return {"role": self._role.stats()} if hasattr(self._role, "stats") else {}

    @ray.method(concurrency_group="data")
    def request(self, method: str, args: tuple[Any, ...], wait_s: float) -> Any:
        """Call the role; `wait_s` is for the likeness with the other actors."""
        self._check()
        try:
            return getattr(self._role, method)(*args)
        except Exception as error:
            make_sendable(error)
            raise


def make_sendable(error: BaseException | None) -> None:
    """Write out what is no UTF-8 in the messages of an error and its causes: Ray never sends what it cannot encode."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.args = tuple(
            text.encode("utf-8", "backslashreplace").decode() if isinstance(text, str) else text for text in error.args
        )
        error = error.__cause__ or error.__context__


class SharedObjects:
    """One reference per object for as long as the object lives elsewhere; thread-safe.

    Args:
        put: Stores an object and gives its reference.
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._lock = threading.Lock()
        self._references: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def reference(self, window: Any) -> Any:
        """The reference for a `BatchWindow`, which cannot be weakly referenced itself: its `pieces` stand for it."""
        owner = window.pieces
        key = id(window)
        with self._lock:
            found = self._references.get(key)
            if found is not None and found[0]() is owner:
                return found[1]
            reference = self._put(window)
            self._references[key] = (weakref.ref(owner, lambda _: self._references.pop(key, None)), reference)
            return reference

    def __len__(self) -> int:
        return len(self._references)


_GROUPS: Final[dict[type[RoleActor], dict[str, int]]] = {
    PlannerActor: {"ask": _ASK_THREADS, "tell": 1, "ctl": 4},
    ConstructorActor: {"ask": _ASK_THREADS, "tell": 1, "ctl": 4},
    LoaderActor: {"data": 2, "take": 1, "ctl": 4},
}


def actor_class(kind: type[RoleActor]) -> Any:
    """The Ray actor class, with threads for its concurrency groups."""
    remote: Any = ray.remote
    return remote(concurrency_groups=_GROUPS[kind])(kind)
