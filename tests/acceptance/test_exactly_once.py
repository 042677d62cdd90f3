"""Law 2: every sample of an epoch in one row, every token once, unless a policy dropped it and counted it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import DataError, EmptySourceError, LoaderConfig, PackedRows, PaddedRows, Source

from .conftest import SEQ_LEN
from .data import Corpus, make_corpus
from .harness import Step, World, check_steps, count_tokens, run_world

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


def config_for(corpus: Corpus, rows_per_step: int | None, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": corpus.sources(epochs=1),
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=64),
        "global_batch_size": rows_per_step,
        "seed": 11,
        "runtime": "local",
        "part_bytes": 20_000,
        "prefetch_steps": 4,
        "plan_window": 8,
    }
    return LoaderConfig(**(base | changes))


def pieces_of(corpus: Corpus, name: str, seq_len: int) -> int:
    """Pieces of one epoch of a source, cut at multiples of seq_len."""
    return int((-(-corpus.files[name].lengths // seq_len)).sum())


def delivered_pieces(steps: list[Step]) -> Counter[str]:
    pieces = [piece for step in steps for piece in step.pieces()]
    assert len(set(pieces)) == len(pieces), "a piece came twice"
    return Counter(piece[0] for piece in pieces)


def run_to_the_end(config: LoaderConfig, dp: int, accumulate: int | None = None) -> tuple[list[Step], dict[str, Any]]:
    with World(config, dp, accumulate) as world:
        steps = world.steps()
        state = world.state()
        assert world.step() is None, "it stays at its end"
    flags = [[mb.info.is_last_in_stream for mb in rank] for step in steps for rank in step.ranks]
    last = flags[-dp:]
    assert all(one[-1] for one in last), "the last microbatch says so on every rank"
    assert not any(flag for one in flags[:-dp] for flag in one)
    assert state["ended"] is True
    assert state["step"] == len(steps)
    return steps, state


@pytest.mark.parametrize("last_step", ["fill", "drop"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_a_whole_epoch(five: Corpus, dp: int, accumulate: int, last_step: str) -> None:
    config = config_for(five, 2 * dp * accumulate, last_step=last_step)
    steps, state = run_to_the_end(config, dp, accumulate)
    check_steps(five, steps, config)
    assert all(len(rank) == accumulate for step in steps for rank in step.ranks)

    delivered = delivered_pieces(steps)
    tokens = count_tokens(steps)
    assert max(tokens.values()) == 1, "a token came twice"
    all_pieces = {name: pieces_of(five, name, SEQ_LEN) for name in five.files}
    dropped = {name: dict(state["sources"][name]["dropped"]) for name in five.files}
    if last_step == "fill":
        assert dict(delivered) == all_pieces
        assert len(tokens) == five.num_tokens()
        assert not any(dropped.values()), dropped
        short = [len(step.rows) < 2 * dp * accumulate for step in steps]
        assert not any(short[:-1]), "only the last step has filler"
    else:
        assert all(len(step.rows) == 2 * dp * accumulate for step in steps), "no filler when dropping"
        counts = {name: delivered[name] + dropped[name].get("last_step", 0) for name in five.files}
        assert counts == all_pieces
        assert all(set(reasons) <= {"last_step"} for reasons in dropped.values())
        lost = sum(all_pieces.values()) - sum(delivered.values())
        assert lost < 2 * dp * accumulate * SEQ_LEN, "less than one step is dropped"


@pytest.mark.parametrize("last_step", ["fill", "drop"])
def test_the_tail_is_not_empty_in_these_tests(five: Corpus, last_step: str) -> None:
    """24 rows a step leave a tail, or the tests above show nothing of it."""
    steps, state = run_to_the_end(config_for(five, 24, last_step=last_step), 3)
    lost = sum(source["dropped"].get("last_step", 0) for source in state["sources"].values())
    assert (lost > 0) == (last_step == "drop")
    assert (len(steps[-1].rows) < 24) == (last_step == "fill")


def test_epochs_of_different_sources(five: Corpus) -> None:
    epochs = {"s1": 4, "s7": 3, "s100": 2, "s1000": 1, "s3001": 1}
    config = config_for(five, 8, sources=five.sources(epochs=epochs))
    steps, _ = run_to_the_end(config, 2)
    check_steps(five, steps, config)
    delivered_pieces(steps)
    tokens = count_tokens(steps)
    for name, times in epochs.items():
        assert {tokens[int(token)] for token in five.tokens(name)} == {times}, name
    assert len(tokens) == five.num_tokens()
    found = {name: {p[1] for step in steps for p in step.pieces() if p[0] == name} for name in epochs}
    assert found == {name: set(range(times)) for name, times in epochs.items()}


def test_pieces_of_a_split_sample_tile_it(five: Corpus) -> None:
    steps, _ = run_to_the_end(config_for(five, 8), 2)
    spans: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for step in steps:
        for piece in step.pieces():
            if piece[5] != -1:
                spans.setdefault(piece[:4], []).append(piece[4:])
    assert len(spans) == sum(int((files.lengths > SEQ_LEN).sum()) for files in five.files.values())
    for sample, found in spans.items():
        found.sort()
        assert found[0][0] == 0, sample
        assert len(found) > 1
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found)), (sample, found)


def test_ids_hold_each_record_once(five: Corpus) -> None:
    """Of JSONL the units are not known here, but (unit, row) must still name each record once."""
    steps, _ = run_to_the_end(config_for(five, 8), 2)
    for name, files in five.files.items():
        records = {piece[2:4] for step in steps for piece in step.pieces() if piece[0] == name}
        assert len(records) == len(files.starts)
        assert min(unit for unit, _ in records) >= 0


def test_rows_are_well_filled(five: Corpus) -> None:
    steps = run_world(config_for(five, 24), 3)
    rows = sum(len(step.rows) for step in steps[:-1])
    tokens = sum(count_tokens(steps[:-1]).values())
    assert tokens / (rows * SEQ_LEN) > 0.95


@pytest.mark.parametrize("dp", [1, 3])
def test_fewer_samples_than_one_step(tmp_path: Path, dp: int) -> None:
    corpus = make_corpus(tmp_path, {"tiny": 3}, seq_len=SEQ_LEN, longest=0.5)
    config = config_for(corpus, 2 * dp * 4)
    steps, _ = run_to_the_end(config, dp, 4)
    assert len(steps) == 1
    assert len(count_tokens(steps)) == corpus.num_tokens()


def test_a_stream_whose_only_step_is_dropped_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, {"tiny": 3}, seq_len=SEQ_LEN, longest=0.5)
    with (
        World(config_for(corpus, 16, last_step="drop"), 2) as world,
        pytest.raises(EmptySourceError, match="ends before its first step"),
    ):
        world.steps()


class TestOverlong:
    def test_truncate(self, mixed: Corpus) -> None:
        config = config_for(mixed, 8, sources=mixed.sources(overlong="truncate"))
        steps, state = run_to_the_end(config, 2)
        tokens = count_tokens(steps)
        assert max(tokens.values()) == 1
        for name, files in mixed.files.items():
            kept = {
                start + i for start, n in zip(files.starts, files.lengths, strict=True) for i in range(min(n, SEQ_LEN))
            }
            assert {t for t in tokens if mixed.locate(t)[0] == name} == kept
            assert state["sources"][name]["dropped"] == {"truncated": int((files.lengths > SEQ_LEN).sum())}

    def test_drop(self, mixed: Corpus) -> None:
        config = config_for(mixed, 8, sources=mixed.sources(overlong="drop"))
        steps, state = run_to_the_end(config, 2)
        delivered = delivered_pieces(steps)
        for name, files in mixed.files.items():
            too_long = int((files.lengths > SEQ_LEN).sum())
            dropped = state["sources"][name]["dropped"]
            assert sum(dropped.values()) == too_long
            assert len(dropped) == 1
            assert delivered[name] == len(files.starts) - too_long
        assert max(len(row) for step in steps for row in step.rows) > 1

    @pytest.mark.parametrize("rows", [PackedRows(SEQ_LEN, 2), PaddedRows(SEQ_LEN, 2)], ids=["packed", "padded"])
    def test_error_names_source_and_sample(self, mixed: Corpus, rows: Any) -> None:
        config = config_for(mixed, 8, rows=rows, sources=mixed.sources(overlong="error"))
        with pytest.raises(DataError, match=r"source '(web|code|books)'") as caught:
            run_world(config)
        assert str(SEQ_LEN) in str(caught.value)
        assert "overlong" in str(caught.value)


class TestTransforms:
    def test_filtered_samples_are_counted(self, mixed: Corpus) -> None:
        def keep_even(sample: dict[str, Any]) -> dict[str, Any] | None:
            return sample if len(sample["input_ids"]) % 2 == 0 else None

        config = config_for(mixed, 8, sources=mixed.sources(transform=keep_even))
        steps, state = run_to_the_end(config, 2)
        tokens = count_tokens(steps)
        expected = 0
        for name, files in mixed.files.items():
            odd = int((files.lengths % 2 == 1).sum())
            assert state["sources"][name]["dropped"] == {"filtered": odd}
            expected += int(files.lengths[files.lengths % 2 == 0].sum())
        assert len(tokens) == expected
        assert max(tokens.values()) == 1

    def test_transforms_get_a_generator_of_their_sample(self, mixed: Corpus) -> None:
        """Random transforms give the same tokens on any topology, prefetch and number of loaders."""

        def cut(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
            ids = sample["input_ids"]
            return {"input_ids": ids[: int(rng.integers(1, len(ids) + 1))]}

        sources = mixed.sources(transform=cut)
        alone = run_world(config_for(mixed, 12, sources=sources, prefetch_steps=0, plan_window=1))
        others = run_world(config_for(mixed, 12, sources=sources, num_loaders=2), dp=3)
        assert [step.rows for step in alone] == [step.rows for step in others]
        assert count_tokens(alone) == count_tokens(others)
        assert sum(count_tokens(alone).values()) < mixed.num_tokens()
        reseeded = run_world(config_for(mixed, 12, sources=sources, seed=12))
        assert count_tokens(alone) != count_tokens(reseeded)

    def test_global_generators_are_seeded_too(self, mixed: Corpus) -> None:
        import random

        def cut(sample: dict[str, Any]) -> dict[str, Any]:
            ids = sample["input_ids"]
            return {"input_ids": ids[: random.randint(1, len(ids))]}

        sources = mixed.sources(transform=cut)
        one = run_world(config_for(mixed, 8, sources=sources))
        random.seed(99)
        before = random.getstate()
        two = run_world(config_for(mixed, 8, sources=sources), dp=2)
        assert count_tokens(one) == count_tokens(two)
        assert random.getstate() == before, "the user's own generator is left alone"

    def test_errors_can_be_skipped_and_are_counted(self, mixed: Corpus) -> None:
        def fail_on_ones(sample: dict[str, Any]) -> dict[str, Any]:
            if len(sample["input_ids"]) % 5 == 1:
                raise KeyError("no such thing")
            return sample

        config = config_for(mixed, 8, sources=mixed.sources(transform=fail_on_ones, on_error="skip"))
        steps, state = run_to_the_end(config, 1)
        bad = {name: int((files.lengths % 5 == 1).sum()) for name, files in mixed.files.items()}
        dropped = {name: sum(state["sources"][name]["dropped"].values()) for name in mixed.files}
        assert dropped == bad
        expected = sum(int(files.lengths[files.lengths % 5 != 1].sum()) for files in mixed.files.values())
        assert len(count_tokens(steps)) == expected


class ListDataset:
    """A map-style dataset."""

    def __init__(self, count: int) -> None:
        self.samples = [{"input_ids": list(range(1 + 10 * i, 1 + 10 * i + 1 + i % 10))} for i in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def test_a_map_style_dataset(tmp_path: Path) -> None:
    dataset = ListDataset(57)
    source = Source("list", dataset, epochs=2, length=lambda sample: len(sample["input_ids"]))
    config = config_for_sources([source], 8)
    steps, _ = run_to_the_end(config, 2)
    expected = Counter({token: 2 for sample in dataset.samples for token in sample["input_ids"]})
    assert count_tokens(steps) == expected


def test_a_callable_that_returns_a_dataset() -> None:
    source = Source("made", lambda: ListDataset(23), epochs=1, length=lambda sample: len(sample["input_ids"]))
    steps, _ = run_to_the_end(config_for_sources([source], 8), 2)
    assert count_tokens(steps) == Counter({t: 1 for sample in ListDataset(23).samples for t in sample["input_ids"]})


def config_for_sources(sources: list[Source], rows_per_step: int) -> LoaderConfig:
    return LoaderConfig(
        sources=sources, rows=PackedRows(SEQ_LEN, 2, pack_ahead=16), global_batch_size=rows_per_step, runtime="local"
    )
