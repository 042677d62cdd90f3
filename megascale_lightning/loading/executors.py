"""`Executors`: where the user's code of a loader runs: in its thread, on threads beside it, or in processes."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from megascale_lightning.errors import RuntimeFailure
from megascale_lightning.loading.runs import Run
from megascale_lightning.loading.works import Work

if TYPE_CHECKING:
    from megascale_lightning.loading.processes import WorkerProcesses

__all__ = ["DaemonThreads", "Executors", "num_workers_of"]


class Executors:
    """The threads and processes that the sources of one loader share; they start when they are first needed.

    Safe to call from several threads.

    Args:
        dumps: Pickles the user's code for another process.
    """

    def __init__(self, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
        self._dumps = dumps
        self._lock = threading.Lock()
        self._closed = False
        self._threads: DaemonThreads | None = None
        self._processes: WorkerProcesses | None = None

    def each(self, work: Work, runs: Iterable[Run]) -> Iterator[tuple[Run, Callable[[], Any]]]:
        """Each run in order, with what gives what the work made of it, or raises what that raised.

        Of the runs to come, as many are held as there are workers.

        Raises:
            ConfigError: The work cannot be sent to another process.
            RuntimeFailure: They are closed.
        """
        self._check_open()
        source = work.source
        if source.executor == "inline":
            return ((run, partial(work, run)) for run in runs)
        workers = num_workers_of(source)
        call: Callable[[Run], Any] = work
        if source.executor == "processes":
            call = self._process_pool().caller(work)
        return _ordered(self._thread_pool(workers), call, runs, workers)

    def close(self) -> None:
        """End threads and processes; what they are at is not waited for."""
        with self._lock:
            self._closed = True
            if self._processes is not None:
                self._processes.close()
            if self._threads is not None:
                self._threads.close()
            self._processes = self._threads = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeFailure("the loader is shut down")

    def _thread_pool(self, workers: int) -> DaemonThreads:
        with self._lock:
            self._check_open()
            if self._threads is None:
                self._threads = DaemonThreads("megascale-transform")
            self._threads.reserve(workers)
            return self._threads

    def _process_pool(self) -> WorkerProcesses:
        from megascale_lightning.loading.processes import WorkerProcesses

        with self._lock:
            self._check_open()
            if self._processes is None:
                self._processes = WorkerProcesses(self._dumps)
            return self._processes


def num_workers_of(source: Any) -> int:
    """Threads or processes that a source may use at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(source.num_workers or cores)


def _ordered(
    threads: DaemonThreads, call: Callable[[Run], Any], runs: Iterable[Run], ahead: int
) -> Iterator[tuple[Run, Callable[[], Any]]]:
    waiting: deque[tuple[Run, Future[Any]]] = deque()
    try:
        for run in runs:
            waiting.append((run, threads.submit(call, run)))
            if len(waiting) > ahead:
                done, future = waiting.popleft()
                yield done, partial(_result_of, future)
        while waiting:
            done, future = waiting.popleft()
            yield done, partial(_result_of, future)
    finally:
        for _, future in waiting:
            future.cancel()


def _result_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except CancelledError:
        raise RuntimeFailure("the loader is shut down") from None


class DaemonThreads:
    """Threads, started as needed, that do not keep the process from ending: a transform may never come back.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._closed = False
        self._most = 1
        # The threads know the queue alone, so that a pool that is dropped ends them.
        self._end = weakref.finalize(self, _end_threads, self._queue)
        self._end.atexit = False

    def reserve(self, count: int) -> None:
        """Allow so many threads, or as many as were allowed before if those are more."""
        self._most = max(self._most, count)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call it on one of the threads."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeFailure("the loader is shut down")
            self._queue.put((future, call, args))
            if self._started < self._most:
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=_run_tasks, args=(self._queue,), name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """End the threads, each when it is done with its call; what was not begun is cancelled."""
        with self._lock:
            self._closed = True
        self._end()


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def _end_threads(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            break  # a thread may have taken the last one just now
        if task is not None:
            task[0].cancel()
    tasks.put(None)


def _run_tasks(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, call, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
        del task, future, call, args  # an idle thread must not keep samples alive
    tasks.put(None)  # for the next thread
