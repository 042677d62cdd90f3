"""A window as one flat buffer: what comes out is what went in, structure travels once, and arrays are not pickled."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megascale_lightning.client.flattening import Flattener, Unflattener, fill, size_of
from megascale_lightning.types import PIECE, SOURCE_STATE, BatchWindow, LoaderState, MixtureChange, Ragged, StepReport


def state(step: int, carried: int) -> LoaderState:
    return LoaderState(
        step=step,
        ended=False,
        sources=np.full(3, step, SOURCE_STATE),
        dropped=({"filtered": step}, {}, {}),
        carry=np.full(carried, step, PIECE),
        certificate=bytes(range(32)),
        changes=(MixtureChange(step + 40, np.array([0.1, 0.2, 0.7])),),
    )


def window(first_step: int = 0, num_steps: int = 2, *, tokens: int = 1000, samples: Any = None) -> BatchWindow:
    rng = np.random.default_rng(first_step)
    objects = np.empty(3, object)
    objects[:] = ["text", {"width": 3}, np.arange(4)]
    return BatchWindow(
        stream="train",
        generation="abc",
        first_step=first_step,
        num_steps=num_steps,
        num_microbatches=1,
        tokens={
            "input_ids": rng.integers(0, 60_000, tokens, dtype=np.uint16),
            "loss_mask": rng.random((tokens, 2)).astype(np.float32)[::-1],
        },
        samples={"score": rng.random((3, 4)), "name": np.array(["a", "bcd", ""]), "mixed": objects}
        if samples is None
        else samples,
        pieces=np.full(3, first_step, PIECE),
        row_offsets=np.arange(num_steps + 1),
        step_loss_tokens=np.full(num_steps, 7),
        states=tuple(state(first_step + index, 5 * index) for index in range(num_steps + 1)),
        reports=tuple(
            StepReport(
                step=index, balance={"max_over_mean": 1.5}, group_costs=rng.random(4), group_costs_before=rng.random(4)
            )
            for index in range(num_steps)
        ),
        payload=Ragged(np.frombuffer(b"pickled samples", np.uint8), np.array([0, 7, 15])),
    )


def same(one: Any, other: Any) -> bool:
    """Values alike in type, dtype, shape and content, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        if one.dtype == object:
            return alike and all(map(same, one.ravel().tolist(), other.ravel().tolist()))
        return alike and one.tobytes() == other.tobytes()
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through(flattener: Flattener, unflattener: Unflattener, value: Any) -> tuple[Any, tuple[int, int, int]]:
    parts, sizes = flattener.flatten(value)
    buffer = np.full(size_of(parts), 255, np.uint8)
    fill(buffer, parts)
    return unflattener.restore(buffer, sizes), sizes


def test_a_window_comes_out_as_it_went_in() -> None:
    sent = window()
    got, _ = through(Flattener(), Unflattener(), sent)
    assert same(got, sent)
    assert got.tokens["loss_mask"].flags.writeable


def test_structure_travels_only_where_it_changes() -> None:
    flattener, unflattener = Flattener(), Unflattener()
    told = []
    # Other lengths are no other structure; a last window with fewer steps, and fewer states, is.
    for sent in (window(0), window(2, tokens=50), window(4, tokens=0), window(6, 1), window(7, 1), window(8)):
        got, (_, told_bytes, _) = through(flattener, unflattener, sent)
        assert same(got, sent)
        told.append(told_bytes > 0)
    assert told == [True, False, False, True, False, True]


def test_arrays_are_not_pickled() -> None:
    """What is pickled does not grow with the tokens, and stays small beside them."""
    small, large = (Flattener().flatten(window(tokens=count))[1] for count in (1000, 1_000_000))
    assert small == large
    assert small[2] < 5000


def test_an_array_that_is_there_twice_travels_once() -> None:
    tokens = np.arange(1000)
    _, (num_arrays, *_) = Flattener().flatten([tokens, {"again": tokens}])
    assert num_arrays == 1


@given(
    st.lists(
        hnp.arrays(
            st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.boolean_dtypes(), hnp.unicode_string_dtypes()),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
        ),
        max_size=6,
    )
)
def test_any_arrays(arrays: list[np.ndarray]) -> None:
    flattener, unflattener = Flattener(), Unflattener()
    for value in (arrays, arrays[::-1], {"nested": (arrays, "text", None)}):
        got, _ = through(flattener, unflattener, value)
        assert same(got, value)


def test_what_does_not_pickle_is_said_at_once() -> None:
    column = np.empty(1, object)
    column[0] = lambda: None
    with pytest.raises(Exception, match="pickle"):
        Flattener().flatten(window(samples={"odd": column}))
