"""Which functions of a source can be sent to another process, and what is said of those that cannot."""

from __future__ import annotations

import functools
import sys
import threading
import types

import numpy as np
import pytest

from megascale_lightning import CollatedRows, ConfigError, LoaderConfig, MegaScaleDataModule, MegaScaleLoader, Source
from megascale_lightning.runtime.pickling import dump
from megascale_lightning.sources.portability import check_code

LOCK = threading.Lock()


def uses_a_lock(sample):
    with LOCK:
        return sample


def plain(sample):
    return np.asarray(sample), recursive(sample)


def recursive(sample):
    return plain(sample) if sample else None


class Holding:
    def __init__(self, value):
        self.value = value

    def __call__(self, sample):
        return sample


def generator():
    yield 1


def of_a_module_made_here():
    module = types.ModuleType("made_here_and_nowhere_else")
    exec("def function(sample): return sample", module.__dict__)
    sys.modules[module.__name__] = module
    return module.function


def by_value(function):
    """As if it was defined in the user's script."""
    function.__module__ = "__main__"
    return function


def script_function(held):
    def function(sample):
        return held

    return by_value(function)


@pytest.fixture
def opened(tmp_path):
    with open(tmp_path / "file", "w+") as file:
        yield file


GOOD = {
    "function": plain,
    "lambda": lambda sample: sample,
    "partial": functools.partial(plain, sample=1),
    "object": Holding(np.zeros(10)),
    "method": Holding(1).__call__,
    "builtin": len,
    "class": Holding,
    "of the script": script_function(np.arange(5)),
    "of a library": np.asarray,
}


@pytest.mark.parametrize("name", GOOD)
def test_what_travels_is_let_through_without_asking_ray(name):
    def refuse(value, file):
        pytest.fail("asked Ray's pickle")

    check_code(Source("web", [], transform=GOOD[name]), refuse, elsewhere=True)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda opened: Holding(threading.Lock()), "its attribute 'value', a lock, does not pickle"),
        (
            lambda opened: Holding({"a": [threading.Lock()]}),
            "its attribute 'value' > entry 'a' > item 0, a lock, does not",
        ),
        (lambda opened: Holding(generator()), "its attribute 'value', a generator, does not pickle"),
        (lambda opened: Holding(opened), "its attribute 'value', a TextIOWrapper, does not pickle"),
        (lambda opened: functools.partial(plain, x=LOCK), "its argument 'x', a lock, does not pickle"),
        (
            lambda opened: script_function(opened),
            "its variable 'held', a TextIOWrapper, does not pickle",
        ),
        (lambda opened: by_value(lambda sample: LOCK), "its global 'LOCK', a lock, does not pickle"),
        (lambda opened: Holding(np.zeros(20_000_000)), r"larger than 100 MB pickled \(its attribute 'value'\)"),
        (lambda opened: of_a_module_made_here(), "module 'made_here_and_nowhere_else' cannot be imported there"),
    ],
)
def test_what_does_not_is_named(opened, make, problem):
    for setting in ("transform", "transform_batched", "length"):
        source = Source("web", [], **{setting: make(opened)})
        with pytest.raises(
            ConfigError, match=rf"source 'web': {setting} .* another process, and .*{problem}.*runtime="
        ):
            check_code(source, dump, elsewhere=True)
        check_code(source, dump, elsewhere=False)


def test_a_lock_in_a_module_is_made_there_again():
    check_code(Source("web", [], transform=uses_a_lock), dump, elsewhere=True)


def test_worker_processes_need_it_too():
    held = Holding(LOCK)
    with pytest.raises(ConfigError, match=r"does not pickle .*, and executor='inline'"):
        check_code(Source("web", [], transform=held, executor="processes"), dump, elsewhere=False)


def test_it_is_said_where_the_loader_is_made_and_nothing_is_started(monkeypatch):
    from megascale_lightning.runtime.ray_session import RaySession

    monkeypatch.setattr(RaySession, "start", lambda *_: pytest.fail("started Ray"))
    source = Source("web", [{"n": 1}], transform=Holding(LOCK))
    with pytest.raises(ConfigError, match="source 'web': transform 'Holding' has to run in another process"):
        MegaScaleDataModule(val_sources=[source], rows=CollatedRows(1))
    with pytest.raises(ConfigError, match="its attribute 'value', a lock, does not pickle"):
        MegaScaleLoader(LoaderConfig(sources=[source], rows=CollatedRows(1)))
    MegaScaleDataModule(sources=[source], rows=CollatedRows(1), runtime="local")
