"""What a `DataLoader` takes, a swapped DataModule takes; and `from_datasets`, with more forms of datasets."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    TensorDataset,
)

from megascale_lightning import CollatedRows, ConfigError, DataError, MegaScaleDataModule, MegaScaleWarning
from tests.integrations.swapped import (
    NUMBERS,
    Endless,
    Events,
    Given,
    PictureData,
    adopt,
    fit,
)


class Broken(Dataset):
    """Some of its samples cannot be fetched."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"picture {index} is cut short")
        return index


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

    def test_what_a_failing_sample_advises(self) -> None:
        """The error of a sample that fails names `on_error="skip"`: it can be set."""
        train, held = Broken(8, {3, 5}), Broken(6, {0})
        raised = MegaScaleDataModule.from_datasets(train, batch_size=2, runtime="local")
        with pytest.raises(DataError, match='on_error="skip"'):
            fit(raised, Events(), max_epochs=1)
        data = MegaScaleDataModule.from_datasets(train, held, batch_size=2, runtime="local", on_error="skip")
        assert self.batches(data) == (3, 3)

    def batches(self, data: Any) -> tuple[int, int]:
        model = Events()
        fit(data, model, max_epochs=1)
        validated = sum(event[0] == "val" for event in model.events)
        return len(model.events) - validated - 1, validated

    def test_an_adopted_one_skips_too(self) -> None:
        loader, held = DataLoader(Broken(8, {3, 5}), batch_size=2), DataLoader(Broken(6, {0}), batch_size=2)
        assert self.batches(adopt(Given(loader, held), on_error="skip", max_bad_fraction=0.5)) == (3, 3)

    def test_the_share_of_bad_samples(self) -> None:
        settings = {"on_error": "skip", "max_bad_fraction": 0.1}
        broken = Broken(8, {3, 5})
        for data in (
            MegaScaleDataModule.from_datasets(broken, batch_size=2, runtime="local", **settings),
            adopt(Given(DataLoader(broken, batch_size=2)), **settings),
        ):
            with pytest.raises(DataError, match=r"2 of 8 records are bad, more than max_bad_fraction=0\.1"):
                fit(data, Events(), max_epochs=1)
        with pytest.raises(ConfigError, match="max_bad_fraction needs on_error"):
            adopt(Given(), max_bad_fraction=0.1)

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
