"""Real kernels: cells that train, run again, are interrupted, debugged, and forked from. Nothing may hang."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager

from tests.integrations.processes import MARK, Finished, left_behind, read_log, shared_memory_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]

ROOT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import warnings; warnings.filterwarnings("ignore")
import io, logging, pdb, sys
from pathlib import Path
import lightning as L
from megascale_lightning import MegaScaleLoader, Source
from tests.integrations.corpora import real_data
from tests.integrations.holding import Hold
from tests.integrations.scripts.train import TinyModel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
corpus, out = Path({corpus!r}), Path({out!r})
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)

def fit(data, steps, hold=-1, **more):
    class Model(TinyModel):
        held = Hold(out, hold)
        def training_step(self, batch, batch_idx):
            self.held()
            return super().training_step(batch, batch_idx)

    settings = dict(accelerator="cpu", devices=1, max_steps=steps, limit_val_batches=0)
    L.Trainer(**settings | quiet | more).fit(Model(out / "log"), datamodule=data)
"""


class Kernel:
    """A kernel, run cell by cell."""

    def __init__(self, client: nbclient.NotebookClient, out: Path) -> None:
        self.client, self.out = client, out

    def __call__(self, source: str, *, whole: bool = False) -> str:
        """The last line that a cell prints; all of its error, if it ends with one."""
        cell = nbformat.v4.new_code_cell(textwrap.dedent(source))
        self.client.nb.cells.append(cell)
        self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors:
            return "\n".join([errors[0].ename, errors[0].evalue, *errors[0].traceback])
        printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        return printed if whole else printed.strip().rpartition("\n")[2]

    def interrupt_when(self, reached: Path) -> None:
        """Interrupt the kernel as Jupyter does, once a file is there."""

        def wait() -> None:
            deadline = time.monotonic() + 60
            while not reached.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.killpg(self.client.km.provisioner.pid, signal.SIGINT)

        threading.Thread(target=wait, daemon=True).start()

    def steps(self, num_ranks: int = 1) -> list[list[int]]:
        """The steps that each rank has trained on since this was asked last."""
        found = [[line["step"] for line in lines] for lines in read_log(self.out / "log", num_ranks)]
        for rank in range(num_ranks):
            (self.out / f"log/rank{rank}.jsonl").unlink()
        return found


@pytest.fixture
def kernel(corpus: Path, tmp_path: Path) -> Iterator[Kernel]:
    """A fresh kernel; when it is shut down nothing of it may be left."""
    (tmp_path / "hold").touch()
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path / "kernel"))
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), km=manager, timeout=150, allow_errors=True)
    client.resources = {"metadata": {"path": str(ROOT)}}
    mark, before = uuid.uuid4().hex, shared_memory_files()
    with client.setup_kernel(cleanup_kc=True, env=os.environ | {MARK: mark}):
        session = client.km.provisioner.pid
        run = Kernel(client, tmp_path)
        assert run(PREAMBLE.format(corpus=str(corpus), out=str(tmp_path))) == ""
        yield run
    assert left_behind(Finished(0, "", mark, before, session)) == []


RUNTIMES = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_cell_is_run_again(kernel: Kernel, runtime: str) -> None:
    """A cell that makes the data starts anew, one that trains goes on."""
    for _ in range(2):
        said = kernel(f"data = real_data(corpus, runtime={runtime!r})\nfit(data, 2)\nprint(data.next_step)")
        assert said == "2", said
        assert kernel.steps() == [[0, 1]]
    assert kernel("fit(data, 2)\nprint(data.next_step)") == "4"
    assert kernel.steps() == [[2, 3]]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_interrupted_cell_is_run_again(kernel: Kernel, runtime: str) -> None:
    kernel(f"data = real_data(corpus, runtime={runtime!r})")
    kernel.interrupt_when(kernel.out / "reached0")
    # Lightning ends with sys.exit, as in a script: in a kernel that ends the cell.
    assert "SystemExit" in kernel("fit(data, 100, hold=3)")
    assert kernel("print(data.next_step, data.running)") == "3 False"
    assert kernel.steps() == [[0, 1, 2]]
    assert kernel("fit(data, 2)\nprint(data.next_step)") == "5"
    assert kernel.steps() == [[3, 4]]


def test_a_cell_that_waits_for_a_batch_is_interrupted_and_run_again(kernel: Kernel) -> None:
    """A transform that never comes back, in the kernel itself; one that may run on several threads, so that it holds
    no lock over the random states of the process."""
    source = """
        web = lambda at: [Source("web", str(corpus / "web/*.parquet"), transform=Hold(out, at), thread_safe=True)]
        data = real_data(corpus, sources=web({at}))
        fit(data, 2)
        print(data.next_step)
    """
    kernel.interrupt_when(kernel.out / "reached0")
    assert "SystemExit" in kernel(source.format(at=0))
    assert kernel(source.format(at=-1)) == "2"


def test_under_a_debugger(kernel: Kernel) -> None:
    """Commands step over the first batch, into the second, and look at a training that has failed."""
    said = kernel(
        """
        def debugger(commands):
            found = pdb.Pdb(stdin=io.StringIO(commands), stdout=sys.stdout, nosigint=True, readrc=False)
            found.use_rawinput = False
            return found

        def look():
            with MegaScaleLoader(real_data(corpus).config) as loader:
                batches = iter(loader)
                first = next(batches)
                second = next(batches)
                return first, second

        commands = "next\\nnext\\nnext\\np 'first', first['megascale'].step\\nstep\\nreturn\\nnext\\n"
        debugger(commands + "p 'second', second['megascale'].step\\ncontinue\\n").runcall(look)
    """,
        whole=True,
    )
    assert "('first', 0)" in said, said
    assert "('second', 1)" in said, said
    said = kernel("""
        data = real_data(corpus)
        class Failing(TinyModel):
            def training_step(self, batch, batch_idx):
                raise RuntimeError("wanted")
        trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=2, limit_val_batches=0, **quiet)
        trainer.fit(Failing(out / "log"), datamodule=data)
    """)
    assert "wanted" in said
    said = kernel(
        """
        looking = debugger("p 'at', batch['megascale'].step, data.next_step\\nquit\\n")
        looking.reset()
        looking.interaction(None, sys.last_traceback)
    """,
        whole=True,
    )
    assert "('at', 0, 0)" in said, said


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("before", "runtime"),
    [
        ("nothing", "local"),
        ("local", "local"),
        pytest.param("nothing", "ray", marks=pytest.mark.ray),
        pytest.param("local", "ray", marks=pytest.mark.ray),
        pytest.param("ray", "local", marks=pytest.mark.ray),
    ],
)
def test_ddp_notebook_forks_a_kernel(kernel: Kernel, before: str, runtime: str) -> None:
    """Two ranks forked from a kernel that has trained before, or not: they start loaders of their own."""
    if before != "nothing":
        assert "Error" not in kernel(f"fit(real_data(corpus, runtime={before!r}), 2)")
        assert kernel.steps() == [[0, 1]]
    said = kernel(f'fit(real_data(corpus, runtime={runtime!r}), 3, devices=2, strategy="ddp_notebook")')
    assert "Error" not in said, said
    assert kernel.steps(2) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.ddp
@pytest.mark.ray
@pytest.mark.parametrize(
    "use",
    [
        'loader = MegaScaleLoader(real_data(corpus, runtime="ray").config); first = next(iter(loader))',
        'fit(real_data(corpus, runtime="ray"), 2)',
        "import ray; ray.init(include_dashboard=False); None",
        "import ray; ray.init(include_dashboard=False); ray.shutdown()",
    ],
    ids=["a loader is open", "after a training", "ray.init", "ray.shutdown"],
)
def test_ddp_notebook_in_a_kernel_that_has_used_ray(kernel: Kernel, use: str) -> None:
    """Ray lives through no fork (calls hang), and cannot be started behind one (it crashes): one error says so."""
    assert "Error" not in kernel(use)
    said = kernel('fit(real_data(corpus, runtime="ray"), 2, devices=2, strategy="ddp_notebook")')
    assert "ForkError" in said, said
    assert "start the kernel anew" in said, said
