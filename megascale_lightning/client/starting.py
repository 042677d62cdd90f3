"""Starts the roles of a run on one rank and connects the others to them, on one machine or on several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar

from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import MegaScaleError, RuntimeFailure
from megascale_lightning.runtime.plan import RuntimePlan
from megascale_lightning.runtime.port import Runtime
from megascale_lightning.runtime.ray_machines import Machine, Machines

if TYPE_CHECKING:
    from megascale_lightning.runtime.ray_runtime import RayRuntime

__all__ = ["RanksTogether", "Started", "start_runtime"]

T = TypeVar("T")

_OTHERS: Final = 0
"""Ranks that neither lead nor brought a node: their connections end first."""
_ROLES: Final = 1
_NODES: Final = 2
_LEAD: Final = 3


class RanksTogether:
    """What all ranks of a run do at once.

    Args:
        rank: Of this process.
        broadcast: `broadcast(obj)` returns rank 0's object on every rank; None: this process is alone.
    """

    def __init__(self, rank: int, broadcast: Callable[[Any], Any] | None) -> None:
        self._broadcast = broadcast
        self.rank = 0 if broadcast is None else rank
        self.leads = self.rank == 0

    def __call__(self, make: Callable[[], T]) -> T:
        """Make something on the leading rank and hand it to all; an error there is raised on every rank."""
        made: Any = None
        failed: Exception | None = None
        if self.leads:
            try:
                made = make()
            except Exception as error:
                failed = error
        if self._broadcast is not None:
            made, failed = self._broadcast((made, failed))
        if failed is not None:
            raise failed
        found: T = made
        return found

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order. Where torch.distributed is not at work, this rank's alone."""
        if self._broadcast is None:
            return [value]
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


class Started:
    """A runtime, and in which order the ranks leave it.

    Args:
        runtime: As this rank sees it.
        leads: This rank started the roles.
        brings_node: It has brought its machine's node into the run's Ray.
        several: The ranks are on several machines.
    """

    def __init__(self, runtime: Runtime, *, leads: bool, brings_node: bool = False, several: bool = False) -> None:
        self.runtime = runtime
        self._turn = _LEAD if leads else _NODES if brings_node else _OTHERS
        self._several = several

    def close(self, barrier: Callable[[], None] | None) -> None:
        """Leave: other ranks first, then the ranks that brought a node, then rank 0.

        Args:
            barrier: Meets all ranks; None where they cannot meet (an exception) or there is one only.
        """
        if self._turn == _OTHERS:
            self.runtime.close()
        if barrier is not None:
            barrier()
            if self._several:
                self._end_nodes(barrier)
        self.runtime.close()

    def _end_nodes(self, barrier: Callable[[], None]) -> None:
        """The actors first: one that goes with its node would be started anew."""
        if self._turn == _LEAD:
            self.runtime.end_roles()
        barrier()
        if self._turn == _NODES:
            self.runtime.close()
        barrier()


def start_runtime(config: LoaderConfig, plan: Callable[[], RuntimePlan], ranks: RanksTogether) -> Started:
    """Start the roles on the leading rank, connect the others; all ranks call it.

    Args:
        config: The settings.
        plan: Gives the roles; asked on the leading rank, and with `runtime="local"` on each.
        ranks: All of them.

    Raises:
        MegaScaleError: Why it does not start; on every rank.
    """
    if config.runtime == "local":
        from megascale_lightning.runtime.local import LocalRuntime

        return Started(LocalRuntime(plan()), leads=ranks.leads)
    machines = Machines(ranks.gather(Machine.here()))
    return _start_on_many(config, plan, ranks, machines) if machines.several else _start_on_one(config, plan, ranks)


def _start_on_one(config: LoaderConfig, plan: Callable[[], RuntimePlan], ranks: RanksTogether) -> Started:
    from megascale_lightning.runtime.ray_runtime import RayRuntime

    runtime: RayRuntime | None = None

    def start() -> Any:
        nonlocal runtime
        runtime = RayRuntime.start(
            plan(),
            address=config.ray_address,
            ray_init=config.ray_init,
            restart_timeout=config.restart_timeout,
            num_constructors=config.num_constructors,
        )
        return runtime.address()

    address = ranks(start)
    return Started(RayRuntime.connect(address) if runtime is None else runtime, leads=ranks.leads)


def _start_on_many(
    config: LoaderConfig, plan: Callable[[], RuntimePlan], ranks: RanksTogether, machines: Machines
) -> Started:
    """Ray first, then a node of it on every machine, then the roles: constructors are put where the nodes are."""
    from megascale_lightning.runtime.ray_runtime import RayRuntime
    from megascale_lightning.runtime.ray_session import RaySession

    session: RaySession | None = None
    runtime: RayRuntime | None = None
    hosts = machines.hosts(ranks.rank)

    def begin() -> Any:
        nonlocal session
        machines.check_versions()
        session = RaySession.start(config.ray_address, config.ray_init, lambda: machines.head_address(config.ray_init))
        return session.cluster

    def leave() -> None:
        if session is not None:
            session.release()

    with ExitStack() as undo:
        undo.callback(leave)
        cluster = ranks(begin)
        failure: Exception | None = None
        if hosts:
            try:
                session = RaySession.join(cluster, config.ray_init, bring_node=cluster.ours)
            except Exception as error:
                failure = error
        nodes = _nodes(machines, ranks.gather((None if session is None else session.node_id, failure)))

        def start() -> Any:
            nonlocal runtime
            assert session is not None
            runtime = RayRuntime.start_in(
                session,
                plan(),
                nodes,
                restart_timeout=config.restart_timeout,
                num_constructors=config.num_constructors,
            )
            return runtime.address()

        address = ranks(start)
        if runtime is None:
            runtime = RayRuntime.connect(address, config.ray_init)
        else:
            undo.pop_all()  # the runtime has it
    return Started(runtime, leads=ranks.leads, brings_node=hosts and cluster.ours, several=True)


def _nodes(machines: Machines, answers: list[tuple[str | None, Exception | None]]) -> dict[str, str]:
    """Machine -> its node of Ray, in the order of the ranks."""
    failed = [
        f"machine {machine.name!r}: {failure}"
        for machine, (_, failure) in zip(machines.of_ranks, answers, strict=True)
        if failure is not None
    ]
    if failed:
        only = next(failure for _, failure in answers if failure is not None)
        if len(failed) == 1 and isinstance(only, MegaScaleError):
            raise only
        raise RuntimeFailure("; ".join(failed[:5]))
    return {
        machine.key: node for machine, (node, _) in zip(machines.of_ranks, answers, strict=True) if node is not None
    }
