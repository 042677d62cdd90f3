"""What of an existing DataModule cannot be taken over, or has no effect: each is said by name, with the way out."""

from __future__ import annotations

import logging
import threading
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from megascale_lightning import CollatedRows, ConfigError, EmptySourceError, MegaScaleDataModule, MegaScaleWarning
from tests.integrations.swapped import (
    FACE_BATCHES,
    NUMBERS,
    QUIET,
    Checking,
    Endless,
    Events,
    Given,
    PictureData,
    adopt,
    fit,
)


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
        loader = DataLoader(NUMBERS, batch_size=2, num_workers=1, pin_memory=True, timeout=9, in_order=False)
        data = adopt(Given(loader))
        with caplog.at_level(logging.INFO, "megascale_lightning"):
            data.setup("fit")
            data.setup("fit")
        found = [record.message for record in caplog.records if "adopting" in record.name]
        assert len(found) == 1
        assert (
            "Given.train_dataloader() sets num_workers, prefetch_factor, pin_memory, timeout, in_order: without"
            in found[0]
        )
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


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")  # Lightning's own
class TestEmptyDatasets:
    """Lightning warns of an empty evaluation dataset and goes on; an empty training dataset is an error."""

    def test_training_goes_on_without_validation(self) -> None:
        data, model = adopt(Given(DataLoader(NUMBERS, batch_size=4), DataLoader([]))), Events()
        with pytest.warns(MegaScaleWarning, match=r"^Given\.val_dataloader\(\): the dataset is empty, .* left out$"):
            fit(data, model, max_epochs=1)
        assert model.events == [(0, 0, 0), (0, 1, 1), "epoch end"]

    def test_the_others_are_run(self) -> None:
        loaders = [DataLoader([]), DataLoader(NUMBERS, batch_size=4)]
        data, model = adopt(Given(DataLoader(NUMBERS, batch_size=8), loaders)), Events()
        with pytest.warns(MegaScaleWarning, match=r"val_dataloader\(\)\[0\]: .* dataloader_idx counts without it"):
            fit(data, model, max_epochs=1)
        assert model.events == [(0, 0, 0), ("val", 0), ("val", 1), "epoch end"]

    @pytest.mark.parametrize("stage", ["validate", "test", "predict"])
    def test_an_evaluation_of_nothing(self, stage: str) -> None:
        class Empty(L.LightningDataModule):
            def val_dataloader(self) -> Any:
                return DataLoader([])

            test_dataloader = predict_dataloader = val_dataloader

        class Model(Events):
            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.events.append(batch)

            predict_step = test_step

        model, trainer = Model(), L.Trainer(**QUIET)
        with pytest.warns(MegaScaleWarning, match="the dataset is empty"):
            getattr(trainer, stage)(model, datamodule=adopt(Empty()))
        assert model.events == []

    def test_nothing_to_train_on(self) -> None:
        with pytest.raises(EmptySourceError, match=r"^source 'train': its dataset is empty$"):
            adopt(Given(DataLoader([]))).setup("fit")
