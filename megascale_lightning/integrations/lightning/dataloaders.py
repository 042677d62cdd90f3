"""What a torch `DataLoader` was told, as settings of a source and of its rows; what cannot be kept is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from megascale_lightning.errors import ConfigError

__all__ = [
    "Form",
    "ReadLoader",
    "belonging_to",
    "form_of",
    "name_settings",
    "read_eval_loaders",
    "read_train_loader",
    "refuse_iterable",
]

Form = Literal["one", "list", "dict"]
"""What an evaluation hook returned its loaders in."""

_MAP_STYLE: Final = (
    "give a map-style dataset (with __len__ and __getitem__), or its files: "
    'MegaScaleDataModule(sources=[Source("web", "data/*.parquet")], ...)'
)
_WITHOUT_EFFECT: Final = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "pin_memory",
    "timeout",
)
"""Settings of the worker processes, which are not started; `in_order` is one more."""
_STANDARD: Final = ("torch.", "torchdata.", "lightning.")
"""Packages whose loaders give what their dataset, sampler and collate_fn say, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ReadLoader:
    """One `DataLoader` over a map-style dataset, read."""

    what: str
    """Where it comes from, for messages: `MyData.train_dataloader()`."""
    dataset: Any
    batch_size: int
    """Per rank."""
    collate_fn: Callable[[Any], Any] | None
    """None: torch's `default_collate`."""
    shuffle: bool
    drop_last: bool
    without_effect: tuple[str, ...]
    """Settings other than the defaults that only worker processes would have had."""
    without_seed: tuple[str, ...]
    """Settings other than the defaults that randomness would have come from."""


def read_train_loader(what: str, loader: Any) -> ReadLoader:
    """Read what `train_dataloader()` returned.

    Args:
        what: Where it comes from, for messages.
        loader: A `torch.utils.data.DataLoader`.

    Raises:
        ConfigError: It is several, or gives its samples in a way that cannot be kept; names the thing and the way out.
    """
    if isinstance(loader, (CombinedLoader, Mapping, list, tuple)):
        raise ConfigError(
            f"{what} returned a {type(loader).__name__} of loaders, whose batches are made of one batch of each: here "
            "several datasets are mixed into one stream, "
            "MegaScaleDataModule.from_datasets({'a': ..., 'b': ...}, batch_size=...), with weights= for their shares; "
            "to keep batches of several, return one loader over a torch.utils.data.StackDataset"
        )
    return _read(what, loader)


def _read(what: str, loader: Any) -> ReadLoader:
    """Read one loader."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{what} is a {type(loader).__name__}, not a torch DataLoader: only what a DataLoader was told (dataset, "
            "batch size, collate_fn, shuffle) can be taken over. Give its dataset to "
            "MegaScaleDataModule.from_datasets(...), or its files as sources"
        )
    refuse_iterable(what, loader.dataset)
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith(_STANDARD):
        raise ConfigError(
            f"{what} is a {kind.__name__}, a DataLoader with an __iter__ of its own, which would not be called: put "
            "what it does into the dataset, the collate_fn or on_after_batch_transfer, and return a plain DataLoader"
        )
    sampling = _batch_sampler(what, loader)
    return ReadLoader(
        what=what,
        dataset=loader.dataset,
        batch_size=sampling.batch_size,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        shuffle=_shuffles(what, sampling.sampler),
        drop_last=sampling.drop_last,
        without_effect=(
            *(name for name in _WITHOUT_EFFECT if getattr(loader, name, None)),
            *(() if getattr(loader, "in_order", True) else ("in_order",)),
        ),
        without_seed=tuple(_seeds(loader, sampling.sampler)),
    )


def read_eval_loaders(what: str, loaders: Any) -> dict[str, ReadLoader]:
    """Read what an evaluation hook returned: a loader, or a list or a dict of them.

    Returns:
        By the user's names; "0", "1", ... where there are none.

    Raises:
        ConfigError: One of them cannot be taken over.
    """
    if isinstance(loaders, CombinedLoader):
        if loaders._mode != "sequential":
            raise ConfigError(
                f"{what} is a CombinedLoader with mode={loaders._mode!r}, whose batches are made of several: "
                'evaluation loaders run one after another; use mode="sequential", or return a list or a dict of loaders'
            )
        loaders = loaders.iterables
    if isinstance(loaders, Mapping):
        return {str(name): _read(f"{what}[{name!r}]", loader) for name, loader in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return {str(index): _read(f"{what}[{index}]", loader) for index, loader in enumerate(loaders)}
    return {"0": _read(what, loaders)}


def form_of(loaders: Any) -> Form:
    """What an evaluation hook returned its loaders in."""
    if isinstance(loaders, CombinedLoader):
        loaders = loaders.iterables
    return "dict" if isinstance(loaders, Mapping) else "list" if isinstance(loaders, (list, tuple)) else "one"


def name_settings(loaders: Sequence[ReadLoader], of: Callable[[ReadLoader], Sequence[str]]) -> str:
    """The settings of each loader that has any: `MyData.train_dataloader() sets num_workers, pin_memory`."""
    return "; ".join(f"{loader.what} sets {', '.join(of(loader))}" for loader in loaders if of(loader))


def refuse_iterable(what: str, dataset: Any) -> None:
    """Refuse a dataset that cannot be asked for one sample.

    Raises:
        ConfigError: It is an `IterableDataset`, or has no length or no items.
    """
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{what}: {type(dataset).__name__} is an IterableDataset, whose samples have no numbers, so that nobody "
            f"could say which were trained on: {_MAP_STYLE}"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{what}: a {type(dataset).__name__} is no map-style dataset: {_MAP_STYLE}")


def _batch_sampler(what: str, loader: DataLoader[Any]) -> BatchSampler:
    found = loader.batch_sampler
    if found is None:
        raise ConfigError(
            f"{what} has batch_size=None, so the dataset makes whole batches and their samples are not known: return "
            "single samples from the dataset, with batch_size= and, if needed, collate_fn="
        )
    if type(found) is not BatchSampler:
        raise ConfigError(
            f"{what} has a batch_sampler of its own ({type(found).__name__}): which samples share a batch is decided "
            "by the planner here. Use batch_size= and shuffle=; for batches of similar lengths, give the samples as "
            'dicts with "input_ids", and rows=PaddedRows(...) or PackedRows(...)'
        )
    return found


def _shuffles(what: str, sampler: Any) -> bool:
    """Whether a sampler shuffles; one that does anything else is refused."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return False
    if kind is DistributedSampler:
        return bool(sampler.shuffle)
    if kind is RandomSampler:
        if sampler.replacement or sampler._num_samples is not None:
            given = "replacement=True" if sampler.replacement else f"num_samples={sampler._num_samples}"
            raise ConfigError(
                f"{what} has a RandomSampler with {given}, and here an epoch has every sample once: use shuffle=True; "
                "for epochs of another length, set MegaScaleDataModule.from_datamodule(..., steps_per_epoch=...)"
            )
        return True
    raise ConfigError(f"{what} has a {kind.__name__}, and samples are drawn by the planner here: {_way_out(sampler)}")


def _way_out(sampler: Any) -> str:
    if isinstance(sampler, WeightedRandomSampler):
        return (
            "give each class or group of samples as a source with a weight of its own, "
            "MegaScaleDataModule.from_datasets({'rare': ..., 'common': ...}, weights={'rare': 0.5, 'common': 0.5})"
        )
    if isinstance(sampler, SubsetRandomSampler):
        return "use DataLoader(Subset(dataset, indices), shuffle=True)"
    return (
        "use shuffle=True or shuffle=False; an order or a choice of your own can be that of the dataset, "
        "torch.utils.data.Subset(dataset, indices) with shuffle=False"
    )


def _seeds(loader: DataLoader[Any], sampler: Any) -> list[str]:
    found = ["worker_init_fn"] if loader.worker_init_fn is not None else []
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        found.append("generator")
    return found


class _OwnFunction:
    """A `collate_fn` that is bound to the given DataModule, or closes over it.

    A `collate_fn` is refused if its pickle is large, since every rank would hold what it holds. Of this one they do
    anyway, datasets and all: it does not pickle, and so is not weighed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self.function(samples)

    def __reduce__(self) -> Any:
        raise TypeError("it belongs to a DataModule, and is asked for anew where that is set up")


def belonging_to(datamodule: L.LightningDataModule, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The function, said to be the DataModule's where it is."""
    held = [getattr(function, "__self__", None), *_closed_over(function)]
    if function is None or not any(value is datamodule for value in held):
        return function
    return _OwnFunction(function)


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
