"""Lightning's own loops over a stream without data: resumed from every point where a checkpoint can be written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from megascale_lightning import MegaScaleDataModule, MegaScaleWarning, Source, StreamError
from tests.integrations.fakes import FakeSession, SaveAt, make_data, make_trainer
from tests.integrations.models import Recorder

pytestmark = pytest.mark.usefixtures("sessions")


def expected(first: int, last: int, microbatches: int) -> list[tuple[int, int]]:
    return [(step, microbatch) for step in range(first, last) for microbatch in range(microbatches)]


def check_run(model: Recorder, first: int, last: int, microbatches: int) -> None:
    """Steps first, ..., last - 1 whole and in order; an optimizer step behind the last microbatch of each, no other."""
    assert model.trained == expected(first, last, microbatches)
    assert model.stepped_after == [(step, microbatches - 1) for step in range(first, last)]


def epoch_settings(kind: str, microbatches: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trainer's, data's) keywords for epochs of three steps, or one endless epoch."""
    if kind == "limited":
        return {"limit_train_batches": 3 * microbatches}, {}
    return {}, ({"steps_per_epoch": 3} if kind == "sized" else {})


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("kind", ["unsized", "limited", "sized"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 1),
        (2, 2),
        (2, 1),
        (1, 2),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(4, 4), (4, 8), (8, 4)]),
    ],
)
def test_resumes_at_the_next_step_from_any_checkpoint(
    tmp_path: Path, before: int, after: int, kind: str, validate: bool
) -> None:
    steps, size = 7, 16
    common: dict[str, Any] = {"max_steps": steps}
    settings: dict[str, Any] = {}
    if validate:
        settings["val_sources"] = [Source("held", "held/*.jsonl")]
    else:
        common["limit_val_batches"] = 0
    limits, sized = epoch_settings(kind, before)
    saver, model = SaveAt(tmp_path, starts=True), Recorder()
    trainer = make_trainer(accumulate_grad_batches=before, callbacks=[saver], **common, **limits)
    trainer.fit(model, datamodule=make_data(size // before, size, **settings, **sized))
    check_run(model, 0, steps, before)

    limits, sized = epoch_settings(kind, after)
    for path in saver.saved:
        data, model = make_data(size // after, size, **settings, **sized), Recorder()
        trainer = make_trainer(accumulate_grad_batches=after, **common, **limits)
        trainer.fit(model, datamodule=data, ckpt_path=path)
        first = saved_step(path)
        try:
            check_run(model, first, steps, after)
            assert trainer.global_step == data.next_step == steps
        except AssertionError as error:
            error.add_note(f"resumed from {path.name}, step {first}")
            raise


def saved_step(path: Path) -> int:
    """The step that a checkpoint goes on with; its two copies, and no third, agree with Lightning's own count."""
    checkpoint = torch.load(path, weights_only=True)
    assert "combined_loader" not in checkpoint["loops"]["fit_loop"]["state_dict"]
    state: dict[str, Any] = checkpoint["callbacks"]["megascale_lightning"]
    assert state == checkpoint["MegaScaleDataModule"]
    assert state["step"] == checkpoint["global_step"]
    return int(state["step"])


@pytest.mark.parametrize("kind", ["limited", "sized"])
def test_epoch_based_run_resumes_at_every_epoch_end(tmp_path: Path, kind: str) -> None:
    limits, sized = epoch_settings(kind, 2)
    saver, model = SaveAt(tmp_path, starts=True), Recorder()
    trainer = make_trainer(max_epochs=3, accumulate_grad_batches=2, callbacks=[saver], **limits)
    trainer.fit(model, datamodule=make_data(8, 16, **sized))
    check_run(model, 0, 9, 2)
    for path in saver.saved:
        data, model = make_data(8, 16, **sized), Recorder()
        trainer = make_trainer(max_epochs=3, accumulate_grad_batches=2, **limits)
        trainer.fit(model, datamodule=data, ckpt_path=path)
        check_run(model, saved_step(path), 9, 2)
        assert trainer.current_epoch == 3


@pytest.mark.parametrize("now", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fail_at", [(0, 0), (0, 3), (2, 0), (2, 1), (2, 3), (3, 0), (4, 2)])
def test_resumes_after_failures_one_after_another(tmp_path: Path, fail_at: tuple[int, int], now: int) -> None:
    """A failure in a step loses that step's gradients: the whole step comes again."""
    limit = {"limit_train_batches": 3 * 4, "max_steps": 7, "limit_val_batches": 0}
    saver, model = SaveAt(tmp_path / "first"), Recorder(fail_at=fail_at)
    trainer = make_trainer(accumulate_grad_batches=4, callbacks=[saver], **limit)
    with pytest.raises(RuntimeError, match="wanted"):
        trainer.fit(model, datamodule=make_data(4, 16))
    path = saver.saved[-1]
    assert "exception" in path.name
    assert saved_step(path) == fail_at[0]

    limit["limit_train_batches"] = 3 * now
    saver, model = SaveAt(tmp_path / "second"), Recorder(fail_at=(5, 1))
    trainer = make_trainer(accumulate_grad_batches=now, callbacks=[saver], **limit)
    with pytest.raises(RuntimeError, match="wanted"):
        trainer.fit(model, datamodule=make_data(16 // now, 16), ckpt_path=path)
    assert model.trained == [*expected(fail_at[0], 5, now), (5, 0)]
    for path in saver.saved:
        model, data = Recorder(), make_data(16 // now, 16)
        trainer = make_trainer(accumulate_grad_batches=now, **limit)
        trainer.fit(model, datamodule=data, ckpt_path=path)
        check_run(model, saved_step(path), 7, now)


def test_logged_steps_go_on_after_a_save_in_mid_accumulation(tmp_path: Path) -> None:
    saver = SaveAt(tmp_path)
    trainer = make_trainer(accumulate_grad_batches=4, callbacks=[saver], max_steps=3)
    trainer.fit(Recorder(), datamodule=make_data(4, 16))
    for path in saver.saved[:11]:  # the others have nothing left to train
        trainer = make_trainer(accumulate_grad_batches=4, max_steps=3)
        trainer.fit(Recorder(), datamodule=make_data(4, 16), ckpt_path=path)
        assert trainer.fit_loop.epoch_loop._batches_that_stepped == 3, path.name


def test_schedule_that_reads_the_number_of_steps_resumes(tmp_path: Path) -> None:
    """`trainer.estimated_stepping_batches` makes Lightning build the loader before it restores anything."""
    saver, whole = SaveAt(tmp_path), OneCycle()
    make_trainer(max_epochs=3, limit_train_batches=4, accumulate_grad_batches=2, callbacks=[saver]).fit(
        whole, datamodule=make_data(2, 4)
    )
    assert len(whole.rates) == 6
    for path in saver.saved:
        model = OneCycle()
        trainer = make_trainer(max_epochs=3, limit_train_batches=4, accumulate_grad_batches=2)
        trainer.fit(model, datamodule=make_data(2, 4), ckpt_path=path)
        first = saved_step(path)
        check_run(model, first, 6, 2)
        assert model.rates == whole.rates[first:]


class OneCycle(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LateRestore(L.pytorch.strategies.SingleDeviceStrategy):
    """Restores as FSDP and ModelParallel do: after the optimizers are configured."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


@pytest.mark.parametrize("limits", [{"max_steps": 6}, {"max_steps": 6, "max_epochs": 3}])
def test_state_that_arrives_after_the_first_batch(tmp_path: Path, limits: dict[str, Any]) -> None:
    """The unsized loader was asked for a batch by `estimated_stepping_batches`, before the state was there."""
    saver = SaveAt(tmp_path)
    make_trainer(accumulate_grad_batches=2, callbacks=[saver], **limits).fit(OneCycle(), datamodule=make_data(2, 4))
    for path in saver.saved:
        model = OneCycle()
        trainer = make_trainer(accumulate_grad_batches=2, strategy=LateRestore(device="cpu"), **limits)
        trainer.fit(model, datamodule=make_data(2, 4), ckpt_path=path)
        check_run(model, saved_step(path), 6, 2)


class Renamed(MegaScaleDataModule):
    pass


@pytest.mark.parametrize("drop", ["nothing", "callbacks", "datamodule"])
def test_renamed_datamodule_resumes(tmp_path: Path, drop: str) -> None:
    saver = SaveAt(tmp_path)
    make_trainer(max_steps=4, callbacks=[saver]).fit(Recorder(), datamodule=make_data())
    path = saver.saved[2]
    checkpoint = torch.load(path, weights_only=True)
    if drop == "callbacks":
        checkpoint["callbacks"] = {}
    elif drop == "datamodule":
        del checkpoint["MegaScaleDataModule"]
    torch.save(checkpoint, path)
    model = Recorder()
    make_trainer(max_steps=6).fit(model, datamodule=make_data(kind=Renamed), ckpt_path=path)
    check_run(model, 3, 6, 1)


class Wrapping(MegaScaleDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "mine": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["mine"] == 7
        super().load_state_dict(state_dict["inner"])


def test_datamodule_with_a_state_of_its_own_resumes(tmp_path: Path) -> None:
    saver, data = SaveAt(tmp_path), make_data(kind=Wrapping)
    make_trainer(max_steps=4, callbacks=[saver]).fit(Recorder(), datamodule=data)
    model = Recorder()
    make_trainer(max_steps=6).fit(model, datamodule=make_data(kind=Wrapping), ckpt_path=saver.saved[1])
    check_run(model, 2, 6, 1)
    model = Recorder()
    make_trainer(max_steps=2).fit(model, datamodule=data)
    check_run(model, 4, 6, 1)


def test_trainer_that_goes_on_with_other_data_is_left_alone() -> None:
    class Plain(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    trainer, data = make_trainer(max_steps=2), make_data()
    trainer.fit(Recorder(), datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(Plain(), torch.utils.data.DataLoader(torch.zeros(4, 2)))
    assert trainer.global_step == 6
    trainer.fit_loop.epoch_loop.max_steps = 8
    model = Recorder()
    trainer.fit(model, datamodule=data)
    check_run(model, 2, 4, 1)


def test_checkpoint_without_a_position_is_announced(tmp_path: Path) -> None:
    saver = SaveAt(tmp_path)
    make_trainer(max_steps=2, callbacks=[saver]).fit(Recorder(), datamodule=make_data())
    checkpoint = torch.load(saver.saved[-1], weights_only=True)
    del checkpoint["MegaScaleDataModule"], checkpoint["callbacks"]["megascale_lightning"]
    torch.save(checkpoint, saver.saved[-1])
    model = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_steps=4).fit(model, datamodule=make_data(), ckpt_path=saver.saved[-1])
    assert [
        str(w.message) for w in caught if w.category is MegaScaleWarning and "no position in the data" in str(w.message)
    ]
    check_run(model, 0, 2, 1)


@pytest.mark.parametrize("limits", [{"max_epochs": -1}, {"max_steps": 50}, {"limit_train_batches": 4}])
def test_training_ends_with_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: dict[str, Any]) -> None:
    monkeypatch.setattr(FakeSession, "num_steps", 5)
    saver, model = SaveAt(tmp_path), Recorder()
    data = make_data(2, 4, epochs=1, val_sources=[Source("held", "held/*.jsonl")])
    trainer = make_trainer(accumulate_grad_batches=2, callbacks=[saver], **limits)
    trainer.fit(model, datamodule=data)
    check_run(model, 0, 5, 2)
    assert data.ended
    assert model.validated[-1] == (0, 1, 0), "the validation at the end took place"
    # Nothing is left: whoever resumes the last checkpoint ends at once, and does not go round in empty epochs.
    model = Recorder()
    trainer = make_trainer(accumulate_grad_batches=2, **limits)
    trainer.fit(model, datamodule=make_data(2, 4, epochs=1), ckpt_path=saver.saved[-1])
    assert model.trained == []


def test_data_that_end_before_min_steps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "num_steps", 3)
    with pytest.raises(StreamError, match=r"ended after step 2.*min_steps=9"):
        make_trainer(max_epochs=-1, min_steps=9).fit(Recorder(), datamodule=make_data(epochs=1))


def test_second_fit_goes_on(sessions: list[FakeSession]) -> None:
    data, model = make_data(2, 4), Recorder()
    trainer = make_trainer(max_steps=3, accumulate_grad_batches=2)
    trainer.fit(model, datamodule=data)
    assert data.next_step == 3
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(model, datamodule=data)
    check_run(model, 0, 5, 2)
    other = Recorder()
    make_trainer(max_steps=2, accumulate_grad_batches=2).fit(other, datamodule=data)
    check_run(other, 5, 7, 2)
    assert [session.closed for session in sessions] == [1, 1, 1]


def test_second_fit_in_later_epochs_goes_on() -> None:
    data, model = make_data(2, 4), Recorder()
    trainer = make_trainer(max_epochs=2, limit_train_batches=4, accumulate_grad_batches=2)
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=data)
    check_run(model, 0, 6, 2)


def test_validation_in_the_middle_starts_anew_each_time_and_moves_nothing() -> None:
    held = {"books": [Source("books", "b.jsonl")], "code": [Source("code", "c.jsonl")]}
    data, model = make_data(2, 4, val_sources=held), Recorder()
    trainer = make_trainer(max_steps=4, accumulate_grad_batches=2, val_check_interval=3, check_val_every_n_epoch=None)
    trainer.fit(model, datamodule=data)
    check_run(model, 0, 4, 2)
    assert model.validated == [(loader, step, 0) for _ in range(2) for loader in range(2) for step in range(2)]


def test_validating_a_checkpoint_moves_nothing(tmp_path: Path) -> None:
    saver, data, model = SaveAt(tmp_path), make_data(val_sources=[Source("held", "h.jsonl")]), Recorder()
    trainer = make_trainer(max_steps=4, callbacks=[saver])
    trainer.fit(model, datamodule=data)
    before = data.state_dict()
    trainer.validate(model, datamodule=data, ckpt_path=saver.saved[0], verbose=False)
    assert data.state_dict() == before
    fresh = make_data(val_sources=[Source("held", "h.jsonl")])
    make_trainer().validate(Recorder(), datamodule=fresh, ckpt_path=saver.saved[0], verbose=False)
    assert fresh.state_dict() == {}


def test_manual_optimization_takes_the_accumulation_from_the_batch_size() -> None:
    class Manual(Recorder):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            if batch["megascale"].is_last_in_step:
                self.optimizers().step()
                self.optimizers().zero_grad()

    model = Manual()
    make_trainer(max_steps=3).fit(model, datamodule=make_data(2, 8))
    check_run(model, 0, 3, 4)
