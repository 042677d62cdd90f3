"""The actors' own classes, called in this process without a Ray."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.rows import PackedRows
from megascale_lightning.runtime.plan import RoleRecipe
from megascale_lightning.runtime.ray_actors import LoaderActor, SharedObjects, Wiring
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PIECE, BatchWindow, PartKey, TakeRequest

pytestmark = pytest.mark.timeout(60)

ENTERED, GO_ON = threading.Event(), threading.Event()


@pytest.fixture
def gates() -> Iterator[None]:
    ENTERED.clear()
    GO_ON.clear()
    yield
    GO_ON.set()


def gated(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    ENTERED.set()
    GO_ON.wait(30)
    return {"input_ids": [sample["n"]]}


def loader_of_two_sources() -> SourceLoader:
    """The second one's transform waits for `GO_ON`."""
    sources = [
        Source("free", [{"input_ids": [7, 8, 9]}], format="dataset"),
        Source("slow", [{"n": 1}], format="dataset", transform=gated),
    ]
    loaded = [LoadedSource(source, build_manifest(source)) for source in sources]
    return SourceLoader({"train": loaded}, {"train": PackedRows(16, 1)}, 0, 4, 1 << 20, 1 << 20)


@pytest.mark.usefixtures("gates")
def test_a_slow_part_does_not_hold_back_what_is_finished() -> None:
    """`take` and the counters answer while `describe` is at work, or one slow source would stop all batches."""
    recipe = RoleRecipe(name="loader/0", factory=loader_of_two_sources)
    wiring = Wiring(run="run", namespace="namespace", restart_timeout=1.0, sys_path=())
    actor = LoaderActor("loader/0", pickle.dumps(recipe), wiring)
    free, slow = (PartKey("train", source, 0, 0, 0) for source in (0, 1))
    meta = actor.request("describe", (free,), 1.0)
    with ThreadPoolExecutor(2) as pool:
        try:
            describing = pool.submit(actor.request, "describe", (slow,), 1.0)
            assert ENTERED.wait(10)
            taking = pool.submit(actor.request, "take", ([TakeRequest(free, meta.pieces)],), 1.0)
            assert taking.result(10).tokens["input_ids"].values.tolist() == [7, 8, 9]
            assert pool.submit(actor.stats).result(10)["role"]["parts"] == 1
            assert not describing.done()
        finally:
            GO_ON.set()
        assert describing.result(10).pieces["length"].tolist() == [1]
    actor.stop()


def window(step: int) -> BatchWindow:
    return BatchWindow(
        stream="train",
        generation="g",
        first_step=step,
        num_steps=0,
        num_microbatches=1,
        tokens={},
        samples={},
        pieces=np.zeros(0, PIECE),
        row_offsets=np.zeros(1, np.int64),
        step_loss_tokens=np.zeros(0, np.int64),
        states=(),
    )


def test_a_window_is_stored_once_and_forgotten_with_it() -> None:
    stored: list[int] = []

    def put(found: BatchWindow) -> str:
        stored.append(found.first_step)
        return f"reference {found.first_step}"

    shared = SharedObjects(put)
    one, two = window(1), window(2)
    assert [shared.reference(found) for found in (one, two, one, one)] == [f"reference {n}" for n in (1, 2, 1, 1)]
    assert stored == [1, 2]
    assert len(shared) == 2
    del one
    assert len(shared) == 1
