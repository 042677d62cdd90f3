"""Microbatches made of windows, against the rules of batches spelled out token by token."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megascale_lightning.client.finish import finish
from megascale_lightning.client.info import BatchInfo, model_inputs
from megascale_lightning.errors import StreamError
from megascale_lightning.rows import PackedRows, PaddedRows
from megascale_lightning.types import PIECE, BatchWindow
from tests.constructing.fakes import SOURCES, World, make_spec, state

PAD = 5
IGNORED = -100


def make_window(rows: list[list[int]], *, spec: Any, num_steps: int = 1, **tokens: Any) -> BatchWindow:
    """A window with the given piece lengths per row; token t of the window is 1000 + t."""
    lengths = [length for row in rows for length in row]
    pieces = np.zeros(len(lengths), PIECE)
    pieces["length"], pieces["stop"], pieces["row"] = lengths, -1, np.arange(len(lengths))
    pieces["source"] = np.arange(len(lengths)) % 3
    total = sum(lengths)
    fields = {"input_ids": np.arange(1000, 1000 + total, dtype=np.int32)} | tokens
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    target = fields.get("labels", fields["input_ids"]) != IGNORED
    target &= np.asarray(fields.get("loss_mask", np.ones(total))) != 0
    target[offsets[:-1]] = False
    pieces["loss_tokens"] = [target[start:stop].sum() for start, stop in pairwise(offsets)]
    return BatchWindow(
        stream="train",
        generation="g",
        first_step=4,
        num_steps=num_steps,
        num_microbatches=len(rows) // num_steps // spec.rows.micro_batch_size,
        tokens=fields,
        samples={},
        pieces=pieces,
        row_offsets=np.cumsum([0, *map(len, rows)]),
        step_loss_tokens=np.arange(100, 100 + num_steps),
        states=tuple(state(4 + step) for step in range(num_steps + 1)),
    )


def one(rows: list[list[int]], config: Any, **tokens: Any) -> dict[str, Any]:
    """The only microbatch of these rows."""
    spec = make_spec(config)
    ((batch, info),) = finish(make_window(rows, spec=spec, **tokens), spec)
    assert batch["megascale"] is info
    return batch


def test_packed_rows_by_example() -> None:
    batch = one([[3, 2], [], [6]], PackedRows(6, 3, pad_id=PAD))
    assert batch["input_ids"].tolist() == [[1000, 1001, 1002, 1003, 1004, PAD], [PAD] * 6, list(range(1005, 1011))]
    assert batch["labels"].tolist() == [
        [IGNORED, 1001, 1002, IGNORED, 1004, IGNORED],
        [IGNORED] * 6,
        [IGNORED, *range(1006, 1011)],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 6, 12, 18]
    assert (batch["max_length_q"], batch["max_length_k"]) == (6, 6)
    assert type(batch["max_length_q"]) is int
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    info = batch["megascale"]
    assert info.row_weights.tolist() == [1.0, 0.0, 1.0]
    assert info.row_weights.dtype == np.float32
    assert info.num_loss_tokens == 8
    assert set(batch) == {
        *("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        "megascale",
    }


def test_shifted_labels_by_example() -> None:
    batch = one([[3, 2], [6]], PackedRows(6, 2, shift_labels=True))
    assert batch["labels"].tolist() == [
        [1001, 1002, IGNORED, 1004, IGNORED, IGNORED],
        [*range(1006, 1011), IGNORED],
    ]


def test_flattened_rows_by_example() -> None:
    batch = one(
        [[3], [4]], PackedRows(4, 2, flatten=True, pad_to_multiple_of=3, token_fields=("span",)), span=np.ones(7)
    )
    for name in ("input_ids", "labels", "position_ids", "span"):
        assert batch[name].shape == (1, 12)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 6, 10, 12]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize("shift", [False, True])
def test_a_loss_mask_and_own_labels_by_example(shift: bool) -> None:
    fields = ("loss_mask", "labels")
    batch = one(
        [[4], [2]],
        PackedRows(5, 2, token_fields=fields, shift_labels=shift),
        loss_mask=np.array([1, 1, 0, 1, 1, 1], np.uint8),
        labels=np.array([7, 8, 9, IGNORED, 10, 11]),
    )
    expected = [[IGNORED, 8, IGNORED, IGNORED, IGNORED], [IGNORED, 11, IGNORED, IGNORED, IGNORED]]
    assert batch["labels"].tolist() == ([[*row[1:], IGNORED] for row in expected] if shift else expected)
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0]]
    assert batch["loss_mask"].dtype == torch.int64
    assert batch["megascale"].num_loss_tokens == 2


def test_padded_rows_by_example() -> None:
    batch = one([[3], [], [5]], PaddedRows(16, 3, pad_to_multiple_of=4, pad_id=PAD))
    assert batch["input_ids"][0].tolist() == [1000, 1001, 1002, PAD, PAD, PAD, PAD, PAD]
    assert batch["labels"].tolist() == [
        [IGNORED, 1001, 1002, *[IGNORED] * 5],
        [IGNORED] * 8,
        [IGNORED, *range(1004, 1008), *[IGNORED] * 3],
    ]
    # A filler row keeps one position, since attention over nothing is not a number.
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] + [0] * 7, [1] * 5 + [0] * 3]
    assert batch["attention_mask"].dtype == torch.int64
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert set(batch) == {"input_ids", "attention_mask", "labels", "position_ids", "megascale"}


def test_padded_microbatches_are_as_wide_as_their_longest_row() -> None:
    spec = make_spec(PaddedRows(16, 2))
    window = make_window([[3], [7], [2], [1], [], []], spec=spec)
    assert [batch["input_ids"].shape for batch, _ in finish(window, spec)] == [(2, 7), (2, 2), (2, 1)]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("multiple", [None, 7])
@pytest.mark.parametrize("with_labels", [False, True])
def test_packed_rows_of_a_built_window(flatten: bool, shift: bool, multiple: int | None, with_labels: bool) -> None:
    rows = PackedRows(
        24, 2, flatten=flatten, shift_labels=shift, pad_to_multiple_of=multiple, pad_id=PAD, token_fields=("loss_mask",)
    )
    world = World(make_spec(rows))
    window = world.fetch(0)
    spec = world.spec
    if with_labels:
        spec = make_spec(replace(rows, token_fields=("loss_mask", "labels")))
        window = replace(
            window, tokens=dict(window.tokens) | {"labels": window.tokens["input_ids"].astype(np.int64) + 1}
        )
    check_batches(window, spec)


@pytest.mark.parametrize("shift", [False, True])
def test_padded_rows_of_a_built_window(shift: bool) -> None:
    world = World(make_spec(PaddedRows(24, 2, shift_labels=shift, pad_id=PAD, token_fields=("loss_mask",))))
    check_batches(world.fetch(0), world.spec)


def check_batches(window: BatchWindow, spec: Any) -> None:
    """Compare every row of every microbatch with a slow reading of the rules."""
    rows, size = spec.rows, spec.rows.micro_batch_size
    token = 0
    batches = list(finish(window, spec))
    assert len(batches) == window.num_steps * window.num_microbatches
    for index, (batch, info) in enumerate(batches):
        packed = isinstance(rows, PackedRows)
        width = rows.width if packed else batch["input_ids"].shape[1]
        found = {
            name: batch[name].reshape(size, width).tolist()
            for name in ("input_ids", "labels", "position_ids", "loss_mask")
        }
        bounds = [0]
        for row in range(size):
            at = index * size + row
            ids: list[int] = []
            labels: list[int] = []
            positions: list[int] = []
            mask: list[int] = []
            ends: list[int] = []
            for piece in window.pieces[window.row_offsets[at] : window.row_offsets[at + 1]]:
                length = int(piece["length"])
                span = slice(token, token + length)
                token += length
                source = window.tokens.get("labels", window.tokens["input_ids"])[span].tolist()
                own_mask = window.tokens["loss_mask"][span].tolist()
                targets = [
                    IGNORED,
                    *(label if keep else IGNORED for label, keep in zip(source, own_mask, strict=True)),
                ][1:]
                targets[0] = IGNORED
                labels += [*targets[1:], IGNORED] if rows.shift_labels else targets
                ids += window.tokens["input_ids"][span].tolist()
                mask += own_mask
                positions += range(length)
                ends.append(len(ids))
            tail = width - len(ids)
            bounds += [row * width + end for end in ends] + ([(row + 1) * width] if tail else [])
            assert found["input_ids"][row] == ids + [PAD] * tail
            assert found["labels"][row] == labels + [IGNORED] * tail
            assert found["position_ids"][row] == [*positions, *range(tail)]
            assert found["loss_mask"][row] == mask + [0] * tail
            assert info.row_weights[row] == bool(ids)
        if packed:
            assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == bounds
            assert batch["max_length_q"] == batch["max_length_k"] == int(np.diff(bounds).max())
            assert bounds[-1] == size * width
            assert min(np.diff(bounds)) > 0
        assert info.num_loss_tokens == int((batch["labels"] != IGNORED).sum())
        assert all(tensor.is_contiguous() for tensor in batch.values() if isinstance(tensor, torch.Tensor))
    assert token == len(window.tokens["input_ids"])


def test_the_targets_of_all_groups_add_up_to_those_of_the_step() -> None:
    world = World(clients=2)
    windows = [world.fetch(0, group=group, client=group) for group in (0, 1)]
    totals = np.zeros(3, np.int64)
    for window in windows:
        for _, info in finish(window, world.spec):
            totals[info.step] += info.num_loss_tokens
            assert info.step_loss_tokens == window.step_loss_tokens[info.step]
    assert totals.tolist() == windows[0].step_loss_tokens.tolist()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_cut_into_windows_gives_the_same_microbatches(count: int) -> None:
    def microbatches(plan_window: int) -> list[dict[str, Any]]:
        world = World(make_spec(plan_window=plan_window), num_steps=7)
        found: list[dict[str, Any]] = []
        step = 0
        while (window := world.fetch(step, consumed=step - 1)).num_steps:
            found += [batch for batch, _ in finish(window, world.spec)]
            step += window.num_steps
        return found

    one, other = microbatches(3), microbatches(count)
    assert len(one) == len(other) == 7 * 3
    for left, right in zip(one, other, strict=True):
        assert left["megascale"].sample_ids() == right["megascale"].sample_ids()
        for name, value in model_inputs(left).items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == right[name].dtype
                assert torch.equal(value, right[name])
            else:
                assert value == right[name]


def test_sample_fields_are_tensors_where_they_are_numbers_of_one_shape() -> None:
    ragged = np.empty(3, np.object_)
    ragged[:] = [np.zeros(2, np.uint8), np.ones(3, np.uint8), None]
    even = np.empty(3, np.object_)
    even[:] = [np.array([1, 2]), [3, 4], np.array([5, 6])]
    samples: dict[str, Any] = {
        "score": np.arange(3, dtype=np.float32),
        "count": np.arange(3, dtype=np.int16),
        "pixels": np.zeros((3, 2, 2), np.uint8),
        "even": even,
        "ragged": ragged,
        "name": np.array(["a", "b", "c"]),
    }
    spec = make_spec(PackedRows(8, 1, sample_fields=tuple(samples)))
    window = replace(make_window([[2, 3], [4], []], spec=spec), samples=samples)
    first, second, third = (batch for batch, _ in finish(window, spec))
    assert first["score"].tolist() == [0.0, 1.0]
    assert (first["count"].dtype, first["pixels"].dtype, first["score"].dtype) == (
        torch.int64,
        torch.uint8,
        torch.float32,
    )
    assert first["even"].tolist() == [[1, 2], [3, 4]]
    assert [value.tolist() for value in first["ragged"]] == [[0, 0], [1, 1, 1]]
    assert (first["name"], second["name"], third["name"]) == (["a", "b"], ["c"], [])
    assert second["ragged"] == [None]
    assert third["pixels"].shape == (0, 2, 2)


def test_token_fields_may_have_further_dimensions() -> None:
    box = np.arange(15, dtype=np.float32).reshape(5, 3)
    batch = one([[2], [3]], PackedRows(4, 2, token_fields=("box",)), box=box)
    assert batch["box"].shape == (2, 4, 3)
    assert batch["box"].dtype == torch.float32
    assert batch["box"][1, :3].tolist() == box[2:].tolist()
    assert not batch["box"][:, 3].any()


def test_tensors_do_not_hold_on_to_the_window() -> None:
    spec = make_spec(PackedRows(8, 1, token_fields=("span",), sample_fields=("score",)))
    window = make_window([[2, 3]], spec=spec, span=np.arange(5, dtype=np.int64))
    window = replace(window, samples={"score": np.arange(2, dtype=np.float32)})
    ((batch, info),) = finish(window, spec)
    shared = [window.pieces, *window.tokens.values(), *window.samples.values(), window.states[0].sources]
    own = [info._pieces, info._before.sources, *(v.numpy() for v in batch.values() if isinstance(v, torch.Tensor))]
    assert not any(np.shares_memory(left, right) for left in shared for right in own)


def test_info_says_where_the_microbatch_stands() -> None:
    spec = make_spec(PackedRows(8, 1), num_groups=3)
    window = make_window([[2], [3], [4], []], spec=spec, num_steps=2)
    window = replace(window, states=(*window.states[:2], state(6, ended=True)))
    infos = [info for _, info in finish(window, spec)]
    assert [(info.step, info.microbatch) for info in infos] == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert [info.is_last_in_step for info in infos] == [False, True, False, True]
    assert [info.is_last_in_stream for info in infos] == [False, False, False, True]
    assert [info.step_loss_tokens for info in infos] == [100, 100, 101, 101]
    assert [(info._before.step, info._after.step) for info in infos] == [(4, 5), (4, 5), (5, 6), (5, 6)]
    assert {(info.num_groups, info.num_microbatches) for info in infos} == {(3, 2)}
    assert [type(getattr(infos[0], name)) for name in ("num_loss_tokens", "step_loss_tokens", "step")] == [int] * 3


def test_sample_ids_name_every_piece_by_row() -> None:
    spec = make_spec(PackedRows(8, 3))
    window = make_window([[2, 3], [], [4]], spec=spec)
    window.pieces["unit"], window.pieces["epoch"] = 9, 1
    window.pieces["start"][1], window.pieces["stop"][1] = 8, 11
    ((_, info),) = finish(window, spec)
    assert info.sample_ids() == [
        [(SOURCES[0], 1, 9, 0, 0, -1), (SOURCES[1], 1, 9, 1, 8, 11)],
        [],
        [(SOURCES[2], 1, 9, 2, 0, -1)],
    ]
    copied = pickle.loads(pickle.dumps(info))
    assert copied.sample_ids() == info.sample_ids()
    assert (copied.step, copied.num_loss_tokens, copied._after.step) == (4, info.num_loss_tokens, 5)
    assert repr(info) == "BatchInfo(step=4, microbatch=0, pieces=3, num_loss_tokens=6, step_loss_tokens=100)"


def test_info_is_nothing_that_a_trainer_takes_apart() -> None:
    for name in ("to", "__len__", "__iter__", "pin_memory", "__dataclass_fields__"):
        assert not hasattr(BatchInfo, name)


def test_model_inputs_leave_the_info_out() -> None:
    batch = one([[2]], PackedRows(4, 1))
    inputs = model_inputs(batch)
    assert set(batch) - set(inputs) == {"megascale"}
    assert inputs["labels"] is batch["labels"]


def test_a_window_may_be_entered_at_a_later_step() -> None:
    spec = make_spec(PackedRows(8, 1))
    window = make_window([[2], [3], [4], []], spec=spec, num_steps=2)
    later = [batch for batch, _ in finish(window, spec, first_step=5)]
    everything = [batch for batch, _ in finish(window, spec)]
    assert [batch["megascale"].step for batch in later] == [5, 5]
    for one_batch, other in zip(later, everything[2:], strict=True):
        assert torch.equal(one_batch["input_ids"], other["input_ids"])


def test_the_window_at_the_end_gives_nothing() -> None:
    world = World(num_steps=0)
    assert list(finish(world.fetch(0), world.spec)) == []


def test_a_window_of_other_rows_is_refused() -> None:
    spec = make_spec(PackedRows(8, 2))
    window = make_window([[2], [3]], spec=spec)
    with pytest.raises(StreamError, match="another micro_batch_size"):
        next(finish(window, make_spec(PackedRows(8, 1))))
    with pytest.raises(StreamError, match="row 1 of a window is 1 tokens longer"):
        next(finish(window, make_spec(PackedRows(2, 2))))
