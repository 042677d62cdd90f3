"""`DeadlineMixer`: which source gives the next sample, earliest deadline first.

Each source i is owed a share e_i that grows with every draw and has given g_i. The draws of one step run on a virtual
time t that starts at 0: e_i(t) = e_i + w_i t, so source i may give its next sample from t = (g_i - e_i) / w_i on and
should have given it by t = (g_i + c - e_i) / w_i. All samples that may become due are laid out with these two times as
arrays; what is left to do one by one is a heap of their ranks by deadline. The share is brought up to date at every
step boundary, so that a resumed run computes with the same floats. With fixed weights every prefix is within one sample
of its share (by tokens: within one longest sample), which is the pinwheel property of this schedule; sorting by
(k + 1/2) / weight is not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heappushpop
from math import fsum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_lightning.types import FloatArray, IntArray

__all__ = ["DeadlineMixer", "Draws", "grouping", "numbering"]


class Draws(NamedTuple):
    """What a mixer would draw next."""

    sources: IntArray
    """int64 [n]: the source of each draw."""
    blocked: int | None
    """The source that is due then, of whose next sample nothing was said; None: the horizon was reached."""


class DeadlineMixer:
    """Draws sources in proportion to their weights.

    Args:
        names: Source names; they break ties.
        weights: Not negative, not normalised; a source of weight 0 is never drawn.
        share: e_i, as saved.
        given: g_i, as saved.
        live: Whether the source has anything left.
        unit: "samples": a draw costs 1; "tokens": it costs the length of the source's next sample.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | FloatArray,
        *,
        share: Sequence[float] | FloatArray,
        given: Sequence[float] | FloatArray,
        live: Sequence[bool] | npt.NDArray[np.bool_],
        unit: Literal["samples", "tokens"] = "samples",
    ) -> None:
        self._rank = np.empty(len(names), np.int64)
        self._rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        self._raw = np.array(weights, np.float64)
        self.share: FloatArray = np.array(share, np.float64)
        self.given: FloatArray = np.array(given, np.float64)
        self._live = np.array(live, bool) & (self._raw > 0)
        self._by_tokens = unit == "tokens"
        self._time = 0.0
        self._normalise()

    @property
    def live(self) -> bool:
        """Whether there is a source to draw from."""
        return bool(self._live.any())

    def expected(self, horizon: float) -> FloatArray:
        """float64 [sources]: at most so much (samples, or tokens) is drawn of each within `horizon` of the same."""
        due = (self._time + horizon) * self._weight + self.share - self.given
        return np.where(self._live, np.maximum(np.ceil(due), 0.0) + 1.0, 0.0)

    def draw(self, horizon: float, known: Sequence[int] | IntArray, costs: Sequence[IntArray] = ()) -> Draws:
        """What comes next; nothing is booked.

        Args:
            horizon: So many samples (by tokens: at least so many tokens, unless blocked) from here on.
            known: Samples of each source that are known to follow.
            costs: By tokens: their lengths, int [known] for each source.
        """
        if not self.live:
            return Draws(np.empty(0, np.int64), None)
        if self._by_tokens:
            return self._draw_tokens(horizon, costs)
        return self._draw_samples(int(horizon), np.asarray(known, np.int64))

    def book(self, sources: IntArray, tokens: IntArray | None = None) -> None:
        """Draws were taken: int64 [n] of `draw`, by tokens with the length of each, int64 [n]."""
        costs = tokens if self._by_tokens else None
        given = np.bincount(sources, weights=costs, minlength=len(self.given))
        self.given += given
        self._time += float(given.sum())

    def leave(self, source: int) -> None:
        """The source has nothing left: the others share the next draw and what follows."""
        self._live[source] = False
        self.settle()
        self._normalise()

    def settle(self) -> None:
        """Bring every share up to date; the virtual time starts at 0 again."""
        self.share += self._weight * self._time
        self._time = 0.0

    def _normalise(self) -> None:
        total = fsum(self._raw[self._live].tolist())
        self._weight: FloatArray = np.where(self._live, self._raw / (total or 1.0), 0.0)

    def _draw_samples(self, count: int, known: IntArray) -> Draws:
        live = np.flatnonzero(self._live)
        if len(live) == 1:
            sources = np.full(count, live[0])  # there is nothing to choose
        else:
            jobs = self._expected_jobs(count)
            released = np.cumsum(np.bincount(jobs.releases, minlength=count))[:count]
            drawn = _Run(jobs).at_times(released.tolist())
            sources = jobs.sources[np.fromiter(drawn, np.int64, len(drawn))]
        # The k-th sample of a source that is drawn has to be known.
        if (np.bincount(sources, minlength=len(known)) <= known).all():
            return Draws(sources, None)
        first = int(np.argmax(numbering(sources) >= known[sources]))
        return Draws(sources[:first], int(sources[first]))

    def _expected_jobs(self, count: int) -> _Jobs:
        live = np.flatnonzero(self._live)
        counts = self.expected(count)[live].astype(np.int64) + 1
        sources = np.repeat(live, counts)
        nth = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        given = self.given[sources] + nth
        # Draw k is made at the whole time k + 1: the draw from which on a job is released says as much as its time.
        draws = np.clip(np.floor(self._owed(sources, given)) - self._time, 0, count)
        # Numpy sorts integers of two bytes the fastest.
        return self._jobs(sources, draws.astype(np.min_scalar_type(count)), self._owed(sources, given + 1))

    def _draw_tokens(self, horizon: float, costs: Sequence[IntArray]) -> Draws:
        live = np.flatnonzero(self._live)
        sizes = np.array([len(costs[source]) for source in live.tolist()], np.int64) + 1
        sources = np.repeat(live, sizes)
        # Behind the known samples of each source stands one of unknown length.
        lengths = np.concatenate([np.append(costs[source], 0) for source in live.tolist()]).astype(np.int64)
        ends = np.cumsum(sizes)
        totals = np.concatenate([[0], np.cumsum(lengths)])
        before = totals[:-1] - np.repeat(totals[ends - sizes], sizes)
        given = self.given[sources] + before
        lengths[ends - 1] = -1
        jobs = self._jobs(sources, self._owed(sources, given), self._owed(sources, given + lengths), lengths)
        drawn, blocked = _Run(jobs).by_cost(self._time, self._time + horizon)
        return Draws(jobs.sources[drawn], None if blocked is None else int(jobs.sources[blocked]))

    def _owed(self, sources: IntArray, given: FloatArray) -> FloatArray:
        """float64 [n]: when each of the sources is owed so much."""
        return (given - self.share[sources]) / self._weight[sources]

    def _jobs(
        self, sources: IntArray, releases: IntArray | FloatArray, deadlines: FloatArray, costs: IntArray | None = None
    ) -> _Jobs:
        by_deadline = np.lexsort((self._rank[sources], deadlines))
        ranks = np.empty(len(sources), np.int64)
        ranks[by_deadline] = np.arange(len(sources))
        by_release = np.argsort(releases, kind="stable")
        return _Jobs(
            sources=sources[by_deadline],
            releases=releases[by_release],
            ranks=ranks[by_release].tolist(),
            costs=None if costs is None else costs[by_deadline].tolist(),
        )


def grouping(values: IntArray) -> IntArray:
    """int64 [n], not negative -> their stable rising order: integers of two bytes sort in a fifth of the time."""
    return np.argsort(values.astype(np.uint16) if values.max(initial=0) < 1 << 16 else values, kind="stable")


def numbering(sources: IntArray) -> IntArray:
    """int64 [n], not negative -> int64 [n]: how many of the same source come before each."""
    counts = np.bincount(sources)
    found = np.empty(len(sources), np.int64)
    found[grouping(sources)] = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


class _Jobs(NamedTuple):
    """Samples that may be drawn, each a job with a release time and a deadline."""

    sources: IntArray
    """By rank, which is that of the deadline."""
    releases: IntArray | FloatArray
    """In rising order: times; by samples int, the draws from which on they are released."""
    ranks: list[int]
    """In the order of `releases`."""
    costs: list[int] | None
    """By rank; -1: unknown."""


class _Run:
    """One run over the jobs: of those released, the one with the first deadline; if there is none, of all that wait.

    By tokens every debt can be exactly 0, so that nobody is owed anything; by samples it takes a source that left while
    it was owed some.
    """

    def __init__(self, jobs: _Jobs) -> None:
        self._jobs = jobs
        self._ready: list[int] = []
        self._released = 0
        self._waiting: _Waiting | None = None
        """Made when it is first needed."""

    def at_times(self, released: list[int]) -> list[int]:
        """The job of each moment, at which the first so many jobs are released; fewer if they run out."""
        ready, ranks = self._ready, self._jobs.ranks
        drawn: list[int] = []
        take = drawn.append
        at = 0
        for bound in released:
            while at < bound - 1:
                heappush(ready, ranks[at])
                at += 1
            if at < bound:
                take(heappushpop(ready, ranks[at]))
                at += 1
            elif ready:
                take(heappop(ready))
            else:
                self._released = bound
                return drawn + self._at_times_waiting(released[len(drawn) :])
        return drawn

    def _at_times_waiting(self, released: list[int]) -> list[int]:
        drawn = []
        for bound in released:
            self._release(bound)
            rank = heappop(self._ready) if self._ready else self._take_waiting()
            if rank is None:
                break
            drawn.append(rank)
        return drawn

    def by_cost(self, time: float, horizon: float) -> tuple[list[int], int | None]:
        """Jobs until the horizon, each taking its cost; and the first of unknown cost that may be taken before it."""
        ready, costs = self._ready, self._jobs.costs
        assert costs is not None
        sources: list[int] = self._jobs.sources.tolist()
        releases: list[float] = self._jobs.releases.tolist()
        left = Counter(source for source, cost in zip(sources, costs, strict=True) if cost >= 0)
        unknown: dict[int, int] = {}  # by source, released; due when nothing is left before it
        drawn: list[int] = []
        while time < horizon:
            bound = self._released
            while bound < len(releases) and releases[bound] < time:
                bound += 1
            unknown.update((sources[rank], rank) for rank in self._release(bound) if costs[rank] < 0)
            due = next((rank for source, rank in unknown.items() if not left[source]), None)
            if due is None and not ready:
                due = next((rank for rank in self._waiting_ranks() if costs[rank] < 0), None)
            if due is not None:
                return drawn, due
            rank = heappop(ready) if ready else self._take_waiting()
            if rank is None:
                break
            left[sources[rank]] -= 1
            drawn.append(rank)
            time += costs[rank]
        return drawn, None

    def _release(self, bound: int) -> list[int]:
        """Release the first so many jobs; those that were not taken before."""
        ranks = self._jobs.ranks[self._released : bound]
        self._released = max(self._released, bound)
        if self._waiting is not None:
            ranks = [rank for rank in ranks if self._waiting.release(rank)]
        costs = self._jobs.costs
        for rank in ranks:
            if costs is None or costs[rank] >= 0:
                heappush(self._ready, rank)
        return ranks

    def _waiting_ranks(self) -> list[int]:
        if self._waiting is None:
            self._waiting = _Waiting(self._jobs, self._released)
        return self._waiting.next

    def _take_waiting(self) -> int | None:
        self._waiting_ranks()
        assert self._waiting is not None
        return self._waiting.take()


class _Waiting:
    """The jobs that are not released, by source."""

    def __init__(self, jobs: _Jobs, released: int) -> None:
        self._source_of: list[int] = jobs.sources.tolist()
        self._queues: dict[int, deque[int]] = {}
        for rank in jobs.ranks[released:]:
            self._queues.setdefault(self._source_of[rank], deque()).append(rank)
        self._heap = [queue[0] for queue in self._queues.values()]
        heapify(self._heap)
        self._taken: set[int] = set()
        """Before their release."""

    @property
    def next(self) -> list[int]:
        """Of every source that has one the job that follows."""
        return [queue[0] for queue in self._queues.values() if queue]

    def release(self, rank: int) -> bool:
        """A job leaves at its time; False: it was taken before."""
        if rank in self._taken:
            self._taken.discard(rank)
            return False
        self._leave(rank)
        return True

    def take(self) -> int | None:
        """Take the one with the first deadline; None where a source has no job left to compare."""
        if not all(self._queues.values()):
            return None
        while self._heap:
            rank = heappop(self._heap)
            queue = self._queues[self._source_of[rank]]
            if queue[0] == rank:
                self._taken.add(rank)
                self._leave(rank)
                return rank
        return None

    def _leave(self, rank: int) -> None:
        queue = self._queues[self._source_of[rank]]
        queue.popleft()
        if queue:
            heappush(self._heap, queue[0])
