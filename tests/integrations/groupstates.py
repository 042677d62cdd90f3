"""What Megatron and DeepSpeed keep of a rank's process groups: small modules of their names over real groups."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from torch import distributed

__all__ = ["deepspeed_groups", "megatron_state"]

AXES = ("pp", "dp", "cp", "tp")


def own_group(layout: np.ndarray[Any, Any], axis: str) -> Any:
    """This rank's group along an axis of [pp, dp, cp, tp]; every rank makes all of them, as torch demands.

    Torch sorts the ranks of a group, so they must ascend along every axis.
    """
    own = None
    for ranks in np.moveaxis(layout, AXES.index(axis), -1).reshape(-1, layout.shape[AXES.index(axis)]).tolist():
        group = distributed.new_group(ranks)
        if distributed.get_rank() in ranks:
            own = group
    return own


def megatron_state(layout: np.ndarray[Any, Any]) -> ModuleType:
    """`megatron.core.parallel_state` behind `initialize_model_parallel`: it knows groups, and only the caller's own."""
    state: Any = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    names = {"pp": "pipeline_model", "dp": "data", "cp": "context", "tp": "tensor_model"}
    for axis, name in names.items():
        group = own_group(layout, axis)
        # Bound as defaults: the loop goes on.
        setattr(state, f"get_{name}_parallel_group", lambda group=group: group)
        setattr(state, f"get_{name}_parallel_rank", lambda group=group: distributed.get_rank(group))
        setattr(state, f"get_{name}_parallel_world_size", lambda group=group: distributed.get_world_size(group))
    return state


def deepspeed_groups(layout: np.ndarray[Any, Any], axis: str) -> ModuleType:
    """`deepspeed.utils.groups` behind `deepspeed.initialize` with Ulysses ("cp") or AutoTP ("tp")."""
    groups: Any = ModuleType("deepspeed.utils.groups")
    group = own_group(layout, axis)
    groups.mesh_device = None
    groups.mpu = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = None
    if axis == "cp":
        groups.mpu = ModuleType("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        groups.mpu.get_sequence_parallel_group = lambda: group
    else:
        groups._TENSOR_MODEL_PARALLEL_GROUP = group
        groups.get_tensor_model_parallel_group = lambda: group
    return groups
