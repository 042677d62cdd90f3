"""A stream without data: what Lightning sees of the loader, so that its loops can be tried at hundreds of points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from megascale_lightning import MegaScaleDataModule, PackedRows, Source, StreamError


class FakeInfo:
    """The part of `BatchInfo` that the integration reads."""

    num_loss_tokens = 5
    num_groups = 1

    def __init__(self, step: int, microbatch: int, *, of: int, last_step: int | None) -> None:
        self.step, self.microbatch, self.num_microbatches = step, microbatch, of
        self.step_loss_tokens = 5 * of
        self.is_last_in_step = microbatch == of - 1
        self.is_last_in_stream = self.is_last_in_step and step == last_step


class FakeLoader:
    """Steps 0, 1, 2, ... up to `num_steps`."""

    def __init__(self, session: FakeSession, stream: str, auto_consume: bool) -> None:
        self.session, self.stream, self.auto_consume = session, stream, auto_consume
        self.num_microbatches = session.accumulate if stream == "train" else 1
        self.num_steps = session.num_steps if stream == "train" else session.num_val_steps
        self.step = 0
        self.closed = False
        self.last_reports: list = []
        self.last_info: FakeInfo | None = None

    @property
    def certificate(self) -> str:
        return f"{self.step:064x}"

    def __len__(self) -> int:
        steps = self.session.config.steps_per_epoch
        if steps is None or self.stream != "train":
            raise TypeError("unsized")
        return int(steps) * self.num_microbatches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step = self.step if self.stream == "train" else 0
        while self.num_steps is None or step < self.num_steps:
            for microbatch in range(self.num_microbatches):
                last = None if self.num_steps is None else self.num_steps - 1
                self.last_info = FakeInfo(step, microbatch, of=self.num_microbatches, last_step=last)
                yield {"x": torch.tensor([[float(step), float(microbatch)]]), "megascale": self.last_info}
            step += 1

    def state_dict(self) -> dict[str, Any]:
        ended = self.num_steps is not None and self.step >= self.num_steps
        return {"version": 1, "order_version": 1, "step": self.step, "ended": ended, "certificate": self.certificate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def close(self) -> None:
        self.closed = True

    def mark_consumed(self, info: FakeInfo) -> None:
        if info.step != self.step:
            raise StreamError(f"step {info.step} consumed, {self.step} is next")
        if info.is_last_in_step:
            self.step += 1


class FakeSession:
    """Counts what the DataModule asks of a session."""

    num_steps: int | None = None
    num_val_steps = 2
    made: list[FakeSession] = []  # noqa: RUF012

    def __init__(
        self,
        config: Any,
        *,
        tree: Any = None,
        rank: int = 0,
        accumulate: int | None = None,
        broadcast: Callable[[Any], Any] | None = None,
    ) -> None:
        self.config, self.tree, self.rank, self.broadcast = config, tree, rank, broadcast
        self.accumulate = accumulate or 1
        self.interrupted: Any = None
        self.loaders: dict[str, FakeLoader] = {}
        self.closed = 0
        FakeSession.made.append(self)

    def loader(self, stream: str = "train", *, auto_consume: bool = True, interrupted: Any = None) -> FakeLoader:
        self.interrupted = interrupted
        self.loaders[stream] = FakeLoader(self, stream, auto_consume)
        return self.loaders[stream]

    def close(self, barrier: Callable[[], None] | None = None) -> None:
        self.closed += 1
        if barrier is not None:
            barrier()


def fake_loader(
    config: Any, *, rank: int, stream: str, session: FakeSession, auto_consume: bool, interrupted: Any
) -> FakeLoader:
    """In the place of `MegaScaleLoader`."""
    return session.loader(stream, auto_consume=auto_consume, interrupted=interrupted)


class SaveAt(L.Callback):
    """Saves in every hook that can save, under the number of the save and the name of the hook."""

    def __init__(self, folder: Path, *, starts: bool = False) -> None:
        self.folder, self.starts = folder, starts
        self.saved: list[Path] = []

    def save(self, trainer: L.Trainer, hook: str) -> None:
        path = self.folder / f"{len(self.saved):03d}-{hook}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append(path)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.starts:
            self.save(trainer, "start")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "exception")


def make_data(
    micro: int = 2,
    size: int | None = None,
    *,
    epochs: int | None = None,
    kind: type[MegaScaleDataModule] = MegaScaleDataModule,
    **more: Any,
) -> MegaScaleDataModule:
    """A DataModule of one source whose files are never looked for."""
    sources = [Source("web", "web/*.jsonl", epochs=epochs)]
    rows = PackedRows(seq_len=8, micro_batch_size=micro)
    return kind(sources=sources, rows=rows, global_batch_size=size, **more)


def make_trainer(**more: Any) -> L.Trainer:
    """A trainer on the CPU that writes nothing."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **more})
