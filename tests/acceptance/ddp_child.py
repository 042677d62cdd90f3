"""What each process of the real DDP test runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, reduce_loss

from .harness import microbatch
from .parity import TinyModel, summed_loss


def train(rank: int, world: int, config: LoaderConfig, steps: int, folder: str) -> None:
    """Train `steps` optimizer steps and write rank's parameters and step boundaries."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = TinyModel()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    seen: list[Any] = []
    tree = ClientPlaceTree.from_sizes(dp=world)
    with MegaScaleLoader(config, tree=tree, rank=rank) as loader:
        for batch in loader:
            mb = microbatch(batch)
            seen.append((mb.info.step, mb.info.microbatch))
            with contextlib.nullcontext() if mb.info.is_last_in_step else wrapped.no_sync():
                loss = reduce_loss(summed_loss(wrapped, mb.tensors), mb.info)
                (loss / loader.num_microbatches).backward()
            if mb.info.is_last_in_step:
                optimizer.step()
                optimizer.zero_grad()
                if mb.info.step == steps - 1:
                    break
        certificate = loader.certificate
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    torch.save({"parameters": parameters, "seen": seen, "certificate": certificate}, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
