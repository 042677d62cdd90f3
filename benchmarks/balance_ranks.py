"""One rank of the balance benchmark: the same steps trained with both strategies in turn, every step timed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from balance_model import LONG, SHORT, ByteTransformer, equal_lengths, heavy_lengths, write_documents
from torch.nn.parallel import DistributedDataParallel

from megascale_lightning import (
    Balanced,
    CalibratedCost,
    ClientPlaceTree,
    CostCalibrator,
    LoaderConfig,
    MegaScaleLoader,
    Mixture,
    PackedRows,
    RoundRobin,
    Source,
)
from megascale_lightning.planning.calibration import microbatch_features

__all__ = ["STRATEGIES", "WORLD", "Leg", "run_rank"]

WORLD = 2
STRATEGIES = {"round_robin": RoundRobin, "balanced": Balanced}


@dataclass(frozen=True)
class Leg:
    """One kind of data, trained on with both strategies."""

    name: str
    seq_len: int
    steps: int
    """Optimizer steps that count, with each strategy."""
    warmup: int
    """Steps before them: of the first ones, made of the longest documents of a whole pool, and of first calls."""
    calls: int
    """Microbatches of each shape that are timed to calibrate the cost."""
    rounds: int = 1
    """How often all of it is trained, from the start; of a step's times, the shortest counts, for either strategy."""
    equal: bool = False
    """Documents of one length, an eighth of a row, instead of heavy tails."""
    rows: int = 4
    """Rows of a step on each rank, each a microbatch."""
    long_share: float = 0.25
    """Of the tokens of heavy-tailed data, what comes from the source of long documents."""

    @property
    def total(self) -> int:
        """Steps that are taken."""
        return self.warmup + self.steps

    @property
    def shares(self) -> dict[str, float]:
        """Kind of document -> its share of the tokens; each is a source."""
        return {"equal": 1.0} if self.equal else {"short": 1 - self.long_share, "long": self.long_share}


def run_rank(rank: int, legs: list[Leg], folder: str) -> None:
    """Run all legs; rank 0 writes what was found to `folder`/found.json."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    found = {leg.name: _run_leg(rank, leg, Path(folder)) for leg in legs}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _run_leg(rank: int, leg: Leg, folder: Path) -> dict[str, Any]:
    if rank == 0:
        _write(leg, folder)
    cost = _calibrate(leg)
    rounds = [_train(rank, leg, folder, cost) for _ in range(leg.rounds)]
    return {
        "strategies": {name: _fastest([one[name] for one in rounds]) for name in STRATEGIES},
        "cost": asdict(cost),
        "leg": asdict(leg),
    }


def _train(rank: int, leg: Leg, folder: Path, cost: CalibratedCost) -> dict[str, dict[str, Any]]:
    """Train once with both strategies; what was found of each."""
    runs: dict[str, _Training] = {}
    with contextlib.ExitStack() as stack:
        for name, strategy in STRATEGIES.items():
            loader = stack.enter_context(_loader(leg, folder, strategy(cost=cost), rank))
            runs[name] = _Training(loader)
        for step in range(leg.total):
            # A B, B A, A B, ...: what drifts on the machine weighs on both alike.
            for name in list(runs)[:: -1 if step % 2 else 1]:
                runs[name].step(step, cost)
        found = {name: run.found() for name, run in runs.items()}
    certificates = _gathered([run["certificate"] for run in found.values()])
    assert len({one for each in certificates for one in each}) == 1, "both strategies train on the same rows (law 1)"
    return found


def _fastest(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each step the shortest time; the rest is the same in every round."""
    times = {key: np.min([one[key] for one in rounds], axis=0).tolist() for key in ("seconds", "cpu_seconds")}
    return {**rounds[0], **times}


class _Training:
    """One model that is trained with one strategy."""

    def __init__(self, loader: MegaScaleLoader) -> None:
        torch.manual_seed(0)
        self.model = ByteTransformer()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=3e-3)
        self.loader = loader
        self.batches: Iterator[dict[str, Any]] = iter(loader)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []
        self.costs: list[list[float]] = []

    def step(self, step: int, cost: CalibratedCost) -> None:
        """One optimizer step, from a barrier to the end of this rank's update."""
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self.losses.append(0.0)
        self.costs.append([])
        for number in range(self.loader.num_microbatches):
            batch = next(self.batches)
            info = batch["megascale"]
            assert (info.step, info.microbatch) == (step, number)
            with contextlib.nullcontext() if info.is_last_in_step else self.wrapped.no_sync():
                logits = self.wrapped(batch["input_ids"][0], batch["cu_seq_lens_q"].tolist())
                loss = self.model.summed_loss(logits, batch["labels"][0]) / info.step_loss_tokens
                (loss * WORLD).backward()  # DDP divides by the ranks
            self.losses[-1] += float(loss.detach())
            self.costs[-1].append(float(cost(info.lengths).sum()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)

    def found(self) -> dict[str, Any]:
        """Over the ranks: a step takes as long as the slowest, its loss is the sum of theirs."""
        mine = torch.tensor([self.losses], dtype=torch.float64)
        dist.all_reduce(mine)
        reports = {report.step: report for report in self.loader.last_reports}
        due = [reports[step] for step in range(len(self.seconds))]
        return {
            "seconds": np.max(_gathered(self.seconds), axis=0).tolist(),
            "cpu_seconds": np.max(_gathered(self.cpu_seconds), axis=0).tolist(),
            "losses": mine[0].tolist(),
            "planned": [float(report.group_costs.max()) for report in due],
            "planned_in_turn": [float(report.group_costs_before.max()) for report in due],
            "row_costs": np.transpose(_gathered(self.costs), (1, 2, 0)).reshape(len(due), -1).tolist(),
            "certificate": self.loader.certificate,
        }


def _calibrate(leg: Leg) -> CalibratedCost:
    """Time this model on both ranks at once, on microbatches from one long document to many short ones.

    By CPU time: a rank has one thread, and what others do on the machine meanwhile is no cost of a microbatch.
    """
    model = ByteTransformer()
    calibrator = CostCalibrator(skip_steps=1)
    shapes = [(tokens, parts) for tokens in (leg.seq_len, leg.seq_len // 2) for parts in (1, 2, 3, 4, 8, 16, 32)]
    dist.barrier()
    for call in range(leg.calls + 1):
        times = []
        for tokens, parts in shapes:
            lengths = np.full(parts, tokens // parts)
            ids = torch.randint(0, 256, (int(lengths.sum()),))
            start = time.process_time()
            bounds = np.concatenate(([0], np.cumsum(lengths))).tolist()
            model.summed_loss(model(ids, bounds), ids).backward()
            times.append((microbatch_features(lengths), time.process_time() - start))
        for features, seconds in (one for rank in _gathered(times) for one in rank):
            calibrator.add(features, seconds, step=call)
    return calibrator.fit()


def _file(leg: Leg, folder: Path, kind: str) -> Path:
    return folder / f"{leg.name}-{kind}.parquet"


def _write(leg: Leg, folder: Path) -> None:
    shapes = {"short": SHORT, "long": LONG}
    for seed, (kind, share) in enumerate(leg.shares.items()):
        tokens = int(1.5 * share * leg.total * WORLD * leg.rows * leg.seq_len)
        if kind == "equal":
            lengths = equal_lengths(tokens, leg.seq_len // 8)
        else:
            lengths = heavy_lengths(tokens, shapes[kind], leg.seq_len, seed)
        write_documents(_file(leg, folder, kind), lengths, seed)


def _loader(leg: Leg, folder: Path, strategy: Any, rank: int) -> MegaScaleLoader:
    config = LoaderConfig(
        sources=[Source(kind, str(_file(leg, folder, kind)), columns=("input_ids",)) for kind in leg.shares],
        mixture=Mixture(leg.shares, unit="tokens"),
        rows=PackedRows(leg.seq_len, micro_batch_size=1, shift_labels=True),
        global_batch_size=WORLD * leg.rows,
        strategy=strategy,
        runtime="local",
    )
    return MegaScaleLoader(config, tree=ClientPlaceTree.from_sizes(dp=WORLD), rank=rank)


def _gathered(mine: Any) -> list[Any]:
    """Of all ranks, on all ranks."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, mine)
    return found
