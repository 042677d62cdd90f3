"""Batches, gradients and validation of a swapped DataModule beside those of the DataModule itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.swapped import QUIET, adopt


class Numbers(L.LightningDataModule):
    """Record i is the number i, in order."""

    def __init__(self, count: int, batch_size: int) -> None:
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(float(self.count)), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(7.0), batch_size=self.batch_size)  # type: ignore[arg-type]


class Mean(L.LightningModule):
    """A loss as users write it: the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.batches: list[tuple[int, list[float]]] = []
        self.gradients: list[float] = []
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.batches.append((self.trainer.current_epoch, batch.tolist()))
        return (self.weight * batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.gradients.append(self.weight.grad.item())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append((self.trainer.current_epoch, self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(data: L.LightningDataModule, *, ckpt: Path | None = None, **settings: Any) -> Mean:
    model = Mean()
    trainer = L.Trainer(**{**QUIET, **settings})
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return model


@pytest.mark.parametrize(
    ("count", "batch_size", "accumulate"), [(20, 4, 4), (100, 8, 4), (21, 4, 2), (9, 4, 1), (3, 4, 2)]
)
def test_incomplete_steps_train_on_real_samples_alone(count: int, batch_size: int, accumulate: int) -> None:
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    plain = fit(Numbers(count, batch_size), **settings)
    data = adopt(Numbers(count, batch_size))
    ours = fit(data, **settings)
    assert ours.batches == plain.batches
    assert ours.gradients == plain.gradients
    assert ours.validated == plain.validated


def test_a_resume_behind_every_batch_of_uneven_steps(tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt")

    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 4}
    whole = fit(adopt(Numbers(21, 2)), callbacks=[Save()], **settings)
    assert len(whole.batches) == 2 * 11
    for number in range(2 * 11):
        again = fit(adopt(Numbers(21, 2)), ckpt=tmp_path / f"{number}.ckpt", **settings)
        epoch, batch = divmod(number + 1, 11)
        steps = 3 * epoch + batch // 4
        assert again.gradients == whole.gradients[steps:]
        at_end = batch == 0  # the save came before the validation of its epoch
        assert again.validated == [v for v in whole.validated if v[1] > steps or (at_end and v[1] == steps)]


def test_a_fit_that_begins_inside_a_pass_validates_at_its_end() -> None:
    data = adopt(Numbers(100, 8))
    assert len(fit(data, max_epochs=1, max_steps=5).batches) == 5
    rest = fit(data, max_epochs=2)
    assert [epoch for epoch, _ in rest.batches] == [0] * 8 + [1] * 13
    assert rest.validated == [(0, 8), (1, 21)]


def test_a_second_fit_of_the_same_trainer_takes_every_step() -> None:
    class StopAt(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.fit_loop.epoch_loop.batch_progress.current.ready == 6 and model is first

    data, first, second = adopt(Numbers(20, 2)), Mean(), Mean()
    trainer = L.Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=3, callbacks=[StopAt()])
    model = first
    trainer.fit(first, datamodule=data)
    assert (len(first.batches), data.next_step) == (6, 2)
    model = second
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, datamodule=data)
    assert [batch for epoch, batch in second.batches][:4] == [[12.0, 13.0], [14.0, 15.0], [16.0, 17.0], [18.0, 19.0]]
    assert data.next_step == 2 + len(second.gradients)
    assert second.validated


@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_of_another_size_end_with_the_pass(tmp_path: Path, accumulate: int) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4 and not (tmp_path / "4.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "4.ckpt")

    fit(adopt(Numbers(40, 2)), max_epochs=1, accumulate_grad_batches=2, callbacks=[Save()])
    data = adopt(Numbers(40, 2), force_resume=["global_batch_size"])
    again = fit(data, ckpt=tmp_path / "4.ckpt", max_epochs=3, accumulate_grad_batches=accumulate)
    assert again.batches[0] == (0, [16.0, 17.0])
    assert Counter(epoch for epoch, _ in again.batches) == {0: 12, 1: 20, 2: 20}
    assert [epoch for epoch, _ in again.validated] == [0, 1, 2]


def test_no_word_about_a_validation_that_the_end_of_training_left_out(recwarn: pytest.WarningsRecorder) -> None:
    fit(adopt(Numbers(100, 8)), max_epochs=1, max_steps=5)
    assert not [warning for warning in recwarn if "val_check_interval" in str(warning.message)]
