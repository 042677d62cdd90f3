"""An existing DataModule, with only its class changed: every batch is what its collate_fn makes of the named samples.

`Checking` compares each batch, in training and evaluation, while it is worked on; the tests look at which samples there
were, and what of the given DataModule goes on to be called.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from megascale_lightning import MegaScaleWarning, PackedRows
from tests.integrations.swapped import (
    CROP_BATCHES,
    FACE_BATCHES,
    QUIET,
    TEXT_BATCHES,
    Checking,
    CropData,
    Events,
    PictureData,
    TextData,
    adopt,
    fit,
)

SCRIPT = Path(__file__).with_name("scripts") / "swap.py"


def rows_of(ids: list[Any]) -> list[int]:
    return sorted(row for _, _, _, row, _, _ in ids)


@pytest.mark.parametrize(
    ("make", "expected", "sizes"),
    [
        pytest.param(PictureData, FACE_BATCHES, (180, 20), id="image tuples, default_collate"),
        pytest.param(TextData, TEXT_BATCHES, (46, 14), id="DataCollatorWithPadding"),
        pytest.param(CropData, CROP_BATCHES, (50, None), id="a list of tensors of varying size"),
    ],
)
def test_only_the_class_changes(make: Callable[[], Any], expected: Any, sizes: tuple[int, int | None]) -> None:
    model = Checking(expected)
    fit(adopt(make()), model)
    count, held = sizes
    orders = [model.ids_of("train", epoch) for epoch in range(2)]
    for epoch, ids in enumerate(orders):
        assert rows_of(ids) == list(range(count))
        assert {found for _, found, *_ in ids} == {epoch}
        if held is not None:
            assert rows_of(model.ids_of("val/0", epoch)) == list(range(held))
    assert [row for *_, row, _, _ in orders[0]] != [row for *_, row, _, _ in orders[1]], "not shuffled anew"
    assert "val/0" in expected or not model.ids_of("val/0")


def test_evaluations_alone_in_the_form_of_the_given_loaders() -> None:
    data, model = adopt(PictureData()), Checking(FACE_BATCHES)
    trainer = L.Trainer(**QUIET)
    trainer.validate(model, datamodule=data)
    trainer.test(model, datamodule=data)
    predictions = trainer.predict(model, datamodule=data)
    assert data.wrapped.calls.count("train_dataloader") == 0
    for kind, count in {"val/0": 20, "test/0": 20, "test/1": 6, "predict/0": 10}.items():
        ids = model.ids_of(kind)
        assert rows_of(ids) == list(range(count))
        assert ids == sorted(ids), "evaluation is in the order of the data"
    assert len(predictions) == 3
    data.trainer = None
    data.setup("test")
    assert isinstance(data.test_dataloader(), list)
    data.setup("predict")
    assert list(data.predict_dataloader()) == ["faces"]
    data.teardown("predict")


class TestWhatStays:
    """Hooks at their times, attributes, hyperparameters, state."""

    def test_hooks_are_called_at_the_trainers_times(self) -> None:
        data = adopt(PictureData())
        fit(data, Checking(FACE_BATCHES), max_epochs=1)
        calls = list(dict.fromkeys(str(call).replace("TrainerFn.FITTING", "fit") for call in data.wrapped.calls))
        assert calls == [
            "prepare_data",
            "setup fit",
            "train_dataloader",
            "val_dataloader",
            "on_before_batch_transfer",
            "teardown fit",
        ]

    def test_validation_loaders_are_not_asked_for_without_need(self) -> None:
        data = adopt(PictureData())
        fit(data, Checking(FACE_BATCHES), max_epochs=1, limit_val_batches=0)
        assert "val_dataloader" not in data.wrapped.calls

    def test_hooks_that_are_not_there_stay_unseen(self) -> None:
        """Lightning looks at which hooks a DataModule has: with one too many, the module's own would not be called."""
        from lightning.pytorch.utilities.model_helpers import is_overridden

        hooks = ["prepare_data", "transfer_batch_to_device", "on_after_batch_transfer", "val_dataloader"]
        hooks += ["on_before_batch_transfer", "test_dataloader", "predict_dataloader", "train_dataloader"]
        for given in (PictureData(), CropData()):
            data = adopt(given)
            assert {hook: is_overridden(hook, data) for hook in hooks} == {
                hook: is_overridden(hook, given) for hook in hooks
            }

    def test_attributes_are_those_of_the_given_one(self) -> None:
        given = PictureData()
        data = adopt(given)
        assert data.num_classes == 2
        data.num_classes = 3  # as a LightningModule may do
        assert given.num_classes == 3
        data.anything_else = 1
        assert not hasattr(given, "anything_else")
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            data.nothing  # noqa: B018

    def test_flags_for_the_trainer_are_taken_over(self) -> None:
        given = PictureData()
        given.prepare_data_per_node = False
        given.allow_zero_length_dataloader_with_multiple_devices = True
        data = adopt(given)
        assert data.prepare_data_per_node is False
        assert data.allow_zero_length_dataloader_with_multiple_devices is True

    def test_hyperparameters_reach_the_checkpoint(self, tmp_path: Path) -> None:
        trainer = fit(adopt(PictureData(batch_size=60)), Checking(FACE_BATCHES), max_epochs=1)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
        assert saved["datamodule_hyper_parameters"] == {"batch_size": 60, "limit": None}
        assert PictureData.load_from_checkpoint(tmp_path / "a.ckpt").hparams.batch_size == 60

    def test_an_exception_reaches_the_given_one(self) -> None:
        class Told(CropData):
            told: BaseException | None = None

            def on_exception(self, exception: BaseException) -> None:
                self.told = exception

        class Failing(Checking):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise RuntimeError("wanted")

        given = Told()
        data = adopt(given)
        with pytest.raises(RuntimeError, match="wanted"):
            fit(data, Failing(CROP_BATCHES))
        assert str(given.told) == "wanted"
        assert not data.running

    def test_it_goes_to_another_process_and_is_set_up_there(self) -> None:
        data = adopt(CropData())
        data.setup("fit")
        copy = pickle.loads(pickle.dumps(data))
        data.teardown("fit")
        model = Checking(CROP_BATCHES)
        fit(copy, model, max_epochs=1)
        assert len(model.ids_of("train")) == 50


class TestSteps:
    """Epochs as with a DataLoader, and where a run goes on."""

    def test_resume_in_the_middle_of_an_epoch(self, tmp_path: Path) -> None:
        whole, given = Checking(FACE_BATCHES), PictureData()
        given.seen_by_state = 7
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
        data = adopt(given)
        fit(data, whole, max_epochs=3, enable_checkpointing=True, callbacks=[saver])
        again, other = Checking(FACE_BATCHES), PictureData()
        resumed = adopt(other)
        L.Trainer(**QUIET, max_epochs=3).fit(again, datamodule=resumed, ckpt_path=tmp_path / "step=20.ckpt")
        assert other.seen_by_state == 7
        train = [entry for entry in whole.seen if entry[0] == "train"]
        assert len(train) == 36
        assert [entry for entry in again.seen if entry[0] == "train"] == train[20:]
        assert resumed.certificate == data.certificate

    def test_a_checkpoint_from_before_the_swap_brings_the_given_ones_state(self, tmp_path: Path) -> None:
        """The data begin anew, which is said; what the DataModule keeps itself is there again."""
        given, other = PictureData(), PictureData()
        given.seen_by_state = 7
        fit(given, Events(), max_epochs=1).save_checkpoint(tmp_path / "plain.ckpt")
        model = Events()
        with pytest.warns(MegaScaleWarning, match="holds no position in the data"):
            L.Trainer(**QUIET, max_epochs=2).fit(model, datamodule=adopt(other), ckpt_path=tmp_path / "plain.ckpt")
        assert other.seen_by_state == 7
        assert [event[:1] for event in model.events if event[0] != "val"].count((1,)) == 12

    def test_steps_alone_still_mean_epochs(self) -> None:
        """`Trainer(max_steps=...)` goes round a DataLoader as often as it needs."""
        model = Checking(FACE_BATCHES)
        fit(adopt(PictureData()), model, max_epochs=-1, max_steps=30)
        assert [len(model.ids_of("train", epoch)) for epoch in range(3)] == [180, 180, 6 * 16]
        assert [len(model.ids_of("val/0", epoch)) for epoch in range(3)] == [20, 20, 0]

    @pytest.mark.parametrize(
        "settings",
        [
            {"max_epochs": 2},
            {"max_epochs": -1, "max_steps": 30},
            {"max_epochs": 2, "accumulate_grad_batches": 4},
            {"max_epochs": 3, "limit_train_batches": 0.5},
            {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 2},
            {"max_epochs": 2, "val_check_interval": 0.5},
            {"max_epochs": 4, "check_val_every_n_epoch": 2},
        ],
        ids=str,
    )
    def test_the_loops_go_as_with_the_given_loaders(self, settings: dict[str, Any]) -> None:
        def run(data: Any) -> list[Any]:
            model = Events()
            trainer = fit(data, model, **settings)
            return [*model.events, trainer.global_step, trainer.current_epoch, trainer.num_training_batches]

        assert run(adopt(PictureData())) == run(PictureData())

    def test_a_step_limit_goes_on_across_epochs(self) -> None:
        model = Checking(FACE_BATCHES)
        fit(adopt(PictureData()), model, max_epochs=3, limit_train_batches=3)
        ids = model.ids_of("train")
        assert len(ids) == len(set(ids)) == 9 * 16

    def test_len_and_drop_last(self) -> None:
        data = adopt(PictureData(drop_last=True))
        model = Checking(FACE_BATCHES)
        trainer = fit(data, model, max_epochs=1)
        assert trainer.num_training_batches == 11
        assert len(model.ids_of("train")) == 11 * 16
        assert data.config.last_step == "drop"
        assert adopt(PictureData(drop_last=True), last_step="fill").config.last_step == "fill"

    def test_other_rows_and_another_collate_fn(self) -> None:
        class Tokens(L.LightningDataModule):
            def train_dataloader(self) -> DataLoader:
                return DataLoader([{"input_ids": list(range(1, 2 + n % 9))} for n in range(40)], batch_size=4)

        data = adopt(Tokens(), rows=PackedRows(seq_len=16, micro_batch_size=2))
        data.setup("fit")
        batch = next(iter(data.train_dataloader()))
        assert batch["input_ids"].shape == (2, 16)
        data.teardown("fit")

        data = adopt(Tokens(), collate_fn=len)
        data.setup("fit")
        assert list(data.train_dataloader()) == [4] * 10
        data.teardown("fit")

    def test_a_collate_fn_that_belongs_to_the_datamodule_is_not_weighed(self) -> None:
        class Large(CropData):
            def setup(self, stage: str) -> None:
                super().setup(stage)
                self.held = torch.zeros(4_000_000)

        fit(adopt(Large()), Checking(CROP_BATCHES), max_epochs=1)


@pytest.mark.ddp
@pytest.mark.slow
def test_two_ranks_share_the_samples(tmp_path: Path) -> None:
    ranks = run_script(tmp_path, "--devices", 2)
    for kind, epoch, count in (("train", 0, 180), ("train", 1, 180), ("val/0", 0, 20)):
        of_ranks = [
            [row for k, e, _, ids in rank["seen"] if k == kind and e == epoch for *_, row, _, _ in ids]
            for rank in ranks
        ]
        assert sorted(chain(*of_ranks)) == list(range(count)), "each sample on one rank, once"
        assert all(of_ranks)
    assert ranks[0]["certificate"] == ranks[1]["certificate"]
    assert "prepare_data" in ranks[0]["calls"]
    assert "prepare_data" not in ranks[1]["calls"]


@pytest.mark.ray
@pytest.mark.slow
def test_ray_gives_the_same_order(tmp_path: Path) -> None:
    (rank,) = run_script(tmp_path, "--runtime", "ray")
    data, model = adopt(PictureData(batch_size=10)), Checking(FACE_BATCHES)
    fit(data, model)
    assert rank["certificate"] == data.certificate
    train = [[kind, epoch, step, [list(found) for found in ids]] for kind, epoch, step, ids in model.seen]
    assert [entry for entry in rank["seen"] if entry[0] == "train"] == [e for e in train if e[0] == "train"]


def run_script(folder: Path, *arguments: Any) -> list[Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    command = [sys.executable, str(SCRIPT), "--out", str(folder), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
