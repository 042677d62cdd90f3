"""One shared, balanced and exactly resumable data plane for PyTorch Lightning, on Ray.

Importing this package is cheap: whatever needs torch, Ray or Lightning is loaded when its name is first used, because
the actors that read the data import this package too and must stay light.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from megascale_lightning.config import LoaderConfig, Mixture
from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import (
    ConfigError,
    CorruptDataError,
    DataError,
    EmptySourceError,
    ForkError,
    MegaScaleError,
    MegaScaleWarning,
    NotOpenError,
    RayUnreachableError,
    ReplayError,
    RoleMissingError,
    RuntimeFailure,
    StalledError,
    StateError,
    StreamError,
)
from megascale_lightning.rows import CollatedRows, PackedRows, PaddedRows
from megascale_lightning.sources.join import Join
from megascale_lightning.sources.source import Source
from megascale_lightning.version import __version__ as __version__

if TYPE_CHECKING:
    from megascale_lightning.client.info import BatchInfo, model_inputs
    from megascale_lightning.client.loader import MegaScaleLoader
    from megascale_lightning.client.loss import reduce_loss
    from megascale_lightning.integrations.lightning import (
        LossFeedback,
        MegaScaleDataModule,
        MegaScaleStateCallback,
        MixtureCallback,
        StepTimes,
    )
    from megascale_lightning.places.tree import ClientPlaceTree
    from megascale_lightning.planning.calibration import CalibratedCost, CostCalibrator
    from megascale_lightning.planning.costs import (
        AttentionCost,
        CostOf,
        TokenCount,
        TransformerCost,
        ViTCost,
    )
    from megascale_lightning.planning.dgraph import DGraph
    from megascale_lightning.planning.strategies import Balanced, Curriculum, HybridVLM, LongShort, RoundRobin

__all__ = [
    "AttentionCost",
    "Balanced",
    "BatchInfo",
    "CalibratedCost",
    "ClientPlaceTree",
    "CollatedRows",
    "ConfigError",
    "CorruptDataError",
    "CostCalibrator",
    "CostOf",
    "Curriculum",
    "DGraph",
    "DataError",
    "EmptySourceError",
    "ForkError",
    "HybridVLM",
    "Join",
    "LoaderConfig",
    "LongShort",
    "LossFeedback",
    "MegaScaleDataModule",
    "MegaScaleError",
    "MegaScaleLoader",
    "MegaScaleStateCallback",
    "MegaScaleWarning",
    "Mixture",
    "MixtureCallback",
    "NotOpenError",
    "PackedRows",
    "PaddedRows",
    "QuantileSchedule",
    "RayUnreachableError",
    "ReplayError",
    "RoleMissingError",
    "RoundRobin",
    "RuntimeFailure",
    "Source",
    "StalledError",
    "StateError",
    "StepTimes",
    "StreamError",
    "TokenCount",
    "TransformerCost",
    "ViTCost",
    "model_inputs",
    "reduce_loss",
]

_LAZY: Final = MappingProxyType(
    {
        "AttentionCost": "planning.costs",
        "Balanced": "planning.strategies",
        "BatchInfo": "client.info",
        "CalibratedCost": "planning.calibration",
        "ClientPlaceTree": "places.tree",
        "CostCalibrator": "planning.calibration",
        "CostOf": "planning.costs",
        "Curriculum": "planning.strategies",
        "DGraph": "planning.dgraph",
        "HybridVLM": "planning.strategies",
        "LongShort": "planning.strategies",
        "LossFeedback": "integrations.lightning",
        "MegaScaleDataModule": "integrations.lightning",
        "MegaScaleLoader": "client.loader",
        "MegaScaleStateCallback": "integrations.lightning",
        "MixtureCallback": "integrations.lightning",
        "RoundRobin": "planning.strategies",
        "StepTimes": "integrations.lightning",
        "TokenCount": "planning.costs",
        "TransformerCost": "planning.costs",
        "ViTCost": "planning.costs",
        "model_inputs": "client.info",
        "reduce_loss": "client.loss",
    }
)
"""Name -> the module that has it, loaded on first use."""

if not TYPE_CHECKING:  # type checkers see the imports above, and so report names that do not exist

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
