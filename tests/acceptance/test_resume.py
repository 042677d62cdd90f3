"""Law 3: the state is what was consumed, and every resume gives the rest of the undisturbed run, rows and tensors."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megascale_lightning import ClientPlaceTree, ConfigError, LoaderConfig, MegaScaleLoader, PackedRows, RoundRobin

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Step, World, check_steps, microbatch, run_world, same_tensors, without_run

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

STEPS = 30


def config_for(corpus: Corpus, epochs: int | None = None, **changes: Any) -> LoaderConfig:
    """Eight rows a step, two a microbatch."""
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=epochs, weights={"web": 0.15, "code": 0.35, "books": 0.5}),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=24),
        "global_batch_size": 8,
        "seed": 3,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 1500,
        "prefetch_steps": 2,
        "plan_window": 4,
    }
    return LoaderConfig(**(base | changes))


@pytest.fixture(scope="module")
def undisturbed(mixed: Corpus) -> tuple[dict[str, Any], list[Step]]:
    """The state before the first step, and 30 steps of two ranks that accumulate two microbatches."""
    with World(config_for(mixed), 2, keep_states=True) as world:
        start = world.state()
        steps = world.steps(STEPS)
    check_steps(mixed, steps, config_for(mixed))
    return start, steps


def state_after(undisturbed: tuple[dict[str, Any], list[Step]], count: int) -> dict[str, Any]:
    start, steps = undisturbed
    state = steps[count - 1].state if count else start
    assert state is not None
    return state


def assert_equal(found: list[Step], expected: list[Step], *, tensors: bool = True) -> None:
    assert [step.number for step in found] == [step.number for step in expected]
    for mine, its in zip(found, expected, strict=True):
        assert mine.rows == its.rows, f"step {its.number} has other rows"
        assert mine.certificate == its.certificate, f"step {its.number} has another certificate"
        if tensors:
            assert same_tensors(mine, its), f"step {its.number} has other tensors"
        if mine.state is not None and its.state is not None:
            assert without_run(mine.state) == without_run(its.state), f"the state after step {its.number} differs"


@pytest.mark.parametrize("count", range(STEPS + 1))
def test_resumed_and_resumed_again(mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]], count: int) -> None:
    """Other prefetch depths and plan windows than before, too."""
    _, steps = undisturbed
    config = config_for(mixed, prefetch_steps=(0, 1, 4)[count % 3], plan_window=(1, 3, 16)[count // 3 % 3])
    again = min(STEPS, count + 1 + count % 4)
    with World(config, 2, state=state_after(undisturbed, count), keep_states=True) as world:
        assert without_run(world.state()) == without_run(state_after(undisturbed, count)), (
            "what was loaded is what is saved"
        )
        first = world.steps(again - count)
        state = world.state()
    assert_equal(first, steps[count:again])
    with World(config, 2, state=state, keep_states=True) as world:
        assert_equal(world.steps(STEPS - again), steps[again:])


@pytest.mark.parametrize("count", [0, 1, 7, 29])
@pytest.mark.parametrize("taken", [1, 3])
def test_from_the_middle_of_accumulation(
    mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]], count: int, taken: int
) -> None:
    """Some microbatches of a step are no step: the whole step comes again."""
    _, steps = undisturbed
    with World(config_for(mixed), 1, 4, state=state_after(undisturbed, count)) as world:
        for index in range(taken):
            mb = world.pull(0)
            assert mb is not None
            assert (mb.info.step, mb.info.microbatch) == (count, index)
        state = world.state()
    assert without_run(state) == without_run(state_after(undisturbed, count))
    with World(config_for(mixed), 2, state=state) as world:
        assert_equal(world.steps(STEPS - count), steps[count:])


@pytest.mark.parametrize("count", [0, 1, 13, 29])
@pytest.mark.parametrize(("dp", "accumulate"), [(1, 4), (4, 1), (1, None), (3, None)])
def test_on_other_ranks_and_accumulation(
    mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]], count: int, dp: int, accumulate: int | None
) -> None:
    _, steps = undisturbed
    with World(config_for(mixed), dp, accumulate, state=state_after(undisturbed, count), keep_states=True) as world:
        found = world.steps(STEPS - count)
    assert_equal(found, steps[count:], tensors=False)


def test_a_chain_over_topologies(mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
    _, steps = undisturbed
    state: dict[str, Any] | None = None
    done = 0
    for dp, count, strategy in ((4, 5, None), (2, 3, RoundRobin()), (1, 6, None), (3, 4, None), (2, 12, None)):
        with World(config_for(mixed, strategy=strategy), dp, state=state, keep_states=True) as world:
            assert_equal(world.steps(count), steps[done : done + count], tensors=False)
            state = world.state()
        done += count
    assert done == STEPS


def test_what_is_read_ahead_is_not_in_the_state(mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
    """Deep read-ahead moves nothing that is saved."""
    with World(config_for(mixed, prefetch_steps=8, plan_window=16), 2, keep_states=True) as world:
        for step in world.steps(5):
            assert step.state is not None
            assert step.state["step"] == step.number + 1
            assert step.state["certificate"] == step.certificate
            assert without_run(step.state) == without_run(state_after(undisturbed, step.number + 1))


class TestState:
    def test_holds_plain_values_only(self, undisturbed: tuple[dict[str, Any], list[Step]], mixed: Corpus) -> None:
        with MegaScaleLoader(config_for(mixed)) as loader:
            _check_plain(loader.state_dict())
            iterator = iter(loader)
            for _ in range(10):
                next(iterator)
                _check_plain(loader.state_dict())
            state = loader.state_dict()
        assert json.loads(json.dumps(state)) == state
        file = io.BytesIO()
        torch.save({"state": state}, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == {"state": state}

    def test_has_the_documented_parts(self, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        state = state_after(undisturbed, 7)
        documented = {"version", "order_version", "run", "stream", "step", "ended", "sources", "carry", "certificate"}
        documented |= {"mixture", "fingerprint", "files"}
        assert documented <= state.keys(), documented - state.keys()
        assert state["stream"] == "train"
        assert state["step"] == 7
        assert state["ended"] is False
        assert set(state["sources"]) == {"web", "code", "books"}
        for source in state["sources"].values():
            assert {"epoch", "window", "part", "offset", "share", "given", "dropped"} <= source.keys()

    def test_is_a_copy(self, mixed: Corpus) -> None:
        with MegaScaleLoader(config_for(mixed)) as loader:
            iterator = iter(loader)
            for _ in range(4):
                next(iterator)
            state = loader.state_dict()
            frozen = json.dumps(state)
            state["sources"]["web"]["epoch"] = 77
            assert json.dumps(loader.state_dict()) == frozen
            state = loader.state_dict()
            for _ in range(8):
                next(iterator)
            assert json.dumps(state) == frozen

    def test_size_does_not_grow(self, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        sizes = [len(json.dumps(state_after(undisturbed, count))) for count in range(1, STEPS + 1)]
        assert max(sizes[20:]) < 2 * max(sizes[:10])

    def test_before_any_step_is_the_start(self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        _, steps = undisturbed
        start = state_after(undisturbed, 0)
        assert start["step"] == 0
        assert start["ended"] is False
        with World(config_for(mixed), 2, state=start) as world:
            assert_equal(world.steps(3), steps[:3])

    def test_needs_no_stream_to_be_open(self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        """A checkpoint that is loaded and saved again, without a batch between, loses nothing."""
        saved = state_after(undisturbed, 9)
        loader = MegaScaleLoader(config_for(mixed))
        loader.load_state_dict(saved)
        assert without_run(json.loads(json.dumps(loader.state_dict()))) == without_run(saved)
        assert loader.certificate == saved["certificate"]
        loader.close()
        assert without_run(json.loads(json.dumps(loader.state_dict()))) == without_run(saved), "also after close()"


class TestIter:
    def test_iter_moves_nothing(self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        _, steps = undisturbed
        with World(config_for(mixed), 2) as world:
            before = world.state()
            for _ in range(3):
                world.reiterate()
            assert world.state() == before
            assert_equal(world.steps(4), steps[:4])
            for _ in range(3):
                world.reiterate()
            assert_equal(world.steps(3), steps[4:7])

    def test_a_new_iterator_begins_with_the_unfinished_step(
        self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]
    ) -> None:
        _, steps = undisturbed
        with World(config_for(mixed), 2) as world:
            assert_equal(world.steps(2), steps[:2])
            first = [world.pull(rank) for rank in range(2)]
            assert [mb.info.microbatch for mb in first if mb] == [0, 0]
            world.reiterate()
            assert_equal(world.steps(3), steps[2:5])

    def test_for_loops_go_on_where_the_last_one_stopped(
        self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]
    ) -> None:
        seen = []
        with MegaScaleLoader(config_for(mixed)) as loader:
            for _ in range(3):
                for batch in loader:
                    seen.append((batch["megascale"].step, batch["megascale"].microbatch))
                    if batch["megascale"].is_last_in_step and batch["megascale"].step % 2:
                        break
        assert seen == [(step, microbatch) for step in range(6) for microbatch in range(4)]

    def test_loading_a_state_rewinds(self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        _, steps = undisturbed
        with World(config_for(mixed), 2) as world:
            world.steps(6)
            for loader in world.loaders:
                loader.load_state_dict(state_after(undisturbed, 2))
            world.reiterate()
            assert_equal(world.steps(3), steps[2:5])
            for loader in world.loaders:
                loader.load_state_dict(state_after(undisturbed, 20))
            world.reiterate()
            assert_equal(world.steps(3), steps[20:23])

    def test_a_state_loaded_after_iter_counts(
        self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]
    ) -> None:
        """Some strategies of Lightning load the state after `iter()`; the first `next()` opens the stream."""
        _, steps = undisturbed
        with World(config_for(mixed), 2) as world:
            for loader in world.loaders:
                loader.load_state_dict(state_after(undisturbed, 11))
            assert_equal(world.steps(3), steps[11:14])

    def test_last_info_is_that_of_the_last_batch(self, mixed: Corpus) -> None:
        with MegaScaleLoader(config_for(mixed)) as loader:
            for batch, _ in zip(loader, range(5), strict=False):
                assert loader.last_info is batch["megascale"]

    def test_marking_consumed_by_hand(self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
        """Where the trainer says what was consumed, what was handed out since is not in the state."""
        from megascale_lightning.client.session import LoadingSession

        session = LoadingSession(config_for(mixed))
        loader = MegaScaleLoader(session.config, session=session, auto_consume=False)
        iterator = iter(loader)
        infos = [next(iterator)["megascale"] for _ in range(9)]
        assert loader.state_dict()["step"] == 0
        for info in infos[:5]:
            loader.mark_consumed(info)
        assert loader.state_dict()["step"] == 1
        assert without_run(json.loads(json.dumps(loader.state_dict()))) == without_run(state_after(undisturbed, 1))
        for info in infos[5:8]:
            loader.mark_consumed(info)
        assert without_run(json.loads(json.dumps(loader.state_dict()))) == without_run(state_after(undisturbed, 2))
        loader.close()
        session.close()


class TestEnd:
    @pytest.mark.parametrize("dp", [1, 2])
    def test_the_last_state_says_so(self, mixed: Corpus, dp: int) -> None:
        config = config_for(mixed, epochs=1)
        with World(config, dp, keep_states=True) as world:
            steps = world.steps()
            end = world.state()
        assert end["ended"] is True
        assert [step.state["ended"] for step in steps if step.state] == [False] * (len(steps) - 1) + [True]
        with World(config, dp, state=end) as world:
            assert world.steps() == []
            assert world.state()["ended"] is True
            assert world.loaders[0].certificate == steps[-1].certificate

    def test_every_stop_of_a_finite_run(self, mixed: Corpus) -> None:
        config = config_for(mixed, epochs=1)
        with World(config, 2, keep_states=True) as world:
            steps = world.steps()
        for count in range(1, len(steps), 5):
            state = steps[count - 1].state
            assert_equal(run_world(config, 2, state=state, keep_states=True), steps[count:])

    def test_iterating_past_the_end_gives_nothing(self, mixed: Corpus) -> None:
        with MegaScaleLoader(config_for(mixed, epochs=1)) as loader:
            assert len(list(loader)) > 0
            assert list(loader) == []
            iterator = iter(loader)
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(iterator)


class TestLen:
    def test_unsized(self, mixed: Corpus) -> None:
        with MegaScaleLoader(config_for(mixed)) as loader, pytest.raises(TypeError):
            len(loader)

    @pytest.mark.parametrize(("dp", "microbatches"), [(1, 4), (2, 2), (3, 2), (4, 1)])
    def test_steps_per_epoch(
        self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]], dp: int, microbatches: int
    ) -> None:
        tree = ClientPlaceTree.from_sizes(dp=dp)
        for rank in range(dp):
            with MegaScaleLoader(config_for(mixed, steps_per_epoch=7), tree=tree, rank=rank) as loader:
                assert len(loader) == 7 * microbatches == 7 * loader.num_microbatches
                loader.load_state_dict(state_after(undisturbed, 3))
                assert len(loader) == 7 * microbatches, "never what is left"

    def test_an_iterator_ends_with_its_epoch(
        self, mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]
    ) -> None:
        """A loop gives what is left of an epoch, the next one the next; an epoch that is done gives no empty loop."""

        def steps_of(loader: MegaScaleLoader) -> list[int]:
            return [batch["megascale"].step for batch in loader if batch["megascale"].is_last_in_step]

        config = config_for(mixed, steps_per_epoch=7)
        with MegaScaleLoader(config) as loader:
            assert steps_of(loader) == list(range(7))
            assert steps_of(loader) == list(range(7, 14))
        for count, first in ((3, [3, 4, 5, 6]), (7, list(range(7, 14))), (13, [13])):
            with MegaScaleLoader(config) as loader:
                loader.load_state_dict(state_after(undisturbed, count))
                assert steps_of(loader) == first
                assert steps_of(loader) == list(range(first[-1] + 1, first[-1] + 8))


def test_the_state_moves_at_the_last_microbatch(mixed: Corpus) -> None:
    with MegaScaleLoader(config_for(mixed)) as loader:
        for batch in loader:
            info = microbatch(batch).info
            assert loader.state_dict()["step"] == info.step + int(info.is_last_in_step)
            if info.step == 3:
                break


def _check_plain(value: Any, path: str = "state") -> None:
    if type(value) is dict:
        for key, inner in value.items():
            assert type(key) is str, f"{path} has the key {key!r}"
            _check_plain(inner, f"{path}.{key}")
    elif type(value) is list:
        for index, inner in enumerate(value):
            _check_plain(inner, f"{path}[{index}]")
    else:
        assert value is None or type(value) in (str, int, float, bool), f"{path} is a {type(value)}"


@pytest.mark.parametrize(
    ("changes", "force"),
    [
        ({"seed": 4}, "seed"),
        ({"window_units": 3}, "window_units"),
        ({"part_bytes": 700}, "part_bytes"),
        ({"rows": PackedRows(SEQ_LEN // 2, 2, pack_ahead=24)}, "rows"),
        ({"rows": PackedRows(SEQ_LEN * 2, 2, pack_ahead=24)}, "rows.seq_len"),
        ({"global_batch_size": 4}, "global_batch_size"),
    ],
)
def test_forced_over_other_settings(
    mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]], changes: dict[str, Any], force: str
) -> None:
    """What a saved position means no more is begun anew, what was carried of it is dropped and counted; it goes on."""
    config = config_for(mixed, force_resume=[force], **changes)
    with World(config, state=state_after(undisturbed, 7), keep_states=True) as world:
        begun = world.state()
        assert begun["step"] == 7
        steps = world.steps(20)
    check_steps(mixed, steps, config)
    assert [step.number for step in steps] == list(range(7, 27))
    carried = state_after(undisturbed, 7)["carry"]["count"]
    dropped = sum(source["dropped"].get("forced_resume", 0) for source in begun["sources"].values())
    assert dropped == (0 if force == "global_batch_size" else carried)


def test_a_forced_change_of_one_source_leaves_the_others_where_they_are(
    mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]
) -> None:
    config = config_for(mixed, force_resume=["sources.web"])
    sources = [replace(source, shuffle=source.name != "web") for source in config.sources]
    config = replace(config, sources=sources)
    saved = state_after(undisturbed, 7)
    with World(config, state=saved) as world:
        begun = world.state()["sources"]
        world.steps(5)
    assert begun["web"]["offset"] == begun["web"]["window"] == 0
    assert begun["web"]["epoch"] == saved["sources"]["web"]["epoch"]
    assert {**begun, "web": None} == {**saved["sources"], "web": None}


def test_forcing_what_is_no_setting_is_refused(mixed: Corpus, undisturbed: tuple[dict[str, Any], list[Step]]) -> None:
    config = config_for(mixed, seed=4, force_resume=["sed"])
    with pytest.raises(ConfigError, match="sed"), World(config, state=state_after(undisturbed, 7)):
        pass
