"""Checks of a Lightning trainer's settings against the loader's, with the number to set in every refusal."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer

from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError

__all__ = ["check_end_of_training", "check_trainer", "microbatches_per_step"]


def check_trainer(config: LoaderConfig, trainer: Any) -> None:
    """Refuse what would break the stream's steps.

    Raises:
        ConfigError: A callback or a setting does not go with equal steps.
    """
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ConfigError(
            "GradientAccumulationScheduler changes the number of microbatches of a step while training: remove it and "
            "set Trainer(accumulate_grad_batches=...) once; the batch size of a step is global_batch_size"
        )
    if trainer.overfit_batches:
        raise ConfigError(
            f"overfit_batches={trainer.overfit_batches} would train on new data every epoch, since the stream goes "
            "on: give sources of a few samples instead, and leave overfit_batches at 0.0"
        )
    check_end_of_training(config, trainer)


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
    if trainer is not None:
        _check_epoch(config, trainer, wanted)
    return wanted


def _accumulation(trainer: Any) -> int | None:
    """Return the trainer's accumulation; None under manual optimization, where only the module knows."""
    module = trainer.lightning_module
    if module is not None and not module.automatic_optimization:
        return None
    return int(trainer.accumulate_grad_batches)


def _check_epoch(config: LoaderConfig, trainer: Any, microbatches: int) -> None:
    """An epoch ends with an optimizer step, so it must end between two steps of the stream."""
    limit = trainer.limit_train_batches
    if trainer.fast_dev_run or limit in (0, 0.0):
        return
    if isinstance(limit, float) and config.steps_per_epoch is not None:
        limit = int(config.steps_per_epoch * microbatches * limit)
    if isinstance(limit, int) and limit % microbatches:
        below, above = limit // microbatches * microbatches, -(-limit // microbatches) * microbatches
        choices = " or ".join(str(number) for number in (below, above) if number)
        raise ConfigError(
            f"limit_train_batches={trainer.limit_train_batches} ends an epoch inside a step of {microbatches} "
            f"microbatches ({limit} of them): set limit_train_batches={choices}"
        )


def check_end_of_training(config: LoaderConfig, trainer: Any) -> None:
    """Refuse a training that nothing ends, and one whose end this version does not know.

    Raises:
        ConfigError: The message lists what may be set.
    """
    weights = config.weights("train")
    endless = [source.name for source in config.sources if source.epochs is None and weights[source.name] > 0]
    max_epochs = trainer.max_epochs
    passes = max_epochs is not None and max_epochs != -1
    if _has_step_limit(config, trainer):
        return
    if endless and passes:
        raise ConfigError(
            f"max_epochs={max_epochs} (the trainer's default is 1000) without a step limit asks for {max_epochs} "
            "passes over the data, which this version does not support yet: set Trainer(max_steps=...), or "
            "Trainer(limit_train_batches=...) or steps_per_epoch= for the length of an epoch, or give every source "
            f"epochs={max_epochs} together with Trainer(max_epochs=-1)"
        )
    if endless:
        raise ConfigError(
            f"nothing ends this training: the sources {endless} are endless. Set one of Trainer(max_steps=...), "
            "Trainer(limit_train_batches=...), steps_per_epoch=..., Trainer(max_time=...), or epochs= of every source"
        )
    if passes and max_epochs > 1:
        raise ConfigError(
            f"max_epochs={max_epochs} and epochs= of the sources both say how often the data are gone through: set "
            "Trainer(max_epochs=-1), and training ends with the data"
        )


def _has_step_limit(config: LoaderConfig, trainer: Any) -> bool:
    limit = trainer.limit_train_batches
    return bool(
        trainer.max_steps != -1
        or (isinstance(limit, int) and not isinstance(limit, bool))
        or limit == 0.0
        or config.steps_per_epoch is not None
        or trainer.fast_dev_run
        or any(isinstance(callback, Timer) for callback in trainer.callbacks)
    )
