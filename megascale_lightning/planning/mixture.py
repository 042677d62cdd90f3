"""`DeadlineMixer`: which source gives the next sample, earliest deadline first.

Each source i is owed a share e_i that grows with every draw and has given g_i. The draws of one step run on a virtual
time t that starts at 0: e_i(t) = e_i + w_i t, so source i may give its next sample from t = (g_i - e_i) / w_i on and
should have given it by t = (g_i + c - e_i) / w_i. Two heaps, of those that wait and those that may, make a draw
O(log sources). The share is brought up to date and the heaps are built anew at every step boundary, so that a resumed
run computes with the same floats. With fixed weights every prefix is within one sample of its share (by tokens: within
one longest sample), which is the pinwheel property of this schedule; sorting by (k + 1/2) / weight is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Literal

__all__ = ["DeadlineMixer"]


class DeadlineMixer:
    """Draws sources in proportion to their weights.

    Args:
        names: Source names; they break ties.
        weights: Not negative, not normalised; a source of weight 0 is never drawn.
        share: e_i, as saved.
        given: g_i, as saved.
        live: Whether the source has anything left.
        unit: "samples": a draw costs 1; "tokens": it costs the length of the source's next sample.
        head_cost: By tokens: the length of the next sample of source i, or None if it has none. May raise; the mixer
            is then to be thrown away.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        *,
        share: Sequence[float],
        given: Sequence[float],
        live: Sequence[bool],
        unit: Literal["samples", "tokens"] = "samples",
        head_cost: Callable[[int], int | None] | None = None,
    ) -> None:
        by_name = sorted(range(len(names)), key=lambda index: names[index])
        self._rank = [0] * len(names)
        for rank, index in enumerate(by_name):
            self._rank[index] = rank
        self._by_rank = by_name
        self._raw = [float(weight) for weight in weights]
        self.share = [float(value) for value in share]
        self.given = [float(value) for value in given]
        self._live = [bool(alive) and weight > 0 for alive, weight in zip(live, self._raw, strict=True)]
        self._cost = [1] * len(names)
        self._by_tokens = unit == "tokens"
        self._head_cost = head_cost
        self._time = 0.0
        self._rebuild()

    def draws(self) -> Iterator[int]:
        """Sources to draw from, one after another, without end as long as any is live.

        A draw is booked when it is handed out. If its source turns out to have nothing left, `retire` takes it back;
        the iterator is then used up, and a new one goes on.
        """
        ready, waiting, by_rank = self._ready, self._waiting, self._by_rank
        given, share, weight = self.given, self.share, self._weight
        by_tokens = self._by_tokens
        while ready or waiting:
            time = self._time if by_tokens else self._time + 1.0
            while waiting and waiting[0][0] < time:
                self._make_ready(heappop(waiting)[1])
            if not ready:
                # No source is owed anything, so all may give. It happens by tokens, where every debt can be exactly 0.
                for _, rank in waiting:
                    self._make_ready(rank)
                waiting.clear()
            if self._exhausted:
                self._leave(self._exhausted)
                yield from self.draws()
                return
            rank = heappop(ready)[1]
            source = by_rank[rank]
            cost = self._cost[source]
            given[source] += cost
            self._time += cost
            heappush(waiting, ((given[source] - share[source]) / weight[source], rank))
            yield source

    def retire(self, source: int) -> None:
        """The source drawn last has nothing left: it leaves, and the others share that draw and what follows."""
        self.given[source] -= self._cost[source]
        self._time -= self._cost[source]
        self._leave([source])

    def settle(self) -> None:
        """Bring every share up to date; the virtual time starts at 0 again."""
        for source, weight in enumerate(self._weight):
            if weight:
                self.share[source] += weight * self._time
        self._time = 0.0

    def _leave(self, sources: Sequence[int]) -> None:
        for source in sources:
            self._live[source] = False
        self.settle()
        self._rebuild()

    def _make_ready(self, rank: int) -> None:
        source = self._by_rank[rank]
        cost: int | None = 1
        if self._by_tokens:
            assert self._head_cost is not None
            cost = self._head_cost(source)
        if cost is None:
            self._exhausted.append(source)
            return
        self._cost[source] = cost
        deadline = (self.given[source] + cost - self.share[source]) / self._weight[source]
        heappush(self._ready, (deadline, rank))

    def _rebuild(self) -> None:
        total = sum(weight for weight, alive in zip(self._raw, self._live, strict=True) if alive)
        self._weight = [weight / total if alive else 0.0 for weight, alive in zip(self._raw, self._live, strict=True)]
        self._exhausted: list[int] = []
        self._ready: list[tuple[float, int]] = []
        self._waiting = [
            ((self.given[source] - self.share[source]) / weight, self._rank[source])
            for source, weight in enumerate(self._weight)
            if weight
        ]
        heapify(self._waiting)
