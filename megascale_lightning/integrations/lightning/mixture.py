"""`MixtureCallback`: changes the shares of the sources while training, by what training says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L

from megascale_lightning.errors import ConfigError
from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule

__all__ = ["MixtureCallback", "data_of"]


class MixtureCallback(L.Callback):
    """Asks for new weights of the sources after every so many steps, and hands them to `set_mixture`.

    They take effect `mixture_lead_steps` later, so that the data do not depend on timing; a checkpoint in between holds
    them already. From then on they take the place of a schedule of the mixture.

    What asks may have a state of its own, as `LossFeedback` has: with `state_dict` and `load_state_dict` it is part of
    the checkpoint.

    Args:
        weights: `weights(trainer, module, step)` gives weights by source name, those of sources that change, or None to
            leave all as they are; `step` is the number of steps taken. It is called on every rank, so that it may
            reduce over them; what rank 0 gets counts.
        every_n_steps: How often, in optimizer steps.

    Raises:
        ConfigError: `every_n_steps` is below 1.
    """

    def __init__(
        self,
        weights: Callable[[L.Trainer, L.LightningModule, int], Mapping[str, float] | None],
        every_n_steps: int = 1,
    ) -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigError(
                f"MixtureCallback: every_n_steps must be a whole number of at least 1, not {every_n_steps!r}"
            )
        self._weights = weights
        self._every_n_steps = every_n_steps

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that there is a mixture to change.

        Raises:
            ConfigError: The trainer's data are not from a `MegaScaleDataModule`.
        """
        if stage == "fit":
            data_of(trainer, "MixtureCallback")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask, where a step was taken and it is due."""
        data = data_of(trainer, "MixtureCallback")
        info = data.last_info
        if info is None or not info.is_last_in_step or (info.step + 1) % self._every_n_steps:
            return
        weights = self._weights(trainer, pl_module, info.step + 1)
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            name = getattr(self._weights, "__qualname__", type(self._weights).__qualname__)
            raise ConfigError(
                f"MixtureCallback: {name} gave {weights!r} after step {info.step}: it has to give a mapping of weights "
                "by source name, or None to leave all as they are"
            )
        data.set_mixture(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what asks, where it has one."""
        kept = getattr(self._weights, "state_dict", None)
        return {} if kept is None else {"weights": kept()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it back."""
        load = getattr(self._weights, "load_state_dict", None)
        if load is not None and "weights" in state_dict:
            load(state_dict["weights"])


def data_of(trainer: L.Trainer, callback: str) -> MegaScaleDataModule:
    """The DataModule whose stream a callback is about to change.

    Raises:
        ConfigError: The trainer's data are not from a `MegaScaleDataModule`.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, MegaScaleDataModule):
        raise ConfigError(
            f"{callback} needs a MegaScaleDataModule: call trainer.fit(model, datamodule=MegaScaleDataModule(...))"
        )
    return data
