"""Finds out from a trainer where its ranks stand: device mesh in, client place tree out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megascale_lightning.errors import ConfigError
from megascale_lightning.places.tree import ClientPlaceTree

__all__ = ["FoundMesh", "find_mesh", "mesh_of_trainer", "tree_of_trainer"]

_UNNAMED_FSDP = {1: ("dp_shard",), 2: ("dp_replicate", "dp_shard")}


class FoundMesh(NamedTuple):
    """A device mesh and the names of its axes."""

    mesh: Any
    """A `torch.distributed.DeviceMesh`."""
    axes: tuple[str, ...] | None
    """None: the mesh names its own."""


def tree_of_trainer(trainer: Any, tree: ClientPlaceTree | None = None) -> ClientPlaceTree:
    """Return the places of a Lightning trainer's ranks.

    What is asked, in this order: `tree`, `strategy.device_mesh`, `module.device_mesh`,
    `strategy.kwargs["device_mesh"]`; without any of them all ranks are data parallel. Meshes exist once the strategy
    has set up its environment, so call it in `setup()`.

    Args:
        trainer: A `lightning.pytorch.Trainer`, or None for a process alone.
        tree: The user's own; its number of ranks must be the trainer's.

    Raises:
        ConfigError: The number of places is not the number of ranks.
    """
    world_size = 1 if trainer is None else int(trainer.world_size)
    if tree is None:
        found = None if trainer is None else find_mesh(trainer.strategy, trainer.lightning_module)
        if found is None:
            return ClientPlaceTree.from_sizes(dp=world_size)
        tree = ClientPlaceTree.from_device_mesh(found.mesh, axes=found.axes)
    if trainer is not None and tree.world_size != world_size:
        raise ConfigError(
            f"the client place tree has {tree.world_size} places, the trainer {world_size} ranks: give a tree (or a "
            f"device mesh) that covers every rank once, for instance tree=ClientPlaceTree.from_sizes(dp={world_size})"
        )
    return tree


def mesh_of_trainer(trainer: Any, tree: ClientPlaceTree | None = None) -> Any:
    """Return the device mesh that `tree_of_trainer` reads, whose groups may carry batches; None: it read none."""
    found = None if trainer is None or tree is not None else find_mesh(trainer.strategy, trainer.lightning_module)
    return None if found is None else found.mesh


def find_mesh(strategy: Any, module: Any = None) -> FoundMesh | None:
    """Return the device mesh that a strategy or its module holds, None if there is none."""
    for owner in (strategy, module):
        try:
            mesh = owner.device_mesh
        except (AttributeError, RuntimeError):  # strategies raise the latter before their environment is set up
            continue
        if mesh is not None:
            return _named(mesh, None)
    mesh = (getattr(strategy, "kwargs", None) or {}).get("device_mesh")
    if mesh is None or isinstance(mesh, Sequence):
        # FSDP makes a mesh of sizes later; both of its dimensions are data parallel.
        return None
    return _named(mesh, _UNNAMED_FSDP)


def _named(mesh: Any, unnamed: dict[int, tuple[str, ...]] | None) -> FoundMesh:
    if mesh.mesh_dim_names:
        return FoundMesh(mesh, None)
    axes = (unnamed or {}).get(mesh.mesh.ndim)
    if axes is None:
        raise ConfigError(
            f"the strategy's device mesh of shape {tuple(mesh.mesh.shape)} has no dimension names: make it with "
            "init_device_mesh(..., mesh_dim_names=(...)), or give tree= to MegaScaleDataModule"
        )
    return FoundMesh(mesh, axes)
