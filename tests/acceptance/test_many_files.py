"""Ten thousand small files in one source: soon begun, each opened a few times at most, every record once."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import LoaderConfig, PackedRows, Source
from megascale_lightning.sources import build_manifest
from megascale_lightning.sources.stores.storage import Storage

from .harness import World, count_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FILES = 10_000
PER_FILE = {"jsonl": 3, "parquet": 3, "txt": 1}
DISTINCT = 100
"""Files of different content; the others are further names of these."""


def write(folder: Path, suffix: str) -> None:
    for index in range(DISTINCT):
        path = folder / f"{index:05}.{suffix}"
        records = [{"input_ids": [1 + 3 * index + offset]} for offset in range(PER_FILE[suffix])]
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(records), path)
        elif suffix == "jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        else:
            path.write_text(str(1 + 3 * index))
        for number in range(index + DISTINCT, FILES, DISTINCT):
            os.link(path, folder / f"{number:05}.{suffix}")


def number_in(sample: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [int(sample["text"])]}


@pytest.mark.parametrize("suffix", PER_FILE)
def test_ten_thousand_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    write(tmp_path, suffix)
    settings: dict[str, Any] = {}
    if suffix == "txt":
        settings = {"transform": number_in, "format_options": {"records": "file"}}
    source = Source("many", str(tmp_path / f"*.{suffix}"), epochs=1, **settings)
    assert len(pickle.dumps(build_manifest(source))) < 150 * FILES, "bytes of the manifest"

    opened: Counter[str] = Counter()
    really_open = Storage.open

    def counted_open(storage: Storage, info: Any) -> Any:
        opened[info.path] += 1
        return really_open(storage, info)

    monkeypatch.setattr(Storage, "open", counted_open)
    config = LoaderConfig(sources=[source], rows=PackedRows(64, 2), global_batch_size=16, runtime="local")
    with World(config) as world:
        begun = time.monotonic()
        steps = world.steps(1)
        assert time.monotonic() - begun < 60, "seconds to the first step; 1 to 5 are usual"
        steps += world.steps()
        state = world.state()
    tokens = count_tokens(steps)
    assert tokens == {1 + 3 * i + j: FILES // DISTINCT for i in range(DISTINCT) for j in range(PER_FILE[suffix])}
    assert len({piece[2:4] for step in steps for piece in step.pieces()}) == FILES * PER_FILE[suffix]
    assert max(opened.values(), default=0) <= 2, "once to list it, once to read it"
    assert len(json.dumps(state)) < 10_000
