"""`PeerGroup`: the ranks that share one fetch, and the process group over which its fetcher hands windows on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from megascale_lightning.errors import ConfigError, MegaScaleWarning, RuntimeFailure, StreamError
from megascale_lightning.places.tree import ClientPlaceTree

__all__ = ["Broadcast", "PeerGroup", "find_peers"]

Broadcast = Callable[[torch.Tensor], Any]
"""Begins the broadcast of a tensor from the fetcher to its peers; gives a `torch.distributed.Work`."""

_POLL: Final = timedelta(seconds=0.2)

_left_behind: Final[list[PeerGroup]] = []
"""With a broadcast that was broken off under way: a gloo group waits for that when it is thrown away, for half an hour
if the other rank lives on. The end of the process does not."""


class PeerGroup:
    """Hands tensors from one rank to its peers. Collectives: all ranks of the group call `begin` in the same order.

    Args:
        ranks: Those of the group; the first one fetches.
        rank: This process.
        broadcast: Begins a broadcast among them.
        device: Where the tensors of a broadcast have to lie.
        destroy: Ends the process group; None: it is not ours.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        broadcast: Broadcast,
        *,
        device: torch.device | None = None,
        destroy: Callable[[], None] | None = None,
    ) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self._broadcast = broadcast
        self._device = device or torch.device("cpu")
        self._destroy = destroy
        self._broken = False
        self._left: Transfer | None = None

    @property
    def fetcher(self) -> int:
        """The rank that fetches."""
        return self.ranks[0]

    def begin(self, tensor: torch.Tensor) -> Transfer:
        """Begin to hand on a tensor of the host's, or to receive into it; it is not to be touched until that is done.

        Raises:
            StreamError: A broadcast before this one was broken off: nobody knows what the next one would receive.
            RuntimeFailure: The other ranks cannot be reached.
        """
        if self._broken:
            raise StreamError(
                f"ranks {self._named()} cannot hand on batches any more, since waiting for one was broken off; start "
                "the training anew from its last checkpoint"
            )
        there = tensor.to(self._device)
        try:
            return Transfer(self, tensor, there, self._broadcast(there))
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> RuntimeFailure:
        """The error for what `torch.distributed` raised."""
        self._broken = True
        who = f"rank {self.fetcher}, which fetches for it," if self.rank != self.fetcher else "a rank it fetches for"
        return RuntimeFailure(
            f"rank {self.rank} shares batches with ranks {self._named()} (broadcast_at), and {who} cannot be reached: "
            f"its process has ended, or stands still; its own output says why. torch.distributed: {error}"
        )

    def break_off(self, transfer: Transfer) -> None:
        """A broadcast is not waited for any more."""
        self._broken = True
        self._left = transfer

    def close(self) -> None:
        """End the process group if it is ours. Whoever waits in it gets an error. A second call does nothing."""
        destroy, self._destroy = self._destroy, None
        if self._left is not None and not self._left.is_done:
            _left_behind.append(self)
        elif destroy is not None and dist.is_initialized():
            self._broken = True
            destroy()

    def _named(self) -> str:
        return ", ".join(map(str, self.ranks))


class Transfer:
    """A broadcast that has begun.

    It is asked whether it is done, again and again: a callback would run in a thread of the process group, and what
    Python throws away there may be that group itself, which ends the process.
    """

    def __init__(self, peers: PeerGroup, tensor: torch.Tensor, there: torch.Tensor, work: Any) -> None:
        self._peers, self._tensor, self._there, self._work = peers, tensor, there, work

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return bool(self._work.is_completed())

    def wait(self, still_wanted: Callable[[], None], timeout_s: float | None = None) -> None:
        """Wait until the tensor is there, on the host.

        Args:
            still_wanted: Called a few times a second; what it raises ends the wait, and the use of the group. On a
                device's own backend it is not called: there the fetcher speaks up every few seconds.
            timeout_s: After so many seconds the wait, and the use of the group, ends without an error.

        Raises:
            RuntimeFailure: The other ranks cannot be reached.
        """
        rounds = 0
        try:
            while not self._is_there():
                still_wanted()
                rounds += 1
                if timeout_s is not None and rounds * _POLL.total_seconds() >= timeout_s:
                    self._peers.break_off(self)
                    return
        except BaseException:
            self._peers.break_off(self)
            raise

    def _is_there(self) -> bool:
        try:
            return self._came()
        except RuntimeError as error:
            raise self._peers.lost(error) from error

    def _came(self) -> bool:
        if self._there is not self._tensor:
            self._work.wait()  # only for the device's queue; with a time limit NCCL would end its communicator
            if self._peers.rank != self._peers.fetcher:
                self._tensor.copy_(self._there)
            return True
        try:
            self._work.wait(_POLL)
        except RuntimeError:
            if not self.is_done:
                return False
            self._work.wait()  # what went wrong, if anything did
        return True


def find_peers(tree: ClientPlaceTree, broadcast: Sequence[str], mesh: Any = None) -> PeerGroup | None:
    """The group of this process; all processes of a job call it together, since process groups may have to be made.

    A group of the trainer's own device mesh is taken where one dimension of it is what is asked for; otherwise gloo
    groups are made, which need no memory of a device.

    Args:
        tree: Places of all ranks.
        broadcast: Axes along which the first place fetches.
        mesh: The trainer's `torch.distributed.DeviceMesh`, if it has one.

    Returns:
        None where every rank fetches by itself: it has no peers, or is in a process alone.

    Raises:
        ConfigError: The ranks of the tree are not those of `torch.distributed`.
    """
    groups = list(dict.fromkeys(tree.peers(rank, broadcast) for rank in tree.ranks))
    if all(len(ranks) == 1 for ranks in groups):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                f"broadcast_at({', '.join(broadcast)}) has no effect: torch.distributed is not initialised yet, so "
                "that every rank fetches by itself. Call init_process_group() before the loader is made",
                MegaScaleWarning,
                stacklevel=4,
            )
        return None
    if dist.get_world_size() == 1:
        return None
    if tree.ranks != tuple(range(dist.get_world_size())):
        raise ConfigError(
            f"broadcast_at({', '.join(broadcast)}): the tree has {tree.world_size} ranks, torch.distributed "
            f"{dist.get_world_size()}, and batches are broadcast among the latter: give a tree of exactly these\n{tree}"
        )
    mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
    group = _group_of_mesh(mesh, groups)
    if group is not None:
        return _peer_group(mine, group, ours=False)
    # Every process makes all of them, in the same order, as `new_group` wants it.
    made = {ranks: dist.new_group(sorted(ranks), backend="gloo") for ranks in groups if len(ranks) > 1}
    return _peer_group(mine, made[mine], ours=True)


def _peer_group(ranks: Sequence[int], group: Any, *, ours: bool) -> PeerGroup:
    kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    return PeerGroup(
        ranks,
        dist.get_rank(),
        partial(dist.broadcast, src=ranks[0], group=group, async_op=True),
        device=torch.device("cpu" if "cpu" in kinds else kinds[0]),
        destroy=partial(dist.destroy_process_group, group) if ours else None,
    )


def _group_of_mesh(mesh: Any, groups: Sequence[Sequence[int]]) -> Any:
    """This process's group along the dimension of the mesh whose groups are exactly these; None: there is none.

    All groups are compared, not only this process's own, so that all processes come to the same answer.
    """
    if mesh is None:
        return None
    layout = mesh.mesh.numpy(force=True)
    wanted = {frozenset(ranks) for ranks in groups}
    for dimension in range(layout.ndim):
        rows = np.moveaxis(layout, dimension, -1).reshape(-1, layout.shape[dimension])
        if {frozenset(row.tolist()) for row in rows} == wanted:
            return mesh.get_group(dimension)
    return None
