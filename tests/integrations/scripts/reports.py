"""Trains on two ranks what does not divide by two, and writes down, per rank, what each step and validation held.

Run by the tests as a program of its own, since DDP starts it again for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402

from megascale_lightning import CollatedRows, MegaScaleDataModule, Source  # noqa: E402

RECORDS, HELD, BAD = 37, 7, 3


def drop_thirds(sample: dict[str, int]) -> dict[str, int] | None:
    return None if sample["x"] % BAD == 0 else sample


class Model(L.LightningModule):
    """Its gradients meet those of the other rank: if one had a batch more, it would wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.log_of: list[tuple[str, int, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        self.log_of.append(("trained", info.step, info.sample_ids()))
        weights = torch.as_tensor(info.row_weights)
        return (self.layer(batch["x"][:, None].float()).squeeze(-1) * weights).sum() / 100

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_of.append(("steps", self.trainer.global_step, None))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        self.log_of.append(("validated", self.trainer.global_step, info.sample_ids()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(data: dict[str, Any], source: dict[str, Any], **trainer: Any) -> list[Any]:
    records = [{"x": number} for number in range(RECORDS)]
    module = MegaScaleDataModule(
        sources=[Source("all", records, **source)],
        val_sources=[Source("held", records[:HELD])],
        rows=CollatedRows(2),
        runtime="local",
        **data,
    )
    model = Model()
    L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **trainer,
    ).fit(model, datamodule=module)
    return model.log_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "runs dry": fit({}, {"epochs": 1}, max_steps=100, val_check_interval=3, check_val_every_n_epoch=None),
        "filtered": fit({}, {"transform": drop_thirds}, max_epochs=2, accumulate_grad_batches=4),
    }
    (arguments.out / f"rank{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
