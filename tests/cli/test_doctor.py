"""`megascale doctor` tells a sound machine from an unsound one, and says what to do."""

from __future__ import annotations

from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from megascale_lightning.cli import doctor, main

VERSIONS = {"megascale-lightning": "0.1.0", "lightning": "2.6.4", "ray": "2.60.0"}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions = dict(VERSIONS)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    needs = ["lightning>=2.6.1,!=2.6.2,!=2.6.3", "ray>=2.52", "accelerate>=1; extra == 'accelerate'"]
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: version(name) and needs)
    return versions


def verdicts(findings: object) -> dict[str, str]:
    return {finding.topic: finding.verdict for finding in findings}  # type: ignore[attr-defined]


def test_reports_everything(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for topic in (
        "python",
        "lightning",
        "numpy",
        "pyarrow",
        "ray",
        "torch",
        "cores",
        "memory",
        "/dev/shm",
        "RAY_AUTH_MODE",
    ):
        assert topic in shown


def test_sound_packages(installed: dict[str, str]):
    assert verdicts(doctor.check_packages()) == {"megascale-lightning": "ok", "lightning": "ok", "ray": "ok"}


def test_malicious_and_missing_packages(installed: dict[str, str]):
    installed["lightning"] = "2.6.3"
    del installed["ray"]
    found = {finding.topic: finding for finding in doctor.check_packages()}
    assert found["lightning"].verdict == "problem"
    assert "2.6.3 is not allowed" in found["lightning"].text
    assert found["ray"].verdict == "problem"
    assert "pip install 'ray>=2.52'" in found["ray"].text


def test_a_problem_is_the_exit_status(installed: dict[str, str], capsys: pytest.CaptureFixture[str]):
    del installed["ray"]
    assert main(["doctor"]) == 1
    assert "missing" in capsys.readouterr().out


def test_sources_without_an_installation(installed: dict[str, str]):
    del installed["megascale-lightning"]
    found = verdicts(doctor.check_packages())
    assert found["megascale-lightning"] == "note"
    assert found["lightning"] == "ok"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "ok"}),
        ({"RAY_AUTH_MODE": "token"}, {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "ok"}),
        ({"RAY_AUTH_MODE": "disabled"}, {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "note"}),
        ({"RAY_AUTH_MODE": "password"}, {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "problem"}),
        ({"RAY_ADDRESS": "head:6379"}, {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "note"}),
        ({"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "token"}, {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "problem"}),
        (
            {"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"},
            {"RAY_ADDRESS": "ok", "RAY_AUTH_MODE": "ok"},
        ),
        ({"RAY_ADDRESS": "ray://head:10001"}, {"RAY_ADDRESS": "problem", "RAY_AUTH_MODE": "note"}),
    ],
)
def test_ray_environment(environ: dict[str, str], expected: dict[str, str], tmp_path: Path):
    findings = list(doctor.check_ray_environment(environ, tmp_path))
    assert verdicts(findings) == expected
    assert not any("secret" in finding.text for finding in findings)


@pytest.mark.parametrize("place", ["variable", "home"])
def test_a_token_in_a_file(place: str, tmp_path: Path):
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret", encoding="utf-8")
    environ = {"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "token"}
    if place == "variable":
        environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    home = tmp_path if place == "home" else tmp_path / "elsewhere"
    assert verdicts(doctor.check_ray_environment(environ, home))["RAY_AUTH_MODE"] == "ok"


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert doctor.check_shared_memory(tmp_path / "none").verdict == "note"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(64 << 20, 0, 64 << 20))
    small = doctor.check_shared_memory(tmp_path)
    assert (small.verdict, "--shm-size" in small.text) == ("note", True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(8 << 30, 0, 8 << 30))
    assert doctor.check_shared_memory(tmp_path).verdict == "ok"


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        (None, "ok", "not set"),
        ("192.0.2.1", "ok", "192.0.2.1 is 192.0.2.1, another machine"),
        ("127.0.0.1", "note", "127.0.0.1, this machine: other machines cannot reach that"),
        ("no such host", "problem", "no such host is not known on this machine"),
    ],
)
def test_where_rank_0_is(name: str | None, verdict: str, said: str):
    found = doctor.check_master(name)
    assert found.verdict == verdict
    assert said in found.text
