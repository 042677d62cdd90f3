"""Batches in page-locked memory, from which copies to a CUDA device run beside the training step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.reader import Finish
from megascale_lightning.types import BatchWindow

__all__ = ["pin_finished"]


def pin_finished(finish: Finish) -> Finish:
    """Pin what `finish` makes, where this process uses CUDA; elsewhere it stays as it is, and CUDA untouched.

    Call it in the thread that trains: the device that is current there is the one that batches are pinned for. Pinned
    are dense tensors of the host's, also in dicts, lists and tuples; all else is handed out as it is.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return finish
    return partial(_pinned, finish, torch.cuda.current_device())


def _pinned(finish: Finish, device: int, window: BatchWindow, first_step: int) -> Iterator[tuple[Any, BatchInfo]]:
    # The current device is a thread's own, from 0: all ranks of a machine would hold a context on its first device.
    torch.cuda.set_device(device)
    for batch, info in finish(window, first_step):
        yield _in_pinned_memory(batch), info


def _in_pinned_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_dense = value.device.type == "cpu" and value.layout is torch.strided
        return value.pin_memory() if is_dense else value
    # Types that are not just these may mean more than their items say.
    if type(value) is dict:
        return {key: _in_pinned_memory(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_in_pinned_memory, value))
    return value
