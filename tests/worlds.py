"""A `torch.distributed` world of any number of ranks in one process: real groups and meshes that send nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["pretended_world"]


@contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[None]:
    """This process is one of `size` ranks, the others do not exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()
