"""Trains, saves and resumes under sharding strategies, one trainer after the other, and writes down what each rank saw.

Run by the tests as a program of its own, since the strategies start it again for each rank. `ModelParallelStrategy`
runs as it is; torch's FSDP takes the CPU only where it is named as the device, which `FSDPStrategy` leaves out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megascale_lightning import (  # noqa: E402
    Balanced,
    CollatedRows,
    DGraph,
    MegaScaleDataModule,
    Source,
    StateError,
)
from tests.integrations.corpora import held_out, real_data  # noqa: E402

WIDTH = 4


class ShardedOnCpu(FSDPStrategy):
    """`FSDPStrategy` with all that it does, but for the device."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )


STRATEGIES: dict[str, Callable[[], Any]] = {
    "dp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "tp2": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
    "tp2-shared": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
    "one": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
    "file": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    "fsdp": lambda: ShardedOnCpu(state_dict_type="sharded"),
    "fsdp-file": lambda: ShardedOnCpu(state_dict_type="full"),
    "hybrid": lambda: ShardedOnCpu(sharding_strategy="HYBRID_SHARD", device_mesh=init_device_mesh("cpu", (1, 2))),
    "plain": lambda: "auto",
}
GROUPS = {"tp2": 1, "tp2-shared": 1, "one": 1, "plain": 1}
"""Strategy -> data-parallel size, where it is not 2."""


def fetched_once(graph: DGraph) -> DGraph:
    """Of `tp2-shared`: rank 0 fetches for both."""
    return Balanced()(graph).broadcast_at("tp")


class Model(L.LightningModule):
    """Two layers to be sharded; writes down every microbatch."""

    def __init__(self, *, reads_steps: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, 2)
        self.reads_steps = reads_steps
        self.lines: list[dict[str, Any]] = []
        self.events: list[tuple[str, int]] = []
        self.asked_early = False
        self.fetches = -1
        self._count = 0

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        mesh = self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(self, mesh["tensor_parallel"], plan)
        else:
            for layer in (self.first, self.second):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def on_train_start(self) -> None:
        self._count = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch["input_ids"][:, :WIDTH] if isinstance(batch, dict) else batch
        return self.second(self.first(rows.float() / 100)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        stepped, self._count = self.trainer.global_step != self._count, self.trainer.global_step
        tokens = batch["input_ids"] if isinstance(batch, dict) else batch
        ids = info.sample_ids()
        self.lines.append(
            {
                "step": info.step,
                "microbatch": info.microbatch,
                "ids": ids,
                "tokens": tokens.tolist(),
                "stepped": stepped,
                "rate": self.trainer.optimizers[0].param_groups[0]["lr"],
            }
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.events.append(("validated", self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.events.append(("ends", self.trainer.current_epoch))

    def on_train_end(self) -> None:
        # The roles of this very process, which only its own loader asks.
        stats = self.trainer.datamodule._session.stats()  # type: ignore[attr-defined]
        self.fetches = stats["constructor/0"]["role"]["fetches"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.reads_steps:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)  # -1 where the loader does not know its length
        self.asked_early = self.trainer.datamodule.last_info is not None  # type: ignore[attr-defined]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps if steps > 0 else 500)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Saver(L.Callback):
    """Saves behind a step; else in the middle of the second epoch, behind its last batch, and at its end."""

    def __init__(self, folder: Path, step: int | None) -> None:
        self.folder, self.step = folder, step
        self.saved: dict[str, Path] = {}

    def save(self, trainer: L.Trainer, name: str) -> None:
        if name not in self.saved:
            self.saved[name] = self.folder / f"{name}.ckpt"
            trainer.save_checkpoint(self.saved[name])
            trainer.lightning_module.events.append((f"saved {name}", 0))  # type: ignore[operator,union-attr]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.step is not None:
            if trainer.global_step == self.step:
                self.save(trainer, "middle")
        elif trainer.current_epoch == 1 and trainer.datamodule.last_info.is_last_in_step:  # type: ignore[attr-defined]
            self.save(trainer, "last" if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch else "middle")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.step is None and trainer.current_epoch == 1:
            self.save(trainer, "end")


def first_tokens(samples: Sequence[Any]) -> torch.Tensor:
    """int64 [rows, WIDTH]."""
    return torch.stack([torch.as_tensor((list(sample["input_ids"]) + [0] * WIDTH)[:WIDTH]) for sample in samples])


class Bench:
    """Runs trainers over one corpus."""

    def __init__(self, corpus: Path, out: Path, devices: int) -> None:
        self.corpus, self.out, self.devices = corpus, out, devices

    def data(self, kind: str, **more: Any) -> MegaScaleDataModule:
        """One of: the two training sources; two sources of few samples; one whose length is known before, or not."""
        if kind == "endless":
            return real_data(self.corpus, **more)
        if kind == "passes":
            held = held_out(self.corpus)
            return real_data(self.corpus, sources=held["a"] + held["b"], val_sources=held["a"], **more)
        path = {"sized": "held-a/*.parquet", "unsized": "held-b/*.jsonl"}[kind]
        source = Source("one", str(self.corpus / path))
        rows = CollatedRows(1, first_tokens)
        return MegaScaleDataModule(**{"sources": [source], "rows": rows, "runtime": "local", **more})

    def fit(
        self,
        strategy: str,
        data: MegaScaleDataModule,
        *,
        reads_steps: bool = False,
        saver: Saver | None = None,
        ckpt: Path | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        model = Model(reads_steps=reads_steps)
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            accelerator="cpu",
            strategy=STRATEGIES[strategy](),
            devices=self.devices,
            callbacks=[saver] if saver else [],
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(model, datamodule=data, ckpt_path=ckpt)
        return {
            "rank": trainer.global_rank,
            "lines": model.lines,
            "events": model.events,
            "asked_early": model.asked_early,
            "fetches": model.fetches,
            "certificate": data.certificate,
            "end": [data.next_step, trainer.global_step, trainer.current_epoch],
            "groups": data.position()["trainer"]["num_groups"],
            "wrapped": type(trainer.model).__name__,
        }


LIFE: dict[str, dict[str, Any]] = {
    "endless": {"data": "endless", "step": 3, "max_steps": 6, "accumulate_grad_batches": 2},
    "limited": {"data": "endless", "max_epochs": 3, "limit_train_batches": 4, "accumulate_grad_batches": 2},
    "early": {"data": "endless", "step": 3, "max_steps": 6, "max_epochs": 3},
    "passes": {"data": "passes", "max_epochs": 3},
    "passes-accumulated": {"data": "passes", "max_epochs": 3, "accumulate_grad_batches": 2},
    "collated": {"data": "unsized", "max_epochs": 3, "accumulate_grad_batches": 2},
    "collated-sized": {"data": "sized", "max_epochs": 3},
}
"""A run that is resumed from each of its saves: data, where it saves, settings of the trainer."""


def life(bench: Bench, name: str, strategy: str, *, reads_steps: bool) -> dict[str, Any]:
    """Run to the end, and again from each save, with the same settings."""
    settings = dict(LIFE[name])
    kind, step = settings.pop("data"), settings.pop("step", None)
    more = {"strategy": fetched_once} if strategy == "tp2-shared" else {}
    saver = Saver(bench.out / f"{name}-{strategy}-{reads_steps}", step)
    whole = bench.fit(strategy, bench.data(kind, **more), saver=saver, reads_steps=reads_steps, **settings)
    again = {
        save: bench.fit(strategy, bench.data(kind, **more), ckpt=path, reads_steps=reads_steps, **settings)
        for save, path in saver.saved.items()
    }
    return {"whole": whole, "again": again}


def topology(bench: Bench, before: str, *after: str) -> dict[str, Any]:
    """Steps of eight rows, begun under one strategy and gone on with under others."""
    saver = Saver(bench.out / f"topology-{before}", 3)
    found = {before: _eight_rows(bench, before, saver=saver)}
    for strategy in after:
        found[strategy] = _eight_rows(bench, strategy, ckpt=saver.saved["middle"])
    return found


def go_on_alone(bench: Bench, before: str, after: str) -> dict[str, Any]:
    """Go on with what `topology` saved in a run of its own."""
    return {after: _eight_rows(bench, after, ckpt=bench.out / f"topology-{before}" / "middle.ckpt")}


def _eight_rows(bench: Bench, strategy: str, **more: Any) -> dict[str, Any]:
    accumulate = 4 // GROUPS.get(strategy, 2)
    data = bench.data("endless", global_batch_size=8)
    return bench.fit(strategy, data, max_steps=6, accumulate_grad_batches=accumulate, **more)


def frozen(bench: Bench, strategy: str) -> dict[str, Any]:
    """Between save and resume a file comes; the loader was asked for a batch before the list of files is there."""
    barrier = torch.distributed.barrier
    own = Bench(bench.out / f"corpus-{strategy}", bench.out, bench.devices)
    zero = torch.distributed.get_rank() == 0
    if zero:
        shutil.copytree(bench.corpus, own.corpus)
    barrier()
    settings = {"max_steps": 6, "max_epochs": 3, "reads_steps": True}
    saver = Saver(bench.out / f"frozen-{strategy}", 3)
    whole = own.fit(strategy, own.data("endless"), saver=saver, **settings)
    barrier()
    if zero:
        shutil.copy(own.corpus / "code" / "0.jsonl", own.corpus / "code" / "2.jsonl")
    barrier()
    again = own.fit(strategy, own.data("endless"), ckpt=saver.saved["middle"], **settings)
    new = own.fit(strategy, own.data("endless"), **settings)
    return {"whole": whole, "again": {"middle": again}, "new": new}


def refused(bench: Bench, strategy: str, *, caught: bool = True) -> dict[str, Any]:
    """A state of another seed, behind a batch that was asked for too early."""
    settings = {"max_steps": 4, "max_epochs": 3, "reads_steps": True}
    saver = Saver(bench.out / f"refused-{strategy}-{caught}", 2)
    bench.fit(strategy, bench.data("endless"), saver=saver, **settings)
    try:
        bench.fit(strategy, bench.data("endless", seed=5), ckpt=saver.saved["middle"], **settings)
    except StateError as error:
        if not caught:
            (bench.out / f"refused-rank{torch.distributed.get_rank()}").write_text(str(error))
            raise
        return {"said": str(error)}
    return {}


def _lives() -> dict[str, tuple[str, str, bool]]:
    table = [
        ("endless", "dp2", False),
        ("endless", "fsdp-file", False),
        ("endless", "hybrid", False),
        ("limited", "tp2", True),
        ("limited", "fsdp", True),
        ("early", "dp2", True),
        ("early", "fsdp", True),
        ("passes", "tp2", False),
        ("passes", "fsdp", True),
        ("passes-accumulated", "dp2", True),
        ("collated", "dp2", True),
        ("collated", "tp2", True),
        ("passes", "tp2-shared", False),
        ("collated", "tp2-shared", True),
        ("collated", "fsdp-file", True),
        ("collated-sized", "fsdp", True),
        ("collated-sized", "file", True),
    ]
    return {
        f"{name}, {strategy}{', asked' if reads else ''}": (name, strategy, reads) for name, strategy, reads in table
    }


LIVES = _lives()
"""Scene -> a run of `LIFE`, the strategy, whether the schedule asks for the number of steps."""


def _run_life(scene: str) -> Callable[[Bench], Any]:
    name, strategy, reads_steps = LIVES[scene]
    return lambda bench: life(bench, name, strategy, reads_steps=reads_steps)


ENDS = "refused, and not caught"
"""The last scene: it ends the program."""

SCENES: dict[str, dict[str, Callable[[Bench], Any]]] = {
    "two": {
        **{scene: _run_life(scene) for scene in LIVES},
        "from dp2": lambda bench: topology(bench, "dp2", "tp2"),
        "from tp2": lambda bench: topology(bench, "tp2", "dp2"),
        "from fsdp-file": lambda bench: topology(bench, "fsdp-file"),
        "frozen, dp2": lambda bench: frozen(bench, "dp2"),
        "frozen, fsdp": lambda bench: frozen(bench, "fsdp"),
        "refused, tp2": lambda bench: refused(bench, "tp2"),
        "refused, fsdp": lambda bench: refused(bench, "fsdp"),
        ENDS: lambda bench: refused(bench, "dp2", caught=False),
    },
    "one": {
        "from dp2": lambda bench: go_on_alone(bench, "dp2", "one"),
        "from fsdp-file": lambda bench: go_on_alone(bench, "fsdp-file", "plain"),
    },
}
"""Launch -> scenes by name."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launch", choices=sorted(SCENES), required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.corpus, arguments.out, 1 if arguments.launch == "one" else 2)
    found: dict[str, Any] = {}
    for name, scene in SCENES[arguments.launch].items():
        found[name] = scene(bench)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (arguments.out / f"{arguments.launch}-rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
