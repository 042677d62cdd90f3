"""Twenty optimizer steps give the same model, however the rows are placed and on how many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megascale_lightning import Balanced, LoaderConfig, PackedRows, PaddedRows, RoundRobin

from . import ddp_child
from .conftest import SEQ_LEN
from .data import Corpus
from .harness import run_world
from .parity import TinyModel, assert_close, descend, gradients, helper_gradients, summed_loss, true_gradients

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

STEPS = 20


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=16, token_fields=("loss_mask",)),
        "global_batch_size": 8,
        "seed": 21,
        "runtime": "local",
    }
    return LoaderConfig(**(base | changes))


def trained(config: LoaderConfig, dp: int) -> list[torch.Tensor]:
    model = TinyModel()
    for step in run_world(config, dp, steps=STEPS):
        descend(model, helper_gradients(model, step))
    return [parameter.detach() for parameter in model.parameters()]


def trained_without_the_helper(config: LoaderConfig) -> list[torch.Tensor]:
    """One process, one sum over all tokens of the step."""
    model = TinyModel()
    for step in run_world(config, steps=STEPS):
        descend(model, true_gradients(model, step.microbatches()))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_parity(with_fields: Corpus, rows: str) -> None:
    kind = PackedRows if rows == "packed" else PaddedRows
    config = {
        "rows": kind(SEQ_LEN, 2, token_fields=("loss_mask",), **({"pack_ahead": 0} if kind is PackedRows else {}))
    }
    expected = trained_without_the_helper(config_for(with_fields, **config))
    start = [parameter.detach() for parameter in TinyModel().parameters()]
    assert all(float((a - b).abs().max()) > 0.01 for a, b in zip(expected, start, strict=True)), "it learns something"
    for dp in (1, 2, 3):
        for strategy in (Balanced(), RoundRobin()):
            assert_close(trained(config_for(with_fields, strategy=strategy, **config), dp), expected)


def test_a_mean_per_microbatch_would_differ(with_fields: Corpus) -> None:
    """What the helper is for, and that the comparison can fail: microbatches hold unequal numbers of targets."""
    config = config_for(with_fields, rows=PaddedRows(SEQ_LEN, 2))
    model = TinyModel()
    (step,) = run_world(config, 2, steps=1)
    assert len({mb.info.num_loss_tokens for mb in step.microbatches()}) > 1
    for mb in step.microbatches():
        (summed_loss(model, mb.tensors) / mb.info.num_loss_tokens / 4).backward()
    naive = gradients(model)
    with pytest.raises(AssertionError):
        assert_close(naive, true_gradients(model, step.microbatches()), 1e-2)


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Balanced(), RoundRobin()], ids=["balanced", "round_robin"])
def test_two_processes_with_ddp(with_fields: Corpus, tmp_path: Path, strategy: Any) -> None:
    config = config_for(with_fields, strategy=strategy)
    expected = trained_without_the_helper(config)
    torch.multiprocessing.spawn(ddp_child.train, args=(2, config, STEPS, str(tmp_path)), nprocs=2, join=True)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert results[0]["certificate"] == results[1]["certificate"]
    assert results[0]["seen"] == results[1]["seen"] == [(step, mb) for step in range(STEPS) for mb in range(2)]
    for result in results:
        assert_close(result["parameters"], expected)
