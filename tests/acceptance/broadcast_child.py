"""What each process of the tests of broadcasting runs: a job without a trainer, over gloo, its roles in a Ray."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megascale_lightning import Balanced, ClientPlaceTree, DGraph, LoaderConfig, MegaScaleLoader
from megascale_lightning.client.session import LoadingSession

from .harness import Microbatch, microbatch, without_run


def at_tp_and_pp(graph: DGraph) -> DGraph:
    return Balanced()(graph).broadcast_at("tp", "pp")


def at_tp_and_cp(graph: DGraph) -> DGraph:
    return Balanced()(graph).broadcast_at("tp", "cp")


def at_tp(graph: DGraph) -> DGraph:
    return Balanced()(graph).broadcast_at("tp")


class Job:
    """One rank of a job."""

    def __init__(self, rank: int, tree: ClientPlaceTree, config: LoaderConfig) -> None:
        self.rank, self.tree, self.config = rank, tree, config

    def share(self, value: Any, rank: int = 0) -> Any:
        """The value of one rank, on every rank."""
        found = [value]
        dist.broadcast_object_list(found, rank)
        return found[0]

    def session(self, stack: ExitStack, config: LoaderConfig | None = None, **more: Any) -> LoadingSession:
        session = LoadingSession(config or self.config, tree=self.tree, rank=self.rank, broadcast=self.share, **more)
        stack.callback(lambda: session.close(dist.barrier))
        return session

    def loader(self, stack: ExitStack, session: LoadingSession, **more: Any) -> MegaScaleLoader:
        return stack.enter_context(MegaScaleLoader(session.config, self.tree, self.rank, session=session, **more))


Seen = list[tuple[Microbatch, dict[str, Any]]]
"""Microbatches, each with the state once it was handed out."""


def take(loader: MegaScaleLoader, batches: Any, count: int | None = None) -> Seen:
    """The next microbatches of an iterator; None: all."""
    found: Seen = []
    while count is None or len(found) < count:
        batch = next(batches, None)
        if batch is None:
            break
        found.append((microbatch(batch), without_run(json.loads(json.dumps(loader.state_dict())))))
    return found


def deliver(job: Job) -> dict[str, Any]:
    """A stream to its end, validation in between, a loop that breaks off, and a resume from a peer's state."""
    with ExitStack() as stack:
        session = job.session(stack)
        loader = job.loader(stack, session)
        held = job.loader(stack, session, stream="val/0")
        batches = iter(loader)
        whole = take(loader, batches, 5)
        broken_off = take(held, iter(held), 1)
        whole += take(loader, batches, 4)
        evaluated = take(held, iter(held))
        whole += take(loader, batches)
        reports = len(loader.last_reports)
        # Nothing more is fetched, and all ranks are where they will be when they are asked.
        dist.barrier()
        fetches = job.share(session.stats() if job.rank == 0 else None)["constructor/0"]["role"]["fetches"]
        # The last rank is nobody's fetcher: what it saves is good for all.
        state = job.share(whole[6][1] if job.rank == len(job.tree.ranks) - 1 else None, len(job.tree.ranks) - 1)
        loader.load_state_dict(state)
        resumed = take(loader, iter(loader), 2)
        resumed += take(loader, iter(loader))  # the first one was broken off
        return {
            "whole": whole,
            "evaluated": (broken_off, evaluated),
            "resumed": resumed,
            "reports": reports,
            "fetches": fetches,
            "certificate": loader.certificate,
        }


def change(job: Job) -> dict[str, Any]:
    """A change of the mixture by rank 0, and passes."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        loader = job.loader(stack, job.session(stack))
        found["step"] = loader.set_mixture({"web": 3.0}, at_step=8)
        for batch in loader:
            if batch["megascale"].step == 11 and batch["megascale"].is_last_in_step:
                break
        found["mixed"] = loader.certificate
    with ExitStack() as stack:
        loader = job.loader(stack, job.session(stack, passes=True))
        found["passes"] = [take(loader, iter(loader)) for _ in range(2)]
        found["certificate"] = loader.certificate
    return found


def mesh(job: Job) -> dict[str, Any]:
    """Over the groups of a device mesh; and what every loader has to have."""
    device_mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made: list[Any] = []
    new_group = dist.new_group
    dist.new_group = lambda *args, **more: made.append(args) or new_group(*args, **more)
    try:
        with ExitStack() as stack:
            session = job.session(stack, mesh=device_mesh)
            loader = job.loader(stack, session)
            found = take(loader, iter(loader), 6)
            # The training's own collective in the same group, between two batches.
            total = torch.ones(1)
            dist.all_reduce(total, group=device_mesh.get_group("tp"))
            found += take(loader, iter(loader), 6)
            refused = error_of(lambda: MegaScaleLoader(session.config, job.tree, 3 - job.rank, session=session))
    finally:
        dist.new_group = new_group
    return {"whole": found, "made": len(made), "total": float(total), "refused": refused}


def fail(job: Job) -> dict[str, Any]:
    """A record is broken: the ranks that do not read it fail as those that do."""
    with ExitStack() as stack:
        loader = job.loader(stack, job.session(stack))
        return {"error": error_of(lambda: take(loader, iter(loader)))}


def die(job: Job) -> dict[str, Any]:
    """Rank 2, which fetches for rank 3, is killed; says when each rank has found out, and how."""
    others = dist.new_group([0, 1, 3])
    stack = ExitStack()  # not closed: its barrier is for all ranks
    loader = job.loader(stack, job.session(stack))
    batches = iter(loader)
    take(loader, batches, 2)
    dist.barrier()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    error = error_of(lambda: take(loader, batches)) if job.rank == 3 else None
    seconds = time.monotonic() - begun
    dist.barrier(others)
    return {"error": error, "seconds": seconds}


def error_of(body: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        body()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


SCENARIOS = {"deliver": deliver, "change": change, "mesh": mesh, "fail": fail, "die": die}


def run(rank: int, scenario: str, tree: ClientPlaceTree, config: LoaderConfig, folder: str) -> None:
    """One process: what it saw is written to `rank<n>.pkl`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), tree.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tree.world_size)
    found = SCENARIOS[scenario](Job(rank, tree, config))
    (Path(folder) / f"rank{rank}.pkl").write_bytes(pickle.dumps(found))
    if scenario != "die":
        dist.barrier()
        dist.destroy_process_group()
