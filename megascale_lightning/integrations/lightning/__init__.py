"""The Lightning binding: a DataModule, and the callbacks that keep its state and change its mixture."""

from megascale_lightning.integrations.lightning.callback import MegaScaleStateCallback
from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule
from megascale_lightning.integrations.lightning.feedback import LossFeedback
from megascale_lightning.integrations.lightning.mixture import MixtureCallback

__all__ = ["LossFeedback", "MegaScaleDataModule", "MegaScaleStateCallback", "MixtureCallback"]
