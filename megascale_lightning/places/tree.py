"""`ClientPlaceTree`: which rank stands where on the axes pp, dp, cp and tp, read from a layout and never computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import ConfigError
from megascale_lightning.places.axes import AXES, Axis, fold_axes, fold_axis
from megascale_lightning.places.devicemesh import layout_of
from megascale_lightning.places.drawing import draw, shorten
from megascale_lightning.types import IntArray

__all__ = ["ClientPlaceTree", "Place", "check_broadcast"]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Coordinates of one trainer rank, each from 0."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return " ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)


@dataclass(frozen=True, slots=True, eq=False)
class ClientPlaceTree:
    """The places of all trainer ranks of a job. Immutable, picklable, equal when every rank has the same place.

    Made by `from_sizes`, `from_ranks`, `from_places` or `from_device_mesh`; `print(tree)` draws it.

    Raises:
        ConfigError: The grid has not four axes, or a rank stands in it twice or is negative.
    """

    grid: IntArray
    """int64 [pp, dp, cp, tp], read-only: the rank at each place."""
    _flat: dict[int, int] = field(init=False, repr=False)
    """rank -> its index in the flattened grid."""

    def __post_init__(self) -> None:
        grid = _as_ranks(self.grid)
        if grid.ndim != len(AXES) or grid.size == 0:
            raise ConfigError(f"the grid of ranks needs the axes {AXES} and at least one rank, not shape {grid.shape}")
        grid.setflags(write=False)
        flat = {rank: index for index, rank in enumerate(grid.ravel().tolist())}
        if len(flat) < grid.size or min(flat) < 0:
            raise ConfigError(f"every rank needs one place and a number of at least 0; given were {shorten(grid)}")
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "_flat", flat)

    @classmethod
    def from_sizes(cls, *, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> ClientPlaceTree:
        """Ranks 0, 1, 2, ... laid out with `tp` fastest, then `cp`, `dp`, `pp`: the usual layout of a device mesh.

        Raises:
            ConfigError: A size is not a whole number of at least 1.
        """
        sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        wrong = {name: size for name, size in sizes.items() if not _is_count(size)}
        if wrong:
            raise ConfigError(f"sizes must be whole numbers of at least 1, not {wrong}")
        return cls(np.arange(pp * dp * cp * tp, dtype=np.int64).reshape(pp, dp, cp, tp))

    @classmethod
    def from_ranks(cls, ranks: npt.ArrayLike, axes: Sequence[str]) -> ClientPlaceTree:
        """An array of ranks, one axis name for each of its dimensions.

        Several dimensions may fold into one axis (`dp_replicate` and `dp_shard` into `dp`); the outer one then counts
        slower. Dimensions may stand in any order.

        Args:
            ranks: Whole numbers, each once.
            axes: Names or aliases, outermost first, as many as `ranks` has dimensions.

        Raises:
            ConfigError: A name is unknown, or their number does not fit.
        """
        array = _as_ranks(ranks)
        if isinstance(axes, str):
            axes = (axes,)
        folded = fold_axes(axes)
        if len(folded) != array.ndim:
            raise ConfigError(
                f"ranks of shape {array.shape} need {array.ndim} axis names, not {len(folded)} ({tuple(axes)})"
            )
        order = sorted(range(array.ndim), key=lambda dim: AXES.index(folded[dim]))
        shape = [math.prod(n for n, name in zip(array.shape, folded, strict=True) if name == axis) for axis in AXES]
        return cls(array.transpose(order).reshape(shape))

    @classmethod
    def from_places(cls, places: Mapping[int, Place]) -> ClientPlaceTree:
        """What every rank knows of itself, put together: frameworks that have process groups but no mesh.

        Args:
            places: rank -> where it stands.

        Raises:
            ConfigError: Two ranks stand on one place, or a place in between is empty.
        """
        if not places:
            raise ConfigError("there are no ranks: places is empty")
        stands = {rank: astuple(place) for rank, place in sorted(places.items())}
        sizes = [max(column) + 1 for column in zip(*stands.values(), strict=True)]
        grid = np.full(sizes, -1, dtype=np.int64)
        for rank, at in stands.items():
            if min(at) < 0:
                raise ConfigError(f"coordinates are numbers of at least 0; rank {rank} stands at {places[rank]}")
            if grid[at] >= 0:
                raise ConfigError(f"ranks {grid[at]} and {rank} both stand at {places[rank]}; every place has one rank")
            grid[at] = rank
        empty = np.argwhere(grid < 0).tolist()
        if empty:
            raise ConfigError(
                f"nobody stands at {Place(*empty[0])}; {len(places)} ranks: {shorten(np.array([*stands]))}"
            )
        return cls(grid)

    @classmethod
    def from_device_mesh(cls, mesh: Any, axes: Sequence[str] | None = None) -> ClientPlaceTree:
        """The layout of a `torch.distributed.DeviceMesh`, with its dimensions in any order.

        A slice or a flattened dimension of another mesh stands for that other, its root, so that every rank has a place
        and joined axes are told apart. Several dimensions may fold into one axis, as in `from_ranks`.

        Args:
            mesh: Anything with `mesh` (a tensor or array of ranks) and `mesh_dim_names`.
            axes: Names in place of the mesh's own, one for each dimension; needed where it has none.

        Raises:
            ConfigError: The mesh has no names and none were given, a name is unknown, or the mesh leaves ranks out and
                its root cannot be read.
        """
        return cls.from_ranks(*layout_of(mesh, axes))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.grid.size)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(self._flat))

    @property
    def num_groups(self) -> int:
        """Number of data-parallel groups: the ranks of one group share a batch."""
        return self.size("dp")

    def size(self, axis: str) -> int:
        """Number of places along an axis (a name or an alias)."""
        return int(self.grid.shape[AXES.index(fold_axis(axis))])

    def place(self, rank: int) -> Place:
        """Where a rank stands.

        Raises:
            ConfigError: The tree has no such rank.
        """
        return Place(*self._coordinates(rank))

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks, `rank` among them, that differ from it along `axis` alone, in the axis' order."""
        where: list[Any] = list(self._coordinates(rank))
        where[AXES.index(fold_axis(axis))] = slice(None)
        return tuple(self.grid[tuple(where)].tolist())

    def data_group(self, rank: int) -> int:
        """Index of the data-parallel group that a rank belongs to."""
        return self.place(rank).dp

    def fetchers(self, broadcast: str | Iterable[str] = ()) -> tuple[int, ...]:
        """The ranks that fetch batches themselves, ascending; the others get them from a peer.

        Args:
            broadcast: Axes along which the rank at coordinate 0 hands its batch to the others.

        Raises:
            ConfigError: An axis is unknown, or is `dp`, whose ranks have batches of their own.
        """
        folded = check_broadcast((broadcast,) if isinstance(broadcast, str) else broadcast)
        where = tuple(slice(0, 1) if axis in folded else slice(None) for axis in AXES)
        return tuple(sorted(self.grid[where].ravel().tolist()))

    def peers(self, rank: int, broadcast: str | Iterable[str] = ()) -> tuple[int, ...]:
        """The ranks that share one fetch with `rank`, which is among them: first the one that fetches.

        Args:
            rank: One of the tree's.
            broadcast: As `fetchers` takes it.

        Raises:
            ConfigError: The tree has no such rank, or an axis is unknown, or is `dp`.
        """
        folded = check_broadcast((broadcast,) if isinstance(broadcast, str) else broadcast)
        place = zip(AXES, self._coordinates(rank), strict=True)
        where = tuple(slice(None) if axis in folded else at for axis, at in place)
        return tuple(self.grid[where].ravel().tolist())

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        # True and 1.0 would be found, too.
        whole = isinstance(rank, (int, np.integer)) and not isinstance(rank, bool)
        index = self._flat.get(rank) if whole else None
        if index is None:
            raise ConfigError(
                f"rank {rank!r} has no place; the tree holds {self.world_size} ranks: {shorten(self.grid)}\n{self}"
            )
        return tuple(int(i) for i in np.unravel_index(index, self.grid.shape))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClientPlaceTree):
            return NotImplemented
        return np.array_equal(self.grid, other.grid)

    def __hash__(self) -> int:
        return hash((self.grid.shape, self.grid.tobytes()))

    def __reduce__(self) -> tuple[type[ClientPlaceTree], tuple[IntArray]]:
        # Rebuilt, because an unpickled array is writable again.
        return ClientPlaceTree, (self.grid,)

    def __str__(self) -> str:
        """A drawing; of large trees the first and the last branches."""
        return draw(self.grid)


def check_broadcast(axes: Iterable[str]) -> tuple[Axis, ...]:
    """The axes that names mean, along which batches may be broadcast.

    Raises:
        ConfigError: An axis is unknown, or is `dp`, whose ranks have batches of their own.
    """
    folded = fold_axes(axes)
    if "dp" in folded:
        raise ConfigError("batches cannot be broadcast along dp: each data-parallel group has its own; use pp, cp, tp")
    return folded


def _as_ranks(ranks: npt.ArrayLike) -> IntArray:
    """A copy as int64.

    Raises:
        ConfigError: They are no whole numbers.
    """
    try:
        array = np.asarray(ranks)
    except ValueError as error:
        raise ConfigError(f"ranks must be an array, every dimension of one length: {error}") from error
    if array.dtype.kind not in "iu":
        raise ConfigError(f"ranks must be whole numbers, not {array.dtype}")
    return array.astype(np.int64, copy=True)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
