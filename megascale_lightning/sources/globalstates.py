"""The global random states of random, numpy and torch: lent to the user's code, seeded, and put back (law 9)."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

__all__ = ["OwnStates", "lent_states", "seeded"]

_T = TypeVar("_T")

_GLOBAL_STATES = threading.RLock()


class _States(NamedTuple):
    python: Any
    numpy: Any
    torch: Any
    """None where torch was not loaded."""


@contextmanager
def lent_states() -> Iterator[None]:
    """Alone with the global random states, which are put back at the end."""
    with _GLOBAL_STATES:
        before = _current()
        try:
            yield
        finally:
            _restore(before)


def seeded(seed: int, call: Callable[[], _T]) -> _T:
    """What the call gives with all global states seeded. To be used within `lent_states`."""
    loaded = _loaded_torch()
    _seed_states(seed)
    found = call()
    if loaded is not _loaded_torch():
        # The first call imported torch: it drew from an unseeded generator, a replay would not.
        _seed_states(seed)
        found = call()
    return found


class OwnStates:
    """Random states of code that is called now and then, and draws as if nobody else drew in between.

    Args:
        seed: What they begin with.
    """

    def __init__(self, seed: int) -> None:
        self.torch_came = False
        """The code imported torch, and may have drawn from it unseeded: only a new start replays."""
        self._seed = seed
        self._kept: _States | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Alone with the global random states, which are this object's, and are put back at the end."""
        with lent_states():
            loaded = _loaded_torch()
            if self._kept is None or (self._kept.torch is None and loaded is not None):
                _seed_states(self._seed)
            if self._kept is not None:
                _restore(self._kept)
            try:
                yield
            finally:
                self._kept = _current()
                self.torch_came = self.torch_came or _loaded_torch() is not loaded


def _current() -> _States:
    torch = _loaded_torch()
    bits = None if torch is None else torch.default_generator.get_state()
    return _States(random.getstate(), np.random.get_state(), bits)  # noqa: NPY002


def _restore(states: _States) -> None:
    random.setstate(states.python)
    np.random.set_state(states.numpy)  # noqa: NPY002
    if states.torch is not None:
        _loaded_torch().default_generator.set_state(states.torch)


def _seed_states(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - what the user's code draws from
    torch = _loaded_torch()
    if torch is not None:
        torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def _loaded_torch() -> Any:
    """Torch if somebody imported it, whole."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None
