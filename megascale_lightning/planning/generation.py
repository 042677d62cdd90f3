"""`Generation`: one opening of a stream, with its clients, its states and the steps planned so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from megascale_lightning.errors import NotOpenError, StateError
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.stepping import StepPlanner
from megascale_lightning.streams import StreamSpec, initial_state, weights_by_step
from megascale_lightning.types import (
    Change,
    LoaderState,
    MixtureChange,
    NotYet,
    PartKey,
    PlanWindow,
    StepPlan,
    change_key,
)

__all__ = ["Generation"]

_Place = tuple[int, int, int]
_PLACE: Final = ["epoch", "window", "part"]


class Generation:
    """Plans forward from the states that its clients opened it with, and keeps what lies above the lowest watermark.

    In passes, it ends with the pass that it was opened in.

    A client that comes late, or asks again for what is freed, is served by planning forward once more from the nearest
    state that is known: the same state gives the same steps.
    """

    def __init__(self, spec: StreamSpec, name: str, blocks: BlockStore, changes: Iterable[Change] = ()) -> None:
        self._spec = spec
        self._name = name
        self._planner = StepPlanner(spec, blocks)
        self._states: dict[int, LoaderState] = {}
        self._plans: dict[int, StepPlan] = {}
        self._changes = {change_key(change): change for change in changes}
        self._pass: int | None = None
        self._ahead: list[PartKey] = []
        """What was wanted last, so that it stays until it is used."""
        self.clients: dict[int, int] = {}

    @staticmethod
    def unknown(stream: str, generation: str) -> NotOpenError:
        """The error for a generation that nobody has open."""
        return NotOpenError(f"stream {stream!r}: generation {generation} is not open here; its clients have to open it")

    @property
    def watermark(self) -> int:
        """The lowest consumed step of the open clients; -1: none."""
        return min(self.clients.values(), default=-1)

    @property
    def num_steps(self) -> int:
        """Plans that are held."""
        return len(self._plans)

    def open(self, client: int, state: LoaderState | None) -> None:
        """Register a client that starts at `state`. Raises: StateError: It contradicts another client's state."""
        start = initial_state(self._spec) if state is None else state
        if len(start.sources) != len(self._spec.sources):
            raise StateError(
                f"stream {self._spec.name!r}: the state has {len(start.sources)} sources, the config "
                f"{len(self._spec.sources)}"
            )
        known = self._states.get(start.step)
        if known is not None and known.certificate != start.certificate:
            raise StateError(
                f"stream {self._spec.name!r}, step {start.step}: client {client} opens it with certificate "
                f"{start.certificate.hex()[:16]}, other clients with {known.certificate.hex()[:16]}: the ranks have "
                "loaded different checkpoints"
            )
        self._states.setdefault(start.step, start)
        self._pass = start.passes if self._pass is None else self._pass
        self.clients[client] = start.step - 1
        self.change(start.changes)

    def change(self, changes: Iterable[Change]) -> None:
        """Take note of changes to come; those known already are fine.

        Raises:
            StateError: A step that one of them governs is planned already.
        """
        for change in changes:
            if self._changes.get(change_key(change)) == change:
                continue
            if any(step >= change.step for step in self._plans):
                what = "its mixture" if isinstance(change, MixtureChange) else "what its rows cost"
                raise StateError(
                    f"stream {self._spec.name!r}: step {max(self._plans)} is planned already, so {what} cannot change "
                    f"from step {change.step} on"
                )
            self._changes[change_key(change)] = change

    def close(self, client: int) -> None:
        """A client leaves."""
        self.clients.pop(client, None)

    def mark(self, marks: Mapping[int, int]) -> bool:
        """Take note of consumed steps; True if the lowest one moved."""
        before = self.watermark
        for client, step in marks.items():
            if step > self.clients.get(client, step):
                self.clients[client] = step
        if self.watermark == before:
            return False
        self._forget()
        return True

    def window(self, first_step: int, count: int) -> PlanWindow | NotYet:
        """Steps [first_step, first_step + count), as far as the stream goes.

        Raises:
            NeedBlocks: Parts have to be described first.
            NotOpenError: No state at or before `first_step` is known.
        """
        if not self.clients:
            raise self.unknown(self._spec.name, self._name)
        limit = self.watermark + 1 + self._spec.prefetch_steps
        if first_step > limit:
            slowest = min(self.clients, key=lambda client: self.clients[client])
            return NotYet(
                f"step {first_step} of stream {self._spec.name!r} is further ahead than prefetch_steps="
                f"{self._spec.prefetch_steps} allows: client {slowest} has consumed step {self.clients[slowest]}"
            )
        state = self._state_before(first_step)
        states, steps = [state], []
        for step in range(first_step, first_step if self._is_over(state) else first_step + count):
            plan, state = self._advance(step)
            if plan is None:
                states[-1] = state
                break
            steps.append(plan)
            states.append(state)
            if self._is_over(state):
                break
        return PlanWindow(
            stream=self._spec.name,
            generation=self._name,
            first_step=first_step,
            steps=tuple(steps),
            states=tuple(states),
            watermark=self.watermark,
        )

    def upcoming(self) -> list[PartKey]:
        """Parts worth having now, so that the next steps need not wait for them; none of the next pass."""
        newest = self._states[max(self._states)]
        self._ahead = [] if self._is_over(newest) else self._planner.upcoming(newest)
        return self._ahead

    def floor(self) -> Floor:
        """What the oldest state that is held can still ask for."""
        return Floor(self._states[min(self._states)], self._states[max(self._states)], self._ahead)

    def _advance(self, step: int) -> tuple[StepPlan | None, LoaderState]:
        """The plan of a step and the state after it; (None, ended state) where there is no such step."""
        if step not in self._plans and not self._plan(step):
            return None, self._states[step]
        if step + 1 not in self._plans and not self._is_over(self._states[step + 1]) and self._may_end(step + 1):
            # One step of lookahead, so that the last step is known to be the last.
            self._plan(step + 1)
        return self._plans[step], self._states[step + 1]

    def _plan(self, step: int) -> bool:
        """Plan a step; False where there is none, which its state says from then on."""
        plan, after = self._planner.plan(self._states[step], self._changes.values())
        if plan is None:
            self._states[step] = after
            return False
        self._plans[step] = plan
        self._states[step + 1] = after
        return True

    def _is_over(self, state: LoaderState) -> bool:
        """Whether this generation has no step at or behind a state."""
        return state.ended or (self._pass is not None and state.passes > self._pass)

    def _may_end(self, step: int) -> bool:
        """Whether there may be no step of this number."""
        weights = self._spec.weights_at(step, self._states[step], weights_by_step(self._changes.values()))
        endless = (spec.epochs is None and weight > 0 for spec, weight in zip(self._spec.sources, weights, strict=True))
        return self._spec.passes or self._spec.stop != "all" or not any(endless)

    def _state_before(self, step: int) -> LoaderState:
        """The state before a step, planned forward to where it must be."""
        known = [at for at in self._states if at <= step]
        if not known:
            raise self.unknown(self._spec.name, self._name)
        at = max(known)
        while at < step and not self._is_over(self._states[at]):
            self._advance(at)
            at += 1
        return self._states[min(at, step)]

    def _forget(self) -> None:
        """Free what lies below the lowest watermark; the state before the first step that is not consumed stays."""
        keep = self.watermark + 1
        for step in [step for step in self._plans if step < keep]:
            del self._plans[step]
        if keep in self._states:
            for step in [step for step in self._states if step < keep]:
                del self._states[step]
            for key in [key for key in self._changes if key[0] < keep]:
                del self._changes[key]


class Floor:
    """The parts that states need: those at or behind the positions of the oldest, and those of its carry-over.

    Levels of a curriculum that lag behind need what lies between their places in the oldest and in the newest state,
    and what was wanted last.
    """

    __slots__ = ("_ahead", "_carried", "_lagging", "_places")

    def __init__(self, oldest: LoaderState, newest: LoaderState, ahead: Iterable[PartKey]) -> None:
        self._places = oldest.sources[_PLACE].tolist()
        carried = (oldest.carry[name].tolist() for name in ("source", *_PLACE))
        self._carried = set(zip(*carried, strict=True))
        self._lagging: list[set[tuple[_Place, _Place]]] = [set() for _ in self._places]
        self._ahead: set[PartKey] = set()
        if newest.levels is not None:
            self._ahead.update(ahead)
            begin = newest.levels if oldest.levels is None else oldest.levels
            for lagging, first, last in zip(self._lagging, begin, newest.levels, strict=True):
                lagging.update(zip(first[_PLACE].tolist(), last[_PLACE].tolist(), strict=True))

    def needs(self, key: PartKey) -> bool:
        """Whether a part may be asked for again."""
        place = (key.epoch, key.window, key.part)
        if place >= self._places[key.source] or (key.source, *place) in self._carried:
            return True
        return key in self._ahead or any(first <= place <= last for first, last in self._lagging[key.source])
