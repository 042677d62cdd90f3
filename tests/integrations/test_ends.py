"""However a training ends: Lightning's own exit code, the state of the last step taken, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.integrations.processes import Finished, left_behind, marked_processes, read_log, steps_of, train
from tests.integrations.scripts import ends

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

CTRL_C = 1
TERMINATED = SIGTERMException().code or 0
"""0, or 143 in later versions of Lightning."""

Meanwhile = Callable[[subprocess.Popen[bytes], str], None]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the steps of a training that nobody disturbs are made of."""
    out = tmp_path_factory.mktemp("whole")
    ends.fit(corpus, out, steps=30, save=False)
    return steps_of(read_log(out / "whole"))


def run(corpus: Path, out: Path, *arguments: Any, meanwhile: Meanwhile, **more: Any) -> Finished:
    """Train until `meanwhile` has made an end of it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "hold").touch()
    return train(corpus, out, *arguments, check=False, script="ends.py", meanwhile=meanwhile, timeout_s=100, **more)


def until(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        # It may have come true, and the program ended, since it was asked.
        assert process.poll() is None or condition(), f"the program ended before {what}"
        assert time.monotonic() < deadline, f"not within 90 s: {what}"
        time.sleep(0.01)


def held(out: Path, process: subprocess.Popen[bytes], ranks: Iterable[int] = (0,)) -> None:
    """Wait until all ranks stand still in a training step."""
    for rank in ranks:
        until((out / f"reached{rank}").exists, f"rank {rank} stood still", process)


def starving(out: Path, process: subprocess.Popen[bytes], ranks: Iterable[int] = (0,)) -> None:
    """Wait until a loader stands still, and all ranks have used up what was read before."""
    until((out / "reached0").exists, "the loader stood still", process)
    for rank in ranks:
        done, log = -1, out / f"whole/rank{rank}.jsonl"
        # A rank that asks for a batch twice without having trained on one in between waits for it.
        while done != (done := log.read_text().count("\n") if log.exists() else 0):
            for _ in range(2):
                (out / f"waiting{rank}").unlink(missing_ok=True)
                until((out / f"waiting{rank}").exists, f"rank {rank} waited for a batch", process)


def let_go(out: Path) -> None:
    (out / "hold").unlink()


def taken(out: Path, num_ranks: int = 1) -> int:
    """How many steps were taken, as the model saw it."""
    return max([line["step"] + 1 for line in read_log(out / "whole", num_ranks)[0] if line["stepped"]], default=0)


def saved(folder: Path) -> Path:
    """The newest checkpoint."""
    return max(folder.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2].rpartition("_")[2]))


def check_resume(checkpoint: Path, step: int, corpus: Path, out: Path, whole: dict[int, Any]) -> None:
    """A training that goes on from the checkpoint takes exactly the steps from `step` on, with the same data."""
    ends.fit(corpus, out, steps=step + 2, save=False, resume=checkpoint)
    assert steps_of(read_log(out / "whole")) == {index: whole[index] for index in (step, step + 1)}


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_a_training_step(corpus: Path, tmp_path: Path, whole: dict[int, Any], presses: int) -> None:
    """In the middle of an accumulated step; the second time while Lightning ends, and we with it."""

    def press(process: subprocess.Popen[bytes], mark: str) -> None:
        held(tmp_path, process)
        # What the check looks for was there: the search itself works.
        assert any("raylet" in line for line in marked_processes(mark, process.pid))
        os.killpg(process.pid, signal.SIGINT)
        if presses == 2:
            output = tmp_path / "output.txt"
            until(lambda: "Detected KeyboardInterrupt" in output.read_text(), "Lightning saw the first", process)
            os.killpg(process.pid, signal.SIGINT)

    finished = run(corpus, tmp_path, "--hold-step", 9, "--save-at-end", meanwhile=press)
    assert finished.code == CTRL_C, finished.output[-4000:]
    assert left_behind(finished) == []
    assert taken(tmp_path) == 4
    check_resume(saved(tmp_path / "ended"), 4, corpus, tmp_path / "again", whole)


@pytest.mark.parametrize("runtime", ["ray", "local"])
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, CTRL_C), (signal.SIGTERM, TERMINATED)])
def test_signal_while_a_batch_is_waited_for(
    corpus: Path, tmp_path: Path, whole: dict[int, Any], runtime: str, how: signal.Signals, code: int
) -> None:
    """A transform that never comes back holds nobody up. The trainer has fetched a batch by then that it never used."""

    def send(process: subprocess.Popen[bytes], mark: str) -> None:
        starving(tmp_path, process)
        process.send_signal(how)

    arguments = ["--runtime", runtime, "--hold-sample", 150, "--save-at-end"]
    finished = run(corpus, tmp_path, *arguments, meanwhile=send)
    assert finished.code == code, finished.output[-4000:]
    assert left_behind(finished) == []
    assert taken(tmp_path) > 0
    check_resume(saved(tmp_path / "ended"), taken(tmp_path), corpus, tmp_path / "again", whole)


def test_ctrl_c_in_a_transform_in_the_trainers_thread(corpus: Path, tmp_path: Path, whole: dict[int, Any]) -> None:
    def press(process: subprocess.Popen[bytes], mark: str) -> None:
        held(tmp_path, process)
        process.send_signal(signal.SIGINT)

    arguments = ["--runtime", "local", "--in-place", "--hold-sample", 150, "--save-at-end"]
    finished = run(corpus, tmp_path, *arguments, meanwhile=press)
    assert finished.code == CTRL_C, finished.output[-4000:]
    assert left_behind(finished) == []
    check_resume(saved(tmp_path / "ended"), taken(tmp_path), corpus, tmp_path / "again", whole)


@pytest.mark.parametrize("at", ["pid0", "gcs_server", "raylet/raylet", "ray::"])
def test_ctrl_c_during_start_up(corpus: Path, tmp_path: Path, at: str) -> None:
    """Before anything of Ray's, between two of its processes, and while the actors start."""

    def press(process: subprocess.Popen[bytes], mark: str) -> None:
        if at == "pid0":
            until((tmp_path / at).exists, "the script began", process)
        else:
            until(lambda: any(at in line for line in marked_processes(mark, process.pid)), f"{at} ran", process)
        os.killpg(process.pid, signal.SIGINT)

    finished = run(corpus, tmp_path, meanwhile=press)
    # Outside of trainer.fit it is Python's own end of an interrupted program.
    assert finished.code in ({CTRL_C, -signal.SIGINT} if at == "pid0" else {CTRL_C}), finished.output[-4000:]
    assert left_behind(finished) == []
    assert not (tmp_path / "saved").exists()


def test_ctrl_c_while_a_role_stands_still(corpus: Path, tmp_path: Path, whole: dict[int, Any]) -> None:
    """Lightning ignores a second Ctrl-C: nobody could end a trainer that waited for the role."""

    def press(process: subprocess.Popen[bytes], mark: str) -> None:
        held(tmp_path, process)
        (actor,) = [line for line in marked_processes(mark, process.pid) if "ray::ConstructorActor" in line]
        os.kill(int(actor.split(":")[0]), signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)

    finished = run(corpus, tmp_path, "--hold-step", 9, "--save-at-end", meanwhile=press)
    assert finished.code == CTRL_C, finished.output[-4000:]
    assert left_behind(finished) == []
    check_resume(saved(tmp_path / "ended"), 4, corpus, tmp_path / "again", whole)


@pytest.mark.parametrize(("microbatch", "step"), [(8, 4), (9, 5)])
def test_sigterm_in_a_training_step(
    corpus: Path, tmp_path: Path, whole: dict[int, Any], microbatch: int, step: int
) -> None:
    """Lightning ends behind the microbatch; a step that is broken off is trained again as a whole."""

    def send(process: subprocess.Popen[bytes], mark: str) -> None:
        held(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        until(lambda: "Received SIGTERM" in (tmp_path / "output.txt").read_text(), "Lightning saw it", process)
        let_go(tmp_path)

    finished = run(corpus, tmp_path, "--hold-step", microbatch, "--save-at-end", meanwhile=send)
    assert finished.code == TERMINATED, finished.output[-4000:]
    assert left_behind(finished) == []
    assert taken(tmp_path) == step
    check_resume(saved(tmp_path / "ended"), step, corpus, tmp_path / "again", whole)


def test_slurm_requeues_while_a_batch_is_waited_for(corpus: Path, tmp_path: Path, whole: dict[int, Any]) -> None:
    """SIGUSR1 saves in a signal handler, inside of `next()`, and asks for the job again; SIGTERM then ends it."""
    requeued, program = tmp_path / "requeued", tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {requeued}.part && mv {requeued}.part {requeued}\n')
    program.chmod(0o755)
    job = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "1", "NTASKS_PER_NODE": "1"}
    place = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "NNODES": "1", "NODELIST": "127.0.0.1"}
    environment = {f"SLURM_{name}": value for name, value in {**job, **place}.items()}
    environment["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    out = tmp_path / "run"

    def send(process: subprocess.Popen[bytes], mark: str) -> None:
        starving(out, process)
        process.send_signal(signal.SIGUSR1)
        until(requeued.exists, "the job was asked for again", process)
        starving(out, process)  # it goes on waiting
        process.send_signal(signal.SIGTERM)

    finished = run(corpus, out, "--hold-sample", 150, meanwhile=send, environment=environment)
    assert finished.code == TERMINATED, finished.output[-4000:]
    assert left_behind(finished) == []
    assert requeued.read_text().split() == ["requeue", "4711"]
    step = taken(out)
    check_resume(saved(out), step, corpus, tmp_path / "again", whole)
    # The job as SLURM starts it again: Lightning finds the checkpoint by itself.
    let_go(out)
    (out / "whole/rank0.jsonl").unlink()
    train(corpus, out, "--runtime", "local", "--steps", step + 2, script="ends.py", environment=environment)
    assert steps_of(read_log(out / "whole")) == {index: whole[index] for index in (step, step + 1)}


@pytest.mark.ddp
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, CTRL_C), (signal.SIGTERM, TERMINATED)])
@pytest.mark.parametrize("where", ["in a step", "without a batch"])
def test_signal_to_two_ranks(
    corpus: Path, tmp_path: Path, whole: dict[int, Any], where: str, how: signal.Signals, code: int
) -> None:
    """Ctrl-C reaches every process of the terminal's group, SIGTERM rank 0, which passes it on."""

    def send(process: subprocess.Popen[bytes], mark: str) -> None:
        (held if where == "in a step" else starving)(tmp_path, process, (0, 1))
        if how == signal.SIGINT:
            os.killpg(process.pid, how)
            return
        process.send_signal(how)
        if where == "in a step":
            output = tmp_path / "output.txt"
            until(lambda: output.read_text().count("Received SIGTERM") == 2, "both ranks were told", process)
            let_go(tmp_path)

    hold = ["--hold-step", 4] if where == "in a step" else ["--hold-sample", 150]
    finished = run(corpus, tmp_path, "--devices", 2, *hold, "--save-at-end", meanwhile=send)
    assert finished.code == code, finished.output[-4000:]
    assert left_behind(finished) == []
    check_resume(saved(tmp_path / "ended"), taken(tmp_path, 2), corpus, tmp_path / "again", whole)


@pytest.mark.ddp
def test_ctrl_c_during_the_start_up_of_two_ranks(corpus: Path, tmp_path: Path) -> None:
    def press(process: subprocess.Popen[bytes], mark: str) -> None:
        until(lambda: any("raylet/raylet" in x for x in marked_processes(mark, process.pid)), "Ray began", process)
        os.killpg(process.pid, signal.SIGINT)

    finished = run(corpus, tmp_path, "--devices", 2, meanwhile=press)
    assert finished.code == CTRL_C, finished.output[-4000:]
    assert left_behind(finished) == []


@pytest.mark.ddp
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["in a step", "without a batch"])
def test_one_of_two_ranks_is_killed(corpus: Path, tmp_path: Path, whole: dict[int, Any], where: str, rank: int) -> None:
    """Lightning kills all ranks some seconds after rank 1; nobody looks after rank 1 when rank 0 is gone."""

    def kill(process: subprocess.Popen[bytes], mark: str) -> None:
        (held if where == "in a step" else starving)(tmp_path, process, (0, 1))
        os.kill(int((tmp_path / f"pid{rank}").read_text()), signal.SIGKILL)
        if rank == 0:
            process.wait()
            if where == "in a step":
                let_go(tmp_path)

    # A callback that cannot save, as here without rank 0, keeps Lightning from telling the DataModule of the end.
    hold = ["--hold-step", 4] if where == "in a step" else ["--hold-sample", 150, "--save-at-end"]
    finished = run(corpus, tmp_path, "--devices", 2, *hold, meanwhile=kill)
    assert finished.code == -signal.SIGKILL, finished.output[-4000:]
    assert left_behind(finished, within_s=30 if rank == 0 else 10) == []
    if rank == 0:
        error = "Connection closed by peer" if where == "in a step" else "RayUnreachableError"
        assert error in (tmp_path / "output.txt").read_text()
    check_resume(saved(tmp_path / "saved"), taken(tmp_path, 2), corpus, tmp_path / "again", whole)
