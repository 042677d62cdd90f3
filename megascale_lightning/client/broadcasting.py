"""`GroupReader`: the reader of a rank whose windows one rank fetches for several, and hands on (`broadcast_at`).

Who issues the broadcasts, and when: the main thread, inside `next`, whenever the microbatches of a window are used up.
A thread of its own that receives ahead would have to have process groups of its own, and on GPUs NCCL would still have
to see its broadcasts and those of the training in one order on all ranks, which two threads cannot promise. Inside
`next` the order is that of the program, the same on all ranks as the order of its own collectives is: the groups of the
trainer's mesh may be used, with any backend; a loop that breaks off, or begins anew, leaves nothing under way. The
price is that a window's transfer is waited for, once in several steps, at about 1 GB/s over gloo. What is slow stays in
threads: the fetcher reads windows ahead, and every rank makes its tensors ahead, as far as its window goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import queue
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

import torch

from megascale_lightning.client.flattening import Flattener, Unflattener, fill, size_of
from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.peers import PeerGroup, Transfer
from megascale_lightning.client.reader import Finish, InlineReader, Reader, StreamReader, is_last, unusable
from megascale_lightning.errors import RuntimeFailure, StreamError
from megascale_lightning.runtime.forks import check_process
from megascale_lightning.runtime.port import BatchPort
from megascale_lightning.types import BatchWindow, Change, LoaderState, NotYet

__all__ = ["GroupReader", "WindowLink", "open_reader"]

_HEARTBEAT_S: Final = 5.0
"""While the fetcher waits for a window it says so, or its peers would run into the time limit of a collective."""
_FAREWELL_S: Final = 5.0
"""Peers that have not taken the fetcher's error by then are busy elsewhere, or gone."""
_USED_UP: Final[Any] = object()
"""Stands behind the last microbatch of a window."""


class _Kind(IntEnum):
    WAIT = 0
    WINDOW = 1
    END = 2
    ERROR = 3


class WindowLink:
    """Windows of one opening of a stream on their way from the fetcher to its peers.

    A message is a header, int64 [8] (kind, opening, stream position, bytes that follow, and the sizes of
    `Flattener.flatten`), and a flat buffer, uint8.

    Args:
        peers: Who takes part.
        opening: What the ranks have to agree about: which opening of which stream; below 2**63.
        step: The step that it begins at.
    """

    def __init__(self, peers: PeerGroup, opening: int, step: int) -> None:
        self._peers = peers
        self._opening = (opening, step)
        self._flattener, self._unflattener = Flattener(), Unflattener()
        self._beat: Transfer | None = None
        self._beaten = time.monotonic()

    @property
    def fetches(self) -> bool:
        """This rank is the fetcher."""
        return self._peers.rank == self._peers.fetcher

    def beat(self) -> None:
        """Say that the fetcher waits, now and then; nothing while the peers have not taken what was said before."""
        if time.monotonic() - self._beaten < _HEARTBEAT_S or (self._beat is not None and not self._beat.is_done):
            return
        self._settle(_never)
        self._beaten = time.monotonic()
        self._beat = self._peers.begin(self._header(_Kind.WAIT))

    def send(self, window: BatchWindow | None, still_wanted: Callable[[], None]) -> None:
        """Hand a window on; None: the stream has ended.

        Raises:
            RuntimeFailure: A peer cannot be reached.
            StreamError: The window holds what cannot be sent.
        """
        if window is None:
            self._message(_Kind.END, None, still_wanted)
            return
        try:
            flat = self._flattener.flatten(window)
        except Exception as error:
            raise StreamError(
                f"a batch cannot be handed to the peers of rank {self._peers.rank} (broadcast_at); is "
                f"there a field of the samples that does not pickle? {type(error).__name__}: {error}"
            ) from error
        self._message(_Kind.WINDOW, flat, still_wanted)

    def send_error(self, error: BaseException) -> None:
        """Let the peers fail as the fetcher does, if they come for it within some seconds."""
        with contextlib.suppress(RuntimeFailure, StreamError):  # they are gone, or will find this rank gone
            self._message(_Kind.ERROR, Flattener().flatten(_portable(error, self._peers.rank)), _never, _FAREWELL_S)

    def receive(self, still_wanted: Callable[[], None]) -> BatchWindow | None:
        """Wait for the next window; None: the stream has ended.

        Raises:
            StreamError: The fetcher is at another place.
            RuntimeFailure: It cannot be reached.
            BaseException: What it failed with.
        """
        while True:
            header = torch.empty(8, dtype=torch.int64)
            transfer = self._peers.begin(header)
            transfer.wait(still_wanted)
            kind, opening, step, num_bytes, *sizes = header.tolist()
            if (opening, step) != self._opening:
                self._peers.break_off(transfer)
                raise StreamError(
                    f"rank {self._peers.rank} asks for batches from step {self._opening[1]} on, and rank "
                    f"{self._peers.fetcher}, which fetches for it, hands on those of another iterator, from step "
                    f"{step} on: ranks that share batches (broadcast_at) have to iterate, break off and load states "
                    "alike"
                )
            if kind == _Kind.END:
                return None
            if kind == _Kind.WAIT:
                continue
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            self._peers.begin(buffer).wait(still_wanted)
            unflattener = Unflattener() if kind == _Kind.ERROR else self._unflattener
            found = unflattener.restore(buffer.numpy(), (sizes[0], sizes[1], sizes[2]))
            if kind == _Kind.ERROR:
                raise found
            window: BatchWindow = found
            return window

    def _message(
        self, kind: _Kind, flat: Any, still_wanted: Callable[[], None], timeout_s: float | None = None
    ) -> None:
        self._settle(still_wanted, timeout_s)
        parts, sizes = flat or ([], (0, 0, 0))
        num_bytes = size_of(parts)
        self._peers.begin(self._header(kind, num_bytes, sizes)).wait(still_wanted, timeout_s)
        if parts:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            fill(buffer.numpy(), parts)
            self._peers.begin(buffer).wait(still_wanted, timeout_s)
        self._beaten = time.monotonic()

    def _settle(self, still_wanted: Callable[[], None], timeout_s: float | None = None) -> None:
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.wait(still_wanted, timeout_s)

    def _header(self, kind: _Kind, num_bytes: int = 0, sizes: tuple[int, ...] = (0, 0, 0)) -> torch.Tensor:
        return torch.tensor([kind, *self._opening, num_bytes, *sizes, 0], dtype=torch.int64)


class GroupReader:
    """Reads one generation of a stream together with the peers of this rank; to a loader it is a `StreamReader`.

    Only the fetcher is a client of the roles: its peers get no further than it does, and hold nothing back. They have
    every window as a whole, with the states around each of its steps.

    Args:
        link: To the peers.
        port: Of this process.
        finish: As of `StreamReader`.
        inline: Without threads, as `InlineReader`.
        depth: As of `StreamReader`.
        stall_timeout: As of `StreamReader`.
        opening: The other arguments of `StreamReader`.
    """

    def __init__(
        self,
        link: WindowLink,
        port: BatchPort,
        finish: Finish,
        *,
        inline: bool,
        depth: int,
        stall_timeout: float,
        **opening: Any,
    ) -> None:
        kind = InlineReader if inline else StreamReader
        self._link = link
        self._port, self._address = port, (opening["stream"], opening["generation"])
        self._source: StreamReader | None = None
        state: LoaderState | None = opening["state"]
        if link.fetches:
            try:
                self._source = kind(port, _whole, depth=1, stall_timeout=stall_timeout, **opening)
            except BaseException as error:
                link.send_error(error)
                raise
        elif state is not None and state.changes and opening["client"] == 0:
            port.set_changes(*self._address, state.changes)  # what only this rank knows of, and the fetchers do not
        self._handed = _Handed()
        self._making = kind(self._handed, _marked(finish), depth=depth, stall_timeout=stall_timeout, **opening)
        self._used_up = True
        self._over = False
        self._failure: BaseException | None = None
        self._stopped = False
        self._pid = os.getpid()

    @property
    def failed(self) -> bool:
        """`next` has raised: this reader gives nothing more."""
        return self._failure is not None

    @property
    def ended(self) -> bool:
        """The stream is left."""
        return self._making.ended and (self._source is None or self._source.ended)

    def next(self, interrupted: Callable[[], bool] | None = None) -> tuple[dict[str, Any], BatchInfo] | None:
        """See `StreamReader.next`. All ranks that share batches call it alike, and it is where they meet.

        Raises:
            BaseException: Also what the fetcher failed with.
        """
        check_process(self._pid)
        if self._failure is not None:
            raise self._failure
        try:
            while not self._over:
                if self._used_up:
                    window = self._exchange(interrupted)
                    if window is None:
                        break
                    self._handed.put(window)
                item = self._making.next(interrupted)
                self._used_up = item is _USED_UP
                if item is None:
                    break
                if not self._used_up:
                    return item
        except BaseException as error:
            self._failure = unusable(error)
            raise
        self._over = True
        if self._source is not None:
            self._source.stop()  # it has left the stream, or, without a thread, does so now
        return None

    def consumed(self, state: LoaderState) -> None:
        """See `StreamReader.consumed`."""
        if self._source is not None:
            self._source.consumed(state)

    def set_changes(self, changes: tuple[Change, ...]) -> None:
        """See `StreamReader.set_changes`; rank 0 may do so also where another rank fetches for it."""
        self._port.set_changes(*self._address, changes)

    def stop(self) -> None:
        """See `StreamReader.stop`."""
        self._stopped = True
        self._making.stop()
        self._handed.put(None)
        if self._source is not None:
            self._source.stop()

    def close(self) -> None:
        """See `StreamReader.close`."""
        self.stop()
        self._making.close()
        if self._source is not None:
            self._source.close()

    def _exchange(self, interrupted: Callable[[], bool] | None) -> BatchWindow | None:
        """The next window, fetched or received; None at the end of the stream."""

        def still_wanted() -> None:
            if self._stopped:
                raise StreamError("the loader was closed, or began anew, while a batch was waited for")
            if interrupted is not None and interrupted():
                raise InterruptedError("the trainer was told to stop while waiting for a batch")

        if self._source is None:
            return self._link.receive(still_wanted)

        def waits() -> bool:
            self._link.beat()
            still_wanted()
            return False

        try:
            found: Any = self._source.next(waits)
            self._link.send(found, still_wanted)
        except BaseException as error:
            self._link.send_error(error)
            raise
        window: BatchWindow | None = found
        return window


def open_reader(
    port: BatchPort, finish: Finish, *, peers: PeerGroup | None, opening: bytes, inline: bool, **more: Any
) -> Reader:
    """Open a generation of a stream for one rank.

    Args:
        port: As of `StreamReader`.
        finish: Likewise.
        peers: Those that the rank shares its fetches with; None: it has none.
        opening: What is the same on all ranks that open the stream at the same place for the same time.
        inline: Without threads, as `InlineReader`.
        more: The other arguments of `StreamReader`.
    """
    if peers is None:
        return (InlineReader if inline else StreamReader)(port, finish, **more)
    number = int.from_bytes(hashlib.blake2b(opening, digest_size=7).digest(), "little")
    state: LoaderState | None = more["state"]
    link = WindowLink(peers, number, 0 if state is None else state.step)
    return GroupReader(link, port, finish, inline=inline, **more)


class _Handed:
    """A `BatchPort` that gives the windows that are put into it."""

    def __init__(self) -> None:
        self._windows: queue.SimpleQueue[BatchWindow | None] = queue.SimpleQueue()

    def put(self, window: BatchWindow | None) -> None:
        """None: whoever waits for a window goes on without one."""
        self._windows.put(window)

    def fetch(
        self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int
    ) -> BatchWindow | NotYet:
        return self._windows.get() or NotYet("the loader is closed")

    def open(self, stream: str, generation: str, client: int, state: LoaderState | None) -> None:
        """Nobody is to be told."""

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        """Nobody is to be told."""

    def set_changes(self, stream: str, generation: str, changes: tuple[Change, ...]) -> None:
        """Nobody is to be told."""

    def close(self, stream: str, generation: str, client: int) -> None:
        """Nobody is to be told."""


def _whole(window: BatchWindow, _: int) -> Iterator[Any]:
    yield window


def _marked(finish: Finish) -> Finish:
    def marked(window: BatchWindow, first_step: int) -> Iterator[Any]:
        yield from finish(window, first_step)
        if not is_last(window):
            yield _USED_UP

    return marked


def _portable(error: BaseException, rank: int) -> BaseException:
    """The error as it arrives elsewhere; one that says the same where it cannot be sent."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error):
            return error
    except Exception:
        pass
    return RuntimeFailure(f"rank {rank}, which fetches batches for others, failed: {type(error).__name__}: {error}")


def _never() -> None:
    """Nothing ends this wait but its time."""
