"""Values that cross the boundary between two roles: columnar numpy, frozen, picklable, free of torch.

A *piece* is the smallest thing the planner moves: a whole sample, or a (start, stop) cut of an overlong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "BAD_REASONS",
    "IGNORED_LABEL",
    "LEVEL_STATE",
    "ORDER_VERSION",
    "PIECE",
    "SOURCE_STATE",
    "BatchWindow",
    "Call",
    "Change",
    "CostChange",
    "FloatArray",
    "IntArray",
    "LoaderState",
    "MetaBlock",
    "MixtureChange",
    "NotYet",
    "PartKey",
    "PlanWindow",
    "Ragged",
    "SampleBlock",
    "StepPlan",
    "StepReport",
    "TakeRequest",
    "change_key",
]

ORDER_VERSION: Final = 1
"""Version of the rules that turn data and config into an order of samples (law 1)."""

BAD_REASONS: Final = ("read_error", "transform_error")
"""Reasons for which a record is dropped because it is bad, and not by a policy: `Source.on_error` is about these."""

IGNORED_LABEL: Final = -100
"""Label of a position that is no target."""

IntArray = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

PIECE: Final = np.dtype(
    [
        ("source", "<i4"),  # index of the source in its stream
        ("epoch", "<i4"),
        ("window", "<i4"),
        ("part", "<i4"),
        ("entry", "<i4"),  # position in the part, as described
        ("unit", "<i4"),  # over all files of the source, in list order
        ("row", "<i4"),  # inside the unit
        ("start", "<i4"),  # first token; 0 unless split
        ("stop", "<i4"),  # one past the last token; -1 for a whole sample
        ("length", "<i4"),  # tokens
        ("loss_tokens", "<i4"),  # targets, the first token of the piece not counted
    ]
)

SOURCE_STATE: Final = np.dtype(
    [
        ("epoch", "<i4"),
        ("window", "<i4"),
        ("part", "<i4"),
        ("offset", "<i4"),  # entries of the part that are done with
        ("share", "<f8"),  # e_i: what the source owes
        ("given", "<f8"),  # g_i: what it gave
        ("weight", "<f8"),  # w_i in force, not normalised
    ]
)


LEVEL_STATE: Final = np.dtype(
    [
        ("epoch", "<i4"),  # the part in which the level goes on
        ("window", "<i4"),
        ("part", "<i4"),
        ("offset", "<i4"),  # samples of the level that are done with in that part
        ("seen", "<i8"),  # samples of the level in the parts that were opened
        ("drawn", "<i8"),  # those that were given; the others wait
    ]
)


@dataclass(frozen=True, slots=True, order=True)
class PartKey:
    """Name of one part of one source of one stream."""

    stream: str
    source: int
    epoch: int
    window: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaBlock:
    """What the planner knows of one part, in the part's shuffled order. One entry per piece.

    The pieces of one sample stand next to each other; `pieces["entry"]` is `arange(n)`.
    """

    key: PartKey
    pieces: IntArray
    """PIECE [n]; a dropped entry has length 0."""
    first: npt.NDArray[np.bool_]
    """bool [n]: the entry starts a sample (all True where nothing was split)."""
    kept: npt.NDArray[np.bool_]
    """bool [n]: False for a dropped sample."""
    reason: npt.NDArray[np.uint8]
    """uint8 [n]: index into `reasons`; counted in the state once the entry is passed ("truncated" is kept, too)."""
    reasons: tuple[str, ...] = ("",)
    last_in_window: bool
    """The window has no further part."""
    payload_bytes: int = 0
    """What the loader holds for it, in bytes."""
    metadata: Mapping[str, FloatArray] = field(default_factory=dict)
    """What the costs of the strategy want beside lengths: name -> float64 [n], the sample's for each of its pieces."""
    joined: npt.NDArray[np.bool_] | None = None
    """bool [n]: the entry is another record, and stays together with the entry before it (`Source.together`); records
    that stay together are kept, or dropped, together. None: none does."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """One field of many samples: sample i is `values[offsets[i]:offsets[i + 1]]`."""

    values: npt.NDArray[Any]
    """[offsets[-1], ...]"""
    offsets: npt.NDArray[np.int64]
    """int64 [n + 1], from 0."""


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """Entries of one part whose payload is wanted, in this order."""

    key: PartKey
    pieces: IntArray
    """PIECE [k]: `entry` finds them, `length` is checked against what is there (law 9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Payload of the pieces of a list of `TakeRequest`, one after another, one array per field."""

    num_pieces: int
    tokens: Mapping[str, Ragged]
    """Per-token fields; every one has the lengths of the pieces."""
    samples: Mapping[str, npt.NDArray[Any]]
    """Per-sample fields: [num_pieces, ...]; dtype object where they are no arrays of one shape."""
    payload: Ragged | None = None
    """`CollatedRows`: each sample pickled, uint8 [num_pieces bytes strings]; None for other rows."""


@dataclass(frozen=True, slots=True, eq=False)
class MixtureChange:
    """Other weights from a step on."""

    step: int
    """The first step whose draws they govern."""
    weights: FloatArray
    """float64 [num_sources], not normalised."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MixtureChange):
            return NotImplemented
        return self.step == other.step and np.array_equal(self.weights, other.weights)

    def __hash__(self) -> int:
        return hash(self.step)


@dataclass(frozen=True, slots=True)
class CostChange:
    """Other costs from a step on."""

    step: int
    """The first step whose places they govern."""
    costs: tuple[Mapping[str, float], ...]
    """For each cost that the strategy declares the coefficients of a `CalibratedCost`; empty: those declared, again."""


Change: TypeAlias = MixtureChange | CostChange
"""What is other from a step on."""


def change_key(change: Change) -> tuple[int, str]:
    """What there is one change of: its step and kind, by which changes are in order."""
    return change.step, type(change).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Where a stream stands between two steps: enough to plan everything that follows."""

    step: int
    """The next step, counted from 0: the number of steps done."""
    ended: bool
    """No further step exists."""
    sources: IntArray
    """SOURCE_STATE [num_sources]"""
    dropped: tuple[Mapping[str, int], ...]
    """Per source: reason -> count."""
    carry: IntArray
    """PIECE [c]: drawn, not yet in a row, in draw order."""
    certificate: bytes
    """32 bytes: running hash over (step, row, pieces)."""
    passes: int = 0
    """Passes completed: of a stream in passes, the epoch that every source is in or waits for."""
    changes: tuple[Change, ...] = ()
    """Changes to come, by `change_key`; those of `step` itself are in neither `sources` nor `costs` yet."""
    checked: tuple[tuple[int, int], ...] = ()
    """Per source with a `max_bad_fraction`: records passed since it was set, and the bad ones among them; (0, 0) for
    others. Empty: nothing was counted yet."""
    replaced: bool = False
    """A change of the mixture took the place of the declared weights, and of their schedule."""
    costs: tuple[Mapping[str, float], ...] = ()
    """What a change put in the place of the declared costs, as in `CostChange`; empty: nothing."""
    levels: IntArray | None = None
    """LEVEL_STATE [num_sources, levels] of a curriculum: `sources` then says which part each opens next."""

    @property
    def waiting(self) -> IntArray:
        """int64 [num_sources]: samples that a curriculum has passed over so far; records that stay together are one."""
        if self.levels is None:
            return np.zeros(len(self.sources), np.int64)
        found: IntArray = (self.levels["seen"] - self.levels["drawn"]).sum(axis=1)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: its rows, and the place of each."""

    step: int
    pieces: IntArray
    """PIECE [n], row after row."""
    row_offsets: npt.NDArray[np.int64]
    """int64 [rows + 1] into `pieces`; a row without pieces is filler."""
    placement: npt.NDArray[np.int32]
    """int32 [groups, microbatches, rows a microbatch]: row index, -1 for filler."""
    step_loss_tokens: int
    balance: Mapping[str, float]
    """`max_over_mean` and `max_over_bound` of the groups' costs, and both with `_before`: had the rows been dealt in
    turn."""
    group_costs: FloatArray
    """[groups]: cost per data-parallel group as placed; of several costs, see `Distribution`."""
    group_costs_before: FloatArray
    """[groups]: the same had the rows been dealt in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWindow:
    """Consecutive steps moved together, with the states around each of them."""

    stream: str
    generation: str
    first_step: int
    steps: tuple[StepPlan, ...]
    """Fewer than asked for only where the stream ends; empty past its end."""
    states: tuple[LoaderState, ...]
    """len(steps) + 1: before each step, and after the last."""
    watermark: int
    """Lowest consumed step of the open clients (-1: none): what lies at or below it may be freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWindow:
    """What one data-parallel group gets for consecutive steps: rows without padding, one after another.

    Row r of the window is slot (step, microbatch, row in microbatch) in C order; there are steps x microbatches x
    micro_batch_size of them.
    """

    stream: str
    generation: str
    first_step: int
    num_steps: int
    num_microbatches: int
    tokens: Mapping[str, npt.NDArray[Any]]
    """Per-token fields: [sum of lengths], piece after piece."""
    samples: Mapping[str, npt.NDArray[Any]]
    """Per-sample fields: [pieces, ...]."""
    pieces: IntArray
    """PIECE [n], row after row."""
    row_offsets: npt.NDArray[np.int64]
    """int64 [rows + 1] into `pieces`; a row without pieces is filler (weight 0)."""
    step_loss_tokens: npt.NDArray[np.int64]
    """int64 [steps]: over all groups."""
    states: tuple[LoaderState, ...]
    """steps + 1."""
    reports: tuple[StepReport, ...] = ()
    """One per step."""
    payload: Ragged | None = None
    """`CollatedRows`: the pickled sample of each row, uint8; a filler row repeats the first sample of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """How even the work of one step is over the data-parallel groups."""

    step: int
    balance: Mapping[str, float]
    group_costs: FloatArray
    group_costs_before: FloatArray


@dataclass(frozen=True, slots=True)
class NotYet:
    """A role may not serve this now; ask again when something changed."""

    reason: str
    """For people: what is missing, and who holds it back."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a role wants made on another role; the runtime makes it and hands the answer back."""

    target: str
    """Name of the role: "planner", "loader/0", ..."""
    method: str
    args: tuple[Any, ...] = field(default=())
