"""A trainer, data and a model for one way of running, and what must have happened on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megascale_lightning import CollatedRows, MegaScaleDataModule, PackedRows, Source

RECORDS = {"one": 21, "large": 14, "middle": 9, "small": 4, "held": 7, "other": 5}
Ranks = Sequence[dict[str, Any]]


def write_records(root: Path) -> None:
    """One Parquet file for each source, in row groups of four; record i of n holds i % 5 + 1 tokens."""
    for number, (name, count) in enumerate(RECORDS.items()):
        rows = [{"input_ids": [number + 1] * (i % 5 + 1)} for i in range(count)]
        table = pa.Table.from_pylist(rows, schema=pa.schema([("input_ids", pa.list_(pa.int32()))]))
        pq.write_table(table, root / f"{name}.parquet", row_group_size=4)


def tensors(samples: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.as_tensor(sample["input_ids"]) for sample in samples]


class Wanted(Exception):
    """A failure that a run is to have."""


class Model(L.LightningModule):
    """Learns from the mean token of each row, and writes down what it gets, by `last_info` alone."""

    def __init__(self, *, fail_at: int = -1) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(1, 2, dtype=torch.float64)
        self.head = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.lr = 0.01
        self.fail_at = fail_at
        self.log_of: dict[str, Any] = {"trained": [], "stepped": [], "evaluated": [], "events": [], "rates": []}
        self._count = 0

    def rows(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        """Outputs and weights, float64 [rows], and the ids of the rows; filler has none."""
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        if isinstance(batch, dict):
            assert batch["megascale"] is info
            means = batch["input_ids"].double().mean(-1)
        else:
            means = torch.stack([row.double().mean() for row in batch])
        weights = torch.as_tensor(info.row_weights).double()
        return self.head(self.backbone(means[:, None])).squeeze(-1), weights, info.sample_ids()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        if info.step == self.fail_at:
            raise Wanted
        outputs, weights, ids = self.rows(batch)
        self.log_of["trained"].append((info.step, info.microbatch, ids))
        self.log_of["rates"].append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return (outputs.square() * weights).sum() / 10

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped, self._count = self.trainer.global_step != self._count, self.trainer.global_step
        self.log_of["stepped"].append(stepped)

    def on_train_start(self) -> None:
        self._count = self.trainer.global_step

    def evaluate(self, batch: Any, dataloader_idx: int) -> None:
        outputs, weights, ids = self.rows(batch)
        if self.trainer.sanity_checking:
            return
        stage = str(self.trainer.state.stage.value)  # type: ignore[union-attr]
        self.log_of["evaluated"].append((stage, self.trainer.global_step, dataloader_idx, ids))
        if stage != "predict":
            self.log("total", (outputs * weights).sum(), reduce_fx="sum", sync_dist=True, on_epoch=True)
            # A float: Lightning averages whole numbers of ranks to a whole number, and the mean is wrong for 7 rows.
            rows: Any = float(weights.sum())
            mean = (outputs * weights).sum() / max(rows, 1.0)
            self.log("mean", mean, batch_size=rows, sync_dist=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.evaluate(batch, dataloader_idx)
        return torch.zeros(1)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log_of["events"].append(("validated", self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.log_of["events"].append(("ends", self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Bench:
    """Makes trainers, data and models for one way of running."""

    def __init__(self, root: Path, devices: int, rows: str, name: str) -> None:
        self.root, self.devices, self.rows, self.name = root, devices, rows, name

    def source(self, name: str, **more: Any) -> Source:
        return Source(name, str(self.root / f"{name}.parquet"), **more)

    def data(self, *names: str, **more: Any) -> MegaScaleDataModule:
        rows: Any = PackedRows(8, 2, pack_ahead=4) if self.rows == "packed" else CollatedRows(2, tensors)
        sources = [self.source(name) for name in names or ("one",)]
        held = {"val_sources": [self.source("held")]}
        return MegaScaleDataModule(**{"sources": sources, "rows": rows, "runtime": "local", **held, **more})

    def trainer(self, **more: Any) -> L.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        strategy = {"strategy": "ddp"} if self.devices > 1 else {}
        settings = {"accelerator": "cpu", "devices": self.devices, "enable_checkpointing": False, **quiet, **strategy}
        return L.Trainer(**{**settings, "num_sanity_val_steps": 0, **more})

    def fit(self, data: dict[str, Any] | None = None, names: Sequence[str] = (), **trainer: Any) -> dict[str, Any]:
        model, module = Model(), self.data(*names, **(data or {}))
        used = self.trainer(**trainer)
        used.fit(model, datamodule=module)
        return {**model.log_of, "epochs": used.current_epoch, "next_step": module.next_step}

    def folder(self) -> Path:
        """For checkpoints; the same on all ranks."""
        found = self.root / f"{self.rows}-{self.devices}-{self.name}"
        found.mkdir(exist_ok=True)
        return found


def samples(ranks: Ranks, key: str = "trained") -> Counter[tuple[Any, ...]]:
    """How often each record was in a row, over all ranks."""
    found: Counter[tuple[Any, ...]] = Counter()
    for rank in ranks:
        for *_, ids in rank[key]:
            found.update((piece[0], *piece[2:4]) for row in ids for piece in row)
    return found


def count(ranks: Ranks, event: str) -> int:
    counts = {sum(kind == event for kind, _ in rank["events"]) for rank in ranks}
    assert len(counts) == 1, "the ranks agree"
    return counts.pop()


def check_passes(ranks: Ranks, passes: int, *, names: Sequence[str] = ("one",), validated: int | None = None) -> None:
    """Every record in each pass, and each end of an epoch once."""
    assert samples(ranks) == dict.fromkeys(samples(ranks), passes)
    assert len(samples(ranks)) == sum(RECORDS[name] for name in names)
    for rank in ranks:
        epochs = {piece[1] for *_, ids in rank["trained"] for row in ids for piece in row}
        assert epochs == set(range(passes))
    assert count(ranks, "ends") == passes
    assert count(ranks, "validated") == (passes if validated is None else validated)
    check_steps(ranks)


def check_steps(ranks: Ranks, first: int = 0) -> None:
    """Steps follow each other, on all ranks alike, and the optimizer steps on the last microbatch of each."""
    for rank in ranks:
        at = [(step, microbatch) for step, microbatch, _ in rank["trained"]]
        assert at == [(step, microbatch) for step, microbatch, _ in ranks[0]["trained"]]
        assert sorted(set(at)) == at
        assert sorted({step for step, _ in at}) == list(range(first, first + len({step for step, _ in at})))
        last = [a for a, after in zip(at, [*at[1:], (-1, 0)], strict=False) if after[1] == 0]
        assert last == [a for a, stepped in zip(at, rank["stepped"], strict=True) if stepped]


def num_steps(ranks: Ranks) -> int:
    return len({step for step, *_ in ranks[0]["trained"]})
