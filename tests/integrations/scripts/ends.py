"""Trains like train.py, steps of four rows, and stands still where it is told to: in training, or without a batch.

What the tests look at are files: `pid<rank>`, `reached<rank>` (see `Hold`), and `waiting<rank>`, touched again and
again while the trainer waits for a batch that is not there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from megascale_lightning import MegaScaleDataModule, PackedRows, Source  # noqa: E402
from tests.integrations.corpora import SEQ_LEN  # noqa: E402
from tests.integrations.holding import Hold  # noqa: E402
from tests.integrations.scripts.train import TinyModel  # noqa: E402


class HeldModel(TinyModel):
    hold: Hold

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.hold()
        return super().training_step(batch, batch_idx)


class WatchedData(MegaScaleDataModule):
    """Says when it is waited for: while the trainer waits, it is asked every moment whether a signal came."""

    folder: Path

    def _interrupted(self) -> bool:
        (self.folder / f"waiting{self.trainer.local_rank}").touch()
        return super()._interrupted()


def fit(
    corpus: Path,
    out: Path,
    *,
    runtime: str = "local",
    devices: int = 1,
    steps: int = 1_000_000,
    hold_step: int = -1,
    hold_sample: int = -1,
    in_place: bool = False,
    save: bool = True,
    save_at_end: bool = False,
    resume: Path | None = None,
) -> None:
    """Train; `hold_step` counts microbatches of a rank, `hold_sample` samples of the loader, both from 0."""
    # In one process, a transform that is alone with the global random states runs in the trainer's thread.
    source = Source("web", str(corpus / "web/*.parquet"), transform=Hold(out, hold_sample), thread_safe=not in_place)
    rows = PackedRows(seq_len=SEQ_LEN, micro_batch_size=2, pack_ahead=16)
    data = WatchedData(sources=[source], rows=rows, global_batch_size=4, runtime=runtime, window_units=1)
    data.folder = out
    model = HeldModel(out / "whole")
    model.hold = Hold(out, hold_step)
    every = ModelCheckpoint(out / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    # Lightning's callback saves no step twice, so that this one writes at the end alone.
    last = ModelCheckpoint(out / "ended", filename="{step}", every_n_train_steps=10**9, save_on_exception=True)
    callbacks = [every] * save + [last] * save_at_end
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp" if devices > 1 else "auto",
        devices=devices,
        accumulate_grad_batches=2 // devices,
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        default_root_dir=out,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runtime", default="ray")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--hold-step", type=int, default=-1)
    parser.add_argument("--hold-sample", type=int, default=-1)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--save-at-end", action="store_true")
    arguments = vars(parser.parse_args())
    # A shell without job control starts what is in the background, the tests too, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    (arguments["out"] / f"pid{os.environ.get('LOCAL_RANK', 0)}").write_text(str(os.getpid()))
    fit(**arguments)


if __name__ == "__main__":
    main()
