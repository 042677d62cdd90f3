"""A small corpus of three formats, to be put behind a server; imports nothing that an actor should not."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_lightning import Source

__all__ = ["client_of_environment", "remote_sources", "tokens_of_bytes", "write_remote_corpus"]


def write_remote_corpus(root: Path) -> None:
    """`web/*.parquet`, `code/*.jsonl.zst`, `pairs/*.tar`."""
    rng = np.random.default_rng(0)
    for name in ("web", "code", "pairs"):
        (root / name).mkdir(parents=True)
    for index in range(3):
        rows = [{"input_ids": rng.integers(1, 97, rng.integers(5, 60)).tolist()} for _ in range(60)]
        pq.write_table(pa.Table.from_pylist(rows), root / f"web/{index}.parquet", row_group_size=20)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with pa.CompressedOutputStream(str(root / f"code/{index}.jsonl.zst"), "zstd") as stream:
            stream.write(lines)
        with tarfile.open(root / f"pairs/{index}.tar", "w") as tar:
            for number in range(40):
                data = rng.bytes(30)
                member = tarfile.TarInfo(f"{number:04}.bin")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def tokens_of_bytes(sample: dict[str, Any]) -> dict[str, Any]:
    """The only field with bytes, as tokens."""
    (data,) = [value for value in sample.values() if isinstance(value, bytes)]
    return {"input_ids": np.frombuffer(data, np.uint8).astype(np.int32)}


def remote_sources(root: str, **more: Any) -> list[Source]:
    """The three sources below a URL, a path or a bucket."""
    return [
        Source("web", f"{root}/web/*.parquet", **more),
        Source("code", f"{root}/code/{{0..2}}.jsonl.zst", **more),
        Source("pairs", f"{root}/pairs/{{0..2}}.tar", transform=tokens_of_bytes, **more),
    ]


async def client_of_environment(**settings: Any) -> Any:
    """A client that takes its credentials from the environment, as those of the clouds do."""
    import aiohttp

    settings.pop("loop", None)
    return aiohttp.ClientSession(headers={"Authorization": os.environ["MSL_STORE_AUTH"]}, **settings)
