"""Stores with credentials, through real actors: the data are those of the disk, and the secret is nowhere."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.range_server import RangeServer
from megascale_lightning import (
    ClientPlaceTree,
    DataError,
    LoaderConfig,
    MegaScaleDataModule,
    MegaScaleLoader,
    PackedRows,
)
from megascale_lightning.checkpointing.filelists import FILES_KEY, unpack_lists
from megascale_lightning.runtime.ray_session import RaySession
from tests.acceptance.remote_corpus import client_of_environment, remote_sources, write_remote_corpus

pytest.importorskip("aiohttp")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECRET = "n0b0dy-kn0ws-th1s"
SIGNATURE = "s1gned-by-n0b0dy"
QUERY = f"X-Amz-Credential=AKIAREMOTE&X-Amz-Signature={SIGNATURE}"


class Model(L.LightningModule):
    """Reads its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.sums: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.sums.append(int(batch["input_ids"].sum()))
        return self.layer.weight.sum() * 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(MegaScaleDataModule):
    """As a user's own, hyperparameters and all."""

    def __init__(self, sources: Any, **more: Any) -> None:
        super().__init__(sources=sources, **more)
        self.save_hyperparameters()


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """A Ray that was started before any secret was set; where it writes."""
    folder = Path(tempfile.mkdtemp(prefix="mslr"))  # sockets lie in it, whose paths have to be short
    session = RaySession.start(None, {"_temp_dir": str(folder), "num_cpus": 2})
    yield folder
    session.release()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remote")
    write_remote_corpus(root)
    return root


@pytest.fixture(scope="module")
def expected(corpus: Path) -> list[int]:
    return train(remote_sources(str(corpus)), runtime="local").sums


@pytest.fixture
def server(corpus: Path) -> Iterator[RangeServer]:
    with RangeServer(corpus) as running:
        yield running


def train(sources: list[Any], folder: Path | None = None, **more: Any) -> Model:
    rows = PackedRows(seq_len=64, micro_batch_size=2, pack_ahead=8)
    data = Data(sources, rows=rows, window_units=2, **more)
    model = Model()
    callbacks = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)]
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=6,
        logger=folder is not None,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    if folder is not None:
        (folder / "state.json").write_text(json.dumps(data.state_dict()))
        (folder / "shown.txt").write_text(f"{data!r} {data.config!r} {data.hparams} {data.config.sources!r}")
        for path in folder.glob("*.ckpt"):
            checkpoint = torch.load(path, weights_only=True)
            lists = [unpack_lists(item) for item in find_key(checkpoint, FILES_KEY)]
            assert lists, "the file lists are in the checkpoint"
            path.with_suffix(".txt").write_text(f"{checkpoint} {lists}")
    return model


def find_key(value: Any, key: str) -> list[bytes]:
    """What lies under a key, anywhere."""
    if isinstance(value, dict):
        return [
            item for name, inner in value.items() for item in ([packed(inner)] if name == key else find_key(inner, key))
        ]
    return []


def packed(value: Any) -> bytes:
    if isinstance(value, dict):
        (value,) = value.values()
    return bytes(value.numpy().tobytes()) if isinstance(value, torch.Tensor) else bytes(value)


def files_with(folder: Path, *secrets: str) -> list[str]:
    """Files below a folder that hold one of the texts."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_socket() and not path.is_symlink():
            content = path.read_bytes()
            found += [f"{path}: {secret}" for secret in secrets if secret.encode() in content]
    return found


@pytest.mark.parametrize("given", ["literally", "by a variable", "by env=", "signed"])
def test_credentials_open_the_store_and_are_seen_nowhere(
    given: str,
    server: RangeServer,
    ray_folder: Path,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    header = f"Bearer {SECRET}"
    server.authorizations = frozenset({header})
    literal = {"headers": {"Authorization": header}}
    settings: dict[str, Any] = {}
    sources = remote_sources(server.url, storage_options=literal)
    if given == "by a variable":
        monkeypatch.setenv("MSL_STORE_AUTH", header)
        sources = remote_sources(server.url, storage_options={"headers": {"Authorization": "env:MSL_STORE_AUTH"}})
    elif given == "by env=":
        # The way of a store's own client: it looks into the environment by itself.
        monkeypatch.setenv("MSL_STORE_AUTH", header)
        settings["env"] = ["MSL_STORE_AUTH"]
        sources = remote_sources(server.url, storage_options={"get_client": client_of_environment})
    elif given == "signed":
        server.authorizations = frozenset()
        server.fault = lambda request: None if QUERY in request.path or request.path.endswith("/") else 403
        signed = [f"{{0..2}}.{kind}?{QUERY}" for kind in ("parquet", "jsonl.zst", "tar")]
        sources = [
            replaced(source, f"{server.url}/{source.name}/{name}")
            for source, name in zip(remote_sources(server.url), signed, strict=True)
        ]
    assert "MSL_STORE_AUTH" not in environment_of_raylet(ray_folder)

    assert train(sources, tmp_path / "good", **settings).sums == expected
    assert server.requests

    server.authorizations, server.fault = frozenset({"Bearer other"}), None
    with pytest.raises(DataError, match=r"source '(web|code|pairs)': http.*(401|403)") as caught:
        train(sources, tmp_path / "bad", **settings)
    shown = "".join(traceback.format_exception(caught.value))
    (tmp_path / "error.txt").write_text(f"{shown} {caught.value!r} {caught.value.__cause__!r}")
    (tmp_path / "log.txt").write_text(caplog.text)
    out, err = capfd.readouterr()
    (tmp_path / "out.txt").write_text(out + err)

    assert (tmp_path / "good/step=2.ckpt").exists()
    assert (tmp_path / "good/state.json").read_text().count("web")
    assert files_with(tmp_path, SECRET, SIGNATURE, "AKIAREMOTE") == []
    assert list((ray_folder / "session_latest/logs").glob("worker-*.err")), "the logs of the actors are looked at"
    assert files_with(ray_folder, SECRET, SIGNATURE, "AKIAREMOTE") == []


def test_an_error_in_the_middle_of_a_run_names_source_and_file(server: RangeServer, ray_folder: Path) -> None:
    server.authorizations = frozenset({f"Bearer {SECRET}"})
    options = {"headers": {"Authorization": f"Bearer {SECRET}"}}
    config = LoaderConfig(
        sources=remote_sources(server.url, storage_options=options, on_error="skip"),
        rows=PackedRows(seq_len=64, micro_batch_size=2, pack_ahead=0),
        window_units=1,
        part_bytes=1,
        mixture_lead_steps=4,
    )
    with MegaScaleLoader(config) as loader:
        batches = iter(loader)
        next(batches)
        server.authorizations = frozenset({"Bearer other"})
        with pytest.raises(DataError, match=r"source '(web|code|pairs)': http://\S+ cannot be read.*403") as caught:
            consume(batches, 200)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_only_loaders_talk_to_the_store(server: RangeServer, ray_folder: Path, ranks: int) -> None:
    """Connections do not grow with ranks: the lists are read once, and then only the loader's are open."""
    config = LoaderConfig(
        sources=remote_sources(server.url), rows=PackedRows(seq_len=64, micro_batch_size=1), num_loaders=1
    )
    tree = ClientPlaceTree.from_sizes(dp=ranks)
    loaders = [MegaScaleLoader(config, tree=tree, rank=rank) for rank in range(ranks)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(3):
        for iterator in iterators:
            next(iterator)
    # One for describing, one for taking; whoever listed the files has closed his.
    assert 0 < server.open_connections <= 2
    for loader in loaders:
        loader.close()


def test_an_object_store_by_a_filesystem_of_arrow(
    corpus: Path, ray_folder: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto = pytest.importorskip("moto.server")
    from pyarrow import fs

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    endpoint = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    endpoint.start()
    try:
        host, port = endpoint.get_host_and_port()
        store = fs.S3FileSystem(
            access_key="AKIAREMOTE",
            secret_key=SECRET,
            endpoint_override=f"{host}:{port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )
        store.create_dir("corpus")
        fs.copy_files(str(corpus), "corpus", destination_filesystem=store)
        sources = remote_sources("corpus", filesystem=store)
        assert train(sources, tmp_path / "good").sums == expected
        store.delete_file("corpus/web/0.parquet")
        with pytest.raises(DataError, match=r"source 'web': corpus/web/0\.parquet cannot be read") as caught:
            resume_on_old_files(sources)
        (tmp_path / "error.txt").write_text("".join(traceback.format_exception(caught.value)))
    finally:
        endpoint.stop()
    assert files_with(tmp_path, SECRET) == []
    assert files_with(ray_folder, SECRET) == []


def resume_on_old_files(sources: list[Any]) -> None:
    """Read a list that was made before a file was deleted."""
    from dataclasses import replace

    from megascale_lightning.sources.stores.files import find_files
    from megascale_lightning.sources.stores.storage import Storage

    storage = Storage.of(sources[0])
    (info,) = find_files("web", "corpus/web/1.parquet", storage)
    storage.open(replace(info, path="corpus/web/0.parquet")).read()


def consume(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


def environment_of_raylet(folder: Path) -> str:
    import psutil

    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "raylet" and str(folder) in " ".join(process.cmdline())
    ]
    return str([process.environ() for process in found]) if found else pytest.fail("no raylet")


def replaced(source: Any, data: str) -> Any:
    from dataclasses import replace

    return replace(source, data=data)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
