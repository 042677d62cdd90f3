"""The read-ahead thread: how far it goes, how it comes back from a planner that forgot it, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megascale_lightning.client.reader import InlineReader, StreamReader
from megascale_lightning.errors import DataError, NotOpenError, StalledError, StreamError
from megascale_lightning.types import PIECE, SOURCE_STATE, BatchWindow, LoaderState, NotYet

pytestmark = pytest.mark.timeout(30)


def state(step: int) -> LoaderState:
    return LoaderState(
        step=step,
        ended=False,
        sources=np.zeros(1, SOURCE_STATE),
        dropped=({},),
        carry=np.zeros(0, PIECE),
        certificate=bytes(32),
    )


def window(first_step: int, num_steps: int = 1) -> BatchWindow:
    return BatchWindow(
        stream="train",
        generation="g",
        first_step=first_step,
        num_steps=num_steps,
        num_microbatches=1,
        tokens={},
        samples={},
        pieces=np.zeros(0, PIECE),
        row_offsets=np.zeros(num_steps + 1, np.int64),
        step_loss_tokens=np.zeros(num_steps, np.int64),
        states=tuple(state(first_step + index) for index in range(num_steps + 1)),
    )


class Port:
    """Answers every question with a window of one step, or with what `answers` says first."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.opened: list[LoaderState | None] = []
        self.fetched: list[tuple[int, int]] = []
        self.closed = threading.Event()

    def open(self, stream: str, generation: str, client: int, state: LoaderState | None) -> None:
        self.opened.append(state)

    def fetch(self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int) -> Any:
        self.fetched.append((first_step, consumed))
        answer = self.answers.pop(0) if self.answers else window(first_step)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        pass

    def close(self, stream: str, generation: str, client: int) -> None:
        self.closed.set()


class Finished:
    """`finish` that gives one item per step, and says when it has begun on the item after `limit`."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit = limit
        self.made = 0
        self.reached, self.passed = threading.Event(), threading.Event()

    def __call__(self, found: BatchWindow, first_step: int) -> Iterator[tuple[dict[str, Any], Any]]:
        for step in range(first_step, found.first_step + found.num_steps):
            self.made += 1
            if self.made >= self.limit:
                self.reached.set()
            if self.made > self.limit:
                self.passed.set()
            yield {"step": step}, None


def reader(port: Port, finish: Any = None, *, start: int = 0, depth: int = 2, stall_timeout: float = 60.0) -> Any:
    return StreamReader(
        port,
        finish or Finished(),
        stream="train",
        generation="g",
        group=0,
        client=0,
        state=state(start),
        depth=depth,
        stall_timeout=stall_timeout,
    )


@pytest.mark.parametrize("depth", [2, 5])
def test_it_holds_no_more_than_its_depth(depth: int) -> None:
    """`depth` lie ready and one is in its hand: the next is made only when one is taken."""
    finish = Finished(depth + 1)
    reading = reader(Port(), finish, depth=depth)
    assert finish.reached.wait(10)
    assert not finish.passed.wait(0.3)
    assert [reading.next()[0]["step"] for _ in range(3)] == [0, 1, 2]
    assert finish.passed.wait(10)
    reading.close()


def test_a_planner_that_forgot_the_client_is_opened_again_from_what_was_consumed() -> None:
    port = Port(window(4), NotOpenError("not open"), window(5), NotOpenError("not open"))
    reading = reader(port, start=4)
    assert [reading.next()[0]["step"] for _ in range(4)] == [4, 5, 6, 7]
    reading.close()
    assert [found.step for found in port.opened if found is not None] == [4, 4, 4]
    assert [first for first, _ in port.fetched[:6]] == [4, 5, 5, 6, 6, 7]


def test_it_says_what_is_consumed_and_opens_again_behind_it() -> None:
    answered = threading.Event()

    class Gated(Port):
        def fetch(self, *args: Any) -> Any:
            if len(self.fetched) == 3:
                answered.wait(10)
            return super().fetch(*args)

    port = Gated(window(0), window(1), window(2), NotOpenError("not open"))
    reading = reader(port, depth=4)
    for step in (1, 2):
        reading.next()
        reading.consumed(state(step))
    answered.set()
    assert [reading.next()[0]["step"] for _ in range(2)] == [2, 3]
    reading.close()
    assert [found.step for found in port.opened if found is not None] == [0, 2]
    assert (3, 1) in port.fetched


def test_what_never_comes_is_an_error_that_says_who_holds_it_back() -> None:
    reading = reader(Port(*[NotYet("client 3 has consumed step 7")] * 99), stall_timeout=0.0)
    for _ in range(2):
        with pytest.raises(StalledError, match=r"stream 'train': no batch for .* client 3 has consumed step 7"):
            reading.next()
    reading.close()


def test_an_error_comes_to_the_training_loop_behind_what_was_read() -> None:
    port = Port(window(0), DataError("source 'web': torn"))
    reading = reader(port)
    assert reading.next()[0]["step"] == 0
    for _ in range(2):
        with pytest.raises(DataError, match="torn"):
            reading.next()
    assert port.closed.wait(10), "it has left the stream"
    reading.close()


def test_waiting_ends_when_the_trainer_says_so() -> None:
    gate = threading.Event()

    class Silent(Port):
        def fetch(self, *args: Any) -> Any:
            gate.wait(10)
            return NotYet("nothing")

    reading = reader(Silent())
    with pytest.raises(InterruptedError):
        reading.next(lambda: True)
    gate.set()
    reading.close()


def test_closing_ends_a_thread_that_has_no_room() -> None:
    port, finish = Port(), Finished(3)
    reading = reader(port, finish)
    assert finish.reached.wait(10)
    reading.close()
    reading.close()
    assert reading.ended
    assert port.closed.is_set()


def test_whoever_waits_for_a_batch_is_told_that_the_loader_closes() -> None:
    asked, told = threading.Event(), threading.Event()

    class Dry(Port):
        def fetch(self, *args: Any) -> Any:
            asked.set()
            return NotYet("nothing yet")

    reading = reader(Dry())

    def wait() -> None:
        with pytest.raises(StreamError, match="closed"):
            reading.next()
        told.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert asked.wait(10)
    reading.close()
    assert told.wait(10)
    waiting.join()


def test_an_error_is_said_before_the_stream_is_left() -> None:
    """Leaving may take long where a role is away."""
    may_leave = threading.Event()

    class Stuck(Port):
        def close(self, *args: Any) -> None:
            may_leave.wait(10)

    reading = reader(Stuck(DataError("source 'web' is broken")))
    with pytest.raises(DataError, match="broken"):
        reading.next()
    assert not may_leave.is_set()
    may_leave.set()
    reading.close()


class TestInline:
    """Without a thread: nothing happens but in `next`."""

    def inline(self, port: Port, finish: Any = None) -> InlineReader:
        return InlineReader(
            port,
            finish or Finished(),
            stream="train",
            generation="g",
            group=0,
            client=0,
            state=state(0),
            depth=2,
            stall_timeout=60.0,
        )

    def test_it_reads_when_it_is_asked(self) -> None:
        port, finish = Port(), Finished()
        reading = self.inline(port, finish)
        assert (len(port.fetched), finish.made) == (0, 0)
        assert reading.next()[0]["step"] == 0
        assert (len(port.fetched), finish.made) == (1, 1)
        assert not reading.ended
        reading.close()
        assert reading.ended
        assert port.closed.is_set()
        with pytest.raises(StreamError, match="closed"):
            reading.next()

    def test_an_error_stays_and_an_interrupt_is_no_end(self) -> None:
        for error, later in ((DataError("bad"), DataError), (KeyboardInterrupt(), StreamError)):

            def fail(found: BatchWindow, first_step: int, error: BaseException = error) -> Iterator[Any]:
                yield {"step": first_step}, None
                raise error

            reading = self.inline(Port(), fail)
            reading.next()
            with pytest.raises(type(error)):
                reading.next()
            assert reading.failed
            with pytest.raises(later):
                reading.next()

    def test_waiting_ends_when_the_trainer_is_told_to_stop(self) -> None:
        class Never(Port):
            def fetch(self, *args: Any) -> Any:
                return NotYet("never")

        with pytest.raises(InterruptedError):
            self.inline(Never()).next(lambda: True)
