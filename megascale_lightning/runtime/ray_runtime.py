"""`RayRuntime`: the roles of a run in Ray actors, created and watched by one process, used by all ranks."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from megascale_lightning.errors import MegaScaleWarning, RuntimeFailure
from megascale_lightning.runtime.forks import check_process
from megascale_lightning.runtime.plan import RoleRecipe, RuntimePlan, ToldPlanner
from megascale_lightning.runtime.ray_environment import import_settings
from megascale_lightning.runtime.ray_machines import Machine
from megascale_lightning.runtime.ray_session import RayAddress, RaySession
from megascale_lightning.types import BatchWindow, Change, LoaderState, NotYet

__all__ = ["RayPort", "RayRuntime"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_HASTY_S = 0.05

_DETACH_BYTES = 64 << 20
"""Smaller windows are copied out of Ray's shared memory, at some 5 GB/s. Ray ends a process without a word when it lets
go of shared memory whose node has died, so whoever holds none lives on to raise an error and save. Larger windows stay
where all ranks of the node share them."""

_T = TypeVar("_T")


class RayRuntime:
    """The roles of one run, as this process sees them: `start` on one rank, `connect` on the others.

    It is to be closed in the order: other ranks, then the one that started. A runtime that is dropped, or still open
    when the interpreter ends, closes itself.
    """

    def __init__(
        self, session: RaySession, address: RayAddress, supervisor: Any = None, told: ToldPlanner | None = None
    ) -> None:
        """Not to be called: use `start` or `connect`."""
        from megascale_lightning.runtime.ray_handles import RayCaller

        self._pid = os.getpid()
        self._address = address
        self._supervisor = supervisor
        self._told = told
        self._caller = RayCaller(address.run, address.namespace, address.restart_timeout)
        self._finalizer = weakref.finalize(self, _close, self._pid, self._caller, supervisor, session)
        self._finalizer.atexit = False
        # After the import of Ray, so that it runs before Ray's own exit hook.
        atexit.register(self._finalizer)

    @classmethod
    def start(
        cls,
        plan: RuntimePlan,
        *,
        address: str | None = None,
        ray_init: Mapping[str, Any] | None = None,
        restart_timeout: float = 120.0,
        num_constructors: int = 1,
    ) -> RayRuntime:
        """Find or start Ray and create all actors; they live as long as this process.

        Args:
            plan: The roles.
            address: Ray cluster to join; None uses the initialised one, or RAY_ADDRESS, or starts a local Ray.
            ray_init: Further keywords of `ray.init`.
            restart_timeout: Seconds that a role may be away before calls on it fail.
            num_constructors: Constructors on each machine.

        Raises:
            ConfigError: A setting is wrong, or Ray was imported too early.
            RuntimeFailure: Ray or an actor does not start.
            Exception: Why a role cannot be made.
        """
        session = RaySession.start(address, ray_init)
        try:
            nodes = {Machine.here().key: session.node_id}
            return cls.start_in(
                session, plan, nodes, restart_timeout=restart_timeout, num_constructors=num_constructors
            )
        except BaseException:
            session.release()
            raise

    @classmethod
    def start_in(
        cls,
        session: RaySession,
        plan: RuntimePlan,
        nodes: Mapping[str, str],
        *,
        restart_timeout: float,
        num_constructors: int,
    ) -> RayRuntime:
        """Create all actors in a Ray that this process is connected to; the runtime releases the session.

        Args:
            session: The connection. If this fails, it is still the caller's.
            plan: The roles.
            nodes: Machine (its key) -> node of Ray, of all that have ranks, this one first: the constructors are there.
            restart_timeout: Seconds that a role may be away before calls on it fail.
            num_constructors: Constructors on each machine.

        Raises:
            RuntimeFailure: An actor does not start.
            Exception: Why a role cannot be made.
        """
        cluster = session.cluster
        constructors = {
            machine: tuple(f"constructor/{index * num_constructors + number}" for number in range(num_constructors))
            for index, machine in enumerate(nodes)
        }
        placed = {name: nodes[machine] for machine, names in constructors.items() for name in names}
        others = (recipe.name for recipe in (*plan.loaders, plan.planner))
        address = RayAddress(
            address=cluster.address,
            token=cluster.token,
            host=cluster.host,
            ours=cluster.ours,
            namespace=f"megascale-{plan.run}-{uuid.uuid4().hex[:8]}",
            run=plan.run,
            planner=plan.planner.name,
            constructors=constructors,
            roles=(*others, *placed),
            restart_timeout=restart_timeout,
        )
        told = ToldPlanner(plan.planner)
        supervisor = _supervise(plan, told, address, placed, {} if cluster.ours else import_settings())
        try:
            supervisor.start(_START_TIMEOUT_S)
            runtime = cls(session, address, supervisor, told)
            _warn_of_torch(runtime.stats())
            return runtime
        except BaseException:
            supervisor.stop(1.0)
            raise

    @classmethod
    def connect(cls, address: RayAddress, ray_init: Mapping[str, Any] | None = None) -> RayRuntime:
        """Use the roles that another process started.

        Args:
            address: As its `address()` says.
            ray_init: As for `start`: where several machines have their nodes in it, which address this one's has.

        Raises:
            RayUnreachableError: Its Ray does not answer, or refuses the token.
            RuntimeFailure: This process cannot reach it.
        """
        return cls(RaySession.join(address, ray_init), address)

    def address(self) -> RayAddress:
        """What the other ranks need to `connect`; holds a secret."""
        return self._address

    def port(self) -> RayPort:
        """A port of this process."""
        check_process(self._pid)
        return RayPort(self._caller, self._address, self._told)

    def stats(self) -> dict[str, Any]:
        """Role name -> its counters, and on the process that started it, how often it died."""
        check_process(self._pid)
        if not self._finalizer.alive:
            raise RuntimeFailure("the runtime is closed")
        deaths = self._supervisor.stats() if self._supervisor is not None else {}
        return {name: {**self._caller.ask(name, "stats"), **deaths.get(name, {})} for name in self._address.roles}

    def end_roles(self) -> None:
        """End the actors, on the process that started them; Ray stays. No other rank reads any more."""
        if self._supervisor is not None:
            self._supervisor.stop()

    def close(self) -> None:
        """Leave; the process that started the run ends its actors, and the Ray that was started for it."""
        atexit.unregister(self._finalizer)
        self._finalizer()


class RayPort:
    """The `BatchPort` of a `RayRuntime`: calls the actors directly. Thread-safe; refuses to work after a fork."""

    def __init__(self, caller: Any, address: RayAddress, told: ToldPlanner | None = None) -> None:
        self._told = told
        self._pid = os.getpid()
        self._caller = caller
        self._planner = address.planner
        near = address.constructors.get(Machine.here().key)
        self._constructors = near or next(iter(address.constructors.values()))

    def open(self, stream: str, generation: str, client: int, state: LoaderState | None) -> None:
        """See `BatchPort.open`."""
        check_process(self._pid)
        self._caller(self._planner, "open", (stream, generation, client, state))

    def fetch(
        self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int
    ) -> BatchWindow | NotYet:
        """See `BatchPort.fetch`. The arrays are read-only."""
        check_process(self._pid)
        begun = time.monotonic()
        args = (stream, generation, group, client, first_step, consumed)
        target = self._constructors[group % len(self._constructors)]
        answer: BatchWindow | NotYet = self._caller.ask(target, "fetch", args, 1.0)
        if isinstance(answer, NotYet) and time.monotonic() - begun < _HASTY_S:
            time.sleep(_HASTY_S)  # a role that has no room for the request: do not spin
        return detached(answer, _DETACH_BYTES)

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        """See `BatchPort.consumed`."""
        check_process(self._pid)
        for constructor in self._constructors:  # those that it has not asked do not know it
            self._caller.tell(constructor, "consumed", stream, generation, client, step)

    def set_changes(self, stream: str, generation: str, changes: tuple[Change, ...]) -> None:
        """See `BatchPort.set_changes`."""
        check_process(self._pid)
        if self._told is None:
            raise RuntimeFailure("the mixture and costs are changed by the process that started the run, rank 0")
        self._told.tell(stream, generation, changes)
        self._caller(self._planner, "set_changes", (stream, generation, changes))

    def close(self, stream: str, generation: str, client: int) -> None:
        """See `BatchPort.close`. A role that is away has forgotten the client by itself."""
        check_process(self._pid)
        for target in (*self._constructors, self._planner):
            try:
                self._caller(target, "close", (stream, generation, client))
            except RuntimeFailure as error:
                logger.debug("client %d could not be taken out of %s at %s: %s", client, stream, target, error)


def detached(value: _T, limit_bytes: int) -> _T:
    """A copy of a value, out of Ray's shared memory; the value itself where its arrays are larger than the limit."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    if sum(view.nbytes for view in views) > limit_bytes:
        return value
    copy: _T = pickle.loads(data, buffers=[bytes(view) for view in views])
    return copy


def _warn_of_torch(stats: Mapping[str, Any]) -> None:
    """Law 8: torch gets into an actor with the user's code alone, and is worth a word."""
    heavy = [name for name, role in stats.items() if role["torch"]]
    if heavy:
        warnings.warn(
            f"{', '.join(heavy)}: a transform, a length function or a dataset imports torch, which costs about 530 MB "
            "in each of these processes and a second at every start. Move the function to a module that does not "
            "import torch (numpy and tokenizers do without it), or set a smaller num_loaders",
            MegaScaleWarning,
            stacklevel=4,
        )


def _supervise(
    plan: RuntimePlan, told: ToldPlanner, address: RayAddress, placed: Mapping[str, str], imports: Mapping[str, str]
) -> Any:
    """The supervisor of the roles.

    Args:
        plan: The roles.
        told: What the planner is made of.
        address: Their names.
        placed: Constructor -> the node of Ray that it is to be on; elsewhere only if that is gone.
        imports: Variables that the processes need to import this package.
    """
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from megascale_lightning.runtime import ray_actors
    from megascale_lightning.runtime.supervisor import Supervisor

    wiring = ray_actors.Wiring(
        run=address.run,
        namespace=address.namespace,
        restart_timeout=address.restart_timeout,
        sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
    )
    loading = replace(wiring, environment=plan.environment)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    loader = ray_actors.actor_class(ray_actors.LoaderActor)
    classes: dict[str, tuple[Any, Any]] = {recipe.name: (loader, "SPREAD") for recipe in plan.loaders}
    classes[plan.planner.name] = (ray_actors.actor_class(ray_actors.PlannerActor), here)
    constructor = ray_actors.actor_class(ray_actors.ConstructorActor)
    for name, node in placed.items():
        classes[name] = (constructor, NodeAffinitySchedulingStrategy(node, soft=True))
    dumps: Any = cloudpickle.dumps
    pinned = _node_resources(placed)
    made = [*plan.loaders, *(replace(plan.constructor, name=name) for name in placed)]
    recipes = {recipe.name: _pickled(recipe, dumps) for recipe in made}

    def spawn(name: str, failure: Exception | None) -> Any:
        actor, where = classes[name]
        options = actor.options(
            name=f"{address.run}/{name}",
            namespace=address.namespace,
            lifetime="non_detached",
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            **({"resources": pinned.pop(name)} if name in pinned else {"scheduling_strategy": where}),
            **({"runtime_env": {"env_vars": dict(imports)}} if imports else {}),
        )
        recipe = _pickled(told.recipe(), dumps) if name == plan.planner.name else recipes[name]
        return options.remote(name, dumps(failure) if failure else recipe, loading if actor is loader else wiring)

    return Supervisor(address.roles, spawn)


def _node_resources(placed: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Constructor -> a resource that its node alone has, where there are several; of those created first.

    A node that has just joined is not known to all the others, and one that does not know it puts an actor that is only
    to be near it elsewhere. For a resource it waits.
    """
    import ray

    if len(set(placed.values())) == 1:
        return {}
    known: Any = ray.nodes
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in known()}
    return {name: {f"node:{addresses[node]}": 0.001} for name, node in placed.items()}


def _pickled(recipe: RoleRecipe, dumps: Any) -> bytes:
    try:
        data: bytes = dumps(recipe)
    except Exception as error:
        raise RuntimeFailure(
            f"role {recipe.name!r} cannot be sent to its process: {type(error).__name__}: {error}. A transform, a "
            "length function or a dataset holds something that does not pickle (a lock, an open file, a connection): "
            "make it where it is used, or set runtime='local'"
        ) from error
    return data


def _close(pid: int, caller: Any, supervisor: Any, session: RaySession) -> None:
    if os.getpid() != pid:
        return  # a forked child must not end its parent's actors
    caller.stop()
    if supervisor is not None:
        supervisor.stop()
    session.release()
