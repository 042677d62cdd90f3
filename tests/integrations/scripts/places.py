"""Four real processes: each writes down where all ranks stand, by every framework that can be asked on CPUs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402
from torch import distributed, multiprocessing  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from megascale_lightning import ClientPlaceTree, ConfigError  # noqa: E402
from megascale_lightning.integrations.meshes import tree_of_accelerator, tree_of_trainer  # noqa: E402
from tests.integrations.groupstates import deepspeed_groups, megatron_state  # noqa: E402

WORLD = 4
LAYOUTS = {
    "megatron pp2 tp2": np.arange(4).reshape(2, 1, 1, 2),
    "megatron dp2 cp2, cp outside": np.array([0, 2, 1, 3]).reshape(1, 2, 2, 1),
    "megatron dp2 tp2, tp outside": np.array([0, 2, 1, 3]).reshape(1, 2, 1, 2),
    "megatron dp4": np.arange(4).reshape(1, 4, 1, 1),
}


class Data(L.LightningDataModule):
    """Asks where `MegaScaleDataModule` does."""

    found: ClientPlaceTree

    def setup(self, stage: str) -> None:
        self.found = tree_of_trainer(self.trainer)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(WORLD, 2))


class Model(L.LightningModule):
    def configure_model(self) -> None:
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(strategy: Any) -> ClientPlaceTree:
    data = Data()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, max_steps=1, **quiet).fit(Model(), datamodule=data)
    return data.found


def without_mesh(**more: Any) -> Any:
    return SimpleNamespace(
        world_size=WORLD, num_processes=WORLD, strategy=SimpleNamespace(), distributed_type="MULTI_GPU", **more
    )


def refused(tree: ClientPlaceTree) -> bool:
    try:
        tree_of_trainer(without_mesh(), tree)
    except ConfigError as error:
        return "in two of the tree given" in str(error)
    return False


def of_groups() -> dict[str, ClientPlaceTree]:
    found = {}
    for name, layout in LAYOUTS.items():
        sys.modules["megatron.core.parallel_state"] = megatron_state(layout)
        found[name] = tree_of_trainer(without_mesh())
        plain = SimpleNamespace(deepspeed_plugin=None)
        assert tree_of_accelerator(without_mesh(state=plain)) == found[name]
        assert refused(ClientPlaceTree.from_sizes(dp=WORLD)) == (found[name].num_groups < WORLD)
    del sys.modules["megatron.core.parallel_state"]
    config = {"sequence_parallel_size": 2}
    for axis, layout in (("cp", np.array([0, 3, 1, 2]).reshape(1, 2, 2, 1)), ("tp", np.arange(4).reshape(1, 2, 1, 2))):
        sys.modules["deepspeed.utils.groups"] = deepspeed_groups(layout, axis)
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
        found[f"deepspeed {axis}"] = tree_of_accelerator(without_mesh(state=state))
    del sys.modules["deepspeed.utils.groups"]
    return found


def of_frameworks() -> dict[str, ClientPlaceTree]:
    found = {"model parallel": fitted(ModelParallelStrategy(2, 2)), "ddp": fitted("ddp")}
    fabric = Fabric(
        accelerator="cpu",
        devices=WORLD,
        strategy=FabricModelParallelStrategy(lambda module, mesh: module, data_parallel_size=2, tensor_parallel_size=2),
    )
    fabric.launch()
    found["fabric"] = tree_of_trainer(fabric)
    mesh = init_device_mesh("cpu", (2, 2))
    strategy = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    found["fsdp"] = tree_of_trainer(SimpleNamespace(strategy=strategy, world_size=WORLD))
    accelerator = Accelerator(cpu=True)
    found["accelerate"] = tree_of_accelerator(accelerator)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp_shard"))
    accelerator.state.device_mesh = named
    found["accelerate, a mesh"] = tree_of_accelerator(accelerator)
    # Every rank sees other ranks in its slice, and all say the same.
    found["a slice"] = ClientPlaceTree.from_device_mesh(named["dp_shard"])
    found["joined"] = ClientPlaceTree.from_device_mesh(named._flatten("dp_shard_cp"))
    return found


def work(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": WORLD}
    where = {"LOCAL_WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "places"}
    os.environ.update({name: str(value) for name, value in (ranks | where).items()}, ACCELERATE_USE_CPU="true")
    store = distributed.FileStore(str(out / "store"), WORLD)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    found = of_groups() | of_frameworks()
    (out / f"rank{rank}.json").write_text(json.dumps({name: tree.grid.tolist() for name, tree in found.items()}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus")
    parser.add_argument("--out", type=Path, required=True)
    multiprocessing.spawn(work, (parser.parse_args().out,), nprocs=WORLD)
