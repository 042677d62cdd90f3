"""Turns the summed loss of a microbatch into the value to return from `training_step`.

A step's gradient ought to be that of the mean over all its target tokens, d/dtheta (sum over groups r and microbatches
j of S_rj) / T, whatever the tokens of each microbatch. With G data-parallel groups and A microbatches, two things
divide what is returned, L_rj: DistributedDataParallel averages gradients over the ranks (1 / G; "Gradient
synchronization" in torch's DDP notes), and Lightning divides by `accumulate_grad_batches` before `backward` (1 / A;
`lightning/pytorch/loops/optimization/automatic.py`, `ClosureResult.from_training_step_output`); so does Accelerate
(`Accelerator.backward`). Hence

    sum_rj (1 / (G A)) dL_rj/dtheta = sum_rj dS_rj/dtheta / T    with    L_rj = S_rj * G * A / T.

Context-parallel ranks each hold the loss of their slice of a microbatch, and gradients are averaged over them as well:
G then counts them too. Tensor-parallel ranks and stages of a pipeline do not add to it.

Returning the mean over the microbatch instead would weigh a token by how few others stand beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megascale_lightning.client.info import BatchInfo

__all__ = ["loss_scale", "reduce_loss"]


def loss_scale(info: BatchInfo, *, num_groups: int | None = None, num_microbatches: int | None = None) -> float:
    """Return the factor G * A / T that turns a microbatch's summed loss into its share of the step's mean.

    Args:
        info: `batch["megascale"]`.
        num_groups: Over how many ranks gradients are averaged; None takes the data-parallel size of the stream, times
            the context-parallel one. Give the former alone where gradients are summed over context-parallel ranks.
        num_microbatches: By what the framework divides the loss; None takes the microbatches of a step. Give 1 where
            nothing divides it: manual optimization, a loop of your own.

    Raises:
        ConfigError: A number is below 1.
    """
    groups = info.num_groups * info.num_context_ranks if num_groups is None else num_groups
    microbatches = info.num_microbatches if num_microbatches is None else num_microbatches
    if groups < 1 or microbatches < 1:
        raise ConfigError(
            f"num_groups={groups} and num_microbatches={microbatches} must be at least 1: the number of data-parallel "
            "groups, and of the microbatches that are accumulated"
        )
    if info.step_loss_tokens == 0:
        return 0.0
    return groups * microbatches / info.step_loss_tokens


def reduce_loss(
    summed_loss: torch.Tensor,
    info: BatchInfo,
    *,
    output: torch.Tensor | None = None,
    num_groups: int | None = None,
    num_microbatches: int | None = None,
) -> torch.Tensor:
    """Return what `training_step` returns, so that the step's gradient is that of the mean over all its target tokens.

    Args:
        summed_loss: Sum of the token losses of the microbatch, or of this rank's slice of it, a scalar:
            `cross_entropy(..., reduction="sum")`.
        info: `batch["megascale"]`.
        output: The model's output, used in place of the loss where this rank has no target of the microbatch (filler
            rows): its zero multiple keeps the graph, so that every rank takes part in the gradient exchange.
        num_groups: See `loss_scale`.
        num_microbatches: See `loss_scale`.

    Raises:
        ConfigError: The loss is not a scalar, or a number is below 1.
    """
    if summed_loss.numel() != 1:
        raise ConfigError(
            f"summed_loss must be one number, not a tensor of shape {tuple(summed_loss.shape)}: sum it over all tokens"
        )
    scale = loss_scale(info, num_groups=num_groups, num_microbatches=num_microbatches)
    if info.rank_loss_tokens == 0:
        return (summed_loss if output is None else output.sum()) * 0.0
    return summed_loss * scale
