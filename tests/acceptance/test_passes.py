"""Passes: every trainer epoch gives every source once, and no source runs ahead into the next."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megascale_lightning import CollatedRows, EmptySourceError, LoaderConfig, PackedRows, PaddedRows, Source

from .conftest import SEQ_LEN
from .data import Corpus
from .harness import Step, World, check_steps, without_run

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

PACKED = PackedRows(SEQ_LEN, 2, pack_ahead=24)
PADDED = PaddedRows(SEQ_LEN, 2)


def config_for(corpus: Corpus, **changes: Any) -> LoaderConfig:
    """Three unequal sources, endless as declared; eight rows a step."""
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=None, weights={"web": 0.5, "code": 0.3, "books": 0.2}),
        "rows": PACKED,
        "global_batch_size": 8,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 1500,
        "plan_window": 4,
        "prefetch_steps": 2,
    }
    return LoaderConfig(**(base | changes))


def read_passes(config: LoaderConfig, count: int, dp: int = 1, **more: Any) -> list[list[Step]]:
    """The steps of so many passes, each of its own iterator."""
    with World(config, dp, passes=True, **more) as world:
        return passes_of(world, count)


def passes_of(world: World, count: int) -> list[list[Step]]:
    found = []
    for _ in range(count):
        found.append(world.steps())
        world.reiterate()
    return found


def tokens_of(steps: list[Step]) -> Counter[tuple[str, int, int, int]]:
    """How often each (source, unit, row, start) came."""
    return Counter((name, unit, row, start) for step in steps for name, _, unit, row, start, _ in step.pieces())


@pytest.mark.parametrize("rows", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("last_step", ["fill", "drop"])
@pytest.mark.parametrize("dp", [1, 2])
def test_each_pass_gives_each_piece_once(mixed: Corpus, rows: Any, last_step: Any, dp: int) -> None:
    config = config_for(mixed, rows=rows, last_step=last_step)
    with World(config, dp, passes=True) as world:
        passes = passes_of(world, 3)
        dropped = {name: dict(source["dropped"]) for name, source in world.state()["sources"].items()}
    check_steps(mixed, [step for steps in passes for step in steps], config)
    whole = tokens_of(read_passes(config_for(mixed, rows=rows, last_step="fill"), 1)[0])
    for number, steps in enumerate(passes):
        assert {piece[1] for step in steps for piece in step.pieces()} == {number}, "all samples are of this epoch"
        given = tokens_of(steps)
        assert set(given.values()) == {1}
        missing = len(whole) - len(given)
        assert missing == 0 if last_step == "fill" else missing < 8 * 40
        ends = [[mb.info.is_last_in_pass for mb in step.microbatches()] for step in steps]
        assert not any(map(any, ends[:-1]))
        assert [mb.info.is_last_in_pass for mb in steps[-1].ranks[0]][-1]
        assert not any(mb.info.is_last_in_stream for step in steps for mb in step.microbatches())
    lost = sum(count for counts in dropped.values() for count in counts.values())
    assert lost == 3 * len(whole) - sum(len(tokens_of(steps)) for steps in passes)
    assert [step.number for steps in passes for step in steps] == list(range(sum(map(len, passes))))


def test_the_order_depends_on_neither_ranks_nor_reach(mixed: Corpus) -> None:
    expected = [[(step.rows, step.certificate) for step in steps] for steps in read_passes(config_for(mixed), 2)]
    for changes, dp in (
        ({"plan_window": 1, "prefetch_steps": 0}, 1),
        ({"plan_window": 7, "prefetch_steps": 9}, 2),
        ({"num_loaders": 3}, 4),
    ):
        found = read_passes(config_for(mixed, **changes), 2, dp)
        assert [[(step.rows, step.certificate) for step in steps] for steps in found] == expected


def test_resumed_anywhere_it_goes_on(mixed: Corpus) -> None:
    """Also behind the last step of a pass: there the next one begins."""
    config = config_for(mixed)
    with World(config, keep_states=True, passes=True) as world:
        passes = passes_of(world, 3)
    steps = [step for one in passes for step in one]
    end = len(passes[0])
    for stop in (1, end // 2, end - 1, end, end + 1, 2 * end - 1, 2 * end):
        for dp in (1, 2):
            with World(config, dp, state=steps[stop - 1].state, passes=True) as world:
                found = world.steps()
                world.reiterate()
                rest = passes_of(world, 1)[0]
            last = next(index for index in range(stop, len(steps)) if ends_pass(steps[index]))
            expected = steps[stop : last + 1]
            assert [step.certificate for step in found] == [step.certificate for step in expected], f"after {stop}"
            following = steps[last + 1 : last + 1 + len(rest)]
            assert [step.certificate for step in rest][: len(following)] == [step.certificate for step in following]


def ends_pass(step: Step) -> bool:
    return bool(step.ranks[0][-1].info.is_last_in_pass)


def test_an_iterator_begun_in_the_middle_ends_with_its_pass(mixed: Corpus) -> None:
    with World(config_for(mixed), passes=True) as world:
        first = world.steps(5)
        world.reiterate()
        second = world.steps()
    whole = read_passes(config_for(mixed), 1)[0]
    assert [step.certificate for step in first + second] == [step.certificate for step in whole]


def test_a_source_of_weight_0_is_left_out(mixed: Corpus) -> None:
    sources = mixed.sources(epochs=None, weights={"web": 0.5, "code": 0.0, "books": 0.5})
    passes = read_passes(config_for(mixed, sources=sources), 2)
    for steps in passes:
        assert {piece[0] for step in steps for piece in step.pieces()} == {"web", "books"}


def test_the_state_says_the_pass(mixed: Corpus) -> None:
    with World(config_for(mixed), passes=True) as world:
        assert world.state()["pass"] == 0
        world.steps()
        state = world.state()
        assert (state["pass"], state["ended"], state["carry"]["count"]) == (1, False, 0)
        assert {source["epoch"] for source in state["sources"].values()} == {1}
        world.reiterate()
        world.steps(1)
        assert world.state()["pass"] == 1


def test_a_killed_planner_changes_nothing(mixed: Corpus) -> None:
    config = config_for(mixed)
    expected = [[step.certificate for step in steps] for steps in read_passes(config, 2)]
    with World(config, 2, passes=True) as world:
        runtime = world.loaders[0]._session._runtime
        found = []
        for steps in expected:
            own: list[str] = []
            for number in range(len(steps)):
                if number in (0, 3, len(steps) - 1):
                    runtime.kill("planner")
                step = world.step()
                assert step is not None
                own.append(step.certificate)
            assert world.step() is None
            world.reiterate()
            found.append(own)
    assert found == expected


def test_too_little_for_one_step_is_an_error_not_a_loop(tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 3)
    config = LoaderConfig(
        sources=[Source("a", str(tmp_path / "a.jsonl"))],
        rows=PaddedRows(8, 2),
        global_batch_size=8,
        last_step="drop",
        runtime="local",
    )
    with World(config, passes=True) as world, pytest.raises(EmptySourceError, match="fewer than the 8 rows"):
        world.steps()


def test_a_forced_change_to_passes_starts_with_the_epoch_that_is_behind(mixed: Corpus) -> None:
    config = config_for(mixed)
    with World(config, keep_states=True) as world:
        saved = world.steps(40)[-1].state
    assert saved is not None
    with World(config_for(mixed, force_resume=["passes"]), state=saved, passes=True) as world:
        assert world.state()["pass"] == min(source["epoch"] for source in saved["sources"].values())
        steps = world.steps()
        world.reiterate()
        following = world.steps()
    epoch = max(source["epoch"] for source in saved["sources"].values())
    assert steps
    assert all(ends_pass(one[-1]) for one in (steps, following))
    assert max(piece[1] for step in steps for piece in step.pieces()) <= epoch


class TestLength:
    """`len()` in passes: exact where it can be known before the data are read, else none."""

    DATA = [{"x": index} for index in range(13)]  # noqa: RUF012

    def config(self, **changes: Any) -> LoaderConfig:
        sources = [Source("a", self.DATA), Source("b", self.DATA[:4])]
        settings = {"sources": sources, "rows": CollatedRows(2), "global_batch_size": 4, "runtime": "local"}
        return LoaderConfig(**{**settings, **changes})

    @pytest.mark.parametrize(("last_step", "batches"), [("fill", 9), ("drop", 8)])
    def test_known(self, last_step: Any, batches: int) -> None:
        """17 samples: the last step has one microbatch, not two."""
        with World(self.config(last_step=last_step), passes=True) as world:
            assert [len(loader) for loader in world.loaders] == [batches]
            assert len(list(world.loaders[0])) == batches

    def test_not_known(self, mixed: Corpus) -> None:
        def drop(sample: Any) -> Any:
            return None if sample["x"] % 2 else sample

        for config in (config_for(mixed), self.config(sources=[Source("a", self.DATA, transform=drop)])):
            with World(config, passes=True) as world, pytest.raises(TypeError, match="steps_per_epoch"):
                len(world.loaders[0])

    def test_without_passes_there_is_none(self) -> None:
        with World(self.config()) as world, pytest.raises(TypeError, match="steps_per_epoch"):
            len(world.loaders[0])


def test_states_of_ranks_agree(mixed: Corpus) -> None:
    with World(config_for(mixed), 2, passes=True) as world:
        world.steps()
        states = [without_run(loader.state_dict()) for loader in world.loaders]
    assert states[0] == states[1]
