"""Cases that users of other loaders reported: each docstring says what goes wrong there, the test what happens here.

docs/guarantees.md lists the reports, these tests, and the tests elsewhere that hold the rest of them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    ClientPlaceTree,
    CollatedRows,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    PaddedRows,
    Source,
)
from megascale_lightning.sources import build_manifest

from .data import Corpus, make_corpus
from .harness import Step, World, check_steps, count_tokens, documents, run_world

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


def config_for(sources: list[Source], rows: Any, size: int, **more: Any) -> LoaderConfig:
    return LoaderConfig(**{"sources": sources, "rows": rows, "global_batch_size": size, "runtime": "local", **more})


def short_corpus(root: Path, counts: dict[str, int], length: int = 3, **more: Any) -> Corpus:
    """Samples of equal length."""
    lengths = {name: [length] * count for name, count in counts.items()}
    return make_corpus(root, counts, seq_len=64, lengths=lengths, **more)


def samples_of(steps: list[Step]) -> Counter[tuple[Any, ...]]:
    """How often each (source, epoch, unit, row) came."""
    return Counter(piece[:4] for step in steps for piece in step.pieces())


class TestResume:
    def test_saving_at_once_after_a_resume_forgets_nobody(self, tmp_path: Path) -> None:
        """A state asked for before all workers have answered lacks some of them."""
        corpus = make_corpus(tmp_path, {f"s{n}": 20 + n for n in range(6)}, seq_len=32)
        config = config_for(corpus.sources(epochs=None), PackedRows(32, 2), 4, num_loaders=4, part_bytes=700)
        whole = [step.certificate for step in run_world(config, 2, steps=10)]
        state, found = None, []
        for count in (3, 0, 1, 0, 2, 4):
            with World(config, 2, state=state) as world:
                found += [step.certificate for step in world.steps(count)]
                state = world.state()
            assert set(state["sources"]) == set(corpus.files)
        assert found == whole

    def test_the_position_counts_samples_not_rows(self, tmp_path: Path) -> None:
        """The number of packed rows is taken for that of samples, so that a resume repeats two thirds of them."""
        corpus = short_corpus(tmp_path, {"a": 90}, 8)
        config = config_for(corpus.sources(epochs=1), PackedRows(24, 2, pack_ahead=0), 2)
        with World(config) as world:
            first = world.steps(5)
            state = world.state()
        assert sum(samples_of(first).values()) == 30
        assert state["sources"]["a"]["given"] == 30 + state["carry"]["count"]
        rest = run_world(config, 2, state=state)
        assert set(samples_of(first + rest).values()) == {1}
        assert len(samples_of(rest)) == 60

    def test_resume_in_a_later_epoch_of_repeated_sources(self, tmp_path: Path) -> None:
        """A source that is gone through several times can be resumed in its first epoch only."""
        corpus = make_corpus(tmp_path, {"a": 14, "b": 23}, seq_len=32)
        config = config_for(corpus.sources(epochs={"a": 3, "b": 2}), PackedRows(32, 1), 2, part_bytes=400)
        with World(config, keep_states=True) as world:
            whole = world.steps()
        later = [step for step in whole[:-1] if min(s["epoch"] for s in step.state["sources"].values()) >= 1]  # type: ignore[index]
        assert len(later) > 3
        for step in later:
            rest = run_world(config, 2, state=step.state)
            assert [s.certificate for s in rest] == [s.certificate for s in whole[step.number + 1 :]]


class TestSharding:
    def test_four_ranks_share_eight_files(self, tmp_path: Path) -> None:
        """Files dealt out by rank and mixed afterwards come to several ranks, or each loader process repeats them."""
        corpus = short_corpus(tmp_path, {"a": 400, "b": 400}, formats=("parquet",), num_files=4)
        config = config_for(corpus.sources(epochs=1), PaddedRows(8, 4), 16, num_loaders=3)
        by_rank: list[set[Any]] = [set() for _ in range(4)]
        steps = run_world(config, 4)
        for step in steps:
            for rank, microbatches in enumerate(step.ranks):
                by_rank[rank] |= {piece[:4] for mb in microbatches for row in mb.rows for piece in row}
        assert sum(map(len, by_rank)) == len(set().union(*by_rank)) == 800
        assert set(samples_of(steps).values()) == {1}

    def test_every_rank_has_the_steps_that_the_samples_make(self, tmp_path: Path) -> None:
        """An iterable is not divided among ranks and workers: each of them goes through all of it."""
        corpus = short_corpus(tmp_path, {"a": 2000}, 1)
        config = config_for(corpus.sources(epochs=1), PaddedRows(4, 32), 64, num_loaders=4)
        steps = run_world(config, 2)
        assert len(steps) == 32  # 2000 / 64, rounded up
        assert all(len(rank) == 1 for step in steps for rank in step.ranks)
        assert len(samples_of(steps)) == 2000

    def test_ranks_that_split_a_model_get_one_batch(self, tmp_path: Path) -> None:
        """Ranks of one data-parallel group read different data, or get None."""
        corpus = short_corpus(tmp_path, {"a": 60})
        config = config_for(corpus.sources(epochs=1), PaddedRows(8, 3), 6)
        tree = ClientPlaceTree.from_sizes(dp=2, tp=2)
        loaders = [MegaScaleLoader(config, tree=tree, rank=rank) for rank in range(4)]
        seen = []
        for batches in zip(*loaders, strict=True):
            ids = [batch["megascale"].sample_ids() for batch in batches]
            tokens = [batch["input_ids"].tolist() for batch in batches]
            assert (ids[0], tokens[0]) == (ids[1], tokens[1])
            assert (ids[2], tokens[2]) == (ids[3], tokens[3])
            seen += [piece[:4] for rank in (0, 2) for row in ids[rank] for piece in row]
        for loader in reversed(loaders):
            loader.close()
        assert len(seen) == len(set(seen)) == 60

    def test_many_shards_with_a_source_that_is_switched_off(self, tmp_path: Path) -> None:
        """Mixing undoes the shuffle, and more workers than shards of a source begin some of them twice."""
        corpus = short_corpus(tmp_path, {"on": 200, "off": 50}, formats=("jsonl",), num_files=25)
        sources = corpus.sources(epochs=None, weights={"on": 1.0, "off": 0.0})
        steps = run_world(config_for(sources, PaddedRows(8, 4), 4, num_loaders=8), steps=50)
        order = [piece for step in steps for mb in step.microbatches() for row in mb.rows for piece in row]
        assert {piece[0] for piece in order} == {"on"}
        assert len({piece[2:4] for piece in order}) == 200, "nothing twice before all were there"
        places = [piece[2:4] for piece in order]
        in_turn = sum(after == (before[0], before[1] + 1) for before, after in itertools.pairwise(places))
        assert in_turn < 60, "the neighbours of a file are apart"


class TestMixing:
    def test_unequal_sources_without_weights(self, tmp_path: Path) -> None:
        """Shares are neither those of sizes nor of weights: here those of a pass are, and of an endless mixture."""
        corpus = short_corpus(tmp_path, {"small": 40, "large": 120})
        config = config_for(corpus.sources(epochs=None), PaddedRows(8, 4), 4)
        with World(config, passes=True) as world:
            drawn = Counter(piece[0] for step in world.steps() for piece in step.pieces())
        assert drawn == {"small": 40, "large": 120}
        drawn = Counter(piece[0] for step in run_world(config, steps=30) for piece in step.pieces())
        assert drawn == {"small": 60, "large": 60}

    def test_weight_zero_and_every_source_to_its_end(self, tmp_path: Path) -> None:
        """A run until all sources have ended never ends, since one that is never drawn does not."""
        corpus = short_corpus(tmp_path, {"on": 21, "off": 9})
        sources = corpus.sources(epochs={"on": 2, "off": 1}, weights={"on": 1.0, "off": 0.0})
        steps = run_world(config_for(sources, PaddedRows(8, 2), 4), 2)
        assert len(samples_of(steps)) == 42
        assert steps[-1].ranks[0][-1].info.is_last_in_stream


class TestUnevenRanks:
    def test_206_samples_on_four_ranks(self, tmp_path: Path) -> None:
        """A batch that the ranks do not divide is an assertion."""
        corpus = make_corpus(tmp_path, {"a": 206}, seq_len=16, longest=1.0)
        (step,) = run_world(config_for(corpus.sources(epochs=1), PaddedRows(16, 1), 208), 4)
        real = [sum(bool(row) for mb in rank for row in mb.rows) for rank in step.ranks]
        assert sorted(real) == [51, 51, 52, 52]
        assert [len(rank) for rank in step.ranks] == [52] * 4

    def test_samples_of_unlike_length_on_two_ranks(self, tmp_path: Path) -> None:
        """Batches of the ranks are joined and cut, which fails, or leaves a rank without rows."""
        corpus = make_corpus(tmp_path, {"a": 2}, seq_len=16, lengths={"a": [5, 9]})
        config = config_for(corpus.sources(epochs=1), PaddedRows(16, 1), 2)
        (step,) = run_world(config, 2)
        assert sorted(rank[0].tensors["input_ids"].shape[1] for rank in step.ranks) == [5, 9]
        check_steps(corpus, [step], config)

    def test_a_hundred_rows_in_batches_of_four(self, tmp_path: Path) -> None:
        """Each worker ends with a batch of its own that is not full."""
        corpus = short_corpus(tmp_path, {"a": 100})
        steps = run_world(config_for(corpus.sources(epochs=1), PaddedRows(8, 4), 4, num_loaders=4))
        assert [len(step.rows) for step in steps] == [4] * 25

    def test_ranks_do_not_leave_a_short_row_each(self, tmp_path: Path) -> None:
        """Every process packs its own share, and ends with a row that is half empty."""
        corpus = make_corpus(tmp_path, {"a": 900}, seq_len=64, longest=0.9)
        sources = corpus.sources(epochs=1)
        counts = []
        for dp, loaders in ((1, 1), (4, 3)):
            config = config_for(sources, PackedRows(64, 2), 8, num_loaders=loaders)
            steps = run_world(config, dp)
            fills = [sum(len(d) for d in row) for row in rows_of_tokens(steps)]
            assert sum(fills) == corpus.num_tokens()
            assert sum(fill < 58 for fill in fills) <= 1
            counts.append(len(fills))
        assert counts[0] == counts[1] <= -(-corpus.num_tokens() // 64) * 1.02


def rows_of_tokens(steps: list[Step]) -> Iterator[list[np.ndarray]]:
    """The documents of each real row."""
    for step in steps:
        for mb in step.microbatches():
            yield from (documents(mb, row) for row, pieces in enumerate(mb.rows) if pieces)


class Endless:
    """A dataset of so many records that no list of their numbers fits."""

    def __len__(self) -> int:
        return 20_000_000

    def __getitem__(self, index: int) -> int:
        return index


class TestMemory:
    def test_the_order_of_a_huge_dataset(self) -> None:
        """The order of an epoch is written out, a number for each sample."""
        config = config_for([Source("all", Endless())], CollatedRows(8), 8)
        tracemalloc.start()
        try:
            with MegaScaleLoader(config) as loader:
                found = [int(i) for batch, _ in zip(loader, range(20), strict=False) for i in batch]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(set(found)) == 160
        assert max(found) - min(found) > 1024, "shuffled, by more than a unit"
        assert peak < 15 << 20, "a byte for each record would be 19 MiB"

    def test_memory_does_not_grow_with_the_files_read(self, tmp_path: Path) -> None:
        """Something of every file that was read is kept."""
        rows = pa.array([list(range(1, 6001))] * 4, pa.list_(pa.int32()))
        for number in range(120):
            pq.write_table(pa.table({"input_ids": rows}), tmp_path / f"{number:03d}.parquet")
        source = Source("a", str(tmp_path / "*.parquet"), epochs=1)
        # A step is a file; a loader may hold two of them beyond what is due.
        config = config_for(
            [source], PackedRows(6000, 4), 4, loader_buffer_bytes=200_000, prefetch_steps=1, plan_window=1
        )
        held = []
        tracemalloc.start()
        try:
            with World(config) as world:
                while world.step() is not None:
                    held.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())
        finally:
            tracemalloc.stop()
        assert len(held) == 120
        early, late = max(held[10:40]), max(held[90:])
        assert late < early + 2_000_000, "eighty files more take 7 MB at least"

    def test_the_list_of_many_files_is_small(self, tmp_path: Path) -> None:
        """The footers of all files are kept, each as large as its columns are many."""
        columns = {f"column-{number}": [1.0] for number in range(60)}
        pq.write_table(pa.table({"input_ids": [[1, 2, 3]], **columns}), tmp_path / "0.parquet")
        data = (tmp_path / "0.parquet").read_bytes()
        for number in range(1, 300):
            (tmp_path / f"{number}.parquet").write_bytes(data)
        tracemalloc.start()
        before_arrow = pa.total_allocated_bytes()
        try:
            manifest = build_manifest(Source("a", str(tmp_path / "*.parquet")))
            held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before_arrow
        finally:
            tracemalloc.stop()
        assert len(manifest.files) == manifest.num_units == 300
        assert held < 300 * 1500

    def test_threads_do_not_grow_with_the_sources(self, tmp_path: Path) -> None:
        """Every source has pools of its own in every worker."""
        counts = []
        for number in (2, 35):
            corpus = short_corpus(tmp_path / str(number), {f"s{i}": 6 for i in range(number)}, num_files=2)
            before = threading.active_count()
            with World(config_for(corpus.sources(epochs=None), PaddedRows(8, 4), 8, num_loaders=8)) as world:
                world.steps(10)
                counts.append(threading.active_count() - before)
        assert counts[1] <= counts[0] + 8, "one for each loader, if any"


class TestFiles:
    def test_lines_that_lack_some_keys(self, tmp_path: Path) -> None:
        """The keys of the first lines are demanded of all."""
        lines = [{"input_ids": [n, n]} | ({"note": "x"} if n % 3 else {}) for n in range(1, 30)]
        lines[7]["rare"] = 7
        random.Random(1).shuffle(lines)
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

        def noted(sample: dict[str, Any]) -> dict[str, Any]:
            return {"input_ids": [*sample["input_ids"], 100 if sample.get("note") else 200]}

        for transform, extra in ((None, {}), (noted, {100: 20, 200: 9})):
            source = Source("a", str(tmp_path / "a.jsonl"), epochs=1, transform=transform)
            tokens = count_tokens(run_world(config_for([source], PaddedRows(8, 4), 4)))
            assert tokens == Counter(dict.fromkeys(range(1, 30), 2) | extra)

    def test_every_kind_of_list_in_one_mixture(self, tmp_path: Path) -> None:
        """Sources whose tokens are list and large_list columns cannot be mixed."""
        kinds = {
            "list": pa.list_(pa.int32()),
            "large": pa.large_list(pa.int64()),
            "fixed": pa.list_(pa.uint16(), 3),
            "narrow": pa.list_(pa.int16()),
        }
        sources = []
        for place, (name, kind) in enumerate(kinds.items()):
            rows = [[100 * place + 10 * row + i + 1 for i in range(3)] for row in range(9)]
            pq.write_table(pa.table({"input_ids": pa.array(rows, kind)}), tmp_path / f"{name}.parquet")
            sources.append(Source(name, str(tmp_path / f"{name}.parquet"), epochs=1))
        tokens = count_tokens(run_world(config_for(sources, PackedRows(16, 2), 4), 2))
        assert len(tokens) == sum(tokens.values()) == 4 * 27

    def test_files_that_are_there_in_compressed_form_only(self, tmp_path: Path) -> None:
        """The loader waits for ever for the form that is not there."""
        for number in range(4):
            lines = "".join(json.dumps({"input_ids": [10 * number + i + 1] * 2}) + "\n" for i in range(10))
            (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        source = Source("a", str(tmp_path / "*.jsonl.gz"), epochs=1)
        tokens = count_tokens(run_world(config_for([source], PaddedRows(8, 4), 8), 2))
        assert tokens == Counter(dict.fromkeys(range(1, 41), 2))


class TestPacking:
    def test_no_row_is_wider_than_it_may_be_however_it_is_balanced(self, tmp_path: Path) -> None:
        """Evening out the work puts more tokens into a microbatch than were allowed."""
        rng = np.random.default_rng(3)
        lengths = [*rng.integers(1, 12, 150).tolist(), *rng.integers(50, 65, 50).tolist()]
        corpus = make_corpus(tmp_path, {"a": 200}, seq_len=64, lengths={"a": lengths})
        config = config_for(corpus.sources(epochs=1), PackedRows(64, 2), 16)
        steps = run_world(config, 4)
        check_steps(corpus, steps, config)
        widths = [sum(len(d) for d in row) for row in rows_of_tokens(steps)]
        assert max(widths) <= 64
        assert all(mb.tensors["input_ids"].shape == (2, 64) for step in steps for mb in step.microbatches())
        assert all(len({len(rank) for rank in step.ranks}) == 1 for step in steps)

    @pytest.mark.parametrize(
        ("overlong", "tokens", "counted"),
        [("split", 5000, {}), ("truncate", 2048, {"truncated": 1}), ("drop", 0, {"overlong": 1})],
    )
    def test_a_sample_of_5000_in_rows_of_2048(
        self, tmp_path: Path, overlong: Any, tokens: int, counted: dict[str, int]
    ) -> None:
        """Whether it is cut or dropped depends on an unrelated flag, and nobody counts it."""
        corpus = make_corpus(tmp_path, {"a": 9}, seq_len=2048, lengths={"a": [10] * 4 + [5000] + [10] * 4})
        config = config_for(corpus.sources(epochs=1, overlong=overlong), PackedRows(2048, 1), 2)
        with World(config, 2) as world:
            steps = world.steps()
            state = world.state()
        assert sum(count_tokens(steps).values()) == 80 + tokens
        assert state["sources"]["a"]["dropped"] == counted
