"""Law 7: every buffer has a bound; a slow consumer stops the producers, never the reverse, and nothing locks up."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, PackedRows, PaddedRows
from megascale_lightning.constructing.constructor import DataConstructor
from megascale_lightning.types import NotYet

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Microbatch, World, check_steps, count_tokens, microbatch, run_world, watched

pytestmark = [
    pytest.mark.timeout(150, method="thread"),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

QUIET_S = 1.5
"""A rank that got nothing for so long is taken to be held back (it gets a step in a few milliseconds otherwise)."""


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=16),
        "global_batch_size": 8,
        "seed": 13,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 2000,
        "prefetch_steps": 2,
        "plan_window": 3,
    }
    return LoaderConfig(**(base | changes))


class Rank:
    """One rank on a thread of its own, which reports every step that it has."""

    def __init__(self, config: LoaderConfig, dp: int, rank: int, steps: int) -> None:
        self.loader = MegaScaleLoader(config, tree=ClientPlaceTree.from_sizes(dp=dp), rank=rank)
        self.seen: queue.Queue[int] = queue.Queue()
        self.errors: list[BaseException] = []
        self._iterator = iter(self.loader)
        self._steps = steps
        self._thread = threading.Thread(target=self._run, daemon=True)

    def step(self) -> list[Microbatch]:
        """Take one step on the calling thread."""
        got: list[Microbatch] = []
        while not got or not got[-1].info.is_last_in_step:
            got.append(microbatch(next(self._iterator)))
        return got

    def start(self) -> None:
        self._thread.start()

    def until_quiet(self) -> int:
        """The step after which nothing more comes (-1: none came)."""
        last = -1
        while True:
            try:
                last = self.seen.get(timeout=QUIET_S)
            except queue.Empty:
                return last

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def _run(self) -> None:
        try:
            for _ in range(self._steps):
                self.seen.put(self.step()[0].info.step)
        except BaseException as error:
            self.errors.append(error)


@pytest.mark.parametrize(("prefetch", "window"), [(0, 1), (2, 3), (4, 16)])
def test_a_client_that_stops_reading(mixed: Corpus, prefetch: int, window: int) -> None:
    """The other rank is held back at the bound, and goes on as soon as this one reads again."""

    def body() -> None:
        config = config_for(mixed, prefetch_steps=prefetch, plan_window=window)
        ahead, slow = Rank(config, 2, 0, 60), Rank(config, 2, 1, 60)
        for _ in range(3):
            ahead.step()
            slow.step()
        ahead.start()
        consumed = 2
        held = ahead.until_quiet()
        assert not ahead.errors, ahead.errors
        assert held <= consumed + 1 + prefetch + window - 1, f"rank 0 ran ahead to step {held}"
        for _ in range(8 + window):
            slow.step()
            consumed += 1
        further = ahead.until_quiet()
        assert further > held, "it goes on when the slow one reads"
        assert further <= consumed + 1 + prefetch + window - 1
        for _ in range(60 - 8 - window):
            slow.step()
        ahead.join()
        ahead.loader.close()
        slow.loader.close()

    watched(body, 90)


def test_a_rank_that_leaves_holds_nothing_back(mixed: Corpus) -> None:
    def body() -> None:
        config = config_for(mixed, prefetch_steps=0, plan_window=1)
        stays, leaves = Rank(config, 2, 0, 0), Rank(config, 2, 1, 0)
        for _ in range(3):
            stays.step()
            leaves.step()
        leaves.loader.close()
        assert [stays.step()[0].info.step for _ in range(20)] == list(range(3, 23))
        stays.loader.close()

    watched(body)


def test_a_place_that_nobody_opened_holds_nothing_back(mixed: Corpus) -> None:
    def body() -> list[int]:
        tree = ClientPlaceTree.from_sizes(dp=4)
        found = []
        with MegaScaleLoader(config_for(mixed, prefetch_steps=0, plan_window=1), tree=tree, rank=2) as loader:
            for batch in loader:
                found.append(batch["megascale"].step)
                if found[-1] == 20:
                    return found
        return found

    assert watched(body) == list(range(21))


def test_an_abandoned_iterator_holds_nothing_back(mixed: Corpus) -> None:
    """Lightning drops iterators without closing them; the read-ahead thread of each must end."""

    def body() -> None:
        with World(config_for(mixed, prefetch_steps=4), 2) as world:
            before = threading.active_count()
            for start in range(0, 20, 2):
                steps = world.steps(2)
                assert [step.number for step in steps] == [start, start + 1]
                world.reiterate()
            world.steps(1)
            assert threading.active_count() <= before + 2 * 4

    watched(body)


def test_three_streams_at_once(mixed: Corpus, with_fields: Corpus) -> None:
    """Interleaved, each gives what it gives alone; sources of the same name do not mix."""

    def body() -> None:
        config = config_for(mixed, val_sources={"a": with_fields.sources(epochs=1), "b": mixed.sources(epochs=1)})
        alone = {stream: run_world(config, 2, stream=stream, steps=25) for stream in ("train", "val/0", "val/1")}
        assert len(alone["val/0"]) > 10
        worlds = {stream: World(config, 2, stream=stream) for stream in alone}
        for index in range(25):
            for stream, world in worlds.items():
                step = world.step()
                if index >= len(alone[stream]):
                    assert step is None
                    continue
                assert step is not None
                assert step.rows == alone[stream][index].rows
                assert step.certificate == alone[stream][index].certificate
        for world in worlds.values():
            world.__exit__()

    watched(body, 90)


def test_three_streams_on_three_threads(mixed: Corpus) -> None:
    def body() -> None:
        config = config_for(mixed, val_sources={"a": mixed.sources(epochs=1), "b": mixed.sources(epochs=1)})
        alone = {stream: run_world(config, stream=stream, steps=30) for stream in ("train", "val/0", "val/1")}
        found: dict[str, Any] = {}

        def drive(stream: str) -> None:
            found[stream] = run_world(config, stream=stream, steps=30)

        threads = [threading.Thread(target=drive, args=(stream,), daemon=True) for stream in alone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {s: [step.rows for step in steps] for s, steps in found.items()} == {
            s: [step.rows for step in steps] for s, steps in alone.items()
        }

    watched(body, 90)


@pytest.mark.parametrize("bound", [1, 5000])
@pytest.mark.parametrize("dp", [1, 3])
def test_a_loader_bound_smaller_than_a_window(mixed: Corpus, bound: int, dp: int) -> None:
    """Slower, the same bytes."""

    def body() -> None:
        config = config_for(mixed, window_units=50, part_bytes=1500, prefetch_steps=4)
        expected = run_world(config, dp, steps=30)
        found = run_world(replace(config, loader_buffer_bytes=bound), dp, steps=30)
        assert [step.certificate for step in found] == [step.certificate for step in expected]
        check_steps(mixed, found, config)

    watched(body, 90)


def test_validation_every_ten_steps_with_two_loaders(mixed: Corpus, with_fields: Corpus) -> None:
    """Training reads ahead meanwhile; each validation gives every sample once, from the start, and moves nothing."""

    def body() -> None:
        config = config_for(
            mixed, prefetch_steps=6, val_sources={"a": with_fields.sources(epochs=1), "b": mixed.sources(epochs=1)}
        )
        expected = run_world(config, 2, steps=40)
        tree = ClientPlaceTree.from_sizes(dp=2)
        with World(config, 2) as world:
            val = {
                stream: [MegaScaleLoader(config, tree=tree, rank=rank, stream=stream) for rank in range(2)]
                for stream in ("val/0", "val/1")
            }
            passes: dict[str, list[Any]] = {"val/0": [], "val/1": []}
            for number in range(40):
                step = world.step()
                assert step is not None
                assert step.certificate == expected[number].certificate
                if number % 10 == 9:
                    before = world.state()
                    for stream, loaders in val.items():
                        passes[stream].append([[microbatch(batch) for batch in loader] for loader in loaders])
                    assert world.state() == before
            for stream, corpus in (("val/0", with_fields), ("val/1", mixed)):
                rows = [[mb.rows for rank in one for mb in rank] for one in passes[stream]]
                assert rows[0] == rows[1] == rows[2] == rows[3]
                lengths = [[len(rank) for rank in one] for one in passes[stream]]
                assert all(one[0] == one[1] for one in lengths)
                ids = {int(t) for rank in passes[stream][0] for mb in rank for t in mb.tensors["input_ids"].flatten()}
                assert len(ids - {0}) == corpus.num_tokens()
                infos = [mb.info for rank in passes[stream][0] for mb in rank]
                assert {info.microbatch for info in infos} == {0}, "accumulation is 1 in validation"
            for loaders in val.values():
                for loader in loaders:
                    loader.close()

    watched(body, 120)


def test_a_validation_that_is_broken_off(mixed: Corpus) -> None:
    """`limit_val_batches`: the next pass begins at the beginning, and training goes on."""

    def body() -> None:
        config = config_for(mixed, val_sources=mixed.sources(epochs=1))
        expected = run_world(config, 1, steps=12)
        with World(config) as world, MegaScaleLoader(config, stream="val/0") as val:
            first = []
            for number in range(12):
                step = world.step()
                assert step is not None
                assert step.certificate == expected[number].certificate
                first.append([microbatch(batch).rows for batch, _ in zip(val, range(3), strict=False)])
            assert all(one == first[0] for one in first)

    watched(body)


_FORK = """
import os, signal, sys
from megascale_lightning import ForkError, LoaderConfig, MegaScaleLoader, PackedRows, Source
source = Source("web", sys.argv[1])
config = LoaderConfig(sources=[source], rows=PackedRows(64, 2), global_batch_size=8, runtime=sys.argv[2])
with MegaScaleLoader(config) as loader:
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            for _ in range(100):
                next(iterator)
        except ForkError:
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    next(iterator)
print("status", status)
"""


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_an_open_iterator_in_a_forked_child(mixed: Corpus, runtime: str) -> None:
    """The thread that reads for it is not there: an error that says so, not a wait without end (status 14)."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK, mixed.files["web"].pattern, runtime],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "status 0" in done.stdout, done.stdout


def test_a_constructor_that_lags(mixed: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing yet whenever it is first asked for a window: everybody waits, and the same batches come."""
    config = config_for(mixed, plan_window=5)
    expected = run_world(config, 2, steps=20)
    fetch = DataConstructor.fetch
    asked: set[tuple[int, int]] = set()

    def late(self: DataConstructor, *args: Any) -> Any:
        _, _, group, _, first_step, _ = args
        if (group, first_step) not in asked:
            asked.add((group, first_step))
            return NotYet("it lags behind")
        return fetch(self, *args)

    monkeypatch.setattr(DataConstructor, "fetch", late)
    found = watched(lambda: run_world(replace(config), 2, steps=20))
    assert len(asked) >= 8
    assert [step.certificate for step in found] == [step.certificate for step in expected]
    assert [step.rows for step in found] == [step.rows for step in expected]


def test_two_jobs_of_one_config(mixed: Corpus) -> None:
    """The same places of the same stream, opened twice in one process, at different paces."""

    def body() -> None:
        config = config_for(mixed, prefetch_steps=0, plan_window=1)
        with World(config, 2) as one, World(config, 2) as two:
            slow, fast = one.steps(4), two.steps(12)
            slow += one.steps(8)
        assert [step.certificate for step in slow] == [step.certificate for step in fast]

    watched(body)


def test_what_roles_hold_does_not_grow(mixed: Corpus) -> None:
    """Numbers in the roles' own counters after 200 steps are those after 50, but for what counts events."""
    from megascale_lightning.client.session import LoadingSession

    def body() -> None:
        config = config_for(mixed, rows=PaddedRows(SEQ_LEN, 2), prefetch_steps=3, loader_buffer_bytes=20_000)
        session = LoadingSession(config)
        loader = MegaScaleLoader(config, session=session)
        iterator = iter(loader)
        held: list[dict[str, float]] = []
        for _ in range(200):
            for _ in range(loader.num_microbatches):
                next(iterator)
            held.append(_held_bytes(session.stats()))
        assert held[0], "the roles say what they hold"
        for name in held[0]:
            early = max(one.get(name, 0) for one in held[:60])
            late = max(one.get(name, 0) for one in held[60:])
            assert late <= 2 * early + 20_000, f"{name} grew from {early} to {late}"
        loader.close()
        session.close()

    watched(body)


def _held_bytes(stats: Any, path: str = "") -> dict[str, float]:
    """Every counter whose name ends in bytes and speaks of what is held now."""
    found: dict[str, float] = {}
    for key, value in stats.items():
        name = f"{path}/{key}"
        if isinstance(value, dict):
            found |= _held_bytes(value, name)
        elif "bytes" in str(key) and "read" not in str(key):
            found[name] = float(value)
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_a_client_that_stops_reading_on_ray(mixed: Corpus) -> None:
    def body() -> None:
        config = config_for(mixed, runtime="ray", num_loaders=2)
        ahead, slow = Rank(config, 2, 0, 30), Rank(config, 2, 1, 30)
        for _ in range(3):
            ahead.step()
            slow.step()
        ahead.start()
        held = ahead.until_quiet()
        assert held <= 2 + 1 + 2 + 3 - 1
        for _ in range(30):
            slow.step()
        ahead.join()
        ahead.loader.close()
        slow.loader.close()

    watched(body, 120)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_validation_while_training_reads_ahead_on_ray(mixed: Corpus, with_fields: Corpus) -> None:
    def body() -> None:
        config = config_for(
            mixed,
            runtime="ray",
            num_loaders=2,
            val_sources={"a": with_fields.sources(epochs=1), "b": mixed.sources(epochs=1)},
        )
        expected = run_world(replace(config, runtime="local"), 2, steps=20)
        with World(config, 2) as world:
            for number in range(20):
                step = world.step()
                assert step is not None
                assert step.certificate == expected[number].certificate
                if number % 10 == 9:
                    for stream, corpus in (("val/0", with_fields), ("val/1", mixed)):
                        tokens = count_tokens(run_world(config, 2, stream=stream))
                        assert set(tokens.values()) == {1}
                        assert len(tokens) == corpus.num_tokens()

    watched(body, 140)
