"""What no other test of the laws looks at: local state (3), idle ranks (4), metadata only (5), deaths of roles (10)."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_lightning import LoaderConfig, MegaScaleLoader, MegaScaleWarning, PackedRows, PaddedRows, Source
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.types import MetaBlock

from .conftest import SEQ_LEN
from .data import Corpus, make_corpus
from .harness import World, microbatch, run_world, without_run

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

STEPS = 24


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=16),
        "global_batch_size": 8,
        "seed": 5,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 2000,
        "prefetch_steps": 2,
        "plan_window": 3,
        "num_loaders": 2,
    }
    return LoaderConfig(**(base | changes))


@pytest.fixture(scope="module")
def undisturbed(mixed: Corpus) -> list[str]:
    """Certificates of the steps when nothing dies."""
    return [step.certificate for step in run_world(config_for(mixed), steps=STEPS)]


class Unreachable:
    """Stands where a runtime or a port stood: whoever calls it fails."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def test_the_state_is_local(mixed: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 3: `state_dict` and `load_state_dict` meet no other rank and call no role, in the middle of a run too."""
    meetings: list[Any] = []

    def broadcast(value: Any) -> Any:
        meetings.append(value)
        return value

    session = LoadingSession(config_for(mixed), broadcast=broadcast)
    loader = MegaScaleLoader(session.config, session=session)
    iterator = iter(loader)
    for _ in range(2 * loader.num_microbatches):
        microbatch(next(iterator))
    meetings.clear()
    with monkeypatch.context() as patch:
        patch.setattr(session, "port", Unreachable())
        patch.setattr(session, "_runtime", Unreachable())
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["step"] == 2
        loader.load_state_dict(state)
        assert without_run(loader.state_dict()) == without_run(state)
        assert not meetings
    loader.close()
    session.close()


def empty_out(value: Any) -> None:
    """Clear every dict and list in a value."""
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            empty_out(inner)
        value.clear()


def test_whoever_has_a_state_may_do_with_it_what_he_likes(mixed: Corpus) -> None:
    """Law 3: no part of it is shared with the loader, with another state, or with the state that was loaded."""
    with World(config_for(mixed)) as world:
        (loader,) = world.loaders
        world.steps(3)
        expected = json.dumps(loader.state_dict())
        empty_out(loader.state_dict())
        assert json.dumps(loader.state_dict()) == expected
        loaded = json.loads(expected)
        loader.load_state_dict(loaded)
        empty_out(loaded)
        assert json.dumps(loader.state_dict()) == expected


@pytest.mark.parametrize("plan_window", [1, 3])
@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_ranks_with_nothing_but_filler_go_on_to_the_end(tmp_path: Path, kind: Any, plan_window: int) -> None:
    """Law 4: one row is left for four ranks of two microbatches each; all of them get the step, and its counts."""
    corpus = make_corpus(tmp_path, {"web": 17}, seq_len=8, lengths={"web": [8] * 17})
    config = config_for(
        corpus,
        sources=corpus.sources(epochs=1),
        rows=kind(8, 1),
        part_bytes=10**6,
        plan_window=plan_window,
        prefetch_steps=0,
    )
    with World(config, 4) as world:
        steps = world.steps()
        assert world.state()["ended"]
    assert [len(step.rows) for step in steps] == [8, 8, 1]
    for step, targets in zip(steps, (56, 56, 7), strict=True):
        assert [len(rank) for rank in step.ranks] == [2] * 4
        assert {mb.info.step_loss_tokens for mb in step.microbatches()} == {targets}
        assert [rank[-1].info.is_last_in_stream for rank in step.ranks] == [step.number == 2] * 4
    assert sorted(sum(mb.info.num_loss_tokens for mb in rank) for rank in steps[2].ranks) == [0, 0, 0, 7]


class Witness:
    """A role with somebody who notes all that goes in, and all that it wants."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self.given: list[Any] = []
        self.wanted: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._role, name)

        def call(*args: Any) -> Any:
            self.given += args
            found = method(*args)
            if name == "wants":
                self.wanted += found
            return found

        return call


@pytest.mark.parametrize("rows", [PackedRows(512, 2, pack_ahead=8), PaddedRows(512, 2)], ids=["packed", "padded"])
def test_no_payload_goes_through_the_planner(tmp_path: Path, rows: Any) -> None:
    """Law 5: it wants nothing but descriptions, and is given some 50 bytes for a sample of 2 KB."""
    corpus = make_corpus(
        tmp_path, {"web": 120, "code": 120}, seq_len=512, lengths=dict.fromkeys(("web", "code"), [500] * 120)
    )
    with World(config_for(corpus, rows=rows, sources=corpus.sources(epochs=1), part_bytes=20_000)) as world:
        runtime = world.loaders[0]._session._runtime
        witness = runtime._roles["planner"] = Witness(runtime._roles["planner"])
        assert len(world.steps()) == 30
    assert {call.method for call in witness.wanted} == {"describe", "release"}
    described = [value for value in witness.given if isinstance(value, MetaBlock)]
    assert sum(len(meta.pieces) for meta in described) == 240
    for meta in described:
        assert len(pickle.dumps(meta)) < 100 * len(meta.pieces) + 1500
    for value in witness.given:
        if not isinstance(value, MetaBlock):
            assert len(pickle.dumps(value)) < 5000, f"{type(value).__name__} is large"


@pytest.mark.parametrize("victim", ["planner", "constructor/0", "loader/0"])
def test_a_role_that_dies_before_every_step_changes_no_batch(
    mixed: Corpus, undisturbed: list[str], victim: str
) -> None:
    """Law 10, with the real roles and the real client, on one rank and on two."""
    for dp in (1, 2):
        found = []
        with World(config_for(mixed), dp) as world:
            runtime = world.loaders[0]._session._runtime
            for _ in range(STEPS):
                found += [step.certificate for step in world.steps(1)]
                runtime.kill(victim)
        assert found == undisturbed


def test_roles_that_die_in_the_middle_of_calls_change_no_batch(mixed: Corpus, undisturbed: list[str]) -> None:
    """Every fifth call finds one of the roles dead, its own target or its asker among them."""
    with World(config_for(mixed)) as world:
        runtime = world.loaders[0]._session._runtime
        victims = itertools.cycle(["loader/1", "planner", "constructor/0", "loader/0"])
        calls, kills = itertools.count(1), []

        def fault(target: str, method: str, args: tuple[Any, ...]) -> None:
            if next(calls) % 5 == 0 and len(kills) < 40:
                kills.append(next(victims))
                runtime.kill(kills[-1])

        runtime._fault = fault
        runtime._park_s = 0.05  # a question whose role died under it is asked again no sooner
        assert [step.certificate for step in world.steps(STEPS)] == undisturbed
        assert len(kills) >= 12


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.filterwarnings("default::megascale_lightning.errors.MegaScaleWarning")
@pytest.mark.slow
def test_torch_in_an_actor_is_worth_one_warning(tmp_path: Path) -> None:
    """Law 8: a user's transform may bring torch along; the warning says what that costs and what to do."""
    from .torch_transform import shift

    corpus = make_corpus(tmp_path, {"web": 20}, seq_len=SEQ_LEN)
    source = replace(corpus.sources(epochs=1)[0], transform=shift)
    config = LoaderConfig(sources=[source], rows=PackedRows(SEQ_LEN, 2), global_batch_size=2, num_loaders=1)
    with pytest.warns(MegaScaleWarning, match=r"loader/0: .*530 MB.*Move the function") as caught:
        loader = MegaScaleLoader(config)
    with loader:
        assert len(caught) == 1
        assert next(iter(loader))["megascale"].step == 0


class TestRandomStates:
    """Law 9 beside a training step that draws from the global random states itself."""

    def read(self, runtime_draws: int, tmp_path: Path, **more: Any) -> tuple[list[float], list[float]]:
        (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 60)

        def draw(sample: dict[str, Any]) -> dict[str, Any]:
            drawn = sum(random.random() for _ in range(300)) + float(torch.rand(()))
            return {"input_ids": [1, 2, 3], "drawn": drawn}

        config = LoaderConfig(
            sources=[Source("a", str(tmp_path / "a.jsonl"), transform=draw)],
            rows=PaddedRows(8, 2, sample_fields=("drawn",)),
            runtime="local",
            part_bytes=100,
            **more,
        )
        random.seed(0)
        torch.manual_seed(0)
        given, own = [], []
        with MegaScaleLoader(config) as loader:
            for batch in itertools.islice(loader, 60):
                given += batch["drawn"].tolist()
                own += [random.random() + float(torch.rand(())) for _ in range(runtime_draws)]
        return given, own

    @pytest.fixture(autouse=True)
    def eager_threads(self) -> Iterator[None]:
        """Threads take turns as often as they can."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(before)

    def test_neither_disturbs_the_other(self, tmp_path: Path) -> None:
        quiet, _ = self.read(0, tmp_path)
        random.seed(0)
        torch.manual_seed(0)
        expected = [random.random() + float(torch.rand(())) for _ in range(60 * 200)]
        for _ in range(3):
            given, own = self.read(200, tmp_path)
            assert given == quiet
            assert own == expected
