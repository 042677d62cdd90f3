"""`StepTimes`: measures what microbatches take, for costs that are calibrated to the machine."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch

from megascale_lightning.client.info import INFO_KEY, BatchInfo
from megascale_lightning.errors import ConfigError, MegaScaleWarning
from megascale_lightning.integrations.lightning.mixture import data_of
from megascale_lightning.planning.calibration import OF_METADATA, CostCalibrator, check_scipy, microbatch_features
from megascale_lightning.planning.strategies import Balanced, declared_by
from megascale_lightning.types import FloatArray

__all__ = ["StepTimes"]

logger = logging.getLogger(__name__)

_PLACING: Final = "StepTimes(place_every_n_steps=...)"
MAX_PENDING = 64
"""Microbatches whose CUDA events may be under way before the oldest is waited for."""


class StepTimes(L.Callback):
    """Times the forward and backward pass of every microbatch, and gives it to a `CostCalibrator`.

    The time is this rank's own: it begins when the batch is there, and ends with the last gradient that backward
    makes, before DDP waits for the other ranks. What a strategy exchanges inside of the passes (FSDP, tensor parallel)
    is in it. On CUDA devices events measure, which hold nothing up; else the clock does. Microbatches with filler rows
    are left out.

    At the end of training rank 0 fits its own times and writes the costs to `path`; if they do not suffice, it warns.

    Args:
        path: YAML file for the costs, as `CalibratedCost.from_yaml` reads it; None: only record, `calibrator.fit()` is
            up to you.
        calibrator: What gets the times; None: a new one, as `calibrator`.
        place_every_n_steps: After every so many optimizer steps rank 0 fits the times so far and hands the costs to
            `set_cost`: rows are placed by them from `mixture_lead_steps` later on, in place of the one cost that the
            strategy declares. As long as the times do not suffice, it stays. None: never.
        images: `images(batch)` gives what there is to see in a microbatch: a mapping with the sums `patches`,
            `patch_pairs` and `images` of `microbatch_features`, some or all; None: nothing. With `place_every_n_steps`
            only those that the strategy's cost is by: rows cannot be placed by others.

    Raises:
        ConfigError: There is something to fit for and no SciPy to fit with, or `place_every_n_steps` is below 1.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        calibrator: CostCalibrator | None = None,
        place_every_n_steps: int | None = None,
        images: Callable[[Any], Mapping[str, float]] | None = None,
    ) -> None:
        every = place_every_n_steps
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ConfigError(f"StepTimes: place_every_n_steps must be a whole number of at least 1, not {every!r}")
        if path is not None or every is not None:
            check_scipy()
        self._every_n_steps = every
        self._path = None if path is None else Path(path)
        self._images = images
        self._described: frozenset[str] | None = None  # what rows can be placed by, where they are to be
        self.calibrator = CostCalibrator() if calibrator is None else calibrator
        """Holds the times so far; those that a device still works on are missing."""
        self._hooks: list[Any] = []
        self._features: FloatArray | None = None  # of the microbatch that is timed now
        self._step = 0
        self._at_backward = False
        self._clock: _Clock | _CudaClock | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that there is one backward pass for a microbatch, and rows to place.

        Raises:
            ConfigError: The module optimizes by itself, or the rows that are to be placed are not ours, or not by what
                is measured.
        """
        if stage == "fit" and self._every_n_steps is not None:
            self._described = self._check_cost(data_of(trainer, _PLACING).config.strategy)
        if stage == "fit" and not pl_module.automatic_optimization:
            raise ConfigError(
                "StepTimes: with automatic_optimization = False a step may have several backward passes, and optimizer "
                "steps between them: time them yourself and hand them to CostCalibrator.add"
            )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watch the gradients of what is trained now, which may change from epoch to epoch."""
        if self._clock is None:
            self._clock = _CudaClock() if pl_module.device.type == "cuda" else _Clock()
        self._unhook()
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin.

        Raises:
            ConfigError: Rows are to be placed by what the strategy's cost is not by.
        """
        info = _info_of(trainer, batch)
        self._step = info.step
        self._features = None
        if (info.row_weights > 0).all():
            seen = {} if self._images is None else dict(self._images(batch))
            if self._described is not None and not self._described.issuperset(seen):
                raise ConfigError(_no_fields(str(sorted(set(seen) - self._described)), self._described))
            self._features = microbatch_features(info.lengths, **seen)
            self._at_backward = False
            self._clock.start()  # type: ignore[union-attr]  # made at the start of the epoch

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End here, where no gradient was seen: a strategy may put them in place by itself."""
        if self._features is not None and not self._at_backward:
            self._clock.stop()  # type: ignore[union-attr]
            self._at_backward = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time, unless there was no backward pass; and place by what is known, where that is due."""
        if self._features is not None and self._at_backward:
            self._clock.take(self._features, self._step)  # type: ignore[union-attr]
            self._give(wait=False)
        self._features = None
        if self._every_n_steps is not None and trainer.is_global_zero:
            info = _info_of(trainer, batch)
            if info.is_last_in_step and (info.step + 1) % self._every_n_steps == 0:
                self._place(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fit and write, on rank 0 and if there is a path."""
        self._give(wait=True)
        if self._path is None or not trainer.is_global_zero:
            return
        try:
            cost = self.calibrator.fit()
        except ConfigError as error:
            warnings.warn(f"StepTimes: {self._path} is not written. {error}", MegaScaleWarning, stacklevel=2)
            return
        cost.to_yaml(self._path)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop watching."""
        self._unhook()
        self._clock = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop watching."""
        self._unhook()

    def _check_cost(self, strategy: Any) -> frozenset[str]:
        """What is described of a sample beside its length; refuses a strategy that one measured cost does not fit."""
        declared = declared_by(Balanced() if strategy is None else strategy)
        if len(declared.costs) != 1:
            raise ConfigError(
                f"{_PLACING}: the strategy declares {len(declared.costs)} costs ({declared.cost_names}), and the time "
                "of a microbatch is one: take a strategy of one cost, such as Balanced(...), or measure the parts "
                "yourself and hand them to set_cost"
            )
        fields = frozenset(declared.fields)
        if self._images is not None and fields.isdisjoint(OF_METADATA):
            raise ConfigError(_no_fields(f"some of {list(OF_METADATA)}", fields))
        return fields

    def _place(self, trainer: L.Trainer) -> None:
        try:
            cost = self.calibrator.fit()
        except ConfigError as error:
            logger.info("StepTimes: rows are placed as before. %s", error)
            return
        data_of(trainer, "StepTimes").set_cost(cost)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._features is not None:
            self._clock.stop()  # type: ignore[union-attr]
            self._at_backward = True

    def _give(self, *, wait: bool) -> None:
        if self._clock is not None:
            for features, seconds, step in self._clock.finished(wait=wait):
                self.calibrator.add(features, seconds, step=step)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Clock:
    """For devices that are done when the call returns."""

    def __init__(self) -> None:
        self._started = self._stopped = 0.0
        self._taken: list[tuple[FloatArray, float, int]] = []

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        """The last call counts."""
        self._stopped = time.perf_counter()

    def take(self, features: FloatArray, step: int) -> None:
        self._taken.append((features, self._stopped - self._started, step))

    def finished(self, *, wait: bool) -> list[tuple[FloatArray, float, int]]:
        taken, self._taken = self._taken, []
        return taken


class _CudaClock:
    """For a device that works behind: events on its stream, read when it has passed them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[FloatArray, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    def stop(self) -> None:
        """The last call counts: an event that is recorded again forgets where it was."""
        self._end.record()

    def take(self, features: FloatArray, step: int) -> None:
        self._pending.append((features, step, self._start, self._end))

    def finished(self, *, wait: bool) -> list[tuple[FloatArray, float, int]]:
        done = []
        while self._pending:
            features, step, start, end = self._pending[0]
            if wait or len(self._pending) > MAX_PENDING:
                end.synchronize()
            elif not end.query():  # type: ignore[no-untyped-call]
                break
            self._pending.popleft()
            done.append((features, start.elapsed_time(end) / 1000, step))
        return done


def _no_fields(given: str, described: Collection[str]) -> str:
    return (
        f"{_PLACING}: images= gives {given}, and samples are described by {sorted(described) or 'lengths alone'}, what "
        "the strategy is by: rows cannot be placed by anything else; give a strategy whose cost is by these fields, "
        "such as Balanced(cost=CostOf(..., fields)), or leave them out of images="
    )


def _info_of(trainer: L.Trainer, batch: Any) -> BatchInfo:
    info = batch.get(INFO_KEY) if isinstance(batch, Mapping) else None
    if info is None:  # batches of CollatedRows are the user's own
        info = getattr(getattr(trainer, "datamodule", None), "last_info", None)
    if info is None:
        raise ConfigError(
            f"StepTimes: the batch has no {INFO_KEY!r}, and the trainer no MegaScaleDataModule that knows it: pass "
            "datamodule= to trainer.fit()"
        )
    found: BatchInfo = info
    return found
