"""Trains a tiny model with Lightning and writes down, per rank, what every step was made of.

Run by the tests as a program of its own, since DDP starts it again for each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from megascale_lightning import reduce_loss  # noqa: E402
from tests.integrations.corpora import VOCABULARY, held_out, real_data  # noqa: E402


class TinyModel(L.LightningModule):
    """An embedding and a linear layer in float64; logs one JSON line for every microbatch."""

    def __init__(self, log: Path, *, one_cycle: bool = False, fail: str = "", fail_at: int = -1) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, VOCABULARY, dtype=torch.float64)
        self.log_folder, self.one_cycle, self.fail, self.fail_at = log, one_cycle, fail, fail_at
        self.count = 0

    def setup(self, stage: str) -> None:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self.lines = open(self.log_folder / f"rank{self.global_rank}.jsonl", "a")  # noqa: SIM115

    def teardown(self, stage: str) -> None:
        self.lines.close()

    def write(self, **values: Any) -> None:
        self.lines.write(json.dumps(values) + "\n")
        self.lines.flush()

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        logits = self.head(self.embedding(batch["input_ids"]))[:, :-1]
        targets = batch["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def on_train_start(self) -> None:
        self.count = self.trainer.global_step

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.fail and batch["megascale"].step == self.fail_at:
            raise KeyboardInterrupt if self.fail == "interrupt" else RuntimeError("wanted")
        return reduce_loss(self.loss(batch), batch["megascale"])

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Any], batch_idx: int) -> None:
        info = batch["megascale"]
        stepped, self.count = self.trainer.global_step != self.count, self.trainer.global_step
        self.write(
            step=info.step,
            microbatch=info.microbatch,
            ids=info.sample_ids(),
            tokens=batch["input_ids"].tolist(),
            stepped=stepped,
            rate=self.trainer.optimizers[0].param_groups[0]["lr"],
            weight=self.head.weight.sum().item() if stepped else None,
        )

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            info = batch["megascale"]
            self.write(validation=dataloader_idx, step=info.step, ids=info.sample_ids(), of=self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.one_cycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--size", type=int)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--validate-every", type=int)
    parser.add_argument("--runtime", default="local")
    parser.add_argument("--one-cycle", action="store_true")
    parser.add_argument("--fail", default="")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--resume", type=Path, nargs="*", default=[])
    return parser.parse_args()


def make_trainer(arguments: argparse.Namespace, folder: Path, steps: int) -> L.Trainer:
    validate = {"limit_val_batches": 0}
    if arguments.validate_every:
        validate = {"val_check_interval": arguments.validate_every, "check_val_every_n_epoch": None}
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return L.Trainer(
        accelerator="cpu",
        strategy=arguments.strategy,
        devices=arguments.devices,
        num_nodes=arguments.nodes,
        accumulate_grad_batches=arguments.accumulate,
        max_steps=steps,
        max_epochs=arguments.epochs,
        limit_train_batches=arguments.limit,
        callbacks=[saver] if arguments.save else [],
        enable_checkpointing=arguments.save,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **validate,
    )


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    checkpoints = arguments.resume or [None]
    for checkpoint in checkpoints:
        folder = arguments.out / ("whole" if checkpoint is None else checkpoint.stem)
        L.seed_everything(0, verbose=False)
        settings: dict[str, Any] = {"micro": arguments.micro, "global_batch_size": arguments.size}
        if arguments.validate_every:
            settings["val_sources"] = held_out(arguments.corpus)
        data = real_data(arguments.corpus, runtime=arguments.runtime, **settings)
        model = TinyModel(folder, one_cycle=arguments.one_cycle, fail=arguments.fail, fail_at=arguments.fail_at)
        for fit in range(arguments.fits):
            trainer = make_trainer(arguments, folder, arguments.steps)
            trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
            if trainer.is_global_zero:
                end = {"global_step": trainer.global_step, "next_step": data.next_step, "certificate": data.certificate}
                (folder / f"end{fit}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
