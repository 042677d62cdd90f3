"""Settings that are shares of an epoch: with a loader that knows its length, and with one that does not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from megascale_lightning import ConfigError, MegaScaleWarning, Source
from tests.integrations.fakes import FakeSession, make_data, make_trainer
from tests.integrations.models import Recorder

pytestmark = pytest.mark.usefixtures("sessions")


@pytest.mark.parametrize("steps", [None, 4])
def test_share_of_an_epoch_needs_its_length(monkeypatch: pytest.MonkeyPatch, steps: int | None) -> None:
    with pytest.raises(ConfigError, match=r"steps_per_epoch=(.|\n)*limit_train_batches="):
        make_trainer(max_epochs=1, limit_train_batches=0.5).fit(Recorder(), datamodule=make_data())
    monkeypatch.setattr(FakeSession, "pass_length", 4)
    monkeypatch.setattr(FakeSession, "knows_lengths", steps is None)
    model = Recorder()
    trainer = make_trainer(max_epochs=2, limit_train_batches=0.5, accumulate_grad_batches=2)
    trainer.fit(model, datamodule=make_data(steps_per_epoch=steps))
    assert model.stepped_after == [(step, 1) for step in range(4)]
    assert trainer.current_epoch == 2
    with pytest.raises(ConfigError, match="limit_train_batches=2 or 4"):
        make_trainer(max_epochs=2, limit_train_batches=0.4, accumulate_grad_batches=2).fit(
            model, datamodule=make_data(steps_per_epoch=steps)
        )


def test_share_of_an_epoch_between_validations_needs_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Source("held", "held/*.jsonl")]
    with pytest.raises(ConfigError, match=r"steps_per_epoch=(.|\n)*val_check_interval="):
        make_trainer(max_epochs=1, val_check_interval=0.5).fit(Recorder(), datamodule=make_data(val_sources=held))
    monkeypatch.setattr(FakeSession, "pass_length", 4)
    monkeypatch.setattr(FakeSession, "knows_lengths", True)
    model = Recorder()
    make_trainer(max_epochs=1, val_check_interval=0.5).fit(model, datamodule=make_data(val_sources=held))
    assert model.validated == [(0, 0, 0), (0, 1, 0)] * 2


@pytest.mark.parametrize("kind", ["val", "test", "predict"])
def test_share_of_an_evaluation_needs_its_length(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    data = make_data(**{f"{kind}_sources": [Source("held", "held/*.jsonl")]})
    trainer = make_trainer(**{f"limit_{kind}_batches": 0.5})
    run = {"val": trainer.validate, "test": trainer.test, "predict": trainer.predict}[kind]
    with pytest.raises(ConfigError, match=f"limit_{kind}_batches=0.5"):
        run(Recorder(), datamodule=data)
    monkeypatch.setattr(FakeSession, "knows_lengths", True)
    model = Recorder()
    trainer = make_trainer(**{f"limit_{kind}_batches": 0.5})
    run = {"val": trainer.validate, "test": trainer.test, "predict": trainer.predict}[kind]
    run(model, datamodule=data)
    assert model.validated == [(0, 0, 0)]


def test_steps_of_unknown_number_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule over all steps, where a `DataLoader` would know how many there are."""

    class Scheduled(Recorder):
        def configure_optimizers(self) -> Any:
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    monkeypatch.setattr(FakeSession, "pass_length", 4)
    model = Scheduled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2).fit(model, datamodule=make_data())
    (said,) = [str(warning.message) for warning in caught if warning.category is MegaScaleWarning]
    assert "estimated_stepping_batches is -1" in said
    assert "steps_per_epoch=" in said
    assert model.steps == -1
    monkeypatch.setattr(FakeSession, "knows_lengths", True)
    make_trainer(max_epochs=2, accumulate_grad_batches=2).fit(model, datamodule=make_data())
    assert model.steps == 8
