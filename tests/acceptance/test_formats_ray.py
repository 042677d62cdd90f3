"""Many formats at once over Ray: the order of one process, loaders killed and replaced, resume on other ranks."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import LoaderConfig, PackedRows
from megascale_lightning.sources.formats.csv import format as csv
from megascale_lightning.sources.formats.webdataset import format as webdataset
from megascale_lightning.sources.stores import plaintext

from .formatfiles import FOLDER, tokens_of
from .formats import CASES, Made
from .harness import Step, World, count_tokens, run_world

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

NAMES = {
    "parquet-lists",
    "arrow-stream",
    "feather-lz4",
    "jsonl-zst-sliced",
    "csv-sliced",
    "text-paragraphs",
    "text-files",
    "tar-gz-sliced",
    "energon",
    "megatron",
    "mds-packed_zstd",
    "litdata-rows",
    "images",
    "hugging-face",
    "iterable",
}
EPOCHS = 2


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Made]]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (plaintext, csv, webdataset):
            patch.setattr(module, "SLICED_BYTES", 100)
        root: Path = tmp_path_factory.mktemp("formats")
        yield [case.make(root / case.name / FOLDER) for case in CASES if case.name in NAMES]


def config_of(sources: list[Made], **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": [made.tokens(epochs=EPOCHS, weight=made.case.count) for made in sources],
        "rows": PackedRows(32, 2, pack_ahead=16),
        "global_batch_size": 8,
        "seed": 3,
        "window_units": 2,
        "part_bytes": 1500,
        "prefetch_steps": 2,
        "plan_window": 3,
    }
    return LoaderConfig(**(base | changes))


@pytest.fixture(scope="module")
def undisturbed(sources: list[Made]) -> list[Step]:
    """In this process, with one loader that reads nothing ahead."""
    steps = run_world(config_of(sources, runtime="local", num_loaders=1, prefetch_steps=0, plan_window=1))
    assert len(steps) > 15
    return steps


def assert_same(found: list[Step], expected: list[Step]) -> None:
    assert [step.certificate for step in found] == [step.certificate for step in expected]
    assert [count_tokens([step]) for step in found] == [count_tokens([step]) for step in expected]


def test_they_are_all_there_once_in_each_epoch(sources: list[Made], undisturbed: list[Step]) -> None:
    assert {made.case.name for made in sources} == NAMES
    wanted: Counter[int] = Counter()
    for made in sources:
        for number in range(made.case.count):
            wanted.update(tokens_of(number) * EPOCHS)
    assert count_tokens(undisturbed) == wanted
    records = Counter(piece[0] for step in undisturbed for piece in step.pieces())
    assert records == {made.case.name: EPOCHS * made.case.count for made in sources}


def test_killed_loaders_change_no_batch(sources: list[Made], undisturbed: list[Step]) -> None:
    """Each of three alone, then all at once."""
    found: list[Step] = []
    with World(config_of(sources, num_loaders=3), 2) as world:
        session = world.loaders[0]._session
        for victims in (["loader/0"], ["loader/1"], ["loader/2"], ["loader/0", "loader/1", "loader/2"]):
            found += world.steps(3)
            stats = session.stats()
            for victim in victims:
                os.kill(stats[victim]["pid"], signal.SIGKILL)
        found += world.steps()
    assert_same(found, undisturbed)


def test_resume_on_other_ranks_and_loaders(sources: list[Made], undisturbed: list[Step]) -> None:
    with World(config_of(sources, num_loaders=1, prefetch_steps=4, plan_window=8), 1, keep_states=True) as world:
        found = world.steps(7)
    with World(config_of(sources, num_loaders=2), 4, state=found[-1].state) as world:
        found += world.steps()
    assert_same(found, undisturbed)
