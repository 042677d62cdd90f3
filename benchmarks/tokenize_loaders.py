"""What the tokenizer benchmark measures: `encode_batch` alone, PyTorch's DataLoader, and ours through Ray."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenize_corpus import corpus_files, read_texts, tokenizer_path

__all__ = ["PAD_ID", "Tokens", "encode_alone", "our_batches", "plain_batches"]

ROWS, SEQ_LEN, MICROBATCHES = 4, 2048, 8
"""Rows of a microbatch, tokens of a row, microbatches of a step."""
PAD_ID = 0


@cache
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


class Tokens:
    """A `transform_batched`: texts to token ids. The tokenizer is loaded where it runs, once in a process."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __call__(self, columns: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": _tokenizer(self.path).encode_batch(columns["text"])}


def encode_alone(root: Path, kind: str) -> Iterator[int]:
    """Tokens of each call of `encode_batch` on texts that are in memory: nothing is read, converted or packed."""
    tokenizer = _tokenizer(str(tokenizer_path(root)))
    batches = [texts for path in corpus_files(root, kind) for texts in read_texts(path)]
    yield 0
    for texts in batches:
        yield sum(map(len, tokenizer.encode_batch(texts)))


def plain_batches(root: Path, kind: str, workers: int) -> Iterator[dict[str, Any]]:
    """One epoch of rows, tokenized in the workers of a `DataLoader`."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Packed(IterableDataset):  # type: ignore[type-arg]
        """Rows of documents one after another, next-fit; a document longer than a row is cut."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            info = get_worker_info()
            files = corpus_files(root, kind)[info.id :: info.num_workers] if info else corpus_files(root, kind)
            tokenizer = _tokenizer(str(tokenizer_path(root)))
            rows: list[Any] = []
            row, position, at = _empty_row()
            for texts in chain.from_iterable(map(read_texts, files)):
                for encoding in tokenizer.encode_batch(texts):
                    ids = np.array(encoding.ids, np.int64)
                    for start in range(0, len(ids), SEQ_LEN):
                        piece = ids[start : start + SEQ_LEN]
                        if at + len(piece) > SEQ_LEN:
                            rows.append((row, position))
                            row, position, at = _empty_row()
                        row[at : at + len(piece)] = piece
                        position[at : at + len(piece)] = np.arange(len(piece))
                        at += len(piece)
                        if len(rows) == ROWS:
                            yield _batch(rows)
                            rows = []
            yield _batch([*rows, (row, position)])

    def _empty_row() -> tuple[Any, Any, int]:
        return np.full(SEQ_LEN, PAD_ID, np.int64), np.zeros(SEQ_LEN, np.int64), 0

    def _batch(rows: list[Any]) -> dict[str, Any]:
        return {
            name: torch.from_numpy(np.stack([row[at] for row in rows]))
            for at, name in enumerate(("input_ids", "position_ids"))
        }

    yield from DataLoader(Packed(), batch_size=None, num_workers=workers)


def our_batches(root: Path, kind: str, threads: int) -> Iterator[dict[str, Any]]:
    """One epoch through Ray; empty ones before it, everything started and nothing read, and behind it."""
    from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows, Source

    source = Source(
        "text",
        [str(path) for path in corpus_files(root, kind)],
        columns=("text",),
        transform_batched=Tokens(tokenizer_path(root)),
        executor="threads",
        num_workers=threads,
        thread_safe=True,
        epochs=1,
    )
    config = LoaderConfig(
        sources=[source],
        rows=PackedRows(SEQ_LEN, ROWS, pad_id=PAD_ID),
        global_batch_size=ROWS * MICROBATCHES,
        num_loaders=1,
        # Small parts, as the corpus is small: in a large one they are 64 MB. Counted as stored, and zstd holds text
        # four times as long. A file of JSON lines of this size is one part.
        part_bytes={"jsonl": 1 << 20, "parquet": 4 << 20}[kind],
        window_units=8,
    )
    with MegaScaleLoader(config) as loader:
        yield {}
        yield from loader
        yield {}  # before the loader ends what it started
