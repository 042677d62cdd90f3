"""What is wrong is said at once and clearly: which source, file and row, what was given, what is allowed."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    ClientPlaceTree,
    ConfigError,
    DataError,
    LoaderConfig,
    MegaScaleError,
    MegaScaleLoader,
    Mixture,
    PackedRows,
    PaddedRows,
    Source,
    StateError,
)
from megascale_lightning.errors import EmptySourceError

from .conftest import SEQ_LEN
from .data import Corpus, make_corpus
from .harness import World, run_world

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


def config_of(*sources: Source, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": sources,
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=8),
        "global_batch_size": 4,
        "runtime": "local",
    }
    return LoaderConfig(**(base | changes))


def fail(config: LoaderConfig, *words: str, error: type[Exception] = MegaScaleError, steps: int | None = None) -> str:
    """Run it; the one clear error must hold every word."""
    with pytest.raises(error) as caught:
        run_world(config, steps=steps)
    message = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


def write_parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def good_rows(count: int = 8) -> list[list[int]]:
    return [[10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(count)]


class TestFiles:
    @pytest.mark.parametrize("pattern", ["none.parquet", "none/*.parquet", "part-{000..003}.jsonl"])
    def test_missing(self, tmp_path: Path, pattern: str) -> None:
        fail(config_of(Source("web", str(tmp_path / pattern))), "web", pattern.split("{")[0].split("*")[0].rstrip("/"))

    def test_one_of_a_list_is_missing(self, tmp_path: Path) -> None:
        there = write_parquet(tmp_path / "there.parquet", input_ids=good_rows())
        fail(config_of(Source("web", [there, str(tmp_path / "gone.parquet")])), "web", "gone.parquet")

    def test_unknown_format(self, tmp_path: Path) -> None:
        (tmp_path / "data.xyz").write_text("hello")
        fail(config_of(Source("web", str(tmp_path / "data.xyz"))), "web", "format", "parquet", "jsonl")

    def test_not_a_parquet_file(self, tmp_path: Path) -> None:
        (tmp_path / "broken.parquet").write_bytes(b"this is no parquet file at all" * 10)
        fail(config_of(Source("web", str(tmp_path / "*.parquet"))), "web", "broken.parquet")

    def test_a_truncated_parquet_file(self, tmp_path: Path) -> None:
        path = Path(write_parquet(tmp_path / "cut.parquet", input_ids=good_rows(50)))
        path.write_bytes(path.read_bytes()[:-20])
        fail(config_of(Source("web", str(path))), "web", "cut.parquet")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("")
        fail(config_of(Source("web", str(tmp_path / "empty.jsonl"), epochs=1)), "web")

    def test_empty_files_beside_good_ones_are_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("")
        (tmp_path / "b.jsonl").write_text('{"input_ids": [1, 2, 3]}\n\n{"input_ids": [4, 5]}')
        steps = run_world(config_of(Source("web", str(tmp_path / "*.jsonl"), epochs=1)))
        assert sum(len(step.pieces()) for step in steps) == 2

    def test_a_parquet_file_without_rows_beside_good_ones(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "a.parquet", input_ids=pa.array([], pa.list_(pa.int32())))
        write_parquet(tmp_path / "b.parquet", input_ids=good_rows(3))
        steps = run_world(config_of(Source("web", str(tmp_path / "*.parquet"), epochs=1)))
        assert sum(len(step.pieces()) for step in steps) == 3

    def test_missing_column(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "a.parquet", text=["one", "two"], tokens=good_rows(2))
        fail(config_of(Source("web", path)), "web", "input_ids", "tokens")

    def test_missing_declared_field(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "a.parquet", input_ids=good_rows())
        config = config_of(Source("web", path), rows=PackedRows(SEQ_LEN, 2, token_fields=("loss_mask",)))
        fail(config, "web", "loss_mask")

    def test_a_column_of_another_type(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "a.parquet", input_ids=["one", "two", "three"])
        fail(config_of(Source("web", path, epochs=1)), "web", "input_ids")

    def test_null_tokens(self, tmp_path: Path) -> None:
        rows = [*good_rows(3), None, [5, 6]]
        path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array(rows, pa.list_(pa.int32())))
        fail(config_of(Source("web", path, epochs=1)), "web", "a.parquet", error=DataError)

    def test_a_field_of_another_length(self, tmp_path: Path) -> None:
        masks = [[1, 1, 1]] * 7 + [[1, 1]]
        path = write_parquet(tmp_path / "a.parquet", input_ids=good_rows(8), loss_mask=masks)
        config = config_of(Source("web", path, epochs=1), rows=PackedRows(SEQ_LEN, 2, token_fields=("loss_mask",)))
        fail(config, "web", "loss_mask", error=DataError)


class TestJsonLines:
    def write(self, tmp_path: Path, *lines: str) -> Source:
        (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
        return Source("web", str(tmp_path / "lines.jsonl"), epochs=1)

    def test_a_broken_line(self, tmp_path: Path) -> None:
        good = '{"input_ids": [1, 2]}'
        message = fail(
            config_of(self.write(tmp_path, good, good, '{"input_ids": [1, 2', good)),
            "web",
            "lines.jsonl",
            error=DataError,
        )
        assert "2" in message, "it names the row"

    def test_a_line_without_tokens(self, tmp_path: Path) -> None:
        config = config_of(self.write(tmp_path, '{"input_ids": [1]}', '{"text": "hello"}'))
        fail(config, "web", "lines.jsonl", "input_ids", error=DataError)

    def test_a_line_that_is_no_object(self, tmp_path: Path) -> None:
        fail(config_of(self.write(tmp_path, "[1, 2, 3]")), "web", "lines.jsonl", error=DataError)

    @pytest.mark.parametrize("tokens", ['"abc"', "[1.5, 2]", '["a", "b"]', "[[1, 2], [3]]", "7", "null"])
    def test_tokens_that_are_none(self, tmp_path: Path, tokens: str) -> None:
        config = config_of(self.write(tmp_path, '{"input_ids": [1, 2]}', f'{{"input_ids": {tokens}}}'))
        fail(config, "web", "lines.jsonl", "input_ids", error=DataError)

    def test_broken_lines_can_be_skipped(self, tmp_path: Path) -> None:
        lines = ['{"input_ids": [1, 2]}', '{"input_ids": [3', '{"text": "x"}', '{"input_ids": [4]}']
        (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
        source = Source("web", str(tmp_path / "lines.jsonl"), epochs=1, on_error="skip")
        with World(config_of(source)) as world:
            steps = world.steps()
            dropped = world.state()["sources"]["web"]["dropped"]
        assert sum(len(step.pieces()) for step in steps) == 2
        assert sum(dropped.values()) == 2

    def test_long_lines_unicode_and_no_newline_at_the_end(self, tmp_path: Path) -> None:
        lines = [
            json.dumps({"input_ids": [i], "text": "ü€😀" * (50_000 if i == 5 else 3)}, ensure_ascii=False)
            for i in range(1, 30)
        ]
        (tmp_path / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
        steps = run_world(config_of(Source("web", str(tmp_path / "lines.jsonl"), epochs=1)))
        assert sum(len(step.pieces()) for step in steps) == 29

    def test_windows_line_ends(self, tmp_path: Path) -> None:
        (tmp_path / "lines.jsonl").write_bytes(b'{"input_ids": [1, 2]}\r\n{"input_ids": [3]}\r\n')
        steps = run_world(config_of(Source("web", str(tmp_path / "lines.jsonl"), epochs=1)))
        assert sum(len(step.pieces()) for step in steps) == 2


class TestTransforms:
    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        return write_parquet(tmp_path / "a.parquet", input_ids=good_rows())

    def test_an_error_names_source_and_sample(self, path: str) -> None:
        def explode(sample: dict[str, Any]) -> dict[str, Any]:
            raise KeyError("speaker")

        fail(
            config_of(Source("web", path, transform=explode, epochs=1)), "web", "a.parquet", "speaker", error=DataError
        )

    def test_a_list_is_refused(self, path: str) -> None:
        config = config_of(Source("web", path, transform=lambda sample: [sample], epochs=1))
        fail(config, "web", "list", "transform", error=DataError)

    def test_a_result_without_tokens(self, path: str) -> None:
        config = config_of(Source("web", path, transform=lambda sample: {"ids": [1]}, epochs=1))
        fail(config, "web", "input_ids", error=DataError)

    def test_a_source_that_gives_nothing(self, path: str) -> None:
        """Endless or not, a whole epoch without a sample is an error, never a hang."""
        for epochs in (1, None):
            config = config_of(Source("web", path, transform=lambda sample: None, epochs=epochs))
            fail(config, "web", "filtered", error=EmptySourceError, steps=5)


class TestConfig:
    def test_names_twice(self, mixed: Corpus) -> None:
        source = mixed.sources()[0]
        with pytest.raises(ConfigError, match="web"):
            config_of(source, source)

    def test_weights_all_zero(self, mixed: Corpus) -> None:
        with pytest.raises(ConfigError, match="weight"):
            config_of(*mixed.sources(weights={"web": 0.0, "code": 0.0, "books": 0.0}))

    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "0.5", None])
    def test_weight(self, weight: Any) -> None:
        with pytest.raises(ConfigError, match=r"'web'.*weight"):
            Source("web", "x.parquet", weight=weight)

    @pytest.mark.parametrize("mixture", [{"web": 1.0}, {"web": 1, "code": 1, "books": 1, "more": 1}, {}])
    def test_mixture_names(self, mixed: Corpus, mixture: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match="mixture"):
            config_of(*mixed.sources(), mixture=mixture)

    def test_mixture_unit(self) -> None:
        with pytest.raises(ConfigError, match="bytes"):
            Mixture(unit="bytes")  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", ["16", 0, -4, 2.5, True])
    def test_global_batch_size(self, mixed: Corpus, value: Any) -> None:
        with pytest.raises(ConfigError, match="global_batch_size"):
            config_of(*mixed.sources(), global_batch_size=value)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("prefetch_steps", -1),
            ("plan_window", 0),
            ("num_loaders", 0),
            ("runtime", "thread"),
            ("last_step", "pad"),
            ("rows", {"seq_len": 64}),
            ("part_bytes", 0),
            ("seed", "zero"),
            ("seed", 1.5),
            ("sources", []),
        ],
    )
    def test_other_values(self, mixed: Corpus, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name.rstrip("s")):
            config_of(*mixed.sources(), **{name: value})

    def test_all_that_is_wrong_is_said_at_once(self, mixed: Corpus) -> None:
        with pytest.raises(ConfigError) as caught:
            config_of(*mixed.sources(), global_batch_size=0, last_step="pad", plan_window=-1)
        for name in ("global_batch_size", "last_step", "plan_window"):
            assert name in str(caught.value)

    @pytest.mark.parametrize(("length", "micro"), [(0, 1), (64, 0), ("64", 1), (64.0, 1), (True, 1)])
    @pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
    def test_rows(self, kind: Any, length: Any, micro: Any) -> None:
        with pytest.raises(ConfigError):
            kind(length, micro)

    def test_accumulation_against_the_batch_size(self, mixed: Corpus) -> None:
        """The message says which number to set."""
        config = config_of(*mixed.sources(), global_batch_size=16)
        with pytest.raises(ConfigError, match="16") as caught:
            MegaScaleLoader(config, tree=ClientPlaceTree.from_sizes(dp=2), rank=0, accumulate=3)
        assert "4" in str(caught.value)
        assert "12" in str(caught.value)

    def test_no_batch_size_is_taken_from_the_trainer(self, mixed: Corpus) -> None:
        config = config_of(*mixed.sources(), global_batch_size=None)
        (step,) = run_world(config, 2, 3, 1)
        assert len(step.rows) == 2 * 2 * 3

    @pytest.mark.parametrize("rank", [2, -1])
    def test_a_rank_outside_the_tree(self, mixed: Corpus, rank: int) -> None:
        with pytest.raises(MegaScaleError, match=str(rank)):
            MegaScaleLoader(config_of(*mixed.sources()), tree=ClientPlaceTree.from_sizes(dp=2), rank=rank)

    @pytest.mark.parametrize("stream", ["val/0", "valid", "test/1"])
    def test_a_stream_that_is_not_there(self, mixed: Corpus, stream: str) -> None:
        with pytest.raises(MegaScaleError, match=stream) as caught:
            MegaScaleLoader(config_of(*mixed.sources()), stream=stream)
        assert "train" in str(caught.value)


class TestState:
    @pytest.fixture
    def state(self, mixed: Corpus) -> dict[str, Any]:
        with World(self.config(mixed)) as world:
            world.steps(4)
            return world.state()

    @staticmethod
    def config(mixed: Corpus, **changes: Any) -> LoaderConfig:
        return config_of(*mixed.sources(epochs=None), part_bytes=2000, window_units=2, **changes)

    @staticmethod
    def load(config: LoaderConfig, state: Any) -> None:
        with MegaScaleLoader(config) as loader:
            loader.load_state_dict(state)
            next(iter(loader))

    @pytest.mark.parametrize("version", [99, -1, None, "1"])
    def test_unknown_version(self, mixed: Corpus, state: dict[str, Any], version: Any) -> None:
        with pytest.raises(StateError, match="version"):
            self.load(self.config(mixed), state | {"version": version})

    def test_unknown_order_version(self, mixed: Corpus, state: dict[str, Any]) -> None:
        with pytest.raises(StateError, match="order"):
            self.load(self.config(mixed), state | {"order_version": 99})

    @pytest.mark.parametrize("bad", [{}, [], None, "state", {"step": 3}, {"web": 1}])
    def test_no_state_at_all(self, mixed: Corpus, bad: Any) -> None:
        with pytest.raises(StateError):
            self.load(self.config(mixed), bad)

    @pytest.mark.parametrize("key", ["step", "sources", "carry", "certificate", "fingerprint", "ended"])
    def test_a_missing_part(self, mixed: Corpus, state: dict[str, Any], key: str) -> None:
        with pytest.raises(StateError, match=key):
            self.load(self.config(mixed), {k: v for k, v in state.items() if k != key})

    def test_of_another_stream(self, mixed: Corpus, state: dict[str, Any]) -> None:
        with pytest.raises(StateError, match="val/0"):
            self.load(self.config(mixed), state | {"stream": "val/0"})

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("seed", {"seed": 8}),
            ("seq_len", {"rows": PackedRows(SEQ_LEN // 2, 2, pack_ahead=8)}),
            ("pack_ahead", {"rows": PackedRows(SEQ_LEN, 2, pack_ahead=9)}),
            ("rows", {"rows": PaddedRows(SEQ_LEN, 2)}),
            ("window_units", {"window_units": 3}),
            ("part_bytes", {"part_bytes": 4000}),
            ("global_batch_size", {"global_batch_size": 8}),
            ("last_step", {"last_step": "drop"}),
        ],
    )
    def test_of_other_settings(self, mixed: Corpus, state: dict[str, Any], name: str, change: dict[str, Any]) -> None:
        """The error names the setting; `force_resume` lets exactly that one pass."""
        config = self.config(mixed)
        changes = {"rows": config.rows, "global_batch_size": config.global_batch_size, "seed": 0} | change
        other = config_of(
            *mixed.sources(epochs=None),
            **({"part_bytes": 2000, "window_units": 2, "force_resume": ["mixture"]} | changes),
        )
        with pytest.raises(StateError, match=name):
            self.load(other, state)

    def test_force_resume(self, mixed: Corpus, state: dict[str, Any]) -> None:
        self.load(self.config(mixed, last_step="drop", force_resume=["last_step"]), state)

    def test_weights_may_change(self, mixed: Corpus, state: dict[str, Any]) -> None:
        self.load(self.config(mixed, mixture={"web": 1, "code": 5, "books": 0}), state)

    def test_what_is_not_order_may_change(self, mixed: Corpus, state: dict[str, Any]) -> None:
        rows = PackedRows(SEQ_LEN, 1, pack_ahead=8, pad_to_multiple_of=128, pad_id=3)
        changes = {"num_loaders": 2, "prefetch_steps": 7, "plan_window": 2, "loader_buffer_bytes": 1000}
        self.load(self.config(mixed, rows=rows, **changes), state)

    def test_of_other_sources(self, mixed: Corpus, state: dict[str, Any]) -> None:
        sources = mixed.sources(epochs=None)[:2]
        with pytest.raises(StateError, match="books"):
            self.load(config_of(*sources, part_bytes=2000, window_units=2), state)

    def test_a_source_setting(self, mixed: Corpus, state: dict[str, Any]) -> None:
        for changes in ({"overlong": "truncate"}, {"shuffle": False}):
            config = config_of(*mixed.sources(epochs=None, **changes), part_bytes=2000, window_units=2)
            with pytest.raises(StateError, match=next(iter(changes))):
                self.load(config, state)

    def test_of_other_files(self, mixed: Corpus, state: dict[str, Any], tmp_path: Path) -> None:
        other = make_corpus(tmp_path, {"web": 41, "code": 150, "books": 300}, seq_len=SEQ_LEN, seed=1)
        with pytest.raises(StateError, match="web"):
            self.load(self.config(other), state)

    def test_a_refused_state_moves_nothing(self, mixed: Corpus, state: dict[str, Any]) -> None:
        with World(self.config(mixed)) as world:
            first = world.steps(2)
            with pytest.raises(StateError):
                world.loaders[0].load_state_dict(state | {"version": 99})
            assert world.state()["step"] == 2
            world.reiterate()
            assert [step.number for step in world.steps(2)] == [2, 3]
        assert [step.number for step in first] == [0, 1]


class TestAfterAnError:
    def test_it_can_be_closed_and_another_started(self, tmp_path: Path, mixed: Corpus) -> None:
        (tmp_path / "lines.jsonl").write_text('{"input_ids": [1]}\n{"input_ids"\n')
        bad = config_of(Source("web", str(tmp_path / "lines.jsonl"), epochs=1))
        for _ in range(3):
            with pytest.raises(DataError), MegaScaleLoader(bad) as loader:
                list(loader)
        assert len(run_world(config_of(*mixed.sources()), steps=3)) == 3

    def test_the_error_comes_again(self, tmp_path: Path) -> None:
        """Not an end of data, not a hang."""
        (tmp_path / "lines.jsonl").write_text('{"input_ids": [1]}\n{"input_ids"\n')
        with MegaScaleLoader(config_of(Source("web", str(tmp_path / "lines.jsonl"), epochs=1))) as loader:
            for _ in range(2):
                with pytest.raises(DataError):
                    list(loader)

    @pytest.mark.parametrize("wrong", [{"stream": "val/7"}, {"rank": 5}, {"accumulate": 3}, {}], ids=str)
    def test_nothing_is_held_after_a_failed_start_or_a_close(self, mixed: Corpus, wrong: dict[str, Any]) -> None:
        """The session, and with it the config, is let go."""

        def start_and_end() -> weakref.ref[LoaderConfig]:
            config = config_of(*mixed.sources(epochs=None))
            try:
                with MegaScaleLoader(config, **wrong) as loader:
                    next(iter(loader))
            except ConfigError:
                assert wrong
            return weakref.ref(config)

        freed = start_and_end()
        gc.collect()
        assert freed() is None

    def test_iterating_a_closed_loader(self, mixed: Corpus) -> None:
        loader = MegaScaleLoader(config_of(*mixed.sources()))
        loader.close()
        loader.close()
        with pytest.raises(MegaScaleError, match="closed"):
            next(iter(loader))
