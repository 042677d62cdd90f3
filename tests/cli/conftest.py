"""The corpus in a folder of its own, and `megascale plan` on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.plans import CODE, DOCS, WEB, planned


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    lengths = np.clip(np.exp(np.random.default_rng(7).normal(2.0, 1.0, WEB)), 1, 90).astype(int)
    ids = pa.array([np.full(n, 1, np.int32) for n in lengths])
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "web.parquet", row_group_size=50)
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"id": i}) for i in range(DOCS)))
    (tmp_path / "planned_code.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("planned_code", None)
    sys.modules.pop("planned_config", None)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function: config and arguments -> the JSON object."""
    return lambda config, *arguments: json.loads(planned(monkeypatch, capsys, config, *arguments, "--json"))


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function: config and arguments -> the text; with `status=`, that of the error."""
    return lambda config, *arguments, **more: planned(monkeypatch, capsys, config, *arguments, **more)
