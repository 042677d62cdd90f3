"""What each place gets of a microbatch: slices that put together are the whole, and the fields of a pipeline stage."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.client.finish import finish
from megascale_lightning.client.slicing import slice_of
from megascale_lightning.places.tree import ClientPlaceTree, Place
from megascale_lightning.rows import PackedRows, PaddedRows
from tests.constructing.fakes import World, make_spec

from .test_finish import make_window

IGNORED = -100
AXES = ("pipeline", "dp_replicate", "dp_shard", "context", "tensor_parallel", "model")
MAX_RANKS = 64


def batch_at(rows: list[list[int]], config: Any, place: Place, **more: Any) -> dict[str, Any]:
    """The only microbatch of these rows at a place."""
    sizes = {name: more.pop(name, default) for name, default in (("cp", 2), ("pp", 1))}
    mode = more.pop("mode", "full")
    spec = make_spec(config, context_parallel=mode, num_context_ranks=sizes["cp"], num_stages=sizes["pp"])
    ((batch, _),) = finish(make_window(rows, spec=spec, **more), spec, place)
    return batch


class TestByExample:
    """Small batches, written out."""

    def test_padded_documents(self) -> None:
        rows = PackedRows(8, 2, pad_documents_to=4, pad_id=5, shift_labels=True)
        batch = batch_at([[3, 4], [5]], rows, Place(), cp=1)
        assert batch["input_ids"].tolist() == [
            [1000, 1001, 1002, 5, 1003, 1004, 1005, 1006],
            [1007, 1008, 1009, 1010, 1011, 5, 5, 5],
        ]
        assert batch["labels"].tolist() == [
            [1001, 1002, IGNORED, IGNORED, 1004, 1005, 1006, IGNORED],
            [1008, 1009, 1010, 1011, *[IGNORED] * 4],
        ]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], list(range(8))]
        assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 8, 16]
        assert batch["cu_seq_lens_q_unpadded"].tolist() == batch["cu_seq_lens_k_unpadded"].tolist() == [0, 3, 7, 12]
        assert batch["cu_seq_lens_q_unpadded"].dtype == torch.int32
        assert batch["max_length_q"] == batch["max_length_k"] == 8
        assert batch["megascale"].num_loss_tokens == batch["megascale"].rank_loss_tokens == 9

    def test_the_end_of_a_row_is_a_segment_in_both_forms(self) -> None:
        batch = batch_at([[3], []], PackedRows(8, 2, pad_documents_to=4), Place(), cp=1)
        assert batch["cu_seq_lens_q"].tolist() == [0, 4, 8, 16]
        assert batch["cu_seq_lens_q_unpadded"].tolist() == [0, 3, 7, 15]

    @pytest.mark.parametrize("flatten", [False, True])
    def test_head_and_tail_of_each_document(self, flatten: bool) -> None:
        rows = PackedRows(12, 1, pad_documents_to=4, pad_id=5, shift_labels=True, flatten=flatten)
        first, second = (batch_at([[7, 3]], rows, Place(cp=cp), mode="head_tail") for cp in range(2))
        assert first["input_ids"].tolist() == [[1000, 1001, 1006, 5, 1007, 5]]
        assert second["input_ids"].tolist() == [[1002, 1003, 1004, 1005, 1008, 1009]]
        assert first["labels"].tolist() == [[1001, 1002, IGNORED, IGNORED, 1008, IGNORED]]
        assert second["labels"].tolist() == [[1003, 1004, 1005, 1006, 1009, IGNORED]]
        assert first["position_ids"].tolist() == [[0, 1, 6, 7, 0, 3]]
        assert second["position_ids"].tolist() == [[2, 3, 4, 5, 1, 2]]
        for batch, own in ((first, 3), (second, 5)):
            assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12]
            assert batch["cu_seq_lens_q_unpadded"].tolist() == [0, 7, 10]
            assert batch["max_length_q"] == 8
            assert batch["megascale"].num_loss_tokens == 8
            assert batch["megascale"].rank_loss_tokens == own
            assert batch["megascale"].num_context_ranks == 2

    def test_head_and_tail_of_padded_rows(self) -> None:
        rows = PaddedRows(16, 2, shift_labels=True, pad_id=5)
        first, second = (batch_at([[5], [2]], rows, Place(cp=cp), mode="head_tail") for cp in range(2))
        assert first["input_ids"].tolist() == [[1000, 1001, 5, 5], [1005, 1006, 5, 5]]
        assert second["input_ids"].tolist() == [[1002, 1003, 1004, 5], [5, 5, 5, 5]]
        assert second["labels"].tolist() == [[1003, 1004, IGNORED, IGNORED], [IGNORED] * 4]
        assert first["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
        assert second["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
        assert first["position_ids"].tolist() == [[0, 1, 1, 2], [0, 1, 4, 5]]

    def test_contiguous_slices_are_of_each_row(self) -> None:
        first, second = (
            batch_at([[3, 2], [5]], PackedRows(5, 2, shift_labels=True, pad_id=5), Place(cp=cp), mode="contiguous")
            for cp in range(2)
        )
        assert first["input_ids"].tolist() == [[1000, 1001, 1002], [1005, 1006, 1007]]
        assert second["input_ids"].tolist() == [[1003, 1004, 5], [1008, 1009, 5]]
        assert first["labels"].tolist() == [[1001, 1002, IGNORED], [1006, 1007, 1008]]
        assert first["cu_seq_lens_q"].tolist() == second["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 11, 12]
        assert "cu_seq_lens_q_unpadded" not in first

    def test_contiguous_slices_of_flat_rows_are_of_all_of_them(self) -> None:
        """They gather into the very tensor that the bounds are of."""
        rows = PackedRows(4, 3, shift_labels=True, flatten=True)
        parts = [batch_at([[4], [4], [4]], rows, Place(cp=cp), mode="contiguous") for cp in range(2)]
        assert torch.cat([part["input_ids"] for part in parts], dim=1).tolist() == [list(range(1000, 1012))]

    def test_full_rows_are_as_wide_as_a_trainer_can_cut(self) -> None:
        parts = [batch_at([[3], [5]], PackedRows(5, 2), Place(cp=cp), cp=3) for cp in range(3)]
        for part in parts:
            assert part["input_ids"].shape == (2, 6)
            assert torch.equal(part["input_ids"], parts[0]["input_ids"])
        for name in ("input_ids", "labels", "position_ids"):
            # As torch's `context_parallel` does, in place.
            whole = parts[0][name].clone()
            parts[0][name].resize_(2, 3).copy_(whole[:, 3:])
            assert torch.equal(parts[0][name].resize_(2, 6).copy_(whole), parts[1][name])
        padded = batch_at([[3], [5]], PaddedRows(16, 2, pad_to_multiple_of=5), Place(), cp=2)
        assert padded["input_ids"].shape == (2, 20)


class TestStages:
    """A pipeline: the first stage has inputs, the last labels; none has None."""

    ROWS = (
        PackedRows(8, 1, token_fields=("loss_mask", "span"), sample_fields=("score",)),
        PaddedRows(8, 1, token_fields=("loss_mask", "span"), sample_fields=("score",)),
    )

    @pytest.mark.parametrize("rows", ROWS, ids=["packed", "padded"])
    @pytest.mark.parametrize("stages", [1, 2, 4])
    def test_fields(self, rows: Any, stages: int) -> None:
        everywhere = {"position_ids", "loss_mask", "megascale"}
        everywhere |= (
            {"attention_mask"}
            if isinstance(rows, PaddedRows)
            else {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        )
        spec = make_spec(rows, num_stages=stages)
        window = make_window([[5]], spec=spec, loss_mask=np.ones(5, np.int8), span=np.arange(5))
        window.samples["score"] = np.ones(1)  # type: ignore[index]
        whole = next(iter(finish(window, make_spec(rows))))[0]
        for stage in range(stages):
            ((batch, info),) = finish(window, spec, Place(pp=stage))
            expected = set(everywhere)
            if stage == 0:
                expected |= {"input_ids", "span", "score"}
            if stage == stages - 1:
                expected |= {"labels", "span", "score"}
            assert set(batch) == expected
            assert info.num_loss_tokens == info.rank_loss_tokens == 4
            for name in expected - {"megascale"}:
                assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(whole[name]))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_ranks=st.integers(1, 5))
def test_ranks_have_as_much_work_of_each_document_as_the_others(lengths: list[int], num_ranks: int) -> None:
    bounds = np.cumsum([0, *(length * 2 * num_ranks for length in lengths)])
    found = [slice_of(bounds, "head_tail", rank, num_ranks).tolist() for rank in range(num_ranks)]
    assert sorted(place for part in found for place in part) == list(range(bounds[-1]))
    for start, stop in pairwise(bounds.tolist()):
        chunks = np.split(np.arange(start, stop), 2 * num_ranks)
        for rank, part in enumerate(found):
            own = [place for place in part if start <= place < stop]
            assert own == [*chunks[rank], *chunks[-1 - rank]]
            pairs = sum(place - start + 1 for place in own)  # of a token and one that it attends to
            assert pairs * num_ranks == (stop - start) * (stop - start + 1) // 2


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ClientPlaceTree, Any]:
    """A mesh of 1 to 6 axes of sizes 1-4, in any order and with any numbering of ranks, and a stream for it."""
    names = draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=6, unique=True))
    shape: list[int] = []
    for _ in names:
        shape.append(draw(st.integers(1, min(4, MAX_RANKS // math.prod(shape)))))
    order = draw(st.permutations(range(len(names))))
    ranks = np.array(draw(st.permutations(range(math.prod(shape))))).reshape([shape[axis] for axis in order])
    tree = ClientPlaceTree.from_ranks(ranks, [names[axis] for axis in order])
    dp, cp = tree.num_groups, tree.size("cp")
    mode = draw(st.sampled_from(["full", "head_tail", "contiguous"]))
    micro = draw(st.integers(1, 3))
    fields: dict[str, Any] = {
        "token_fields": ("loss_mask",),
        "sample_fields": ("score",),
        "shift_labels": mode != "full" or draw(st.booleans()),
        "pad_to_multiple_of": draw(st.sampled_from([None, 3, 8])),
        "pad_id": 1,
    }
    rows: Any = PaddedRows(24, micro, **fields)
    if draw(st.booleans()):
        # 24 is a multiple of what up to 4 ranks need of documents: 2, 4, 6 and 8.
        pad = 2 * cp if mode == "head_tail" else draw(st.sampled_from([None, 1, 4, 12]))
        rows = PackedRows(24, micro, pad_documents_to=pad, flatten=draw(st.booleans()), **fields)
    microbatches = draw(st.integers(1, 3))
    spec = make_spec(
        rows,
        num_groups=dp,
        num_microbatches=microbatches,
        rows_per_step=dp * microbatches * micro + 2,
        context_parallel=mode,
        num_context_ranks=cp,
        num_stages=tree.size("pp"),
    )
    return tree, spec


@settings(max_examples=60, deadline=None)
@given(world=worlds())
def test_parts_of_any_mesh_make_up_the_step(world: tuple[ClientPlaceTree, Any]) -> None:
    tree, spec = world
    constructed = World(spec, num_steps=2, clients=tree.num_groups)
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for group in range(tree.num_groups):
        window = constructed.fetch(0, group=group, client=group)
        places = [tree.place(rank) for rank in tree.ranks if tree.data_group(rank) == group]
        got = {place: list(finish(window, spec, place)) for place in places}
        whole = list(finish(window, unsliced(spec)))
        assert {len(batches) for batches in got.values()} == {len(whole)}
        for index, (built, info) in enumerate(whole):
            check_parts(tree, spec, {place: batches[index][0] for place, batches in got.items()}, built)
            seen[info.step] += [piece for row in info.sample_ids() for piece in row]
    for step, pieces in seen.items():
        planned: Any = constructed.planner.plan("train", "g", step, 1)
        names = [source.name for source in spec.sources]
        columns = planned.steps[0].pieces[["source", "epoch", "unit", "row", "start", "stop"]].tolist()
        assert sorted(pieces) == sorted((names[source], *rest) for source, *rest in columns)


def unsliced(spec: Any) -> Any:
    """The same rows, as wide, for one rank that has all of them."""
    cp = spec.num_context_ranks
    multiple = 1 if cp == 1 else cp if spec.context_parallel == "contiguous" else 2 * cp
    rows = replace(spec.rows, pad_to_multiple_of=math.lcm(multiple, spec.rows.pad_to_multiple_of or 1))
    return replace(spec, rows=rows, num_context_ranks=1, num_stages=1)


def check_parts(tree: ClientPlaceTree, spec: Any, parts: dict[Place, dict[str, Any]], built: dict[str, Any]) -> None:
    """The parts of one group's microbatch are those of what was built."""
    cp, pp, group = tree.size("cp"), tree.size("pp"), next(iter(parts)).dp
    assert len(parts) == tree.world_size // tree.num_groups
    for place, part in parts.items():
        twin = parts[Place(place.pp, place.dp, place.cp, 0)]
        assert part.keys() == twin.keys()
        for name in part.keys() - {"megascale"}:
            assert torch.equal(torch.as_tensor(part[name]), torch.as_tensor(twin[name]))
    per_stage = [[parts[Place(stage, group, rank, 0)] for rank in range(cp)] for stage in range(pp)]
    assert {name for stage in per_stage for name in stage[0]} == built.keys()
    for of_ranks in per_stage:
        whole = of_ranks[0]["megascale"].num_loss_tokens
        own = [part["megascale"].rank_loss_tokens for part in of_ranks]
        assert whole == built["megascale"].num_loss_tokens
        assert own == [whole] * cp if spec.context_parallel == "full" else sum(own) == whole
        for name in of_ranks[0].keys() - {"megascale"}:
            together([part[name] for part in of_ranks], name, spec, built)


def together(parts: list[Any], name: str, spec: Any, built: dict[str, Any]) -> None:
    """What the ranks have of a field is the whole, put where the rule says that it came from."""
    whole, cp = built[name], len(parts)
    has_width = isinstance(whole, torch.Tensor) and name not in spec.rows.sample_fields and not name.startswith("cu_")
    if not has_width or spec.context_parallel == "full" or cp == 1:
        assert all(torch.equal(torch.as_tensor(part), torch.as_tensor(whole)) for part in parts)
        return
    assert all(part.shape == (whole.shape[0], whole.shape[1] // cp) for part in parts)
    flat, back = whole.flatten(), torch.full_like(whole.flatten(), -7)
    if spec.context_parallel == "contiguous":
        back = torch.cat(parts, dim=1).flatten()
    else:
        # Chunk by chunk of each document, or of each row where a row is one.
        bounds = built.get("cu_seq_lens_q", torch.arange(whole.shape[0] + 1) * whole.shape[1]).tolist()
        taken = [iter(part.flatten().tolist()) for part in parts]
        for start, stop in pairwise(bounds):
            chunk = (stop - start) // (2 * cp)
            for rank, values in enumerate(taken):
                for at in (rank, 2 * cp - 1 - rank):
                    for offset in range(chunk):
                        back[start + at * chunk + offset] = next(values)
    assert torch.equal(back, flat)
