"""`Positioned`: where a DataModule's training stream stands, as it is saved, loaded and asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from megascale_lightning.checkpointing.filelists import FileChanges, FileLists
from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.lives import SampleLife
from megascale_lightning.client.loader import MegaScaleLoader
from megascale_lightning.client.portable import check_portable_code
from megascale_lightning.client.samples import show_sample
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, StateError
from megascale_lightning.integrations.lightning import limits
from megascale_lightning.integrations.lightning.hyperparameters import plain
from megascale_lightning.integrations.lightning.loaders import StageLoaders
from megascale_lightning.loading.showing import ShownSample
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.calibration import CalibratedCost
from megascale_lightning.types import StepReport

__all__ = ["Positioned"]


class Positioned(L.LightningDataModule):
    """The base of `MegaScaleDataModule` that knows the position; its subclass makes the loaders."""

    # Looked at before they are set: Lightning's constructor sets `trainer`.
    _session: LoadingSession | None = None
    _owner: L.Trainer | None = None
    _trainer: L.Trainer | None = None
    _asking: L.Trainer | None = None

    def __init__(self, config: LoaderConfig) -> None:
        """Stand at the start, with nothing running."""
        super().__init__()
        check_portable_code(config)
        self.config = config
        self.batches_outdated = False
        """Batches were handed out before the state arrived that the stream goes on from."""
        self.num_microbatches = 1
        """Microbatches of a step on one rank; known from `setup()` on."""
        self.refused: StateError | None = None
        """Why the state that was loaded last is not gone on from; raised where training begins."""
        self._state: dict[str, Any] = {}
        self._places: tuple[ClientPlaceTree, int] | None = None
        self._loaders: StageLoaders | None = None
        self._reports: list[StepReport] = []

    def state_dict(self) -> dict[str, Any]:
        """Return `position()`: what was trained on, not what was fetched."""
        return self.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position; before `setup()` it is kept until then.

        A checkpoint that is only evaluated (`trainer.validate(ckpt_path=...)`) does not move the training stream.

        Raises:
            StateError: The state is of other data or other settings.
        """
        trainer = self.trainer
        if not state_dict or (trainer is not None and trainer.state.fn not in (None, TrainerFn.FITTING)):
            return
        try:
            self.load_position(state_dict)
        except StateError as error:
            if trainer is None:
                raise
            # The state callback sees the whole checkpoint, also the file lists: it tries again, and can say more.
            self.refused = error

    def position(self) -> dict[str, Any]:
        """Return the state of the training stream behind the last step that was taken; empty before the first start.

        Local and JSON-like; nothing is called, so it may come at any time, also from a signal handler.
        """
        train = self._train
        return dict(self._state) if train is None else {**train.state_dict(), "trainer": self.resolved()}

    def load_position(self, position: Mapping[str, Any], lists: FileLists | None = None) -> None:
        """Go on from what `position()` gave, here or in another run.

        Args:
            position: What it gave.
            lists: The file lists of that run. If files were added since, it goes on with those that it began with.

        Raises:
            StateError: The state is of other data or other settings.
        """
        self._state, self.refused = dict(position), None
        if self._train is not None:
            self._load(self._state, lists)

    def take_over(self, checkpoint: Mapping[str, Any]) -> None:
        """Find what is for this DataModule in a checkpoint without a position: nothing, unless a subclass knows better.

        Args:
            checkpoint: As Lightning loaded it.
        """

    def set_mixture(self, weights: Mapping[str, float], at_step: int | None = None) -> int | None:
        """Draw with other weights from a step on; rank 0's word counts, on the others it does nothing.

        Args:
            weights: By source name, not normalised; a source that is not named keeps what it has by then.
            at_step: The first step whose draws they govern; None: `mixture_lead_steps` after the consumed ones.

        Returns:
            That step; None on other ranks.

        Raises:
            ConfigError: There is no training stream, a weight is none, a source is unknown, or the step is too near.
        """
        if self._train is None:
            raise ConfigError("there is no training stream whose mixture could change: setup('fit') makes it")
        return self._train.set_mixture(weights, at_step)

    def set_cost(self, *costs: CalibratedCost, at_step: int | None = None) -> int | None:
        """Place rows by measured costs from a step on; rank 0's word counts, on the others it does nothing.

        Args:
            costs: One for each that the strategy declares, in its order; none: those that it declares, again.
            at_step: The first step whose places they govern; None: `mixture_lead_steps` after the consumed ones.

        Returns:
            That step; None on other ranks.

        Raises:
            ConfigError: There is no training stream, they do not fit the strategy, or the step is too near.
        """
        if self._train is None:
            raise ConfigError("there is no training stream whose costs could change: setup('fit') makes it")
        return self._train.set_cost(*costs, at_step=at_step)

    def sample(self, sample_id: Sequence[Any], stream: str = "train") -> ShownSample:
        """One sample by its id, read and transformed in this process as in the run; see `MegaScaleLoader.sample`."""
        if self._session is not None and stream in self._session.streams:
            return self._session.sample(stream, sample_id)
        return show_sample(self.config, stream, sample_id)

    def lineage(self, sample_id: Sequence[Any]) -> SampleLife:
        """What became of a sample of the training stream; see `MegaScaleLoader.lineage`."""
        if self._train is None:
            raise ConfigError("there is no training stream that stands anywhere: setup('fit') makes it")
        return self._train.lineage(sample_id)

    def packed_file_lists(self) -> bytes:
        """The files of the training sources, to be kept beside the state; on the process that reads them."""
        return b"" if self._session is None else self._session.packed_file_lists

    def mark_consumed(self, info: BatchInfo) -> None:
        """Count a batch of the training stream as trained on."""
        if self._train is None:
            raise ConfigError("there is no training stream: setup('fit') makes it")
        self._train.mark_consumed(info)

    @property
    def trainer(self) -> L.Trainer | None:
        """The trainer that it belongs to: the one at work, whichever other one is given it meanwhile."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        # Lightning sets it before all else: who is going to be refused must not take it from the one at work.
        if self._is_at_work and trainer is not self._owner:
            self._asking = trainer
        else:
            self._trainer, self._asking = trainer, None

    @property
    def _is_at_work(self) -> bool:
        """Whether a trainer is in the middle of a run; one that failed says so before it calls any hook."""
        owner = self._owner
        return self._session is not None and owner is not None and owner.state.status == TrainerStatus.RUNNING

    @property
    def loaders(self) -> StageLoaders | None:
        """The loaders of the stage that is running."""
        return self._loaders

    @property
    def next_step(self) -> int:
        """The first step that was not taken, from 0."""
        return int(self._state.get("step", 0)) if self._train is None else self._train.step

    @property
    def ended(self) -> bool:
        """Whether every step that the data give was taken."""
        return bool(self.position().get("ended", False))

    @property
    def last_info(self) -> BatchInfo | None:
        """`BatchInfo` of the batch that the trainer is working on, in training or evaluation.

        It is the one of `training_step`, `validation_step`, ... and of the hooks around them, from
        `on_train_batch_start` (`on_validation_batch_start`, ...) on; the transfer hooks come before. Outside of a
        trainer it is that of the batch handed out last. None before the first batch and after the end.
        """
        return None if self._loaders is None else self._loaders.last_info

    @property
    def last_reports(self) -> list[StepReport]:
        """How even the last steps that were read were, oldest first; kept when training has ended."""
        return self._reports if self._train is None else list(self._train.last_reports)

    @property
    def certificate(self) -> str | None:
        """The order certificate of all steps taken so far, in hex; None before the first start."""
        return self._state.get("certificate") if self._train is None else self._train.certificate

    @property
    def _train(self) -> MegaScaleLoader | None:
        return None if self._loaders is None else self._loaders.train

    def resolved(self) -> dict[str, int]:
        """What of the trainer the state depends on; a checkpoint's counters are in these units."""
        assert self._places is not None
        rows, groups = self.config.rows.micro_batch_size, self._places[0].num_groups
        return {
            "global_batch_size": self.config.global_batch_size or rows * groups * self.num_microbatches,
            "micro_batch_size": rows,
            "num_groups": groups,
            "num_microbatches": self.num_microbatches,
        }

    def _load(self, state: dict[str, Any], lists: FileLists | None = None) -> None:
        assert self._train is not None
        assert self._session is not None
        limits.check_batch_size(self.config, state, self.resolved())
        self.batches_outdated = self.batches_outdated or self._train.last_info is not None
        saved = {key: value for key, value in state.items() if key != "trainer"}
        changes = self._session.compare_files(saved, lists) if lists else FileChanges()
        if changes.kept:
            self._start_again(changes.kept)
        self._train.load_state_dict(saved, lists=lists, copied=changes.copied)

    def _set_hparams(self, hp: Any) -> None:
        # What save_hyperparameters() found in a subclass: a checkpoint with our objects in it would not load.
        super()._set_hparams(plain(hp))

    def __getstate__(self) -> dict[str, Any]:
        # Handles of processes do not travel; whoever gets the copy sets it up again.
        return {
            **self.__dict__,
            "_state": self.position(),
            "_session": None,
            "_loaders": None,
            "_owner": None,
            "_trainer": None,
            "_asking": None,
            "batches_outdated": False,
        }

    def _start_again(self, files: FileLists) -> None:
        """Start the roles anew with fewer files; to be made by whoever starts them."""
        raise StateError("the file lists can be taken up by MegaScaleDataModule only")
