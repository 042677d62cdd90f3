"""Whole samples in the constructor: one pickle per row in slot order, filler repeats, nothing is looked into."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from megascale_lightning.errors import ReplayError, StreamError
from megascale_lightning.rows import CollatedRows
from megascale_lightning.types import SampleBlock
from tests.constructing.fakes import World, make_spec, make_step, name_of, take


def world(**settings: Any) -> World:
    return World(make_spec(rows=CollatedRows(2)), **settings)


def samples_of(window: Any) -> list[Any]:
    values, bounds = window.payload.values, window.payload.offsets
    return [pickle.loads(values[start:stop].data) for start, stop in pairwise(bounds)]


def test_each_row_has_its_sample_and_filler_the_first_of_its_step() -> None:
    playing = world()
    fillers = 0
    for group, first_step in ((0, 0), (0, 3), (1, 0), (1, 3)):
        found = playing.fetch(first_step, group=group)
        expected, counts = [], []
        for step in range(first_step, first_step + 3):
            plan = make_step(playing.spec, step)
            for row in plan.placement[group].ravel().tolist():
                piece = plan.pieces[max(row, 0)]
                expected.append([name_of(piece)] * int(piece["length"]))
                counts.append(int(row >= 0))
        assert samples_of(found) == expected
        assert np.diff(found.row_offsets).tolist() == counts
        assert len(found.pieces) == sum(counts)
        assert not found.tokens
        assert not found.samples
        fillers += counts.count(0)
    assert fillers == 2 * 6


def test_a_group_without_a_real_row_repeats_the_steps_first_sample() -> None:
    playing = world()
    plan = playing.planner.plan

    def bare(*args: Any) -> Any:
        window: Any = plan(*args)
        for step in window.steps:
            step.placement[1] = -1
        return window

    playing.faults["plan"] = bare
    found = playing.fetch(0, group=1)
    firsts = [make_step(playing.spec, step).pieces[0] for step in range(3)]
    assert samples_of(found) == [[name_of(piece)] * int(piece["length"]) for piece in firsts for _ in range(6)]
    assert len(found.pieces) == 0
    assert not np.diff(found.row_offsets).any()


def test_a_sample_is_asked_for_once_per_group() -> None:
    """Filler of a group that has the first row takes it from there."""
    playing = world()
    for group in (0, 1):
        playing.fetch(0, group=group)
    asked = [request.pieces for call in playing.calls if call.method == "take" for request in call.args[0]]
    real = sum(len(make_step(playing.spec, step).pieces) for step in range(6))
    missing = 0
    for step in range(6):
        placement = make_step(playing.spec, step).placement
        missing += sum((rows < 0).any() and not (rows == 0).any() for rows in placement)
    assert missing > 0
    assert sum(map(len, asked)) == real + missing


def test_the_constructor_does_not_look_inside() -> None:
    playing = world()

    def scrambled(requests: Any) -> SampleBlock:
        block = take(requests)
        assert block.payload is not None
        content = np.full(len(block.payload.values), 255, np.uint8)
        return SampleBlock(
            num_pieces=block.num_pieces,
            tokens={},
            samples={},
            payload=type(block.payload)(content, block.payload.offsets),
        )

    playing.faults["take"] = scrambled
    assert (playing.fetch(0).payload.values == 255).any()  # type: ignore[union-attr]


def test_blocks_that_do_not_fit_are_refused() -> None:
    playing = world()
    playing.faults["take"] = lambda requests: SampleBlock(num_pieces=0, tokens={}, samples={})
    with pytest.raises(ReplayError, match="gave 0 pieces"):
        playing.fetch(0)
    playing = world()
    playing.faults["take"] = lambda requests: SampleBlock(
        num_pieces=sum(len(request.pieces) for request in requests), tokens={}, samples={}
    )
    with pytest.raises(StreamError, match="gave no payload"):
        playing.fetch(0)


def test_the_end_of_a_stream_has_no_samples() -> None:
    end = world(num_steps=2).fetch(2)
    assert end.num_steps == 0
    assert end.payload is not None
    assert len(end.payload.values) == 0
