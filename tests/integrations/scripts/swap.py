"""Trains on an adopted DataModule, checking every batch, and writes down which samples each rank was given.

Run by the tests as a program of its own, since DDP starts it again for each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402

from megascale_lightning import MegaScaleDataModule  # noqa: E402
from tests.integrations.swapped import FACE_BATCHES, Checking, PictureData  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--runtime", default="local")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = MegaScaleDataModule.from_datamodule(PictureData(batch_size=10), runtime=arguments.runtime)
    model = Checking(FACE_BATCHES)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp" if arguments.devices > 1 else "auto",
        devices=arguments.devices,
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data)
    found = {"seen": model.seen, "certificate": data.certificate, "calls": sorted(set(data.wrapped.calls))}
    (arguments.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
