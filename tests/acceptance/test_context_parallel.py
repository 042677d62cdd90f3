"""Context-parallel ranks that train on their slices take the very steps of one rank that has whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, PackedRows, PaddedRows, reduce_loss

from .attention import AttentionModel, side_by_side, summed_losses, train_slice
from .conftest import SEQ_LEN
from .data import Corpus
from .parity import assert_close, gradients

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

TOLERANCE = 1e-9
FIELDS: dict[str, Any] = {"token_fields": ("loss_mask",), "shift_labels": True}
ROWS = {
    "packed": PackedRows(SEQ_LEN, 2, pack_ahead=16, pad_documents_to=8, **FIELDS),
    "flat": PackedRows(SEQ_LEN, 2, pack_ahead=16, pad_documents_to=8, flatten=True, **FIELDS),
    "padded": PaddedRows(SEQ_LEN, 2, **FIELDS),
}


def config_for(corpus: Corpus, rows: str, mode: str = "full") -> LoaderConfig:
    return LoaderConfig(
        sources=corpus.sources(epochs=None),
        rows=ROWS[rows],
        global_batch_size=8,
        seed=5,
        runtime="local",
        context_parallel=mode,  # type: ignore[arg-type]
    )


def first_step(config: LoaderConfig, tree: ClientPlaceTree) -> list[list[dict[str, Any]]]:
    """The microbatches of step 0 on every rank."""
    loaders = [MegaScaleLoader(config, tree=tree, rank=rank) for rank in tree.ranks]
    found = []
    for loader in loaders:
        iterator = iter(loader)
        found.append([next(iterator) for _ in range(loader.num_microbatches)])
    for loader in loaders:
        loader.close()
    return found


def whole_gradients(model: AttentionModel, config: LoaderConfig) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the mean over all targets of step 0, on one rank that has whole rows."""
    (microbatches,) = first_step(config, ClientPlaceTree.from_sizes())
    losses = [summed_losses(model, [batch], "full", side_by_side)[0] for batch in microbatches]
    loss = torch.stack(losses).sum() / sum(int((batch["labels"] != -100).sum()) for batch in microbatches)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("mode", ["head_tail", "contiguous"])
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (1, 4)])
def test_loss_and_gradients_of_slices(with_fields: Corpus, rows: str, mode: str, dp: int, cp: int) -> None:
    """All ranks in one process: what each sees of the others' keys and values is exchanged layer by layer."""
    model = AttentionModel()
    expected, wanted = whole_gradients(model, config_for(with_fields, rows))
    tree = ClientPlaceTree.from_sizes(dp=dp, cp=cp)
    per_rank = first_step(config_for(with_fields, rows, mode), tree)
    losses = []
    for group in range(dp):
        of_group = [per_rank[rank] for rank in tree.ranks if tree.data_group(rank) == group]
        for slices in zip(*of_group, strict=True):
            assert all(part["input_ids"].shape == slices[0]["input_ids"].shape for part in slices)
            for summed, part in zip(summed_losses(model, slices, mode, side_by_side), slices, strict=True):
                # As a framework has it: a mean over microbatches, and over all ranks that hold the model.
                losses.append(reduce_loss(summed, part["megascale"]) / len(of_group[0]) / (dp * cp))
    loss = torch.stack(losses).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(float(loss.detach()) - expected) <= TOLERANCE * expected
    assert_close(gradients(model), wanted, TOLERANCE)


def test_slices_that_do_not_meet_would_differ(with_fields: Corpus) -> None:
    """What is compared can fail: without the keys of the other rank the loss is another."""
    model = AttentionModel()
    _, wanted = whole_gradients(model, config_for(with_fields, "packed"))
    per_rank = first_step(config_for(with_fields, "packed", "contiguous"), ClientPlaceTree.from_sizes(cp=2))
    for rank, microbatches in enumerate(per_rank):
        for part in microbatches:
            alone = [part if other == rank else _emptied(part) for other in range(2)]
            summed = summed_losses(model, alone, "contiguous", side_by_side)[rank]
            (reduce_loss(summed, part["megascale"]) / len(microbatches) / 2).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError):
        assert_close(gradients(model), wanted, 1e-3)


def _emptied(part: dict[str, Any]) -> dict[str, Any]:
    return part | {"input_ids": torch.zeros_like(part["input_ids"])}


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("rows", "mode", "cuts"),
    [
        ("packed", "head_tail", "head_tail"),
        ("packed", "contiguous", "contiguous"),
        # torch has no attention for slices on CPUs; it does cut the buffers there, and that is what batches must bear.
        ("padded", "full", "torch"),
    ],
)
def test_two_processes(with_fields: Corpus, tmp_path: Path, rows: str, mode: str, cuts: str) -> None:
    steps = 3
    config = config_for(with_fields, rows, mode)
    torch.multiprocessing.spawn(train_slice, args=(2, config, steps, cuts, str(tmp_path)), nprocs=2, join=True)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    model, losses = AttentionModel(), []
    with MegaScaleLoader(config_for(with_fields, rows)) as loader:
        for batch in loader:
            (summed,) = summed_losses(model, [batch], "full", side_by_side)
            loss = reduce_loss(summed, batch["megascale"]) / loader.num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            if batch["megascale"].is_last_in_step:
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients(model), strict=True):
                        parameter -= gradient
                if batch["megascale"].step == steps - 1:
                    break
    together = [(one + other) / 2 for one, other in zip(*(result["losses"] for result in results), strict=True)]
    assert together == pytest.approx(losses, rel=1e-9)
    for result in results:
        assert_close(result["parameters"], [parameter.detach() for parameter in model.parameters()], 1e-9)
