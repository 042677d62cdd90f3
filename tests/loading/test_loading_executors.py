"""`Source.executor`: the same samples wherever the user's code runs, however many workers there are, whoever dies."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import ConfigError, DataError, RuntimeFailure
from megascale_lightning.loading import LoadedSource, SourceLoader, processes
from megascale_lightning.loading.executors import DaemonThreads, Executors, _end_threads
from megascale_lightning.loading.runs import Run, cut_block
from megascale_lightning.rows import CollatedRows, PackedRows
from megascale_lightning.sources import RecordBlock, Source, build_manifest
from megascale_lightning.types import PartKey, TakeRequest

from . import codes

ROWS = PackedRows(64, 1, sample_fields=("score",))
COUNT = 2300
PLACES = [("inline", None), ("threads", 3), ("processes", 1), ("processes", 3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("executors")
    pq.write_table(pa.table({"n": range(COUNT), "text": ["é"] * COUNT}), folder / "a.parquet", row_group_size=1500)
    return str(folder / "a.parquet")


def loader_of(source, rows):
    loaded = LoadedSource(source, build_manifest(source))
    return SourceLoader({"train": [loaded]}, {"train": rows}, 0, 8, 1 << 30, 1 << 30)


def content_of(source, rows=ROWS):
    """All of the first part: metadata and payload, as bytes."""
    loader = loader_of(source, rows)
    try:
        meta = loader.describe(PartKey("train", 0, 0, 0, 0))
        block = loader.take([TakeRequest(meta.key, meta.pieces[meta.kept])])
        ragged = [block.payload] if block.payload is not None else list(block.tokens.values())
        arrays = [meta.pieces, meta.reason, *(array for one in ragged for array in (one.values, one.offsets))]
        return [array.tobytes() for array in (*arrays, *block.samples.values())]
    finally:
        loader.shutdown()


@pytest.mark.slow
def test_samples_do_not_depend_on_where_they_are_made(files):
    for name in ("with_rng", "batched_with_rng", "with_globals", "batched_with_globals"):
        setting = "transform_batched" if "batched" in name else "transform"
        for rows in (ROWS, CollatedRows(1)) if "rng" in name else (ROWS,):
            found = {}
            for executor, workers in PLACES:
                if (executor == "threads" and "rng" not in name) or (workers == 1 and name != "with_globals"):
                    continue
                made = {setting: getattr(codes, name)}
                source = Source("web", files, executor=executor, num_workers=workers, **made)
                found[executor, workers] = content_of(source, rows)
            first = found.pop(("inline", None))
            assert len(first[0]) > COUNT
            for place, content in found.items():
                assert content == first, (name, type(rows).__name__, place)


def test_a_dataset_is_read_in_the_worker_processes():
    for rows in (ROWS, CollatedRows(1)):  # collated ones are fetched when they are taken
        contents = [
            content_of(Source("web", codes.Drawing(300), executor=executor, num_workers=workers), rows)
            for executor, workers in PLACES
        ]
        assert contents[1:] == contents[:1] * 3
    batched = [
        content_of(Source("web", codes.Drawing(300), transform_batched=codes.batched_with_rng, executor=executor))
        for executor in ("inline", "processes")
    ]
    assert batched[0] == batched[1]


def pids_of(source):
    loader = loader_of(source, PackedRows(64, 1))
    try:
        meta = loader.describe(PartKey("train", 0, 0, 0, 0))
        return set(loader.take([TakeRequest(meta.key, meta.pieces)]).tokens["input_ids"].values.tolist())
    finally:
        loader.shutdown()


def test_processes_are_as_many_as_asked_for_and_others(files):
    pids = pids_of(Source("web", files, transform=codes.where_it_runs, executor="processes", num_workers=2))
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "a worker outlived its loader"


def test_worker_processes_load_neither_torch_nor_ray():
    source = Source("web", [{"n": 1}], transform=codes.what_is_loaded, executor="processes", num_workers=1)
    pytest.importorskip("torch")
    assert pids_of(source) == {0}


def test_threads_need_code_that_draws_from_nothing_global():
    for setting in ("transform", "transform_batched"):
        with pytest.raises(
            ConfigError, match=r"'web': executor='threads' needs .*takes `rng`, or thread_safe=True: 'len'"
        ):
            Source("web", [], executor="threads", **{setting: len})
        Source("web", [], executor="threads", thread_safe=True, **{setting: len})
    Source("web", [], executor="threads", transform=codes.with_rng)
    with pytest.raises(ConfigError, match="num_workers must be a whole number of at least 1, not 0"):
        Source("web", [], num_workers=0)


def test_threads_run_at_once():
    barrier = threading.Barrier(2)

    def meets(sample):
        barrier.wait(20)
        return {"input_ids": [1]}

    # Two runs of a record each.
    data = [{"n": 0} for _ in range(2)]
    source = Source("web", data, transform=meets, thread_safe=True, executor="threads", num_workers=2)
    loader = loader_of(source, CollatedRows(1))
    maker = loader._makers["train", 0]
    block = RecordBlock(unit=0, row_start=0, num_rows=2, objects=data)
    runs = [Run(cut, 0) for cut in cut_block(block, 1)]
    assert len([result() for _, result in maker._executors.each(maker._work, runs)]) == 2
    loader.shutdown()


def test_few_runs_are_held_at_once():
    """Of the records to come no more is read than the workers are at, and one run each beside."""
    source = Source("web", [], transform=lambda sample: sample, thread_safe=True, executor="threads", num_workers=2)

    class Identity:
        def __call__(self, run):
            return run.epoch

    work, read = Identity(), []
    work.source = source

    def runs():
        for epoch in range(20):
            read.append(epoch)
            yield Run(RecordBlock(unit=0, row_start=0, num_rows=0, objects=[]), epoch)

    executors = Executors()
    for taken, (run, result) in enumerate(executors.each(work, runs())):
        assert result() == run.epoch == taken
        assert len(read) - taken <= 3
    assert len(read) == 20
    executors.close()


def test_a_worker_that_is_killed_is_replaced(tmp_path):
    data = [{"n": n, "flag": str(tmp_path / "flag")} for n in range(100)]
    source = Source("web", data, transform=codes.once_in_a_worker, executor="processes", num_workers=2, shuffle=False)
    loader = loader_of(source, PackedRows(64, 1))
    meta = loader.describe(PartKey("train", 0, 0, 0, 0))
    assert meta.kept.all()
    assert loader.take([TakeRequest(meta.key, meta.pieces)]).tokens["input_ids"].values.tolist() == list(range(1, 101))
    assert (tmp_path / "flag").exists()
    loader.shutdown()


@pytest.mark.watchdog(120)
def test_records_that_kill_every_worker_are_named():
    data = [{"n": n} for n in range(4)]
    source = Source("web", data, transform=codes.always_dies, executor="processes", num_workers=1, on_error="skip")
    loader = loader_of(source, PackedRows(64, 1))
    with pytest.raises(DataError, match=r"'web', unit 0, rows 0 to 3: 3 worker processes died .*exit code 7"):
        loader.describe(PartKey("train", 0, 0, 0, 0))
    loader.shutdown()


def test_an_exception_of_a_worker_comes_back_as_text():
    data = [{"n": n} for n in range(5)]
    for rows in (PackedRows(64, 1), CollatedRows(1)):
        source = Source("web", data, transform=codes.raises, executor="processes", num_workers=1, shuffle=False)
        loader = loader_of(source, rows)
        wanted = r"'web', <dataset>, unit 0, row 3: transform 'raises' failed: UnpicklableError: not this one"
        with pytest.raises(DataError, match=wanted) as info:
            loader.describe(PartKey("train", 0, 0, 0, 0))
        assert "in raises\n    raise UnpicklableError(" in str(info.value.__cause__)
        loader.shutdown()
    source = Source("web", data, transform=codes.raises, executor="processes", num_workers=1, on_error="skip")
    loader = loader_of(source, rows)
    assert np.count_nonzero(~loader.describe(PartKey("train", 0, 0, 0, 0)).kept) == 1
    loader.shutdown()


def test_errors_of_ours_keep_their_class_and_get_their_place():
    source = Source("web", [{"n": 1}], transform=codes.gives_a_list, executor="processes", num_workers=1)
    loader = loader_of(source, PackedRows(64, 1))
    with pytest.raises(DataError, match=r"source 'web', <dataset>, unit 0: .*gave a list for unit 0, row 0"):
        loader.describe(PartKey("train", 0, 0, 0, 0))
    loader.shutdown()


SCRIPT = """
import sys
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.rows import PackedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PartKey
from tests.loading import codes

source = Source("web", [{"n": 0, "flag": sys.argv[1]}], transform=codes.hangs, executor="processes", num_workers=1)
loaded = LoadedSource(source, build_manifest(source))
loader = SourceLoader({"train": [loaded]}, {"train": PackedRows(64, 1)}, 0, 8, 9, 9)
loader.describe(PartKey("train", 0, 0, 0, 0))
"""


@pytest.mark.watchdog(120)
def test_workers_end_with_a_loader_that_is_killed(tmp_path):
    root = Path(__file__).resolve().parents[2]
    flag = tmp_path / "pid"
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(flag)], cwd=root, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        deadline = time.monotonic() + 60
        while not flag.exists():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        worker = psutil.Process(int(flag.read_text()))
        assert worker.is_running()
    finally:
        parent.kill()
        parent.wait()
    assert not psutil.wait_procs([worker], timeout=20)[1], "the worker outlived its loader"


def test_what_goes_to_a_worker_has_no_secrets_and_no_files(files):
    source = Source("web", files, transform=codes.with_rng, executor="processes", storage_options={"key": "hush-hush"})
    loader = loader_of(Source("web", files, transform=codes.with_rng, executor="processes"), ROWS)
    work = loader._makers["train", 0]._work
    sent = pickle.dumps(type(work)(**{**vars(work), "source": source}).portable())
    assert b"hush-hush" not in sent
    assert b"a.parquet" not in sent


def test_an_untransformed_dataset_is_fetched_in_the_worker_processes():
    pids = pids_of(Source("web", codes.Fetched(), executor="processes", num_workers=1))
    assert len(pids) == 1
    assert os.getpid() not in pids


def runs_of(count):
    block = RecordBlock(unit=0, row_start=0, num_rows=count, objects=[{"n": n} for n in range(count)])
    return [Run(cut, 0) for cut in cut_block(block, 1)]


def process_work(transform=codes.where_it_runs):
    source = Source("web", [{"n": 1}], transform=transform, executor="processes", num_workers=3)
    loader = loader_of(source, CollatedRows(1))
    work = loader._makers["train", 0]._work
    loader.shutdown()
    return work


def test_idle_workers_that_are_killed_are_no_deaths_of_records(tmp_path):
    work, executors = process_work(), Executors()
    try:
        runs = runs_of(4)
        pool = executors.each(work, runs)
        assert len([result() for _, result in pool]) == 4
        workers = list(executors._processes._all)
        # As if there were three, each of which died with nothing to do.
        idle = executors._processes._idle
        while len(workers) < 3:
            workers.append(processes._Worker())
            executors._processes._all.add(workers[-1])
            idle.append(workers[-1])
        for worker in workers:
            worker._process.kill()
            worker._process.wait()
        assert len([result() for _, result in executors.each(work, runs[:1])]) == 1
        assert not executors._processes._all & set(workers)
    finally:
        executors.close()


def test_a_worker_that_is_gone_when_it_is_sent_to_is_no_death_of_records(monkeypatch):
    work, executors = process_work(), Executors()
    try:
        runs = runs_of(1)
        assert len([result() for _, result in executors.each(work, runs)]) == 1
        monkeypatch.setattr(processes, "_DEATHS", 1)
        (worker,) = executors._processes._all
        send = worker.send

        def dies(*message):
            worker._process.kill()
            worker._process.wait()
            send(*message)

        monkeypatch.setattr(worker, "send", dies)
        assert len([result() for _, result in executors.each(work, runs)]) == 1
    finally:
        executors.close()


def test_records_that_do_not_pickle_are_named():
    work, executors = process_work(), Executors()
    block = RecordBlock(unit=2, row_start=5, num_rows=1, objects=[{"n": lambda: None}])
    try:
        with pytest.raises(DataError, match=r"source 'web', unit 2, rows 5 to 5: the records cannot be sent .*pickle"):
            [result() for _, result in executors.each(work, [Run(block, 0)])]
    finally:
        executors.close()


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_what_is_closed_stays_closed(executor):
    source = Source("web", [], transform=codes.with_rng, executor=executor)
    work = process_work(codes.with_rng)
    work = type(work)(**{**work.__getstate__(), "source": source})
    executors = Executors()
    executors.close()
    with pytest.raises(RuntimeFailure, match="the loader is shut down"):
        list(executors.each(work, runs_of(1)))
    executors.close()
    threads = DaemonThreads("closed")
    threads.close()
    with pytest.raises(RuntimeFailure, match="the loader is shut down"):
        threads.submit(int)


def test_a_thread_that_takes_the_last_task_does_not_break_the_end():
    class Taken:
        """Says that it holds something when somebody has just taken it."""

        def __init__(self):
            self.put_last = []
            self.put = self.put_last.append

        def empty(self):
            return False

        def get_nowait(self):
            raise queue.Empty

    tasks = Taken()
    _end_threads(tasks)
    assert tasks.put_last == [None]


def small_part(transform):
    source = Source("web", [{"n": n} for n in range(600)], transform=transform, executor="processes", num_workers=1)
    loader = loader_of(source, PackedRows(64, 1))
    try:
        meta = loader.describe(PartKey("train", 0, 0, 0, 0))
        block = loader.take([TakeRequest(meta.key, meta.pieces)])
        return dict(zip(meta.pieces["row"].tolist(), block.tokens["input_ids"].values.tolist(), strict=True))
    finally:
        loader.shutdown()


def test_a_killed_worker_whose_children_live_on_is_replaced(tmp_path):
    """They would hold its end of the socket: the death would never be seen. They end with it, if a little later."""
    assert small_part(codes.ForksOnce(str(tmp_path))) == {n: n + 1 for n in range(600)}
    left = int((tmp_path / "left").read_text())
    try:
        psutil.Process(left).wait(20)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        psutil.Process(left).kill()
        raise


def test_a_child_that_comes_back_from_the_transform_does_not_answer_too():
    assert small_part(codes.forks_and_comes_back_twice) == {n: n + 1 for n in range(600)}


def test_a_worker_that_ends_by_itself_tells_its_exit_code():
    with pytest.raises(DataError, match=r"'web', .*rows 0 to 249: 3 worker processes died .* exit code 5"):
        small_part(codes.exits)


def test_an_interrupt_that_a_transform_raises_is_an_error_of_it():
    with pytest.raises(DataError, match=r"'web', .*KeyboardInterrupt: of its own"):
        small_part(codes.raises_an_interrupt)


def test_paths_that_are_no_text_do_not_keep_workers_from_starting(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("elsewhere")])
    assert len(small_part(codes.where_it_runs)) == 600


def test_what_was_cancelled_by_the_end_says_so():
    """A run that waits for a thread when the loader is shut down by another thread."""
    begun, go_on = threading.Event(), threading.Event()

    def waits(sample, rng):
        begun.set()
        go_on.wait(10)
        return {"input_ids": [1]}

    source = Source("web", [], transform=waits, executor="threads", num_workers=1)
    work = type(process_work(codes.with_rng))
    work = work(**{**process_work(codes.with_rng).__getstate__(), "source": source})
    executors = Executors()
    made = executors.each(work, runs_of(2))
    ended = threading.Thread(target=lambda: (begun.wait(10), executors.close(), go_on.set()))
    ended.start()
    _, first = next(made)
    first()
    with pytest.raises(RuntimeFailure, match="the loader is shut down"):
        [result() for _, result in made]
    ended.join()
