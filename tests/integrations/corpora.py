"""Small sources on disk, and settings over them, for runs of a real trainer in any process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_lightning import MegaScaleDataModule, PackedRows, Source

SEQ_LEN = 32
VOCABULARY = 97


def write_corpus(root: Path) -> None:
    """Two training sources and two held-out ones, Parquet and JSONL, samples of 1 to 70 tokens."""
    rng = np.random.default_rng(0)
    for name, count in {"web": 160, "code": 90, "held-a": 7, "held-b": 12}.items():
        folder = root / name
        folder.mkdir(parents=True)
        lengths = rng.integers(1, 40, count)
        lengths[count // 2] = 70
        samples = [{"input_ids": rng.integers(1, VOCABULARY, length).tolist()} for length in lengths]
        for index, part in enumerate(np.array_split(np.arange(count), 2)):
            rows = [samples[i] for i in part]
            if name in ("web", "held-a"):
                table = pa.Table.from_pylist(rows, schema=pa.schema([("input_ids", pa.list_(pa.int32()))]))
                pq.write_table(table, folder / f"{index}.parquet", row_group_size=16)
            else:
                (folder / f"{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_sources(root: Path, epochs: int | None = None) -> list[Source]:
    return [
        Source("web", str(root / "web/*.parquet"), weight=0.7, epochs=epochs),
        Source("code", str(root / "code/*.jsonl"), weight=0.3, epochs=epochs),
    ]


def held_out(root: Path) -> dict[str, list[Source]]:
    return {
        "a": [Source("held-a", str(root / "held-a/*.parquet"))],
        "b": [Source("held-b", str(root / "held-b/*.jsonl"))],
    }


def real_data(
    root: Path,
    *,
    micro: int = 2,
    epochs: int | None = None,
    kind: type[MegaScaleDataModule] = MegaScaleDataModule,
    **more: Any,
) -> MegaScaleDataModule:
    """A DataModule over a written corpus; `runtime="local"` unless told otherwise."""
    rows = PackedRows(seq_len=SEQ_LEN, micro_batch_size=micro, pack_ahead=16)
    return kind(**{"sources": train_sources(root, epochs), "rows": rows, "runtime": "local", "window_units": 4, **more})
