"""The state is small: with hundreds of sources, and however often the mixture was changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows, Source

LIMIT = 64 << 10


def write_sources(root: Path, count: int, records: int, longest: int) -> list[Source]:
    rng = np.random.default_rng(0)
    weights = rng.random(count)
    found = []
    for index in range(count):
        path = root / f"source-{index:03d}.jsonl"
        lengths = rng.integers(1, longest, records)
        path.write_text("".join(json.dumps({"input_ids": [1] * int(length)}) + "\n" for length in lengths))
        found.append(Source(path.stem, str(path), weight=float(weights[index])))
    return found


def test_306_sources(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, 306, 30, 300)
    config = LoaderConfig(sources=sources, rows=PackedRows(2048, 2), global_batch_size=8, runtime="local")
    rng = np.random.default_rng(1)
    with MegaScaleLoader(config) as loader:
        steps = iter(loader)
        while loader.step < 12:
            next(steps)
        state = loader.state_dict()
        assert state["carry"]["count"] > 400
        assert len(json.dumps(state)) < LIMIT
        loader.set_mixture({source.name: float(rng.random()) for source in sources})
        assert len(json.dumps(loader.state_dict())) < LIMIT
        while loader.step < 12 + 33:
            next(steps)
        state = loader.state_dict()
    assert state["mixture"]["declared"] is not None, "the weights in force are others now"
    assert len(json.dumps(state)) < LIMIT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_change_after_each_of_100_000_steps(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, 8, 50, 8)
    config = LoaderConfig(sources=sources, rows=PackedRows(8, 1, pack_ahead=4), global_batch_size=1, runtime="local")
    early, largest = 0, 0
    with MegaScaleLoader(config) as loader:
        steps = iter(loader)
        for number in range(100_000):
            next(steps)
            loader.set_mixture({source.name: 1 + (7 * number + i) % 13 / 3 for i, source in enumerate(sources)})
            if number % 1000 == 100:
                size = len(json.dumps(loader.state_dict()))
                early, largest = early or size, max(largest, size)
        assert len(loader.state_dict()["mixture"]["changes"]) == config.mixture_lead_steps + 1
    assert largest < 8 << 10
    assert largest < 1.1 * early
