"""An existing DataModule, with only its class changed: every batch is what its collate_fn makes of the named samples.

`Checking` compares each batch, in training and evaluation, while it is worked on; the tests look at which samples there
were, what of the given DataModule goes on to be called, and what is refused.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from megascale_lightning import CollatedRows, ConfigError, MegaScaleDataModule, MegaScaleWarning, PackedRows
from tests.integrations.swapped import (
    CROP_BATCHES,
    FACE_BATCHES,
    TEXT_BATCHES,
    Checking,
    CropData,
    PictureData,
    TextData,
)

SCRIPT = Path(__file__).with_name("scripts") / "swap.py"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


def adopt(datamodule: L.LightningDataModule, **settings: Any) -> Any:
    return MegaScaleDataModule.from_datamodule(datamodule, **{"runtime": "local", **settings})


def fit(data: Any, model: L.LightningModule, **settings: Any) -> L.Trainer:
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2, **settings})
    trainer.fit(model, datamodule=data, ckpt_path=settings.get("ckpt_path"))
    return trainer


class Events(L.LightningModule):
    """Writes down what the loops do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.events: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.events.append((self.trainer.current_epoch, self.trainer.global_step, batch_idx))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.events.append(("val", batch_idx))

    def on_train_epoch_end(self) -> None:
        self.events.append("epoch end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


class Given(L.LightningDataModule):
    """Whatever loaders a test hands it."""

    def __init__(self, train: Any = None, val: Any = ()) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return self.val


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(10)


class Backwards(Sampler):
    def __iter__(self) -> Any:
        yield from reversed(range(8))

    def __len__(self) -> int:
        return 8


class ByLength(BatchSampler):
    """A batch sampler of one's own."""


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        yield from ()


NUMBERS = list(range(8))


class TestRefusals:
    """Each names the loader, the thing and the way out."""

    @pytest.mark.parametrize(
        ("loader", "message"),
        [
            (
                DataLoader(Endless()),
                r"Given.train_dataloader\(\): Endless is an IterableDataset.*map-style.*sources=\[",
            ),
            (DataLoader(NUMBERS, sampler=WeightedRandomSampler([1.0] * 8, 8)), "WeightedRandomSampler.*weights="),
            (DataLoader(NUMBERS, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler.*Subset.*shuffle=True"),
            (DataLoader(NUMBERS, sampler=Backwards()), "Backwards.*Subset"),
            (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)), "replacement=True.*shuffle=True"),
            (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, num_samples=3)), "num_samples=3.*steps_per_epoch"),
            (
                DataLoader(NUMBERS, batch_sampler=ByLength(RandomSampler(NUMBERS), 2, False)),
                "batch_sampler of its own .ByLength.*batch_size=",
            ),
            (DataLoader(NUMBERS, batch_size=None), "batch_size=None.*single samples"),
            ([DataLoader(NUMBERS), DataLoader(NUMBERS)], "a list of loaders.*from_datasets.*StackDataset"),
            (CombinedLoader({"a": DataLoader(NUMBERS)}), "a CombinedLoader of loaders"),
            (NUMBERS, "a list of loaders"),
            (iter(NUMBERS), "a list_iterator, not a torch DataLoader.*from_datasets"),
            (None, "a NoneType, not a torch DataLoader"),
            (OwnLoader(NUMBERS), "OwnLoader, a DataLoader with an __iter__ of its own"),
        ],
        ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
    )
    def test_training_loaders(self, loader: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            adopt(Given(loader)).setup("fit")

    @pytest.mark.parametrize(
        ("loaders", "message"),
        [
            ([DataLoader(NUMBERS), DataLoader(Endless())], r"Given.val_dataloader\(\)\[1\]: Endless"),
            ({"a": DataLoader(NUMBERS, batch_size=None)}, r"val_dataloader\(\)\['a'\] has batch_size=None"),
            (CombinedLoader({"a": DataLoader(NUMBERS)}, "min_size"), "mode='min_size'.*sequential"),
            (None, r"Given.val_dataloader\(\) is a NoneType"),
        ],
        ids=["list", "dict", "CombinedLoader", "None"],
    )
    def test_evaluation_loaders(self, loaders: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            adopt(Given(val=loaders)).setup("validate")

    @pytest.mark.parametrize(
        ("given", "settings", "message"),
        [
            (MegaScaleDataModule.from_datasets(NUMBERS, runtime="local"), {}, "is a MegaScaleDataModule already"),
            (PictureData, {}, "not the class PictureData: give an instance of it"),
            (NUMBERS, {}, "not list: give a lightning.pytorch.LightningDataModule.*from_datasets"),
            (Given(), {"sources": []}, r"takes \['sources'\] from the loaders of Given"),
            (Given(), {"rows": CollatedRows(1), "collate_fn": len}, "both say how batches are made"),
            (Given(), {"prefetch_steps": -1}, "prefetch_steps must be"),
            (
                Given(DataLoader(NUMBERS)),
                {"weights": {"web": 1.0}},
                r"weights names \['web'\]; the sources are \['train",
            ),
        ],
        ids=["ours already", "class", "list", "sources", "rows and collate_fn", "number", "weights"],
    )
    def test_what_cannot_be_adopted(self, given: Any, settings: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            adopt(given, **settings).setup("fit")

    def test_a_subclass_has_no_say(self) -> None:
        class Mine(MegaScaleDataModule):
            pass

        with pytest.raises(ConfigError, match=r"call MegaScaleDataModule\.from_datamodule"):
            Mine.from_datamodule(PictureData())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1.*leave it at 0"),
            ({"callbacks": [BatchSizeFinder()]}, "find it with PictureData itself"),
        ],
        ids=["reload", "BatchSizeFinder"],
    )
    def test_knobs_of_the_trainer(self, settings: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            fit(adopt(PictureData()), Checking(FACE_BATCHES), **settings)

    def test_a_dataset_that_cannot_travel(self) -> None:
        class Locked(list):
            def __init__(self) -> None:
                super().__init__(NUMBERS)
                self.lock = threading.Lock()

        data = adopt(Given(DataLoader(Locked())), runtime="ray")
        with pytest.raises(ConfigError, match=r"'train'.*Locked does not pickle.*attribute 'lock'.*runtime=.local"):
            data.setup("fit")

    def test_a_collate_fn_must_not_reach_the_model(self) -> None:
        model = Events()
        data = adopt(Given(DataLoader(NUMBERS, collate_fn=lambda samples: (samples, model))))
        with pytest.raises(ConfigError, match=r"collate_fn.*'model' is a Events"):
            data.setup("fit")

    def test_no_training_loader_at_all_is_lightnings_error(self) -> None:
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        class Nothing(L.LightningDataModule):
            pass

        with pytest.raises(MisconfigurationException, match="train_dataloader"):
            fit(adopt(Nothing()), Events())


class TestWhatHasNoEffect:
    """It is said once, on one rank."""

    def test_workers_are_mentioned(self, caplog: pytest.LogCaptureFixture) -> None:
        loader = DataLoader(NUMBERS, batch_size=2, num_workers=1, pin_memory=True)
        data = adopt(Given(loader))
        with caplog.at_level(logging.INFO, "megascale_lightning"):
            data.setup("fit")
            data.setup("fit")
        found = [record.message for record in caplog.records if "adopting" in record.name]
        assert len(found) == 1
        assert "Given.train_dataloader() sets num_workers, prefetch_factor, pin_memory: without effect" in found[0]
        data.teardown("fit")

    def test_seeds_are_warned_of(self) -> None:
        generator = torch.Generator()
        loader = DataLoader(NUMBERS, shuffle=True, generator=generator, worker_init_fn=print)
        data = adopt(Given(loader), seed=5)
        with pytest.warns(MegaScaleWarning, match="sets worker_init_fn, generator: without effect.*seed=5"):
            data.setup("fit")
        data.setup("fit")  # said already
        data.teardown("fit")

    def test_drop_last_of_an_evaluation_is_warned_of(self) -> None:
        data = adopt(Given(val=DataLoader(NUMBERS, batch_size=3, drop_last=True)))
        with pytest.warns(MegaScaleWarning, match=r"val_dataloader\(\) sets drop_last: without effect"):
            data.setup("validate")
        assert len(data.val_dataloader()) == 3
        data.teardown("validate")


class TestDatasets:
    """What a DataLoader takes, a DataModule over it takes."""

    def samples(self, dataset: Any, **loader: Any) -> list[Any]:
        data = adopt(Given(DataLoader(dataset, batch_size=4, collate_fn=list, **loader)))
        data.setup("fit")
        found = [sample for batch in data.train_dataloader() for sample in batch]
        data.teardown("fit")
        return found

    @pytest.mark.parametrize(
        "dataset",
        [
            pytest.param(TensorDataset(torch.arange(12.0), torch.arange(12)), id="TensorDataset"),
            pytest.param(Subset(range(100, 200), [5, 3, 8, 1]), id="Subset"),
            pytest.param(ConcatDataset([range(5), range(50, 57)]), id="ConcatDataset"),
            pytest.param(["a", "bc", "def", "ghij"], id="a list of texts"),
            pytest.param({0: "x", 1: "y", 2: "z", 3: "w"}, id="a dict by index"),
        ],
    )
    def test_in_order(self, dataset: Any) -> None:
        assert self.samples(dataset) == [dataset[index] for index in range(len(dataset))]

    def test_hugging_face(self) -> None:
        from datasets import Dataset

        dataset = Dataset.from_dict({"text": [f"text {n}" for n in range(8)], "label": [n % 2 for n in range(8)]})
        assert self.samples(dataset) == list(dataset)
        torched = dataset.with_format("torch")
        assert [int(sample["label"]) for sample in self.samples(torched)] == [n % 2 for n in range(8)]

    @pytest.mark.parametrize(
        ("loader", "shuffled"),
        [
            ({"shuffle": True}, True),
            ({"sampler": DistributedSampler(range(64), 2, 0)}, True),
            ({"sampler": DistributedSampler(range(64), 2, 0, shuffle=False)}, False),
            ({"sampler": RandomSampler(range(64))}, True),
        ],
        ids=["shuffle=True", "DistributedSampler", "without shuffle", "RandomSampler"],
    )
    def test_shuffled_as_the_sampler_says(self, loader: Any, shuffled: bool) -> None:
        found = self.samples(range(64), **loader)
        assert sorted(found) == list(range(64))
        assert (found != sorted(found)) == shuffled

    def test_a_plain_batch_sampler_is_a_batch_size(self) -> None:
        data = adopt(Given(DataLoader(NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 3, True))))
        data.setup("fit")
        assert [len(batch) for batch in data.train_dataloader()] == [3, 3]
        data.teardown("fit")


class TestFromDatasets:
    """Lightning's classmethod, and more forms of datasets."""

    @pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # Lightning's own sets it
    def test_one_of_each(self) -> None:
        pictures = PictureData()
        pictures.setup("fit")
        data = MegaScaleDataModule.from_datasets(
            pictures.train_set, pictures.held_set, pictures.held_set, pictures.held_set, 20, runtime="local"
        )
        plain = L.LightningDataModule.from_datasets(
            pictures.train_set, pictures.held_set, pictures.held_set, pictures.held_set, 20
        )
        ours, theirs = Events(), Events()
        fit(data, ours, max_epochs=-1, max_steps=20)
        fit(plain, theirs, max_epochs=-1, max_steps=20)
        assert ours.events == theirs.events
        assert len(data.config.val_sources) == len(data.config.predict_sources) == 1

    def test_a_mixture_by_name_and_its_weights(self) -> None:
        data = MegaScaleDataModule.from_datasets(
            {"few": [1, 2, 3], "many": list(range(100, 112))},
            batch_size=5,
            collate_fn=sorted,
            weights={"few": 0.5, "many": 0.5},
            runtime="local",
        )
        data.setup("fit")
        found = list(data.train_dataloader())
        data.teardown("fit")
        assert sorted(chain(*found)) == [1, 2, 3, *range(100, 112)]
        assert any(sample < 100 for sample in found[0])
        assert {sample for sample in found[0] + found[1] if sample < 100} == {1, 2, 3}, "few are drawn early"

    def test_several_evaluations_and_the_order_of_training(self) -> None:
        first, second = TensorDataset(torch.arange(4)), TensorDataset(torch.arange(6))
        data = MegaScaleDataModule.from_datasets(
            NUMBERS, [first, second], {"a": first, "b": NUMBERS}, batch_size=2, shuffle=False, runtime="local"
        )
        data.setup()
        assert [batch.tolist() for batch in data.train_dataloader()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert {name: len(loader) for name, loader in data.val_dataloader().items()} == {"0": 2, "1": 3}
        assert {name: len(loader) for name, loader in data.test_dataloader().items()} == {"a": 2, "b": 4}
        data.teardown()

    def test_a_list_to_train_on_is_mixed_and_says_so(self) -> None:
        two = [TensorDataset(torch.arange(4)), TensorDataset(torch.arange(6))]
        with pytest.warns(MegaScaleWarning, match="a list of datasets: they are mixed into one stream"):
            data = MegaScaleDataModule.from_datasets(two, runtime="local")
        assert [source.name for source in data.config.streams()["train"]] == ["0", "1"]

    def test_a_subclass_is_made(self) -> None:
        class Mine(MegaScaleDataModule):
            pass

        assert type(Mine.from_datasets(NUMBERS, runtime="local")) is Mine

    def test_workers_are_mentioned(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "megascale_lightning"):
            MegaScaleDataModule.from_datasets(NUMBERS, num_workers=4, runtime="local")
        assert "num_workers=4: without effect" in caplog.text

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"train_dataset": Endless()}, "train_dataset: Endless is an IterableDataset.*map-style"),
            ({"val_dataset": {"a": NUMBERS, "b": Endless()}}, r"val_dataset\['b'\]: Endless"),
            ({"train_dataset": 3}, "a int is no map-style dataset"),
            ({"train_dataset": NUMBERS, "val_sources": []}, r"makes \['val_sources'\] of the datasets"),
            ({"train_dataset": NUMBERS, "rows": CollatedRows(2), "batch_size": 2}, "leave out rows="),
            ({}, "there are no sources"),
        ],
        ids=["iterable", "iterable among several", "none at all", "sources", "rows", "nothing"],
    )
    def test_refusals(self, settings: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            MegaScaleDataModule.from_datasets(**settings, runtime="local")


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
