"""Where a trainer's ranks stand: what is asked for a device mesh, and in which order."""

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
    """As `ModelParallelStrategy` is before its environment is set up, or without a mesh."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    @property
    def device_mesh(self) -> Any:
        raise RuntimeError("Accessing the device mesh before processes have initialized is not allowed.")


def trainer(strategy: Any, *, world_size: int, module_mesh: Any = None) -> Any:
    return SimpleNamespace(
        strategy=strategy, world_size=world_size, lightning_module=SimpleNamespace(device_mesh=module_mesh)
    )


DP_TP = mesh(2, 4, names=("data_parallel", "tensor_parallel"))
TP_DP = mesh(4, 2, names=("tensor_parallel", "data_parallel"))


def test_process_alone_has_one_place() -> None:
    assert tree_of_trainer(None) == ClientPlaceTree.from_sizes()


def test_without_a_mesh_every_rank_is_data_parallel() -> None:
    for strategy in (SimpleNamespace(), NotSetUp(), NotSetUp(device_mesh=(2, 4))):
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


def test_unnamed_mesh_of_fsdp_is_data_parallel_in_both_dimensions() -> None:
    strategy = NotSetUp(device_mesh=mesh(2, 4, names=None))
    assert tree_of_trainer(trainer(strategy, world_size=8)) == ClientPlaceTree.from_sizes(dp=8)


def test_unnamed_mesh_elsewhere_is_refused() -> None:
    strategy = SimpleNamespace(device_mesh=mesh(2, 4, names=None))
    with pytest.raises(ConfigError, match=r"no dimension names(.|\n)*tree="):
        tree_of_trainer(trainer(strategy, world_size=8))


def test_tree_of_the_user_comes_first_and_covers_every_rank() -> None:
    own = ClientPlaceTree.from_sizes(dp=4, cp=2)
    assert tree_of_trainer(trainer(SimpleNamespace(device_mesh=DP_TP), world_size=8), own) is own
    with pytest.raises(ConfigError, match=r"8 places, the trainer 4 ranks"):
        tree_of_trainer(trainer(SimpleNamespace(), world_size=4), own)
