"""`from_datasets`: a `MegaScaleDataModule` over datasets that are at hand."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from torch.utils.data import Dataset

from megascale_lightning.errors import ConfigError, MegaScaleWarning
from megascale_lightning.integrations.lightning.dataloaders import refuse_iterable
from megascale_lightning.integrations.lightning.datamodule import MegaScaleDataModule
from megascale_lightning.rows import CollatedRows
from megascale_lightning.sources.choices import OnError
from megascale_lightning.sources.source import Source

__all__ = ["from_datasets"]

logger = logging.getLogger(__name__)

D = TypeVar("D", bound=MegaScaleDataModule)

_SAID_ALREADY: Final = ("sources", "val_sources", "test_sources", "predict_sources")


def from_datasets(
    cls: type[D],
    given: Mapping[str, Any],
    *,
    batch_size: int,
    num_workers: int,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    shuffle: bool = True,
    on_error: OnError = "raise",
    max_bad_fraction: float | None = None,
    **settings: Any,
) -> D:
    """Make a DataModule of datasets; see `MegaScaleDataModule.from_datasets`.

    Args:
        cls: The class to make.
        given: Kind ("train", "val", "test", "predict") -> dataset, several of them, or None.
        batch_size: Samples a batch on each rank.
        num_workers: Said to have no effect.
        collate_fn: From the samples of a batch to the batch; None: torch's `default_collate`.
        shuffle: Whether the training samples are permuted.
        on_error: What happens to a sample that fails, in any of the datasets; see `Source`.
        max_bad_fraction: Of `Source`.
        settings: Further keywords of the class.

    Raises:
        ConfigError: A dataset cannot be asked for single samples, or a setting says what another says.
    """
    said = sorted(set(settings) & set(_SAID_ALREADY))
    if said:
        raise ConfigError(
            f"from_datasets makes {said} of the datasets: give them as *_dataset, or use the class itself"
        )
    if "rows" in settings and (collate_fn is not None or batch_size != 1):
        raise ConfigError("rows= says how batches are made: leave out rows=, or batch_size= and collate_fn=")
    if num_workers:
        logger.info("num_workers=%d: without effect, since no DataLoader workers are started", num_workers)
    sources = {kind: _named(kind, datasets) for kind, datasets in given.items() if datasets is not None}
    if isinstance(given["train"], (list, tuple)) and len(sources["train"]) > 1:
        warnings.warn(
            f"train_dataset is a {type(given['train']).__name__} of datasets: they are mixed into one stream, where a "
            f"plain DataModule would hand out a batch of each at once; give a dict to name them",
            MegaScaleWarning,
            stacklevel=3,
        )
    own: dict[str, Any] = {"format": "dataset", "on_error": on_error, "max_bad_fraction": max_bad_fraction}
    made: dict[str, Any] = {"rows": CollatedRows(batch_size, collate_fn), **settings}
    for kind, datasets in sources.items():
        if kind == "train":
            made["sources"] = [Source(name, dataset, shuffle=shuffle, **own) for name, dataset in datasets.items()]
        else:
            several = {name: [Source(kind, dataset, shuffle=False, **own)] for name, dataset in datasets.items()}
            made[f"{kind}_sources"] = several if _is_several(given[kind]) else several[kind]
    data = cls(**made)
    data.always_passes = True
    return data


def _named(kind: str, datasets: Any) -> dict[str, Any]:
    """The datasets by name; a single one has that of its kind."""
    if not _is_several(datasets):
        found = {kind: datasets}
    elif isinstance(datasets, Mapping):
        found = {str(name): dataset for name, dataset in datasets.items()}
    else:
        found = {str(index): dataset for index, dataset in enumerate(datasets)}
    for name, dataset in found.items():
        what = f"{kind}_dataset" + ("" if not _is_several(datasets) else f"[{name!r}]")
        refuse_iterable(what, dataset)
    return found


def _is_several(datasets: Any) -> bool:
    """Whether these are datasets: a dict by name, or a list of them; a list of anything else is a dataset itself."""
    if isinstance(datasets, Mapping):
        return all(isinstance(name, str) for name in datasets)
    return isinstance(datasets, (list, tuple)) and len(datasets) > 0 and all(map(_is_dataset, datasets))


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or hasattr(type(value), "column_names")
