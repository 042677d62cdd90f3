"""Page-locked batches: made by the reading thread for the trainer's device, and nothing at all without CUDA."""

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PackedRows, Source


def batches(folder, rows):
    pq.write_table(pa.table({"input_ids": [np.arange(9)] * 16}), folder / "a.parquet")
    config = LoaderConfig(
        sources=[Source("a", str(folder / "a.parquet"))], rows=rows, global_batch_size=4, runtime="local"
    )
    with MegaScaleLoader(config) as loader:
        reading = iter(loader)
        return [next(reading) for _ in range(2)]


@pytest.fixture
def cuda(monkeypatch):
    """A machine with CUDA, whose trainer uses device 3: what is pinned, and the device that each thread has set."""
    pinned, devices = [], {}

    def pin(tensor):
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.get(threading.get_ident(), 3))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: devices.setdefault(threading.get_ident(), index))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return pinned, devices


def test_every_tensor_is_pinned_for_the_trainers_device_by_the_thread_that_reads(tmp_path, cuda):
    pinned, devices = cuda
    batch = batches(tmp_path, PackedRows(seq_len=32, micro_batch_size=2))[0]
    kept = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    assert len(kept) == 5
    originals = {id(tensor) for tensor in pinned}
    assert len(pinned) >= 5
    assert not originals & {id(tensor) for tensor in kept}, "handed out is the page-locked one"
    assert batch["megascale"].step == 0
    assert list(devices.values()) == [3]
    assert threading.get_ident() not in devices, "the trainer's own thread is left alone"


def test_what_a_collate_fn_returns_is_pinned_inside_its_containers(tmp_path, cuda):
    def collate(samples):
        ids = [torch.tensor(sample["input_ids"]) for sample in samples]
        return {"ids": ids, "pair": (ids[0], 1), "sparse": torch.eye(2).to_sparse(), "name": "x"}

    batch = batches(tmp_path, CollatedRows(micro_batch_size=2, collate_fn=collate))[0]
    originals = {id(tensor) for tensor in cuda[0]}
    assert len(originals) >= 2
    assert not originals & {id(tensor) for tensor in batch["ids"]}
    assert id(batch["pair"][0]) not in originals
    assert isinstance(batch["pair"], tuple)
    assert batch["sparse"].is_sparse, "cannot be pinned"
    assert batch["name"] == "x"


def test_without_cuda_nothing_is_pinned_and_cuda_stays_untouched(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: pytest.fail("pinned"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("touched"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("touched"))
    batch = batches(tmp_path, PackedRows(seq_len=32, micro_batch_size=2))[0]
    assert batch["megascale"].step == 0
