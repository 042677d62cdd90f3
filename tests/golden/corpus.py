"""The corpus of the golden states: JSONL, the same bytes wherever and whenever it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megascale_lightning import Curriculum, LoaderConfig, Mixture, PackedRows, Source

RAMP = Mixture.schedule([(0, {"web": 0.9, "code": 0.1}), (40, {"web": 0.1, "code": 0.9})], interpolate="linear")
"""What the golden state of version 3 was saved with: in the middle of it, before a change at step 32."""


SLOPE = Curriculum("length", [(0, 6), (40, 20)])
"""What the golden state of a curriculum was saved with: in the middle of it, with samples that wait."""


def write_corpus(root: Path) -> None:
    """Two sources of 60 and 90 records, 1 to 23 tokens long; one record is overlong."""
    for name, count, step in (("web", 60, 7), ("code", 90, 5)):
        lengths = [1 + (index * step) % 23 for index in range(count)]
        lengths[count // 2] = 70
        lines = [json.dumps({"input_ids": list(range(1, length + 1))}) + "\n" for length in lengths]
        (root / f"{name}.jsonl").write_text("".join(lines))


def golden_config(root: Path, **more: Any) -> LoaderConfig:
    """What the golden states were saved with."""
    sources = [
        Source("web", str(root / "web.jsonl"), weight=0.7),
        Source("code", str(root / "code.jsonl"), weight=0.3),
    ]
    rows = PackedRows(seq_len=32, micro_batch_size=2, pack_ahead=8)
    settings = {"sources": sources, "rows": rows, "global_batch_size": 4, "runtime": "local", "seed": 3}
    return LoaderConfig(**{**settings, "window_units": 2, "part_bytes": 2000, **more})
