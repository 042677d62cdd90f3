"""Tiny roles with the shape of the real ones: a planner that counts, a constructor that fills arrays with the count."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from megascale_lightning.errors import DataError, NotOpenError
from megascale_lightning.runtime.plan import RoleRecipe, RuntimePlan
from megascale_lightning.types import PIECE, BatchWindow, Call, LoaderState, NotYet

SIZE = 50_000
COUNT = 4


def state(step: int) -> LoaderState:
    nothing = np.zeros(0, PIECE)
    return LoaderState(step=step, ended=False, sources=nothing, dropped=(), carry=nothing, certificate=bytes(32))


class FakeLoader:
    """Describes step t as t + seed, and takes arrays full of it. Step -13 is rotten."""

    def __init__(self, seed: int, hold: str | None = None) -> None:
        self.seed = seed
        self.hold = hold
        self.calls = 0

    def describe(self, step: int) -> int:
        self.calls += 1
        return step + self.seed

    def take(self, step: int, group: int) -> np.ndarray:
        if self.hold is not None:  # a file that tells the loader to be slow
            while os.path.exists(self.hold):
                time.sleep(0.01)
        return np.full(SIZE, step + self.seed + 1000 * group, np.int32)

    def rotten(self, what: str) -> None:
        raise DataError(f"source 'web', unit 3, row 4: {what}")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stats(self) -> dict[str, Any]:
        return {"calls": self.calls, "pid": os.getpid()}


class FakePlanner:
    """Gives step t the values the loaders describe; never further than `ahead` steps past the slowest client."""

    def __init__(self, loaders: tuple[str, ...], ahead: int = 8) -> None:
        self.loaders = loaders
        self.ahead = ahead
        self.marks: dict[tuple[str, str], dict[int, int]] = {}
        self.known: dict[tuple[int, str], int] = {}
        self.asked: set[tuple[int, str]] = set()
        self.wanted: list[Call] = []

    def open(self, stream: str, generation: str, client: int, start: LoaderState | None) -> None:
        self.marks.setdefault((stream, generation), {})[client] = (start.step if start else 0) - 1

    def close(self, stream: str, generation: str, client: int) -> None:
        self.marks.get((stream, generation), {}).pop(client, None)

    def consumed(self, stream: str, generation: str, marks: dict[int, int]) -> None:
        held = self.marks.get((stream, generation), {})
        for client, step in marks.items():
            if client in held:
                held[client] = max(held[client], step)

    def plan(self, stream: str, generation: str, first_step: int, count: int) -> Any:
        held = self.marks.get((stream, generation))
        if not held:
            raise NotOpenError(f"generation {generation} of {stream} is not open")
        if first_step > min(held.values()) + 1 + self.ahead:
            return NotYet(f"step {first_step} is too far ahead of {held}")
        keys = [(step, name) for step in range(first_step, first_step + count) for name in self.loaders]
        for key in keys:
            if key not in self.known and key not in self.asked:
                self.asked.add(key)
                self.wanted.append(Call(key[1], "describe", (key[0],)))
        if any(key not in self.known for key in keys):
            return NotYet("parts are being read")
        return [[self.known[step, name] for name in self.loaders] for step in range(first_step, first_step + count)]

    def wants(self) -> list[Call]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def answered(self, call: Call, result: Any) -> None:
        key = (call.args[0], call.target)
        self.asked.discard(key)
        if not isinstance(result, Exception):
            self.known[key] = result

    def stats(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "torch": "torch" in sys.modules, "known": len(self.known)}


class FakeConstructor:
    """Builds the windows of `COUNT` steps; keeps one until every client said it has consumed it."""

    def __init__(self, loaders: tuple[str, ...]) -> None:
        self.loaders = loaders
        self.windows: dict[tuple[Any, ...], Any] = {}
        self.marks: dict[tuple[str, str], dict[int, int]] = {}
        self.wanted: list[Call] = []

    def fetch(self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int) -> Any:
        self.consumed(stream, generation, client, consumed)
        key = (stream, generation, group, first_step)
        if key not in self.windows:
            self.windows[key] = {}
            self.wanted.append(Call("planner", "plan", (stream, generation, first_step, COUNT)))
        found = self.windows[key]
        if isinstance(found, BatchWindow):
            return found
        if isinstance(found, Exception):
            del self.windows[key]
            raise found
        return NotYet(found.get("why", "the window is being built"))

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        marks = self.marks.setdefault((stream, generation), {})
        if step > marks.get(client, -2):
            marks[client] = step
            self.wanted.append(Call("planner", "consumed", (stream, generation, {client: step})))
            low = min(marks.values())
            for key in [k for k in self.windows if k[:2] == (stream, generation) and k[3] + COUNT - 1 <= low]:
                del self.windows[key]

    def close(self, stream: str, generation: str, client: int) -> None:
        self.marks.get((stream, generation), {}).pop(client, None)

    def wants(self) -> list[Call]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def answered(self, call: Call, result: Any) -> None:
        if call.method == "consumed":
            return
        if call.method == "plan":
            stream, generation, first_step, _ = call.args
            for key in [k for k in self.windows if (k[0], k[1], k[3]) == (stream, generation, first_step)]:
                self._planned(key, call, result)
            return
        step, group = call.args
        for key, found in self.windows.items():
            if isinstance(found, dict) and key[2] == group and (step, call.target) in found.get("need", ()):
                found["need"].discard((step, call.target))
                found["got"][step, call.target] = result
                if not found["need"]:
                    self.windows[key] = _window(key, found["got"])

    def _planned(self, key: tuple[Any, ...], call: Call, result: Any) -> None:
        if isinstance(self.windows[key], BatchWindow):
            return
        if isinstance(result, NotYet):
            self.windows[key]["why"] = result.reason
            self.wanted.append(call)
        elif isinstance(result, Exception):
            self.windows[key] = result
        else:
            steps = range(key[3], key[3] + COUNT)
            need = {(step, name) for step in steps for name in self.loaders}
            self.windows[key] = {"need": set(need), "got": {}}
            self.wanted += [Call(name, "take", (step, key[2])) for step, name in sorted(need)]

    def stats(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "torch": "torch" in sys.modules, "windows": len(self.windows)}


def _window(key: tuple[Any, ...], got: dict[Any, Any]) -> Any:
    for value in got.values():
        if isinstance(value, Exception):
            return value
    stream, generation, _, first_step = key
    return BatchWindow(
        stream=stream,
        generation=generation,
        first_step=first_step,
        num_steps=COUNT,
        num_microbatches=1,
        tokens={"input_ids": np.concatenate([got[name] for name in sorted(got)])},
        samples={},
        pieces=np.zeros(0, PIECE),
        row_offsets=np.zeros(1, np.int64),
        step_loss_tokens=np.zeros(COUNT, np.int64),
        states=tuple(state(step) for step in range(first_step, first_step + COUNT + 1)),
    )


def expected(first_step: int, group: int, num_loaders: int) -> np.ndarray:
    """What a window of the fake plan holds: one number for each (step, loader)."""
    steps = range(first_step, first_step + COUNT)
    return np.array([step + seed * 100 + 1000 * group for step in steps for seed in range(num_loaders)])


def numbers(window: BatchWindow) -> np.ndarray:
    ids = window.tokens["input_ids"].reshape(-1, SIZE)
    assert (ids == ids[:, :1]).all()
    return ids[:, 0]


def fake_plan(run: str = "run", num_loaders: int = 2, ahead: int = 8, hold: str | None = None) -> RuntimePlan:
    names = tuple(f"loader/{index}" for index in range(num_loaders))
    return RuntimePlan(
        run=run,
        planner=RoleRecipe(name="planner", factory=FakePlanner, kwargs={"loaders": names, "ahead": ahead}),
        constructor=RoleRecipe(name="constructor/0", factory=FakeConstructor, kwargs={"loaders": names}),
        loaders=tuple(
            RoleRecipe(name=name, factory=FakeLoader, kwargs={"seed": index * 100, "hold": hold})
            for index, name in enumerate(names)
        ),
    )


class Gated:
    """A role without calls: `get(key)` waits for `put(key, value)`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.threads: set[int] = set()
        self.gets = 0

    def get(self, key: str) -> Any:
        self.threads.add(threading.get_ident())
        self.gets += 1
        return self.values.get(key, NotYet(f"nothing under {key}"))

    def put(self, key: str, value: Any) -> None:
        self.threads.add(threading.get_ident())
        self.values[key] = value

    def fail(self) -> None:
        raise DataError("bad record")


class Asking:
    """A role that wants one call for each key, and gives what came back."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.wanted: list[Call] = []
        self.asked: set[str] = set()

    def get(self, key: str) -> Any:
        if key in self.known:
            if isinstance(self.known[key], Exception):
                raise self.known[key]
            return self.known[key]
        if key not in self.asked:
            self.asked.add(key)
            self.wanted.append(Call("other", "value", (key,)))
        return NotYet("asked for it")

    def wants(self) -> list[Call]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def answered(self, call: Call, result: Any) -> None:
        if result == "poison":
            raise ValueError("cannot take this")
        if isinstance(result, NotYet):
            self.wanted.append(call)
        else:
            self.known[call.args[0]] = result
