"""One rank fetches for its peers: what reaches them, in what order, and how everything ends. Ranks are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megascale_lightning.client import broadcasting
from megascale_lightning.client.broadcasting import GroupReader, open_reader
from megascale_lightning.client.peers import PeerGroup
from megascale_lightning.errors import (
    CorruptDataError,
    MegaScaleError,
    NotOpenError,
    RuntimeFailure,
    StalledError,
    StateError,
    StreamError,
)
from megascale_lightning.types import BatchWindow, MixtureChange, NotYet
from tests.client.test_reader import Port, state, window

pytestmark = [pytest.mark.timeout(60)]

LIMIT_S = 20.0

_KEPT: list[Any] = []
"""A gloo group that is thrown away waits for what is under way in it, with the GIL held."""


class Ranks:
    """A job in threads: each rank runs in one of its own, with a gloo group of its own."""

    def __init__(self, size: int = 2, fetcher: int = 0) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self._store = dist.HashStore()
        self._order = [fetcher, *(rank for rank in range(size) if rank != fetcher)]
        self.groups: list[PeerGroup] = [future.result(LIMIT_S) for future in self.start(self._join)]
        self.readers: list[Any] = []

    def _join(self, rank: int) -> PeerGroup:
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=LIMIT_S)
        group: Any = dist.ProcessGroupGloo(self._store, self._order.index(rank), self.size, options)
        _KEPT.append(group)
        return PeerGroup(self._order, rank, lambda tensor: group.broadcast(tensor, 0), destroy=None)

    def start(self, body: Callable[[int], Any]) -> list[Future[Any]]:
        return [self._pool.submit(body, rank) for rank in range(self.size)]

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What each rank returned, or raised."""
        found = []
        for future in self.start(body):
            error = future.exception(LIMIT_S)
            found.append(future.result() if error is None else error)
        return found

    def read(self, ports: list[Port], finish: Any = None, **more: Any) -> None:
        """Begin to read on every rank."""

        def begin(rank: int) -> Any:
            settings: dict[str, Any] = {"stream": "train", "generation": "g", "group": 0, "client": rank}
            settings |= {"state": state(0), "depth": 2, "stall_timeout": 60.0, "inline": False, "opening": b"1"} | more
            settings = {name: value(rank) if callable(value) else value for name, value in settings.items()}
            return open_reader(ports[rank], finish or steps_of, peers=self.groups[rank], **settings)

        self.readers = self.run(begin)

    def steps(self, count: int) -> list[Any]:
        """The next so many microbatches of each rank, or the error that ended them."""
        return self.run(lambda rank: [step(self.readers[rank].next()) for _ in range(count)])

    def close(self) -> None:
        for reader in self.readers:
            if isinstance(reader, GroupReader):
                reader.close()
        self._pool.shutdown()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    job = Ranks()
    yield job
    job.close()


def steps_of(found: BatchWindow, first_step: int) -> Iterator[Any]:
    """One microbatch per step: its number, and the state behind it."""
    for step in range(first_step, found.first_step + found.num_steps):
        yield {"step": step}, found.states[step + 1 - found.first_step]


def step(item: Any) -> int | None:
    return None if item is None else item[0]["step"]


def ending(first_step: int, *, passes: int = 0, ended: bool = True) -> BatchWindow:
    last = window(first_step)
    return replace(last, states=(last.states[0], replace(last.states[1], ended=ended, passes=passes)))


class TestDelivery:
    def test_one_rank_asks_and_all_have_the_same(self) -> None:
        job = Ranks(4, fetcher=2)
        ports = [Port(window(0, 3), window(3, 1)) for _ in range(4)]
        job.read(ports)
        assert job.steps(6) == [[0, 1, 2, 3, 4, 5]] * 4
        asked = [rank for rank, port in enumerate(ports) if port.fetched or port.opened]
        assert asked == [2], "peers are no clients"
        job.close()

    def test_states_reach_all_ranks(self, ranks: Ranks) -> None:
        ports = [Port(*(window(at, 2) for at in (0, 2))) for _ in range(2)]
        ranks.read(ports)
        mine, its = ranks.run(lambda rank: [ranks.readers[rank].next()[1] for _ in range(4)])
        assert [found.step for found in mine] == [found.step for found in its] == [1, 2, 3, 4]
        assert all(np.array_equal(one.sources, other.sources) for one, other in zip(mine, its, strict=True))

    @pytest.mark.parametrize("last", [ending(1), ending(1, ended=False, passes=1)], ids=["stream", "pass"])
    @pytest.mark.parametrize("inline", [False, True])
    def test_the_end_is_the_same_everywhere(self, ranks: Ranks, last: BatchWindow, inline: bool) -> None:
        ports = [Port(window(0), last) for _ in range(2)]
        ranks.read(ports, inline=inline)
        assert ranks.steps(4) == [[0, 1, None, None]] * 2
        assert ports[0].closed.wait(10), "the fetcher has left the stream"

    def test_a_stream_that_is_over_gives_nothing(self, ranks: Ranks) -> None:
        ranks.read([Port(window(0, 0)) for _ in range(2)])
        assert ranks.steps(2) == [[None, None]] * 2

    def test_only_the_fetcher_says_what_is_consumed(self, ranks: Ranks) -> None:
        """A planner that forgot it is opened again from there."""
        ports = [Port(window(0), window(1), NotOpenError("gone"), window(2)) for _ in range(2)]

        def body(rank: int) -> list[Any]:
            found = []
            for after in (1, 2, 3):
                found.append(step(ranks.readers[rank].next()))
                ranks.readers[rank].consumed(state(after))
            return found

        ranks.read(ports)
        assert ranks.run(body) == [[0, 1, 2]] * 2
        assert len(ports[0].opened) == 2
        assert not ports[1].opened

    def test_a_fetcher_may_be_late(self, ranks: Ranks) -> None:
        ranks.read([Port() for _ in range(2)])
        fetching = ranks.run  # the pool has a thread for each
        futures = ranks.start(lambda rank: [step(ranks.readers[rank].next()) if rank == 1 else None])
        assert futures[0].result(LIMIT_S) == [None]
        assert fetching(lambda rank: step(ranks.readers[rank].next()) if rank == 0 else None) == [0, None]
        assert futures[1].result(LIMIT_S) == [0]

    def test_a_loop_that_breaks_off_leaves_nothing_under_way(self, ranks: Ranks) -> None:
        """Another opening follows at once, while the old threads may still be at work."""
        ranks.read([Port(window(0, 4)) for _ in range(2)])
        assert ranks.steps(2) == [[0, 1]] * 2
        old = ranks.readers
        ranks.read([Port(window(1, 2), window(3, 2)) for _ in range(2)], state=state(1), opening=b"2")
        assert ranks.steps(3) == [[1, 2, 3]] * 2
        for reader in old:
            reader.close()
            assert reader.ended

    def test_two_streams_take_turns(self, ranks: Ranks) -> None:
        ranks.read([Port(window(0, 2), window(2, 2)) for _ in range(2)])
        training = ranks.readers
        ranks.read([Port(ending(0)) for _ in range(2)], stream="val/0", opening=b"val")
        validating = ranks.readers

        def body(rank: int) -> list[Any]:
            readers = (training, validating, training, validating, training)
            return [step(which[rank].next()) for which in readers]

        assert ranks.run(body) == [[0, 0, 1, None, 2]] * 2
        for reader in training:
            reader.close()


class TestChanges:
    def test_rank_0_tells_them_where_another_fetches_for_it(self) -> None:
        told: list[Any] = []

        class Telling(Port):
            def set_changes(self, stream: str, generation: str, changes: Any) -> None:
                told.append((stream, generation, changes))

        job = Ranks(2, fetcher=1)
        change = MixtureChange(40, np.ones(1))
        job.read([Telling(), Telling()], state=lambda rank: replace(state(0), changes=(change,) if rank == 0 else ()))
        assert told == [("train", "g", (change,))], "what its own state alone holds, at the opening"
        job.readers[0].set_changes((change, change))
        assert told[1:] == [("train", "g", (change, change))]
        assert job.steps(1) == [[0]] * 2
        job.close()


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            CorruptDataError("source 'web', file a.parquet, unit 3: torn"),
            StateError("the ranks have loaded different checkpoints"),
            KeyboardInterrupt(),
            ValueError("a user's own"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_peers_fail_as_the_fetcher_does(self, ranks: Ranks, error: BaseException) -> None:
        class Failing(Port):
            def fetch(self, *args: Any) -> Any:
                if self.fetched:
                    raise error
                return super().fetch(*args)

        ranks.read([Failing(), Failing()])
        assert ranks.steps(1) == [[0]] * 2
        for found in ranks.steps(1):
            assert type(found) is type(error)
            assert str(found) == str(error)
        again = ranks.steps(1)
        assert all(isinstance(found, (type(error), StreamError)) for found in again), "and give nothing more"
        assert all(reader.failed for reader in ranks.readers)

    def test_what_stalls_the_fetcher_ends_its_peers(self, ranks: Ranks) -> None:
        ranks.read([Port(*[NotYet("client 7 has consumed step 3")] * 99) for _ in range(2)], stall_timeout=0.0)
        for found in ranks.steps(1):
            assert isinstance(found, StalledError)
            assert "client 7 has consumed step 3" in str(found)

    def test_an_opening_that_fails(self, ranks: Ranks) -> None:
        class Closed(Port):
            def open(self, *args: Any) -> None:
                raise RuntimeFailure("the runtime is closed")

        def body(rank: int) -> Any:
            settings: dict[str, Any] = {"stream": "train", "generation": "g", "group": 0, "client": rank}
            settings |= {"state": state(0), "depth": 2, "stall_timeout": 60.0, "inline": False, "opening": b"1"}
            return open_reader(Closed(), steps_of, peers=ranks.groups[rank], **settings).next()

        assert [str(found) for found in ranks.run(body)] == ["the runtime is closed"] * 2

    def test_an_error_that_cannot_be_sent_is_told_in_words(self, ranks: Ranks) -> None:
        class Odd(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"{one} and {two}")

        ranks.read([Port(Odd(1, 2)), Port()])
        mine, its = ranks.steps(1)
        assert isinstance(mine, Odd)
        assert isinstance(its, RuntimeFailure)
        assert "rank 0" in str(its)
        assert "Odd: 1 and 2" in str(its)

    def test_a_window_that_does_not_pickle(self, ranks: Ranks) -> None:
        column = np.empty(1, object)
        column[0] = lambda: None
        ranks.read([Port(replace(window(0), samples={"odd": column})), Port()])
        for found in ranks.steps(1):
            assert isinstance(found, StreamError)
            assert "does not pickle" in str(found)

    def test_a_closed_loader_ends_its_peers(self, ranks: Ranks) -> None:
        """Closed by another thread while the ranks wait for a batch."""
        gate, asked = threading.Event(), threading.Event()

        class Silent(Port):
            def fetch(self, *args: Any) -> Any:
                asked.set()
                gate.wait(LIMIT_S)
                return NotYet("nothing")

        ranks.read([Silent(), Silent()])
        waiting = ranks.start(lambda rank: ranks.readers[rank].next())
        assert asked.wait(LIMIT_S)
        ranks.readers[0].stop()
        gate.set()
        for future in waiting:
            with pytest.raises(StreamError, match="the loader was closed"):
                future.result(LIMIT_S)

    def test_ranks_that_do_not_do_alike_are_told(self, ranks: Ranks) -> None:
        """Rank 1 has loaded a state that rank 0 has not."""
        ranks.read([Port(), Port()], state=lambda rank: state(3 * rank))
        mine, its = ranks.run(
            lambda rank: ranks.readers[rank].next() if rank else ranks.readers[0].next(self.ends_after(1.0))
        )
        assert isinstance(its, StreamError)
        assert "from step 3 on" in str(its)
        assert "from step 0 on" in str(its)
        assert isinstance(mine, InterruptedError), "it waits until the other's process is gone"

    @staticmethod
    def ends_after(seconds: float) -> Callable[[], bool]:
        limit = time.monotonic() + seconds
        return lambda: time.monotonic() > limit

    def test_a_wait_that_is_broken_off_ends_the_use_of_the_group(self, ranks: Ranks) -> None:
        """Else what was awaited then would be taken for an answer to the next question."""
        ranks.read([Port(), Port()])

        def body(rank: int) -> Any:
            return ranks.readers[1].next(lambda: True) if rank == 1 else None

        assert isinstance(ranks.run(body)[1], InterruptedError)
        ranks.read([Port(), Port()], opening=b"2")
        found = ranks.run(lambda rank: ranks.readers[1].next() if rank == 1 else None)[1]
        assert isinstance(found, StreamError)
        assert "was broken off" in str(found)


class TestWaiting:
    def test_the_fetcher_says_that_it_waits(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Longer than a collective may take; none of what it says reaches the training loop."""
        monkeypatch.setattr(broadcasting, "_HEARTBEAT_S", 0.0)
        beats: list[int] = []
        gate = threading.Event()
        broadcast = ranks.groups[0]._broadcast

        def counted(tensor: Any) -> Any:
            beats.append(int(tensor[0]))
            if len(beats) == 3:
                gate.set()
            return broadcast(tensor)

        class Slow(Port):
            def fetch(self, *args: Any) -> Any:
                assert gate.wait(LIMIT_S)
                return super().fetch(*args)

        ranks.groups[0]._broadcast = counted
        ranks.read([Slow(), Slow()])
        assert ranks.steps(2) == [[0, 1]] * 2
        assert beats[:3] == [0, 0, 0]

    def test_a_fetcher_that_is_gone_ends_its_peers(self) -> None:
        """What `torch.distributed` says of a lost connection, in our words."""

        class Lost:
            def is_completed(self) -> bool:
                return True

            def wait(self, *limit: Any) -> None:
                raise RuntimeError("Connection closed by peer")

        group = PeerGroup((3, 5), 5, lambda tensor: Lost())
        settings: dict[str, Any] = {"stream": "train", "generation": "g", "group": 0, "client": 5}
        settings |= {"state": state(0), "depth": 2, "stall_timeout": 60.0, "inline": False, "opening": b"1"}
        reader = open_reader(Port(), steps_of, peers=group, **settings)
        with pytest.raises(RuntimeFailure, match=r"rank 3, which fetches for it, cannot be reached.*closed by peer"):
            reader.next()
        with pytest.raises(MegaScaleError):
            reader.next()
        reader.close()
