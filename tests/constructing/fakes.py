"""A planner and loaders of a made-up stream, and the loop that plays the runtime between them and a constructor."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from megascale_lightning.constructing import DataConstructor
from megascale_lightning.errors import NotOpenError
from megascale_lightning.rows import CollatedRows, PackedRows
from megascale_lightning.streams import SourceSpec, StreamSpec
from megascale_lightning.types import (
    PIECE,
    SOURCE_STATE,
    BatchWindow,
    Call,
    LoaderState,
    NotYet,
    PartKey,
    PlanWindow,
    Ragged,
    SampleBlock,
    StepPlan,
)

SOURCES = ("web", "code", "books")
SEQ_LEN = 24


def make_spec(rows: Any = None, **changes: Any) -> StreamSpec:
    settings: dict[str, Any] = {
        "name": "train",
        "sources": tuple(SourceSpec(name=name, num_windows=4, weight=1.0, epochs=None) for name in SOURCES),
        "rows": rows or PackedRows(SEQ_LEN, 2, token_fields=("loss_mask",), sample_fields=("score", "name")),
        "rows_per_step": 12,
        "num_groups": 2,
        "num_microbatches": 3,
        "seed": 0,
        "last_step": "fill",
        "mixture_unit": "samples",
        "strategy": None,
        "prefetch_steps": 4,
        "plan_window": 3,
    }
    return StreamSpec(**(settings | changes))


def loader_of(key: PartKey) -> str:
    return f"loader/{key.window % 2}"


def state(step: int, *, ended: bool = False) -> LoaderState:
    return LoaderState(
        step=step,
        ended=ended,
        sources=np.zeros(len(SOURCES), SOURCE_STATE),
        dropped=({},) * len(SOURCES),
        carry=np.zeros(step % 3, PIECE),
        certificate=bytes([step % 256]) * 32,
    )


def payload(piece: Any) -> dict[str, Any]:
    """What the loaders hold for a piece: a function of its identity alone."""
    rng = np.random.default_rng([int(piece[name]) for name in ("source", "unit", "row", "start")])
    length = int(piece["length"])
    wide = 70_000 if piece["source"] == 2 else 60_000
    ids = rng.integers(1, wide, length).astype(np.int32 if piece["source"] == 2 else np.uint16)
    return {
        "input_ids": ids,
        "loss_mask": rng.integers(0, 2, length).astype(np.int8),
        "score": np.float32(rng.random()),
        "name": name_of(piece),
    }


def make_step(spec: StreamSpec, step: int) -> StepPlan:
    """Rows with random pieces, two of them filler (fewer where there is no room), dealt to random places."""
    rng = np.random.default_rng([7, step])
    places = spec.num_groups * spec.num_microbatches * spec.rows.micro_batch_size
    pieces, offsets = [], [0]
    filler = min(2, places - 1)
    for _ in range(places - filler):
        room = spec.rows.capacity
        # A collated row of a plan always has its sample.
        while room and (rng.random() < 0.9 or isinstance(spec.rows, CollatedRows)):
            length = int(rng.integers(1, min(room, 12) + 1))
            where = (rng.integers(3), 0, rng.integers(4), rng.integers(2), rng.integers(50), rng.integers(9))
            pieces.append((*where, rng.integers(1000), 0, -1, length, 0))
            room -= int(spec.rows.room(np.array([length]))[0])
            if not isinstance(spec.rows, PackedRows):
                break
        offsets.append(len(pieces))
    array = np.array(pieces, PIECE)
    array["loss_tokens"] = [int(payload(piece)["loss_mask"][1:].sum()) for piece in array]
    placement = rng.permutation(np.append(np.arange(places - filler), [-1] * filler)).astype(np.int32)
    return StepPlan(
        step=step,
        pieces=array,
        row_offsets=np.array(offsets, np.int64),
        placement=placement.reshape(spec.num_groups, spec.num_microbatches, -1),
        step_loss_tokens=int(array["loss_tokens"].sum()),
        balance={"max_over_mean": 1.0 + step},
        group_costs=np.arange(spec.num_groups, dtype=np.float64),
        group_costs_before=np.ones(spec.num_groups),
    )


class FakePlanner:
    """Plans as far as the lowest consumed step allows; the stream has `num_steps` steps."""

    def __init__(self, spec: StreamSpec, num_steps: int, *, knows_end: bool = True) -> None:
        self.spec, self.num_steps, self.knows_end = spec, num_steps, knows_end
        self.clients: dict[int, int] = {}

    def consumed(self, stream: str, generation: str, marks: dict[int, int]) -> None:
        self.clients |= marks

    def plan(self, stream: str, generation: str, first_step: int, count: int) -> PlanWindow | NotYet:
        if not self.clients:
            raise NotOpenError("nobody has opened it")
        watermark = min(self.clients.values())
        if first_step > watermark + 1 + self.spec.prefetch_steps:
            return NotYet("too far ahead")
        steps = range(first_step, max(first_step, min(first_step + count, self.num_steps)))
        states = [state(step) for step in steps]
        stop = steps.stop
        return PlanWindow(
            stream=stream,
            generation=generation,
            first_step=first_step,
            steps=tuple(make_step(self.spec, step) for step in steps),
            states=(*states, state(stop, ended=self.knows_end and stop >= self.num_steps)),
            watermark=watermark,
        )


def take(requests: Any) -> SampleBlock:
    pieces = np.concatenate([request.pieces for request in requests])
    found = [payload(piece) for piece in pieces]
    offsets = np.concatenate([[0], np.cumsum(pieces["length"], dtype=np.int64)])
    names = np.empty(len(found), np.object_)
    names[:] = [entry["name"] for entry in found]
    return SampleBlock(
        num_pieces=len(pieces),
        tokens={
            name: Ragged(np.concatenate([entry[name] for entry in found]), offsets)
            for name in ("input_ids", "loss_mask")
        },
        samples={"score": np.array([entry["score"] for entry in found]), "name": names},
        payload=sample_bytes(pieces),
    )


def sample_bytes(pieces: Any) -> Ragged:
    """The pickled samples of collated rows: the name of each piece, as often as it is long."""
    contents = [pickle.dumps([name_of(piece)] * int(piece["length"])) for piece in pieces]
    offsets = np.cumsum([0, *map(len, contents)], dtype=np.int64)
    return Ragged(np.frombuffer(b"".join(contents), np.uint8), offsets)


def name_of(piece: Any) -> str:
    return f"{SOURCES[piece['source']]}-{piece['unit']}-{piece['row']}"


class World:
    """One constructor with its planner and loaders; `faults[method]` is raised or answered in a call's place, once."""

    def __init__(
        self, spec: StreamSpec | None = None, num_steps: int = 1000, clients: int = 1, **settings: Any
    ) -> None:
        self.spec = spec or make_spec()
        self.planner = FakePlanner(self.spec, num_steps, **settings)
        self.planner.clients = dict.fromkeys(range(clients), -1)
        self.constructor = DataConstructor({"train": self.spec}, loader_of)
        self.calls: list[Call] = []
        self.faults: dict[str, Any] = {}

    def answer(self, call: Call) -> Any:
        try:
            if call.method in self.faults:
                fault = self.faults.pop(call.method)
                return fault(*call.args) if callable(fault) else fault
            if call.method == "take":
                return take(*call.args)
            return getattr(self.planner, call.method)(*call.args)
        except Exception as error:
            return error

    def play(self) -> list[Call]:
        """Make all calls that are wanted, until none is; give them."""
        made: list[Call] = []
        while calls := self.constructor.wants():
            for call in calls:
                self.constructor.answered(call, self.answer(call))
            made += calls
        self.calls += made
        return made

    def ask(self, first_step: int, *, group: int = 0, client: int = 0, consumed: int = -1) -> BatchWindow | NotYet:
        return self.constructor.fetch("train", "g", group, client, first_step, consumed)

    def fetch(self, first_step: int, *, group: int = 0, client: int = 0, consumed: int = -1) -> BatchWindow:
        """Ask until the window is there."""
        found: Any = self.ask(first_step, group=group, client=client, consumed=consumed)
        for _ in range(3):
            if isinstance(found, BatchWindow):
                break
            self.play()
            found = self.ask(first_step, group=group, client=client, consumed=consumed)
        self.play()
        assert isinstance(found, BatchWindow), found
        return found


def planned(calls: list[Call]) -> list[int]:
    """First steps of the plan calls among them."""
    return [call.args[2] for call in calls if call.method == "plan"]
