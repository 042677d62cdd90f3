"""Joined files in a trainer's settings, hyperparameters and checkpoints: as the source's own, and without secrets."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from megascale_lightning import Join, MegaScaleDataModule, PackedRows, Source, StateError
from megascale_lightning.cli.configs import load_config
from megascale_lightning.integrations.lightning.hyperparameters import plain
from tests.integrations.fakes import make_trainer
from tests.integrations.models import Recorder
from tests.integrations.test_cli import MASKED, OPTIONS, SavingData, folder, run, settings  # noqa: F401 - a fixture
from tests.loading.joinfiles import write

COUNT, STOP, STEPS = 120, 5, 9
MAPPING = {"data": "/nowhere/captions.parquet", "on": "id", "columns": ["text"]}
JOIN = Join("/nowhere/captions.parquet", on="id", columns=("text",))


class Model(Recorder):
    """Takes token batches."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        info = batch["megascale"]
        self.trained.append((info.step, info.microbatch))
        return self.layer(batch["input_ids"][:, :2].float()).sum()


def joined(sample: dict[str, Any]) -> dict[str, Any]:
    assert sample["text"] == f"text {sample['id']}"
    return {"input_ids": [sample["id"] + 1] * (1 + sample["id"] % 7)}


def write_captions(root: Path, index: int, numbers: range) -> None:
    write(root / "other" / str(index), "jsonl", {"id": list(numbers), "text": [f"text {n}" for n in numbers]})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "own" / "0", "parquet", {"id": list(range(COUNT)), "txt": ["t"] * COUNT})
    for index in range(2):
        write_captions(tmp_path, index, range(index * COUNT // 2, (index + 1) * COUNT // 2))
    return tmp_path


def data_of(root: Path) -> MegaScaleDataModule:
    join = Join(str(root / "other" / "*.jsonl"), on="id")
    source = Source("pairs", str(root / "own" / "*.parquet"), transform=joined, join=join)
    return MegaScaleDataModule(sources=[source], rows=PackedRows(16, 2), runtime="local")


def fit(root: Path, max_steps: int, ckpt: Path | None = None) -> str | None:
    data = data_of(root)
    make_trainer(max_steps=max_steps).fit(Model(), datamodule=data, ckpt_path=ckpt)
    return data.certificate


class TestFiles:
    @pytest.fixture
    def saved(self, root: Path) -> Path:
        saver = ModelCheckpoint(root / "saves", every_n_train_steps=STOP, save_top_k=-1)
        trainer = make_trainer(max_steps=STOP, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(Model(), datamodule=data_of(root))
        return Path(saver.best_model_path)

    def test_added_files_wait_for_a_new_run(self, root: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Also where they have ids that are there already."""
        expected = fit(root, STEPS)
        write_captions(root, 2, range(5))
        with caplog.at_level(logging.WARNING, "megascale_lightning"):
            assert fit(root, STEPS, saved) == expected
        assert "source 'pairs' goes on with the files that the run began with: 1 added" in caplog.text
        assert 'force_resume=["files.pairs"]' in caplog.text

    def test_others_are_refused_by_name(self, root: Path, saved: Path) -> None:
        path = root / "other" / "1.jsonl"
        path.write_text(path.read_text() + '{"id": 500, "text": "more"}\n')
        with pytest.raises(StateError, match=r"files\.pairs: .*join/0: 1 of another size: .*other/1\.jsonl"):
            fit(root, STEPS, saved)

    def test_copies_are_the_same_data(self, root: Path, saved: Path) -> None:
        expected = fit(root, STEPS)
        for index, path in enumerate(sorted((root / "other").iterdir())):
            os.utime(path, ns=(10**9 * index, 10**9 * index))
        assert fit(root, STEPS, saved) == expected


class TestSettings:
    """LightningCLI and plain YAML; nothing is started, and no file looked at."""

    @pytest.mark.parametrize("given", [MAPPING, [MAPPING]])
    def test_of_sources_by_name(self, given: Any) -> None:
        sources = {"pairs": {"data": "x.parquet", "join": given}}
        config = run(config=settings(sources=sources)).datamodule.config
        assert config.streams()["train"] == (Source("pairs", "x.parquet", join=JOIN),)
        Path("plain.yaml").write_text(yaml.safe_dump(settings(sources=sources)))
        assert load_config("plain.yaml").streams() == config.streams()

    @pytest.mark.parametrize(
        "given", [MAPPING, [MAPPING, MAPPING], {"class_path": "megascale_lightning.Join", "init_args": MAPPING}]
    )
    def test_of_a_list_of_sources(self, given: Any, capsys: pytest.CaptureFixture[str]) -> None:
        init = {"name": "pairs", "data": "x.parquet", "columns": None, "join": given}
        if isinstance(given, list):
            init["join"] = [MAPPING, {**MAPPING, "on": "other", "columns": None}]
        for source in (init, {"class_path": "megascale_lightning.Source", "init_args": init}):
            config = settings(sources=[source])
            (found,) = run(config=config).datamodule.config.streams()["train"]
            assert found.joins[0] == JOIN
            assert [join.on for join in found.joins] == ["id", "other"][: len(found.joins)]
            with pytest.raises(SystemExit):
                run("fit", "--print_config", config=config)
            printed = {**config, "data": yaml.safe_load(capsys.readouterr().out)["data"]}
            assert run(config=printed).datamodule.config.streams()["train"] == (found,)

    def test_no_secret_is_printed_or_saved(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        join = {"data": str(root / "other" / "*.jsonl"), "on": "id", "storage_options": OPTIONS}
        source = {"data": str(root / "own" / "*.parquet"), "transform": f"{__name__}.joined", "join": join}
        for given in (join, [join]):
            config = settings(sources={"pairs": {**source, "join": given}})
            assert run(config=config).datamodule.config.sources[0].joins[0].storage_options == OPTIONS
            with pytest.raises(SystemExit):
                run("fit", "--print_config", config=config)
            text = capsys.readouterr().out
            assert "hunter" not in text
            assert "env:AUTH" in text
        for form in (Join("x", on="id", storage_options=OPTIONS), [Join("x", on="id", storage_options=OPTIONS)]):
            found = json.loads(json.dumps(plain(Source("pairs", "own", join=form))))
            assert found["join"] == [{"data": "x", "on": "id", "storage_options": MASKED}]
            assert Source("pairs", **found).joins[0].storage_options == MASKED

    @pytest.mark.filterwarnings("ignore:source 'pairs'.* storage_options are ignored")
    def test_hyperparameters_have_none(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTH", "hunter-4711")
        join = Join(str(root / "other" / "*.jsonl"), on="id", storage_options=OPTIONS)
        source = Source("pairs", str(root / "own" / "*.parquet"), transform=joined, join=join)
        data, trainer = SavingData({"pairs": source}, PackedRows(16, 2), "local"), make_trainer(max_steps=2)
        trainer.fit(Model(), datamodule=data)
        trainer.save_checkpoint(root / "a.ckpt")
        assert b"hunter" not in (root / "a.ckpt").read_bytes()
        saved = torch.load(root / "a.ckpt", weights_only=True)["datamodule_hyper_parameters"]
        assert saved["sources"]["pairs"]["join"][0]["storage_options"] == MASKED
