"""Map-style datasets as users have them, and `read`, which drives one `MegaScaleLoader` with collated rows per rank."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megascale_lightning import ClientPlaceTree, CollatedRows, LoaderConfig, MegaScaleLoader, Source

UNIT_RECORDS = 1024


@dataclass
class Got:
    """One microbatch of one rank."""

    rank: int
    batch: Any
    info: Any

    @property
    def indices(self) -> list[int | None]:
        """Of the records in the dataset; None for a filler row."""
        return [index_of(pieces[0]) if pieces else None for pieces in self.info.sample_ids()]


def index_of(piece: Any) -> int:
    return int(piece[2] * UNIT_RECORDS + piece[3])


def config_of(
    data: Any, rows: Any = None, *, weight: float = 1.0, epochs: int | None = 1, **changes: Any
) -> LoaderConfig:
    source = {name: changes.pop(name) for name in ("transform", "length", "on_error", "columns") if name in changes}
    base: dict[str, Any] = {
        "sources": [Source("images", data, epochs=epochs, weight=weight, **source)],
        "rows": rows or CollatedRows(4),
        "global_batch_size": 16,
        "seed": 5,
        "runtime": "local",
        "prefetch_steps": 2,
        "plan_window": 3,
    }
    return LoaderConfig(**(base | changes))


@dataclass
class Read:
    """All microbatches, rank after rank within a step, and what is known after each step."""

    got: list[Got]
    certificates: list[str]
    states: list[dict[str, Any]]

    def steps(self) -> list[frozenset[int]]:
        """The records of each step."""
        found: dict[int, set[int]] = {}
        for one in self.got:
            found.setdefault(one.info.step, set()).update(i for i in one.indices if i is not None)
        return [frozenset(indices) for _, indices in sorted(found.items())]


def read(config: LoaderConfig, dp: int = 1, *, steps: int | None = None, state: Any = None) -> Read:
    """The stream on all ranks, step by step."""
    tree = ClientPlaceTree.from_sizes(dp=dp)
    loaders = [MegaScaleLoader(config, tree=tree, rank=rank) for rank in range(dp)]
    try:
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(loader) for loader in loaders]
        found = Read([], [], [])
        while steps is None or len(found.certificates) < steps:
            counts = [_one_step(rank, *pair, found) for rank, pair in enumerate(zip(loaders, iterators, strict=True))]
            assert len(set(counts)) == 1
            if not counts[0]:
                break
            assert len({loader.certificate for loader in loaders}) == 1
            found.certificates.append(loaders[0].certificate)
            found.states.append(loaders[0].state_dict())
        return found
    finally:
        for loader in reversed(loaders):
            loader.close()


def _one_step(rank: int, loader: MegaScaleLoader, iterator: Any, found: Read) -> int:
    for count in range(loader.num_microbatches):
        try:
            batch = next(iterator)
        except StopIteration:
            assert count == 0
            return 0
        assert loader.last_info is not None
        found.got.append(Got(rank, batch, loader.last_info))
        if loader.last_info.is_last_in_step:
            return count + 1
    raise AssertionError("a step without an end")


class Images:
    """n pairs of a tensor, which says what it is, and an int."""

    def __init__(self, n: int = 100, fails: tuple[int, ...] = ()) -> None:
        self.n = n
        self.fails = fails
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.asked[index] += 1
        if index in self.fails:
            raise OSError(f"image {index} is broken")
        return torch.full((3, 2, 2), float(index)), index


class Augmented(Images):
    """Each item drawn anew, from all three generators."""

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), float(np.random.random())  # noqa: NPY002
        return index, torch.tensor([*drawn, float(torch.rand(()))], dtype=torch.float64)


class Texts:
    """Dicts of lists of differing length."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index + 1] * (1 + index * 7 % 11), "label": index % 3}


class Boxes:
    """Tensors of differing size."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return torch.full((index % 5, 4), float(index))


class Sized:
    """A batch class of the user's own."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def to(self, device: Any) -> Sized:
        return Sized([sample.to(device) for sample in self.samples])

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Sized)
        return same(self.samples, other.samples)

    __hash__ = None  # type: ignore[assignment]


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "data") and hasattr(one, "keys"):
        return same(dict(one), dict(other))
    return bool(one == other)
