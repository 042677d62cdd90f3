"""Padded rows and declared fields: exactly once, rows of similar length together, labels and counts that agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale_lightning import Balanced, ConfigError, LoaderConfig, PackedRows, PaddedRows, RoundRobin

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Step, World, check_steps, count_tokens, run_world, same_tensors, without_run

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


def padded(corpus: Corpus, rows: Any = None, *, epochs: int | None = 1, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=epochs),
        "rows": rows or PaddedRows(SEQ_LEN, 4),
        "global_batch_size": 32,
        "seed": 9,
        "runtime": "local",
        "part_bytes": 4000,
        "prefetch_steps": 2,
        "plan_window": 3,
    }
    return LoaderConfig(**(base | changes))


@pytest.mark.parametrize(("dp", "accumulate"), [(1, 8), (2, 4), (4, 2), (3, None)])
@pytest.mark.parametrize("last_step", ["fill", "drop"])
def test_exactly_once(with_fields: Corpus, dp: int, accumulate: int | None, last_step: str) -> None:
    config = padded(with_fields, last_step=last_step)
    with World(config, dp, accumulate) as world:
        steps = world.steps()
        state = world.state()
    check_steps(with_fields, steps, config)
    assert all(len(row) == 1 for step in steps for row in step.rows), "a row is one sample"
    tokens = count_tokens(steps)
    assert max(tokens.values()) == 1
    pieces = {name: int((-(-files.lengths // SEQ_LEN)).sum()) for name, files in with_fields.files.items()}
    dropped = {name: state["sources"][name]["dropped"].get("last_step", 0) for name in pieces}
    assert len([p for step in steps for p in step.pieces()]) == sum(pieces.values()) - sum(dropped.values())
    if last_step == "fill":
        assert len(tokens) == with_fields.num_tokens()
        assert sum(dropped.values()) == 0
    else:
        assert sum(dropped.values()) == sum(pieces.values()) % 32


@pytest.mark.parametrize("strategy", [Balanced(), RoundRobin()], ids=["balanced", "round_robin"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_rows_of_similar_length_share_a_microbatch(with_fields: Corpus, dp: int, strategy: Any) -> None:
    """A step's microbatches are as wide as its rows sorted by length and cut in fours: least padding."""
    steps = run_world(padded(with_fields, strategy=strategy), dp)
    for step in steps[:-1]:
        lengths = [int(mask.sum()) for mb in step.microbatches() for mask in mb.tensors["attention_mask"]]
        widths = [mb.tensors["input_ids"].shape[1] for mb in step.microbatches()]
        for mb in step.microbatches():
            assert mb.tensors["input_ids"].shape[1] == int(mb.tensors["attention_mask"].sum(1).max())
        assert sorted(widths) == sorted(sorted(lengths)[3::4])


def test_pad_to_multiple_of(with_fields: Corpus) -> None:
    config = padded(with_fields, PaddedRows(SEQ_LEN, 4, pad_to_multiple_of=16))
    steps = run_world(config, 2)
    check_steps(with_fields, steps, config)
    for step in steps:
        for mb in step.microbatches():
            longest = int(mb.tensors["attention_mask"].sum(1).max())
            assert mb.tensors["input_ids"].shape[1] == max(16, -(-longest // 16) * 16)


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_resume(with_fields: Corpus, count: int) -> None:
    config = padded(with_fields, PaddedRows(SEQ_LEN, 4, token_fields=("loss_mask",)), epochs=None)
    with World(config, 2, keep_states=True) as world:
        start = world.state()
        steps = world.steps(14)
    state = steps[count - 1].state if count else start
    with World(config, 2, state=state, keep_states=True) as world:
        found = world.steps(14 - count)
    for mine, its in zip(found, steps[count:], strict=True):
        assert mine.rows == its.rows
        assert mine.certificate == its.certificate
        assert same_tensors(mine, its)
        assert mine.state is not None
        assert its.state is not None
        assert without_run(mine.state) == without_run(its.state)
    rows = [step.rows for step in run_world(config, 4, state=state, steps=14 - count)]
    assert rows == [step.rows for step in steps[count:]]


FIELDS = [
    pytest.param((), (), id="none"),
    pytest.param(("loss_mask",), (), id="loss_mask"),
    pytest.param(("labels",), (), id="labels"),
    pytest.param(("loss_mask", "labels"), ("score",), id="all"),
]


@pytest.mark.parametrize("shift", [False, True], ids=["unshifted", "shifted"])
@pytest.mark.parametrize(("token_fields", "sample_fields"), FIELDS)
@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_fields_labels_and_counts(
    with_fields: Corpus, kind: Any, token_fields: tuple[str, ...], sample_fields: tuple[str, ...], shift: bool
) -> None:
    """`check_steps` compares every label, mask, field and count with what was written."""
    rows = kind(SEQ_LEN, 4, token_fields=token_fields, sample_fields=sample_fields, shift_labels=shift)
    config = padded(with_fields, rows)
    steps = run_world(config, 2)
    check_steps(with_fields, steps, config)
    for step in steps:
        for mb in step.microbatches():
            assert set(token_fields) | set(sample_fields) <= mb.tensors.keys()
    targets = sum(mb.info.step_loss_tokens for step in steps for mb in step.ranks[0][:1])
    assert targets == sum(int((mb.tensors["labels"] != -100).sum()) for step in steps for mb in step.microbatches())
    assert targets > 0


@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_shifted_and_unshifted_count_the_same_targets(with_fields: Corpus, kind: Any) -> None:
    counts = []
    for shift in (False, True):
        rows = kind(SEQ_LEN, 4, token_fields=("loss_mask",), shift_labels=shift)
        steps = run_world(padded(with_fields, rows), 2)
        counts.append([[mb.info.num_loss_tokens for mb in step.microbatches()] for step in steps])
    assert counts[0] == counts[1]


def test_fields_do_not_change_the_rows(with_fields: Corpus) -> None:
    plain = run_world(padded(with_fields, PackedRows(SEQ_LEN, 4)), 2)
    masked = run_world(padded(with_fields, PackedRows(SEQ_LEN, 4, token_fields=("loss_mask",))), 2)
    assert [step.rows for step in plain] == [step.rows for step in masked]


def test_flattened_rows(with_fields: Corpus) -> None:
    """The same values as unflattened, [1, rows x width]."""
    as_rows = run_world(padded(with_fields, PackedRows(SEQ_LEN, 4)), 2)
    flat = run_world(padded(with_fields, PackedRows(SEQ_LEN, 4, flatten=True)), 2)
    for one, other in zip(as_rows, flat, strict=True):
        assert one.rows == other.rows
        for mine, its in zip(one.microbatches(), other.microbatches(), strict=True):
            for name in ("input_ids", "labels", "position_ids"):
                assert its.tensors[name].shape == (1, 4 * SEQ_LEN)
                assert torch.equal(mine.tensors[name].reshape(1, -1), its.tensors[name])
            assert torch.equal(mine.tensors["cu_seq_lens_q"], its.tensors["cu_seq_lens_q"])
            assert mine.tensors["max_length_k"] == its.tensors["max_length_k"]


def test_the_pad_id_is_used(with_fields: Corpus) -> None:
    steps: list[Step] = run_world(padded(with_fields, PackedRows(SEQ_LEN, 4, pad_id=99_999_999)), 2)
    for step in steps:
        for mb in step.microbatches():
            ids = mb.tensors["input_ids"]
            assert not (ids == 0).any()
            assert bool((ids == 99_999_999).any()) == (
                int(mb.tensors["labels"].numel()) > int((ids < 99_999_999).sum())
            )


@pytest.mark.parametrize("name", ["position_ids", "megascale", "input_ids"])
def test_names_of_our_own_cannot_be_declared(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PackedRows(SEQ_LEN, 4, token_fields=(name,))
