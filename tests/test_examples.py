"""The examples run as a user runs them, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout in a fresh interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.ddp
@pytest.mark.ray
@pytest.mark.slow
def test_lightning_text_stops_resumes_and_proves_it(tmp_path):
    done = run("examples/lightning_text.py", "--quick", "--work-dir", str(tmp_path), timeout_s=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    first, last = re.search(r"Mean loss: ([\d.]+) in the first steps, ([\d.]+) in the last", done.stdout).groups()
    assert float(last) < float(first) - 0.5
    assert "Stopped after step 9, resumed with step 10" in done.stdout
    assert "The same samples as one undisturbed read, in all 20 steps: yes" in done.stdout
    ours, theirs = re.findall(r"Order certificate of .* ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert ours == theirs

    before, after = map(float, re.search(r"all steps \| +([\d.]+)% \| +([\d.]+)%", done.stdout).groups())
    assert after < before


def test_transform_of_the_example_needs_no_torch():
    code = "import sys; sys.path[:0] = ['examples']; import text_data; print({'torch', 'ray'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_document_mask_keeps_documents_apart(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from text_model import document_mask

    mask = document_mask(torch.tensor([[0, 1, 2, 0, 1]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.slow
def test_sources_of_the_example_are_on_any_machine(tmp_path, monkeypatch):
    import json

    import pyarrow.parquet as pq

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from text_data import tokenize, write_sources

    write_sources(tmp_path, limit=50)
    texts = {folder: pq.read_table(tmp_path / folder)["text"].to_pylist() for folder in ("code", "manual")}
    for name in ("docstrings", "packages"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        texts[name] = [json.loads(line)["text"] for line in lines]
    assert all(3 <= len(found) <= 50 and all(found) for found in texts.values())

    ids = tokenize({"text": texts["code"][0]})["input_ids"]
    assert bytes(ids.astype("uint8")).decode() == texts["code"][0]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    write_sources(tmp_path)
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
