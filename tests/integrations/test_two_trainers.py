"""A DataModule that is at work is given to another trainer: that one is refused, and the one at work goes on."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from megascale_lightning import ConfigError, MegaScaleDataModule
from tests.integrations.swapped import (
    FACE_BATCHES,
    NUMBERS,
    QUIET,
    Checking,
    Events,
    PictureData,
    adopt,
    fit,
)


class AsksForIt(Callback):
    """In the middle of a run, hands its DataModule to a trainer of its own."""

    def __init__(self, refusal: str = "at work in another trainer", **settings: Any) -> None:
        self.refusal, self.settings = refusal, settings
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        with pytest.raises(Exception, match=self.refusal):
            L.Trainer(**{**QUIET, **self.settings}).validate(Events(), datamodule=data)
        self.found.append((data.trainer is trainer, data.running, getattr(data, "wrapped", data).trainer is trainer))


@pytest.mark.parametrize("asks", [AsksForIt(), AsksForIt("no disk", callbacks=[])], ids=["refused", "failed before"])
def test_the_run_goes_on_with_an_adopted_one(asks: AsksForIt, monkeypatch: pytest.MonkeyPatch) -> None:
    data, told = adopt(PictureData()), []
    monkeypatch.setattr(PictureData, "on_exception", lambda self, error: told.append(error))
    if asks.refusal == "no disk":

        def fail(self: Any) -> None:
            if self.calls.count("prepare_data"):
                raise OSError("no disk")
            self.calls.append("prepare_data")

        monkeypatch.setattr(PictureData, "prepare_data", fail)
    model = Checking(FACE_BATCHES)
    fit(data, model, max_epochs=1, callbacks=[asks])
    assert asks.found == [(True, True, True)] * 12  # 180 pictures, 16 of them a batch
    assert len(model.ids_of("train")) == 180
    assert [call for call in data.wrapped.calls if "teardown" in call] == ["teardown TrainerFn.FITTING"]
    assert told == []
    assert not data.running


def test_the_run_goes_on_with_one_of_datasets() -> None:
    data = MegaScaleDataModule.from_datasets(NUMBERS, NUMBERS, batch_size=2, runtime="local")
    asks = AsksForIt()
    fit(data, Events(), max_epochs=1, callbacks=[asks])
    assert asks.found == [(True, True, True)] * 4
    assert data.next_step == 4


def test_the_refused_trainer_gets_it_afterwards() -> None:
    data = MegaScaleDataModule.from_datasets(NUMBERS, NUMBERS, batch_size=2, runtime="local")
    fit(data, Events(), max_epochs=1, callbacks=[AsksForIt()])
    trainer = L.Trainer(**QUIET)
    model = Events()
    trainer.validate(model, datamodule=data, verbose=False)
    assert data.trainer is trainer
    assert model.events == [("val", index) for index in range(4)]


def test_a_refusal_that_nobody_catches_ends_the_run() -> None:
    class Nested(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            L.Trainer(**QUIET).validate(Events(), datamodule=trainer.datamodule)  # type: ignore[attr-defined]

    data = adopt(PictureData())
    with pytest.raises(ConfigError, match="at work in another trainer"):
        fit(data, Checking(FACE_BATCHES), callbacks=[Nested()])
    assert not data.running
