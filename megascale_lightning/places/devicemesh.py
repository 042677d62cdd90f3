"""Which ranks a `torch.distributed.DeviceMesh` holds, and along which axes; torch itself is not needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.places.axes import fold_axes
from megascale_lightning.types import IntArray

__all__ = ["MeshLayout", "layout_of"]

_EXAMPLE: Final = "for example axes=('dp_replicate', 'dp_shard')"


class MeshLayout(NamedTuple):
    """Ranks and what their dimensions are called."""

    ranks: IntArray
    """int64, a dimension for each name."""
    names: tuple[str, ...]


def layout_of(mesh: Any, axes: Sequence[str] | None = None) -> MeshLayout:
    """All ranks of the job that a mesh is of, along the axes that say most about them.

    A mesh may be part of another one, its root: a slice has the ranks of one process' neighbours only, and a flattened
    dimension (`mesh["dp", "cp"]._flatten("dp_cp")`) joins axes. For these the root counts. A mesh that was unflattened
    says more than its root, and counts itself.

    Args:
        mesh: Anything with `mesh` (a tensor or array of ranks) and `mesh_dim_names`.
        axes: What the mesh's own dimensions mean, in place of names.

    Raises:
        ConfigError: Nothing has names, or they are unknown, or ranks are left out.
    """
    own = _read(mesh)
    whole = _read(_root_of(mesh))
    complete = own.ranks.size == whole.ranks.size
    if axes is not None:
        if not complete:
            raise ConfigError(_part(own, whole))
        return MeshLayout(own.ranks, (axes,) if isinstance(axes, str) else tuple(axes))
    readable = [layout for layout in ((whole, own) if complete else (whole,)) if not _trouble(layout.names)]
    if readable:
        return max(readable, key=lambda layout: sum(size > 1 for size in layout.ranks.shape))
    raise ConfigError(_unnamed(own) if complete else _part(own, whole))


def _read(mesh: Any) -> MeshLayout:
    return MeshLayout(np.asarray(mesh.mesh.tolist(), dtype=np.int64), tuple(mesh.mesh_dim_names or ()))


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    # Older torch keeps the roots beside the class.
    resources = getattr(sys.modules.get(type(mesh).__module__), "_mesh_resources", None)
    return mesh if resources is None else resources.get_root_mesh(mesh)


def _trouble(names: tuple[str, ...]) -> str:
    """What is wrong with names, "" if nothing."""
    try:
        return "" if fold_axes(names) else "no axis names"
    except ConfigError as error:
        return str(error)


def _unnamed(own: MeshLayout) -> str:
    shape = f"the device mesh of shape {own.ranks.shape}"
    if not own.names:
        return f"{shape} has no axis names; pass axes=(...), one for each dimension, {_EXAMPLE}"
    return (
        f"{shape} is named {own.names}: {_trouble(own.names)}. Pass axes=(...), what each dimension means, {_EXAMPLE}; "
        "where a dimension joins several axes, give the mesh that it was made of"
    )


def _part(own: MeshLayout, whole: MeshLayout) -> str:
    names = f"is named {whole.names}" if whole.names else "has no axis names"
    return (
        f"the device mesh of shape {own.ranks.shape}, named {own.names}, holds {own.ranks.size} ranks of the "
        f"{whole.ranks.size} of the mesh that it was taken from; that one {names}, and the others' places are unknown: "
        "give the mesh that holds every rank. If these ranks are a job of their own, use "
        "ClientPlaceTree.from_ranks(mesh.mesh.tolist(), axes)"
    )
