"""A small GPT that reads packed rows: tokens attend to earlier tokens of their own document only."""

from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    """Pre-norm transformer decoder with learned positions.

    Args:
        vocabulary: Number of token ids.
        max_len: Longest document, or piece of one.
        width, heads, layers: Size of the model.
    """

    def __init__(self, vocabulary: int, max_len: int, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """int64 [rows, seq_len] twice -> logits, float32 [rows, seq_len, vocabulary]."""
        mask = document_mask(position_ids)
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """Attention, then a feed-forward net."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """float32 [rows, seq_len, width], bool [rows, 1, seq_len, seq_len] -> like the first."""
        q, k, v = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed(self.norm2(hidden))


def document_mask(position_ids: Tensor) -> Tensor:
    """Who sees whom: bool [rows, 1, seq_len, seq_len]; positions begin at 0 in each document of a row."""
    document = (position_ids == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return same.tril().unsqueeze(1)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the targets: each label is predicted from the tokens before it; -100 is no target."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
