"""Train a small GPT on four sources of text with two ranks, stop, and resume with the very next step.

    python examples/lightning_text.py                # about a minute on two cores
    python examples/lightning_text.py --quick        # half a minute
    python examples/lightning_text.py --steps 300    # longer

The part to copy is `make_data`, `TextModel.training_step` and `train`; what follows them looks at what happened.
"""

import argparse
import dataclasses
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import mean

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from text_data import VOCABULARY, tokenize, write_sources
from text_model import GPT, summed_loss

from megascale_lightning import (
    AttentionCost,
    Balanced,
    ClientPlaceTree,
    LoaderConfig,
    MegaScaleDataModule,
    MegaScaleLoader,
    PackedRows,
    Source,
    reduce_loss,
)

RANKS, ACCUMULATE, MICRO_BATCH, SEQ_LEN, WIDTH = 2, 4, 2, 1024, 64
CHECKPOINT_EVERY = 5


def make_data(folder: Path, steps: int) -> MegaScaleDataModule:
    """Four sources, mixed by sample, packed into rows of 1,024 tokens, rows dealt so that ranks have equal work."""
    return MegaScaleDataModule(
        sources=[
            Source("code", str(folder / "code/*.parquet"), weight=0.45, transform=tokenize),
            Source("docstrings", str(folder / "docstrings.jsonl"), weight=0.45, transform=tokenize),
            Source("manual", str(folder / "manual/*.parquet"), weight=0.05, transform=tokenize),
            Source("packages", str(folder / "packages.jsonl"), weight=0.05, transform=tokenize),
        ],
        rows=PackedRows(seq_len=SEQ_LEN, micro_batch_size=MICRO_BATCH),
        global_batch_size=MICRO_BATCH * RANKS * ACCUMULATE,
        # A narrow model feels the square of a document's length early: at about 12 x width tokens.
        strategy=Balanced(cost=AttentionCost(crossover=12 * WIDTH)),
        steps_per_epoch=steps,
    )


class TextModel(L.LightningModule):
    """Next-byte prediction on packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(VOCABULARY, SEQ_LEN, WIDTH)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        info = batch["megascale"]
        logits = self.gpt(batch["input_ids"], batch["position_ids"])
        loss = summed_loss(logits, batch["labels"])
        self.log("loss", loss.detach() / max(info.num_loss_tokens, 1), prog_bar=True)
        # Microbatches hold different numbers of targets: this makes the step's gradient that of the mean over all.
        return reduce_loss(loss, info, output=logits)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(data: MegaScaleDataModule, folder: Path, max_steps: int, observer: "Observer", checkpoint=None) -> Path:
    """Train up to step `max_steps`, from the beginning or from a checkpoint; the last checkpoint written."""
    checkpoints = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        accumulate_grad_batches=ACCUMULATE,
        max_epochs=1,
        max_steps=max_steps,
        callbacks=[checkpoints, observer, ProgressBar()],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(TextModel(), datamodule=data, ckpt_path=checkpoint)
    return Path(checkpoints.last_model_path)


class ProgressBar(TQDMProgressBar):
    """Lightning's own, which otherwise does not know its length if it starts in the middle of an epoch."""

    def init_train_tqdm(self):
        bar = super().init_train_tqdm()
        bar.total = self.total_train_batches
        return bar


class Observer(L.Callback):
    """Notes what one rank was given, and how it went."""

    def __init__(self) -> None:
        self.samples: dict[int, list] = {}  # step -> the samples of this rank's rows
        self.losses: dict[int, list[float]] = {}  # step -> mean loss of each of this rank's microbatches
        self.reports: list = []  # how even the work of each step was

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        info = batch["megascale"]
        self.samples.setdefault(info.step, []).extend(info.sample_ids())
        self.losses.setdefault(info.step, []).append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer, module) -> None:
        seen = trainer.datamodule.last_reports
        self.reports = [report for report in seen if report.step in self.samples]

    def mean_loss(self, steps: list[int]) -> float:
        return mean([loss for step in steps for loss in self.losses[step]])


def read_undisturbed(config: LoaderConfig, steps: int) -> tuple[dict[int, list], str]:
    """What rank 0 gets in the first steps, and their certificate, read in one go: no Ray, no trainer, no stop."""
    samples: dict[int, list] = {}
    tree = ClientPlaceTree.from_sizes(dp=RANKS)
    with MegaScaleLoader(dataclasses.replace(config, runtime="local"), tree, rank=0) as loader:
        for batch in loader:
            info = batch["megascale"]
            samples.setdefault(info.step, []).extend(info.sample_ids())
            if info.is_last_in_step and info.step == steps - 1:
                return samples, loader.certificate
    raise RuntimeError(f"the data ended before step {steps}")


def print_work(reports: list) -> None:
    """A table of the ranks' work per step, in thousands of cost units, before and after balancing."""
    print("\nWork per rank, in thousand cost units a step; excess: of the slower rank over the mean")
    print(f"{'':>10} | {'rows dealt in turn':^27} | {'rows balanced':^27}")
    print(f"{'step':>10} | {'rank 0':>8} {'rank 1':>8} {'excess':>9} | {'rank 0':>8} {'rank 1':>8} {'excess':>9}")
    for report in reports[-5:]:
        print(f"{report.step:>10} | {work(report.group_costs_before)} | {work(report.group_costs)}")
    before = mean([excess(report.group_costs_before) for report in reports])
    after = mean([excess(report.group_costs) for report in reports])
    print(f"{'all steps':>10} | {before:>27.2%} | {after:>27.2%}")


def excess(costs) -> float:
    return float(costs.max() / costs.mean()) - 1


def work(costs) -> str:
    return " ".join(f"{cost / 1e3:>8.2f}" for cost in costs) + f" {excess(costs):>9.2%}"


def run(folder: Path, steps: int) -> bool:
    """Train, stop half-way, resume; then prove that nothing was repeated or lost."""
    write_sources(folder)
    stop = steps // 2 // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    before, after = Observer(), Observer()
    L.seed_everything(0, verbose=False)
    checkpoint = train(make_data(folder, steps), folder, stop, before)
    data = make_data(folder, steps)
    train(data, folder, steps, after, checkpoint)
    if data.trainer.global_rank != 0:
        return True

    first, last = list(before.samples)[:5], list(after.samples)[-5:]
    resumed = min(after.samples)
    print_work(before.reports + after.reports)
    print(f"\nMean loss: {before.mean_loss(first):.3f} in the first steps, {after.mean_loss(last):.3f} in the last")

    samples, certificate = read_undisturbed(data.config, steps)
    print(f"\nStopped after step {max(before.samples)}, resumed with step {resumed}, whose first row holds")
    for sample in after.samples[resumed][0][:4]:
        print("   ", sample)
    same = {**before.samples, **after.samples} == samples
    print(f"The same samples as one undisturbed read, in all {steps} steps: {'yes' if same else 'NO'}")
    print(f"Order certificate of the stopped and resumed run  {data.certificate}")
    print(f"Order certificate of the undisturbed read         {certificate}")
    return same and resumed == max(before.samples) + 1 and data.certificate == certificate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, half before the stop; at least 10")
    parser.add_argument("--quick", action="store_true", help="20 steps")
    parser.add_argument("--work-dir", type=Path, help="where data and checkpoints go; default: a temporary folder")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists")
    steps = 20 if args.quick else max(args.steps, 10)
    if args.work_dir:
        sys.exit(0 if run(args.work_dir, steps) else 1)
    with tempfile.TemporaryDirectory() as folder:
        # Lightning starts the other rank with the arguments of this one, and it has to find the same folder.
        sys.argv += ["--work-dir", folder]
        sys.exit(0 if run(Path(folder), steps) else 1)


if __name__ == "__main__":
    main()
