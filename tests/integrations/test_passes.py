"""Trainer epochs that are passes over the data: what an epoch's end brings comes once per pass, wherever it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from megascale_lightning import Source
from tests.integrations.fakes import FakeSession, SaveAt, make_data, make_trainer
from tests.integrations.models import Recorder
from tests.integrations.test_loops import LateRestore, OneCycle, check_run, saved_step

pytestmark = pytest.mark.usefixtures("sessions")

STEPS = 3
HELD = [Source("held", "held/*.jsonl")]


class Life(Recorder):
    """Writes down what happened at which optimizer step, and the learning rate of each step."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.events: list[tuple[str, int]] = []
        self.rates: dict[int, float] = {}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.rates[batch["megascale"].step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.events.append(("starts", self.trainer.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.events.append(("validated", self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.events.append(("ends", self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Marking(SaveAt):
    """Also notes in the model's events where each save falls."""

    def save(self, trainer: L.Trainer, hook: str) -> None:
        super().save(trainer, hook)
        trainer.lightning_module.events.append((str(self.saved[-1]), 0))  # type: ignore[operator,union-attr]


def events_after(events: list[tuple[str, int]], path: Path) -> list[tuple[str, int]]:
    found = [event for event in events[events.index((str(path), 0)) + 1 :] if not event[0].endswith(".ckpt")]
    if path.stem.endswith("batch") and found[0] == ("validated", saved_step(path)) and saved_step(path) % STEPS:
        del found[0]  # a validation in the middle of an epoch that comes behind the save is lost to Lightning, always
    if path.stem.endswith("epoch"):
        found.remove(next(event for event in found if event[0] == "ends"))  # the one it was saved in
    return found


@pytest.mark.parametrize("capped", [False, True], ids=["epochs", "epochs-and-steps"])
@pytest.mark.parametrize("validation", ["none", "epochs", "second-epochs", "batches"])
@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_every_end_of_a_pass_comes_once_from_any_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: int,
    after: int,
    sized: bool,
    validation: str,
    capped: bool,
) -> None:
    monkeypatch.setattr(FakeSession, "pass_length", STEPS)
    monkeypatch.setattr(FakeSession, "knows_lengths", sized)
    steps, size = 3 * STEPS, 16
    common: dict[str, Any] = {"max_epochs": 3, **({"max_steps": 100} if capped else {})}
    settings: dict[str, Any] = {}
    if validation == "none":
        common["limit_val_batches"] = 0
    else:
        settings["val_sources"] = HELD
        common["check_val_every_n_epoch"] = 2 if validation == "second-epochs" else 1

    def trainer(accumulate: int, **more: Any) -> L.Trainer:
        interval = {"val_check_interval": 2 * accumulate} if validation == "batches" else {}
        return make_trainer(accumulate_grad_batches=accumulate, **common, **interval, **more)

    saver, whole = Marking(tmp_path, starts=True), Life()
    trainer(before, callbacks=[saver]).fit(whole, datamodule=make_data(size // before, size, **settings))
    check_run(whole, 0, steps, before)
    kinds = [event for event, _ in whole.events]
    assert kinds.count("starts") == kinds.count("ends") == 3
    assert kinds.count("validated") == {"none": 0, "epochs": 3, "second-epochs": 1, "batches": 3}[validation]
    assert whole.rates == {step: 0.01 * 0.5 ** (step // STEPS) for step in range(steps)}

    for path in saver.saved:
        data, model = make_data(size // after, size, **settings), Life()
        again = trainer(after)
        again.fit(model, datamodule=data, ckpt_path=path)
        first = saved_step(path)
        try:
            check_run(model, first, steps, after)
            assert model.events == events_after(whole.events, path)
            assert model.rates == {step: rate for step, rate in whole.rates.items() if step >= first}
            assert again.current_epoch == 3
            assert again.global_step == data.next_step == steps
            assert data.state_dict()["passes"] == 3
            if not sized and validation != "batches":  # else Lightning counts one too many at an epoch's start
                assert again.fit_loop.epoch_loop._batches_that_stepped == steps
        except AssertionError as error:
            error.add_note(f"resumed from {path.name}, step {first}")
            raise


@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
def test_every_end_of_a_pass_comes_once_where_the_state_arrives_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sized: bool
) -> None:
    monkeypatch.setattr(FakeSession, "pass_length", STEPS)
    monkeypatch.setattr(FakeSession, "knows_lengths", sized)
    saver, whole = Marking(tmp_path, starts=True), Life()
    make_trainer(max_epochs=3, callbacks=[saver]).fit(whole, datamodule=make_data(val_sources=HELD))
    for path in saver.saved:
        model = Life()
        trainer = make_trainer(max_epochs=3, strategy=LateRestore(device="cpu"))
        trainer.fit(model, datamodule=make_data(val_sources=HELD), ckpt_path=path)
        check_run(model, saved_step(path), 3 * STEPS, 1)
        assert model.events == events_after(whole.events, path), path.name


def test_schedule_over_all_steps_of_all_passes_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FakeSession, "pass_length", STEPS)
    monkeypatch.setattr(FakeSession, "knows_lengths", True)
    saver, whole = SaveAt(tmp_path), OneCycle()
    make_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[saver]).fit(whole, datamodule=make_data(2, 4))
    assert len(whole.rates) == 2 * STEPS
    for path in saver.saved:
        model = OneCycle()
        make_trainer(max_epochs=2, accumulate_grad_batches=2).fit(model, datamodule=make_data(2, 4), ckpt_path=path)
        first = saved_step(path)
        check_run(model, first, 2 * STEPS, 2)
        assert model.rates == whole.rates[first:], path.name


def test_second_fit_goes_on_with_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_epochs` raised, another trainer, and one that was stopped in the middle of a pass."""
    monkeypatch.setattr(FakeSession, "pass_length", STEPS)
    data, model = make_data(), Life()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=data)
    check_run(model, 0, 3 * STEPS, 1)
    assert [step for event, step in model.events if event == "ends"] == [0, 1, 2]
    other = Life()
    make_trainer(max_epochs=2, max_steps=4).fit(other, datamodule=data)
    check_run(other, 9, 13, 1)
    last = Life()
    make_trainer(max_epochs=2).fit(last, datamodule=data)
    check_run(last, 13, 18, 1)  # the rest of the pass is its first epoch
    assert data.state_dict()["passes"] == 6


def test_manual_optimization_goes_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manual(Life):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch["megascale"].is_last_in_step:
                self.optimizers().step()  # type: ignore[union-attr]
                self.optimizers().zero_grad()  # type: ignore[union-attr]

    monkeypatch.setattr(FakeSession, "pass_length", STEPS)
    model = Manual()
    make_trainer(max_epochs=2).fit(model, datamodule=make_data(2, 8))
    check_run(model, 0, 2 * STEPS, 4)
    assert [event for event, _ in model.events] == ["starts", "ends"] * 2


class Bar(TQDMProgressBar):
    """Notes what it shows behind each batch."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.shown: list[tuple[int, int | None]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.shown.append((self.train_progress_bar.n, self.train_progress_bar.total))


@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
def test_progress_bar_counts_the_batches_of_a_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sized: bool
) -> None:
    monkeypatch.setattr(FakeSession, "pass_length", STEPS)
    monkeypatch.setattr(FakeSession, "knows_lengths", sized)
    saver, bar = SaveAt(tmp_path), Bar()
    trainer = make_trainer(max_epochs=2, enable_progress_bar=True, callbacks=[saver, bar])
    trainer.fit(Recorder(), datamodule=make_data())
    total = STEPS if sized else None
    whole = [(n, total) for n in (1, 2, 3)] * 2
    assert bar.shown == whole
    for path in saver.saved:
        bar = Bar()
        trainer = make_trainer(max_epochs=2, enable_progress_bar=True, callbacks=[bar])
        trainer.fit(Recorder(), datamodule=make_data(), ckpt_path=path)
        first = saved_step(path)
        assert [n for n, _ in bar.shown] == [n for n, _ in whole[first:]], path.name
        # Lightning tells the bar of the length at an epoch's start, and does not start the one that it resumes.
        assert bar.shown[-3:] == whole[-3:] or first >= STEPS, path.name
