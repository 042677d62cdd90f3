"""Raw text of the tokenizer benchmark, Python's own standard library, and a tokenizer trained on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FORMATS", "corpus_files", "read_texts", "tokenizer_path", "write_corpus"]

FORMATS = ("jsonl", "parquet")
FILES = 8
"""Of each format; a multiple of the workers, so that all have equal shares."""
DOCUMENT_CHARACTERS = 4000
ROW_GROUP = 250
VOCABULARY = 16_384
TRAINED_ON = 4_000_000
"""Characters."""


def corpus_files(root: Path, kind: str) -> list[Path]:
    """The files of a format, in order."""
    return sorted(root.glob("*.jsonl.zst" if kind == "jsonl" else "*.parquet"))


def tokenizer_path(root: Path) -> Path:
    """The trained tokenizer."""
    return root / "tokenizer.json"


def read_texts(path: Path) -> Iterator[list[str]]:
    """The documents of a file, some hundred at a time, as a plain reader would."""
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=["text"]).column("text").to_pylist()
        return
    with pa.CompressedInputStream(pa.OSFile(str(path)), "zstd") as stream:
        texts = [json.loads(line)["text"] for line in stream.read().splitlines()]
    for start in range(0, len(texts), ROW_GROUP):
        yield texts[start : start + ROW_GROUP]


def write_corpus(root: Path, characters: int) -> None:
    """Write text of about so many characters in every format, and train a tokenizer; what is there is kept."""
    root.mkdir(parents=True, exist_ok=True)
    if tokenizer_path(root).exists():
        return
    documents = list(_documents(characters))
    for index in range(FILES):
        share = documents[index::FILES]
        table = pa.table({"name": [name for name, _ in share], "text": [text for _, text in share]})
        pq.write_table(table, root / f"{index:03d}.parquet", row_group_size=ROW_GROUP, compression="zstd")
        lines = "".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in share)
        with pa.CompressedOutputStream(pa.OSFile(str(root / f"{index:03d}.jsonl.zst"), "wb"), "zstd") as stream:
            stream.write(lines.encode())
    _train(root, [text for _, text in documents])


def _documents(characters: int) -> Iterator[tuple[str, str]]:
    """Name and text: files cut at line ends, over and over until there is enough."""
    paths = [path for path in sorted(Path(os.__file__).parent.rglob("*.py")) if "site-packages" not in path.parts]
    left = characters
    for path in cycle(paths):
        for text in _cut(path.read_text("utf-8", errors="replace")):
            yield path.name, text
            left -= len(text)
            if left <= 0:
                return


def _cut(text: str) -> Iterator[str]:
    lines, size = [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= DOCUMENT_CHARACTERS:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def _train(root: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    step = max(1, sum(map(len, texts)) // TRAINED_ON)
    tokenizer.train_from_iterator(texts[::step], trainer)
    tokenizer.save(str(tokenizer_path(root)))
