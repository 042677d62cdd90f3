"""Rows of weight zero make counts equal and change no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale_lightning import LoaderConfig, PackedRows, PaddedRows, reduce_loss

from .data import PAD, Corpus, make_corpus
from .harness import Step, check_steps, run_world
from .parity import TinyModel, assert_close, gradients, helper_gradients, summed_loss, true_gradients

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

LENGTH = 32


@pytest.fixture(scope="module")
def eleven(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Eleven samples that fill a row each: a step of eight, and a tail of three."""
    return make_corpus(tmp_path_factory.mktemp("eleven"), {"web": 11}, seq_len=LENGTH, lengths={"web": [LENGTH] * 11})


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    lengths = [1 + (7 * i) % LENGTH for i in range(40)]
    return make_corpus(tmp_path_factory.mktemp("forty"), {"web": 40}, seq_len=LENGTH, lengths={"web": lengths})


def config_for(corpus: Corpus, kind: Any, micro: int, rows_per_step: int) -> LoaderConfig:
    return LoaderConfig(
        sources=corpus.sources(epochs=1),
        rows=kind(LENGTH, micro),
        global_batch_size=rows_per_step,
        runtime="local",
    )


def filler_rows(step: Step) -> int:
    """Rows of weight zero; each is empty."""
    count = 0
    for mb in step.microbatches():
        weights = np.asarray(mb.info.row_weights)
        assert weights.dtype == np.float32
        assert set(weights.tolist()) <= {0.0, 1.0}
        for row in np.flatnonzero(weights == 0):
            assert mb.rows[row] == []
            assert (mb.tensors["labels"][row] == -100).all()
            assert (mb.tensors["input_ids"][row] == PAD).all()
            count += 1
    return count


@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_a_tail_of_three_rows_on_two_ranks_with_accumulation_four(eleven: Corpus, kind: Any) -> None:
    config = config_for(eleven, kind, 1, 8)
    steps = run_world(config, 2, 4)
    alone = run_world(config, 1)
    check_steps(eleven, steps, config)
    assert [len(step.rows) for step in steps] == [8, 3]
    assert [filler_rows(step) for step in steps] == [0, 5]
    assert all(len(rank) == 4 for rank in steps[1].ranks)
    assert any(mb.info.num_loss_tokens == 0 for mb in steps[1].microbatches())
    assert {mb.info.step_loss_tokens for mb in steps[1].microbatches()} == {3 * (LENGTH - 1)}
    model = TinyModel()
    for step, expected in zip(steps, alone, strict=True):
        assert step.rows == expected.rows
        assert_close(helper_gradients(model, step), true_gradients(model, expected.microbatches()), 1e-9)


@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_sixteen_rows_on_three_ranks(forty: Corpus, kind: Any) -> None:
    config = config_for(forty, kind, 2, 16)
    steps = run_world(config, 3)
    alone = run_world(config, 1)
    check_steps(forty, steps, config)
    assert all(len(rank) == 3 for step in steps for rank in step.ranks)
    assert all(filler_rows(step) == 18 - len(step.rows) for step in steps)
    model = TinyModel()
    for step, expected in zip(steps, alone, strict=True):
        assert step.rows == expected.rows
        assert_close(helper_gradients(model, step), true_gradients(model, expected.microbatches()), 1e-9)


def test_filler_is_in_no_count(eleven: Corpus) -> None:
    """The certificate is that of one process, where nothing is filled."""
    config = config_for(eleven, PackedRows, 1, 8)
    filled = run_world(config, 3)
    alone = run_world(config, 1)
    assert [step.certificate for step in filled] == [step.certificate for step in alone]


@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_the_helper_on_a_microbatch_without_targets(eleven: Corpus, kind: Any) -> None:
    """Its loss is a finite zero that reaches every parameter: no rank waits for a gradient that never comes."""
    tail = run_world(config_for(eleven, kind, 1, 8), 2, 4)[1]
    mb = next(mb for mb in tail.microbatches() if mb.info.num_loss_tokens == 0)
    model = TinyModel()
    loss = reduce_loss(summed_loss(model, mb.tensors), mb.info)
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients(model))


def test_samples_of_one_token_have_no_targets(tmp_path: Path) -> None:
    """A whole step without a target: zero loss, zero gradient, no division by zero."""
    corpus = make_corpus(tmp_path, {"web": 4}, seq_len=8, lengths={"web": [1] * 4})
    config = LoaderConfig(sources=corpus.sources(epochs=1), rows=PaddedRows(8, 1), global_batch_size=4, runtime="local")
    (step,) = run_world(config, 2)
    assert {mb.info.step_loss_tokens for mb in step.microbatches()} == {0}
    model = TinyModel()
    for gradient in helper_gradients(model, step):
        assert torch.equal(gradient, torch.zeros_like(gradient))
