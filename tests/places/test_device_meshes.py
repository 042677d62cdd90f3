"""Real device meshes of many ranks in one process: every rank has one place, the one that the mesh's tensor says."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megascale_lightning import ClientPlaceTree, ConfigError
from megascale_lightning.places import AXES
from megascale_lightning.places.axes import fold_axis
from tests.worlds import pretended_world

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "ulysses", "tp")


@dataclass
class Drawn:
    """A mesh to make: one to six dimensions in any order, ranks in any order."""

    names: tuple[str, ...]
    ranks: np.ndarray[Any, Any]
    asking: int

    @property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        return {int(rank): at for at, rank in np.ndenumerate(self.ranks)}

    def along(self, rank: int, axis: str) -> int:
        """Where a rank stands on an axis, counted through the dimensions that are this axis, the first slowest."""
        found = 0
        for name, size, at in zip(self.names, self.ranks.shape, self.coordinates[rank], strict=True):
            if fold_axis(name) == axis:
                found = found * size + at
        return found

    def make(self) -> DeviceMesh:
        return DeviceMesh("cpu", torch.from_numpy(self.ranks), mesh_dim_names=self.names)


@st.composite
def drawn_meshes(draw: st.DrawFn, most: int = 1024) -> Drawn:
    names = tuple(draw(st.permutations(NAMES))[: draw(st.integers(1, 6))])
    sizes: list[int] = []
    for _ in names:
        sizes.append(draw(st.integers(1, max(1, min(4, most // int(np.prod(sizes, dtype=int)))))))
    size = int(np.prod(sizes))
    layout = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(size)
    ranks = np.arange(size) if draw(st.booleans()) else layout
    return Drawn(names, ranks.reshape(sizes), draw(st.integers(0, size - 1)))


@settings(max_examples=60, deadline=None)
@given(drawn_meshes(), st.sets(st.sampled_from(["pp", "cp", "tp"])), st.randoms())
def test_every_rank_has_the_place_that_the_mesh_says(drawn: Drawn, broadcast: set[str], random: Any) -> None:
    with pretended_world(drawn.ranks.size, drawn.asking):
        tree = ClientPlaceTree.from_device_mesh(drawn.make())
    ranks = range(drawn.ranks.size)
    stands = {rank: tuple(drawn.along(rank, axis) for axis in AXES) for rank in ranks}
    assert tree.ranks == tuple(ranks)
    assert len(set(stands.values())) == len(ranks)
    for rank in ranks:
        place = tree.place(rank)
        assert (place.pp, place.dp, place.cp, place.tp) == stands[rank]
        assert tree.data_group(rank) == stands[rank][AXES.index("dp")]
    for rank in random.sample(ranks, min(6, len(ranks))):
        for dim, axis in enumerate(AXES):
            others = [
                r
                for r in ranks
                if stands[r][:dim] + stands[r][dim + 1 :] == stands[rank][:dim] + stands[rank][dim + 1 :]
            ]
            assert tree.group(rank, axis) == tuple(sorted(others, key=lambda other: stands[other][dim]))
    first = tuple(rank for rank in ranks if all(stands[rank][AXES.index(axis)] == 0 for axis in broadcast))
    assert tree.fetchers(broadcast) == first


@settings(max_examples=40, deadline=None)
@given(drawn_meshes(most=256), st.data())
def test_a_slice_or_a_flattened_part_stands_for_the_whole(drawn: Drawn, data: st.DataObject) -> None:
    """On every rank alike, though each sees other ranks in its slice."""
    chosen = data.draw(st.sets(st.integers(0, len(drawn.names) - 1), min_size=1))
    part = tuple(drawn.names[dim] for dim in sorted(chosen))
    with pretended_world(drawn.ranks.size, drawn.asking):
        mesh = drawn.make()
        whole = ClientPlaceTree.from_device_mesh(mesh)
        assert ClientPlaceTree.from_device_mesh(mesh[part]) == whole
        # Beside its parents, under a name that joins them or one that is known and means less.
        for name in ("_".join(part), "fsdp"):
            assert ClientPlaceTree.from_device_mesh(mesh[part]._flatten(name)) == whole
        assert ClientPlaceTree.from_device_mesh(mesh) == whole


class TestFrameworks:
    """Meshes as they are made by the libraries that people train with."""

    def test_accelerate_and_nemo(self) -> None:
        """Joined meshes lie beside the dimensions, and are not among their names."""
        with pretended_world(16, 5):
            mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
            joined = {
                name: mesh[parts]._flatten(name)
                for name, parts in {
                    "dp": ("dp_replicate", "dp_shard"),
                    "dp_shard_cp": ("dp_shard", "cp"),
                    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
                }.items()
            }
            for each in (mesh, *joined.values(), mesh["tp"]):
                assert ClientPlaceTree.from_device_mesh(each) == ClientPlaceTree.from_sizes(dp=4, cp=2, tp=2)

    def test_joined_dimensions_of_a_mesh_of_all_ranks(self) -> None:
        """HSDP's: `fsdp` here joins dp_shard and cp, whatever `fsdp` means elsewhere."""
        with pretended_world(16):
            mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
            joined = DeviceMesh._concatenate(
                [mesh["dp_replicate"], mesh["dp_shard", "cp"]._flatten("fsdp"), mesh["tp"]]
            )
            assert joined.mesh.shape == (2, 4, 2)
            assert ClientPlaceTree.from_device_mesh(joined) == ClientPlaceTree.from_sizes(dp=4, cp=2, tp=2)

    def test_dimensions_of_one_rank_say_nothing(self) -> None:
        """More dimensions than the mesh of all ranks has, and less in them."""
        with pretended_world(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
            joined = mesh._flatten("fsdp")._unflatten(0, (1, 1, 4), ("pp", "dp_replicate", "fsdp"))
            assert ClientPlaceTree.from_device_mesh(joined) == ClientPlaceTree.from_sizes(dp=2, cp=2)

    def test_torchtitan(self) -> None:
        """The mesh of all ranks is a line; that of the data is unflattened from it."""
        for name in ("unnamed", "world", "dp"):
            with pretended_world(16, 7):
                world = init_device_mesh("cpu", (16,), mesh_dim_names=(name,))
                data = world._unflatten(0, (2, 4, 1, 2), ("pp", "batch", "cp", "tp"))
                assert ClientPlaceTree.from_device_mesh(data) == ClientPlaceTree.from_sizes(pp=2, dp=4, tp=2)
                if name == "dp":
                    continue
                for part in (data["tp"], data["batch", "cp"]._flatten("loss")):
                    with pytest.raises(
                        ConfigError, match=r"of the 16 of the mesh(.|\n)*give the mesh that holds every rank"
                    ):
                        ClientPlaceTree.from_device_mesh(part)

    def test_veomni(self) -> None:
        names = ("pp", "dp_replicate", "dp_shard", "ulysses", "cp", "tp")
        with pretended_world(32):
            mesh = init_device_mesh("cpu", (1, 2, 2, 2, 2, 2), mesh_dim_names=names)
            assert ClientPlaceTree.from_device_mesh(mesh) == ClientPlaceTree.from_sizes(dp=4, cp=4, tp=2)

    def test_a_mesh_of_some_of_the_ranks(self) -> None:
        """Its own ranks have places; whether that is enough, the trainer's world says."""
        with pretended_world(8, 1):
            mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp"))
            assert ClientPlaceTree.from_device_mesh(mesh).ranks == (0, 1, 2, 3)
        with pretended_world(8, 5):
            mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp"))
            assert ClientPlaceTree.from_device_mesh(mesh) == ClientPlaceTree.from_sizes(dp=2, tp=2)


class TestNames:
    def test_names_may_be_said(self) -> None:
        with pretended_world(8):
            unnamed = init_device_mesh("cpu", (2, 4))
            axes = ("dp_replicate", "dp_shard")
            assert ClientPlaceTree.from_device_mesh(unnamed, axes) == ClientPlaceTree.from_sizes(dp=8)
            odd = init_device_mesh("cpu", (2, 4), mesh_dim_names=("inter", "intra"))
            assert ClientPlaceTree.from_device_mesh(odd, axes=("dp", "tp")) == ClientPlaceTree.from_sizes(dp=2, tp=4)
            line = init_device_mesh("cpu", (8,))
            assert ClientPlaceTree.from_device_mesh(line, axes="tp") == ClientPlaceTree.from_sizes(tp=8)

    def test_a_mesh_without_any(self) -> None:
        with pretended_world(8), pytest.raises(ConfigError, match=r"shape \(2, 4\) has no axis names; pass axes="):
            ClientPlaceTree.from_device_mesh(init_device_mesh("cpu", (2, 4)))

    def test_names_that_say_nothing(self) -> None:
        with pretended_world(8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_cp", "tp"))
            message = r"unknown axis 'dp_cp'; known names are (.|\n)*Pass axes=(.|\n)*give the mesh that it was made of"
            with pytest.raises(ConfigError, match=message):
                ClientPlaceTree.from_device_mesh(mesh)

    def test_a_slice_is_not_named_by_the_caller(self) -> None:
        """Each rank would see other ranks in it, and take them for all there are."""
        with pretended_world(8, 3):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("role", "replica"))
            with pytest.raises(ConfigError, match=r"\('replica',\), holds 4 ranks of the 8(.|\n)*from_ranks"):
                ClientPlaceTree.from_device_mesh(mesh["replica"], axes=("dp",))
            # What the message offers.
            own = ClientPlaceTree.from_ranks(mesh["replica"].mesh.tolist(), ("dp",))
            assert own.ranks == (0, 1, 2, 3)


def test_torch_that_keeps_roots_beside_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before `DeviceMesh._get_root_mesh`: the module knows the root of every mesh."""
    root = SimpleNamespace(mesh=np.arange(8).reshape(4, 2), mesh_dim_names=("dp", "tp"))

    class Mesh:
        mesh = np.array([2, 3])
        mesh_dim_names = ("tp",)

    module = SimpleNamespace(_mesh_resources=SimpleNamespace(get_root_mesh=lambda mesh: root))
    monkeypatch.setitem(__import__("sys").modules, "older_device_mesh", module)
    monkeypatch.setattr(Mesh, "__module__", "older_device_mesh")
    assert ClientPlaceTree.from_device_mesh(Mesh()) == ClientPlaceTree.from_sizes(dp=4, tp=2)
