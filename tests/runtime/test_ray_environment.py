"""What Ray reads from the environment, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_lightning.runtime.ray_environment import RayEnvironment, available_cpus, import_settings, process_token


def test_what_was_set_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSL_KEPT", "user")
    monkeypatch.setenv("MSL_OVERRIDDEN", "user")
    monkeypatch.delenv("MSL_NEW", raising=False)
    environment = RayEnvironment()
    environment.set({"MSL_KEPT": "ours", "MSL_NEW": "ours"})
    environment.set({"MSL_OVERRIDDEN": "ours"}, override=True)
    assert [os.environ[f"MSL_{name}"] for name in ("KEPT", "NEW", "OVERRIDDEN")] == ["user", "ours", "ours"]
    environment.restore()
    environment.restore()
    assert os.environ["MSL_KEPT"] == os.environ["MSL_OVERRIDDEN"] == "user"
    assert "MSL_NEW" not in os.environ


def test_cpus_are_those_we_may_use() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from megascale_lightning.runtime.ray_environment import available_cpus; print(available_cpus())"
    environment = {**os.environ, **import_settings()}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout == "1\n"
    assert 1 <= available_cpus() <= len(os.sched_getaffinity(0))


def test_other_processes_find_this_package() -> None:
    paths = import_settings().get("PYTHONPATH", "").split(os.pathsep)
    installed = "site-packages" in str(Path(sys.modules["megascale_lightning"].__file__ or ""))
    assert installed or (Path(paths[0]) / "megascale_lightning" / "runtime").is_dir()


def test_the_token_is_long_and_stays() -> None:
    assert len(process_token()) == 64
    assert process_token() == process_token()


@pytest.mark.parametrize("module", ["ray_actors", "host", "plan", "local", "supervisor", "ray_runtime"])
def test_an_actors_imports_are_light(module: str) -> None:
    code = f"import sys, megascale_lightning.runtime.{module}\n"
    code += "print(sorted({'torch', 'lightning', 'accelerate', 'pandas'} & set(sys.modules)))"
    environment = {**os.environ, **import_settings()}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout == "[]\n"
