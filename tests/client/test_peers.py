"""Which process group carries batches from one rank to its peers, and how its waits end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megascale_lightning import ClientPlaceTree, ConfigError, MegaScaleWarning
from megascale_lightning.client import peers
from megascale_lightning.client.peers import PeerGroup, find_peers
from megascale_lightning.errors import StreamError

TREE = ClientPlaceTree.from_sizes(pp=2, dp=2, tp=2)


class Distributed:
    """Stands for `torch.distributed` in the process of one rank."""

    def __init__(self, rank: int, size: int, backends: str = "cpu:gloo") -> None:
        self.rank, self.size, self.backends = rank, size, backends
        self.made: list[tuple[int, ...]] = []
        self.sent: list[Any] = []
        self.destroyed: list[Any] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.size > 0

    def get_world_size(self) -> int:
        return self.size

    def get_rank(self) -> int:
        return self.rank

    def new_group(self, ranks: list[int], backend: str) -> str:
        assert backend == "gloo"
        self.made.append(tuple(ranks))
        return f"new {ranks}"

    def get_backend_config(self, group: Any) -> str:
        return self.backends

    def destroy_process_group(self, group: Any) -> None:
        self.destroyed.append(group)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        assert async_op
        self.sent.append((src, group, tensor.device.type))
        return Done()


class Done:
    def is_completed(self) -> bool:
        return True

    def wait(self, *limit: Any) -> None:
        pass


class Mesh:
    """A device mesh: its ranks, and the name of a group along each dimension."""

    def __init__(self, ranks: Any) -> None:
        self.mesh = torch.as_tensor(np.asarray(ranks))

    def get_group(self, dimension: int) -> str:
        return f"mesh {dimension}"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(rank: int, size: int, backends: str = "cpu:gloo") -> Distributed:
        found = Distributed(rank, size, backends)
        monkeypatch.setattr(peers, "dist", found)
        return found

    return make


def wanted() -> None:
    pass


def test_every_process_makes_the_same_groups_in_the_same_order(process: Any) -> None:
    made = []
    for rank in TREE.ranks:
        distributed = process(rank, 8)
        group = find_peers(TREE, ("pp", "tp"))
        assert group is not None
        assert group.ranks == TREE.peers(rank, ("pp", "tp"))
        group.begin(torch.zeros(1)).wait(wanted)
        assert distributed.sent == [(group.fetcher, f"new {sorted(group.ranks)}", "cpu")]
        made.append(distributed.made)
        group.close()
        group.close()
        assert distributed.destroyed == [f"new {sorted(group.ranks)}"]
    assert made == [[(0, 1, 4, 5), (2, 3, 6, 7)]] * 8


def test_a_permuted_layout_is_fetched_by_its_first_place(process: Any) -> None:
    distributed = process(0, 4)
    group = find_peers(ClientPlaceTree.from_ranks([[3, 2], [1, 0]], ("dp", "tp")), ("tp",))
    assert group is not None
    assert group.ranks == (1, 0)
    assert group.fetcher == 1
    group.begin(torch.zeros(1))
    assert distributed.sent == [(1, "new [0, 1]", "cpu")]


@pytest.mark.parametrize(
    ("axes", "mesh", "expected"),
    [
        (("tp",), Mesh(np.arange(8).reshape(2, 2, 2)), "mesh 2"),
        (("pp",), Mesh(np.arange(8).reshape(2, 2, 2)), "mesh 0"),
        (("tp", "pp"), Mesh(np.arange(8).reshape(2, 2, 2)), None),
        (("tp", "pp"), Mesh([[0, 1, 4, 5], [2, 3, 6, 7]]), "mesh 1"),
        (("tp",), Mesh(np.arange(8).reshape(2, 4)), None),
        # One of its rows is ours, but not all: other ranks would make groups, and this one would not.
        (("tp",), Mesh([[0, 1], [2, 3], [4, 6], [5, 7]]), None),
        (("tp",), None, None),
    ],
)
def test_a_dimension_of_the_mesh_is_taken_where_it_is_what_is_asked_for(
    process: Any, axes: tuple[str, ...], mesh: Any, expected: str | None
) -> None:
    distributed = process(1, 8)
    group = find_peers(TREE, axes, mesh)
    assert group is not None
    group.begin(torch.zeros(1))
    ((_, used, _),) = distributed.sent
    assert (used == expected) if expected else used.startswith("new ")
    assert bool(distributed.made) == (expected is None)
    group.close()
    assert bool(distributed.destroyed) == (expected is None), "the mesh's own groups stay"


def test_a_group_that_takes_no_host_memory_gets_its_own(process: Any) -> None:
    """`meta` stands for a device here; what arrives there is not brought back, since there is nothing in it."""
    mesh = Mesh(np.arange(8).reshape(2, 2, 2))
    distributed = process(0, 8, "meta:nccl")
    group = find_peers(TREE, ("tp",), mesh)
    assert group is not None
    group.begin(torch.ones(3)).wait(wanted)
    assert [device for *_, device in distributed.sent] == ["meta"]
    distributed = process(0, 8, "cpu:gloo,meta:nccl")
    group = find_peers(TREE, ("tp",), mesh)
    assert group is not None
    group.begin(torch.ones(3))
    assert [device for *_, device in distributed.sent] == ["cpu"]


def test_what_arrives_on_a_device_is_brought_to_the_host() -> None:
    arrived = torch.arange(3)
    received = PeerGroup((0, 1), 1, lambda tensor: Done())
    sent = PeerGroup((0, 1), 0, lambda tensor: Done())
    for group, expected in ((received, [0, 1, 2]), (sent, [7, 7, 7])):
        target = torch.full((3,), 7)
        peers.Transfer(group, target, arrived, Done()).wait(wanted)
        assert target.tolist() == expected


class TestNobodyToShareWith:
    @pytest.mark.parametrize(("rank", "size", "axes"), [(0, 8, ()), (0, 8, ("cp",)), (0, 1, ("tp",))])
    def test_every_rank_fetches(self, process: Any, rank: int, size: int, axes: tuple[str, ...]) -> None:
        distributed = process(rank, size)
        assert find_peers(TREE, axes) is None
        assert not distributed.made

    def test_without_torch_distributed(self, process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Several places in one process are fine; several processes that have not met are not."""
        process(0, 0)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        assert find_peers(TREE, ("tp",)) is None
        monkeypatch.setenv("WORLD_SIZE", "8")
        with pytest.warns(MegaScaleWarning, match=r"broadcast_at\(tp\) has no effect.*init_process_group"):
            assert find_peers(TREE, ("tp",)) is None

    @pytest.mark.parametrize("size", [4, 16])
    def test_a_tree_of_other_ranks(self, process: Any, size: int) -> None:
        process(0, size)
        with pytest.raises(ConfigError, match=rf"the tree has 8 ranks, torch.distributed {size}.*\n.*pp 2 x dp 2"):
            find_peers(TREE, ("tp",))


class TestBrokenOff:
    class Pending(Done):
        def is_completed(self) -> bool:
            return False

        def wait(self, *limit: Any) -> None:
            assert limit, "without a limit nothing would end this wait"
            raise RuntimeError("Operation timed out!")

    def test_a_group_in_use_is_not_thrown_away(self, process: Any) -> None:
        """It would wait for its broadcast, for half an hour."""
        distributed = process(0, 8)
        group = find_peers(TREE, ("tp",))
        assert group is not None
        group._broadcast = lambda tensor: self.Pending()
        group.begin(torch.zeros(1)).wait(wanted, timeout_s=0.1)
        with pytest.raises(StreamError, match="was broken off"):
            group.begin(torch.zeros(1))
        group.close()
        assert not distributed.destroyed
        assert peers._left_behind.pop() is group

    def test_whoever_waits_is_asked_whether_he_still_wants_to(self) -> None:
        group = PeerGroup((0, 1), 1, lambda tensor: self.Pending())
        asked: list[int] = []

        def no_more() -> None:
            asked.append(1)
            if len(asked) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            group.begin(torch.zeros(1)).wait(no_more)
        assert len(asked) == 3
