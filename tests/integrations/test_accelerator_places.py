"""Where the ranks of an Accelerator stand: a real one of sixteen processes, and stand-ins for what needs GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.device_mesh import init_device_mesh

from megascale_lightning import ClientPlaceTree, ConfigError
from megascale_lightning.integrations.meshes import tree_of_accelerator
from tests.integrations.launched import launched_by_torchrun
from tests.worlds import pretended_world

WORLD, RANK = 16, 6


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Accelerate takes sizes on GPUs alone: on CPUs the mesh is built from them by hand and put into its state."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with launched_by_torchrun(WORLD, RANK):
        made = Accelerator(cpu=True)
        assert (made.num_processes, made.process_index) == (WORLD, RANK)
        yield made
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def configured(accelerator: Accelerator, **sizes: int) -> None:
    config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.build_device_mesh("cpu")


def standing_in(
    world_size: int, *, mesh: Any = None, kind: str = "MULTI_GPU", deepspeed: Any = None, **sizes: int
) -> Any:
    config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()}) if sizes else None
    plugin = None if deepspeed is None else SimpleNamespace(deepspeed_config=deepspeed)
    return SimpleNamespace(
        num_processes=world_size,
        torch_device_mesh=mesh,
        parallelism_config=config,
        distributed_type=kind,
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )


class TestRealAccelerator:
    def test_plain_data_parallelism(self, accelerator: Accelerator) -> None:
        assert tree_of_accelerator(accelerator) == ClientPlaceTree.from_sizes(dp=WORLD)

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ({"dp_replicate": 2, "dp_shard": 8}, {"dp": 16}),
            ({"dp_shard": 8, "tp": 2}, {"dp": 8, "tp": 2}),
            ({"dp_shard": 4, "cp": 4}, {"dp": 4, "cp": 4}),
            ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, {"dp": 4, "cp": 2, "tp": 2}),
            ({"tp": 16}, {"tp": 16}),
        ],
    )
    def test_its_mesh(self, accelerator: Accelerator, sizes: dict[str, int], expected: dict[str, int]) -> None:
        """Its joined meshes (dp, dp_shard_cp, dp_cp) lie beside it and change nothing."""
        configured(accelerator, **sizes)
        tree = tree_of_accelerator(accelerator)
        assert tree == ClientPlaceTree.from_sizes(**expected)

    def test_ranks_of_one_group_get_one_batch(self, accelerator: Accelerator) -> None:
        """accelerate#3092: with dp_shard x tp, ranks 0 and 1 share data, 2 and 3 do, and the two pairs differ.

        SimpleTuner#2143: four ranks that split a sequence share one.
        """
        configured(accelerator, dp_shard=8, tp=2)
        groups = [tree_of_accelerator(accelerator).data_group(rank) for rank in range(4)]
        assert groups == [0, 0, 1, 1]
        configured(accelerator, dp_shard=4, cp=4)
        groups = [tree_of_accelerator(accelerator).data_group(rank) for rank in range(8)]
        assert groups == [0] * 4 + [1] * 4

    def test_a_mesh_of_ones_own(self, accelerator: Accelerator) -> None:
        """tp outermost: whoever divides the rank by tp gives the wrong batches here."""
        accelerator.state.device_mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("tp", "dp_shard"))
        tree = tree_of_accelerator(accelerator)
        assert tree.group(RANK, "tp") == (6, 14)
        assert tree.data_group(RANK) == tree.data_group(14) == 6

    def test_mesh_and_sizes_that_disagree(self, accelerator: Accelerator) -> None:
        configured(accelerator, dp_shard=8, tp=2)
        accelerator.state.device_mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp_shard", "tp"))
        with pytest.raises(
            ConfigError, match=r"'dp_shard': 8(.|\n)*another one:\nClientPlaceTree: 16 ranks = dp 4 x tp 4\n"
        ):
            tree_of_accelerator(accelerator)

    def test_the_users_tree(self, accelerator: Accelerator) -> None:
        configured(accelerator, dp_shard=8, tp=2)
        own = ClientPlaceTree.from_sizes(dp=8, cp=2)
        assert tree_of_accelerator(accelerator, own) is own
        with pytest.raises(ConfigError, match=r"group of the accelerator, and in two of the tree given"):
            tree_of_accelerator(accelerator, ClientPlaceTree.from_sizes(dp=16))
        with pytest.raises(ConfigError, match=r"8 places, the accelerator 16 ranks"):
            tree_of_accelerator(accelerator, ClientPlaceTree.from_sizes(dp=8))


class TestWithoutAMesh:
    def test_sizes(self) -> None:
        """In the order in which Accelerate lays ranks out, replicas outermost."""
        tree = tree_of_accelerator(standing_in(16, dp_replicate=2, dp_shard=2, cp=2, tp=2))
        with pretended_world(16):
            mesh = ParallelismConfig(2, 2, 2, 2).build_device_mesh("cpu")
        assert tree == ClientPlaceTree.from_device_mesh(mesh)

    def test_sizes_that_say_nothing(self) -> None:
        """`ParallelismConfig()` on many GPUs has no mesh, and sets dp_replicate to their number behind it."""
        assert tree_of_accelerator(standing_in(8, dp_shard=1)) == ClientPlaceTree.from_sizes(dp=8)
        assert tree_of_accelerator(standing_in(8, dp_replicate=8)) == ClientPlaceTree.from_sizes(dp=8)

    def test_sizes_of_another_world(self) -> None:
        with pytest.raises(ConfigError, match=r"4 places, the accelerator 8 ranks(.|\n)*dp 2 x tp 2"):
            tree_of_accelerator(standing_in(8, dp_shard=2, tp=2))

    def test_megatron_before_its_groups_are_there(self) -> None:
        with pytest.raises(ConfigError, match="prepare the model first"):
            tree_of_accelerator(standing_in(8, kind="MEGATRON_LM"))


class TestDeepSpeed:
    """Before the model is prepared; what its groups say is tested with real groups."""

    def test_sequence_parallel_size_of_the_config(self) -> None:
        expected = ClientPlaceTree.from_sizes(dp=2, cp=4)
        assert tree_of_accelerator(standing_in(8, kind="DEEPSPEED", deepspeed={}, sp=4)) == expected
        config = {"sequence_parallel_size": 4, "data_parallel_size": 2}
        assert tree_of_accelerator(standing_in(8, kind="DEEPSPEED", deepspeed=config)) == expected

    def test_tensor_parallel_size_of_the_config(self) -> None:
        """`state.ds_device_mesh` is a mesh of the first ranks only, and says nothing of the others."""
        config = {"tensor_parallel": {"autotp_size": 2}}
        tree = tree_of_accelerator(standing_in(8, kind="DEEPSPEED", deepspeed=config))
        assert tree == ClientPlaceTree.from_sizes(dp=4, tp=2)

    def test_zero_alone(self) -> None:
        config = {"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 0}}
        assert tree_of_accelerator(standing_in(8, kind="DEEPSPEED", deepspeed=config)) == ClientPlaceTree.from_sizes(
            dp=8
        )

    def test_sizes_that_do_not_divide_the_ranks(self) -> None:
        with pytest.raises(ConfigError, match="a sequence among 3 ranks and a tensor among 1, of 8 ranks"):
            tree_of_accelerator(standing_in(8, kind="DEEPSPEED", deepspeed={}, sp=3))

    def test_the_mesh_that_it_makes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh = SimpleNamespace(
            mesh=np.arange(8).reshape(4, 2)[::-1], mesh_dim_names=("data_parallel", "sequence_parallel")
        )
        groups = SimpleNamespace(mesh_device=mesh, mpu=None)
        monkeypatch.setitem(__import__("sys").modules, "deepspeed.utils.groups", groups)
        tree = tree_of_accelerator(standing_in(8, kind="DEEPSPEED", deepspeed={"sequence_parallel_size": 2}))
        assert tree.group(7, "cp") == (6, 7)
        assert tree.data_group(7) == 0


class TestProcessesThatDoNotKnowOfEachOther:
    def test_torchrun_without_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every process would train on all the data."""
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        with pytest.raises(ConfigError, match=r"torchrun started 4 processes(.|\n)*ACCELERATE_USE_CPU=true"):
            tree_of_accelerator(standing_in(1, kind="NO"))
        assert tree_of_accelerator(standing_in(4)) == ClientPlaceTree.from_sizes(dp=4)

    def test_a_pod_that_counts_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some schedulers set WORLD_SIZE to the number of machines; one process there is one process."""
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        assert tree_of_accelerator(standing_in(1, kind="NO")) == ClientPlaceTree.from_sizes()
