"""Where a trainer's ranks stand: what is asked for a device mesh, in which order, and what contradicts what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megascale_lightning import ClientPlaceTree, ConfigError
from megascale_lightning.integrations.meshes import tree_of_trainer


def mesh(*shape: int, names: tuple[str, ...] | None) -> Any:
    return SimpleNamespace(mesh=np.arange(int(np.prod(shape))).reshape(shape), mesh_dim_names=names)


class NotSetUp:
    """As `ModelParallelStrategy` is before its environment is set up."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    @property
    def device_mesh(self) -> Any:
        raise RuntimeError("Accessing the device mesh before processes have initialized is not allowed.")


def trainer(strategy: Any, *, world_size: int, module_mesh: Any = None) -> Any:
    return SimpleNamespace(
        strategy=strategy, world_size=world_size, lightning_module=SimpleNamespace(device_mesh=module_mesh)
    )


def fsdp(device_mesh: Any) -> Any:
    return SimpleNamespace(kwargs={"device_mesh": device_mesh, "use_orig_params": True})


DP_TP = mesh(2, 4, names=("data_parallel", "tensor_parallel"))
TP_DP = mesh(4, 2, names=("tensor_parallel", "data_parallel"))


def test_process_alone_has_one_place() -> None:
    assert tree_of_trainer(None) == ClientPlaceTree.from_sizes()
    assert tree_of_trainer(trainer(NotSetUp(), world_size=1)) == ClientPlaceTree.from_sizes()


def test_without_a_mesh_every_rank_is_data_parallel() -> None:
    for strategy in (SimpleNamespace(), SimpleNamespace(kwargs={}), SimpleNamespace(kwargs=None)):
        assert tree_of_trainer(trainer(strategy, world_size=8)) == ClientPlaceTree.from_sizes(dp=8)


def test_mesh_of_the_strategy() -> None:
    tree = tree_of_trainer(trainer(SimpleNamespace(device_mesh=DP_TP), world_size=8))
    assert (tree.size("dp"), tree.size("tp")) == (2, 4)
    assert tree.group(5, "tp") == (4, 5, 6, 7)


def test_strategy_comes_before_module_and_module_before_the_keywords() -> None:
    strategy = SimpleNamespace(device_mesh=DP_TP, kwargs={"device_mesh": TP_DP})
    assert tree_of_trainer(trainer(strategy, world_size=8, module_mesh=TP_DP)).group(5, "tp") == (4, 5, 6, 7)
    strategy = NotSetUp(device_mesh=DP_TP)
    assert tree_of_trainer(trainer(strategy, world_size=8, module_mesh=TP_DP)).group(5, "tp") == (1, 3, 5, 7)
    assert tree_of_trainer(trainer(strategy, world_size=8)).group(5, "tp") == (4, 5, 6, 7)


def test_a_mesh_that_is_still_to_be_made_is_not_passed_over() -> None:
    """The ranks would be taken for data parallel, and those that split a model get different batches."""
    with pytest.raises(ConfigError, match=r"NotSetUp has not made its device mesh yet: ask in setup\(\)"):
        tree_of_trainer(trainer(NotSetUp(), world_size=8))
    own = ClientPlaceTree.from_sizes(dp=2, tp=4)
    assert tree_of_trainer(trainer(NotSetUp(), world_size=8), own) is own


class TestFsdp:
    @pytest.mark.parametrize("shape", [(8,), (2, 4)])
    def test_a_mesh_without_names_is_data_parallel_in_all_dimensions(self, shape: tuple[int, ...]) -> None:
        tree = tree_of_trainer(trainer(fsdp(mesh(*shape, names=None)), world_size=8))
        assert tree == ClientPlaceTree.from_sizes(dp=8)

    @pytest.mark.parametrize("attribute", ["kwargs", "_fsdp_kwargs"])
    def test_sizes_of_a_mesh_to_come(self, attribute: str) -> None:
        """A tuple before the environment is set up; Fabric's strategy keeps it under another name."""
        strategy = SimpleNamespace(**{attribute: {"device_mesh": (2, 4)}})
        assert tree_of_trainer(trainer(strategy, world_size=8)) == ClientPlaceTree.from_sizes(dp=8)
        with pytest.raises(ConfigError, match=r"device_mesh=\(2, 4\) is a mesh of 8 ranks, and there are 16"):
            tree_of_trainer(trainer(strategy, world_size=16))

    def test_names_of_a_mesh_count(self) -> None:
        named = mesh(2, 4, names=("replicate", "shard"))
        assert tree_of_trainer(trainer(fsdp(named), world_size=8)) == ClientPlaceTree.from_sizes(dp=8)
        named = mesh(2, 4, names=("dp_shard", "cp"))
        assert tree_of_trainer(trainer(fsdp(named), world_size=8)) == ClientPlaceTree.from_sizes(dp=2, cp=4)

    def test_more_dimensions_without_names_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"shape \(2, 2, 2\) has no dimension names"):
            tree_of_trainer(trainer(fsdp(mesh(2, 2, 2, names=None)), world_size=8))


def test_sizes_of_a_deepspeed_strategy() -> None:
    """It makes its groups behind `setup()`: what it will make of its config counts."""
    strategy = SimpleNamespace(config={"sequence_parallel_size": 2, "data_parallel_size": 4})
    assert tree_of_trainer(trainer(strategy, world_size=8)) == ClientPlaceTree.from_sizes(dp=4, cp=2)
    strategy = SimpleNamespace(config={"zero_optimization": {"stage": 2}})
    assert tree_of_trainer(trainer(strategy, world_size=8)) == ClientPlaceTree.from_sizes(dp=8)


def test_unnamed_mesh_elsewhere_is_refused() -> None:
    strategy = SimpleNamespace(device_mesh=mesh(2, 4, names=None))
    with pytest.raises(ConfigError, match=r"no dimension names(.|\n)*tree="):
        tree_of_trainer(trainer(strategy, world_size=8))
    own = ClientPlaceTree.from_sizes(dp=2, tp=4)
    assert tree_of_trainer(trainer(strategy, world_size=8), own) is own


class TestContradictions:
    """Errors that show the tree, or both."""

    def test_another_number_of_ranks(self) -> None:
        own = ClientPlaceTree.from_sizes(dp=4, cp=2)
        message = (
            r"8 places, the trainer 4 ranks(.|\n)*from_sizes\(dp=4\)(.|\n)*ClientPlaceTree: 8 ranks = dp 4 x cp 2\n├"
        )
        with pytest.raises(ConfigError, match=message):
            tree_of_trainer(trainer(SimpleNamespace(), world_size=4), own)
        with pytest.raises(ConfigError, match=r"8 places, the trainer 16 ranks"):
            tree_of_trainer(trainer(SimpleNamespace(device_mesh=DP_TP), world_size=16))

    def test_ranks_that_the_trainer_does_not_have(self) -> None:
        """As many as it has, but others: a mesh over the second half of a job."""
        half = SimpleNamespace(mesh=np.arange(4, 8), mesh_dim_names=("dp",))
        with pytest.raises(ConfigError, match=r"covers every rank once(.|\n)*dp 0-3: ranks 4-7"):
            tree_of_trainer(trainer(SimpleNamespace(device_mesh=half), world_size=4))

    def test_a_tree_that_tears_apart_what_the_strategy_keeps_together(self) -> None:
        own = ClientPlaceTree.from_sizes(dp=4, cp=2)
        with pytest.raises(ConfigError) as caught:
            tree_of_trainer(trainer(SimpleNamespace(device_mesh=DP_TP), world_size=8), own)
        assert "ranks 0 and 2 are in one data-parallel group of the trainer, and in two of the tree given" in str(
            caught.value
        )
        assert "ClientPlaceTree: 8 ranks = dp 2 x tp 4\n" in str(caught.value)
        assert str(own) in str(caught.value)

    @pytest.mark.parametrize("axis", ["pp", "cp", "tp"])
    def test_along_every_axis(self, axis: str) -> None:
        strategy = SimpleNamespace(device_mesh=mesh(2, 4, names=(axis, "dp")))
        with pytest.raises(ConfigError, match="ranks 0 and 4 are in one data-parallel group"):
            tree_of_trainer(trainer(strategy, world_size=8), ClientPlaceTree.from_sizes(dp=8))

    def test_the_same_sizes_in_another_layout(self) -> None:
        own = ClientPlaceTree.from_ranks(np.arange(8).reshape(4, 2), ("tp", "dp"))
        with pytest.raises(ConfigError, match=r"ranks 0 and 1 are in one data-parallel group"):
            tree_of_trainer(trainer(SimpleNamespace(device_mesh=DP_TP), world_size=8), own)

    @pytest.mark.parametrize(
        "own",
        [
            ClientPlaceTree.from_sizes(dp=2, tp=4),
            ClientPlaceTree.from_sizes(dp=2, cp=2, tp=2),  # context parallelism on the strategy's tensor dimension
            ClientPlaceTree.from_sizes(tp=8),  # ranks that share more than the strategy knows
            ClientPlaceTree.from_ranks(np.arange(8).reshape(2, 4)[::-1], ("dp", "tp")),  # groups in another order
        ],
    )
    def test_a_tree_that_says_more_than_the_strategy(self, own: ClientPlaceTree) -> None:
        assert tree_of_trainer(trainer(SimpleNamespace(device_mesh=DP_TP), world_size=8), own) is own

    def test_context_parallelism_inside_what_fsdp_shards(self) -> None:
        own = ClientPlaceTree.from_sizes(dp=4, cp=2)
        assert tree_of_trainer(trainer(fsdp((2, 4)), world_size=8), own) is own
