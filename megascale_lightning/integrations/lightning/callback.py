"""`MegaScaleStateCallback`: counts what was trained on, and keeps that position in every checkpoint.

It stands before all other callbacks, so that a checkpoint written at the end of a batch already counts that batch.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from megascale_lightning.checkpointing.state import STATE_KEY
from megascale_lightning.errors import ConfigError, MegaScaleWarning, StreamError
from megascale_lightning.integrations.lightning.progress import settle_progress

if TYPE_CHECKING:
    from megascale_lightning.client.info import BatchInfo
    from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule

__all__ = ["MegaScaleStateCallback"]

logger = logging.getLogger(__name__)


class MegaScaleStateCallback(L.Callback):
    """Keeps the stream's position; `MegaScaleDataModule.setup` puts it in front of the trainer's callbacks."""

    def __init__(self) -> None:
        self._data: MegaScaleDataModule | None = None
        self._info: BatchInfo | None = None
        self._served = False

    @property
    def state_key(self) -> str:
        """Fixed, so that a renamed DataModule still finds its state."""
        return STATE_KEY

    def attach(self, data: MegaScaleDataModule) -> None:
        """Work for this DataModule from now on."""
        self._data, self._info, self._served = data, None, True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that there is a stream to keep the position of."""
        if self._data is not None and stage == "fit" and not self._data.running:
            self._data = None  # the trainer goes on with other data
        if not self._served:
            raise ConfigError(
                "MegaScaleStateCallback needs a MegaScaleDataModule: call trainer.fit(model, "
                "datamodule=MegaScaleDataModule(...)), which brings the callback itself"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training stream: local, JSON-like."""
        return {} if self._data is None else self._data.position()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take out the copy that Lightning makes of the loader's state: it would load it at another time than ours."""
        if self._data is not None:
            (checkpoint.get("loops") or {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find the stream's state, whatever key it lies under, and make Lightning's counters agree with it."""
        if self._data is None or trainer.state.fn != TrainerFn.FITTING:
            return
        state = _find_state(checkpoint, type(self._data).__qualname__)
        if state is None:
            if trainer.is_global_zero and self._data.next_step == 0:
                warnings.warn(
                    "the checkpoint holds no position in the data (saved by a run without MegaScaleDataModule?): the "
                    "stream starts at its first step",
                    MegaScaleWarning,
                    stacklevel=2,
                )
            return
        self._data.load_position(state)
        loops = (checkpoint.get("loops") or {}).get("fit_loop")
        if loops:
            now = self._data.num_microbatches
            saved = int(state.get("trainer", {}).get("num_microbatches", now))
            settle_progress(loops, saved=saved, now=now, step_limited=trainer.max_steps != -1)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop a batch that was fetched before the state arrived (FSDP and ModelParallel restore late)."""
        self._info = None
        if not isinstance(trainer.fit_loop._data_source.instance, L.LightningDataModule):
            self._data = None  # the trainer was given loaders; it has only kept, and set up, the DataModule of before
        if self._data is None:
            return
        fetcher = trainer.fit_loop._data_fetcher
        if self._data.batches_outdated and fetcher is not None:
            iter(fetcher)
            self._data.batches_outdated = False
        if self._data.ended:
            logger.info("all data are consumed after %d steps: there is nothing left to train on", self._data.next_step)
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to go round in empty epochs.

        Raises:
            StreamError: The data have ended, and the trainer wants more steps.
        """
        if self._data is not None and self._data.ended:
            raise StreamError(
                f"the data ended after step {self._data.next_step - 1}, before what the trainer was asked for "
                f"(min_steps={trainer.min_steps}, min_epochs={trainer.min_epochs}): lower these, or give the sources "
                "more epochs="
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check that the batch is the one that comes next."""
        if self._data is not None:
            info = _info_of(batch)
            self._check_arrival(info, self._data.next_step)
            self._info = info

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        """Refuse a loss of nan on a microbatch without targets: a mean over no token."""
        info = self._info
        if info is not None and info.num_loss_tokens == 0 and not bool(torch.isfinite(loss).all()):
            raise ConfigError(
                f"the loss of step {info.step}, microbatch {info.microbatch} is {loss.sum().item()}, and the "
                "microbatch has no target token (filler rows, or labels that are all -100): a mean over nothing. "
                "Return reduce_loss(summed_loss, batch['megascale']) from training_step "
                '(megascale_lightning.reduce_loss), or leave incomplete last steps out with last_step="drop"'
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch as consumed; end the training where the stream ends."""
        if self._data is None:
            return
        info = _info_of(batch)
        self._data.mark_consumed(info)
        if info.is_last_in_stream and info.is_last_in_step:
            trainer.should_stop = True

    def _check_arrival(self, info: BatchInfo, step: int) -> None:
        last = self._info
        due = 0 if last is None or last.is_last_in_step else last.microbatch + 1
        # An epoch that was left in the middle of a step begins again with that step.
        if info.step != step or info.microbatch not in (0, due):
            wanted = f"step {step}, microbatch {due}"
            raise StreamError(
                f"a batch of step {info.step}, microbatch {info.microbatch} arrived where {wanted} was due: was the "
                "loader iterated outside of the trainer, or were batches skipped?"
            )


def _info_of(batch: Any) -> BatchInfo:
    try:
        info: BatchInfo = batch["megascale"]
    except (TypeError, KeyError, IndexError):
        kind = type(batch).__name__
        raise ConfigError(
            f'the batch that reached the trainer ({kind}) has no "megascale" entry, without which nobody knows what '
            "was trained on: keep the entry in on_before_batch_transfer and on_after_batch_transfer, and take the "
            "model's inputs with model_inputs(batch)"
        ) from None
    return info


def _find_state(checkpoint: dict[str, Any], data_key: str) -> dict[str, Any] | None:
    """Return the stream's state: from the callbacks, this DataModule's key, or that of a DataModule since renamed."""
    candidates = [(checkpoint.get("callbacks") or {}).get(STATE_KEY), checkpoint.get(data_key), *checkpoint.values()]
    for state in candidates:
        if isinstance(state, dict) and "order_version" in state and "trainer" in state:
            return state
    return None
