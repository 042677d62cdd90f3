"""The benchmarks run, and their last line is what machines expect. No speed is asserted here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarking import quick_figures

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.ray
@pytest.mark.slow
def test_text_throughput_ends_with_one_line_of_json():
    pytest.importorskip("torchdata")
    found = quick_figures("text_throughput.py")
    assert set(found["ratios"]) == {"vs_dataloader", "vs_stateful", "local_vs_dataloader0"}
    numbers = [*found["ratios"].values(), *found["token_ratios"].values(), found["cpu_ratio_vs_dataloader"]]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert {"megascale/ray", "megascale/local", "dataloader/0", "dataloader/1", "dataloader/2"} <= set(found["loaders"])
    for name, measured in found["loaders"].items():
        assert 0.5 < measured["fill"] <= 1, name
        assert measured["pss_mib"] > 0, name
    assert {"versions", "machine", "settings", "problems"} <= set(found)
    assert not found["problems"]
    assert not {"host", "hostname", "node"} & set(found["machine"])


@pytest.mark.ray
@pytest.mark.slow
def test_tokenize_ends_with_one_line_of_json():
    pytest.importorskip("tokenizers")
    found = quick_figures("tokenize.py")
    assert not found["problems"]
    assert found["share_of_bare"] == min(found["share_of_bare_by_format"].values()) > 0
    assert found["vs_dataloader"] == min(found["vs_dataloader_by_format"].values()) > 0
    assert set(found["loaders"]) == {
        f"{a}/{b}" for a in ("bare", "dataloader", "megascale") for b in ("jsonl", "parquet")
    }
    counts = {measured["tokens"] for measured in found["loaders"].values()}
    assert len(counts) == 1, "all of them give every token once"
    assert all(measured["cpu_s"] > 0 for measured in found["loaders"].values())


def test_the_benchmark_of_that_name_does_not_hide_the_standard_library():
    code = "import tokenize; print(tokenize.generate_tokens.__module__, tokenize.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tokenize ")
    assert str(BENCHMARKS) not in done.stdout


def test_corpus_is_the_same_on_every_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from text_corpus import NUM_SOURCES, CorpusSize, corpus_files, write_corpus

    for copy in ("one", "two"):
        write_corpus(tmp_path / copy, CorpusSize(files=1, row_groups=2, documents=50))
    one, two = corpus_files(tmp_path / "one"), corpus_files(tmp_path / "two")
    assert len(one) == NUM_SOURCES
    assert one.keys() == two.keys()
    for name in one:
        assert [path.read_bytes() for path in one[name]] == [path.read_bytes() for path in two[name]]


def test_baseline_delivers_every_document_once_an_epoch_and_resumes(tmp_path, monkeypatch):
    """What we compare with has to be right too."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchdata")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from text_baselines import Cursor, PackedText
    from text_corpus import CorpusSize, corpus_files, write_corpus

    size = CorpusSize(files=2, row_groups=2, documents=20)
    write_corpus(tmp_path, size)
    files = corpus_files(tmp_path)
    cursor = Cursor(files["source0"], seed=(0,))
    epochs: list[list[bytes]] = [[], []]
    for seen in epochs:
        for _ in range(2 * 2 * 20):
            seen.append(cursor.head.tobytes())
            cursor.advance()
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 80

    first = PackedText(files, rows=2, seq_len=4096)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state, wanted = first.state_dict(), [next(batches) for _ in range(20)]
    second = PackedText(files, rows=2, seq_len=4096)
    second.load_state_dict(state)
    for batch, again in zip(wanted, iter(second), strict=False):
        assert all(torch.equal(batch[name], again[name]) for name in batch)
        assert bool((batch["position_ids"][:, 0] == 0).all())


def test_cpu_time_and_memory_of_children_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from process_tree import cpu_seconds, process_tree, pss_bytes

    before = cpu_seconds(os.getpid())
    code = (
        "import sys, time\nwhile time.process_time() < 0.3: pass\nheld = bytearray(50 << 20)\nprint(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        child.stdout.readline()
        assert child.pid in process_tree(os.getpid())
        assert 50 << 20 <= pss_bytes([child.pid]) < 200 << 20
        assert cpu_seconds(child.pid) >= 0.25
        child.stdin.close()
    assert cpu_seconds(os.getpid()) - before >= 0.25, "a child that ended no longer counts"
    assert child.pid not in process_tree(os.getpid())
