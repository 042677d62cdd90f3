"""Files of records with an id, of several formats, that tests join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from tests.sources.tars import tar_bytes

KINDS = ("parquet", "arrow", "jsonl", "tar")


def write(path: Path, kind: str, columns: dict[str, Any], *, unit_rows: int = 7) -> str:
    """One file of these columns. In a tar, `__key__` is the key of a sample, and texts are members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_suffix(f".{kind}")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if kind == "parquet":
        pq.write_table(pa.table(columns), path, row_group_size=unit_rows)
    elif kind == "arrow":
        feather.write_feather(pa.table(columns), str(path), compression="uncompressed", chunksize=unit_rows)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        members = [(f"{row['__key__']}.{name}", text.encode()) for row in rows for name, text in row.items()]
        path.write_bytes(tar_bytes([member for member in members if not member[0].endswith(".__key__")]))
    return str(path)
