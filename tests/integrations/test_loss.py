"""The loss helper: the step's gradient is that of the mean over all its tokens, however they are spread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale_lightning import ConfigError, reduce_loss
from megascale_lightning.client.loss import loss_scale


def info(tokens: int, of: int, groups: int = 1, microbatches: int = 1, context_ranks: int = 1) -> Any:
    return SimpleNamespace(
        rank_loss_tokens=tokens,
        step_loss_tokens=of,
        num_groups=groups,
        num_context_ranks=context_ranks,
        num_microbatches=microbatches,
    )


@pytest.mark.parametrize("layout", [[[3, 5], [1, 0]], [[9]], [[2, 2, 2, 3]], [[4], [0], [5]]])
def test_gradient_is_that_of_the_mean_over_all_tokens(layout: list[list[int]]) -> None:
    groups, microbatches, total = len(layout), len(layout[0]), 9
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(total, 3, dtype=torch.float64, generator=generator)
    weight = torch.randn(3, dtype=torch.float64, generator=generator)

    def summed(rows: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return (rows @ parameter).square().sum()

    whole = weight.clone().requires_grad_()
    (summed(x, whole) / total).backward()
    mean = torch.zeros(3, dtype=torch.float64)
    at = 0
    for group in layout:
        rank = weight.clone().requires_grad_()
        for tokens in group:
            loss = reduce_loss(summed(x[at : at + tokens], rank), info(tokens, total, groups, microbatches))
            (loss / microbatches).backward()  # as Lightning does
            at += tokens
        assert rank.grad is not None
        mean += rank.grad / groups  # as DistributedDataParallel does
    assert torch.allclose(mean, whole.grad, rtol=1e-12)


def test_nothing_to_learn_gives_a_finite_zero_with_a_graph() -> None:
    layer = torch.nn.Linear(2, 2)
    output = layer(torch.ones(1, 2))
    nothing = torch.nn.functional.cross_entropy(output, torch.tensor([-100]), reduction="mean")
    assert not torch.isfinite(nothing)
    loss = reduce_loss(nothing, info(0, 7), output=output)
    loss.backward()
    assert loss == 0
    assert torch.equal(layer.weight.grad, torch.zeros(2, 2))
    summed = torch.nn.functional.cross_entropy(layer(torch.ones(1, 2)), torch.tensor([-100]), reduction="sum")
    assert reduce_loss(summed, info(0, 0)).requires_grad


def test_numbers_may_be_given() -> None:
    assert loss_scale(info(2, 8, groups=4, microbatches=2)) == 1.0
    assert loss_scale(info(2, 8, groups=2, microbatches=2, context_ranks=2)) == 1.0
    assert loss_scale(info(2, 8, groups=4, microbatches=2), num_groups=2, num_microbatches=1) == 0.25
    with pytest.raises(ConfigError, match="at least 1"):
        loss_scale(info(2, 8), num_groups=0)


def test_unreduced_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="sum it over all tokens"):
        reduce_loss(torch.ones(3), info(3, 3))
