"""DataModules as users have them, over real data, and a module that checks every batch against the named samples.

Also imported by the script of the tests with several ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import skimage.data
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip

from megascale_lightning import MegaScaleDataModule
from megascale_lightning.sources.formats.dataset import UNIT_RECORDS
from megascale_lightning.sources.globalstates import lent_states
from megascale_lightning.sources.seeding import derive_seed

FACES = Path(skimage.data.__file__).with_name("lfw_subset.npy")
"""float64 [200, 25, 25]: a hundred faces, and a hundred pieces of pictures without one."""


class Pictures(Dataset):
    """(picture, is it a face): a map-style dataset with a transform."""

    def __init__(self, pictures: np.ndarray, labels: Sequence[int], transform: Callable | None = None) -> None:
        self.pictures = torch.from_numpy(pictures.astype(np.float32)).unsqueeze(1)
        self.labels = list(labels)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index]
        return (picture if self.transform is None else self.transform(picture)), self.labels[index]


class PictureData(L.LightningDataModule):
    """Image tuples, random transforms from torchvision, torch's own `default_collate`."""

    def __init__(self, batch_size: int = 16, limit: int | None = None, **loader: Any) -> None:
        super().__init__()
        self.save_hyperparameters("batch_size", "limit")
        self.loader = loader
        self.num_classes = 2
        self.calls: list[str] = []
        self.seen_by_state = 0

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        pictures = np.load(FACES)
        labels = [1] * 100 + [0] * 100
        augment = Compose([RandomCrop(25, padding=3), RandomHorizontalFlip(), Normalize([0.5], [0.25])])
        held = range(0, 200, 10)
        kept = [index for index in range(200) if index % 10][: self.hparams.limit]
        self.train_set = Subset(Pictures(pictures, labels, augment), kept)
        self.held_set = Subset(Pictures(pictures, labels, Normalize([0.5], [0.25])), list(held))

    def train_dataloader(self) -> DataLoader:
        self.calls.append("train_dataloader")
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, **self.loader)

    def val_dataloader(self) -> DataLoader:
        self.calls.append("val_dataloader")
        return DataLoader(self.held_set, batch_size=5)

    def test_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.held_set, batch_size=5), DataLoader(Subset(self.held_set, range(6)), batch_size=3)]

    def predict_dataloader(self) -> dict[str, DataLoader]:
        return {"faces": DataLoader(Subset(self.held_set, range(10)), batch_size=4)}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("on_before_batch_transfer")
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen_by_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen_by_state = state_dict["seen"]

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


def python_sources(count: int) -> list[str]:
    """Source files of this Python installation, cut to a few kilobytes."""
    folder = Path(random.__file__).parent
    return [path.read_text(errors="ignore")[:2000] for path in sorted(folder.glob("*.py"))[:count]]


class Texts(Dataset):
    """Token ids of texts, as a tokenizer gives them: dicts of lists, of varying length."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.encoded = [tokenizer(text, truncation=True, max_length=96) for text in texts]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Any:
        return {name: list(values) for name, values in self.encoded[index].items()}


class TextData(L.LightningDataModule):
    """Texts, padded per batch by transformers' `DataCollatorWithPadding`; the batch is a `BatchEncoding`."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

        texts = python_sources(60)
        trained = Tokenizer(models.BPE(unk_token="[UNK]"))
        trained.pre_tokenizer = pre_tokenizers.ByteLevel()
        trained.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="[UNK]", pad_token="[PAD]")
        self.collator = DataCollatorWithPadding(self.tokenizer)
        self.train_set, self.val_set = Texts(texts[:46], self.tokenizer), Texts(texts[46:], self.tokenizer)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, collate_fn=self.collator)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=4, collate_fn=self.collator)


class CropData(L.LightningDataModule):
    """A plain list of tensors of varying size, and a method of the DataModule that leaves them a list."""

    def __init__(self, batch_size: int = 6) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pictures = torch.from_numpy(np.load(FACES)[:50])
        self.crops = [picture[: 3 + index % 20, : 5 + index % 7] for index, picture in enumerate(pictures)]

    def collate(self, samples: list[torch.Tensor]) -> list[torch.Tensor]:
        return [sample + 0 for sample in samples]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.crops, batch_size=self.batch_size, shuffle=True, collate_fn=self.collate)


def sample_of(dataset: Any, name: str, sample_id: tuple[Any, ...], seed: int = 0) -> Any:
    """What a dataset gives for a sample id, drawing what that sample draws in every run."""
    source, epoch, unit, row, *_ = sample_id
    assert source == name
    key = derive_seed("sample", seed, source, epoch, unit, row)
    with lent_states():  # with runtime="local", a reading thread of this process draws from the same generators
        torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        return dataset[unit * UNIT_RECORDS + row]


def same(found: Any, wanted: Any) -> bool:
    """Whether two batches are of the same types, and equal in every number."""
    if type(found) is not type(wanted):
        return False
    if isinstance(found, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if hasattr(found, "items"):
        return list(found.keys()) == list(wanted.keys()) and all(same(found[name], wanted[name]) for name in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


class Batches(NamedTuple):
    """What the batches of a loader are made of, as functions of the DataModule."""

    dataset: Callable[[Any], Any]
    source: str
    collate_fn: Callable[[Any], Callable] = lambda data: default_collate


FACE_BATCHES = {
    "train": Batches(lambda data: data.train_set, "train"),
    "val/0": Batches(lambda data: data.held_set, "val"),
    "test/0": Batches(lambda data: data.held_set, "test"),
    "test/1": Batches(lambda data: Subset(data.held_set, range(6)), "test"),
    "predict/0": Batches(lambda data: Subset(data.held_set, range(10)), "predict"),
}
TEXT_BATCHES = {
    "train": Batches(lambda data: data.train_set, "train", lambda data: data.collator),
    "val/0": Batches(lambda data: data.val_set, "val", lambda data: data.collator),
}
CROP_BATCHES = {"train": Batches(lambda data: data.crops, "train", lambda data: data.collate)}


class Checking(L.LightningModule):
    """Compares every batch that it is given with `collate_fn` of the samples that `last_info` names."""

    def __init__(self, expected: dict[str, Batches]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.expected = expected
        self.seen: list[tuple[str, int, int, list[Any]]] = []

    def check(self, batch: Any, kind: str) -> None:
        data = self.trainer.datamodule
        info = data.last_info
        dataset, name, collate_fn = self.expected[kind]
        rows = info.sample_ids()
        ids = [row[0] for row in rows if row]
        assert [bool(row) for row in rows] == [weight == 1 for weight in info.row_weights.tolist()]
        assert all(len(row) <= 1 for row in rows)
        samples = [sample_of(dataset(data), name, sample_id) for sample_id in ids]
        samples += [samples[0]] * (len(rows) - len(ids))
        wanted = collate_fn(data)(samples)
        assert same(batch, wanted), (kind, ids)
        self.seen.append((kind, self.trainer.current_epoch, info.step, ids))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.check(batch, "train")
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.check(batch, f"val/{dataloader_idx}")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.check(batch, f"test/{dataloader_idx}")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.check(batch, f"predict/{dataloader_idx}")
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def ids_of(self, kind: str, epoch: int | None = None) -> list[Any]:
        return [i for k, e, _, ids in self.seen if k == kind and epoch in (None, e) for i in ids]


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


NUMBERS = list(range(8))
