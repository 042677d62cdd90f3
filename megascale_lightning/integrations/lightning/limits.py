"""Checks of a Lightning trainer's settings against the loader's, with the number to set in every refusal."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from megascale_lightning.checkpointing.checking import is_whole
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, MegaScaleWarning, StateError

__all__ = [
    "check_batch_size",
    "check_end_of_training",
    "check_evaluation",
    "check_evaluation_share",
    "check_trainer",
    "check_validation_interval",
    "goes_in_passes",
    "microbatches_per_step",
    "steps_per_epoch",
    "warn_of_unknown_steps",
]


def check_trainer(config: LoaderConfig, trainer: Any, *, always: bool = False) -> None:
    """Refuse what would break the stream's steps.

    Args:
        config: The loader's settings.
        trainer: A Lightning trainer.
        always: Of `goes_in_passes`.

    Raises:
        ConfigError: A callback or a setting does not go with equal steps.
    """
    check_evaluation(trainer)
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ConfigError(
            "GradientAccumulationScheduler changes the number of microbatches of a step while training: remove it and "
            "set Trainer(accumulate_grad_batches=...) once; the batch size of a step is global_batch_size"
        )
    if trainer.overfit_batches:
        raise ConfigError(
            f"overfit_batches={trainer.overfit_batches} would train on new data every epoch, since the stream goes on: "
            "leave it at 0.0 and give few samples: a torch.utils.data.Subset of a dataset, or a source of a small file"
        )
    module = trainer.lightning_module
    if module is not None and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            "training_step(self, dataloader_iter) takes the batches itself, and nobody knows which of them the "
            "optimizer step was about: write training_step(self, batch, batch_idx); the next batches are read ahead "
            "anyway"
        )
    check_end_of_training(config, trainer, always=always)


def check_evaluation(trainer: Any) -> None:
    """Refuse what would do nothing here, in training or in an evaluation alone.

    Raises:
        ConfigError: A callback changes a batch size that is not its to change.
    """
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise ConfigError(
            "Tuner.scale_batch_size and BatchSizeFinder set an attribute batch_size that the loader does not read: "
            "try other values of micro_batch_size in rows=, with Trainer(fast_dev_run=True)"
        )


def goes_in_passes(config: LoaderConfig, trainer: Any, *, always: bool = False) -> bool:
    """Whether a trainer epoch is one pass over the sources: `max_epochs` is finite, and nothing says how many steps.

    Args:
        config: The loader's settings.
        trainer: A Lightning trainer; None: one endless stream.
        always: Also where `max_epochs` is not finite, and without a trainer.
    """
    if not always and (trainer is None or trainer.max_epochs in (None, -1)):
        return False
    limit = 1.0 if trainer is None else trainer.limit_train_batches
    return bool(limit == 1.0 and not isinstance(limit, int) and config.steps_per_epoch is None)


def microbatches_per_step(config: LoaderConfig, trainer: Any, num_groups: int) -> int:
    """Return the number of microbatches of a step on one rank, the same as the trainer's accumulation.

    Args:
        config: The loader's settings; a `global_batch_size` of None takes what the trainer says.
        trainer: A Lightning trainer, or None: no accumulation of its own to compare with.
        num_groups: Data-parallel size.

    Raises:
        ConfigError: The trainer accumulates another number.
    """
    rows = config.rows.micro_batch_size * num_groups
    size = config.global_batch_size
    accumulate = None if trainer is None else _accumulation(trainer)
    wanted = (accumulate or 1) if size is None else -(-size // rows)
    if accumulate is not None and accumulate != wanted:
        raise ConfigError(
            f"global_batch_size={size} needs {wanted} microbatches of {config.rows.micro_batch_size} rows on each of "
            f"{num_groups} data-parallel ranks, but the trainer has accumulate_grad_batches={accumulate}: set "
            f"Trainer(accumulate_grad_batches={wanted}), or global_batch_size={rows * accumulate}"
        )
    if trainer is not None and isinstance(trainer.limit_train_batches, int) and not trainer.fast_dev_run:
        _check_epoch(trainer, trainer.limit_train_batches, wanted)
    return wanted


def check_batch_size(config: LoaderConfig, state: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Refuse to go on with steps of another size, where the size is the trainer's.

    Args:
        config: The loader's settings.
        state: Saved, with what it depended on under "trainer".
        now: The same of this run.

    Raises:
        StateError: The message says what to set.
    """
    saved = state.get("trainer", {})
    if not isinstance(saved, Mapping) or not all(is_whole(saved[name], 1) for name in now if name in saved):
        raise StateError(
            f"the loader state is damaged: 'trainer' must be whole numbers of at least 1 for {', '.join(now)}, not "
            f"{saved!r}"
        )
    then = saved.get("global_batch_size")
    if config.global_batch_size is not None or then in (None, now["global_batch_size"]):
        return
    if "global_batch_size" in config.force_resume:
        return
    rows = now["micro_batch_size"] * now["num_groups"]
    raise StateError(
        f"the checkpoint has steps of {then} rows; here they have {now['micro_batch_size']} rows x "
        f"{now['num_groups']} data-parallel ranks x {now['num_microbatches']} microbatches = "
        f"{now['global_batch_size']}: set Trainer(accumulate_grad_batches={-(-then // rows)}) and "
        f'global_batch_size={then}, or force_resume=["global_batch_size"] to go on with steps of another size'
    )


def steps_per_epoch(config: LoaderConfig, trainer: Any, pass_steps: int | None, microbatches: int) -> int | None:
    """Return how many steps 100% of an epoch are, where the trainer asks for a share of it.

    Args:
        config: The loader's settings.
        trainer: A Lightning trainer, or None.
        pass_steps: Steps of one pass over the sources; None: not known.
        microbatches: Microbatches of a step on one rank.

    Returns:
        None where the trainer asks for no share.

    Raises:
        ConfigError: The length is not known, or the share ends inside a step.
    """
    limit = None if trainer is None else trainer.limit_train_batches
    if not isinstance(limit, float) or limit in (0.0, 1.0):
        return None
    steps = config.steps_per_epoch or pass_steps
    if steps is None:
        raise ConfigError(
            f"limit_train_batches={limit} is a share of an epoch whose length is not known before the data are read: "
            "set steps_per_epoch=..., or a whole number of batches, Trainer(limit_train_batches=...)"
        )
    _check_epoch(trainer, int(steps * microbatches * limit), microbatches)
    return steps


def _accumulation(trainer: Any) -> int | None:
    """Return the trainer's accumulation; None under manual optimization, where only the module knows."""
    module = trainer.lightning_module
    if module is not None and not module.automatic_optimization:
        return None
    return int(trainer.accumulate_grad_batches)


def _check_epoch(trainer: Any, batches: int, microbatches: int) -> None:
    """An epoch ends with an optimizer step, so it must end between two steps of the stream."""
    if batches % microbatches:
        below, above = batches // microbatches * microbatches, -(-batches // microbatches) * microbatches
        choices = " or ".join(str(number) for number in (below, above) if number)
        raise ConfigError(
            f"limit_train_batches={trainer.limit_train_batches} ends an epoch inside a step of {microbatches} "
            f"microbatches ({batches} of them): set limit_train_batches={choices}"
        )


def check_end_of_training(config: LoaderConfig, trainer: Any, *, always: bool = False) -> None:
    """Refuse a training that nothing ends, and one whose length is given twice.

    Args:
        config: The loader's settings.
        trainer: A Lightning trainer.
        always: Of `goes_in_passes`.

    Raises:
        ConfigError: The message lists what may be set.
    """
    drawn = config.drawn("train") if config.sources else []
    finite = [source.name for source in drawn if source.epochs is not None]
    if goes_in_passes(config, trainer, always=always):
        if finite:
            raise ConfigError(
                f"max_epochs={trainer.max_epochs} (the trainer's default is 1000) gives every source once in each "
                f"epoch, and epochs= of {finite} says how often, too: leave epochs= out, or set "
                "Trainer(max_epochs=-1), and training ends with the data"
            )
        return
    endless = [source.name for source in drawn if source.epochs is None]
    if endless and config.shares.stop == "all" and not _has_limit(config, trainer):
        raise ConfigError(
            f"nothing ends this training: the sources {endless} are endless. Set one of Trainer(max_epochs=...) for "
            "passes over the data, Trainer(max_steps=...), Trainer(limit_train_batches=...), steps_per_epoch=..., "
            "Trainer(max_time=...), epochs= of every source, or epochs= of one that a Mixture(stop=...) ends with"
        )


def _has_limit(config: LoaderConfig, trainer: Any) -> bool:
    limit = trainer.limit_train_batches
    return bool(
        trainer.max_steps != -1
        or isinstance(limit, int)
        or limit != 1.0
        or config.steps_per_epoch is not None
        or any(isinstance(callback, Timer) for callback in trainer.callbacks)
    )


def check_validation_interval(trainer: Any, length: int | None) -> None:
    """Refuse a share of an epoch that has no length, before Lightning does with other advice.

    Args:
        trainer: A Lightning trainer.
        length: Of the training loader; None: it is unsized.

    Raises:
        ConfigError: The message lists what may be set.
    """
    interval = getattr(trainer, "val_check_interval", 1.0)  # not set where validation goes by the clock
    unsized = length is None and not isinstance(trainer.limit_train_batches, int)
    if unsized and isinstance(interval, float) and interval != 1.0 and trainer._val_check_time_interval is None:
        raise ConfigError(
            f"val_check_interval={interval} is a share of an epoch whose length is not known before the data are "
            "read: set steps_per_epoch=..., or a whole number of batches, Trainer(val_check_interval=...)"
        )


def warn_of_unknown_steps(length: int | None) -> None:
    """Say what `trainer.estimated_stepping_batches` is good for; it asks for the loader before there are optimizers.

    Args:
        length: Of the training loader; None: it is unsized.
    """
    if length is None:
        warnings.warn(
            "trainer.estimated_stepping_batches is -1: the number of steps of a pass is not known before the data are "
            "read. A schedule over all steps needs steps_per_epoch=..., Trainer(max_steps=...), or "
            "Trainer(limit_train_batches=...)",
            MegaScaleWarning,
            stacklevel=3,
        )


def check_evaluation_share(trainer: Any, kind: str, length: int | None) -> None:
    """Refuse a share of an evaluation that has no length.

    Args:
        trainer: A Lightning trainer, or None.
        kind: "val", "test" or "predict".
        length: Of the loader; None: it is unsized.

    Raises:
        ConfigError: The message says what to set.
    """
    limit = 1.0 if trainer is None else getattr(trainer, f"limit_{kind}_batches")
    if length is None and isinstance(limit, float) and limit not in (0.0, 1.0):
        raise ConfigError(
            f"limit_{kind}_batches={limit} is a share of {kind}_sources, whose number of batches is not known before "
            f"they are read: set a whole number of batches, Trainer(limit_{kind}_batches=...)"
        )
