"""A small float64 attention model whose tokens see only their own document, on whole batches or on slices of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, reduce_loss
from megascale_lightning.client.slicing import slice_of

from .parity import VOCABULARY

Batch = dict[str, Any]
Exchange = Callable[[list[torch.Tensor]], torch.Tensor]
"""From what the slices at hand have of something [rows, width, ...] to what all slices have, one behind the other."""

WIDTH = 12


class AttentionModel(nn.Module):
    """Two layers of causal attention; a position counts as its document's `position_ids` say."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3

    def forward(self, slices: Sequence[Batch], documents: list[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
        """Logits of each slice: [rows, width, vocabulary]; `documents` says of each token which it belongs to."""
        positions = [part["position_ids"] for part in slices]
        rates = torch.arange(1, WIDTH + 1, dtype=torch.float64) / 7
        states = [
            self.embed(part["input_ids"] % VOCABULARY) + torch.sin(where[..., None] * rates)
            for part, where in zip(slices, positions, strict=True)
        ]
        all_positions, all_documents = exchange(positions), exchange(documents)
        for layer in self.layers:
            queries, keys, values = zip(*(layer(state).chunk(3, dim=-1) for state in states), strict=True)
            all_keys, all_values = exchange(list(keys)), exchange(list(values))
            for index, query in enumerate(queries):
                seen = documents[index][:, :, None] == all_documents[:, None]
                seen &= positions[index][:, :, None] >= all_positions[:, None]
                scores = (query @ all_keys.mT / WIDTH**0.5).masked_fill(~seen, -torch.inf)
                states[index] = states[index] + torch.softmax(scores, dim=-1) @ all_values
        return [self.head(torch.tanh(state)) for state in states]


def documents_of(batch: Batch, mode: str, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
    """Number of the document of each token of a slice, from the bounds of the whole microbatch: [rows, width]."""
    rows, width = batch["input_ids"].shape
    if "cu_seq_lens_q" not in batch:  # padded rows hold one document each, and their padding
        return torch.arange(rows)[:, None] * 2 + batch["attention_mask"]
    bounds = batch["cu_seq_lens_q"].long()
    if mode == "head_tail":
        lengths = bounds.diff() // num_ranks  # every rank has as much of each document
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).reshape(rows, width)
    first = torch.arange(rows)[:, None] * width * num_ranks + rank * width
    return torch.searchsorted(bounds, first + torch.arange(width), right=True)


def summed_losses(model: AttentionModel, slices: Sequence[Batch], mode: str, exchange: Exchange) -> list[torch.Tensor]:
    """Of each slice the sum of the losses of its targets; labels stand shifted."""
    ranks = range(len(slices)) if len(slices) > 1 else [_rank_of(slices[0])]
    numbers = [
        documents_of(part, mode, rank, part["megascale"].num_context_ranks)
        for part, rank in zip(slices, ranks, strict=True)
    ]
    found = []
    for logits, part in zip(model(slices, numbers, exchange), slices, strict=True):
        targets = torch.where(part["labels"] == -100, -100, part["labels"] % VOCABULARY)
        found.append(
            functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        )
    return found


def _rank_of(part: Batch) -> int:
    return dist.get_rank() if part["megascale"].num_context_ranks > 1 else 0


def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    """The exchange of slices that lie in one process."""
    return torch.cat(parts, dim=1)


class _Gather(torch.autograd.Function):
    """All slices behind one another; backward, what all ranks want of this one's."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(found, part.contiguous())
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        wanted = gradient.contiguous().clone()
        dist.all_reduce(wanted)
        return wanted.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def between_processes(parts: list[torch.Tensor]) -> torch.Tensor:
    """The exchange of processes that hold one slice each."""
    (part,) = parts
    gathered: torch.Tensor = _Gather.apply(part)
    return gathered


def train_slice(rank: int, world: int, config: LoaderConfig, steps: int, cuts: str, folder: str) -> None:
    """One of `world` context-parallel processes: train `steps` steps, write its parameters and the losses."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = AttentionModel()
    losses = []
    with MegaScaleLoader(config, tree=ClientPlaceTree.from_sizes(cp=world), rank=rank) as loader:
        for batch in loader:
            loss = reduce_loss(_loss_of(model, batch, cuts), batch["megascale"]) / loader.num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            if batch["megascale"].is_last_in_step:
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        dist.all_reduce(parameter.grad)
                        parameter -= parameter.grad / world
                        parameter.grad = None
                if batch["megascale"].step == steps - 1:
                    break
    parameters = [parameter.detach() for parameter in model.parameters()]
    torch.save({"parameters": parameters, "losses": losses}, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _loss_of(model: AttentionModel, batch: Batch, cuts: str) -> torch.Tensor:
    """Of the slice that was delivered, or, of whole rows, of the one that torch cuts in place."""
    if cuts != "torch":
        return summed_losses(model, [batch], cuts, between_processes)[0]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    buffers = [batch[name] for name in ("input_ids", "labels", "position_ids", "attention_mask")]
    num_ranks, rows = dist.get_world_size(), buffers[0].shape[0]
    bounds = np.arange(rows + 1) * buffers[0].shape[1]
    ours = slice_of(bounds, "head_tail", dist.get_rank(), num_ranks)
    expected = [buffer.flatten()[ours].reshape(rows, -1) for buffer in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        assert all(map(torch.equal, buffers, expected)), "torch cuts rows as we do"
        return summed_losses(model, [batch], "head_tail", between_processes)[0]
