"""`MegaScaleStateCallback`: counts what was trained on, and keeps that position in every checkpoint.

It stands before all other callbacks, so that a checkpoint written at the end of a batch already counts that batch.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import TrainerFn

from megascale_lightning.checkpointing.filelists import FILES_KEY, unpack_lists
from megascale_lightning.checkpointing.state import STATE_KEY
from megascale_lightning.errors import ConfigError, MegaScaleWarning, StreamError
from megascale_lightning.integrations.lightning.progress import is_at_end_of_epoch, settle_progress

if TYPE_CHECKING:
    from megascale_lightning.client.info import BatchInfo
    from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule

__all__ = ["MegaScaleStateCallback", "insert_callback", "meet_callback"]

logger = logging.getLogger(__name__)


class MegaScaleStateCallback(L.Callback):
    """Keeps the stream's position; `MegaScaleDataModule.setup` puts it in front of the trainer's callbacks."""

    def __init__(self) -> None:
        self._data: MegaScaleDataModule | None = None
        self._info: BatchInfo | None = None
        self._served = False
        self._closes_epoch = self._skips_to_end = False
        self._warned = False

    @property
    def state_key(self) -> str:
        """Fixed, so that a renamed DataModule still finds its state."""
        return STATE_KEY

    def attach(self, data: MegaScaleDataModule) -> None:
        """Work for this DataModule from now on."""
        self._data, self._info, self._served, self._closes_epoch = data, None, True, False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that there is a stream to keep the position of."""
        if self._data is not None and not self._data.running:
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
        """Keep the file lists beside the state, and take out the copy that Lightning makes of the loader's state.

        It would load that at another time than ours.
        """
        if self._data is not None:
            lists = self._data.packed_file_lists()
            if lists and trainer.is_global_zero:
                checkpoint[FILES_KEY] = torch.frombuffer(bytearray(lists), dtype=torch.uint8)
            (checkpoint.get("loops") or {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find the stream's state, whatever key it lies under, and make Lightning's counters agree with it."""
        if self._data is None or trainer.state.fn != TrainerFn.FITTING:
            return
        state = _find_state(checkpoint, type(self._data).__qualname__)
        if state is None:
            self._data.take_over(checkpoint)
            if trainer.is_global_zero and self._data.next_step == 0:
                warnings.warn(
                    "the checkpoint holds no position in the data (saved by a run without MegaScaleDataModule?): the "
                    "stream starts at its first step",
                    MegaScaleWarning,
                    stacklevel=2,
                )
            return
        packed = checkpoint.get(FILES_KEY)
        self._data.load_position(state, None if packed is None else unpack_lists(packed.numpy().tobytes()))
        loops = (checkpoint.get("loops") or {}).get("fit_loop")
        if loops:
            now = self._data.resolved()
            then = now | state.get("trainer", {})
            passes = self._data.in_passes
            settle_progress(
                loops,
                saved=then["num_microbatches"],
                now=now["num_microbatches"],
                step_limited=trainer.max_steps != -1,
                passes=passes,
                rows=(then["global_batch_size"], now["global_batch_size"]),
            )
            self._closes_epoch = passes and is_at_end_of_epoch(loops)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on, whoever asks for the training loader is going to iterate it."""
        if self._data is not None:
            self._data.schedules_are_made = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop a batch that was fetched before the state arrived (FSDP and ModelParallel restore late).

        Raises:
            StateError: The state that arrived so late was refused, and this callback did not see the checkpoint.
        """
        self._info = None
        if not isinstance(trainer.fit_loop._data_source.instance, L.LightningDataModule):
            self._data = None  # the trainer was given loaders; it has only kept, and set up, the DataModule of before
        if self._data is None:
            return
        if self._data.refused is not None:
            raise self._data.refused
        fetcher = trainer.fit_loop._data_fetcher
        partial = self._begins_inside_a_pass(trainer)
        if partial:
            self._show_length(trainer, shown=False)
        if (self._data.batches_outdated or partial) and fetcher is not None:
            iter(fetcher)
            self._data.batches_outdated = False
        if self._data.ended:
            logger.info("all data are consumed after %d steps: there is nothing left to train on", self._data.next_step)
            trainer.should_stop = True
        if self._closes_epoch:
            self._close_epoch(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to go round in empty epochs.

        Raises:
            StreamError: The data have ended, and the trainer wants more steps.
        """
        if self._data is None:
            return
        every = getattr(trainer, "val_check_interval", None)  # not set where validation goes by the clock
        if self._data.in_passes and every == 1.0 and isinstance(every, float) and trainer.check_val_every_n_epoch:
            # At the end of the pass, wherever this epoch began in it: Lightning would count the batches of a whole one.
            trainer.val_check_batch = float("inf")
        if self._data.ended:
            raise StreamError(
                f"the data ended after step {self._data.next_step - 1}, before what the trainer was asked for "
                f"(min_steps={trainer.min_steps}, min_epochs={trainer.min_epochs}): lower these, or give the sources "
                "more epochs="
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check that the batch is the one that comes next."""
        if self._data is not None and self._data.loaders is not None:
            info = self._data.loaders.arrived(trainer.fit_loop._data_fetcher, batch)
            self._check_arrival(info, self._data.next_step)
            self._info = info
            self._data.loaders.work_on(info)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        """Refuse a loss of nan on a microbatch without targets: a mean over no token."""
        info = self._info
        if info is not None and info.rank_loss_tokens == 0 and not bool(torch.isfinite(loss).all()):
            raise ConfigError(
                f"the loss of step {info.step}, microbatch {info.microbatch} is {loss.sum().item()}, and this "
                "rank has no target token of it (filler rows, or labels that are all -100): a mean over nothing. "
                "Return reduce_loss(summed_loss, batch['megascale']) from training_step "
                '(megascale_lightning.reduce_loss), or leave incomplete last steps out with last_step="drop"'
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch as consumed; end the training where the stream ends."""
        info = self._info
        if self._data is None or info is None:
            return
        self._data.mark_consumed(info)
        if info.is_last_in_stream and info.is_last_in_step:
            trainer.should_stop = True

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Know which batch is worked on."""
        self._evaluates(trainer, "val", dataloader_idx)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Know which batch is worked on."""
        self._evaluates(trainer, "test", dataloader_idx)

    def on_predict_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Know which batch is worked on."""
        self._evaluates(trainer, "predict", dataloader_idx)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say once that no validation ran in a pass: Lightning checks that only where it knows the length."""
        self._show_length(trainer, shown=True)
        if self._skips_to_end:
            self._skips_to_end = False
            trainer.fit_loop.epoch_loop.restarting = False  # else the next epoch ended before its first batch, too
        if self._data is None or not self._data.in_passes or trainer.check_val_every_n_epoch is None:
            return
        every, batches = getattr(trainer, "val_check_interval", None), trainer.fit_loop.batch_idx + 1
        ended = self._info is not None and self._info.is_last_in_pass
        if isinstance(every, int) and every > batches and ended and trainer.enable_validation and not self._warned:
            self._warned = True
            warnings.warn(
                f"val_check_interval={every} is more than the {batches} batches of this pass, so that no validation "
                f"ran in it: set Trainer(val_check_interval={batches}) or less, or check_val_every_n_epoch=None to "
                "count over all epochs",
                MegaScaleWarning,
                stacklevel=2,
            )

    def _show_length(self, trainer: L.Trainer, *, shown: bool) -> None:
        """Let Lightning wait for the last batch of a whole pass, or look ahead for one that no other follows."""
        loaders, combined = None if self._data is None else self._data.loaders, trainer.fit_loop._combined_loader
        if loaders is not None and loaders.train is not None and loaders.train.knows_length != shown:
            loaders.train.knows_length = shown
            if combined is not None:
                combined.limits = trainer.fit_loop.max_batches if shown else None

    def _begins_inside_a_pass(self, trainer: L.Trainer) -> bool:
        """Whether a trainer that has counted nothing goes on where another one stopped."""
        loop = trainer.fit_loop.epoch_loop
        counted = loop.batch_progress.current.ready if loop.restarting else 0  # what is there else is of the last fit
        data = self._data
        return data is not None and data.in_passes and data.next_step > 0 and not data.ended and counted == 0

    def _close_epoch(self, trainer: L.Trainer) -> None:
        """Let Lightning end an epoch all of whose batches were trained on before the save.

        Where a validation is due it finds back by itself. Where none is, it would take another batch first, unless it
        believes that one has run.
        """
        self._closes_epoch = False
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        if fetcher is not None and not loop._should_check_val_fx(fetcher):
            loop.val_loop._has_run = self._skips_to_end = True
            loop._batches_that_stepped += 1

    def _evaluates(self, trainer: L.Trainer, kind: str, index: int) -> None:
        loaders = None if self._data is None else self._data.loaders
        if loaders is not None:
            # A step that takes its batches itself has not taken them yet.
            waits = isinstance(getattr(trainer._active_loop, "_data_fetcher", None), _DataLoaderIterDataFetcher)
            loaders.work_on(None if waits else loaders.evaluated(kind, index))

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


def insert_callback(trainer: L.Trainer, data: MegaScaleDataModule) -> None:
    """Put the state callback first: behind a checkpoint callback, every checkpoint would repeat a batch.

    Raises:
        ConfigError: The trainer has several.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    own = [callback for callback in callbacks if isinstance(callback, MegaScaleStateCallback)]
    if len(own) > 1:
        raise ConfigError(f"the trainer has {len(own)} MegaScaleStateCallback: one is brought by the DataModule itself")
    callback = own[0] if own else MegaScaleStateCallback()
    if own:
        callbacks.remove(callback)
    callbacks.insert(0, callback)
    callback.attach(data)


def meet_callback(trainer: L.Trainer, data: MegaScaleDataModule) -> None:
    """Put a state callback where the trainer has exchanged all callbacks, as a search for a learning rate does.

    It comes last: who exchanged them looks for its own where it put them. Nobody would count otherwise, and a stream
    that is not consumed stands still.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, MegaScaleStateCallback) for callback in callbacks):
        callback = MegaScaleStateCallback()
        callback.attach(data)
        callbacks.append(callback)


def _find_state(checkpoint: dict[str, Any], data_key: str) -> dict[str, Any] | None:
    """Return the stream's state: from the callbacks, this DataModule's key, or that of a DataModule since renamed."""
    candidates = [(checkpoint.get("callbacks") or {}).get(STATE_KEY), checkpoint.get(data_key), *checkpoint.values()]
    for state in candidates:
        if isinstance(state, dict) and "order_version" in state and "trainer" in state:
            return state
    return None
