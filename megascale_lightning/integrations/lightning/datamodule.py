"""`MegaScaleDataModule`: the one line that a Lightning user changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.loader import MegaScaleLoader
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.config import LoaderConfig, Mixture, PackedRows, PaddedRows
from megascale_lightning.errors import ConfigError, StateError
from megascale_lightning.integrations.lightning.callback import MegaScaleStateCallback
from megascale_lightning.integrations.lightning.limits import check_trainer, microbatches_per_step
from megascale_lightning.integrations.meshes import tree_of_trainer
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.sources.source import Source
from megascale_lightning.types import StepReport

__all__ = ["MegaScaleDataModule"]

logger = logging.getLogger(__name__)


class _OnlyWithValSources:
    """Hides a hook where there is nothing for it: a trainer takes an overridden one to say that there are loaders."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook
        self.__doc__ = hook.__doc__

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        if owner is None:
            return self._hook
        hook = self._hook if owner.config.val_sources else L.LightningDataModule.val_dataloader
        return MethodType(hook, owner)


class MegaScaleDataModule(L.LightningDataModule):
    """Feeds a Lightning trainer from many sources through one shared loader, and resumes to the very next step.

    The constructor starts nothing; `setup()` starts the processes (rank 0) or connects to them, and they end with the
    training, also with one that fails. A second `fit` goes on with the step after the last one taken.

    Args:
        sources: The training mixture.
        rows: `PackedRows` or `PaddedRows`.
        global_batch_size: Rows of one optimizer step: micro_batch_size x data-parallel size x accumulate_grad_batches.
            None takes what the trainer has at the first start, and keeps it in the state.
        mixture: Weights by source name, in place of the sources' own; a `Mixture` also says what they are shares of.
        strategy: How rows are placed: `Balanced()` (default) or `RoundRobin()`.
        seed: Seed of every permutation and of the transforms.
        runtime: Where the roles run: in Ray actors, or all in this process (notebooks, debuggers).
        num_loaders: Source loader actors; None chooses.
        prefetch_steps: Steps that may be planned and built ahead of the slowest rank; None chooses. 0 counts as 1,
            since the trainer itself fetches a batch ahead.
        plan_window: Steps moved by one call; None chooses.
        window_units: Units of a source that are shuffled together (part of the order).
        part_bytes: Stored bytes of a part, inside which samples are shuffled (part of the order).
        loader_buffer_bytes: What one loader may hold beyond what is due.
        last_step: What happens to a last step with too few rows.
        steps_per_epoch: Steps of one trainer epoch; None: the training loader has no length.
        val_sources: Sources of the validation loaders: a list for one, a mapping of lists for several.
        force_resume: Names of settings that may differ from those of the checkpoint.
        restart_timeout: Seconds that a role may be away before the run ends with an error.
        ray_address: An existing cluster; None starts a local Ray, or uses one that is initialised.
        ray_init: Further keywords of `ray.init`.
        tree: Places of the trainer's ranks, where the strategy's device mesh does not tell them.

    Raises:
        ConfigError: Settings are wrong or contradict each other; all that is wrong is said at once.
    """

    def __init__(
        self,
        *,
        sources: Sequence[Source],
        rows: PackedRows | PaddedRows,
        global_batch_size: int | None = None,
        mixture: Mixture | Mapping[str, float] | None = None,
        strategy: Any = None,
        seed: int = 0,
        runtime: Literal["ray", "local"] = "ray",
        num_loaders: int | None = None,
        prefetch_steps: int | None = None,
        plan_window: int | None = None,
        window_units: int = 8,
        part_bytes: int = 64 << 20,
        loader_buffer_bytes: int = 1 << 30,
        last_step: Literal["fill", "drop"] = "fill",
        steps_per_epoch: int | None = None,
        val_sources: Sequence[Source] | Mapping[str, Sequence[Source]] = (),
        force_resume: Sequence[str] = (),
        restart_timeout: float = 120.0,
        ray_address: str | None = None,
        ray_init: Mapping[str, Any] | None = None,
        tree: ClientPlaceTree | None = None,
    ) -> None:
        super().__init__()
        self.config = LoaderConfig(
            sources=sources,
            rows=rows,
            global_batch_size=global_batch_size,
            mixture=mixture,
            strategy=strategy,
            seed=seed,
            runtime=runtime,
            num_loaders=num_loaders,
            # With none ahead, the batch that the trainer prefetches would wait for the one it is a successor of.
            prefetch_steps=1 if prefetch_steps == 0 else prefetch_steps,
            plan_window=plan_window,
            window_units=window_units,
            part_bytes=part_bytes,
            loader_buffer_bytes=loader_buffer_bytes,
            last_step=last_step,
            steps_per_epoch=steps_per_epoch,
            val_sources=val_sources,
            force_resume=force_resume,
            restart_timeout=restart_timeout,
            ray_address=ray_address,
            ray_init=ray_init,
        )
        self.batches_outdated = False
        """Batches were handed out before the state arrived that the stream goes on from."""
        self.num_microbatches = 1
        """Microbatches of a step on one rank; known from `setup()` on."""
        self._tree = tree
        self._state: dict[str, Any] = {}
        self._session: LoadingSession | None = None
        self._places: tuple[ClientPlaceTree, int] | None = None
        self._train: MegaScaleLoader | None = None
        self._val: dict[str, MegaScaleLoader] = {}
        self._reports: list[StepReport] = []

    # --- what the trainer calls -------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Start the roles on rank 0, connect to them elsewhere, and compare the trainer's settings with ours.

        Raises:
            ConfigError: The trainer's settings do not go with ours; the message says what to set.
            StateError: A state that was loaded before is of other data or other settings.
        """
        trainer = self.trainer
        fitting = stage in (None, "fit")
        if not fitting and not (stage == "validate" and self.config.val_sources):
            return
        self._close(None)
        tree = tree_of_trainer(trainer, self._tree)
        if fitting and trainer is not None:
            check_trainer(self.config, trainer)
            self._insert_callback(trainer)
        # Validation has no accumulation of its own to compare with.
        self.num_microbatches = microbatches_per_step(self.config, trainer if fitting else None, tree.num_groups)
        rank = 0 if trainer is None else trainer.global_rank
        strategy = self._shared_strategy()
        self._session = LoadingSession(
            self.config,
            tree=tree,
            rank=rank,
            accumulate=self.num_microbatches,
            broadcast=None if strategy is None else strategy.broadcast,
        )
        self._places = tree, rank
        if fitting:
            self._train = self._loader("train", auto_consume=False)
            if self._state:
                self._load(self._state)

    def train_dataloader(self) -> MegaScaleLoader:
        """Return the loader of the training stream, the same one each time."""
        if self._train is None:
            raise ConfigError("there is no training stream yet: let trainer.fit call setup(), or call setup('fit')")
        return self._train

    @_OnlyWithValSources
    def val_dataloader(self) -> Any:
        """Return the validation loader, or a dict of loaders by name where `val_sources` is a mapping."""
        names = list(self.config.eval_sources())
        if self._session is None:
            raise ConfigError(
                "there is no validation stream yet: let the trainer call setup(), or call setup('validate')"
            )
        for index, name in enumerate(names):
            if name not in self._val:
                self._val[name] = self._loader(f"val/{index}", auto_consume=True)
        return dict(self._val) if isinstance(self.config.val_sources, Mapping) else self._val[names[0]]

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
        if state_dict and (trainer is None or trainer.state.fn in (None, TrainerFn.FITTING)):
            self.load_position(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        """End what this rank started; the others may be gone, so nobody is waited for."""
        try:
            self._close(None)
        except Exception:
            logger.warning("ending the loaders after %s failed", type(exception).__name__, exc_info=True)

    def teardown(self, stage: str | None = None) -> None:
        """End the roles: other ranks first, then, behind a barrier, rank 0. The position is kept for a second `fit`."""
        strategy = self._shared_strategy()
        self._close(None if strategy is None else strategy.barrier)

    # --- what the state callback and users call ---------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return the state of the training stream behind the last step that was taken; empty before the first start.

        Local and JSON-like; nothing is called, so it may come at any time, also from a signal handler.
        """
        train = self._train
        return dict(self._state) if train is None else {**train.state_dict(), "trainer": self._resolved()}

    def load_position(self, position: Mapping[str, Any]) -> None:
        """Go on from what `position()` gave, here or in another run.

        Raises:
            StateError: The state is of other data or other settings.
        """
        self._state = dict(position)
        if self._train is not None:
            self._load(self._state)

    def mark_consumed(self, info: BatchInfo) -> None:
        """Count a batch of the training stream as trained on."""
        if self._train is None:
            raise ConfigError("there is no training stream: setup('fit') makes it")
        self._train.mark_consumed(info)

    @property
    def running(self) -> bool:
        """Whether `setup()` was called, and the end has not come yet."""
        return self._session is not None

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
        """`BatchInfo` of the training batch handed out last; None before the first and after the end."""
        return None if self._train is None else self._train.last_info

    @property
    def last_reports(self) -> list[StepReport]:
        """How even the last steps that were read were, oldest first; kept when training has ended."""
        return self._reports if self._train is None else list(self._train.last_reports)

    @property
    def certificate(self) -> str | None:
        """The order certificate of all steps taken so far, in hex; None before the first start."""
        return self._state.get("certificate") if self._train is None else self._train.certificate

    # --- inside -----------------------------------------------------------------------------------------------------

    def _shared_strategy(self) -> Any:
        """Return the trainer's strategy where there are other ranks to meet, else None."""
        trainer = self.trainer
        return None if trainer is None or trainer.world_size == 1 else trainer.strategy

    def _insert_callback(self, trainer: L.Trainer) -> None:
        """Put the state callback first: behind a checkpoint callback, every checkpoint would repeat a batch."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        own = [callback for callback in callbacks if isinstance(callback, MegaScaleStateCallback)]
        if len(own) > 1:
            raise ConfigError(
                f"the trainer has {len(own)} MegaScaleStateCallback: one is brought by the DataModule itself"
            )
        callback = own[0] if own else MegaScaleStateCallback()
        if own:
            callbacks.remove(callback)
        callbacks.insert(0, callback)
        callback.attach(self)

    def _resolved(self) -> dict[str, int]:
        """What of the trainer the state depends on; a checkpoint's counters are in these units."""
        assert self._places is not None
        rows, groups = self.config.rows.micro_batch_size, self._places[0].num_groups
        return {
            "global_batch_size": self.config.global_batch_size or rows * groups * self.num_microbatches,
            "micro_batch_size": rows,
            "num_groups": groups,
            "num_microbatches": self.num_microbatches,
        }

    def _load(self, state: dict[str, Any]) -> None:
        assert self._train is not None
        self._check_batch_size(state)
        self.batches_outdated = self.batches_outdated or self._train.last_info is not None
        self._train.load_state_dict({key: value for key, value in state.items() if key != "trainer"})

    def _check_batch_size(self, state: dict[str, Any]) -> None:
        then, now = state.get("trainer", {}).get("global_batch_size"), self._resolved()
        if self.config.global_batch_size is not None or then in (None, now["global_batch_size"]):
            return
        if "global_batch_size" in self.config.force_resume:
            return
        rows = now["micro_batch_size"] * now["num_groups"]
        raise StateError(
            f"the checkpoint has steps of {then} rows; here they have {now['micro_batch_size']} rows x "
            f"{now['num_groups']} data-parallel ranks x {now['num_microbatches']} microbatches = "
            f"{now['global_batch_size']}: set Trainer(accumulate_grad_batches={-(-then // rows)}) and "
            f"global_batch_size={then}"
        )

    def _loader(self, stream: str, *, auto_consume: bool) -> MegaScaleLoader:
        assert self._places is not None
        return MegaScaleLoader(
            self.config,
            rank=self._places[1],
            stream=stream,
            session=self._session,
            auto_consume=auto_consume,
            interrupted=self._interrupted,
        )

    def _interrupted(self) -> bool:
        """Asked while a batch is waited for: the trainer looks at signals only between batches."""
        if self.trainer is not None and self.trainer.received_sigterm:
            raise SIGTERMException
        return False

    def _close(self, barrier: Any) -> None:
        session = self._session
        if session is None:
            return
        self._state, self._reports = self.position(), self.last_reports
        loaders = [loader for loader in (self._train, *self._val.values()) if loader is not None]
        self._session, self._train, self._val, self.batches_outdated = None, None, {}, False
        try:
            for loader in loaders:
                loader.close()
        finally:
            session.close(barrier=barrier)

    def __getstate__(self) -> dict[str, Any]:
        # Handles of processes do not travel; whoever gets the copy sets it up again.
        return {
            **self.__dict__,
            "_state": self.position(),
            "_session": None,
            "_train": None,
            "_val": {},
            "batches_outdated": False,
        }
