"""A small float64 model, and gradients as DDP with accumulation makes them: a mean over ranks and microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megascale_lightning import reduce_loss

from .harness import Microbatch, Step

VOCABULARY = 97


class TinyModel(nn.Module):
    """Embedding and linear layer: what a token gives does not depend on where it stands."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(input_ids % VOCABULARY)))


def summed_loss(model: nn.Module, tensors: dict[str, Any]) -> torch.Tensor:
    """The sum of the losses of all targets; labels stand unshifted."""
    logits = model(tensors["input_ids"])[:, :-1]
    labels = tensors["labels"][:, 1:]
    targets = torch.where(labels == -100, -100, labels % VOCABULARY)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
    model.zero_grad()
    return found


def helper_gradients(model: nn.Module, step: Step) -> list[torch.Tensor]:
    """What the loss helper gives: per rank the mean over microbatches, then the mean over ranks."""
    per_rank = []
    for rank in step.ranks:
        for mb in rank:
            loss = reduce_loss(summed_loss(model, mb.tensors), mb.info)
            assert torch.isfinite(loss)
            (loss / len(rank)).backward()
        per_rank.append(gradients(model))
    return [torch.stack(found).mean(0) for found in zip(*per_rank, strict=True)]


def true_gradients(model: nn.Module, microbatches: Iterable[Microbatch]) -> list[torch.Tensor]:
    """d/dtheta (sum over all tokens of the step / their number), counted from the labels."""
    microbatches = list(microbatches)
    targets = sum(int((mb.tensors["labels"][:, 1:] != -100).sum()) for mb in microbatches)
    total = sum(summed_loss(model, mb.tensors) for mb in microbatches)
    assert isinstance(total, torch.Tensor)
    (total / targets).backward()
    return gradients(model)


def descend(model: nn.Module, found: list[torch.Tensor], rate: float = 1.0) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter -= rate * gradient


def assert_close(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the largest value of each tensor."""
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())
