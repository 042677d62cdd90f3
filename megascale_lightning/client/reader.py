"""`StreamReader`: the read-ahead of one rank, from windows of its group to finished microbatches."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.errors import NotOpenError, RayUnreachableError, StalledError, StreamError
from megascale_lightning.runtime.forks import check_process
from megascale_lightning.runtime.port import BatchPort
from megascale_lightning.types import BatchWindow, Change, LoaderState, NotYet

__all__ = ["Finish", "InlineReader", "Reader", "StreamReader", "is_last", "unusable"]

logger = logging.getLogger(__name__)

Finish = Callable[[BatchWindow, int], Iterator[tuple[dict[str, Any], BatchInfo]]]
"""A window and the step to begin with -> its microbatches, in order."""

_END: Final = object()
_POLL_S: Final = 0.2
_REPORT_S: Final = 10.0
_LEAVE_S: Final = 5.0
"""A thread that has not left its stream by then is left behind."""


class Reader(Protocol):
    """One generation of a stream, as a loader reads it; see `StreamReader`."""

    @property
    def failed(self) -> bool:
        """`next` has raised: this reader gives nothing more."""
        ...

    @property
    def ended(self) -> bool:
        """The stream is left."""
        ...

    def next(self, interrupted: Callable[[], bool] | None = None) -> tuple[dict[str, Any], BatchInfo] | None:
        """The next microbatch and what it says about itself; None at the end of the stream."""
        ...

    def consumed(self, state: LoaderState) -> None:
        """The steps before `state` are consumed."""
        ...

    def set_changes(self, changes: tuple[Change, ...]) -> None:
        """Tell the planner of all changes to come."""
        ...

    def stop(self) -> None:
        """Stop reading; waits for nothing."""
        ...

    def close(self) -> None:
        """Stop reading, and wait until the stream is left."""
        ...


class StreamReader:
    """Reads one generation of a stream ahead of the training loop.

    The thread holds at most `depth` finished microbatches; how many windows lie ready behind them is bounded by the
    planner. Whatever goes wrong in the thread is raised by `next`. Making one opens the stream.
    """

    def __init__(
        self,
        port: BatchPort,
        finish: Finish,
        *,
        stream: str,
        generation: str,
        group: int,
        client: int,
        state: LoaderState | None,
        depth: int,
        stall_timeout: float,
    ) -> None:
        self._port = port
        self._finish = finish
        self._address = (stream, generation)
        self._group = group
        self._client = client
        self._state = state
        self._first = 0 if state is None else state.step
        self._consumed = self._first - 1
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stall_timeout = stall_timeout
        self._stopping = threading.Event()
        self._stopped_at = 0.0
        self._waiting = False
        self.failed = False
        """`next` has raised: this reader gives nothing more."""
        self._pid = os.getpid()
        port.open(stream, generation, client, state)
        self._begin()

    def next(self, interrupted: Callable[[], bool] | None = None) -> tuple[dict[str, Any], BatchInfo] | None:
        """The next microbatch and what it says about itself; None at the end of the stream, also when asked again.

        Raises:
            InterruptedError: `interrupted` turned true while waiting.
            MegaScaleError: What stopped the thread.
            ForkError: This process was forked from the one that reads.
        """
        check_process(self._pid)
        while True:
            try:
                item = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                if self._stopping.is_set():
                    raise StreamError("the loader was closed, or began anew, while a batch was waited for") from None
                if interrupted is not None and interrupted():
                    raise _interruption() from None
                continue
            if item is _END or isinstance(item, BaseException):
                self._ready.put(item)  # there is room: the thread has ended
            if isinstance(item, BaseException):
                self.failed = True
                raise item
            if item is _END:
                return None
            found: tuple[dict[str, Any], BatchInfo] = item
            return found

    @property
    def ended(self) -> bool:
        """The thread has left the stream."""
        return not self._thread.is_alive()

    def consumed(self, state: LoaderState) -> None:
        """The steps before `state` are consumed: whoever waits for that is told."""
        self._state = state
        self._consumed = state.step - 1
        if self._waiting and not self._stopping.is_set():
            self._port.consumed(*self._address, self._client, self._consumed)

    def _begin(self) -> None:
        stream = self._address[0]
        self._thread = threading.Thread(target=self._run, name=f"megascale-{stream}-{self._client}", daemon=True)
        self._thread.start()

    def set_changes(self, changes: tuple[Change, ...]) -> None:
        """Tell the planner of all changes to come; it knows them when this returns."""
        self._port.set_changes(*self._address, changes)

    def stop(self) -> None:
        """Stop reading; the thread leaves the stream as soon as its current call is answered. Waits for nothing."""
        if os.getpid() == self._pid:
            if not self._stopping.is_set():
                self._stopped_at = time.monotonic()
            self._stopping.set()
            self._drain()

    def close(self) -> None:
        """Stop reading and wait until the stream is left; a second call does nothing, as does one after a fork.

        Five seconds after the stop the thread is left behind, with a warning: what it waits for (a transform, a role
        that stands still) may never come, and a trainer that ends after Ctrl-C cannot be interrupted a second time.
        """
        if os.getpid() != self._pid:
            return
        self.stop()
        while self._thread.is_alive() and time.monotonic() < self._stopped_at + _LEAVE_S:
            self._drain()
            self._thread.join(timeout=0.05)
        self._drain()
        if self._thread.is_alive():
            logger.warning(
                "stream %s: a call has not come back for %g s (a slow transform? a role that stands still?), its "
                "thread is left behind and ends with it",
                self._address[0],
                _LEAVE_S,
            )

    def _drain(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            pass

    def _run(self) -> None:
        last: Any = _END
        try:
            for item in self._items():
                if not self._put(item):
                    break
        except BaseException as error:
            # Said before the stream is left, which may take long where a role is away.
            self._put(error)
            last = None
            if isinstance(error, RayUnreachableError):
                return  # nobody is there to be told
        self._leave()
        if last is not None:
            self._put(last)

    def _leave(self) -> None:
        try:
            self._port.close(*self._address, self._client)
        except Exception as error:
            logger.debug("stream %s: leaving it failed: %s", self._address[0], error)

    def _items(self) -> Iterator[tuple[dict[str, Any], BatchInfo]]:
        """Microbatch after microbatch, to the end of the stream, or of its pass."""
        while not self._stopping.is_set():
            window = self._fetch()
            if window is None or not window.num_steps:
                return
            yield from self._finish(window, self._first)
            self._first = window.first_step + window.num_steps
            if is_last(window):
                return

    def _fetch(self) -> BatchWindow | None:
        """The next window; None when closed meanwhile."""
        began = reported = time.monotonic()
        self._waiting = True
        try:
            while not self._stopping.is_set():
                answer = self._ask()
                if isinstance(answer, BatchWindow):
                    return answer
                self._still_wanted()
                now = time.monotonic()
                if now - reported > _REPORT_S:
                    reported = now
                    logger.warning("stream %s waits since %.0f s: %s", self._address[0], now - began, answer.reason)
                if now - began > self._stall_timeout:
                    raise StalledError(
                        f"stream {self._address[0]!r}: no batch for {now - began:.0f} s: {answer.reason}"
                    )
            return None
        finally:
            self._waiting = False

    def _still_wanted(self) -> None:
        """Between two questions; raises what ends the wait."""

    def _ask(self) -> BatchWindow | NotYet:
        try:
            return self._port.fetch(*self._address, self._group, self._client, self._first, self._consumed)
        except NotOpenError as error:
            # The planner was replaced, or freed what a late client needs: it plans forward from what is consumed here.
            logger.info("stream %s is opened again: %s", self._address[0], error)
            self._port.open(*self._address, self._client, self._state)
            return NotYet(str(error))

    def _put(self, item: Any) -> bool:
        """Hand an item over; False when closed meanwhile."""
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False


class InlineReader(StreamReader):
    """Reads a generation of a stream when it is asked for the next microbatch, without a thread.

    Where the roles run in this process, and samples are made with the global random states seeded for each of them, a
    thread would do so while the training step draws from these states: neither would be the same twice (law 9).
    """

    def _begin(self) -> None:
        self._source = self._items()
        self._interrupted: Callable[[], bool] | None = None
        self._failure: BaseException | None = None
        self._left = False

    def next(self, interrupted: Callable[[], bool] | None = None) -> tuple[dict[str, Any], BatchInfo] | None:
        """See `StreamReader.next`."""
        check_process(self._pid)
        if self._failure is not None:
            raise self._failure
        if self._stopping.is_set():
            raise StreamError("the loader was closed, or began anew, while a batch was waited for")
        self._interrupted = interrupted
        try:
            item = next(self._source, None)
        except BaseException as error:
            self.failed, self._failure = True, unusable(error)
            self._leave_once()
            raise
        if item is None:
            self._leave_once()
        return item

    @property
    def ended(self) -> bool:
        """The stream is left."""
        return self._left

    def consumed(self, state: LoaderState) -> None:
        """The steps before `state` are consumed: said at once, since another rank of this process may wait for it."""
        self._state = state
        self._consumed = state.step - 1
        if not self._left:
            self._port.consumed(*self._address, self._client, self._consumed)

    def stop(self) -> None:
        """Leave the stream."""
        if os.getpid() == self._pid and not self._stopping.is_set():
            self._stopping.set()
            self._leave_once()

    def close(self) -> None:
        """Leave the stream; a second call does nothing, as does one after a fork."""
        self.stop()

    def _leave_once(self) -> None:
        if not self._left:
            self._left = True
            self._leave()

    def _still_wanted(self) -> None:
        if self._interrupted is not None and self._interrupted():
            raise _interruption()


def is_last(window: BatchWindow) -> bool:
    """Whether the stream, or its pass, ends with a window."""
    return window.states[-1].ended or window.states[-1].passes > window.states[0].passes


def unusable(error: BaseException) -> BaseException:
    """What a reader that failed without a thread raises from then on."""
    if isinstance(error, Exception):
        return error
    return StreamError(f"reading was interrupted ({type(error).__name__}): begin anew with iter()")


def _interruption() -> InterruptedError:
    return InterruptedError("the trainer was told to stop while waiting for a batch")
