"""Small real sources on disk whose tokens are running numbers: a token names its sample and its place in it."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_lightning import Source

PAD = 0
"""No sample has this token."""


def loss_mask_of(tokens: np.ndarray) -> np.ndarray:
    """The `loss_mask` written beside the tokens: 0 for every third one."""
    return (tokens % 3 != 0).astype(np.int8)


def labels_of(tokens: np.ndarray) -> np.ndarray:
    """The user's own `labels` written beside the tokens."""
    return tokens + 1_000_000


def score_of(first_token: int) -> float:
    """The per-sample field `score`."""
    return first_token / 2


@dataclass(frozen=True)
class SourceFiles:
    """What was written for one source."""

    name: str
    format: str
    pattern: str
    starts: list[int]
    """First token of each sample, rising."""
    lengths: np.ndarray
    ids: list[tuple[int, int]] | None
    """(unit, row) of each sample where the layout fixes it (Parquet)."""

    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Corpus:
    """Sources on disk, and what is in them."""

    files: dict[str, SourceFiles]
    _order: list[tuple[int, str]] = field(repr=False)
    """(first token of the source, name), rising."""

    def sources(
        self,
        *,
        epochs: int | Mapping[str, int | None] | None = 1,
        weights: Mapping[str, float] | None = None,
        **more: Any,
    ) -> list[Source]:
        """`Source`s over these files."""
        return [
            Source(
                name,
                files.pattern,
                epochs=epochs[name] if isinstance(epochs, Mapping) else epochs,
                weight=1.0 if weights is None else weights[name],
                **more,
            )
            for name, files in self.files.items()
        ]

    def locate(self, token: int) -> tuple[str, int, int]:
        """(source, sample, offset in the sample) of a token."""
        at = bisect.bisect_right(self._order, (token, "\uffff")) - 1
        assert at >= 0, f"token {token} was never written"
        name = self._order[at][1]
        files = self.files[name]
        sample = bisect.bisect_right(files.starts, token) - 1
        offset = token - files.starts[sample]
        assert offset < files.lengths[sample], f"token {token} was never written"
        return name, sample, offset

    def num_tokens(self) -> int:
        return sum(files.num_tokens() for files in self.files.values())

    def tokens(self, name: str) -> np.ndarray:
        """All tokens of a source: a run of numbers."""
        files = self.files[name]
        return np.arange(files.starts[0], files.starts[0] + files.num_tokens())


def draw_lengths(count: int, seq_len: int, rng: np.random.Generator, longest: float = 3.0) -> np.ndarray:
    """Log-normal lengths around seq_len / 5; larger sources have some of 1, seq_len, 2 x seq_len and more."""
    lengths = np.exp(rng.normal(np.log(seq_len / 5), 0.9, count)).astype(np.int64)
    lengths = lengths.clip(1, int(longest * seq_len))
    if count >= 7 and longest > 1:
        special = [1, seq_len, 2 * seq_len, int(longest * seq_len), seq_len + 1]
        lengths[rng.permutation(count)[: len(special)]] = special
    return lengths


def make_corpus(
    root: Path,
    counts: Mapping[str, int] | Sequence[int],
    *,
    seq_len: int,
    seed: int = 0,
    longest: float = 3.0,
    lengths: Mapping[str, Sequence[int]] | None = None,
    fields: Sequence[str] = (),
    formats: Sequence[str] = ("parquet", "jsonl"),
    num_files: int = 3,
) -> Corpus:
    """Write one source per count, formats in turn, each over several files of several row groups.

    `fields` may hold "loss_mask", "labels" (per token) and "score" (per sample).
    """
    if not isinstance(counts, Mapping):
        counts = {f"s{count}": count for count in counts}
    rng = np.random.default_rng(seed)
    first = 1
    written: dict[str, SourceFiles] = {}
    order: list[tuple[int, str]] = []
    for index, (name, count) in enumerate(counts.items()):
        own = np.asarray(lengths[name], np.int64) if lengths else draw_lengths(count, seq_len, rng, longest)
        assert len(own) == count
        starts = first + np.concatenate([[0], np.cumsum(own)[:-1]])
        samples = [_sample(int(a), int(n), fields) for a, n in zip(starts, own, strict=True)]
        kind = formats[index % len(formats)]
        folder = root / name
        folder.mkdir(parents=True)
        writer = _write_parquet if kind == "parquet" else _write_jsonl
        ids = writer(folder, samples, min(num_files, count))
        extension = "parquet" if kind == "parquet" else "jsonl"
        written[name] = SourceFiles(name, kind, str(folder / f"*.{extension}"), starts.tolist(), own, ids)
        order.append((first, name))
        first += int(own.sum())
    return Corpus(written, order)


def _sample(start: int, length: int, fields: Sequence[str]) -> dict[str, Any]:
    tokens = np.arange(start, start + length)
    sample: dict[str, Any] = {"input_ids": tokens.tolist()}
    if "loss_mask" in fields:
        sample["loss_mask"] = loss_mask_of(tokens).tolist()
    if "labels" in fields:
        sample["labels"] = labels_of(tokens).tolist()
    if "score" in fields:
        sample["score"] = score_of(start)
    return sample


_TYPES = {
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int8()),
    "labels": pa.list_(pa.int64()),
    "score": pa.float64(),
}


def _write_parquet(folder: Path, samples: list[dict[str, Any]], num_files: int) -> list[tuple[int, int]]:
    ids: list[tuple[int, int]] = []
    unit = 0
    for index, part in enumerate(np.array_split(np.arange(len(samples)), num_files)):
        rows = [samples[i] for i in part]
        group = max(1, -(-len(rows) // 4))
        schema = pa.schema([(name, _TYPES[name]) for name in rows[0]])
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, folder / f"part-{index:03d}.parquet", row_group_size=group)
        ids.extend((unit + row // group, row % group) for row in range(len(rows)))
        unit += -(-len(rows) // group)
    return ids


def _write_jsonl(folder: Path, samples: list[dict[str, Any]], num_files: int) -> None:
    for index, part in enumerate(np.array_split(np.arange(len(samples)), num_files)):
        text = "".join(json.dumps(samples[i]) + "\n" for i in part)
        (folder / f"part-{index:03d}.jsonl").write_text(text)
