"""LightningCLI: settings in YAML and on the command line, resume; and hyperparameters that checkpoints can hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import fsspec
import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import TensorDataset

from megascale_lightning import (
    AttentionCost,
    Balanced,
    ClientPlaceTree,
    ConfigError,
    Curriculum,
    DGraph,
    HybridVLM,
    LossFeedback,
    MegaScaleDataModule,
    Mixture,
    MixtureCallback,
    PackedRows,
    PaddedRows,
    RoundRobin,
    Source,
    TokenCount,
    ViTCost,
)
from megascale_lightning.cli.configs import load_config
from megascale_lightning.integrations.lightning.hyperparameters import plain, revived
from megascale_lightning.rows import Rows
from tests.integrations.corpora import held_out, train_sources
from tests.integrations.swapped import PictureData

ROOT = Path(__file__).resolve().parents[2]


def shorten(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform, found by its dotted path."""
    return {"input_ids": sample["input_ids"][:30]}


OPTIONS = {"key": "hunter-4711", "headers": {"Authorization": "env:AUTH"}, "anon": False, "region": "eu-1"}
MASKED = {"key": "***", "headers": {"Authorization": "env:AUTH"}, "anon": False, "region": "eu-1"}
SIGNED_URL = "https://h/x.parquet?X-Amz-Signature=s1gned"


class Model(L.LightningModule):
    """Writes down which samples it is given."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
        self.steps: dict[int, Any] = {}
        self.validated: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        info = batch["megascale"]
        self.steps[info.step] = info.sample_ids()
        return self.layer.weight.sum() * 0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated += batch["megascale"].sample_ids()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(MegaScaleDataModule):
    """A DataModule of a user, who saves hyperparameters as usual."""

    def __init__(self, *, sources: Any = (), rows: Any, seed: int = 0, extra: Any = None, **more: Any) -> None:
        super().__init__(sources=sources, rows=rows, seed=seed, **more)
        self.save_hyperparameters()


class SavingData(MegaScaleDataModule):
    """The same, with types that LightningCLI reads."""

    def __init__(self, sources: dict[str, Any], rows: Rows, runtime: Literal["ray", "local"] = "ray") -> None:
        super().__init__(sources=sources, rows=rows, runtime=runtime)
        self.save_hyperparameters()


class CorpusData(MegaScaleDataModule):
    """A DataModule of a user, whose settings are few."""

    def __init__(self, corpus: str, seq_len: int = 32, weights: dict[str, float] | None = None) -> None:
        rows = PackedRows(seq_len=seq_len, micro_batch_size=2, pack_ahead=8)
        super().__init__(sources=train_sources(Path(corpus)), rows=rows, weights=weights, runtime="local")
        self.save_hyperparameters()


def adopted_pictures(batch_size: int = 16) -> MegaScaleDataModule:
    """What LightningCLI takes in place of a class."""
    return MegaScaleDataModule.from_datamodule(PictureData(batch_size), runtime="local")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(corpus: Path | str = "/nowhere", **data: Any) -> dict[str, Any]:
    """A YAML file's content; the paths are looked at by nobody before a run."""
    return {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": "saved", "filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1},
                }
            ],
        },
        "data": {
            "sources": {
                "web": {"data": f"{corpus}/web/*.parquet", "weight": 0.6},
                "code": {"data": f"{corpus}/code/*.jsonl", "weight": 0.4, "transform": f"{__name__}.shorten"},
            },
            "rows": {
                "class_path": "megascale_lightning.PackedRows",
                "init_args": {"seq_len": 32, "micro_batch_size": 2, "pack_ahead": 8},
            },
            "runtime": "local",
            **data,
        },
    }


def run(*arguments: str, config: dict[str, Any] | None, data: Any = MegaScaleDataModule, **more: Any) -> LightningCLI:
    """LightningCLI as in a script, with these arguments."""
    first, *others = arguments or ("",)
    if config is not None:
        Path("settings.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        others = ["--config", "settings.yaml", *others]
    args = [*([first] if first else []), *others]
    kwargs = {"seed_everything_default": 0, "save_config_kwargs": {"overwrite": True}, **more}
    return LightningCLI(Model, data, args=args, run=bool(first), **kwargs)


def dealt(graph: DGraph) -> DGraph:
    """A strategy of the user's own."""
    return graph.mix().pack().distribute("dp")


class TestParsing:
    """What a YAML file and the command line may say; nothing is started, and no file looked at."""

    def test_sources_by_name(self) -> None:
        config = run(config=settings(val_sources={"held": {"data": "/nowhere/held.jsonl"}})).datamodule.config
        web, code = config.streams()["train"]
        assert (web.name, web.data, web.weight) == ("web", "/nowhere/web/*.parquet", 0.6)
        assert (code.name, code.transform, code.weight) == ("code", shorten, 0.4)
        assert config.rows == PackedRows(seq_len=32, micro_batch_size=2, pack_ahead=8)
        assert [source.name for source in config.streams()["val/0"]] == ["held"]

    def test_sources_as_a_list(self) -> None:
        sources = [
            {"name": "web", "data": "/nowhere/web/*.parquet"},
            {"class_path": "megascale_lightning.Source", "init_args": {"name": "code", "data": "x", "epochs": 2}},
        ]
        config = run(config=settings(sources=sources)).datamodule.config
        assert config.streams()["train"] == (Source("web", "/nowhere/web/*.parquet"), Source("code", "x", epochs=2))

    def test_several_evaluation_loaders(self) -> None:
        several = {"a": {"x": {"data": "x.jsonl"}}, "b": {"y": {"data": "y.jsonl"}, "z": {"data": "z.jsonl"}}}
        config = run(config=settings(val_sources=several)).datamodule.config
        found = {name: [source.name for source in sources] for name, sources in config.eval_sources("val").items()}
        assert found == {"a": ["x"], "b": ["y", "z"]}

    @pytest.mark.parametrize(
        ("given", "arguments", "wanted"),
        [
            ({}, ["--data.weights.web=0.5"], {"web": 0.5, "code": 0.4}),
            ({"weights": {"web": 0.7}}, ["--data.weights.code=0.1"], {"web": 0.7, "code": 0.1}),
            ({"mixture": {"web": 1.0, "code": 3.0}}, ["--data.weights.code=2"], {"web": 1.0, "code": 2.0}),
        ],
        ids=["over the sources'", "beside another", "over the mixture"],
    )
    def test_one_weight_on_the_command_line(self, given: Any, arguments: list[str], wanted: Any) -> None:
        cli = run("", *arguments, config=settings(**given))
        assert cli.datamodule.config.weights_of("train") == wanted

    def test_rows_on_the_command_line(self) -> None:
        cli = run("", "--data.rows=PaddedRows", "--data.rows.max_len=16", config=settings())
        assert cli.datamodule.config.rows == PaddedRows(max_len=16, micro_batch_size=2)

    def test_strategy_and_mixture(self) -> None:
        given = {
            "strategy": {
                "class_path": "megascale_lightning.RoundRobin",
                "init_args": {"cost": {"class_path": "megascale_lightning.TokenCount"}},
            },
            "mixture": {"weights": {"web": 1, "code": 1}, "unit": "tokens"},
        }
        config = run(config=settings(**given)).datamodule.config
        assert config.strategy == RoundRobin(TokenCount())
        assert config.shares.unit == "tokens"

    def test_costs_of_two_models(self) -> None:
        encoder = {"hidden": 64, "layers": 2, "heads": 4, "patch_pairs": "squares"}
        given = {
            "class_path": "megascale_lightning.HybridVLM",
            "init_args": {
                "encoder_cost": {"class_path": "megascale_lightning.ViTCost", "init_args": encoder},
                "backbone_cost": {"class_path": "megascale_lightning.AttentionCost", "init_args": {"crossover": 512}},
                "sync": "microbatch",
            },
        }
        strategy = run(config=settings(strategy=given)).datamodule.config.strategy
        assert strategy == HybridVLM(ViTCost(**encoder), AttentionCost(512), sync="microbatch")

    def test_a_curriculum(self) -> None:
        init = {"field": "length", "schedule": [[0, 8], [100, 32.5]], "cost": "megascale_lightning.TokenCount"}
        config = run(config=settings(strategy={"class_path": "megascale_lightning.Curriculum", "init_args": init}))
        expected = Curriculum("length", [(0, 8), (100, 32.5)], cost=TokenCount())
        assert config.datamodule.config.strategy == expected

    def test_a_function_as_strategy(self) -> None:
        config = run(config=settings(strategy=f"{__name__}.dealt")).datamodule.config
        assert config.strategy is dealt

    def test_any_subclass(self) -> None:
        config = settings()
        config["data"] = {"class_path": f"{__name__}.CorpusData", "init_args": {"corpus": "/nowhere", "seq_len": 16}}
        cli = run(config=config, subclass_mode_data=True)
        assert isinstance(cli.datamodule, CorpusData)
        assert cli.datamodule.config.rows.capacity == 16

    def test_what_is_wrong_is_said_by_name(self) -> None:
        with pytest.raises(ConfigError, match=r"'web' has settings \['wieght'\]; a source has"):
            run(config=settings(sources={"web": {"data": "x", "wieght": 1}}))
        with pytest.raises(ConfigError, match=r"transform='nothing\.at_all' cannot be imported"):
            run(config=settings(sources={"web": {"data": "x", "transform": "nothing.at_all"}}))
        with pytest.raises(
            ConfigError, match=r"'web' has no data; weights= changes one weight alone .--data.weights.web="
        ):
            run("", "--data.sources.web.weight=0.5", config=settings())
        with pytest.raises(ConfigError, match=r"weights names \['wbe'\]"):
            run("", "--data.weights.wbe=1", config=settings())

    def test_an_adopted_datamodule(self) -> None:
        config = settings()
        config["data"] = {"batch_size": 12}
        cli = run(config=config, data=adopted_pictures)
        assert cli.datamodule.num_classes == 2
        assert cli.datamodule.hparams == {"batch_size": 12, "limit": None}

    @pytest.mark.parametrize(
        "mixture",
        [
            {
                "schedule": [[0, {"web": 0.9, "code": 0.1}], [40, {"code": 0.6}]],
                "interpolate": "linear",
                "stop": ["web"],
            },
            {"points": [[0, {"web": 0.9, "code": 0.1}], [40, {"code": 0.6}]], "interpolate": "linear", "stop": ["web"]},
        ],
    )
    def test_a_schedule(self, mixture: Any, capsys: pytest.CaptureFixture[str]) -> None:
        expected = Mixture.schedule(
            [(0, {"web": 0.9, "code": 0.1}), (40, {"code": 0.6})], interpolate="linear", stop=["web"]
        )
        config = settings(mixture=mixture)
        config["data"]["sources"]["web"]["epochs"] = 1
        assert run(config=config).datamodule.config.shares == expected
        with pytest.raises(SystemExit):
            run("fit", "--print_config", config=config)
        printed = {**config, "data": yaml.safe_load(capsys.readouterr().out)["data"]}
        assert run(config=printed).datamodule.config.shares == expected
        Path("settings.yaml").write_text(yaml.safe_dump(config))
        assert load_config("settings.yaml").shares == expected
        cli = run("", "--data.weights.code=0.5", config=printed)
        assert cli.datamodule.config.weight_points("train")[1] == (40, {"web": 0.9, "code": 0.5})

    def test_loss_feedback(self) -> None:
        config = settings()
        rule = {"class_path": "megascale_lightning.LossFeedback", "init_args": {"step_size": 0.5}}
        init = {"weights": rule, "every_n_steps": 10}
        callback = {"class_path": "megascale_lightning.MixtureCallback", "init_args": init}
        config["trainer"]["callbacks"] = [callback]
        found = [one for one in run(config=config).trainer.callbacks if isinstance(one, MixtureCallback)]
        assert isinstance(found[0]._weights, LossFeedback)

    def test_print_config_starts_nothing(self, folder: Path) -> None:
        config = settings()
        config["data"]["runtime"] = "ray"
        del config["data"]["sources"]["code"]["transform"]
        Path("settings.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        code = (
            "import sys\n"
            "from lightning.pytorch.cli import LightningCLI\n"
            "from lightning.pytorch.demos.boring_classes import BoringModel\n"
            "from megascale_lightning import MegaScaleDataModule\n"
            "from megascale_lightning.client import session\n"
            "session.LoadingSession.__init__ = None\n"
            "try:\n"
            "    LightningCLI(BoringModel, MegaScaleDataModule)\n"
            "finally:\n"
            "    print('ray' in sys.modules, file=sys.stderr)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "fit", "--config=settings.yaml", "--data.weights.web=0.5", "--print_config"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "False"
        printed = yaml.safe_load(done.stdout)["data"]
        assert printed["weights"] == {"web": 0.5}
        assert printed["sources"] == config["data"]["sources"]
        assert {path.name for path in folder.iterdir()} == {"settings.yaml"}


class TestSecrets:
    """They are used, and neither printed nor saved; what is no secret stays as it was written."""

    def config(self, corpus: Path | str = "/nowhere") -> dict[str, Any]:
        sources: Any = {
            "web": {"data": f"{corpus}/web/*.parquet", "storage_options": OPTIONS},
            "code": {"data": f"{corpus}/code/*.jsonl", "transform": f"{__name__}.shorten"},
        }
        by_name = {"a": {"x": {"data": "x.jsonl", "storage_options": OPTIONS}}}
        listed = [{"name": "y", "data": SIGNED_URL, "storage_options": OPTIONS}]
        return settings(sources=sources, val_sources=by_name, test_sources=listed, predict_sources={"z": listed[0]})

    def test_they_arrive(self) -> None:
        config = run(config=self.config()).datamodule.config
        streams = config.streams()
        assert [s.storage_options for name in streams for s in streams[name]] == [
            OPTIONS,
            None,
            *[OPTIONS] * 3,
        ]
        assert streams["train"][1].transform is shorten
        assert streams["test/0"][0].data == SIGNED_URL

    def test_no_class_is_made_beside_them(self) -> None:
        config = self.config()
        config["data"]["sources"]["code"]["transform"] = {"class_path": "subprocess.Popen", "init_args": {"args": "x"}}
        with pytest.raises(ConfigError, match=r"'code' has class paths in \['transform'\].*env:NAME"):
            run(config=config)

    def test_printed_settings_have_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run("fit", "--print_config", config=self.config())
        text = capsys.readouterr().out
        printed = yaml.safe_load(text)["data"]
        assert printed["sources"]["web"]["storage_options"] == MASKED
        assert printed["val_sources"]["a"]["x"]["storage_options"] == MASKED
        assert printed["test_sources"][0]["data"] == "https://h/x.parquet"
        assert "hunter" not in text
        assert "s1gned" not in text

    def test_what_names_variables_is_printed_as_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = settings()
        config["data"]["sources"]["web"]["storage_options"] = {"headers": {"Authorization": "env:AUTH"}}
        with pytest.raises(SystemExit):
            run("fit", "--print_config", config=config)
        assert yaml.safe_load(capsys.readouterr().out)["data"]["sources"] == config["data"]["sources"]

    @pytest.mark.filterwarnings("ignore:source 'web'.* storage_options are ignored")
    def test_saved_settings_and_hyperparameters_have_none(
        self, corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AUTH", "hunter-4711")
        config = self.config(corpus)
        del config["data"]["sources"]["code"]["transform"]
        for kind in ("val", "test", "predict"):
            del config["data"][f"{kind}_sources"]
        config["trainer"]["logger"] = {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "l"},
        }
        cli = run("fit", config=config, data=SavingData)
        assert cli.datamodule.config.sources[0].storage_options == OPTIONS
        assert cli.datamodule.hparams["sources"]["web"]["storage_options"] == MASKED
        Path("settings.yaml").unlink()
        written = [path for path in folder.rglob("*") if path.is_file()]
        assert {"config.yaml", "hparams.yaml", "step=2.ckpt"} <= {path.name for path in written}
        assert not [path for path in written if b"hunter" in path.read_bytes()]
        saved = yaml.safe_load(next(folder.rglob("config.yaml")).read_text())
        assert saved["data"]["sources"]["web"]["storage_options"] == MASKED

    def test_plain_leaves_none_in_any_form(self) -> None:
        source = Source("y", SIGNED_URL, storage_options=OPTIONS, filesystem=fsspec.filesystem("memory"))
        forms = [
            source,
            [source],
            {"a": [source]},
            {"y": {"data": SIGNED_URL, "storage_options": OPTIONS}},
            [SIGNED_URL],
        ]
        for form in forms:
            found = json.dumps(plain(form))
            assert "hunter" not in found
            assert "s1gned" not in found
        assert plain(source)["storage_options"] == MASKED
        assert plain(source)["filesystem"] == "<MemoryFileSystem>"
        kept = {"data": "https://h/x?version=2", "storage_options": {"key": "env:KEY"}}
        assert plain(kept) is kept


class TestRuns:
    """A whole run, and the next one from its checkpoint."""

    def test_fit_then_resume_with_another_number_of_steps(self, corpus: Path) -> None:
        config = settings(corpus)
        whole = run("fit", "--trainer.max_steps=8", config=config)
        again = run("fit", "--trainer.max_steps=8", "--ckpt_path=saved/step=4.ckpt", config=config)
        assert list(whole.model.steps) == list(range(8))
        assert again.model.steps == {step: whole.model.steps[step] for step in range(4, 8)}
        assert again.datamodule.certificate == whole.datamodule.certificate

    def test_another_weight_is_a_recorded_change(self, corpus: Path) -> None:
        config = settings(corpus)
        run("fit", config=config)
        cli = run(
            "fit", "--trainer.max_steps=16", "--ckpt_path=saved/step=4.ckpt", "--data.weights.code=0", config=config
        )
        sources = {piece[0] for step in range(12, 16) for row in cli.model.steps[step] for piece in row}
        assert sources == {"web"}

    def test_the_saved_config_runs_again(self, corpus: Path) -> None:
        config = settings(corpus)
        config["trainer"]["logger"] = {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "logs"},
        }
        cli = run("fit", "--data.weights.web=0.5", config=config)
        saved = yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())
        assert saved["data"]["weights"] == {"web": 0.5}
        assert saved["data"]["sources"]["code"] == config["data"]["sources"]["code"]
        again = run("fit", f"--config={cli.trainer.log_dir}/config.yaml", config=None)
        assert again.model.steps == cli.model.steps

    def test_validate_a_checkpoint(self, corpus: Path) -> None:
        sources = {source.name: {"data": source.data} for source in held_out(corpus)["a"]}
        config = settings(corpus, val_sources=sources)
        config["trainer"]["limit_val_batches"] = 1.0
        run("fit", config=config)
        cli = run("validate", "--ckpt_path=saved/step=4.ckpt", config=config)
        assert len({piece[3] for row in cli.model.validated for piece in row if piece[2] == 0}) == 4

    def test_a_subclass_that_saves_its_hyperparameters(self, corpus: Path) -> None:
        config = settings()
        config["data"] = {"corpus": str(corpus)}
        whole = run("fit", "--data.weights.code=0.2", config=config, data=CorpusData)
        saved = torch.load("saved/step=4.ckpt", weights_only=True)
        assert saved["datamodule_hyper_parameters"]["weights"] == {"code": 0.2}
        loaded = CorpusData.load_from_checkpoint("saved/step=4.ckpt")
        assert loaded.config.weights_of("train") == whole.datamodule.config.weights_of("train")
        assert loaded.next_step == 4
        again = run("fit", "--ckpt_path=saved/step=2.ckpt", "--data.weights.code=0.2", config=config, data=CorpusData)
        assert again.model.steps == {step: whole.model.steps[step] for step in (2, 3)}


class TestHyperparameters:
    """Objects of ours become what a YAML file would say."""

    def made(self, corpus: Path | str = "/nowhere") -> MyData:
        return MyData(
            sources=[
                Source("web", f"{corpus}/web/*.parquet", weight=0.7, transform=shorten),
                Source("code", [f"{corpus}/code/*.jsonl"], epochs=3),
            ],
            rows=PackedRows(seq_len=32, micro_batch_size=2, token_fields=("labels",)),
            mixture=Mixture({"web": 1.0, "code": 3.0}, unit="tokens"),
            strategy=Balanced(AttentionCost(crossover=512)),
            val_sources={"a": [Source("held", Path("held.jsonl"))]},
            eval_rows={"val": PaddedRows(max_len=8, micro_batch_size=1)},
            tree=ClientPlaceTree.from_sizes(dp=2),
            runtime="local",
            extra={"mine": {1, 2}},
        )

    def test_they_hold_nothing_of_ours(self) -> None:
        found = json.loads(json.dumps({**self.made().hparams, "extra": None}))
        assert found["sources"] == {
            "web": {"data": "/nowhere/web/*.parquet", "weight": 0.7, "transform": f"{__name__}.shorten"},
            "code": {"data": ["/nowhere/code/*.jsonl"], "epochs": 3},
        }
        assert found["rows"] == {
            "class_path": "megascale_lightning.rows.PackedRows",
            "init_args": {"seq_len": 32, "micro_batch_size": 2, "token_fields": ["labels"]},
        }

    def test_what_is_not_ours_is_left_alone(self) -> None:
        data = self.made()
        assert data.hparams.extra == {"mine": {1, 2}}
        assert data.hparams_initial.extra == {"mine": {1, 2}}

    def test_the_same_settings_come_of_them(self) -> None:
        data = self.made()
        other = MyData(**data.hparams)
        for name in ("rows", "mixture", "strategy", "eval_rows", "seed"):
            assert getattr(other.config, name) == getattr(data.config, name)
        assert other._tree == data._tree
        assert other.config.streams()["train"] == data.config.streams()["train"]
        assert list(other.config.streams()) == list(data.config.streams())

    def test_a_checkpoint_with_them_loads_and_resumes(self, corpus: Path) -> None:
        def data() -> MyData:
            sources = train_sources(corpus)
            return MyData(sources=sources, rows=PackedRows(seq_len=32, micro_batch_size=2), runtime="local")

        def trainer(steps: int) -> L.Trainer:
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            return L.Trainer(accelerator="cpu", max_steps=steps, enable_checkpointing=False, **quiet)

        first, whole = trainer(2), data()
        first.fit(Model(), datamodule=whole)
        first.save_checkpoint("a.ckpt")
        torch.load("a.ckpt", weights_only=True)
        loaded, model = MyData.load_from_checkpoint("a.ckpt"), Model()
        trainer(4).fit(model, datamodule=loaded, ckpt_path="a.ckpt")
        assert list(model.steps) == [2, 3]
        assert loaded.config.streams() == whole.config.streams()

    def test_data_and_closures_are_described(self) -> None:
        sources = [
            Source("numbers", TensorDataset(torch.arange(3)), transform=lambda sample: sample),
            Source("listed", list(range(1000)), format="dataset"),
        ]
        found = plain({"sources": sources})["sources"]
        assert found["numbers"]["data"] == "<TensorDataset>"
        assert found["numbers"]["transform"].startswith("<TestHyperparameters.")
        assert found["listed"]["data"] == "<1000 items>"

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("os.system", "no class of megascale_lightning"),
            ("megascale_lightning_evil.PackedRows", "no class of megascale_lightning"),
            ("megascale_lightning.rows.Nothing", "is not there"),
            ("megascale_lightning.reduce_loss", "no class of settings"),
        ],
    )
    def test_no_other_code_is_run(self, path: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            revived({"class_path": path, "init_args": {}})


@pytest.mark.slow
def test_the_example_overrides_resumes_and_proves_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/lightning_cli.py"), "--quick", "--work-dir", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Weights: code 0.6, docstrings 0.3, manual 0.4" in done.stdout
    ours, theirs = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("Order certificate")]
    assert ours == theirs
