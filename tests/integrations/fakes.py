"""A stream without data: what Lightning sees of the loader, so that its loops can be tried at hundreds of points."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from megascale_lightning import CollatedRows, MegaScaleDataModule, PackedRows, Source, StreamError


class FakeInfo:
    """The part of `BatchInfo` that the integration reads."""

    rank_loss_tokens = 5
    num_groups = 1

    def __init__(
        self, step: int, microbatch: int, *, of: int, last_step: int | None, stream: str = "train", ends: bool = False
    ) -> None:
        self.step, self.microbatch, self.num_microbatches = step, microbatch, of
        self.stream = stream
        self.step_loss_tokens = 5 * of
        self.is_last_in_step = microbatch == of - 1
        self.is_last_in_stream = self.is_last_in_step and step == last_step
        self.is_last_in_pass = self.is_last_in_step and ends


class FakeLoader:
    """Steps 0, 1, 2, ... up to `num_steps`; in passes of `pass_length`."""

    def __init__(
        self,
        config: Any,
        *,
        rank: int,
        stream: str,
        session: FakeSession,
        auto_consume: bool,
        interrupted: Any,
        steps_per_epoch: int | None,
        before: Callable[[Any], None],
    ) -> None:
        self.session, self.stream, self.auto_consume, self.before = session, stream, auto_consume, before
        session.interrupted = interrupted
        session.loaders[stream] = self
        training = stream == "train"
        self.steps_per_epoch = steps_per_epoch or (config.steps_per_epoch if training else None)
        self.num_microbatches = session.accumulate if training else 1
        self.num_steps = session.num_steps if training else session.num_val_steps
        self.step = 0
        self.passes = 0
        self.closed = False
        self.last_reports: list = []
        self.last_info: FakeInfo | None = None
        self.handed: deque[FakeInfo] = deque()
        self.knows_length = True
        self.collated = isinstance(config.rows_of(stream), CollatedRows)

    @property
    def certificate(self) -> str:
        return f"{self.step:064x}"

    def __len__(self) -> int:
        if not self.knows_length:
            raise TypeError("inside a pass")
        steps = self.steps_per_epoch
        if steps is None and (self.stream != "train" or self.session.passes):
            steps = self.session.pass_steps(self.stream)
        if steps is None:
            raise TypeError("unsized")
        return int(steps) * self.num_microbatches

    def __iter__(self) -> Iterator[Any]:
        return Announced(self, self._batches())

    def _batches(self) -> Iterator[Any]:
        training = self.stream == "train"
        self.handed.clear()
        step = self.step if training else 0
        end = self.num_steps
        length = self.session.pass_length if self.session.passes and training else None
        while end is None or step < end:
            ends = length is not None and step % length == length - 1
            for microbatch in range(self.num_microbatches):
                last = None if end is None else end - 1
                info = FakeInfo(
                    step, microbatch, of=self.num_microbatches, last_step=last, stream=self.stream, ends=ends
                )
                self.last_info = info
                self.handed.append(info)
                x = torch.tensor([[float(step), float(microbatch)]])
                yield [x] if self.collated else {"x": x, "megascale": info}
            if ends:
                return
            step += 1

    def state_dict(self) -> dict[str, Any]:
        ended = self.num_steps is not None and self.step >= self.num_steps
        state = {"version": 1, "order_version": 1, "step": self.step, "ended": ended, "certificate": self.certificate}
        return {**state, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any], lists: Any = None, copied: Any = ()) -> None:
        self.step, self.passes = state["step"], state["passes"]
        self.handed.clear()

    def close(self) -> None:
        self.closed = True

    def mark_consumed(self, info: FakeInfo) -> None:
        if info.step != self.step:
            raise StreamError(f"step {info.step} consumed, {self.step} is next")
        if info.is_last_in_step:
            self.step += 1
            self.passes += info.is_last_in_pass


class Announced(Iterator[Any]):
    """As the one of `TrainerLoader`."""

    def __init__(self, loader: FakeLoader, batches: Iterator[Any]) -> None:
        self.loader, self.batches = loader, batches

    def __next__(self) -> Any:
        self.loader.before(self.loader)
        return next(self.batches)


class FakeSession:
    """Counts what the DataModule asks of a session."""

    num_steps: int | None = None
    num_val_steps = 2
    pass_length: int | None = None
    knows_lengths = False
    made: list[FakeSession] = []  # noqa: RUF012

    def __init__(
        self,
        config: Any,
        *,
        tree: Any = None,
        rank: int = 0,
        accumulate: int | None = None,
        broadcast: Callable[[Any], Any] | None = None,
        kinds: Collection[str] | None = None,
        passes: bool = False,
        frozen: Any = None,
        mesh: Any = None,
    ) -> None:
        self.config, self.tree, self.rank, self.broadcast = config, tree, rank, broadcast
        self.accumulate = accumulate or 1
        self.kinds, self.passes = kinds, passes
        self.interrupted: Any = None
        self.loaders: dict[str, FakeLoader] = {}
        self.closed = 0
        FakeSession.made.append(self)

    packed_file_lists = b""

    def pass_batches(self, stream: str) -> int | None:
        steps = self.pass_steps(stream)
        return None if steps is None else steps * (self.accumulate if stream == "train" else 1)

    def pass_steps(self, stream: str) -> int | None:
        if not self.knows_lengths:
            return None
        return self.pass_length if stream == "train" else self.num_val_steps

    def close(self, barrier: Callable[[], None] | None = None) -> None:
        self.closed += 1
        if barrier is not None:
            barrier()


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
    collated: bool = False,
    **more: Any,
) -> MegaScaleDataModule:
    """A DataModule of one source whose files are never looked for."""
    sources = [Source("web", "web/*.jsonl", epochs=epochs)]
    rows = CollatedRows(micro) if collated else PackedRows(seq_len=8, micro_batch_size=micro)
    return kind(**{"sources": sources, "rows": rows, "global_batch_size": size, **more})


def make_trainer(**more: Any) -> L.Trainer:
    """A trainer on the CPU that writes nothing."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **more})
