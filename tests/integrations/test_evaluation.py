"""Evaluation as a trainer asks for it: the streams of a stage, the form of its loaders, `last_info` meanwhile."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from megascale_lightning import ConfigError, Source, StreamError
from tests.integrations.fakes import FakeSession, SaveAt, make_data, make_trainer
from tests.integrations.models import Recorder

pytestmark = pytest.mark.usefixtures("sessions")

A, B = Source("a", "a/*.jsonl"), Source("b", "b/*.jsonl")


def everything(**more: Any) -> dict[str, Any]:
    return {"val_sources": [A], "test_sources": {"a": [A], "b": [B]}, "predict_sources": [B], **more}


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        ("fit", ("train", "val")),
        ("validate", ("val",)),
        ("test", ("test",)),
        ("predict", ("predict",)),
        (None, None),
    ],
)
def test_a_stage_starts_the_streams_that_it_needs(
    sessions: list[FakeSession], stage: str | None, kinds: tuple[str, ...] | None
) -> None:
    data = make_data(**everything())
    data.setup(stage)
    assert sessions[0].kinds == kinds
    data.teardown(stage)
    assert sessions[0].closed == 1


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_without_sources_starts_nothing(sessions: list[FakeSession], stage: str) -> None:
    data = make_data()
    data.setup(stage)
    assert sessions == []
    trainer = make_trainer()
    with pytest.raises(MisconfigurationException, match="dataloader"):
        getattr(trainer, stage)(Recorder(), datamodule=data)
    kind = {"validate": "val"}.get(stage, stage)
    full = make_data(**everything())
    with pytest.raises(ConfigError, match=rf"no {kind} stream yet.*setup\('{stage}'\)"):
        getattr(full, f"{kind}_dataloader")()


def test_data_to_evaluate_alone_need_no_training_sources() -> None:
    data = make_data(**everything(), sources=())
    model = Recorder()
    make_trainer().validate(model, datamodule=data, verbose=False)
    assert model.validated == [(0, 0, 0), (0, 1, 0)]
    with pytest.raises(ConfigError, match="sources is empty"):
        make_trainer(max_steps=1).fit(model, datamodule=data)


def test_loaders_come_in_the_form_of_their_sources() -> None:
    data = make_data(**everything())
    data.setup(None)
    assert data.val_dataloader() is data.val_dataloader()
    assert list(data.test_dataloader()) == ["a", "b"]
    assert [loader.stream for loader in data.test_dataloader().values()] == ["test/0", "test/1"]
    assert data.predict_dataloader().stream == "predict/0"
    assert data.train_dataloader().stream == "train"
    data.teardown()


def test_evaluations_between_two_fits_move_nothing(tmp_path: Path, sessions: list[FakeSession]) -> None:
    saver, data, model = SaveAt(tmp_path), make_data(2, 4, **everything()), Recorder()
    trainer = make_trainer(max_steps=3, accumulate_grad_batches=2, callbacks=[saver])
    trainer.fit(model, datamodule=data)
    before = data.state_dict()
    for path in (None, saver.saved[1]):
        other = Recorder()
        make_trainer().validate(other, datamodule=data, ckpt_path=path, verbose=False)
        make_trainer().test(other, datamodule=data, ckpt_path=path, verbose=False)
        make_trainer().predict(other, datamodule=data, ckpt_path=path, return_predictions=False)
        once = [(0, 0, 0), (0, 1, 0)]
        assert other.validated == [*once, *once, (1, 0, 0), (1, 1, 0), *once]
        trainer.validate(Recorder(), datamodule=data, ckpt_path=path, verbose=False)
        assert data.state_dict() == before
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(model, datamodule=data)
    assert model.trained == [(step, microbatch) for step in range(5) for microbatch in range(2)]
    assert all(session.closed == 1 for session in sessions)


class Looking(Recorder):
    """Compares `data.last_info` with the batch in every hook around it."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[tuple[str, str]] = []

    def look(self, hook: str, batch: Any) -> None:
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        assert (info.step, info.microbatch) == tuple(x[0].int().tolist()), hook
        if isinstance(batch, dict):
            assert batch["megascale"] is info
        self.looked.append((hook, info.stream))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.look("step", batch)
        info = self.trainer.datamodule.last_info  # type: ignore[attr-defined]
        self.trained.append((info.step, info.microbatch))
        return self.layer(batch["x"] if isinstance(batch, dict) else batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.look("evaluation", batch)

    test_step = predict_step = validation_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look("start", batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look("end", batch)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.look("start", batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.look("end", batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_last_info_is_that_of_the_batch_at_work(monkeypatch: pytest.MonkeyPatch, sized: bool, collated: bool) -> None:
    """Of training, with validation in the middle, and of each evaluation alone; unsized loaders are fetched ahead."""
    monkeypatch.setattr(FakeSession, "pass_length", 3)
    monkeypatch.setattr(FakeSession, "knows_lengths", sized)
    data, model = make_data(2, 4, collated=collated, **everything()), Looking()
    make_trainer(max_epochs=2, accumulate_grad_batches=2, val_check_interval=4, num_sanity_val_steps=1).fit(
        model, datamodule=data
    )
    assert model.looked.count(("step", "train")) == model.looked.count(("end", "train")) == 12
    assert model.looked.count(("evaluation", "val/0")) == 1 + 2 * 2
    assert data.last_info is None
    make_trainer().test(model, datamodule=data, verbose=False)
    make_trainer().predict(model, datamodule=data, return_predictions=False)
    assert [model.looked.count(("evaluation", stream)) for stream in ("test/0", "test/1", "predict/0")] == [2, 2, 2]


def test_last_info_without_a_trainer_is_that_of_the_last_batch() -> None:
    data = make_data(**everything(), collated=True)
    data.setup(None)
    for loader in (data.train_dataloader(), data.predict_dataloader(), data.train_dataloader()):
        next(iter(loader))
        assert data.last_info.stream == loader.stream  # type: ignore[union-attr]
    data.teardown()
    assert data.last_info is None


@pytest.mark.parametrize("lost", [False, True])
def test_collated_batch_that_is_lost_or_repeated_is_refused(lost: bool) -> None:
    """It does not say which one it is; but the count says it."""

    class Cheating(Looking):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            fetcher = self.trainer.fit_loop._data_fetcher
            if lost:
                next(fetcher.iterator)  # type: ignore[union-attr,arg-type]
            else:
                fetcher.batches.append(fetcher.batches[0])  # type: ignore[union-attr]
            return super().training_step(batch, batch_idx)

    with pytest.raises(StreamError, match="handed out since the last one"):
        make_trainer(max_steps=6).fit(Cheating(), datamodule=make_data(collated=True))


def test_evaluation_that_takes_the_batches_itself() -> None:
    class Taking(Recorder):
        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            batch, _, index = next(dataloader_iter)
            assert self.trainer.datamodule.last_info is batch["megascale"]  # type: ignore[attr-defined]
            self.validated.append((index, batch["megascale"].step, 0))

    model = Taking()
    make_trainer(max_steps=2, val_check_interval=2, check_val_every_n_epoch=None).fit(
        model, datamodule=make_data(val_sources=[A])
    )
    assert model.validated == [(0, 0, 0), (0, 1, 0)]


def test_loaders_of_others_are_left_alone() -> None:
    """A trainer keeps the DataModule of before, and sets it up, when it is given loaders."""

    class Plain(Recorder):
        def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.validated.append((0, 0, 0))

    data = make_data(val_sources=[A])
    trainer = make_trainer(max_steps=1)
    trainer.fit(Recorder(), datamodule=data)
    model = Plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(model, torch.utils.data.DataLoader(torch.zeros(4, 2)), verbose=False)
    assert len(model.validated) == 4
    assert data.next_step == 1
    assert data.last_info is None
    assert isinstance(trainer.datamodule, L.LightningDataModule)  # type: ignore[attr-defined]
