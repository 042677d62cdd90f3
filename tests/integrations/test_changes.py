"""What changed between save and resume of a trainer: files, the name of the DataModule, other loaders."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megascale_lightning import MegaScaleDataModule, MegaScaleWarning, StateError
from megascale_lightning.checkpointing.filelists import FILES_KEY, unpack_lists
from tests.integrations.corpora import real_data, write_corpus
from tests.integrations.fakes import make_trainer
from tests.integrations.models import Recorder

STOP, STEPS = 7, 15


class Model(Recorder):
    """Takes token batches."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        info = batch["megascale"]
        self.trained.append((info.step, info.microbatch))
        return self.layer(batch["input_ids"][:, :2].float()).sum()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def fit(data: MegaScaleDataModule, max_steps: int, *, ckpt: Path | None = None, save: Path | None = None) -> Model:
    model, trainer = Model(), make_trainer(max_steps=max_steps)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    if save is not None:
        trainer.save_checkpoint(save)
    return model


@pytest.fixture
def saved(corpus: Path, tmp_path: Path) -> Path:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=STOP, save_top_k=-1)
    trainer = make_trainer(max_steps=STOP, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Model(), datamodule=real_data(corpus))
    return Path(saver.best_model_path)


def undisturbed(corpus: Path) -> str | None:
    data = real_data(corpus)
    fit(data, STEPS)
    return data.certificate


def test_the_checkpoint_holds_the_file_lists(corpus: Path, saved: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    lists = unpack_lists(checkpoint[FILES_KEY].numpy().tobytes())
    assert {name: [os.path.basename(info.path) for info in files] for name, files in lists.items()} == {
        "web": ["0.parquet", "1.parquet"],
        "code": ["0.jsonl", "1.jsonl"],
    }


def test_added_files_wait_for_a_new_run(corpus: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = undisturbed(corpus)
    shutil.copy(corpus / "code" / "0.jsonl", corpus / "code" / "2.jsonl")
    data = real_data(corpus)
    with caplog.at_level(logging.WARNING, "megascale_lightning"):
        model = fit(data, STEPS, ckpt=saved)
    assert model.trained[0] == (STOP, 0)
    assert data.certificate == expected
    assert "source 'code' goes on with the files that the run began with: 1 added" in caplog.text
    assert 'force_resume=["files.code"]' in caplog.text


def test_added_files_are_taken_in_by_force(corpus: Path, saved: Path) -> None:
    expected = undisturbed(corpus)
    shutil.copy(corpus / "code" / "0.jsonl", corpus / "code" / "2.jsonl")
    data = real_data(corpus, force_resume=["files.code", "modified"])
    assert fit(data, STEPS, ckpt=saved).trained[0] == (STOP, 0)
    assert data.certificate != expected


def test_a_save_of_a_run_with_added_files_keeps_the_old_list(corpus: Path, saved: Path, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    shutil.copy(corpus / "code" / "0.jsonl", corpus / "code" / "2.jsonl")
    saver = ModelCheckpoint(tmp_path / "again", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(max_steps=STOP + 2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Model(), datamodule=real_data(corpus), ckpt_path=saved)
    data = real_data(corpus)
    fit(data, STEPS, ckpt=Path(saver.best_model_path))
    (corpus / "code" / "2.jsonl").unlink()
    assert data.certificate == undisturbed(corpus)


@pytest.mark.parametrize("added", [False, True])
def test_copied_data_are_the_same_data(
    corpus: Path, saved: Path, caplog: pytest.LogCaptureFixture, added: bool
) -> None:
    """All files are written anew, as on a machine that fetched them once more; one more may have come with them."""
    expected = undisturbed(corpus)
    if added:
        shutil.copy(corpus / "code" / "0.jsonl", corpus / "code" / "2.jsonl")
    for index, path in enumerate(sorted([*corpus.glob("web/*"), *corpus.glob("code/*")])):
        os.utime(path, ns=(10**9 * index, 10**9 * index))
    data = real_data(corpus)
    with caplog.at_level(logging.WARNING, "megascale_lightning"):
        fit(data, STEPS, ckpt=saved)
    assert data.certificate == expected
    assert "all 2 files were written since the state was saved, each with its size of then" in caplog.text


def grow(corpus: Path) -> None:
    with (corpus / "code" / "1.jsonl").open("a") as file:
        file.write('{"input_ids": [1]}\n')


def lose(corpus: Path) -> None:
    (corpus / "web" / "0.parquet").unlink()


def rewrite(corpus: Path) -> None:
    os.utime(corpus / "web" / "1.parquet", ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (grow, r"files\.code: .*1 of another size: .*code/1\.jsonl \(\d+ -> \d+ bytes\)"),
        (lose, r"files\.web: .*1 gone: .*web/0\.parquet"),
        (rewrite, r"modified\.web: .*1 written since: .*web/1\.parquet"),
    ],
)
def test_the_error_names_the_file(corpus: Path, saved: Path, change: Any, said: str) -> None:
    change(corpus)
    with pytest.raises(StateError, match=said):
        fit(real_data(corpus), STEPS, ckpt=saved)


def test_damaged_digests_beside_file_lists_are_refused(corpus: Path, saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    for state in (checkpoint["callbacks"]["megascale_lightning"], checkpoint["MegaScaleDataModule"]):
        state["files"] = ["web", "code"]
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    with pytest.raises(StateError, match=r"damaged: files must be a mapping, not \['web', 'code'\]"):
        fit(real_data(corpus), STEPS, ckpt=tmp_path / "damaged.ckpt")


class RenamedData(MegaScaleDataModule):
    """Another name than in the checkpoint."""


def test_a_renamed_data_module_goes_on(corpus: Path, saved: Path) -> None:
    data = real_data(corpus, kind=RenamedData)
    assert fit(data, STEPS, ckpt=saved).trained[0] == (STOP, 0)
    assert data.certificate == undisturbed(corpus)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_checkpoint_of_other_loaders_is_announced(corpus: Path, tmp_path: Path) -> None:
    class Plain(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def on_train_batch_end(self, *_: Any) -> None:
            pass

    trainer = make_trainer(max_steps=3)
    trainer.fit(Plain(), DataLoader(torch.ones(6, 2), batch_size=2))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    data = real_data(corpus)
    with pytest.warns(MegaScaleWarning, match="holds no position in the data"):
        fitted = fit(data, 5, ckpt=tmp_path / "plain.ckpt")
    assert fitted.trained[0] == (0, 0)


def test_a_state_from_weights_only_saves_is_refused_where_training_begins(corpus: Path, tmp_path: Path) -> None:
    """Lightning calls no callback for such a checkpoint, so the DataModule itself has to speak."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=STOP, save_weights_only=True)
    trainer = make_trainer(max_steps=STOP, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Model(), datamodule=real_data(corpus))
    data = real_data(corpus, seed=5)
    data.load_state_dict(torch.load(saver.best_model_path, weights_only=True)["MegaScaleDataModule"])
    with pytest.raises(StateError, match="seed: 0"):
        fit(data, STEPS)
