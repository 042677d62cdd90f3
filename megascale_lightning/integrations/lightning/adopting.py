"""`AdoptedDataModule`: an existing DataModule whose samples the shared loader reads, orders and keeps track of."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MethodType
from typing import Any, Final

import lightning as L
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.model_helpers import is_overridden

from megascale_lightning.checkpointing.filelists import FileLists
from megascale_lightning.config import EVAL_KINDS, LoaderConfig
from megascale_lightning.errors import ConfigError, MegaScaleWarning
from megascale_lightning.integrations.lightning.dataloaders import (
    Form,
    ReadLoader,
    belonging_to,
    form_of,
    name_settings,
    read_eval_loaders,
    read_train_loader,
)
from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.choices import OnError
from megascale_lightning.sources.source import Source

__all__ = ["AdoptedDataModule", "adopt"]

logger = logging.getLogger(__name__)

_OWN_STATE: Final = "datamodule"
"""Where the checkpoint keeps the state of the given DataModule, beside the position in the data."""
_FROM_LOADERS: Final = ("sources", "eval_rows", *(f"{kind}_sources" for kind in EVAL_KINDS))
_BY_NAME: Final = ("mixture", "weights")
"""Settings that name sources, which are known only once the loaders are."""
_KINDS: Final = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""Stage -> kinds of loaders to ask for."""


def adopt(
    cls: type[MegaScaleDataModule],
    datamodule: Any,
    *,
    rows: Rows | None = None,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    on_error: OnError = "raise",
    max_bad_fraction: float | None = None,
    **settings: Any,
) -> AdoptedDataModule:
    """Take over a DataModule; see `MegaScaleDataModule.from_datamodule`.

    Args:
        cls: The class it was called on.
        datamodule: The given one.
        rows: In place of what its loaders say.
        collate_fn: In place of theirs.
        on_error: What happens to a sample that fails, in any of its datasets; see `Source`.
        max_bad_fraction: Of `Source`.
        settings: Keywords of `MegaScaleDataModule`.

    Raises:
        ConfigError: It is none, or one already, or the settings say what its loaders say.
    """
    if cls is not MegaScaleDataModule:
        raise ConfigError(
            f"{cls.__name__}.from_datamodule would not make a {cls.__name__}: call "
            "MegaScaleDataModule.from_datamodule, and put what your class adds into the given DataModule"
        )
    if isinstance(datamodule, MegaScaleDataModule):
        raise ConfigError(f"{type(datamodule).__name__} is a MegaScaleDataModule already: give it to the trainer")
    if not isinstance(datamodule, L.LightningDataModule):
        given = f"the class {datamodule.__name__}" if isinstance(datamodule, type) else type(datamodule).__name__
        hint = "an instance of it" if isinstance(datamodule, type) else "a lightning.pytorch.LightningDataModule"
        raise ConfigError(
            f"from_datamodule takes a LightningDataModule, not {given}: give {hint} (one of the package "
            "pytorch_lightning is of another class); for datasets there is MegaScaleDataModule.from_datasets"
        )
    said = sorted(set(settings) & set(_FROM_LOADERS))
    if said:
        raise ConfigError(
            f"from_datamodule takes {said} from the loaders of {type(datamodule).__name__}: leave them out, or make a "
            "MegaScaleDataModule of sources alone"
        )
    if rows is not None and collate_fn is not None:
        raise ConfigError("rows= and collate_fn= both say how batches are made: give CollatedRows(..., collate_fn)")
    bad = {"on_error": on_error, "max_bad_fraction": max_bad_fraction}
    return AdoptedDataModule(datamodule, rows=rows, collate_fn=collate_fn, bad=bad, settings=settings)


class _IfOverridden:
    """Hides a hook that the given DataModule does not have: a trainer takes an overridden one for a hook with a use."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._name = hook.__name__
        self.__doc__ = hook.__doc__

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        if owner is None:
            return self._hook
        has_it = is_overridden(self._name, owner.wrapped)
        return MethodType(self._hook if has_it else getattr(L.LightningDataModule, self._name), owner)


class AdoptedDataModule(MegaScaleDataModule):
    """Made by `MegaScaleDataModule.from_datamodule`: the given DataModule's hooks at their times, our loaders.

    Attributes that are not the loader's own are those of the given one, so that `trainer.datamodule.num_classes` stays
    what it was.

    Args:
        datamodule: The given one.
        rows: In place of `CollatedRows` with the loaders' batch sizes and collate functions.
        collate_fn: In place of the loaders' own.
        bad: What every source says of bad samples: `on_error`, `max_bad_fraction`.
        settings: Keywords of `MegaScaleDataModule`.
    """

    always_passes = True
    """A `DataLoader` ends with the data, whatever ends the training; so do these."""

    wrapped: L.LightningDataModule
    """The given DataModule."""

    def __init__(
        self,
        datamodule: L.LightningDataModule,
        *,
        rows: Rows | None,
        collate_fn: Callable[[Sequence[Any]], Any] | None,
        bad: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        # Checks all that does not depend on the loaders; these are asked for after the given module's setup().
        super().__init__(
            sources=[Source("train", (), format="dataset", **bad)],
            rows=rows or CollatedRows(1, collate_fn),
            **{name: value for name, value in settings.items() if name not in _BY_NAME},
        )
        self._log_hyperparams = datamodule._log_hyperparams
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            datamodule.allow_zero_length_dataloader_with_multiple_devices
        )
        self._own_rows = rows
        self._own_collate_fn = collate_fn
        self._bad = dict(bad)
        self._by_name = {name: settings[name] for name in _BY_NAME if name in settings}
        self._keeps_last_step = "last_step" in settings
        self._read: dict[str, dict[str, ReadLoader]] = {}
        self._forms: dict[str, Form] = {}
        self._said: set[str] = set()
        self._unasked = self.config
        self.wrapped = datamodule  # last: from here on, what is not found here is looked for there

    # --- what the trainer calls -------------------------------------------------------------------------------------

    @_IfOverridden
    def prepare_data(self) -> None:
        """Let the given module prepare its data."""
        self.wrapped.trainer = self.trainer
        self.wrapped.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set the given module up, ask it for its loaders, and start the roles that take their place.

        Raises:
            ConfigError: A loader, or a setting of the trainer, cannot be taken over.
        """
        self._check_free()
        self.wrapped.trainer = self.trainer
        self._check_trainer(self.trainer)
        self._close(None)  # while the settings are those that it was opened with
        self.wrapped.setup(stage=stage)  # type: ignore[arg-type]  # by keyword and with None, as Lightning does
        self.config = self._settle(stage)
        super().setup(stage)

    def teardown(self, stage: str | None = None) -> None:
        """End the roles, then tear the given module down."""
        try:
            super().teardown(stage)
        finally:
            self.wrapped.teardown(stage=stage)  # type: ignore[arg-type]

    def on_exception(self, exception: BaseException) -> None:
        """Tell the given module, and end what this rank started."""
        if self._is_at_work:
            return  # the exception of another trainer, such as one that was refused
        try:
            self.wrapped.on_exception(exception)
        finally:
            super().on_exception(exception)

    @_IfOverridden
    def train_dataloader(self) -> Any:
        """Return the loader of the training stream."""
        return super().train_dataloader()

    @_IfOverridden
    def val_dataloader(self) -> Any:
        """Return the validation loaders, in the form that the given module returned its own in."""
        return self._in_given_form("val", super().val_dataloader)

    @_IfOverridden
    def test_dataloader(self) -> Any:
        """Return the test loaders, in the form that the given module returned its own in."""
        return self._in_given_form("test", super().test_dataloader)

    @_IfOverridden
    def predict_dataloader(self) -> Any:
        """Return the prediction loaders, in the form that the given module returned its own in."""
        return self._in_given_form("predict", super().predict_dataloader)

    @_IfOverridden
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Let the given module do it."""
        return self.wrapped.transfer_batch_to_device(batch, device, dataloader_idx)

    @_IfOverridden
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Let the given module do it."""
        return self.wrapped.on_before_batch_transfer(batch, dataloader_idx)

    @_IfOverridden
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Let the given module do it."""
        return self.wrapped.on_after_batch_transfer(batch, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the given module's own state beside it."""
        own = self.wrapped.state_dict()
        return {**super().state_dict(), **({_OWN_STATE: own} if own else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the given module its state back, and go on from the position.

        Raises:
            StateError: The position is of other data or other settings.
        """
        position = dict(state_dict)
        own = position.pop(_OWN_STATE, None)
        if own:
            self.wrapped.load_state_dict(own)
        super().load_state_dict(position)

    def load_position(self, position: Mapping[str, Any], lists: FileLists | None = None) -> None:
        """Go on from what `position()` gave, or from what stands beside the given module's state."""
        super().load_position({name: value for name, value in position.items() if name != _OWN_STATE}, lists)

    def take_over(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the given module the state that it saved itself, in a run before it was taken over."""
        own = checkpoint.get(type(self.wrapped).__qualname__)
        if own:
            self.wrapped.load_state_dict(own)

    # --- as if it were the given one --------------------------------------------------------------------------------

    @property
    def hparams(self) -> Any:
        """Those of the given module."""
        return self.wrapped.hparams

    @property
    def hparams_initial(self) -> Any:
        """Those of the given module."""
        return self.wrapped.hparams_initial

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("wrapped")
        if wrapped is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("wrapped")
        own = wrapped is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(wrapped, name)
        if own:
            super().__setattr__(name, value)
        else:
            setattr(wrapped, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Whoever gets the copy asks for the loaders itself.
        wrapped = copy(self.wrapped)
        wrapped.trainer = None
        return {**super().__getstate__(), "config": self._unasked, "_read": {}, "wrapped": wrapped}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_trainer(self, trainer: Any) -> None:
        if trainer is None:
            return
        kind = type(self.wrapped).__name__
        every = trainer.reload_dataloaders_every_n_epochs
        if every:
            raise ConfigError(
                f"Trainer(reload_dataloaders_every_n_epochs={every}): the loaders of {kind} are asked for once a fit, "
                "so that their order can be kept: leave it at 0, and call fit again for other data"
            )
        if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
            raise ConfigError(
                f"a batch size cannot be looked for here, since the loaders of {kind} are asked for once: find it with "
                f"{kind} itself, then give the result to MegaScaleDataModule.from_datamodule"
            )

    def _in_given_form(self, kind: str, made: Callable[[], Any]) -> Any:
        form = self._forms.get(kind, "one")
        if not self._read.get(kind):
            return []
        return list(made().values()) if form == "list" else made()

    def _settle(self, stage: str | None) -> LoaderConfig:
        """Ask for the loaders of a stage, and put what they say into the settings; those of other stages stay."""
        for kind in ("train", *EVAL_KINDS) if stage is None else _KINDS[stage]:
            self._read[kind] = self._ask(kind) if self._is_due(kind, stage) else {}
        self._say()
        sources = () if any(self._read.values()) else self._unasked.sources  # settings have a source, if only in name
        changed: dict[str, Any] = {"sources": sources, "eval_rows": {}}
        train = self._read.get("train", {}).get("0")
        if train is not None:
            changed |= {"sources": [self._source("train", train)], "rows": self._rows_of(train)}
            if not self._keeps_last_step:
                changed["last_step"] = "drop" if train.drop_last else "fill"
        for kind in EVAL_KINDS:
            loaders = self._read.get(kind, {})
            named = {name: [self._source(kind, loader)] for name, loader in loaders.items()}
            changed[f"{kind}_sources"] = named["0"] if named and self._forms[kind] == "one" else named
            for index, loader in enumerate(loaders.values()):
                changed["eval_rows"][f"{kind}/{index}"] = self._rows_of(loader)
        return replace(self.config, **changed, **self._by_name)

    def _is_due(self, kind: str, stage: str | None) -> bool:
        """Whether the trainer is going to ask for loaders of a kind; where they are what a stage is about, always."""
        if stage is not None and kind == _KINDS[stage][0]:
            return True
        if not is_overridden(f"{kind}_dataloader", self.wrapped):
            return False
        trainer = self.trainer
        if stage is None or trainer is None or trainer.lightning_module is None:
            return True
        return trainer.limit_val_batches != 0 and is_overridden("validation_step", trainer.lightning_module)

    def _ask(self, kind: str) -> dict[str, ReadLoader]:
        """Ask the given module for its loaders of a kind."""
        hook = f"{kind}_dataloader"
        loaders = getattr(self.wrapped, hook)()
        what = f"{type(self.wrapped).__name__}.{hook}()"
        if kind == "train":
            return {"0": read_train_loader(what, loaders)}
        self._forms[kind] = form_of(loaders)
        return self._with_samples(read_eval_loaders(what, loaders))

    def _with_samples(self, loaders: dict[str, ReadLoader]) -> dict[str, ReadLoader]:
        """Evaluation loaders without those of empty datasets: Lightning goes on without their batches, too."""
        fresh = [read.what for read in loaders.values() if not len(read.dataset) and read.what not in self._said]
        self._said |= set(fresh)
        if fresh and (self.trainer is None or self.trainer.is_global_zero):
            moved = "" if len(loaders) == 1 else ", and dataloader_idx counts without it"
            _warn(f"{', '.join(fresh)}: the dataset is empty, so the loader is left out{moved}")
        return {name: loader for name, loader in loaders.items() if len(loader.dataset)}

    def _source(self, name: str, loader: ReadLoader) -> Source:
        return Source(name, loader.dataset, format="dataset", shuffle=loader.shuffle, **self._bad)

    def _rows_of(self, loader: ReadLoader) -> Rows:
        if self._own_rows is not None:
            return self._own_rows
        return CollatedRows(loader.batch_size, belonging_to(self.wrapped, self._own_collate_fn or loader.collate_fn))

    def _say(self) -> None:
        """Say once what of the loaders has no effect."""
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        fresh = [
            loader for loaders in self._read.values() for loader in loaders.values() if loader.what not in self._said
        ]
        self._said |= {loader.what for loader in fresh}
        ignored = name_settings(fresh, lambda loader: loader.without_effect)
        if ignored:
            logger.info("%s: without effect, since no DataLoader workers are started", ignored)
        unseeded = name_settings(fresh, lambda loader: loader.without_seed)
        if unseeded:
            _warn(f"{unseeded}: without effect; randomness comes from seed={self.config.seed} and the sample's id")
        trains = [loader.what for loader in self._read.get("train", {}).values()]
        whole = name_settings(
            fresh, lambda loader: ("drop_last",) if loader.drop_last and loader.what not in trains else ()
        )
        if whole:
            _warn(f"{whole}: without effect; an evaluation gives every sample once")


def _warn(message: str) -> None:
    warnings.warn(message, MegaScaleWarning, stacklevel=2)
