"""`WorkerProcesses`: runs the user's code in processes of its own, replaces those that die, and outlives none."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import pyarrow as pa

from megascale_lightning import errors
from megascale_lightning.errors import ConfigError, DataError, MegaScaleError, RuntimeFailure
from megascale_lightning.loading.executors import DaemonThreads
from megascale_lightning.loading.payload import pickled
from megascale_lightning.loading.runs import Run
from megascale_lightning.loading.transforms import RemoteError
from megascale_lightning.loading.works import Work
from megascale_lightning.sources.functions import function_name
from megascale_lightning.sources.records import RecordBlock

__all__ = ["WorkerProcesses", "packed_answer", "packed_run", "unpacked_run"]

_DEATHS: Final = 3
"""A run that so many processes die of is given up."""

_DYING_S: Final = 1.0
"""How long a process that let go of its socket may take to end with an exit code of its own."""

_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megascale_lightning.loading.workerprocess import main; main(*map(int, sys.argv[2:]))"
)


class WorkerProcesses:
    """As many processes as there are calls at once, each with modules and global states of its own. Thread-safe.

    They are started fresh, not forked, know nothing of Ray, and end with this process, whatever it dies of.

    Args:
        dumps: Pickles a `Work`, which may hold functions of the user's script.
    """

    def __init__(self, dumps: Callable[[Any], bytes]) -> None:
        self._dumps = dumps
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._works: dict[int, tuple[Work, bytes]] = {}
        # The kernel ends a process with the thread that started it: this one lives as long as we do.
        self._starter = DaemonThreads("megascale-start")
        self._end = weakref.finalize(self, _end_all, self._all, self._starter)

    def caller(self, work: Work) -> Callable[[Run], Any]:
        """What calls `work(run)` in one of the processes.

        Raises:
            ConfigError: The work does not pickle.
        """
        number = id(work)  # no other's, since the work is kept
        with self._lock:
            if number not in self._works:
                self._works[number] = work, _dumped(work, self._dumps)
            data = self._works[number][1]
        name = f"source {work.source.name!r}"
        return lambda run: self._call(number, data, name, run)

    def close(self) -> None:
        """Kill the processes."""
        self._end()

    def _call(self, number: int, work: bytes, name: str, run: Run) -> Any:
        block = run.block
        place = f"{name}, unit {block.unit}, rows {block.row_start} to {block.row_start + block.num_rows - 1}"
        try:
            payload = packed_run(run)
        except Exception as error:
            raise DataError(
                f"{place}: the records cannot be sent to a worker process ({type(error).__name__}: {error}); give "
                "records that pickle, or set executor='threads' or 'inline'"
            ) from error
        deaths = 0
        while deaths < _DEATHS:
            worker = self._take()
            is_sent = not worker.was_used  # one that dies as it starts counts: else there would be no end of them
            try:
                worker.send(number, work, payload)
                is_sent = True
                answer = worker.receive()
            except (EOFError, OSError):
                code = worker.end(_DYING_S)
                self._all.discard(worker)
                if not self._end.alive:
                    raise RuntimeFailure("the loader is shut down") from None
                deaths += is_sent
                continue
            with self._lock:
                self._idle.append(worker)
            return _opened(answer)
        raise DataError(
            f"{place}: {_DEATHS} worker processes died of these records, the last with exit code {code}: the "
            "transform ends its process, or there is too little memory for num_workers of them"
        )

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                idle = self._idle.pop()
                if not idle.has_ended:
                    return idle
                # Something killed it while it had nothing to do: no records are to blame.
                idle.end()
                self._all.discard(idle)
        worker: _Worker = self._starter.submit(_Worker).result()
        self._all.add(worker)
        if not self._end.alive:
            worker.end()
            raise RuntimeFailure("the loader is shut down")
        return worker


def _end_all(workers: set[_Worker], starter: DaemonThreads) -> None:
    for worker in list(workers):
        worker.end()
    workers.clear()
    starter.close()


class _Worker:
    """One process, asked by one thread at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # What the worker calls should not start threads on all cores again: the cores have a worker each.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
            environment.setdefault(name, "1")
        numbers = [theirs.fileno(), lifeline, os.getpid()]
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])  # python heeds no others
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, path, *map(str, numbers)],
                pass_fds=numbers[:2],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self._connection = Connection(ours.detach())
        self._known: set[int] = set()
        self._ended = threading.Lock()
        self.was_used = False
        """It has given an answer."""

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        with self._ended:
            return self._process.poll() is not None

    def send(self, number: int, work: bytes, payload: bytes) -> None:
        """Send a run, and the work if it does not have it yet."""
        is_new = number not in self._known
        self._connection.send_bytes(pickle.dumps((number, is_new)))
        if is_new:
            self._connection.send_bytes(work)
            self._known.add(number)
        self._connection.send_bytes(payload)

    def receive(self) -> bytes:
        """Wait for what came of the run."""
        answer = self._connection.recv_bytes()
        self.was_used = True
        return answer

    def end(self, patience_s: float = 0.0) -> int:
        """Kill it, unless it ends by itself until then, and give its exit code."""
        with self._ended:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            self._process.kill()
            code = self._process.wait()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            return code


def _dumped(work: Work, dumps: Callable[[Any], bytes]) -> bytes:
    source = work.source
    try:
        return dumps(work.portable())
    except Exception as error:
        what = source.transform or source.transform_batched
        raise ConfigError(
            f"source {source.name!r}: {f'transform {function_name(what)}' if what else 'the dataset'} cannot be sent "
            f"to a worker process ({type(error).__name__}: {error}); make what does not pickle inside it, or set "
            "executor='threads' or 'inline'"
        ) from error


def packed_run(run: Run) -> bytes:
    """A run for another process: its records, or where a dataset is read there, which they are."""
    block = run.block
    if block.lazy:
        records: Any = None
    elif block.table is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, block.table.schema) as writer:
            writer.write_table(block.table)
        records = sink.getvalue()
    else:
        assert block.objects is not None
        records = list(block.objects)
    indices = None if run.indices is None else list(run.indices)
    place = (block.unit, block.row_start, block.num_rows)
    failures = dict(block.failures), frozenset(block.unpaired)
    return pickle.dumps((place, records, failures, run.epoch, indices), 5)


def unpacked_run(data: bytes, work: Work) -> Run:
    """The run that `packed_run` made bytes of."""
    (unit, start, count), records, (failures, unpaired), epoch, indices = pickle.loads(data)
    if records is None:
        return Run(work.read(unit, start, start + count), epoch, indices)
    held: dict[str, Any] = {"objects": records}
    if not isinstance(records, list):
        held = {"table": pa.ipc.open_stream(records).read_all()}
    block = RecordBlock(unit=unit, row_start=start, num_rows=count, failures=failures, unpaired=unpaired, **held)
    return Run(block, epoch, indices)


def packed_answer(call: Callable[[], Any]) -> bytes:
    """What a call gives, or raises, as bytes: its exception as text, since it may not pickle, or not be known there."""
    try:
        return pickled((None, call()))
    except BaseException as error:  # also what the transform itself raises as a KeyboardInterrupt
        kind = type(error).__name__ if isinstance(error, MegaScaleError) else ""
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        return pickle.dumps(((kind, text, "".join(traceback.format_exception(error))), None))


def _opened(answer: bytes) -> Any:
    failure, found = pickle.loads(answer)
    if failure is None:
        return found
    kind, text, trace = failure
    raise getattr(errors, kind or "DataError")(text) from RemoteError(trace)
