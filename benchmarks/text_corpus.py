"""The data of the text benchmark: pre-tokenized Parquet sources of log-normal lengths, the same on every run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["NUM_SOURCES", "PAD_ID", "WEIGHTS", "CorpusSize", "corpus_files", "write_corpus"]

NUM_SOURCES = 8
WEIGHTS = tuple(float(weight) for weight in range(NUM_SOURCES, 0, -1))
"""Share of each source in the mixture, by samples, not normalised."""
PAD_ID = 0
"""No document holds this id, so that padding can be told from tokens."""
VOCABULARY = 50_257
MAX_LENGTH = 4096
LOG_MEAN, LOG_SIGMA = 5.87, 1.0
"""Of the natural logarithm of the lengths; cut at MAX_LENGTH they are 570 tokens long on average."""


@dataclass(frozen=True)
class CorpusSize:
    """How much of it there is."""

    files: int = 4
    """Files of one source; a multiple of every number of workers, so that all workers have equal shares."""
    row_groups: int = 3
    """Row groups of one file."""
    documents: int = 2048
    """Documents of one row group."""


def source_name(source: int) -> str:
    """Name of a source, and of its folder."""
    return f"source{source}"


def corpus_files(root: Path) -> dict[str, list[Path]]:
    """Source name -> its files, in order."""
    return {source_name(s): sorted((root / source_name(s)).glob("*.parquet")) for s in range(NUM_SOURCES)}


def write_corpus(root: Path, size: CorpusSize) -> None:
    """Write the sources below `root`; files that are there already are kept.

    Each file has one column `input_ids`, list<int32>, ids from 1 to 50,256.
    """
    for source in range(NUM_SOURCES):
        folder = root / source_name(source)
        folder.mkdir(parents=True, exist_ok=True)
        for file in range(size.files):
            path = folder / f"{file:03d}.parquet"
            if not path.exists():
                _write_file(path, np.random.default_rng([source, file]), size)


def _write_file(path: Path, rng: np.random.Generator, size: CorpusSize) -> None:
    num_documents = size.row_groups * size.documents
    lengths = np.clip(rng.lognormal(LOG_MEAN, LOG_SIGMA, num_documents), 1, MAX_LENGTH).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = rng.integers(1, VOCABULARY, offsets[-1], dtype=np.int32)
    documents = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    unfinished = path.with_suffix(".part")
    pq.write_table(pa.table({"input_ids": documents}), unfinished, row_group_size=size.documents)
    unfinished.rename(path)
