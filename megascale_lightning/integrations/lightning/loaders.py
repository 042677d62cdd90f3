"""The loaders of one stage of a trainer: training and evaluation, and which batch the trainer is working on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import lightning as L

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.loader import MegaScaleLoader
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, StreamError
from megascale_lightning.rows import CollatedRows

__all__ = ["OnlyWithSources", "StageLoaders", "TrainerLoader", "length_of"]


class TrainerLoader(MegaScaleLoader):
    """A `MegaScaleLoader` that says when a batch is about to be taken from it."""

    def __init__(self, *args: Any, before: Callable[[MegaScaleLoader], None], **more: Any) -> None:
        """Make it.

        Args:
            args: Those of `MegaScaleLoader`.
            before: Called with this loader before each batch.
            more: Those of `MegaScaleLoader`.
        """
        super().__init__(*args, **more)
        self._before = before
        self.knows_length = True
        """Off for an epoch that begins inside a pass."""

    def __len__(self) -> int:
        """See `MegaScaleLoader.__len__`."""
        if not self.knows_length:
            raise TypeError("this epoch began inside a pass: what is left of it is not counted")
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        """An iterator that starts behind the last consumed step. It opens the stream at its first `next()`."""
        return _Announced(self, super().__iter__(), self._before)


class _Announced(Iterator[Any]):
    def __init__(
        self, loader: MegaScaleLoader, batches: Iterator[Any], before: Callable[[MegaScaleLoader], None]
    ) -> None:
        self._loader, self._batches, self._before = loader, batches, before

    def __next__(self) -> Any:
        self._before(self._loader)
        return next(self._batches)


class StageLoaders:
    """The loaders of one session. The training loader is made at once or not at all, the others when asked for.

    Args:
        config: The settings.
        session: What serves them.
        rank: Global rank of this process.
        interrupted: Asked while a batch is waited for; True ends the wait.
        before_training: Called before each batch that is taken from the training loader.
    """

    def __init__(
        self,
        config: LoaderConfig,
        session: LoadingSession,
        rank: int,
        *,
        interrupted: Callable[[], bool],
        before_training: Callable[[], None],
    ) -> None:
        self._config, self._session, self._rank = config, session, rank
        self._interrupted, self._before_training = interrupted, before_training
        self._evaluation: dict[str, list[MegaScaleLoader]] = {}
        self._latest: MegaScaleLoader | None = None
        self._info: BatchInfo | None = None
        self.train: TrainerLoader | None = None
        """The training loader; None in an evaluation alone."""

    def start_training(self, steps_per_epoch: int | None) -> TrainerLoader:
        """Make the training loader; `steps_per_epoch` gives it a length in place of the config's."""
        self.train = self._make("train", auto_consume=False, steps_per_epoch=steps_per_epoch)
        return self.train

    def evaluation(self, kind: str) -> dict[str, MegaScaleLoader]:
        """Give the loaders of a kind ("val", "test", "predict") by the user's names, the same ones each time."""
        names = list(self._config.eval_sources(kind))
        if kind not in self._evaluation:
            streams = [f"{kind}/{index}" for index in range(len(names))]
            self._evaluation[kind] = [self._make(stream, auto_consume=True) for stream in streams]
        return dict(zip(names, self._evaluation[kind], strict=True))

    @property
    def last_info(self) -> BatchInfo | None:
        """Of the batch that the trainer is working on; else of the one handed out last."""
        if self._info is not None or self._latest is None:
            return self._info
        return self._latest.last_info

    def work_on(self, info: BatchInfo | None) -> None:
        """Say which batch the trainer is working on; None: the one handed out last."""
        self._info = info

    def arrived(self, fetcher: Any, batch: Any) -> BatchInfo:
        """Find the info of the training batch that reached the trainer: in the batch, or by the order of batches.

        Args:
            fetcher: The trainer's; it may have fetched batches beyond this one.
            batch: As the hooks have left it.

        Raises:
            ConfigError: The batch has lost its info.
            StreamError: Another number of batches was handed out than reached the trainer.
        """
        assert self.train is not None
        handed = self.train.handed
        if not isinstance(self._config.rows, CollatedRows):
            handed.clear()
            return _info_of(batch)
        due = len(getattr(fetcher, "batches", ())) + 1
        if len(handed) != due:
            raise StreamError(
                f"{len(handed)} batches were handed out since the last one that was trained on, and {due} reached the "
                "trainer: was the loader iterated outside of it, or were batches skipped or repeated?"
            )
        return handed.popleft()

    def evaluated(self, kind: str, index: int) -> BatchInfo | None:
        """Take the info of the evaluation batch that reached the trainer from a kind's loader; None: not from here."""
        loaders = self._evaluation.get(kind, [])
        handed = loaders[index].handed if index < len(loaders) else None
        return handed.popleft() if handed else None

    def leave(self) -> None:
        """Stop reading in all streams; the next iterator of each opens it again."""
        for loader in self._all():
            loader.leave()

    def move_to(self, session: LoadingSession) -> None:
        """Read from another session of the same streams from now on."""
        self._session = session
        for loader in self._all():
            loader.move_to(session)

    def close(self) -> None:
        """Leave all streams."""
        for loader in self._all():
            loader.close()

    def _all(self) -> Iterator[MegaScaleLoader]:
        training = [] if self.train is None else [self.train]
        return itertools.chain(training, *self._evaluation.values())

    def _make(self, stream: str, *, auto_consume: bool, steps_per_epoch: int | None = None) -> TrainerLoader:
        return TrainerLoader(
            self._config,
            rank=self._rank,
            stream=stream,
            session=self._session,
            auto_consume=auto_consume,
            interrupted=self._interrupted,
            steps_per_epoch=steps_per_epoch,
            before=self._before_batch,
        )

    def _before_batch(self, loader: MegaScaleLoader) -> None:
        self._latest = loader
        if loader is self.train:
            self._before_training()


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


def length_of(loader: Any) -> int | None:
    """Return the batches of an epoch of a loader; None: it is unsized."""
    try:
        return len(loader)
    except TypeError:
        return None


class OnlyWithSources:
    """Hides a hook where there is nothing for it: a trainer takes an overridden one to say that there are loaders."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook
        self._name = hook.__name__
        kind = self._name.split("_")[0]
        self._sources = "sources" if kind == "train" else f"{kind}_sources"
        self.__doc__ = hook.__doc__

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        if owner is None:
            return self._hook
        shown = bool(getattr(owner.config, self._sources))
        return MethodType(self._hook if shown else getattr(L.LightningDataModule, self._name), owner)
