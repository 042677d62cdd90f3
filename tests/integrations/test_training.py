"""Real trainers over real sources in this process: what is trained, what is saved, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from megascale_lightning import ConfigError, MegaScaleDataModule, StateError
from tests.integrations.corpora import held_out, real_data
from tests.integrations.fakes import SaveAt, make_trainer
from tests.integrations.models import Recorder


class Reader(Recorder):
    """Keeps the rows: (step, microbatch) -> ids and tokens."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.rows: dict[tuple[int, int], Any] = {}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        info = batch["megascale"]
        x = batch["input_ids"].float().mean(-1, keepdim=True).expand(-1, 2) / 100
        loss = super().training_step({"megascale": info, "x": x}, batch_idx)
        self.rows[info.step, info.microbatch] = (info.sample_ids(), batch["input_ids"].tolist())
        return loss


def steps(rows: dict[tuple[int, int], Any]) -> dict[int, list[Any]]:
    """Step -> its rows in a fixed order, wherever they were placed."""
    found: dict[int, list[Any]] = {}
    for (step, _), (ids, tokens) in rows.items():
        found.setdefault(step, []).extend(zip(ids, tokens, strict=True))
    return {step: sorted(pairs) for step, pairs in found.items()}


def fit(corpus: Path, trainer: dict[str, Any], data: dict[str, Any], path: Path | None = None) -> tuple[Reader, Any]:
    torch.manual_seed(0)
    model, module = Reader(), real_data(corpus, **data)
    make_trainer(**trainer).fit(model, datamodule=module, ckpt_path=path)
    return model, module


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 4}], ids=["unsized", "limited"])
def test_resumed_training_sees_the_remaining_rows(corpus: Path, tmp_path: Path, limits: dict[str, Any]) -> None:
    saver = SaveAt(tmp_path)
    trainer = {"max_steps": 7, "accumulate_grad_batches": 2, "limit_val_batches": 0, **limits}
    whole, data = fit(corpus, {**trainer, "callbacks": [saver]}, {"global_batch_size": 4})
    assert len(whole.rows) == 14
    for path in saver.saved:
        model, again = fit(corpus, trainer, {"global_batch_size": 4}, path)
        first = torch.load(path, weights_only=True)["global_step"]
        assert model.rows == {at: rows for at, rows in whole.rows.items() if at[0] >= first}, path.name
        assert again.certificate == data.certificate
        assert torch.equal(model.layer.weight, whole.layer.weight), path.name


class Asking(L.Callback):
    """Asks what became of the first sample of each batch, before and after the trainer is done with it."""

    def __init__(self) -> None:
        self.lives: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self.lives.append(trainer.datamodule.lineage(batch["megascale"].sample_ids()[0][0])[:2])

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.lives.append(trainer.datamodule.lineage(batch["megascale"].sample_ids()[0][0])[:2])


def test_what_became_of_a_sample_is_told_while_training(corpus: Path) -> None:
    asking = Asking()
    trainer = {"max_steps": 2, "accumulate_grad_batches": 2, "limit_val_batches": 0, "callbacks": [asking]}
    _, data = fit(corpus, trainer, {"global_batch_size": 4})
    done = [("consumed", -1)]
    assert asking.lives == [("delivered", 0)] * 3 + done + [("delivered", 1)] * 3 + done
    with pytest.raises(ConfigError, match="no training stream"):
        data.lineage(("web", 0, 0, 0))


@pytest.mark.parametrize("prefetch_steps", [0, 1, 3])
def test_read_ahead_changes_nothing(corpus: Path, prefetch_steps: int) -> None:
    trainer = {"max_steps": 6, "accumulate_grad_batches": 3}
    model, data = fit(corpus, trainer, {"prefetch_steps": prefetch_steps, "plan_window": 1})
    other, same = fit(corpus, trainer, {"plan_window": 4})
    assert model.rows == other.rows
    assert data.certificate == same.certificate


def test_other_accumulation_trains_the_same_steps(corpus: Path, tmp_path: Path) -> None:
    saver = SaveAt(tmp_path)
    whole, data = fit(
        corpus,
        {"max_steps": 5, "accumulate_grad_batches": 4, "callbacks": [saver]},
        {"global_batch_size": 8, "micro": 2},
    )
    for path in saver.saved:
        trainer = {"max_steps": 5, "accumulate_grad_batches": 8}
        model, again = fit(corpus, trainer, {"global_batch_size": 8, "micro": 1}, path)
        first = torch.load(path, weights_only=True)["global_step"]
        assert steps(model.rows) == {step: rows for step, rows in steps(whole.rows).items() if step >= first}
        assert model.stepped_after == [(step, 7) for step in range(first, 5)]
        assert again.certificate == data.certificate


def test_other_batch_size_is_refused(corpus: Path, tmp_path: Path) -> None:
    saver = SaveAt(tmp_path)
    fit(corpus, {"max_steps": 2, "accumulate_grad_batches": 4, "callbacks": [saver]}, {})
    with pytest.raises(StateError, match=r'accumulate_grad_batches=4.*force_resume=\["global_batch_size"\]'):
        fit(corpus, {"max_steps": 4, "accumulate_grad_batches": 2}, {}, saver.saved[-1])
    with pytest.raises(StateError, match="global_batch_size"):
        fit(corpus, {"max_steps": 4, "accumulate_grad_batches": 2}, {"global_batch_size": 4}, saver.saved[-1])


def test_other_batch_size_by_force_is_said_once(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = SaveAt(tmp_path)
    fit(corpus, {"max_steps": 2, "accumulate_grad_batches": 4, "callbacks": [saver]}, {})
    trainer, settings = {"max_steps": 4, "accumulate_grad_batches": 2}, {"force_resume": ["global_batch_size"]}
    with caplog.at_level("WARNING", "megascale_lightning"):
        model, _ = fit(corpus, trainer, settings, saver.saved[-1])
    assert sorted(steps(model.rows)) == [2, 3]
    found = [record.message for record in caplog.records if "other settings" in record.message]
    assert found == ["the checkpoint was written with other settings: global_batch_size; going on"]


@pytest.mark.parametrize("given", ["even", {"global_batch_size": "8"}, {"num_microbatches": 0}])
def test_a_damaged_part_of_the_trainer_is_refused(corpus: Path, tmp_path: Path, given: Any) -> None:
    saver = SaveAt(tmp_path)
    fit(corpus, {"max_steps": 1, "callbacks": [saver]}, {})
    checkpoint = torch.load(saver.saved[-1], weights_only=True)
    for state in (checkpoint["callbacks"]["megascale_lightning"], checkpoint["MegaScaleDataModule"]):
        state["trainer"] = given
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    with pytest.raises(StateError, match="'trainer' must be whole numbers"):
        fit(corpus, {"max_steps": 2}, {}, tmp_path / "damaged.ckpt")


def test_validation_sees_every_sample_each_time_and_moves_nothing(corpus: Path) -> None:
    seen: list[tuple[int, Any]] = []

    class Validated(Reader):
        def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append((dataloader_idx, batch["megascale"].sample_ids()))

    plain, _ = fit(corpus, {"max_steps": 6}, {})
    model, data = Validated(), real_data(corpus, val_sources=held_out(corpus))
    make_trainer(max_steps=6, val_check_interval=2, check_val_every_n_epoch=None, num_sanity_val_steps=1).fit(
        model, datamodule=data
    )
    assert model.rows == plain.rows
    rounds = [seen[2:][i : i + len(seen[2:]) // 3] for i in range(0, len(seen[2:]), len(seen[2:]) // 3)]
    assert len(rounds) == 3
    assert rounds[0] == rounds[1] == rounds[2]
    for loader, count in ((0, 7), (1, 12)):
        samples = {
            (piece[0], *piece[2:4]) for index, rows in rounds[0] if index == loader for row in rows for piece in row
        }
        assert len(samples) == count
    result = make_trainer().validate(Validated(), datamodule=data, verbose=False)
    assert len(result) == 2


def test_one_list_of_validation_sources(corpus: Path) -> None:
    model = Reader()
    data = real_data(corpus, val_sources=held_out(corpus)["a"])
    make_trainer(max_epochs=2, limit_train_batches=3, num_sanity_val_steps=2).fit(model, datamodule=data)
    per_epoch = len(model.validated[2:]) // 2
    assert model.validated[2:] == model.validated[2 : 2 + per_epoch] * 2
    assert sorted(model.rows) == [(step, 0) for step in range(6)]


def test_training_ends_with_finite_data(corpus: Path) -> None:
    model = Reader()
    data = real_data(corpus, epochs=1, last_step="fill")
    make_trainer(max_epochs=-1, accumulate_grad_batches=2).fit(model, datamodule=data)
    samples = {piece[:4] for ids, _ in model.rows.values() for row in ids for piece in row}
    assert len(samples) == 160 + 90
    assert data.ended
    assert model.stepped_after == [(step, 1) for step in range(data.next_step)]


def test_state_loaded_without_a_trainer_is_used_by_fit(corpus: Path, tmp_path: Path) -> None:
    saver = SaveAt(tmp_path)
    whole, _ = fit(corpus, {"max_steps": 6, "callbacks": [saver]}, {})
    blank = real_data(corpus)
    data = MegaScaleDataModule.load_from_checkpoint(
        saver.saved[2], sources=blank.config.sources, rows=blank.config.rows, runtime="local", window_units=4
    )
    assert data.next_step == 3
    model = Reader()
    make_trainer(max_steps=3).fit(model, datamodule=data)
    assert model.rows == {at: rows for at, rows in whole.rows.items() if at[0] >= 3}


def test_second_fit_goes_on(corpus: Path) -> None:
    whole, _ = fit(corpus, {"max_steps": 6}, {})
    data, first, second = real_data(corpus), Reader(), Reader()
    make_trainer(max_steps=4).fit(first, datamodule=data)
    make_trainer(max_steps=2).fit(second, datamodule=data)
    assert {**first.rows, **second.rows} == whole.rows


def test_loader_without_a_trainer(corpus: Path) -> None:
    whole, _ = fit(corpus, {"max_steps": 3, "accumulate_grad_batches": 2}, {})
    data = real_data(corpus, global_batch_size=4)
    data.setup("fit")
    try:
        batches = iter(data.train_dataloader())
        for at in sorted(whole.rows):
            info = next(batches)["megascale"]
            assert (info.step, info.microbatch) == at
            assert info.sample_ids() == whole.rows[at][0]
            data.mark_consumed(info)
        assert data.next_step == 3
    finally:
        data.teardown("fit")
