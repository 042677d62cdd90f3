"""Copies of a DataModule, by `copy.deepcopy` and by pickle: the position goes with them, trainer and roles do not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from megascale_lightning import MegaScaleDataModule
from tests.integrations.swapped import FACE_BATCHES, NUMBERS, Checking, Events, PictureData, adopt, fit

COPY = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["deepcopy", "pickle"]
)


class Copies(Callback):
    """Copies the DataModule in the middle of a run."""

    def __init__(self, duplicate: Callable[[Any], Any], step: int) -> None:
        self.duplicate, self.step = duplicate, step
        self.copy: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.copy = self.duplicate(trainer.datamodule)  # type: ignore[attr-defined]


def made(kind: str) -> Any:
    if kind == "adopted":
        return adopt(PictureData())
    return MegaScaleDataModule.from_datasets(NUMBERS, batch_size=2, runtime="local")


def module(kind: str) -> L.LightningModule:
    return Checking(FACE_BATCHES) if kind == "adopted" else Events()


@COPY
@pytest.mark.parametrize("kind", ["adopted", "datasets"])
def test_after_a_fit(kind: str, duplicate: Callable[[Any], Any]) -> None:
    data = made(kind)
    trainer = fit(data, module(kind), max_epochs=1)
    found = duplicate(data)
    assert found.trainer is None
    assert getattr(found, "wrapped", found).trainer is None
    assert not found.running
    assert found.position() == data.position() != {}
    assert data.trainer is trainer
    assert getattr(data, "wrapped", data).trainer is trainer


@COPY
@pytest.mark.parametrize("kind", ["adopted", "datasets"])
def test_during_a_fit(kind: str, duplicate: Callable[[Any], Any]) -> None:
    data, copies = made(kind), Copies(duplicate, 3)
    fit(data, module(kind), max_epochs=1, callbacks=[copies])
    found = copies.copy
    assert (found.next_step, found.running, found.trainer) == (3, False, None)
    assert getattr(found, "wrapped", found).trainer is None
    fit(found, module(kind), max_epochs=1)  # where the position stands, to the end of the pass
    assert found.certificate == data.certificate
