"""Transforms through real actors: where they are imported from, in which processes they run, and who may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from megascale_lightning import CollatedRows, ConfigError, DataError, LoaderConfig, MegaScaleLoader, PackedRows, Source
from tests.acceptance.drawn import batched, shouts, tokens

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("numbers") / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(400)))
    return str(path)


SCRIPT = """
import json, sys
sys.path.append(sys.argv[1])
import beside_the_script, far_away
from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, Source

def own(sample):
    return {"n": far_away.add(beside_the_script.add(sample))["n"] + OFFSET}

OFFSET = 1000
transforms = {"beside": beside_the_script.add, "far": far_away.add, "own": own, "local": lambda sample: own(sample)}
if __name__ == "__main__":
    sources = [
        Source(f"{name}-{executor}", sys.argv[2], transform=function, executor=executor, num_workers=1)
        for name, function in transforms.items()
        for executor in ("inline", "processes")
    ]
    config = LoaderConfig(sources=sources, rows=CollatedRows(80, collate_fn=list), num_loaders=2)
    with MegaScaleLoader(config) as loader:
        found = {}
        batch = next(iter(loader))
        for row, sample in zip(loader.last_info.sample_ids(), batch):
            found.setdefault(row[0][0], []).append(sample["n"] - row[0][3])
        print(json.dumps({name: sorted(set(added)) for name, added in found.items()}))
"""


def test_modules_of_the_script_are_found_from_any_folder(tmp_path: Path, numbers: str) -> None:
    """Beside the script, and in a folder that it put on sys.path; a library's name there means the same as here."""
    script, far, cwd = tmp_path / "scripts", tmp_path / "far", tmp_path / "cwd"
    for folder in (script, far, cwd):
        folder.mkdir()
    (script / "beside_the_script.py").write_text("def add(sample):\n    return {'n': sample['n'] + 10}\n")
    (far / "far_away.py").write_text("def add(sample):\n    return {'n': sample['n'] + 100}\n")
    (script / "train.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script / "train.py"), str(far), numbers],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    added = {"beside": [10], "far": [100], "own": [1110], "local": [1110]}
    assert found == {f"{name}-{executor}": added[name] for name in added for executor in ("inline", "processes")}


def config_for(numbers: str, runtime: str, executor: str, **made: Any) -> LoaderConfig:
    source = Source("web", numbers, executor=executor, num_workers=2, **made)  # type: ignore[arg-type]
    return LoaderConfig(
        sources=[source],
        rows=PackedRows(32, 2, pack_ahead=8),
        global_batch_size=4,
        runtime=runtime,  # type: ignore[arg-type]
        num_loaders=1,
        part_bytes=1000,
        prefetch_steps=1,
        plan_window=1,
    )


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("made", [{"transform": tokens}, {"transform_batched": batched}], ids=["each", "batched"])
def test_a_killed_worker_and_a_killed_loader_change_no_step(numbers: str, made: dict[str, Any]) -> None:
    with MegaScaleLoader(config_for(numbers, "local", "inline", **made)) as loader:
        batches = iter(loader)
        expected = [next(batches)["input_ids"].tolist() for _ in range(60)]
    with MegaScaleLoader(config_for(numbers, "ray", "processes", **made)) as loader:
        batches, found = iter(loader), []
        for step in range(60):
            pid = loader._session.stats()["loader/0"]["pid"] if step in (10, 25) else 0
            if step == 10:
                workers = psutil.Process(pid).children()
                assert workers, "no worker processes"
                for worker in workers:
                    worker.kill()
            if step == 25:
                workers = psutil.Process(pid).children()
                os.kill(pid, signal.SIGKILL)
                assert not psutil.wait_procs(workers, timeout=20)[1], "workers outlived their loader"
            found.append(next(batches)["input_ids"].tolist())
    assert found == expected


class Unpicklable:
    def __init__(self) -> None:
        self.lines = (line for line in "abc")

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def test_what_cannot_be_sent_is_refused_before_ray_starts(numbers: str) -> None:
    config = LoaderConfig(sources=[Source("web", numbers, transform=Unpicklable())], rows=CollatedRows(1))
    with pytest.raises(ConfigError, match=r"transform 'Unpicklable' .* its attribute 'lines', a generator, does not"):
        MegaScaleLoader(config)


def test_a_message_that_is_no_utf8_arrives(tmp_path: Path) -> None:
    """Half a surrogate pair, which JSON may hold: Ray does not send such a message, and the run would hang."""
    (tmp_path / "a.jsonl").write_text('{"text": "half a pair \\ud83d"}\n')
    source = Source("half", str(tmp_path / "a.jsonl"), transform=shouts)
    config = LoaderConfig(sources=[source], rows=PackedRows(4, 1), global_batch_size=1, restart_timeout=30)
    with MegaScaleLoader(config) as loader, pytest.raises(DataError, match=r"unit 0, row 0: .*half a pair \\ud83d"):
        next(iter(loader))
