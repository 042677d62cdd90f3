"""The trainer's settings against the loader's: what is refused, and what the refusal says to set."""

from __future__ import annotations

import inspect
import pickle
import warnings
from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Any, get_type_hints

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megascale_lightning import (
    ClientPlaceTree,
    ConfigError,
    LoaderConfig,
    MegaScaleDataModule,
    MegaScaleStateCallback,
    MegaScaleWarning,
    PackedRows,
    Source,
    StreamError,
)
from megascale_lightning.integrations.lightning.limits import microbatches_per_step
from tests.integrations.fakes import FakeInfo, FakeSession, make_data, make_trainer
from tests.integrations.models import Recorder

pytestmark = pytest.mark.usefixtures("sessions")


def refused(trainer: dict[str, Any], **data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(**trainer).fit(Recorder(), datamodule=make_data(**data))
    assert FakeSession.made == [], "nothing was started"
    return str(caught.value)


def test_signature_is_that_of_the_config() -> None:
    """LightningCLI reads it; whatever the config takes, the DataModule takes, with the same default."""
    parameters = dict(inspect.signature(MegaScaleDataModule).parameters)
    parameters.pop("tree")
    config = {field.name: field for field in fields(LoaderConfig)}
    assert list(parameters) == list(config)
    hints = get_type_hints(LoaderConfig)
    own = get_type_hints(MegaScaleDataModule.__init__)
    for name, parameter in parameters.items():
        default = config[name].default
        assert parameter.default == (inspect.Parameter.empty if default is MISSING else default), name
        assert own[name] == hints[name] or hints[name] is Any, name
        assert f"\n        {name}: " in str(inspect.getdoc(MegaScaleDataModule)).replace("\n    ", "\n        "), name


def test_constructor_says_what_is_wrong_at_once() -> None:
    with pytest.raises(ConfigError, match=r"seed|runtime must be one of.*last_step must be one of"):
        make_data(runtime="threads", last_step="keep")
    with pytest.raises(ConfigError, match="context_parallel must be one of"):
        make_data(context_parallel="ring")


def test_constructing_printing_and_pickling_start_nothing() -> None:
    data = make_data(val_sources=[Source("held", "held/*.jsonl")])
    str(data)
    copy = pickle.loads(pickle.dumps(data))
    assert copy.config.rows == data.config.rows
    assert data.state_dict() == {}
    assert data.certificate is None
    assert data.last_info is None
    assert FakeSession.made == []


def test_pickle_of_a_running_one_leaves_the_handles_behind() -> None:
    data = make_data()
    make_trainer(max_steps=2).fit(Recorder(), datamodule=data)
    data.trainer = None
    data.setup("fit")
    copy = pickle.loads(pickle.dumps(data))
    assert copy.next_step == 2
    with pytest.raises(ConfigError, match="setup"):
        copy.train_dataloader()
    data.teardown("fit")


@pytest.mark.parametrize(
    ("size", "accumulate", "words"),
    [
        (32, 4, ["accumulate_grad_batches=16", "global_batch_size=8"]),
        (8, 1, ["accumulate_grad_batches=4", "global_batch_size=2"]),
        (9, 4, ["accumulate_grad_batches=5", "global_batch_size=8"]),
    ],
)
def test_batch_size_against_accumulation(size: int, accumulate: int, words: list[str]) -> None:
    message = refused({"max_steps": 3, "accumulate_grad_batches": accumulate}, size=size)
    for word in words:
        assert word in message


def test_batch_size_that_is_no_multiple_needs_one_microbatch_more() -> None:
    assert microbatches_per_step(make_data(2, 15).config, None, 4) == 2
    assert microbatches_per_step(make_data(2, 17).config, None, 4) == 3


def test_batch_size_is_taken_from_the_trainer(sessions: list[FakeSession]) -> None:
    data = make_data(2)
    make_trainer(max_steps=3, accumulate_grad_batches=4).fit(Recorder(), datamodule=data)
    assert sessions[0].accumulate == 4
    assert data.state_dict()["trainer"]["global_batch_size"] == 8


def test_tree_of_the_user_must_cover_the_ranks() -> None:
    assert "1 ranks" in refused({"max_steps": 3}, tree=ClientPlaceTree.from_sizes(dp=2))


def test_accumulation_scheduler_is_refused() -> None:
    message = refused({"max_steps": 3, "callbacks": [GradientAccumulationScheduler({0: 2})]})
    assert "accumulate_grad_batches" in message


def test_overfitting_is_refused() -> None:
    message = refused({"max_steps": 3, "overfit_batches": 2})
    assert "overfit_batches=2 would train on new data every epoch" in message
    assert "Subset of a dataset, or a source of a small file" in message


@pytest.mark.parametrize("limit", [6, 1])
def test_epoch_that_ends_inside_a_step_is_refused(limit: int) -> None:
    message = refused({"max_steps": 3, "accumulate_grad_batches": 4, "limit_train_batches": limit})
    assert f"limit_train_batches={limit}" in message
    assert "limit_train_batches=4" in message


def test_endless_training_is_refused_with_the_choices() -> None:
    message = refused({"max_epochs": -1})
    for choice in ("max_steps", "limit_train_batches", "steps_per_epoch", "max_time", "epochs="):
        assert choice in message


def test_passes_and_epochs_of_the_sources_are_refused_together() -> None:
    for epochs in (1, 3):
        message = refused({"max_epochs": 3}, epochs=epochs)
        assert "max_epochs=3" in message
        assert "leave epochs= out" in message
        assert "max_epochs=-1" in message
    assert "1000" in refused({}, epochs=1)


@pytest.mark.parametrize(
    ("trainer", "passes"),
    [
        ({"max_epochs": 3}, True),
        ({"max_epochs": 3, "max_steps": 2}, True),
        ({"max_epochs": 3, "max_time": "00:00:01:00"}, True),
        ({"max_epochs": 3, "limit_train_batches": 1.0}, True),
        ({"max_steps": 2}, False),
        ({"max_epochs": -1, "max_steps": 2}, False),
        ({"max_time": "00:00:01:00", "max_steps": 2}, False),
        ({"max_epochs": 3, "limit_train_batches": 1}, False),
        ({"max_epochs": 3, "limit_train_batches": 2}, False),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, False),
        ({"fast_dev_run": True}, False),
    ],
)
def test_finite_epochs_without_a_number_of_steps_are_passes(
    sessions: list[FakeSession], monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], passes: bool
) -> None:
    monkeypatch.setattr(FakeSession, "pass_length", 4)
    monkeypatch.setattr(FakeSession, "knows_lengths", True)
    make_trainer(**trainer).fit(Recorder(), datamodule=make_data())
    assert sessions[0].passes is passes


def test_steps_per_epoch_means_one_stream(sessions: list[FakeSession]) -> None:
    make_trainer(max_epochs=3).fit(Recorder(), datamodule=make_data(steps_per_epoch=2))
    assert sessions[0].passes is False


def test_step_that_takes_the_batches_itself_is_refused() -> None:
    class Taking(Recorder):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            return self.layer(next(dataloader_iter)[0]["x"]).sum()

    with pytest.raises(ConfigError, match=r"training_step\(self, batch, batch_idx\)"):
        make_trainer(max_steps=1).fit(Taking(), datamodule=make_data())


def test_validation_that_never_comes_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "pass_length", 4)
    data = make_data(val_sources=[Source("held", "held/*.jsonl")])
    model = Recorder()
    with pytest.warns(MegaScaleWarning, match="val_check_interval=6 is more than the 4 batches"):
        make_trainer(max_epochs=2, val_check_interval=6).fit(model, datamodule=data)
    assert model.validated == []


def test_trial_run_leaves_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    make_trainer(fast_dev_run=3).fit(Recorder(), datamodule=data)
    assert data.next_step == 0
    assert data.state_dict() == {}
    make_trainer(max_steps=2).fit(Recorder(), datamodule=data)
    make_trainer(fast_dev_run=True).fit(Recorder(), datamodule=data)
    model = Recorder()
    make_trainer(max_steps=2).fit(model, datamodule=data)
    assert model.trained == [(2, 0), (3, 0)]


def test_other_trainer_in_the_middle_of_a_run_is_refused() -> None:
    class Nested(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            make_trainer().validate(Recorder(), datamodule=trainer.datamodule)  # type: ignore[attr-defined]

    data = make_data(val_sources=[Source("held", "held/*.jsonl")])
    with pytest.raises(ConfigError, match=r"at work in another trainer"):
        make_trainer(max_steps=2, callbacks=[Nested()]).fit(Recorder(), datamodule=data)


def test_batch_size_finder_is_refused() -> None:
    assert "micro_batch_size" in refused({"max_steps": 3, "callbacks": [BatchSizeFinder()]})
    data = make_data(val_sources=[Source("held", "held/*.jsonl")])
    with pytest.raises(ConfigError, match="micro_batch_size"):
        make_trainer(callbacks=[BatchSizeFinder()]).validate(Recorder(), datamodule=data)


@pytest.mark.parametrize(
    ("trainer", "data"),
    [
        ({"max_steps": 2}, {}),
        ({"max_epochs": 1, "limit_train_batches": 2}, {}),
        ({"max_epochs": 1}, {"steps_per_epoch": 2}),
        ({"fast_dev_run": 2}, {}),
        ({"fast_dev_run": 1, "accumulate_grad_batches": 4}, {}),
    ],
)
def test_training_that_ends_is_let_through(trainer: dict[str, Any], data: dict[str, Any]) -> None:
    model = Recorder()
    make_trainer(**trainer).fit(model, datamodule=make_data(**data))
    assert model.trained


def test_time_limit_ends_an_endless_training() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 2

    make_trainer(max_time=timedelta(minutes=5), max_epochs=-1, callbacks=[Stop()]).fit(
        Recorder(), datamodule=make_data()
    )


def test_state_callback_stands_first_and_once() -> None:
    trainer, data = make_trainer(max_steps=2, callbacks=[Callback(), MegaScaleStateCallback()]), make_data()
    trainer.fit(Recorder(), datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(Recorder(), datamodule=data)
    own = [isinstance(callback, MegaScaleStateCallback) for callback in trainer.callbacks]
    assert own[0]
    assert sum(own) == 1


def test_state_callback_alone_is_refused() -> None:
    loader = torch.utils.data.DataLoader(torch.zeros(4, 2))
    with pytest.raises(ConfigError, match="MegaScaleDataModule"):
        make_trainer(max_steps=1, callbacks=[MegaScaleStateCallback()]).fit(Recorder(), loader)


def test_checkpoints_at_every_step_hold_that_step(tmp_path: Any) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(max_steps=3, accumulate_grad_batches=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Recorder(), datamodule=make_data())
    for step in (1, 2, 3):
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert checkpoint["MegaScaleDataModule"]["step"] == step


def test_without_validation_sources_there_is_no_validation() -> None:
    model = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_steps=2).fit(model, datamodule=make_data())
    assert model.validated == []
    assert not [w for w in caught if "length of `list`" in str(w.message)]


def test_loss_of_nothing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeInfo, "rank_loss_tokens", 0)

    class Mean(Recorder):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * float("nan")

    make_trainer(max_steps=2).fit(Recorder(), datamodule=make_data())  # a finite loss is fine
    with pytest.raises(ConfigError, match=r'reduce_loss(.|\n)*last_step="drop"'):
        make_trainer(max_steps=2).fit(Mean(), datamodule=make_data())


def test_batch_without_its_info_is_refused_by_name() -> None:
    class Stripped(MegaScaleDataModule):
        def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> torch.Tensor:
            return batch["x"]

    with pytest.raises(ConfigError, match="model_inputs"):
        make_trainer(max_steps=2).fit(Recorder(), datamodule=make_data(kind=Stripped))


def test_batch_out_of_order_is_refused() -> None:
    class Thief(Recorder):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            next(self.trainer.fit_loop._data_fetcher.iterator)
            return super().training_step(batch, batch_idx)

    with pytest.raises(StreamError, match="arrived where step 2, microbatch 0 was due"):
        make_trainer(max_steps=6).fit(Thief(), datamodule=make_data())


@pytest.mark.parametrize("error", [RuntimeError("wanted"), KeyboardInterrupt()])
def test_session_is_closed_when_training_fails(sessions: list[FakeSession], error: BaseException) -> None:
    data = make_data()
    with pytest.raises((RuntimeError, SystemExit)):
        make_trainer(max_steps=6).fit(Recorder(fail_at=(2, 0), error=error), datamodule=data)
    assert [session.closed for session in sessions] == [1]
    assert all(loader.closed for loader in sessions[0].loaders.values())
    model = Recorder()
    make_trainer(max_steps=2).fit(model, datamodule=data)
    assert model.trained == [(2, 0), (3, 0)]


def test_waiting_for_a_batch_ends_on_sigterm(sessions: list[FakeSession]) -> None:
    class Terminated(Recorder):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            assert sessions[0].interrupted() is False
            self.trainer._signal_connector.received_sigterm = True
            with pytest.raises(SIGTERMException):
                sessions[0].interrupted()
            self.trainer._signal_connector.received_sigterm = False
            return super().training_step(batch, batch_idx)

    make_trainer(max_steps=1).fit(Terminated(), datamodule=make_data())


def test_rows_of_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows must be PackedRows, PaddedRows or CollatedRows"):
        MegaScaleDataModule(sources=[Source("web", "w.jsonl")], rows=32)  # type: ignore[arg-type]
    PackedRows(seq_len=8, micro_batch_size=1)
