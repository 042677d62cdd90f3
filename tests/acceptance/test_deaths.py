"""`kill -9` of a role in the middle of a run: the same steps follow (law 10); the loaders never saw torch (law 8)."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from megascale_lightning import LoaderConfig, PackedRows

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import World

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.usefixtures("shared_ray")]

STEPS = 40


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=16),
        "global_batch_size": 8,
        "seed": 5,
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
    with World(config_for(mixed, runtime="local"), 1) as world:
        return [step.certificate for step in world.steps(STEPS)]


@pytest.mark.parametrize(
    "victim",
    ["loader/0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("loader/1", "planner", "constructor/0"))],
)
def test_a_killed_role_changes_no_batch(mixed: Corpus, undisturbed: list[str], victim: str) -> None:
    with World(config_for(mixed), 1) as world:
        found = [step.certificate for step in world.steps(11)]
        session = world.loaders[0]._session
        before = session.stats()[victim]["pid"]
        os.kill(before, signal.SIGKILL)
        found += [step.certificate for step in world.steps(STEPS - 11)]
        assert found == undisturbed
        assert session.stats()[victim]["pid"] != before


@pytest.mark.slow
def test_every_role_killed_again_and_again(mixed: Corpus, undisturbed: list[str]) -> None:
    """Both loaders at once, then the constructor, then the planner, in the middle of steps."""
    with World(config_for(mixed), 1) as world:
        session = world.loaders[0]._session
        found = []
        for victims in (["loader/0", "loader/1"], ["constructor/0"], ["planner"], []):
            found += [step.certificate for step in world.steps(STEPS // 4)]
            stats = session.stats()
            for victim in victims:
                os.kill(stats[victim]["pid"], signal.SIGKILL)
        assert found == undisturbed


def test_idle_roles_are_light(mixed: Corpus) -> None:
    """An actor costs numpy, pyarrow and Ray: under 75 MB of its own, and no torch among its modules."""
    with World(config_for(mixed), 1) as world:
        stats = world.loaders[0]._session.stats()
        for name, role in stats.items():
            process = psutil.Process(role["pid"])
            uss = process.memory_full_info().uss / 2**20
            assert uss < 75, f"{name} has {uss:.0f} MB of its own"
            maps = " ".join(found.path for found in process.memory_maps())
            assert "libtorch" not in maps, f"{name} has loaded torch"
