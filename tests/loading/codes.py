"""Functions of a user, in a module that worker processes can import."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import numpy as np


def with_rng(sample, rng):
    return {"input_ids": rng.integers(0, 1 << 30, 1 + sample["n"] % 5), "score": float(rng.random())}


def with_globals(sample):
    drawn = [random.randrange(1 << 30), int(np.random.randint(1 << 30))]  # noqa: NPY002
    return {"input_ids": drawn * (1 + random.randrange(3)), "score": random.random()}


def batched_with_rng(columns, rng):
    n = len(columns["n"])
    return {"input_ids": rng.integers(0, 1 << 30, (n, 3)), "score": rng.random(n)}


def batched_with_globals(columns):
    return {
        "input_ids": [[random.randrange(1 << 30)] * (1 + random.randrange(3)) for _ in columns["n"]],
        "score": np.random.random(len(columns["n"])),  # noqa: NPY002
    }


class Drawing:
    """A dataset that draws."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"n": index, "input_ids": [index, random.randrange(1 << 30)], "score": random.random()}


class Fetched:
    """Items tell the process that fetched them."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"input_ids": [os.getpid()]}


def where_it_runs(sample):
    return {"input_ids": [os.getpid()]}


def what_is_loaded(sample):
    return {"input_ids": [int("torch" in sys.modules), int("ray" in sys.modules)]}


def once_in_a_worker(sample):
    """Kills its process at record 3, the first time."""
    if sample["n"] == 3 and not os.path.exists(sample["flag"]):
        open(sample["flag"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"input_ids": [sample["n"] + 1]}


def always_dies(sample):
    if sample["n"] == 3:
        os._exit(7)
    return {"input_ids": [1]}


class UnpicklableError(Exception):
    def __init__(self, text, lock):
        super().__init__(text)
        self.lock = lock


def raises(sample):
    if sample["n"] == 3:
        import threading

        raise UnpicklableError("not this one", threading.Lock())
    return {"input_ids": [sample["n"] + 1]}


def gives_a_list(sample):
    return [sample]


def hangs(sample):
    import time

    path = sample["flag"]
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)
    time.sleep(1000)


def unchanged(given):
    return given


class ForksOnce:
    """Leaves a process behind that knows of nothing, and dies, as one does that there is no memory for."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, sample):
        if sample["n"] == 3 and not os.path.exists(os.path.join(self.folder, "left")):
            left = os.fork()
            if not left:
                signal.pause()
            with open(os.path.join(self.folder, "left"), "w") as file:
                file.write(str(left))
            os.kill(os.getpid(), signal.SIGKILL)
        return {"input_ids": [sample["n"] + 1]}


def forks_and_comes_back_twice(sample):
    if sample["n"] == 3:
        os.fork()
    return {"input_ids": [sample["n"] + 1]}


def raises_an_interrupt(sample):
    raise KeyboardInterrupt("of its own")


def exits(sample):
    """As a process that still writes its core: what it held open is closed some time before it is gone."""
    os.closerange(3, 256)
    time.sleep(0.1)
    os._exit(5)
