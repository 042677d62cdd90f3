"""The rows of one data-parallel group, cut out of a plan and filled with the samples that the loaders gave.

All of it works on whole arrays, or at one slice copy per piece and field; nothing is done per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megascale_lightning.errors import DataError, ReplayError, StreamError
from megascale_lightning.rows import CollatedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import (
    PIECE,
    BatchWindow,
    IntArray,
    PartKey,
    PlanWindow,
    Ragged,
    SampleBlock,
    StepReport,
    TakeRequest,
)

__all__ = ["Asked", "Take", "assemble", "end_window", "plan_takes", "rows_of_group", "samples_of_rows"]

_PART_COLUMNS = ("source", "epoch", "window", "part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """What one loader is asked for, for one group's window."""

    loader: str
    requests: tuple[TakeRequest, ...]
    index: npt.NDArray[np.int64]
    """int64 [pieces of all requests]: where each piece stands in the window's pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The pieces that the loaders are asked for, and how they make up the rows of one group's window."""

    pieces: IntArray
    """PIECE [a]: first those of the rows, row after row; then what only filler rows repeat."""
    row_offsets: npt.NDArray[np.int64]
    """int64 [rows + 1] into `pieces`; filler rows are empty."""
    samples: npt.NDArray[np.int64] | None = None
    """`CollatedRows`: int64 [rows] into `pieces`, the sample that each row shows."""


def rows_of_group(plan: PlanWindow, group: int) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """Give the pieces of one group, row after row, for all steps of the plan.

    Returns:
        PIECE [n], and int64 [rows + 1] offsets into it; rows stand in the order (step, microbatch, row in microbatch),
        filler rows are empty.
    """
    pieces: list[IntArray] = [np.empty(0, PIECE)]
    counts: list[IntArray] = [np.zeros(1, np.int64)]
    for step in plan.steps:
        rows = step.placement[group].ravel()
        starts = step.row_offsets[rows]
        sizes = np.where(rows < 0, 0, step.row_offsets[rows + 1] - starts)
        before = np.cumsum(sizes) - sizes
        pieces.append(step.pieces[np.repeat(starts - before, sizes) + np.arange(sizes.sum())])
        counts.append(sizes)
    return np.concatenate(pieces), np.cumsum(np.concatenate(counts), dtype=np.int64)


def samples_of_rows(plan: PlanWindow, group: int, pieces: IntArray, row_offsets: npt.NDArray[np.int64]) -> Asked:
    """Give each row of one group a sample: its own, or for filler the first real one of its step.

    Args:
        plan: Steps whose rows hold one piece or none.
        group: Data-parallel group.
        pieces: PIECE [n], as `rows_of_group` gave them.
        row_offsets: int64 [rows + 1], likewise.
    """
    samples, first = row_offsets[:-1].copy(), 0
    repeated: list[IntArray] = []
    for step in plan.steps:
        rows = step.placement[group].ravel()
        filler = np.flatnonzero(rows < 0)
        if len(filler):
            own = np.flatnonzero(rows == 0)
            at = row_offsets[first + own[0]] if len(own) else len(pieces) + len(repeated)
            samples[first + filler] = at
            if not len(own):
                repeated.append(step.pieces[:1])
        first += len(rows)
    return Asked(pieces=np.concatenate([pieces, *repeated]), row_offsets=row_offsets, samples=samples)


def plan_takes(stream: str, pieces: IntArray, loader_of: Callable[[PartKey], str]) -> tuple[Take, ...]:
    """Group pieces by the part they lie in, and the parts by the loader that serves them.

    Inside a part the pieces are asked for in the order in which they lie there.
    """
    if not len(pieces):
        return ()
    order = np.lexsort((pieces["entry"], *(pieces[name] for name in reversed(_PART_COLUMNS))))
    ordered = pieces[order]
    columns = [np.ascontiguousarray(ordered[name]) for name in _PART_COLUMNS]
    differs = np.logical_or.reduce([np.diff(column) != 0 for column in columns])
    starts = np.concatenate([[0], np.flatnonzero(differs) + 1])
    keys = zip(*(column[starts].tolist() for column in columns), strict=True)
    requests: dict[str, list[TakeRequest]] = {}
    indices: dict[str, list[IntArray]] = {}
    for part, (start, stop) in zip(keys, pairwise([*starts.tolist(), len(pieces)]), strict=True):
        key = PartKey(stream, *part)
        loader = loader_of(key)
        requests.setdefault(loader, []).append(TakeRequest(key, ordered[start:stop]))
        indices.setdefault(loader, []).append(order[start:stop])
    return tuple(
        Take(loader=loader, requests=tuple(asked), index=np.concatenate(indices[loader]))
        for loader, asked in requests.items()
    )


def assemble(
    spec: StreamSpec,
    plan: PlanWindow,
    asked: Asked,
    takes: Sequence[Take],
    blocks: Sequence[SampleBlock],
) -> BatchWindow:
    """Put the blocks that answered `takes` into rows.

    Raises:
        DataError: A declared field is not in a block.
        ReplayError: A sample has another length than planned.
    """
    num_pieces = int(asked.row_offsets[-1])
    offsets = np.concatenate([[0], np.cumsum(asked.pieces["length"], dtype=np.int64)])
    for take, block in zip(takes, blocks, strict=True):
        _check(spec, asked.pieces, take, block)
    return BatchWindow(
        stream=plan.stream,
        generation=plan.generation,
        first_step=plan.first_step,
        num_steps=len(plan.steps),
        num_microbatches=spec.num_microbatches,
        tokens={name: _fill_tokens(name, offsets, takes, blocks) for name in spec.rows.token_columns},
        samples={name: _fill_samples(name, num_pieces, takes, blocks) for name in spec.rows.sample_fields},
        pieces=asked.pieces[:num_pieces],
        row_offsets=asked.row_offsets,
        step_loss_tokens=np.array([step.step_loss_tokens for step in plan.steps], np.int64),
        states=plan.states,
        reports=tuple(
            StepReport(
                step=step.step,
                balance=step.balance,
                group_costs=step.group_costs,
                group_costs_before=step.group_costs_before,
            )
            for step in plan.steps
        ),
        payload=None if asked.samples is None else _fill_payload(len(asked.pieces), asked.samples, takes, blocks),
    )


def end_window(spec: StreamSpec, last: PlanWindow, step: int) -> BatchWindow:
    """Give the window without steps that says, after the last plan of a stream, that it ends before `step`."""
    plan = replace(last, first_step=step, steps=(), states=last.states[-1:])
    nothing = np.zeros(0, np.int64) if isinstance(spec.rows, CollatedRows) else None
    asked = Asked(pieces=np.empty(0, PIECE), row_offsets=np.zeros(1, np.int64), samples=nothing)
    return assemble(spec, plan, asked, (), ())


def _check(spec: StreamSpec, pieces: IntArray, take: Take, block: SampleBlock) -> None:
    """Refuse what does not have the shape that was planned (law 9)."""
    if block.num_pieces != len(take.index):
        raise ReplayError(f"{take.loader} gave {block.num_pieces} pieces where {len(take.index)} were asked for")
    for kind, declared, given in (
        ("per-token", spec.rows.token_columns, block.tokens),
        ("per-sample", spec.rows.sample_fields, block.samples),
    ):
        missing = sorted(set(declared) - set(given))
        if missing:
            sources = sorted({spec.sources[request.key.source].name for request in take.requests})
            raise DataError(
                f"{kind} fields {missing} are declared in {type(spec.rows).__name__}, but samples of {sources} come "
                f"without them; they have {sorted(given)}. Let the transform make them, or take them out of the rows"
            )
    wanted = pieces["length"][take.index]
    for name in spec.rows.token_columns:
        found = np.diff(block.tokens[name].offsets)
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            piece = pieces[take.index[wrong[0]]]
            raise ReplayError(
                f"source {spec.sources[piece['source']].name!r}: field {name!r} of epoch {piece['epoch']}, unit "
                f"{piece['unit']}, row {piece['row']} has {found[wrong[0]]} tokens where {piece['length']} were "
                "planned; a transform must give a record the same lengths every time, in all per-token fields"
            )


def _fill_tokens(
    name: str, offsets: npt.NDArray[np.int64], takes: Sequence[Take], blocks: Sequence[SampleBlock]
) -> npt.NDArray[np.generic]:
    """One per-token field of all pieces, one after another: [offsets[-1], ...] in the blocks' common dtype."""
    fields = [block.tokens[name] for block in blocks]
    if not fields:
        return np.empty(0, np.int32)
    dtype = np.result_type(*(field.values.dtype for field in fields))
    target = np.empty((int(offsets[-1]), *fields[0].values.shape[1:]), dtype)
    for take, field in zip(takes, fields, strict=True):
        bounds = field.offsets.tolist()
        values = field.values
        for to, start, stop in zip(offsets[take.index].tolist(), bounds[:-1], bounds[1:], strict=True):
            target[to : to + stop - start] = values[start:stop]
    return target


def _fill_samples(
    name: str, num_pieces: int, takes: Sequence[Take], blocks: Sequence[SampleBlock]
) -> npt.NDArray[np.generic]:
    """One per-sample field of all pieces: [num_pieces, ...], dtype object where the blocks have no common shape."""
    fields = [block.samples[name] for block in blocks]
    if not fields:
        return np.empty(0, np.object_)
    shapes = {field.shape[1:] for field in fields}
    numeric = all(field.dtype.kind in "biuf" for field in fields)
    if numeric and len(shapes) == 1:
        target = np.empty((num_pieces, *shapes.pop()), np.result_type(*fields))
        for take, field in zip(takes, fields, strict=True):
            target[take.index] = field
        return target
    mixed = np.empty(num_pieces, np.object_)
    for take, field in zip(takes, fields, strict=True):
        for to, value in zip(take.index.tolist(), field, strict=True):
            mixed[to] = value
    return mixed


def _fill_payload(
    num_pieces: int, samples: npt.NDArray[np.int64], takes: Sequence[Take], blocks: Sequence[SampleBlock]
) -> Ragged:
    """The pickled sample of each row, one after another; nothing looks inside.

    Args:
        num_pieces: Pieces asked for.
        samples: int64 [rows], indices of these.
        takes: What was asked.
        blocks: The answers.
    """
    found: list[memoryview] = [memoryview(b"")] * num_pieces
    for take, block in zip(takes, blocks, strict=True):
        if block.payload is None:
            raise StreamError(f"{take.loader} gave no payload: it was made for other rows")
        bounds, values = block.payload.offsets.tolist(), block.payload.values.data
        for to, start, stop in zip(take.index.tolist(), bounds[:-1], bounds[1:], strict=True):
            found[to] = values[start:stop]
    rows = [found[index] for index in samples.tolist()]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Ragged(np.frombuffer(bytearray().join(rows), np.uint8), offsets)
