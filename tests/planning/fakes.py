"""Metadata out of a seed, and a driver that plays the runtime around a planner."""

from dataclasses import dataclass, field, replace

import numpy as np

from megascale_lightning.planning.planner import Planner
from megascale_lightning.planning.strategies import Balanced
from megascale_lightning.rows import PackedRows, PaddedRows
from megascale_lightning.streams import SourceSpec, StreamSpec
from megascale_lightning.types import PIECE, MetaBlock, NotYet


@dataclass
class FakeData:
    """Sources of `sizes` samples, cut into windows of `window` samples and parts of `part` samples."""

    sizes: list[int]
    window: int = 40
    part: int = 16
    capacity: int = 64
    longest: int = 60
    drop_every: int = 0
    described: list = field(default_factory=list)

    def num_windows(self, source):
        return -(-self.sizes[source] // self.window)

    def describe(self, key):
        self.described.append(key)
        start = key.window * self.window
        stop = min(start + self.window, self.sizes[key.source])
        rows = np.arange(start + key.part * self.part, min(start + (key.part + 1) * self.part, stop))
        rng = np.random.default_rng([7, key.source, key.epoch, key.window, key.part])
        rows = rng.permutation(rows)
        lengths = 1 + np.random.default_rng([11, key.source]).integers(0, self.longest, self.sizes[key.source])[rows]
        pieces, first, kept = [], [], []
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            dropped = bool(self.drop_every) and (row + 1) % self.drop_every == 0
            cuts = range(0, length, self.capacity)
            for cut in [0] if dropped else cuts:
                stop_at = min(cut + self.capacity, length)
                whole = length <= self.capacity
                size = 0 if dropped else stop_at - cut
                pieces.append(
                    (
                        key.source,
                        key.epoch,
                        key.window,
                        key.part,
                        len(pieces),
                        0,
                        row,
                        cut,
                        -1 if whole else stop_at,
                        size,
                        max(size - 1, 0),
                    )
                )
                first.append(cut == 0)
                kept.append(not dropped)
        return MetaBlock(
            key=key,
            pieces=np.array(pieces, PIECE),
            first=np.array(first, bool),
            kept=np.array(kept, bool),
            reason=np.where(kept, 0, 1).astype(np.uint8),
            reasons=("", "filtered"),
            last_in_window=start + (key.part + 1) * self.part >= stop,
        )

    def spec(self, *, padded=False, rows=8, groups=1, epochs=1, weights=None, micro=2, **changes):
        kind = PaddedRows(self.capacity, micro) if padded else PackedRows(self.capacity, micro, pack_ahead=10)
        weights = weights or [1.0 + index for index in range(len(self.sizes))]
        sources = tuple(
            SourceSpec(name=f"s{index}", num_windows=self.num_windows(index), weight=weight, epochs=epochs)
            for index, weight in enumerate(weights)
        )
        spec = StreamSpec(
            name="train",
            sources=sources,
            rows=kind,
            rows_per_step=rows,
            num_groups=groups,
            num_microbatches=-(-rows // (groups * micro)),
            seed=0,
            last_step="fill",
            mixture_unit="samples",
            strategy=Balanced(),
            prefetch_steps=4,
            plan_window=1,
        )
        return replace(spec, **changes)


class Drive:
    """One planner with one client, played step by step."""

    def __init__(self, data, spec, state=None):
        self.data, self.spec = data, spec
        self.planner = Planner({spec.name: spec}, lambda key: "loader/0")
        self.planner.open("train", "g", 0, state)
        self.step = 0 if state is None else state.step
        self.states = {}
        self.plans = []
        self.released = []

    def serve(self):
        """Make the calls that the planner wants."""
        for call in self.planner.wants():
            if call.method == "release":
                self.released += call.args[0]
                self.planner.answered(call, None)
                continue
            try:
                result = self.data.describe(*call.args)
            except Exception as error:
                result = error
            self.planner.answered(call, result)

    def window(self, count=1, first=None, generation="g"):
        """A plan window, however often it has to be asked for."""
        for _ in range(1000):
            window = self.planner.plan("train", generation, self.step if first is None else first, count)
            if not isinstance(window, NotYet) or "prefetch" in window.reason:
                return window
            self.serve()
        raise AssertionError("the planner never answers")

    def run(self, steps=10**9, count=1):
        """Plan and consume up to `steps` steps, or to the end; the plans."""
        plans = []
        while len(plans) < steps:
            window = self.window(min(count, steps - len(plans)))
            plans += window.steps
            self.step += len(window.steps)
            self.states.update({state.step: state for state in window.states})
            self.planner.consumed("train", "g", {0: self.step - 1})
            if window.states[-1].ended:
                break
        self.plans += plans
        return plans


def rows_of(plan):
    """The rows of a step as sets of (source, epoch, row, start, stop)."""
    ids = plan.pieces[["source", "epoch", "row", "start", "stop"]].tolist()
    return [frozenset(ids[a:b]) for a, b in zip(plan.row_offsets[:-1], plan.row_offsets[1:], strict=True)]
