"""Every rank has one place, read from the layout it was given."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import ClientPlaceTree, ConfigError
from megascale_lightning.places import AXES, Place

SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


def mesh_of(ranks: Any, names: tuple[str, ...] | None) -> Any:
    return SimpleNamespace(mesh=np.asarray(ranks), mesh_dim_names=names)


class TestFromSizes:
    def test_tp_is_fastest(self):
        tree = ClientPlaceTree.from_sizes(pp=2, dp=3, cp=2, tp=2)
        assert tree.world_size == 24
        assert tree.place(0) == Place()
        assert tree.place(1) == Place(tp=1)
        assert tree.place(2) == Place(cp=1)
        assert tree.place(4) == Place(dp=1)
        assert tree.place(12) == Place(pp=1)
        assert tree.place(23) == Place(pp=1, dp=2, cp=1, tp=1)

    def test_one_rank(self):
        tree = ClientPlaceTree.from_sizes()
        assert (tree.world_size, tree.num_groups, tree.ranks) == (1, 1, (0,))
        assert tree.place(0) == Place(0, 0, 0, 0)

    @pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
    def test_wrong_sizes_are_named(self, size: Any):
        with pytest.raises(ConfigError, match="'dp'"):
            ClientPlaceTree.from_sizes(dp=size)

    @settings(max_examples=25)
    @given(SIZES)
    def test_places_and_groups_fit_together(self, sizes: dict[str, int]):
        tree = ClientPlaceTree.from_sizes(**sizes)
        places = {rank: tree.place(rank) for rank in tree.ranks}
        assert len(set(places.values())) == tree.world_size == np.prod(list(sizes.values()))
        for axis in AXES:
            others = [name for name in AXES if name != axis]
            for rank, place in places.items():
                expected = [
                    other for other in tree.ranks if all(getattr(places[other], n) == getattr(place, n) for n in others)
                ]
                assert sorted(tree.group(rank, axis)) == expected
                assert tree.group(rank, axis)[getattr(place, axis)] == rank
                assert tree.size(axis) == len(expected)


class TestFromRanks:
    def test_layout_is_read_not_computed(self):
        tree = ClientPlaceTree.from_ranks([[3, 1], [0, 2]], axes=("dp", "tp"))
        assert tree.place(3) == Place(dp=0, tp=0)
        assert tree.place(1) == Place(dp=0, tp=1)
        assert tree.place(0) == Place(dp=1, tp=0)
        assert tree.group(2, "tp") == (0, 2)
        assert tree.group(2, "dp") == (1, 2)

    def test_dimensions_may_stand_in_any_order(self):
        ranks = np.arange(6).reshape(2, 3)
        assert ClientPlaceTree.from_ranks(ranks, ("tp", "dp")) == ClientPlaceTree.from_ranks(ranks.T, ("dp", "tp"))

    def test_replicated_and_sharded_data_parallelism_fold_outer_first(self):
        ranks = np.arange(12).reshape(2, 3, 2)
        tree = ClientPlaceTree.from_ranks(ranks, ("dp_replicate", "dp_shard", "tp"))
        assert (tree.size("dp"), tree.size("tp")) == (6, 2)
        assert [tree.data_group(rank) for rank in range(12)] == [rank // 2 for rank in range(12)]

    def test_folding_keeps_apart_dimensions_with_another_between(self):
        """dp_replicate x cp x dp_shard: rank 0 and 2 differ in dp only, though cp lies between in the mesh."""
        ranks = np.arange(8).reshape(2, 2, 2)
        tree = ClientPlaceTree.from_ranks(ranks, ("dp_replicate", "cp", "dp_shard"))
        assert [tree.data_group(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
        assert tree.group(0, "cp") == (0, 2)

    def test_ranks_need_not_be_dense(self):
        tree = ClientPlaceTree.from_ranks([4, 6, 8], ("dp",))
        assert tree.ranks == (4, 6, 8)
        assert tree.data_group(8) == 2

    @pytest.mark.parametrize(
        ("ranks", "axes", "message"),
        [
            ([[0, 1], [2, 3]], ("dp",), "need 2 axis names, not 1"),
            ([0, 1], ("experts",), "unknown axis 'experts'"),
            ([0, 0], ("dp",), "one place"),
            ([0, -1], ("dp",), "at least 0"),
            ([0.0, 1.0], ("dp",), "whole numbers"),
            (np.zeros((0,), int), ("dp",), "at least one rank"),
            ([[0, 1], [2]], ("dp", "tp"), "one length"),
        ],
    )
    def test_wrong_layouts_say_what_is_wrong(self, ranks: Any, axes: tuple[str, ...], message: str):
        with pytest.raises(ConfigError, match=message):
            ClientPlaceTree.from_ranks(ranks, axes)


class TestFromPlaces:
    def test_what_ranks_know_of_themselves(self):
        tree = ClientPlaceTree.from_ranks(np.random.default_rng(1).permutation(24).reshape(2, 3, 4), ("pp", "dp", "tp"))
        assert ClientPlaceTree.from_places({rank: tree.place(rank) for rank in tree.ranks}) == tree

    @pytest.mark.parametrize(
        ("places", "message"),
        [
            ({}, "no ranks"),
            ({0: Place(), 1: Place(dp=1), 2: Place(dp=1)}, "ranks 1 and 2 both stand at pp 0 dp 1 cp 0 tp 0"),
            ({0: Place(), 1: Place(dp=1, tp=1)}, "nobody stands at pp 0 dp 0 cp 0 tp 1; 2 ranks: 0 1"),
            ({3: Place(tp=-1)}, "rank 3 stands at pp 0 dp 0 cp 0 tp -1"),
        ],
    )
    def test_places_that_do_not_fit_together(self, places: Any, message: str):
        with pytest.raises(ConfigError, match=message):
            ClientPlaceTree.from_places(places)


class TestFromDeviceMesh:
    def test_names_of_the_mesh(self):
        tree = ClientPlaceTree.from_device_mesh(mesh_of([[0, 1], [2, 3]], ("data_parallel", "tensor_parallel")))
        assert tree == ClientPlaceTree.from_sizes(dp=2, tp=2)

    def test_given_names_go_before_the_mesh_s_own(self):
        tree = ClientPlaceTree.from_device_mesh(
            mesh_of([[0, 1], [2, 3]], ("a", "b")), axes=("dp_replicate", "dp_shard")
        )
        assert tree == ClientPlaceTree.from_sizes(dp=4)

    def test_a_mesh_without_names_needs_them(self):
        with pytest.raises(ConfigError, match=r"shape \(2, 2\) has no axis names; pass axes="):
            ClientPlaceTree.from_device_mesh(mesh_of([[0, 1], [2, 3]], None))

    def test_tensors_of_torch(self):
        """Built without a process group, as far as torch allows: only `mesh` and `mesh_dim_names` are looked at."""
        torch = pytest.importorskip("torch")
        mesh = SimpleNamespace(mesh=torch.arange(8).view(2, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
        assert ClientPlaceTree.from_device_mesh(mesh) == ClientPlaceTree.from_sizes(pp=2, dp=2, tp=2)


class TestFetchers:
    tree = ClientPlaceTree.from_sizes(pp=2, dp=2, cp=2, tp=2)

    def test_all_fetch_unless_broadcast(self):
        assert self.tree.fetchers() == self.tree.ranks

    def test_one_of_each_broadcast_group_fetches(self):
        assert self.tree.fetchers("tensor_parallel") == tuple(range(0, 16, 2))
        assert self.tree.fetchers(("tp", "cp")) == (0, 4, 8, 12)
        assert self.tree.fetchers(["pp", "cp", "tp"]) == (0, 4)

    def test_every_rank_has_one_fetcher_in_its_group(self):
        fetchers = set(self.tree.fetchers("cp"))
        assert all(len(fetchers & set(self.tree.group(rank, "cp"))) == 1 for rank in self.tree.ranks)

    def test_peers_of_a_permuted_layout_have_the_fetcher_first(self):
        tree = ClientPlaceTree.from_ranks([[[5, 4], [1, 0]], [[7, 6], [3, 2]]], ("tp", "dp", "pp"))
        assert tree.peers(0, ("tp", "pp")) == (1, 3, 0, 2)
        assert tree.peers(6, "pipeline") == (7, 6)
        assert tree.peers(6) == (6,)
        for broadcast in (("tp",), ("tp", "pp")):
            groups = {tree.peers(rank, broadcast) for rank in tree.ranks}
            assert sorted(group[0] for group in groups) == list(tree.fetchers(broadcast))
            assert sorted(rank for group in groups for rank in group) == list(tree.ranks)
        with pytest.raises(ConfigError, match="along dp"):
            tree.peers(0, ("tp", "fsdp"))

    def test_data_parallel_ranks_do_not_share(self):
        with pytest.raises(ConfigError, match="along dp"):
            self.tree.fetchers(("tp", "fsdp"))


class TestValue:
    def test_equal_by_layout(self):
        tree = ClientPlaceTree.from_sizes(dp=2, tp=2)
        assert tree == ClientPlaceTree.from_ranks([[0, 1], [2, 3]], ("dp", "tp"))
        assert hash(tree) == hash(ClientPlaceTree.from_ranks([[0, 1], [2, 3]], ("dp", "tp")))
        assert tree != ClientPlaceTree.from_ranks([[0, 2], [1, 3]], ("dp", "tp"))
        assert tree != ClientPlaceTree.from_sizes(dp=4)
        assert tree != "tree"

    def test_survives_pickling(self):
        tree = ClientPlaceTree.from_ranks([[3, 1], [0, 2]], ("dp", "tp"))
        again = pickle.loads(pickle.dumps(tree))
        assert again == tree
        assert again.place(2) == Place(dp=1, tp=1)
        assert not again.grid.flags.writeable

    def test_cannot_be_changed(self):
        given_ranks = np.arange(4)
        tree = ClientPlaceTree.from_ranks(given_ranks, ("dp",))
        given_ranks[:] = 0
        assert tree.ranks == (0, 1, 2, 3)
        with pytest.raises(ValueError, match="read-only"):
            tree.grid[0, 0, 0, 0] = 7
        with pytest.raises(AttributeError):
            tree.grid = given_ranks  # type: ignore[misc]

    @pytest.mark.parametrize("rank", [1.0, True, -1, 3, "1", None])
    def test_what_is_no_rank(self, rank: Any) -> None:
        tree = ClientPlaceTree.from_sizes(dp=3)
        message = f"rank {rank!r} has no place; the tree holds 3 ranks: 0-2\nClientPlaceTree: 3 ranks = dp 3\n"
        with pytest.raises(ConfigError, match=message):
            tree.data_group(rank)
        assert tree.data_group(np.int64(1)) == 1

    def test_unknown_ranks_are_refused(self):
        tree = ClientPlaceTree.from_sizes(dp=3)
        for ask in (tree.place, tree.data_group, lambda rank: tree.group(rank, "dp")):
            with pytest.raises(ConfigError, match=r"rank 3 has no place; the tree holds 3 ranks: 0-2"):
                ask(3)

    def test_numpy_ranks_are_welcome(self):
        place = ClientPlaceTree.from_sizes(dp=4).place(np.int64(2))
        assert place == Place(dp=2)
        assert type(place.dp) is int


class TestDrawing:
    def test_axes_of_size_one_are_left_out(self):
        assert str(ClientPlaceTree.from_sizes(dp=2, tp=4)) == (
            "ClientPlaceTree: 8 ranks = dp 2 x tp 4\n├── dp 0, tp 0-3: ranks 0-3\n└── dp 1, tp 0-3: ranks 4-7"
        )

    def test_nesting(self):
        assert str(ClientPlaceTree.from_sizes(pp=2, dp=2, tp=2)).splitlines() == [
            "ClientPlaceTree: 8 ranks = pp 2 x dp 2 x tp 2",
            "├── pp 0",
            "│   ├── dp 0, tp 0-1: ranks 0 1",
            "│   └── dp 1, tp 0-1: ranks 2 3",
            "└── pp 1",
            "    ├── dp 0, tp 0-1: ranks 4 5",
            "    └── dp 1, tp 0-1: ranks 6 7",
        ]

    def test_one_rank(self):
        assert str(ClientPlaceTree.from_sizes()) == "ClientPlaceTree: 1 rank = dp 1\n└── dp 0: rank 0"

    def test_of_large_trees_the_first_and_the_last_branches_are_drawn(self):
        lines = str(ClientPlaceTree.from_sizes(dp=1000, tp=8)).splitlines()
        assert lines[:2] == ["ClientPlaceTree: 8000 ranks = dp 1000 x tp 8", "├── dp 0, tp 0-7: ranks 0-7"]
        assert lines[-3:] == [
            "├── dp 14, tp 0-7: ranks 112-119",
            "├── dp 15-998: not drawn",
            "└── dp 999, tp 0-7: ranks 7992-7999",
        ]

    def test_every_level_of_a_large_tree_is_drawn(self):
        lines = str(ClientPlaceTree.from_sizes(pp=8, dp=64, cp=4, tp=8)).splitlines()
        assert lines == [
            "ClientPlaceTree: 16384 ranks = pp 8 x dp 64 x cp 4 x tp 8",
            "├── pp 0",
            "│   ├── dp 0",
            "│   │   ├── cp 0, tp 0-7: ranks 0-7",
            "│   │   ├── cp 1-2: not drawn",
            "│   │   └── cp 3, tp 0-7: ranks 24-31",
            "│   ├── dp 1-62: not drawn",
            "│   └── dp 63",
            "│       ├── cp 0, tp 0-7: ranks 2016-2023",
            "│       ├── cp 1-2: not drawn",
            "│       └── cp 3, tp 0-7: ranks 2040-2047",
            "├── pp 1-6: not drawn",
            "└── pp 7",
            "    ├── dp 0",
            "    │   ├── cp 0, tp 0-7: ranks 14336-14343",
            "    │   ├── cp 1-2: not drawn",
            "    │   └── cp 3, tp 0-7: ranks 14360-14367",
            "    ├── dp 1-62: not drawn",
            "    └── dp 63",
            "        ├── cp 0, tp 0-7: ranks 16352-16359",
            "        ├── cp 1-2: not drawn",
            "        └── cp 3, tp 0-7: ranks 16376-16383",
        ]

    @settings(max_examples=40)
    @given(st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4, 20]) for axis in AXES}))
    def test_a_drawing_has_few_lines(self, sizes: dict[str, int]):
        tree = ClientPlaceTree.from_sizes(**sizes)
        lines = str(tree).splitlines()
        assert len(lines) <= 49
        assert max(map(len, lines)) < 120
        assert str(tree.world_size - 1) in lines[-1]
        if tree.world_size <= 32:
            assert "not drawn" not in "".join(lines)

    def test_scattered_ranks_of_one_line_are_shortened(self):
        scattered = ClientPlaceTree.from_ranks(np.random.default_rng(0).permutation(1000), ("dp",))
        assert len(str(scattered)) < 250
