"""A small corpus, `megascale plan` on it, and what the ranks of a real run get of it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.cli import main, plan

ROOT = Path(__file__).resolve().parents[2]
IDS = {"web": 1, "docs": 2}
WEB, DOCS = 400, 300
KEPT = [i for i in range(DOCS) if i % 10 != 3]
CODE = """
import threading
seen = []
def tokenize(sample):
    seen.append(sample["id"])
    if sample["id"] % 10 == 3: return None
    return {"input_ids": [2] * (1 + sample["id"] % 9)}
def breaks(sample):
    if sample["id"] % 10 == 3: raise ValueError("three")
    return {"input_ids": [2] * (1 + sample["id"] % 9)}
def waits(sample):
    print("begun", flush=True)
    threading.Event().wait(600)
"""


def web(**more: Any) -> Source:
    return Source("web", "web.parquet", **more)


def docs(code: str = "tokenize", **more: Any) -> Source:
    sys.path.insert(0, str(Path.cwd()))
    import planned_code  # type: ignore[import-not-found]

    return Source("docs", "docs.jsonl", transform=getattr(planned_code, code), **more)


def in_six_files(source: Source) -> Source:
    """The same records, fifty in each."""
    lines = Path("docs.jsonl").read_text().splitlines()
    for part in range(6):
        Path(f"part{part}.jsonl").write_text("\n".join(lines[part * 50 : (part + 1) * 50]))
    return replace(source, data="part*.jsonl")


def settings(*sources: Source, **more: Any) -> LoaderConfig:
    return LoaderConfig(
        **{"sources": sources, "rows": PackedRows(32, 2, pack_ahead=8), "runtime": "local", "window_units": 2, **more}
    )


def planned(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: LoaderConfig,
    *arguments: str,
    status: int = 0,
) -> str:
    """What the command prints for a config."""
    monkeypatch.setattr(plan, "load_config", lambda _: config)
    capsys.readouterr()
    assert main(["plan", "the config", *arguments]) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


@dataclass
class Ran:
    """What the ranks of a real run got, by step."""

    samples: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    tokens: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slots: Counter[int] = field(default_factory=Counter)
    filler: int = 0
    reports: dict[int, Any] = field(default_factory=dict)
    passes: set[int] = field(default_factory=set)

    def of(self, what: str, source: str | None = None) -> list[int]:
        by_step = getattr(self, what)
        return [by_step[step].total() if source is None else by_step[step][source] for step in sorted(by_step)]


def ran(config: LoaderConfig, steps: int, dp: int, *, stream: str = "train", passes: bool = False) -> Ran:
    """Reads the batches of every rank, one rank after another."""
    found, tree = Ran(), ClientPlaceTree.from_sizes(dp=dp)
    for rank in range(dp):
        with MegaScaleLoader(config, tree, rank, stream, passes=passes) as loader:
            while loader.step < steps:
                began = loader.step
                for batch in loader:
                    info = batch["megascale"]
                    note(found, batch, info)
                    found.reports |= {report.step: report for report in loader.last_reports}
                    if info.is_last_in_step and info.step + 1 == steps:
                        break
                if loader.step == began or not passes:
                    break
    return found


def note(found: Ran, batch: dict[str, Any], info: Any) -> None:
    ids = batch["input_ids"]
    found.slots[info.step] += ids.numel()
    found.filler += int((info.row_weights == 0).sum())
    if info.is_last_in_pass:
        found.passes.add(info.step)
    for name, number in IDS.items():
        found.tokens[info.step][name] += int((ids == number).sum())
    for row in info.sample_ids():
        found.samples[info.step].update(source for source, _, _, _, start, _ in row if start == 0)
