"""`megascale state` finds the loader state wherever a checkpoint keeps it, and loads nothing unsafe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_lightning.cli import main

STATE = {
    "version": 1,
    "order_version": 1,
    "step": 12,
    "ended": False,
    "sources": {"web": {"epoch": 1, "window": 0, "part": 2, "offset": 7, "dropped": {"filtered": 3}}},
    "carry": [[index] * 8 for index in range(40)],
    "certificate": "ab" * 32,
}


def checkpoint_of(**more: Any) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.zeros(3)}, "callbacks": {"ModelCheckpoint": {"best": None}}, **more}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    torch.save(checkpoint_of(callbacks={"megascale_lightning": STATE}, MegaScaleDataModule=STATE), path)
    return path


def test_shows_the_state_once(saved: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["state", str(saved)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "callbacks/megascale_lightning:"
    assert "  step: 12" in shown
    assert "  carry: 40 entries" in shown
    assert f"  certificate: {'ab' * 32}" in shown
    assert sum("step:" in line for line in shown) == 1


def test_prints_json(saved: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["state", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATE


def test_two_different_states_are_both_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"callbacks": {"megascale_lightning": STATE}, "data": {**STATE, "step": 11}}, tmp_path / "two.ckpt")
    assert main(["state", str(tmp_path / "two.ckpt"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {where: state["step"] for where, state in shown.items()} == {"callbacks/megascale_lightning": 12, "data": 11}


def test_reads_json_and_folders_and_the_older_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "state.json").write_text(json.dumps(STATE), encoding="utf-8")
    (tmp_path / "sharded").mkdir()
    torch.save({"megascale_lightning": STATE}, tmp_path / "sharded" / "meta.pt")
    torch.save({"loader": STATE}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("state.json", "sharded", "old.pt"):
        assert main(["state", str(tmp_path / name)]) == 0
        assert "  step: 12" in capsys.readouterr().out.splitlines()


def test_says_what_a_checkpoint_without_state_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save(checkpoint_of(epoch=3), tmp_path / "plain.ckpt")
    assert main(["state", str(tmp_path / "plain.ckpt")]) == 1
    shown = capsys.readouterr()
    assert "holds no loader state; it holds: state_dict, callbacks, epoch" in shown.err
    assert not shown.out


class Unsafe:
    """Nothing that `weights_only=True` admits."""


def test_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"callbacks": Unsafe()}, tmp_path / "unsafe.ckpt")
    assert main(["state", str(tmp_path / "unsafe.ckpt")]) == 1
    shown = capsys.readouterr().err
    assert "weights_only=True" in shown
    assert "Unsafe" in shown


@pytest.mark.parametrize("content", [b"", b"text", b"{broken", b"PK\x03\x04 no archive"])
def test_other_files_are_refused_on_one_line(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_bytes(content)
    assert main(["state", str(tmp_path / "file")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["state", str(tmp_path / "nowhere.ckpt")]) == 1
    assert "nowhere.ckpt" in capsys.readouterr().err
