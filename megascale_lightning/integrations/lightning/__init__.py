"""The Lightning binding: a DataModule, and callbacks that keep its state, change its mixture and time its steps."""

from megascale_lightning.integrations.lightning.callback import MegaScaleStateCallback
from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule
from megascale_lightning.integrations.lightning.feedback import LossFeedback
from megascale_lightning.integrations.lightning.mixture import MixtureCallback
from megascale_lightning.integrations.lightning.steptimes import StepTimes

__all__ = ["LossFeedback", "MegaScaleDataModule", "MegaScaleStateCallback", "MixtureCallback", "StepTimes"]
