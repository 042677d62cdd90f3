"""What the balance benchmark trains: a small byte-level transformer with attention per document, and its documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LONG", "SHORT", "VOCABULARY", "ByteTransformer", "equal_lengths", "heavy_lengths", "write_documents"]

VOCABULARY = 256
SHORT, LONG = (5.5, 1.0), (10.0, 1.0)
"""Mean and standard deviation of the logarithm of lengths: most documents, and the few that hold much of the text."""


class ByteTransformer(nn.Module):
    """Pre-norm decoder without positions, which tells order by its causal attention alone.

    Args:
        width: Of the residual stream; the feed-forward nets are 4 times as wide.
        heads: Attention heads, of 64 channels each whatever the width.
        layers: Blocks.
    """

    def __init__(self, width: int = 64, heads: int = 1, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, bounds: Sequence[int]) -> Tensor:
        """int64 [tokens] and the documents' bounds in it, from 0 to tokens -> logits, float32 [tokens, 256]."""
        lengths = [stop - start for start, stop in pairwise(bounds)]
        hidden = self.tokens(input_ids)
        for block in self.blocks:
            hidden = block(hidden, lengths)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum over the targets; `labels` are shifted, int64 [tokens], -100 is no target."""
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


class _Block(nn.Module):
    channels = 64

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * self.channels
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """float32 [tokens, width] -> the same shape."""
        qkv = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, self.channels))
        hidden = hidden + self.out(torch.cat([_attend(part) for part in qkv.split(lengths)]))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


def _attend(qkv: Tensor) -> Tensor:
    """One document by itself: [tokens, 3, heads, channels] -> [tokens, heads x channels]."""
    q, k, v = qkv.permute(1, 2, 0, 3).unsqueeze(1)  # each [1, heads, tokens, channels]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended[0].transpose(0, 1).flatten(1)


def heavy_lengths(tokens: int, shape: tuple[float, float], longest: int, seed: int) -> npt.NDArray[np.int32]:
    """Log-normal lengths, at least 8 and cut at `longest`, of at least `tokens` in all."""
    rng = np.random.default_rng(seed)
    mean, sigma = shape
    found: list[npt.NDArray[np.int32]] = []
    while sum(int(some.sum()) for some in found) < tokens:
        found.append(np.clip(rng.lognormal(mean, sigma, 64), 8, longest).astype(np.int32))
    return np.concatenate(found)


def equal_lengths(tokens: int, length: int) -> npt.NDArray[np.int32]:
    """As many documents of one length as hold `tokens`."""
    return np.full(-(-tokens // length), length, np.int32)


def write_documents(path: Path, lengths: npt.NDArray[np.int32], seed: int, row_groups: int = 16) -> None:
    """Write a Parquet file with the column `input_ids`, list<uint8>.

    Bytes come in pairs, the second of which follows from the first: a model can learn that, and its loss falls.
    """
    rng = np.random.default_rng([seed, 1])
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    follower = rng.permutation(VOCABULARY).astype(np.uint8)
    tokens = (rng.zipf(1.3, offsets[-1] + 1) % VOCABULARY).astype(np.uint8)
    tokens[1::2] = follower[tokens[: 2 * (len(tokens) // 2) : 2]]
    documents = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens[: offsets[-1]]))
    pq.write_table(pa.table({"input_ids": documents}), path, row_group_size=-(-len(lengths) // row_groups))
