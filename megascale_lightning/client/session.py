"""`LoadingSession`: one config resolved against one trainer, and the runtime that serves it."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from megascale_lightning.checkpointing.fingerprint import check_fingerprint, order_fingerprint, restarted_sources
from megascale_lightning.checkpointing.state import from_json, restart, to_json
from megascale_lightning.client.resolving import Manifests, read_manifests, resolve_streams, runtime_plan, survey
from megascale_lightning.config import LoaderConfig, StreamSpec
from megascale_lightning.errors import ConfigError, StateError
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.stepping import initial_state
from megascale_lightning.runtime.port import BatchPort, Runtime
from megascale_lightning.types import LoaderState

__all__ = ["LoadingSession"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STALL_TIMEOUT_S: Final = 1800.0


class LoadingSession:
    """Reads the file lists, settles the order, starts the roles, and serves the loaders of this process.

    Args:
        config: The settings.
        tree: Places of all ranks; one data-parallel rank when None.
        rank: Global rank of this process.
        accumulate: Microbatches per optimizer step as the trainer has it; None: by `global_batch_size`.
        broadcast: `broadcast(obj)` returns rank 0's object on every rank; None: this process is alone.

    Raises:
        ConfigError: The config does not fit the trainer, or its files are not there.
    """

    def __init__(
        self,
        config: LoaderConfig,
        *,
        tree: ClientPlaceTree | None = None,
        rank: int = 0,
        accumulate: int | None = None,
        broadcast: Callable[[Any], Any] | None = None,
    ) -> None:
        self.config = config
        self.tree = tree or ClientPlaceTree.from_sizes()
        self.stall_timeout = _STALL_TIMEOUT_S
        self._rank = rank
        self._alone = broadcast is None
        share = _Shared(broadcast or _same, leads=self._alone or rank == 0)
        manifests: Manifests = {}
        if share.leads:
            manifests = read_manifests(config)
        surveyed = share(lambda: survey(config, manifests))
        self.run: str = share(lambda: uuid.uuid4().hex[:12])
        self._specs = resolve_streams(config, self.tree, surveyed.windows, accumulate)
        self._digests = surveyed.digests
        self._runtime = _start(config, self._specs, manifests, self.run, share)
        self.port: BatchPort = self._runtime.port()
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._users = 0
        self._pid = os.getpid()
        self._key: _Key | None = None
        self._closed = False

    @classmethod
    def shared(
        cls, config: LoaderConfig, *, tree: ClientPlaceTree | None = None, accumulate: int | None = None
    ) -> LoadingSession:
        """The session of a config in this process; each call is answered by one `leave`."""
        key = _Key(id(config), tree or ClientPlaceTree.from_sizes(), accumulate, os.getpid())
        with _lock:
            session = _sessions.get(key)
            if session is None:
                session = cls(config, tree=tree, accumulate=accumulate)
                session._key = key
                _sessions[key] = session
            session._users += 1
            return session

    def leave(self) -> None:
        """A loader of a shared session is closed; with the last one the runtime ends."""
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._key is not None:
                _sessions.pop(self._key, None)
        self.close()

    def close(self, barrier: Callable[[], None] | None = None) -> None:
        """End what this process started: the other ranks first, then rank 0. A second call does nothing.

        Args:
            barrier: Meets all ranks; None where they cannot meet (an exception) or there is one only.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        leads = self._alone or self._rank == 0
        if not leads:
            self._runtime.close()
        if barrier is not None:
            barrier()
        if leads:
            self._runtime.close()

    def spec(self, stream: str) -> StreamSpec:
        """The resolved stream. Raises: ConfigError: There is none of this name."""
        if stream not in self._specs:
            raise ConfigError(f"there is no stream {stream!r}; the config has {sorted(self._specs)}")
        return self._specs[stream]

    def stats(self) -> dict[str, Any]:
        """Counters of the roles, by role name."""
        return self._runtime.stats()

    def next_number(self, stream: str, rank: int) -> int:
        """How many loaders of this stream and place there were before."""
        self._numbers[stream, rank] += 1
        return self._numbers[stream, rank] - 1

    def initial_state(self, stream: str) -> LoaderState:
        """The state before the first step."""
        return initial_state(self.spec(stream))

    def state_to_json(self, stream: str, state: LoaderState) -> dict[str, Any]:
        """The saved form of a state, with what it needs to be checked at resume."""
        spec = self.spec(stream)
        saved = to_json(state, [source.name for source in spec.sources])
        return saved | {
            "run": self.run,
            "stream": stream,
            "mixture": {
                "unit": spec.mixture_unit,
                "weights": {source.name: float(source.weight) for source in spec.sources},
            },
            "global_batch_size": spec.rows_per_step,
            "fingerprint": self.fingerprint(stream),
            "files": dict(self._digests[stream]),
        }

    def state_from_json(self, stream: str, saved: Mapping[str, Any]) -> LoaderState:
        """The state of a saved form.

        Raises:
            StateError: It is of another version, of other data or of other settings.
        """
        names = [source.name for source in self.spec(stream).sources]
        state = from_json(saved, names)
        if saved.get("stream") != stream:
            raise StateError(f"the state is of stream {saved.get('stream')!r}, this is stream {stream!r}")
        if not saved.get("fingerprint"):
            raise StateError("the loader state is incomplete or damaged: it has no 'fingerprint' of its settings")
        changed = check_fingerprint(saved["fingerprint"], self.fingerprint(stream), force=self.config.force_resume)
        again = restarted_sources(changed, names)
        if not again:
            return state
        logger.warning("force_resume: %s changed, so %s begin their epoch anew", ", ".join(changed), ", ".join(again))
        return restart(state, [names.index(name) for name in again])

    def fingerprint(self, stream: str) -> dict[str, Any]:
        """What the order depends on: dotted name -> plain value."""
        return order_fingerprint(
            self.config,
            stream=stream,
            global_batch_size=self.spec(stream).rows_per_step,
            files=self._digests[stream],
        )


@dataclass(frozen=True)
class _Key:
    config: int
    tree: ClientPlaceTree
    accumulate: int | None
    pid: int


_sessions: dict[_Key, LoadingSession] = {}
_lock = threading.Lock()


class _Shared:
    """Makes something on the leading rank and hands it to all; an error there is raised on every rank."""

    def __init__(self, broadcast: Callable[[Any], Any], *, leads: bool) -> None:
        self._broadcast = broadcast
        self.leads = leads

    def __call__(self, make: Callable[[], T]) -> T:
        made: Any = None
        failed: Exception | None = None
        if self.leads:
            try:
                made = make()
            except Exception as error:
                failed = error
        made, failed = self._broadcast((made, failed))
        if failed is not None:
            raise failed
        found: T = made
        return found


def _same(value: T) -> T:
    return value


def _start(
    config: LoaderConfig, specs: Mapping[str, StreamSpec], manifests: Manifests, run: str, share: _Shared
) -> Runtime:
    if config.runtime == "local":
        from megascale_lightning.runtime.local import LocalRuntime

        return LocalRuntime(runtime_plan(config, specs, manifests or read_manifests(config), run))
    from megascale_lightning.runtime.ray_runtime import RayRuntime

    runtime: RayRuntime | None = None

    def start() -> Any:
        nonlocal runtime
        runtime = RayRuntime.start(
            runtime_plan(config, specs, manifests, run),
            address=config.ray_address,
            ray_init=config.ray_init,
            restart_timeout=config.restart_timeout,
        )
        return runtime.address()

    address = share(start)
    return runtime if runtime is not None else RayRuntime.connect(address)
