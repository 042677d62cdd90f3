"""What the text benchmark compares with: a plain DataLoader and torchdata's StatefulDataLoader, as good as we can.

Both read the same `PackedText`: documents are numpy views of Arrow buffers, copied once, into the batch; workers have
files of their own; batches are made in the worker, so that the hand-over is one call for four rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from text_corpus import WEIGHTS
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["PackedText", "plain_loader", "stateful_loader"]

CHOICES = 4096
"""Sources are chosen this many draws at once."""


class Cursor:
    """An endless pass over one source: row groups in a new order each epoch, documents permuted inside them."""

    def __init__(self, files: list[Path], seed: tuple[int, ...]) -> None:
        self._units = [(file, group) for file in map(pq.ParquetFile, files) for group in range(file.num_row_groups)]
        self._seed = seed
        self.load_state_dict({"epoch": 0, "unit": 0, "row": 0})

    def state_dict(self) -> dict[str, int]:
        """Where the next document is."""
        return {"epoch": self._epoch, "unit": self._unit, "row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self._epoch, self._unit = state["epoch"], state["unit"]
        self._read_unit()
        self._row = state["row"] - 1
        self.advance()

    def advance(self) -> None:
        """Make `head` (int32 [length], a view) the next document."""
        self._row += 1
        if self._row == len(self._starts):
            self._epoch, self._unit = divmod(self._epoch * len(self._units) + self._unit + 1, len(self._units))
            self._row = 0
            self._read_unit()
        self.head = self._values[self._starts[self._row] : self._stops[self._row]]

    def _read_unit(self) -> None:
        order = np.random.default_rng([*self._seed, self._epoch]).permutation(len(self._units))
        file, group = self._units[order[self._unit]]
        documents = file.read_row_group(group, columns=["input_ids"]).column(0).combine_chunks()
        offsets = documents.offsets.to_numpy()
        rows = np.random.default_rng([*self._seed, self._epoch, self._unit]).permutation(len(documents))
        self._values = documents.values.to_numpy()
        self._starts, self._stops = offsets[rows].tolist(), offsets[rows + 1].tolist()


class PackedText(IterableDataset):
    """Mixes the sources by sample and packs whole documents next-fit; yields batches, without end.

    A batch has `input_ids` and `position_ids`, int64 [rows, seq_len]; positions begin at 0 in each document.
    """

    def __init__(self, files: dict[str, list[Path]], *, rows: int, seq_len: int, seed: int = 0) -> None:
        self._files = files
        self._rows, self._seq_len, self._seed = rows, seq_len, seed
        self._drawn = 0
        self._cursors: list[Cursor] = []
        self._start: list[dict[str, int]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Position of this worker after the batch handed out last."""
        return {"drawn": self._drawn, "cursors": [cursor.state_dict() for cursor in self._cursors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._drawn, self._start = state["drawn"], state["cursors"]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self._cursors = [
            Cursor(files[worker::workers], (self._seed, worker, index))
            for index, files in enumerate(self._files.values())
        ]
        for cursor, state in zip(self._cursors, self._start or [], strict=False):
            cursor.load_state_dict(state)
        self._start = None
        return self._batches(worker)

    def _batches(self, worker: int) -> Iterator[dict[str, torch.Tensor]]:
        counting = np.arange(self._seq_len)
        draws = self._draws(worker)
        cursor = next(draws)
        while True:
            ids = np.zeros((self._rows, self._seq_len), np.int64)
            positions = np.zeros((self._rows, self._seq_len), np.int64)
            for row_ids, row_positions in zip(ids, positions, strict=True):
                used, document = 0, cursor.head
                while (stop := used + len(document)) <= self._seq_len:
                    row_ids[used:stop] = document
                    row_positions[used:stop] = counting[: stop - used]
                    used = stop
                    cursor = next(draws)
                    document = cursor.head
            yield {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions)}

    def _draws(self, worker: int) -> Iterator[Cursor]:
        """The source of each draw; to ask for the next one passes the document of the last."""
        shares = np.array(WEIGHTS) / sum(WEIGHTS)
        while True:
            block, first = divmod(self._drawn, CHOICES)
            rng = np.random.default_rng([self._seed, worker, block])
            for source in rng.choice(len(shares), CHOICES, p=shares)[first:].tolist():
                cursor = self._cursors[source]
                yield cursor
                cursor.advance()
                self._drawn += 1


def plain_loader(dataset: PackedText, num_workers: int) -> DataLoader:
    """`torch.utils.data.DataLoader` of ready batches."""
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, prefetch_factor=4 if num_workers else None)


def stateful_loader(dataset: PackedText, num_workers: int) -> StatefulDataLoader:
    """torchdata's loader of ready batches; it takes the state of the dataset after each."""
    return StatefulDataLoader(
        dataset, batch_size=None, num_workers=num_workers, prefetch_factor=4 if num_workers else None
    )
