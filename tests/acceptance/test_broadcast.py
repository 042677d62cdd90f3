"""Real processes over gloo and Ray that share fetches (`broadcast_at`): the same batches and states on every rank."""

from __future__ import annotations

import multiprocessing
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale_lightning import (
    ClientPlaceTree,
    CollatedRows,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    PaddedRows,
    Source,
)

from . import broadcast_child
from .broadcast_child import Seen, at_tp, at_tp_and_cp, at_tp_and_pp, take
from .conftest import SEQ_LEN
from .data import Corpus
from .harness import World, check_microbatch

pytestmark = [
    pytest.mark.ddp,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

FOUR = ClientPlaceTree.from_sizes(dp=2, tp=2)
WINDOW = 3


def config_for(corpus: Corpus, strategy: Any = None, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=16, token_fields=("loss_mask", "labels"), sample_fields=("score",)),
        "global_batch_size": 8,
        "seed": 4,
        "plan_window": WINDOW,
        "val_sources": corpus.sources(),
        "strategy": strategy,
        "ray_init": {"num_cpus": 2, "object_store_memory": 100 << 20},
    }
    return LoaderConfig(**(base | changes))


def run_job(
    folder: Path, scenario: str, tree: ClientPlaceTree, config: LoaderConfig, *, lost: tuple[int, ...] = ()
) -> list[Any]:
    """What each rank saw; None for those that are to be killed."""
    context = multiprocessing.get_context("spawn")
    arguments = (scenario, tree, config, str(folder))
    ranks = [context.Process(target=broadcast_child.run, args=(rank, *arguments)) for rank in tree.ranks]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(200)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [-9 if rank in lost else 0 for rank in tree.ranks]
    return [None if rank in lost else pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in tree.ranks]


def alone(
    config: LoaderConfig, tree: ClientPlaceTree, *, stream: str = "train", epochs: int = 1, passes: bool = False
) -> list[Seen]:
    """What each rank gets where all are in one process: without Ray, and without broadcasts."""
    local = LoaderConfig(**{**config.__dict__, "runtime": "local", "strategy": None})
    found: list[Seen] = [[] for _ in tree.ranks]
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(MegaScaleLoader(local, tree, rank, stream, passes=passes)) for rank in tree.ranks
        ]
        for _ in range(epochs):
            iterators = [iter(loader) for loader in loaders]
            while True:
                got = [take(*pair, 1) for pair in zip(loaders, iterators, strict=True)]
                if not any(got):
                    break
                for seen, one in zip(found, got, strict=True):
                    seen += one
    return found


def assert_same(seen: Seen, expected: Seen) -> None:
    """The same microbatches, bit for bit, and the same state behind each."""
    assert [(mb.info.step, mb.info.microbatch) for mb, _ in seen] == [
        (mb.info.step, mb.info.microbatch) for mb, _ in expected
    ]
    for (mine, state), (its, other) in zip(seen, expected, strict=True):
        assert mine.rows == its.rows
        assert mine.tensors.keys() == its.tensors.keys()
        for name, value in mine.tensors.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == its.tensors[name].dtype
                assert torch.equal(value, its.tensors[name])
            else:
                assert value == its.tensors[name]
        for name in ("num_loss_tokens", "step_loss_tokens", "is_last_in_step", "is_last_in_stream", "is_last_in_pass"):
            assert getattr(mine.info, name) == getattr(its.info, name)
        assert np.array_equal(mine.info.row_weights, its.info.row_weights)
        assert state == other


@pytest.mark.parametrize(
    ("tree", "strategy", "fetchers"),
    [
        pytest.param(ClientPlaceTree.from_sizes(pp=2, dp=2, tp=2), at_tp_and_pp, 2, id="PP2 x DP2 x TP2"),
        pytest.param(
            ClientPlaceTree.from_ranks(np.arange(8).reshape(2, 2, 2)[:, ::-1], ("cp", "tp", "dp")),
            at_tp_and_cp,
            2,
            id="DP2 x CP2 x TP2, permuted",
        ),
        pytest.param(FOUR, None, 4, id="DP2 x TP2, nothing broadcast"),
    ],
)
def test_every_rank_has_what_the_plan_says(
    with_fields: Corpus, tmp_path: Path, tree: ClientPlaceTree, strategy: Any, fetchers: int
) -> None:
    """Streams, states, an evaluation in between, breaks and a resume; and each group fetches each window once."""
    config = config_for(with_fields, strategy)
    expected, held = alone(config, tree), alone(config, tree, stream="val/0")
    found = run_job(tmp_path, "deliver", tree, config)
    num_steps = expected[0][-1][0].info.step + 1
    assert num_steps > 3 * WINDOW
    for rank, seen in enumerate(found):
        assert_same(seen["whole"], expected[rank])
        for mb, _ in seen["whole"]:
            if tree.size("pp") == 1:
                check_microbatch(with_fields, mb, config)
        broken_off, evaluated = seen["evaluated"]
        assert_same(broken_off, held[rank][:1])
        assert_same(evaluated, held[rank])
        # The state was saved behind the 7th microbatch, inside the 4th step, which is given again.
        assert_same(seen["resumed"], expected[rank][6:])
        assert seen["certificate"] == expected[rank][-1][1]["certificate"]
        assert seen["reports"] == found[0]["reports"] > 0
    windows = -(-num_steps // WINDOW)
    evaluation = held[0][-1][0].info.step + 1
    assert evaluation > WINDOW
    least, most = (fetchers * (windows + begun + -(-evaluation // WINDOW)) for begun in (1, 3))
    assert least <= found[0]["fetches"] <= most, "the pass that was broken off had one window, and may have read ahead"


def test_changes_of_the_mixture_and_passes(mixed: Corpus, tmp_path: Path) -> None:
    """Rank 0, whose changes count, is not a fetcher here."""
    tree = ClientPlaceTree.from_ranks([[1, 0], [2, 3]], ("dp", "tp"))
    config = config_for(
        mixed,
        at_tp,
        sources=mixed.sources(epochs=None),
        rows=PackedRows(SEQ_LEN, 2, pack_ahead=16),
        val_sources=(),
        mixture_lead_steps=8,
    )
    found = run_job(tmp_path, "change", tree, config)
    local = LoaderConfig(**{**config.__dict__, "runtime": "local", "strategy": None})
    with World(local, 2) as world:
        for loader in world.loaders:
            loader.set_mixture({"web": 3.0}, at_step=8)
        changed = world.steps(12)[-1].certificate
    passes = alone(config, tree, epochs=2, passes=True)
    assert found[0]["step"] == 8
    for rank, seen in enumerate(found):
        assert seen["mixed"] == changed
        assert all(seen["passes"])
        assert_same([*seen["passes"][0], *seen["passes"][1]], passes[rank])
        assert seen["certificate"] == passes[0][-1][1]["certificate"]


def test_the_groups_of_the_mesh_are_used(mixed: Corpus, tmp_path: Path) -> None:
    config = config_for(mixed, at_tp, rows=PaddedRows(3 * SEQ_LEN, 2), val_sources=())
    expected = alone(config, FOUR)
    for rank, seen in enumerate(run_job(tmp_path, "mesh", FOUR, config)):
        assert_same(seen["whole"], expected[rank][:12])
        assert seen["made"] == 0
        assert seen["total"] == 2.0
        assert seen["refused"][0] == "ConfigError"
        assert "each process can have its own batches only" in seen["refused"][1]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def test_a_broken_record_ends_all_ranks_alike(tmp_path: Path) -> None:
    good = "".join(f'{{"input_ids": [{number}, 7]}}\n' for number in range(40))
    (tmp_path / "data.jsonl").write_text(good + '{"input_ids": [1, \n')
    config = LoaderConfig(
        sources=[Source("web", str(tmp_path / "data.jsonl"), shuffle=False)],
        rows=CollatedRows(2, as_list),
        global_batch_size=4,
        strategy=at_tp,
        ray_init={"num_cpus": 2, "object_store_memory": 100 << 20},
    )
    found = run_job(tmp_path, "fail", FOUR, config)
    assert found[0]["error"] is not None
    assert found[0]["error"][0] == "DataError"
    assert "data.jsonl" in found[0]["error"][1]
    assert all(seen == found[0] for seen in found)


def test_peers_of_a_killed_fetcher_end_with_an_error(mixed: Corpus, tmp_path: Path) -> None:
    config = config_for(mixed, at_tp, rows=PackedRows(SEQ_LEN, 2, pack_ahead=16), val_sources=(), plan_window=1)
    found = run_job(tmp_path, "die", FOUR, config, lost=(2,))
    kind, said = found[3]["error"]
    assert kind == "RuntimeFailure"
    assert "rank 2, which fetches for it, cannot be reached" in said
    assert found[3]["seconds"] < 15
