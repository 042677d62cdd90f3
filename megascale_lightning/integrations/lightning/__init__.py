"""The Lightning binding: a DataModule, and the callback that keeps its state."""

from megascale_lightning.integrations.lightning.callback import MegaScaleStateCallback
from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule

__all__ = ["MegaScaleDataModule", "MegaScaleStateCallback"]
