"""Places of ranks whose framework makes process groups and no device mesh: Megatron and DeepSpeed.

A rank knows its own coordinates only, so all ranks tell theirs: these functions are collective. Neither framework is
imported here; whoever set up its groups has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megascale_lightning.errors import ConfigError
from megascale_lightning.places import ClientPlaceTree, Place

__all__ = ["tree_of_deepspeed", "tree_of_megatron"]


def tree_of_megatron() -> ClientPlaceTree | None:
    """The places that `megatron.core.parallel_state` gives the ranks; None while it is not set up. Collective.

    Raises:
        ConfigError: The ranks' coordinates do not fit together.
    """
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    own = Place(
        pp=state.get_pipeline_model_parallel_rank(),
        dp=state.get_data_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        tp=state.get_tensor_model_parallel_rank(),
    )
    return ClientPlaceTree.from_places(dict(enumerate(_told_by_all(own))))


def tree_of_deepspeed(config: Mapping[str, Any], world_size: int, *, sp_size: int = 1) -> ClientPlaceTree | None:
    """The places of ranks that share sequences or tensors in DeepSpeed; None if they do not. Collective.

    Read from its mesh or its groups, which are there once the model was prepared. Before that it is the layout in which
    it will make them: consecutive ranks share.

    Args:
        config: DeepSpeed's own; `sequence_parallel_size` and `tensor_parallel.autotp_size` are looked at.
        world_size: Number of ranks.
        sp_size: Ranks that share a sequence, where a framework around it says so.

    Raises:
        ConfigError: The sizes do not divide the ranks.
    """
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    mesh = getattr(groups, "mesh_device", None)
    if mesh is not None:
        return ClientPlaceTree.from_device_mesh(mesh)
    sequences: Any = getattr(groups, "mpu", None)
    if hasattr(sequences, "get_sequence_parallel_group"):
        return _tree_of_sharing("cp", sequences.get_sequence_parallel_group())
    if getattr(groups, "_TENSOR_MODEL_PARALLEL_GROUP", None) is not None:
        return _tree_of_sharing("tp", groups.get_tensor_model_parallel_group())
    cp = max(sp_size, int(config.get("sequence_parallel_size") or 1))
    tp = int((config.get("tensor_parallel") or {}).get("autotp_size") or 1)
    if cp == tp == 1:
        return None
    if world_size % (cp * tp) or (cp > 1 and tp > 1):
        raise ConfigError(
            f"DeepSpeed is to share a sequence among {cp} ranks and a tensor among {tp}, of {world_size} ranks: one of "
            "the two numbers must be 1 and the other divide that of the ranks; or give tree="
        )
    return ClientPlaceTree.from_sizes(dp=world_size // (cp * tp), cp=cp, tp=tp)


def _tree_of_sharing(axis: str, group: Any) -> ClientPlaceTree:
    """The tree of groups of ranks along one axis; data-parallel indices follow the groups' first ranks."""
    from torch import distributed

    groups = sorted({tuple(ranks) for ranks in _told_by_all(distributed.get_process_group_ranks(group))})
    return ClientPlaceTree.from_ranks(groups, ("dp", axis))


def _told_by_all(own: Any) -> list[Any]:
    """What every rank of the world gives, by rank."""
    from torch import distributed

    told: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, own)
    return told
