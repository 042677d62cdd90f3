"""What a data constructor remembers: generations, their clients, and windows of steps on the way from plan to batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from megascale_lightning.constructing.assembling import (
    Asked,
    Take,
    assemble,
    end_window,
    plan_takes,
    rows_of_group,
    samples_of_rows,
)
from megascale_lightning.rows import CollatedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import PIECE, BatchWindow, NotYet, PartKey, PlanWindow, SampleBlock

__all__ = ["Build", "Client", "Failure", "Generation", "Window"]


class Failure:
    """An error that stands for a window until one who was told asks again."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._traceback: TracebackType | None = error.__traceback__
        self._told: set[int] = set()

    def is_news_for(self, client: int) -> bool:
        """Whether the client has not been told yet."""
        return client not in self._told

    def tell(self, client: int) -> Exception:
        """Give the error for raising; with its first traceback, which would otherwise grow with every asker."""
        self._told.add(client)
        return self._error.with_traceback(self._traceback)


@dataclass(slots=True, kw_only=True)
class Build:
    """One window of one group, on its way from the loaders into a batch."""

    asked: Asked = field(default_factory=lambda: Asked(pieces=np.empty(0, PIECE), row_offsets=np.zeros(1, np.int64)))
    takes: tuple[Take, ...] = ()
    blocks: list[SampleBlock | None] = field(default_factory=list)
    """What `takes` were answered with; emptied once the batch is made."""
    due: list[int] = field(default_factory=list)
    """Takes to be asked for."""
    batch: BatchWindow | None = None
    failure: Failure | None = None

    def begin(self, spec: StreamSpec, plan: PlanWindow, group: int, loader_of: Callable[[PartKey], str]) -> None:
        """Find out what the group needs."""
        pieces, row_offsets = rows_of_group(plan, group)
        self.asked = Asked(pieces=pieces, row_offsets=row_offsets)
        if isinstance(spec.rows, CollatedRows):
            self.asked = samples_of_rows(plan, group, pieces, row_offsets)
        self.takes = plan_takes(plan.stream, self.asked.pieces, loader_of)
        self.blocks = [None] * len(self.takes)
        self.due = list(range(len(self.takes)))

    def receive(self, index: int, answer: SampleBlock | NotYet) -> None:
        """Keep the answer to one take, or let it be asked for again; what comes after a failure is dropped."""
        if self.failure is not None:
            return
        if isinstance(answer, NotYet):
            self.due.append(index)
        else:
            self.blocks[index] = answer

    def finish(self, spec: StreamSpec, plan: PlanWindow) -> None:
        """Make the batch if all blocks are there."""
        blocks = [block for block in self.blocks if block is not None]
        if self.batch is not None or self.failure is not None or len(blocks) < len(self.takes):
            return
        self.batch = assemble(spec, plan, self.asked, self.takes, blocks)
        self.takes, self.blocks = (), []

    def fail(self, error: Exception) -> None:
        """Give the build up; the first error is the one that is kept."""
        self.failure = self.failure or Failure(error)
        self.takes, self.blocks, self.due = (), [], []

    def waiting_for(self) -> list[str]:
        """Names of the loaders that have not answered."""
        return [take.loader for take, block in zip(self.takes, self.blocks, strict=True) if block is None]


@dataclass(slots=True, kw_only=True)
class Window:
    """Consecutive steps of one generation: planned once for all groups, built for each."""

    first_step: int
    count: int
    """Steps asked for."""
    plan: PlanWindow | None = None
    planning: bool = False
    """The planner is being asked."""
    refusal: NotYet | None = None
    """The planner may not plan it yet."""
    retried: set[int] = field(default_factory=set)
    """Clients that asked since the refusal."""
    failure: Failure | None = None
    builds: dict[int, Build] = field(default_factory=dict)
    """By group."""

    @property
    def stop_step(self) -> int:
        """One past its last step."""
        return self.first_step + (self.count if self.plan is None else len(self.plan.steps))

    def is_due(self) -> bool:
        """Whether the planner is to be asked."""
        return self.plan is None and not self.planning and self.refusal is None and self.failure is None

    def rearm(self) -> None:
        """Let the planner be asked again after a refusal."""
        self.refusal = None
        self.retried.clear()

    def ask_again(self, client: int) -> None:
        """Take note of a client that asks for a window which the planner has refused.

        Its first question after the refusal is the runtime's own retry of what it had parked. To pass that on would ask
        the planner without end; the next one comes from the client.
        """
        if self.refusal is None:
            return
        if client in self.retried:
            self.rearm()
        else:
            self.retried.add(client)


@dataclass(slots=True, kw_only=True)
class Client:
    """One place of the stream."""

    group: int
    consumed: int = -1
    asked: int
    """First step of the window that it asked for last."""

    @property
    def freed(self) -> int:
        """Last step that it does not need any more."""
        return min(self.consumed, self.asked - 1)

    @property
    def next_step(self) -> int:
        """Where reading ahead for it begins."""
        return max(self.consumed + 1, self.asked)


@dataclass(slots=True, kw_only=True)
class Generation:
    """One opening of a stream, with all that was planned and built for it."""

    spec: StreamSpec
    stream: str
    name: str
    clients: dict[int, Client] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    """By first step."""
    watermark: int = -1
    """As the planner said last."""
    end: BatchWindow | None = None
    """A window without steps, once it is known where the stream ends."""
    untold: dict[int, int] = field(default_factory=dict)
    """Consumed steps by client that the planner has not been told."""
    telling: bool = False
    """The planner is being told."""
    silenced: bool = False
    """Telling failed; not to be tried again before there is something new to tell."""

    def note(self, client: int, group: int, first_step: int, consumed: int) -> None:
        """Take note of what a client asks for, and where it stands."""
        known = self.clients.setdefault(client, Client(group=group, asked=first_step))
        known.group, known.asked = group, first_step
        self.mark(client, consumed)

    def mark(self, client: int, consumed: int) -> None:
        """Take note of a consumed step. It never goes back: late repeats of old questions arrive."""
        known = self.clients.get(client)
        if known is not None and consumed > known.consumed:
            known.consumed = self.untold[client] = consumed
            self.silenced = False
            self.rearm()

    def forget(self, client: int) -> None:
        """Remove a client, and the batches of its group if nobody else takes them."""
        gone = self.clients.pop(client, None)
        self.untold.pop(client, None)
        if gone is not None and gone.group not in self.groups():
            for window in self.windows.values():
                window.builds.pop(gone.group, None)

    def groups(self) -> dict[int, int]:
        """Group with an open client -> the step at which reading ahead for it begins."""
        found: dict[int, int] = {}
        for client in self.clients.values():
            found[client.group] = min(client.next_step, found.get(client.group, client.next_step))
        return found

    def rearm(self) -> None:
        """Let the planner be asked again for what it has refused."""
        for window in self.windows.values():
            window.rearm()

    def free(self) -> None:
        """Drop the windows that lie at or below the watermark."""
        watermark = min([self.watermark, *(client.freed for client in self.clients.values())])
        for first_step in [first for first, window in self.windows.items() if window.stop_step - 1 <= watermark]:
            del self.windows[first_step]

    def window_at(self, step: int) -> Window:
        """Give the window that holds a step; a new one begins at it."""
        for window in self.windows.values():
            if window.first_step <= step < window.stop_step:
                return window
        return self.windows.setdefault(step, Window(first_step=step, count=self.spec.plan_window))

    def renew(self, window: Window, step: int) -> Window:
        """Give up a window that failed, and begin a new one at a step."""
        del self.windows[window.first_step]
        return self.window_at(step)

    def end_before(self, step: int) -> BatchWindow | None:
        """Give the window without steps if the stream is known to end before a step."""
        return self.end if self.end is not None and step >= self.end.first_step else None

    def accept(self, window: Window, plan: PlanWindow) -> None:
        """Keep an answer of the planner."""
        window.plan = plan
        self.watermark = plan.watermark
        if plan.states[-1].ended or len(plan.steps) < window.count:
            self.end = end_window(self.spec, plan, window.first_step + len(plan.steps))
        if not plan.steps and self.windows.get(window.first_step) is window:
            del self.windows[window.first_step]
