"""What a process of many ranks finds in its environment, without the other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.worlds import pretended_world

__all__ = ["launched_by_torchrun"]


@contextmanager
def launched_by_torchrun(size: int, rank: int) -> Iterator[None]:
    """This process is one of `size` that torchrun started on one node; they need not be there."""
    with pytest.MonkeyPatch.context() as patch, pretended_world(size, rank):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0}
        sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "pretended"}
        for name, value in (ranks | sizes | where).items():
            patch.setenv(name, str(value))
        yield
