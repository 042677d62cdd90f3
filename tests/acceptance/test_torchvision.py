"""torchvision's random transforms on real pictures: the same pixels with any workers, through Ray, and over a death."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import CollatedRows, ConfigError, LoaderConfig, MegaScaleLoader, Source

from .pictures import augment

pytest.importorskip("torchvision")
skimage = pytest.importorskip("skimage")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

STEPS, BATCH = 8, 4
PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "color.png", "rocket.jpg")


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A list of the pictures that scikit-image comes with, each some times: other crops of it."""
    folder = Path(skimage.__file__).parent / "data"
    found = [folder / name for name in PICTURES if (folder / name).exists()]
    assert len(found) >= 3, f"{folder} has few pictures"
    path = tmp_path_factory.mktemp("pictures") / "list.jsonl"
    lines = [json.dumps({"name": f"{one.name}/{copy}", "path": str(one)}) for copy in range(2 * STEPS) for one in found]
    path.write_text("\n".join(lines))
    return str(path)


def config_of(listed: str, executor: str, workers: int | None, runtime: str) -> LoaderConfig:
    source = Source("pictures", listed, transform=augment, executor=executor, num_workers=workers)  # type: ignore[arg-type]
    return LoaderConfig(
        sources=[source],
        rows=CollatedRows(BATCH),
        global_batch_size=BATCH,
        seed=7,
        runtime=runtime,  # type: ignore[arg-type]
        prefetch_steps=1,
        plan_window=1,
        num_loaders=1,
        part_bytes=500,  # a few pictures, so that a new loader has to make some anew
    )


def pixels(config: LoaderConfig, *, kill_at: int | None = None) -> dict[tuple[Any, ...], bytes]:
    """Sample id -> its pixels, of the first steps; `kill_at`: the step before which the loader is killed."""
    found: dict[tuple[Any, ...], bytes] = {}
    with MegaScaleLoader(config) as loader:
        batches = iter(loader)
        victim = -1
        for step in range(STEPS):
            if step == kill_at:
                victim = loader._session.stats()["loader/0"]["pid"]
                os.kill(victim, signal.SIGKILL)
            batch = next(batches)
            assert loader.last_info is not None
            for row, name, tensor in zip(loader.last_info.sample_ids(), batch["name"], batch["pixels"], strict=True):
                found[(*row[0], name)] = tensor.numpy().tobytes()
        if kill_at is not None:
            assert loader._session.stats()["loader/0"]["pid"] != victim
    assert len(set(found.values())) == len(found) == STEPS * BATCH, "each sample has a crop of its own"
    return found


@pytest.fixture(scope="module")
def expected(listed: str) -> dict[tuple[Any, ...], bytes]:
    return pixels(config_of(listed, "inline", None, "local"))


@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers(listed: str, expected: dict[tuple[Any, ...], bytes], workers: int) -> None:
    assert pixels(config_of(listed, "processes", workers, "local")) == expected


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(("executor", "workers"), [("inline", None), ("processes", 1), ("processes", 4)])
def test_through_ray_with_a_kill_in_between(
    listed: str, expected: dict[tuple[Any, ...], bytes], executor: str, workers: int | None
) -> None:
    assert pixels(config_of(listed, executor, workers, "ray"), kill_at=4) == expected


def test_threads_would_share_the_random_states(listed: str) -> None:
    with pytest.raises(ConfigError, match=r"'pictures': executor='threads' needs .*'augment' may draw"):
        config_of(listed, "threads", 4, "local")
