"""Lightning's and Fabric's own strategies, set up for sixteen ranks in one process: where they say the ranks stand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megascale_lightning import ClientPlaceTree, ConfigError
from megascale_lightning.integrations.meshes import tree_of_trainer
from tests.integrations.launched import launched_by_torchrun

WORLD, RANK = 16, 5


@pytest.fixture(autouse=True)
def _launched() -> Iterator[None]:
    with launched_by_torchrun(WORLD, RANK):
        yield


def trainer_with(strategy: Any) -> L.Trainer:
    """A trainer as it is when `setup()` is called."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, **quiet)
    trainer.strategy.connect(L.LightningModule())
    trainer.strategy.setup_environment()
    assert (trainer.world_size, trainer.global_rank) == (WORLD, RANK)
    return trainer


def alone(strategy: Any) -> Any:
    """A strategy that a trainer refuses without a GPU: set up by itself."""
    strategy.accelerator = CPUAccelerator()
    return SimpleNamespace(strategy=strategy, world_size=strategy.world_size, lightning_module=None)


CPUS = {
    "parallel_devices": [torch.device("cpu")] * WORLD,
    "process_group_backend": "gloo",
    "sharding_strategy": "HYBRID_SHARD",
}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (lambda: ModelParallelStrategy(4, 4), {"dp": 4, "tp": 4}),
        (lambda: ModelParallelStrategy(1, 16), {"tp": 16}),
        (ModelParallelStrategy, {"tp": 16}),  # "auto": nodes by devices
        (DDPStrategy, {"dp": 16}),
        (lambda: "ddp", {"dp": 16}),
    ],
)
def test_trainer(strategy: Any, expected: dict[str, int]) -> None:
    trainer = trainer_with(strategy())
    assert tree_of_trainer(trainer) == ClientPlaceTree.from_sizes(**expected)


def test_trainer_that_is_not_set_up_yet() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=WORLD, strategy=ModelParallelStrategy(4, 4), logger=False)
    with pytest.raises(ConfigError, match="ModelParallelStrategy has not made its device mesh yet"):
        tree_of_trainer(trainer)


def test_a_strategy_with_more_dimensions() -> None:
    """Lightning makes two; a strategy of a user's own may make more, in any order."""

    class Hybrid(ModelParallelStrategy):
        def setup_environment(self) -> None:
            super().setup_environment()
            self._device_mesh = DeviceMesh(
                "cpu", torch.arange(16).view(2, 2, 2, 2), mesh_dim_names=("tp", "pp", "cp", "dp")
            )

    tree = tree_of_trainer(trainer_with(Hybrid(4, 4)))
    assert [tree.size(axis) for axis in ("pp", "dp", "cp", "tp")] == [2, 2, 2, 2]
    assert tree.group(RANK, "tp") == (5, 13)
    assert tree.group(RANK, "dp") == (4, 5)


def test_the_part_of_a_mesh_that_fsdp_is_given() -> None:
    """FSDP beside tensor parallelism: the strategy holds the data-parallel slice, its root holds all ranks."""
    whole = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    strategy = FSDPStrategy(
        device_mesh=whole["dp_replicate", "dp_shard"], cluster_environment=TorchElasticEnvironment(), **CPUS
    )
    assert tree_of_trainer(alone(strategy)) == ClientPlaceTree.from_sizes(dp=8, tp=2)


@pytest.mark.parametrize("kind", [FSDPStrategy, FabricFSDPStrategy])
def test_fsdp_before_and_after_it_made_its_mesh(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_cpu(device_type: str, *args: Any, **options: Any) -> DeviceMesh:
        assert device_type == "cuda"
        return init_device_mesh("cpu", *args, **options)

    monkeypatch.setattr(device_mesh, "init_device_mesh", on_the_cpu)
    strategy = kind(device_mesh=(2, 8), cluster_environment=TorchElasticEnvironment(), **CPUS)
    holder = alone(strategy)
    assert tree_of_trainer(holder) == ClientPlaceTree.from_sizes(dp=16)
    strategy.setup_environment()
    options = strategy.kwargs if kind is FSDPStrategy else strategy._fsdp_kwargs
    assert isinstance(options["device_mesh"], DeviceMesh)
    assert options["device_mesh"].mesh_dim_names is None
    assert tree_of_trainer(holder) == ClientPlaceTree.from_sizes(dp=16)


def test_fabric() -> None:
    strategy = FabricModelParallelStrategy(lambda module, mesh: module, data_parallel_size=8, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    with pytest.raises(ConfigError, match=r"after launch\(\)"):
        tree_of_trainer(fabric)
    fabric.launch()
    assert tree_of_trainer(fabric) == ClientPlaceTree.from_sizes(dp=8, tp=2)
    assert tree_of_trainer(fabric).data_group(fabric.global_rank) == 2
