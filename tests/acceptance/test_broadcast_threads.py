"""The ranks of a job that share fetches (`broadcast_at`), as threads: batches, states, and what the roles are asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, PackedRows
from megascale_lightning.client.peers import PeerGroup
from megascale_lightning.client.session import LoadingSession
from tests.client.test_broadcasting import Ranks

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Microbatch, Step, World, microbatch, same_tensors, without_run

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

TREE = ClientPlaceTree.from_sizes(cp=2, tp=2)
WINDOW = 2


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=16),
        "global_batch_size": 4,
        "seed": 4,
        "plan_window": WINDOW,
        "val_sources": corpus.sources(),
        "runtime": "local",
    }
    return LoaderConfig(**(base | changes))


class Peers:
    """Four ranks that share every fetch of rank 0, over one local runtime."""

    def __init__(self, config: LoaderConfig, **session: Any) -> None:
        self.job = Ranks(4)
        self.session = LoadingSession(config, tree=TREE, **session)
        self.session.peers = lambda rank: self.job.groups[rank]  # type: ignore[method-assign]
        self.loaders = self.make("train")

    def make(self, stream: str) -> list[MegaScaleLoader]:
        return [MegaScaleLoader(self.session.config, TREE, rank, stream, session=self.session) for rank in range(4)]

    def take(self, batches: list[Any], count: int | None = None) -> list[Microbatch]:
        """The next microbatches, which are the same on all ranks."""

        def body(rank: int) -> list[Microbatch]:
            found: list[Microbatch] = []
            while count is None or len(found) < count:
                batch = next(batches[rank], None)
                if batch is None:
                    break
                found.append(microbatch(batch))
            return found

        found = self.job.run(body)
        errors = [ranks for ranks in found if isinstance(ranks, BaseException)]
        if errors:
            raise errors[0]
        for other in found[1:]:
            assert same(found[0], other)
        return list(found[0])

    def state(self) -> Any:
        """The state, which is the same on all ranks."""
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return without_run(states[0])

    def fetches(self) -> int:
        return int(self.session.stats()["constructor/0"]["role"]["fetches"])

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
        self.job.close()
        self.session.close()


def same(one: list[Microbatch], other: list[Microbatch]) -> bool:
    return len(one) == len(other) and all(
        a.info.step == b.info.step and same_tensors(Step(0, [[a]], ""), Step(0, [[b]], ""))
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def peers() -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def make(*args: Any, **more: Any) -> Peers:
        made.append(Peers(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def alone(config: LoaderConfig, **more: Any) -> list[Step]:
    with World(config, 1, keep_states=True, **more) as world:
        return world.steps()


def of(steps: list[Step]) -> list[Microbatch]:
    return [mb for step in steps for mb in step.microbatches()]


def test_each_window_is_fetched_once_for_all(mixed: Corpus, peers: Callable[..., Peers]) -> None:
    config = config_for(mixed)
    expected = alone(config)
    world = peers(config)
    batches = [iter(loader) for loader in world.loaders]
    for step in expected:
        assert same(world.take(batches, len(step.ranks[0])), step.ranks[0])
        assert world.state() == without_run(step.state)  # type: ignore[arg-type]
    assert world.take(batches) == []
    assert {loader.certificate for loader in world.loaders} == {expected[-1].certificate}
    reports = [report for loader in world.loaders for report in loader.last_reports]
    assert len(reports) == 4 * len(expected)
    assert all(report.group_costs.base is None for report in reports), "a view would keep its window in memory"
    assert world.fetches() == -(-len(expected) // WINDOW)


def test_only_the_fetcher_is_a_client(mixed: Corpus, peers: Callable[..., Peers]) -> None:
    world = peers(config_for(mixed, sources=mixed.sources(epochs=None)))
    world.take([iter(loader) for loader in world.loaders], 3)
    stats = world.session.stats()
    assert stats["constructor/0"]["role"]["clients"] == stats["planner"]["role"]["train"]["clients"] == 1


def test_breaks_evaluations_and_a_peers_state(mixed: Corpus, peers: Callable[..., Peers]) -> None:
    config = config_for(mixed)
    steps, held = alone(config), of(alone(config, stream="val/0"))
    expected = of(steps)
    world = peers(config)
    batches = [iter(loader) for loader in world.loaders]
    evaluation = world.make("val/0")
    assert same(world.take(batches, 5), expected[:5])
    assert same(world.take([iter(loader) for loader in evaluation], 1), held[:1])
    assert same(world.take(batches, 4), expected[5:9])
    assert same(world.take([iter(loader) for loader in evaluation]), held)
    saved = world.loaders[3].state_dict()
    assert saved["step"] == expected[8].info.step + expected[8].info.is_last_in_step
    for loader in world.loaders:
        loader.load_state_dict(saved)
    first = next(at for at, mb in enumerate(expected) if mb.info.step == saved["step"])
    assert same(world.take([iter(loader) for loader in world.loaders], 1), expected[first : first + 1])
    # A loop that was broken off inside a step begins it anew.
    first += expected[first].info.is_last_in_step
    assert same(world.take([iter(loader) for loader in world.loaders]), expected[first:])
    assert world.loaders[2].certificate == steps[-1].certificate
    for loader in evaluation:
        loader.close()


def test_passes_and_changes(mixed: Corpus, peers: Callable[..., Peers]) -> None:
    config = config_for(mixed, sources=mixed.sources(epochs=None), mixture_lead_steps=8)
    with World(config, passes=True) as world:
        passes = []
        for _ in range(2):
            passes.append(of(world.steps()))
            world.reiterate()
    shared = peers(config, passes=True)
    for expected in passes:
        assert same(shared.take([iter(loader) for loader in shared.loaders]), expected)

    with World(config) as world:
        for loader in world.loaders:
            loader.set_mixture({"web": 3.0}, at_step=8)
        changed = of(world.steps(12))
    shared = peers(config)
    assert [loader.set_mixture({"web": 3.0}, at_step=8) for loader in shared.loaders] == [8, None, None, None]
    assert same(shared.take([iter(loader) for loader in shared.loaders], len(changed)), changed)


@pytest.mark.parametrize(
    ("tree", "axes"),
    [
        pytest.param(ClientPlaceTree.from_sizes(pp=2, dp=2, tp=2), ("pp", "tp"), id="PP2 x DP2 x TP2"),
        pytest.param(
            ClientPlaceTree.from_ranks(np.arange(8).reshape(2, 2, 2)[:, ::-1], ("cp", "tp", "dp")),
            ("cp", "tp"),
            id="DP2 x CP2 x TP2, permuted",
        ),
    ],
)
def test_every_place_gets_its_part_of_what_one_rank_fetched(
    with_fields: Corpus, tree: ClientPlaceTree, axes: tuple[str, ...]
) -> None:
    rows = PackedRows(SEQ_LEN, 2, pack_ahead=16, token_fields=("loss_mask",), shift_labels=True, pad_documents_to=4)
    config = config_for(with_fields, rows=rows, global_batch_size=8, context_parallel="head_tail")
    expected = places(LoadingSession(config, tree=tree), tree, lambda rank: None)
    jobs = {ranks: Ranks(len(ranks)) for ranks in dict.fromkeys(tree.peers(rank, axes) for rank in tree.ranks)}
    assert [len(ranks) for ranks in jobs] == [4, 4]

    def peers_of(rank: int) -> PeerGroup:
        ranks = tree.peers(rank, axes)
        return PeerGroup(ranks, rank, jobs[ranks].groups[ranks.index(rank)]._broadcast)

    groups = {rank: peers_of(rank) for rank in tree.ranks}
    session = LoadingSession(config, tree=tree)
    found = places(session, tree, groups.__getitem__)
    for rank in tree.ranks:
        assert same(found[rank][0], expected[rank][0])
        assert found[rank][1] == expected[rank][1]
    kinds = {tuple(sorted(found[rank][0][0].tensors)) for rank in tree.ranks}
    assert len(kinds) == tree.size("pp"), "stages have fields of their own"
    for job in jobs.values():
        job.close()


def places(
    session: LoadingSession, tree: ClientPlaceTree, peers_of: Callable[[int], PeerGroup | None]
) -> list[tuple[list[Microbatch], Any]]:
    """All microbatches of each rank, and its last state; with peers, one fetch of each window for each group."""
    session.peers = peers_of  # type: ignore[method-assign]
    loaders = [MegaScaleLoader(session.config, tree, rank, session=session) for rank in tree.ranks]
    with ThreadPoolExecutor(tree.world_size) as pool:
        batches = list(pool.map(lambda loader: [microbatch(batch) for batch in loader], loaders))
    windows = -(-(batches[0][-1].info.step + 1) // WINDOW)
    fetches = session.stats()["constructor/0"]["role"]["fetches"]
    assert fetches == windows * (tree.num_groups if peers_of(0) else tree.world_size)
    states = [without_run(json.loads(json.dumps(loader.state_dict()))) for loader in loaders]
    for loader in loaders:
        loader.close()
    session.close()
    return list(zip(batches, states, strict=True))
