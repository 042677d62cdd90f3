"""`MegaScaleDataModule`: the one line that a Lightning user changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megascale_lightning.checkpointing.filelists import FileLists
from megascale_lightning.client.loader import MegaScaleLoader
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.config import LoaderConfig, Mixture, Sources
from megascale_lightning.errors import ConfigError
from megascale_lightning.integrations.lightning import limits
from megascale_lightning.integrations.lightning.callback import insert_callback, meet_callback
from megascale_lightning.integrations.lightning.hyperparameters import mask_saved_config, revived
from megascale_lightning.integrations.lightning.loaders import OnlyWithSources, StageLoaders, length_of
from megascale_lightning.integrations.lightning.position import Positioned
from megascale_lightning.integrations.meshes import mesh_of_trainer, tree_of_trainer
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.planning.dgraph import DGraph
from megascale_lightning.planning.strategies import Strategy
from megascale_lightning.rows import ContextParallel, Rows

__all__ = ["MegaScaleDataModule"]

logger = logging.getLogger(__name__)

_KINDS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""Stage -> kinds of streams that it needs."""


class MegaScaleDataModule(Positioned):
    """Feeds a Lightning trainer from many sources through one shared loader, and resumes to the very next step.

    The constructor starts nothing; `setup()` starts the processes (rank 0) or connects to them, and they end with the
    training, also with one that fails. A second `fit` goes on with the step after the last one taken.

    With a finite `Trainer(max_epochs=...)` and nothing that says how many steps an epoch has, a trainer epoch is one
    pass over the sources. Evaluation starts from the beginning each time, gives every sample once, and does not move
    the training stream.

    Args:
        sources: The training mixture: a list, or a mapping by name of `Source` or of its keywords; may be empty where
            there is something to evaluate.
        rows: `PackedRows`, `PaddedRows` or `CollatedRows`.
        global_batch_size: Rows of one optimizer step: micro_batch_size x data-parallel size x accumulate_grad_batches.
            None takes what the trainer has at the first start, and keeps it in the state.
        mixture: Weights by source name, in place of the sources' own; a `Mixture`, or the mapping of its settings, also
            says what they are shares of, how they change by the step, and what ends the stream.
        weights: Single weights by source name, over those of `sources` and `mixture`, at every step; the others stay.
        strategy: `Balanced()` (default), another strategy, a function of a `DGraph`, or class_path and init_args.
        context_parallel: What the ranks of a context-parallel group get of each row, as in `LoaderConfig`.
        seed: Seed of every permutation and of the transforms.
        runtime: Where the roles run: in Ray actors, or all in this process (notebooks, debuggers).
        num_loaders: Source loader actors; None chooses.
        num_constructors: Data constructor actors on each machine that has ranks.
        prefetch_steps: Steps that may be planned and built ahead of the slowest rank; None chooses. 0 counts as 1,
            since the trainer itself fetches a batch ahead.
        plan_window: Steps moved by one call; None chooses.
        mixture_lead_steps: How many steps after the consumed one `set_mixture` takes effect; nothing is planned further
            ahead.
        window_units: Units of a source that are shuffled together (part of the order).
        part_bytes: Stored bytes of a part, inside which samples are shuffled (part of the order).
        loader_buffer_bytes: What one loader may hold beyond what is due.
        last_step: What happens to a last step with too few rows.
        steps_per_epoch: Steps of one trainer epoch; None: a trainer epoch is a pass where `max_epochs` is finite, and
            the training loader has a length only where that of a pass is known.
        val_sources: Sources of the validation loaders: a list for one, a mapping of lists for several.
        test_sources: Sources of the test loaders, likewise.
        predict_sources: Sources of the prediction loaders, likewise.
        eval_rows: Rows of the evaluation loaders where they are others than `rows`: of all, or by kind (`val`) or
            stream (`val/0`).
        quarantine_dir: Folder for the lists of what `on_error="quarantine"` left out; None: `megascale_quarantine`.
        env: Names of environment variables whose values in rank 0's process the loaders get, on every node.
        cache_dir: Folder on every node for blocks of remote files, shared by its loaders; None: nothing is kept.
        cache_bytes: What may lie in `cache_dir`; what is used least recently goes first.
        force_resume: Names of settings that may differ from those of the checkpoint.
        restart_timeout: Seconds that a role may be away before the run ends with an error.
        ray_address: An existing cluster; None starts a local Ray, or uses one that is initialised.
        ray_init: Further keywords of `ray.init`.
        tree: Places of the trainer's ranks, where the strategy's device mesh does not tell them.

    Raises:
        ConfigError: Settings are wrong or contradict each other; all that is wrong is said at once.
    """

    always_passes: bool = False
    """A trainer epoch is a pass also without `max_epochs`, as with a `DataLoader`."""

    def __init__(
        self,
        *,
        sources: Sources = (),
        rows: Rows,
        global_batch_size: int | None = None,
        mixture: Mixture | Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        strategy: Mapping[str, Any] | Strategy | Callable[[DGraph], DGraph] | None = None,
        context_parallel: ContextParallel = "full",
        seed: int = 0,
        runtime: Literal["ray", "local"] = "ray",
        num_loaders: int | None = None,
        num_constructors: int = 1,
        prefetch_steps: int | None = None,
        plan_window: int | None = None,
        mixture_lead_steps: int = 32,
        window_units: int = 8,
        part_bytes: int = 64 << 20,
        loader_buffer_bytes: int = 1 << 30,
        last_step: Literal["fill", "drop"] = "fill",
        steps_per_epoch: int | None = None,
        val_sources: Sources = (),
        test_sources: Sources = (),
        predict_sources: Sources = (),
        eval_rows: Rows | Mapping[str, Rows] | None = None,
        quarantine_dir: str | None = None,
        env: Sequence[str] = (),
        cache_dir: str | None = None,
        cache_bytes: int = 64 << 30,
        force_resume: Sequence[str] = (),
        restart_timeout: float = 120.0,
        ray_address: str | None = None,
        ray_init: Mapping[str, Any] | None = None,
        tree: ClientPlaceTree | None = None,
    ) -> None:
        config = LoaderConfig(
            sources=sources,
            rows=revived(rows),
            global_batch_size=global_batch_size,
            mixture=revived(mixture),
            weights=weights,
            strategy=revived(strategy),
            context_parallel=context_parallel,
            seed=seed,
            runtime=runtime,
            num_loaders=num_loaders,
            num_constructors=num_constructors,
            # With none ahead, the batch that the trainer prefetches would wait for the one it is a successor of.
            prefetch_steps=1 if prefetch_steps == 0 else prefetch_steps,
            plan_window=plan_window,
            mixture_lead_steps=mixture_lead_steps,
            window_units=window_units,
            part_bytes=part_bytes,
            loader_buffer_bytes=loader_buffer_bytes,
            last_step=last_step,
            steps_per_epoch=steps_per_epoch,
            val_sources=val_sources,
            test_sources=test_sources,
            predict_sources=predict_sources,
            eval_rows=revived(eval_rows),
            quarantine_dir=quarantine_dir,
            env=env,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            force_resume=force_resume,
            restart_timeout=restart_timeout,
            ray_address=ray_address,
            ray_init=ray_init,
        )
        super().__init__(config)
        self.in_passes = False
        """A trainer epoch is one pass over the sources; known from `setup('fit')` on."""
        self.schedules_are_made = False
        """The optimizers are configured: whoever asks for the training loader now is going to iterate it."""
        self._tree = revived(tree)
        self._kinds: Collection[str] | None = None
        self._keeps_position = True

    # --- from what is there already ---------------------------------------------------------------------------------

    @classmethod
    def from_datamodule(cls, datamodule: L.LightningDataModule, **settings: Any) -> MegaScaleDataModule:
        """Take an existing DataModule over: its hooks run as they did, its samples come through the shared loader.

        Its `*_dataloader()` return torch `DataLoader`s over map-style datasets. They are asked for after its `setup()`;
        batches are what their `collate_fn` makes of samples, in an order of our own.

        Args:
            datamodule: The existing one.
            settings: `collate_fn=` or `rows=` in place of what its loaders say, `on_error=` and `max_bad_fraction=` of
                `Source`, and keywords of this class: `runtime`, `seed`, `num_loaders`, `force_resume`, ...

        Raises:
            ConfigError: It is none. What of its loaders cannot be taken over is refused in `setup()`, by name.
        """
        from megascale_lightning.integrations.lightning.adopting import adopt

        return adopt(cls, datamodule, **settings)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **settings: Any,
    ) -> MegaScaleDataModule:
        """Make one of map-style datasets: a dataset, or several by name (a mixture in training), or a list of them.

        Args:
            train_dataset: Shuffled, and gone through once per trainer epoch, unless a number of steps is set.
            val_dataset: For validation, in its order; several make several loaders.
            test_dataset: Likewise.
            predict_dataset: Likewise.
            batch_size: Samples of a batch on each rank.
            num_workers: Without effect.
            settings: `collate_fn=`, `shuffle=` (of training), `on_error=` and `max_bad_fraction=` of `Source`, and
                keywords of this class.

        Raises:
            ConfigError: A dataset is iterable only, or settings contradict each other.
        """
        from megascale_lightning.integrations.lightning.datasets import from_datasets

        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        return from_datasets(cls, given, batch_size=batch_size, num_workers=num_workers, **settings)

    # --- what the trainer calls -------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Start the roles on rank 0, connect to them elsewhere, and compare the trainer's settings with ours.

        Args:
            stage: "fit", "validate", "test" or "predict": what the streams are for; None: all of it.

        Raises:
            ConfigError: The trainer's settings do not go with ours; the message says what to set.
            StateError: A state that was loaded before is of other data or other settings.
        """
        kinds = None if stage is None else _KINDS[stage]
        fitting = stage in (None, "fit")
        if fitting and not self.config.sources:
            raise ConfigError("there is nothing to train on: sources is empty")
        if not any(kinds is None or name.split("/")[0] in kinds for name in self.config.streams()):
            return
        self._check_free()
        trainer = self.trainer
        self._close(None)
        self._owner, self.schedules_are_made, self._kinds = trainer, False, kinds
        tree = tree_of_trainer(trainer, self._tree)
        if trainer is not None:
            if fitting:
                limits.check_trainer(self.config, trainer, always=self.always_passes)
            else:
                limits.check_evaluation(trainer)
            insert_callback(trainer, self)
            mask_saved_config(trainer)
        self.in_passes = fitting and limits.goes_in_passes(self.config, trainer, always=self.always_passes)
        # An evaluation has no accumulation of its own to compare with.
        self.num_microbatches = limits.microbatches_per_step(self.config, trainer if fitting else None, tree.num_groups)
        self._places = tree, 0 if trainer is None else trainer.global_rank
        self._session = self._open_session(None)
        self._loaders = StageLoaders(
            self.config,
            self._session,
            self._places[1],
            interrupted=self._interrupted,
            before_training=self._before_training,
        )
        # Until the loader stands where it goes on from, and in a trial run to its end, the position stays as it is.
        self._keeps_position = False
        if fitting:
            self._start_training(self._session, self._loaders)
            self._keeps_position = not getattr(trainer, "fast_dev_run", False)

    @OnlyWithSources
    def train_dataloader(self) -> MegaScaleLoader:
        """Return the loader of the training stream, the same one each time."""
        if self._train is None:
            raise ConfigError("there is no training stream yet: let trainer.fit call setup(), or call setup('fit')")
        if self.refused is not None:
            raise self.refused
        trainer = self.trainer
        if trainer is not None and not self.schedules_are_made and self.in_passes and trainer.max_steps == -1:
            limits.warn_of_unknown_steps(length_of(self._train))
        return self._train

    @OnlyWithSources
    def val_dataloader(self) -> Any:
        """Return the validation loader, or a dict of loaders by name where `val_sources` is a mapping of lists."""
        return self._evaluation_loaders("val")

    @OnlyWithSources
    def test_dataloader(self) -> Any:
        """Return the test loader, or a dict of loaders by name where `test_sources` is a mapping of lists."""
        return self._evaluation_loaders("test")

    @OnlyWithSources
    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a dict of loaders by name where `predict_sources` is a mapping of lists."""
        return self._evaluation_loaders("predict")

    def on_exception(self, exception: BaseException) -> None:
        """End what this rank started; the others may be gone, so nobody is waited for."""
        if self._is_at_work:
            return  # the exception of another trainer, such as one that was refused
        try:
            self._close(None)
        except Exception:
            logger.warning("ending the loaders after %s failed", type(exception).__name__, exc_info=True)

    def teardown(self, stage: str | None = None) -> None:
        """End the roles: other ranks first, then, behind a barrier, rank 0. The position is kept for a second `fit`."""
        strategy = self._shared_strategy()
        self._close(None if strategy is None else strategy.barrier)

    @property
    def running(self) -> bool:
        """Whether `setup()` was called, and the end has not come yet."""
        return self._session is not None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _shared_strategy(self) -> Any:
        """Return the trainer's strategy where there are other ranks to meet, else None."""
        trainer = self.trainer
        return None if trainer is None or trainer.world_size == 1 else trainer.strategy

    def _open_session(self, files: FileLists | None) -> LoadingSession:
        assert self._places is not None
        strategy = self._shared_strategy()
        return LoadingSession(
            self.config,
            tree=self._places[0],
            rank=self._places[1],
            accumulate=self.num_microbatches,
            broadcast=None if strategy is None else strategy.broadcast,
            kinds=self._kinds,
            passes=self.in_passes,
            frozen=files,
            mesh=mesh_of_trainer(self.trainer),
        )

    def _start_again(self, files: FileLists) -> None:
        """Start the roles anew with those files that the run began with."""
        assert self._session is not None
        assert self._loaders is not None
        strategy = self._shared_strategy()
        self._loaders.leave()
        self._session.close(None if strategy is None else strategy.barrier)
        self._session = self._open_session(files)
        self._loaders.move_to(self._session)

    def _start_training(self, session: LoadingSession, loaders: StageLoaders) -> None:
        """Make the training loader; go on from a state that was loaded before."""
        trainer = self.trainer
        steps = limits.steps_per_epoch(self.config, trainer, session.pass_steps("train"), self.num_microbatches)
        length = length_of(loaders.start_training(steps))
        if trainer is not None:
            limits.check_validation_interval(trainer, length)
        if self._state:
            self._load(self._state)

    def _check_free(self) -> None:
        """Refuse to be taken away from a trainer that is at work."""
        asking, self._asking = self._asking, None
        if asking is None:
            return
        if self._is_at_work and self._owner is not None:
            raise ConfigError(
                f"this {type(self).__name__} is at work in another trainer (stage {self._owner.state.stage}): make "
                "another one for this trainer, or call the two one after the other"
            )
        self.trainer = asking

    def _evaluation_loaders(self, kind: str) -> Any:
        if self._loaders is None:
            stage = {"val": "validate"}.get(kind, kind)
            raise ConfigError(f"there is no {kind} stream yet: let the trainer call setup(), or call setup({stage!r})")
        loaders = self._loaders.evaluation(kind)
        for loader in loaders.values():
            limits.check_evaluation_share(self.trainer, kind, length_of(loader))
        several = isinstance(getattr(self.config, f"{kind}_sources"), Mapping)
        return loaders if several else next(iter(loaders.values()))

    def _before_training(self) -> None:
        """A training batch is about to be taken."""
        if self.trainer is not None:
            meet_callback(self.trainer, self)

    def _interrupted(self) -> bool:
        """Asked while a batch is waited for: the trainer looks at signals only between batches."""
        if self.trainer is not None and self.trainer.received_sigterm:
            raise SIGTERMException
        return False

    def _close(self, barrier: Any) -> None:
        session = self._session
        if session is None:
            return
        if self._keeps_position:
            self._state = self.position()
        self._reports = self.last_reports
        self._owner = None
        loaders, self._session, self._loaders, self.batches_outdated = self._loaders, None, None, False
        try:
            if loaders is not None:
                loaders.close()
        finally:
            session.close(barrier=barrier)
