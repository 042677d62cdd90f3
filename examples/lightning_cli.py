"""LightningCLI with a MegaScaleDataModule: the mixture in a YAML file, one weight from the command line, resume.

    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --data.weights.manual=0.4
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --ckpt_path checkpoints/step=50.ckpt
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --print_config
    python examples/lightning_cli.py --quick     # some twenty steps, with a stop and a resume, and what came of it

Text and checkpoints go into the current folder; `--quick` takes a temporary one, or that of `--work-dir`.
"""

import argparse
import dataclasses
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from text_data import VOCABULARY, write_sources
from text_model import GPT, summed_loss

from megascale_lightning import LoaderConfig, MegaScaleDataModule, MegaScaleLoader, reduce_loss

CONFIG = Path(__file__).resolve().with_suffix(".yaml")


class TextModel(L.LightningModule):
    """Next-byte prediction on packed rows.

    Args:
        width: Of the model.
        max_len: Longest piece of a document, `seq_len` of the rows.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 64, max_len: int = 256, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(VOCABULARY, max_len, width)
        self.samples: Counter[str] = Counter()
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        info = batch["megascale"]
        self.samples.update(source for row in info.sample_ids() for source, *_ in row)
        logits = self.gpt(batch["input_ids"], batch["position_ids"])
        loss = summed_loss(logits, batch["labels"])
        self.log("loss", loss.detach() / max(info.num_loss_tokens, 1), prog_bar=True)
        return reduce_loss(loss, info, output=logits)

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        loss = summed_loss(self.gpt(batch["input_ids"], batch["position_ids"]), batch["labels"])
        self.sums += torch.tensor([loss.item(), batch["megascale"].num_loss_tokens], dtype=torch.float64)

    def on_validation_epoch_end(self) -> None:
        loss, tokens = self.trainer.strategy.reduce(self.sums, reduce_op="sum")
        self.log("val_loss", loss / tokens, prog_bar=True)
        self.sums.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main(arguments: list[str] | None = None) -> LightningCLI:
    """The whole program of a user: everything else is in the YAML file."""
    write_sources(Path("text"))
    return LightningCLI(TextModel, MegaScaleDataModule, args=arguments, save_config_kwargs={"overwrite": True})


def quick() -> bool:
    """Train ten steps with another weight, resume up to twenty, and compare with one undisturbed read."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    settings = ["fit", "--config", str(CONFIG), "--data.weights.manual=0.4", "--data.runtime=local"]
    settings += ["--trainer.logger=false", "--trainer.val_check_interval=20"]
    first = main([*settings, "--trainer.max_steps=10"])
    second = main([*settings, "--trainer.max_steps=20", "--ckpt_path=checkpoints/step=10.ckpt"])

    weights = second.datamodule.config.weights_of("train")
    print("\nWeights:", ", ".join(f"{name} {weight:g}" for name, weight in weights.items()))
    for name, cli in (("Steps 0 to 9", first), ("Steps 10 to 19", second)):
        loss = cli.trainer.callback_metrics["val_loss"]
        print(f"{name}: pieces by source {dict(sorted(cli.model.samples.items()))}, validation loss {loss:.3f}")
    ours, theirs = second.datamodule.certificate, undisturbed(second.datamodule.config, 20)
    print(f"Order certificate of the stopped and resumed run  {ours}")
    print(f"Order certificate of the undisturbed read         {theirs}")
    return ours == theirs


def undisturbed(config: LoaderConfig, steps: int) -> str:
    """The certificate of the first steps, read in one go, without a trainer."""
    with MegaScaleLoader(dataclasses.replace(config, runtime="local"), accumulate=2) as loader:
        for batch in loader:
            if batch["megascale"].is_last_in_step and batch["megascale"].step == steps - 1:
                return loader.certificate
    raise RuntimeError(f"the data ended before step {steps}")


def run_quick() -> bool:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work-dir", type=Path)
    args = parser.parse_args()
    if args.work_dir:
        os.chdir(args.work_dir)
        return quick()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        done = quick()
        os.chdir(CONFIG.parent)
        return done


if __name__ == "__main__":
    if "--quick" in sys.argv:
        sys.exit(0 if run_quick() else 1)
    main()
