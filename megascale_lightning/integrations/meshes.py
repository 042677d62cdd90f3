"""Finds out from a trainer, a Fabric or an Accelerator where its ranks stand."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.integrations.processgroups import tree_of_deepspeed, tree_of_megatron
from megascale_lightning.places.axes import fold_axis
from megascale_lightning.places.tree import ClientPlaceTree

__all__ = ["mesh_of_trainer", "tree_of_accelerator", "tree_of_trainer"]

_UNNAMED_FSDP: Final = {1: ("dp_shard",), 2: ("dp_replicate", "dp_shard")}
_ACCELERATE_AXES: Final = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""In the order in which Accelerate lays ranks out."""


def tree_of_trainer(trainer: Any, tree: ClientPlaceTree | None = None) -> ClientPlaceTree:
    """Return the places of a Lightning trainer's ranks.

    What is asked, in this order: `tree`, `strategy.device_mesh`, `module.device_mesh`,
    `strategy.kwargs["device_mesh"]` (FSDP's, data parallel unless its dimensions are named otherwise), DeepSpeed,
    Megatron; without any of them all ranks are data parallel. Meshes exist once the strategy has set up its
    environment, so call it in `setup()`, on every rank: process groups are read by a collective.

    Args:
        trainer: A `lightning.pytorch.Trainer`, a launched `lightning.fabric.Fabric`, or None for a process alone.
        tree: The user's own. It may split what the strategy calls data parallel, since ranks may share more than the
            strategy knows, and must keep together what the strategy keeps together.

    Raises:
        ConfigError: The places are not those of the ranks, the tree and the strategy contradict each other, or the
            strategy's mesh cannot be read.
    """
    if trainer is None:
        return tree or ClientPlaceTree.from_sizes()
    world_size = int(trainer.world_size)
    module = getattr(trainer, "lightning_module", None)
    return _settle(tree, lambda: _tree_of_strategy(trainer.strategy, module, world_size), "trainer", world_size)


def tree_of_accelerator(accelerator: Any, tree: ClientPlaceTree | None = None) -> ClientPlaceTree:
    """Return the places of an Accelerator's ranks.

    What is asked, in this order: `tree`, `torch_device_mesh`, DeepSpeed (its groups once the model is prepared, its
    config before), Megatron, the sizes of `parallelism_config`; without any of them all ranks are data parallel. Call
    it on every rank: process groups are read by a collective.

    Args:
        accelerator: An `accelerate.Accelerator`.
        tree: The user's own, under the same rule as in `tree_of_trainer`.

    Raises:
        ConfigError: The places are not those of the ranks; mesh, sizes and tree contradict each other; Megatron is
            not set up yet; or the processes do not know of each other.
    """
    world_size = int(accelerator.num_processes)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 < launched and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"torchrun started {launched} processes, and each of them takes itself for the only one: without an "
            "accelerator device Accelerate needs ACCELERATE_USE_CPU=true, or Accelerator(cpu=True), to join them"
        )
    return _settle(tree, lambda: _tree_of_accelerate(accelerator, world_size), "accelerator", world_size)


def _settle(
    given: ClientPlaceTree | None, find: Callable[[], ClientPlaceTree | None], owner: str, world_size: int
) -> ClientPlaceTree:
    """The tree that counts, checked: the given one, else the one that is found, else one of data-parallel ranks."""
    try:
        found = find()
    except ConfigError:
        if given is None:
            raise
        found = None  # the user's tree says what could not be read
    tree = given or found or ClientPlaceTree.from_sizes(dp=world_size)
    if tree.ranks != tuple(range(world_size)):
        raise ConfigError(
            f"the client place tree has {tree.world_size} places, the {owner} {world_size} ranks, from 0 on: give a "
            f"tree (or a device mesh) that covers every rank once, for instance "
            f"tree=ClientPlaceTree.from_sizes(dp={world_size}). The one that does not fit:\n{tree}"
        )
    if given is not None and found is not None and found.ranks == given.ranks:
        _check_kept_together(given, found, owner)
    return tree


def _check_kept_together(given: ClientPlaceTree, found: ClientPlaceTree, owner: str) -> None:
    """Refuse a tree that gives different batches to ranks that split a model.

    Raises:
        ConfigError: It does.
    """
    groups = np.empty(given.world_size, dtype=np.int64)
    groups[given.grid] = np.arange(given.num_groups).reshape(1, -1, 1, 1)
    apart = np.argwhere(groups[found.grid] != groups[found.grid[:1, :, :1, :1]])
    if len(apart):
        rank = int(found.grid[tuple(apart[0])])
        first = int(found.grid[0, apart[0][1], 0, 0])
        raise ConfigError(
            f"ranks {first} and {rank} are in one data-parallel group of the {owner}, and in two of the tree given: "
            f"they would get different batches though they split a model. Leave the tree out, or let them share a "
            f"place on dp. The {owner}'s:\n{found}\nThe one given:\n{given}"
        )


# --- Lightning ----------------------------------------------------------------------------------------------------


def mesh_of_trainer(trainer: Any) -> Any:
    """Return the device mesh that a trainer's strategy or module holds, whose groups may carry batches; or None."""
    if trainer is None:
        return None
    return _mesh_of_strategy(trainer.strategy, trainer.lightning_module)[0]


def _mesh_of_strategy(strategy: Any, module: Any) -> tuple[Any, bool]:
    """Return the mesh, and whether it is still to be made."""
    early = False
    for owner in (strategy, module):
        try:
            mesh = owner.device_mesh
        except AttributeError:
            continue
        except RuntimeError:  # strategies raise it before their environment is set up
            early = True
            continue
        if mesh is not None:
            return mesh, False
    return None, early


def _tree_of_strategy(strategy: Any, module: Any, world_size: int) -> ClientPlaceTree | None:
    mesh, early = _mesh_of_strategy(strategy, module)
    if mesh is not None:
        return _tree_of_mesh(mesh)
    options = getattr(strategy, "kwargs", None) or getattr(strategy, "_fsdp_kwargs", None) or {}
    mesh = options.get("device_mesh")
    if isinstance(mesh, Sequence):  # sizes, of which FSDP makes a mesh later
        num_ranks = math.prod(mesh)
        if num_ranks != world_size:
            raise ConfigError(f"device_mesh={tuple(mesh)} is a mesh of {num_ranks} ranks, and there are {world_size}")
        return ClientPlaceTree.from_sizes(dp=num_ranks)
    if mesh is not None:
        return _tree_of_mesh(mesh, _UNNAMED_FSDP)
    config = getattr(strategy, "config", None)
    found = tree_of_deepspeed(config, world_size) if isinstance(config, Mapping) else None
    found = found or tree_of_megatron()
    if found is None and early and world_size > 1:
        raise ConfigError(
            f"{type(strategy).__name__} has not made its device mesh yet: ask in setup() or later, with Fabric after "
            "launch(); or give tree="
        )
    return found


def _tree_of_mesh(mesh: Any, unnamed: Mapping[int, tuple[str, ...]] | None = None) -> ClientPlaceTree:
    if mesh.mesh_dim_names:
        return ClientPlaceTree.from_device_mesh(mesh)
    axes = (unnamed or {}).get(mesh.mesh.ndim)
    if axes is None:
        raise ConfigError(
            f"the device mesh of shape {tuple(mesh.mesh.shape)} has no dimension names: make it with "
            "init_device_mesh(..., mesh_dim_names=(...)), or give tree=, made by from_device_mesh(mesh, axes=(...))"
        )
    return ClientPlaceTree.from_device_mesh(mesh, axes)


# --- Accelerate ---------------------------------------------------------------------------------------------------


def _tree_of_accelerate(accelerator: Any, world_size: int) -> ClientPlaceTree | None:
    config = getattr(accelerator, "parallelism_config", None)
    sizes = {axis: int(getattr(config, f"{axis}_size", None) or 1) for axis in _ACCELERATE_AXES}
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        tree = _tree_of_mesh(mesh)
        _check_sizes(tree, sizes)
        return tree
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        return tree_of_deepspeed(deepspeed.deepspeed_config, world_size, sp_size=sizes["sp"])
    found = tree_of_megatron()
    if found is None and accelerator.distributed_type == "MEGATRON_LM":
        raise ConfigError("Megatron has not made its groups yet: prepare the model first, or give tree=")
    if found is None and math.prod(sizes.values()) > 1:
        ranks = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        return ClientPlaceTree.from_ranks(ranks, list(sizes))
    return found


def _check_sizes(tree: ClientPlaceTree, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh that is not the one of the sizes beside it; sizes of 1 throughout say nothing.

    Raises:
        ConfigError: They differ.
    """
    if math.prod(sizes.values()) == 1:
        return
    folded = {
        axis: math.prod(size for name, size in sizes.items() if fold_axis(name) == axis) for axis in ("dp", "cp", "tp")
    }
    if any(tree.size(axis) != size for axis, size in folded.items()):
        raise ConfigError(f"parallelism_config says {dict(sizes)}, and the device mesh is another one:\n{tree}")
