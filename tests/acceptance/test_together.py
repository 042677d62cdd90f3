"""Records that stay together are in one row of one step, each once, through drops and resumes at every step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    CollatedRows,
    ConfigError,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    PaddedRows,
    RoundRobin,
    Source,
    StateError,
)
from megascale_lightning.loading.quarantine import read_lines

from .harness import Step, World, run_world

GROUP_ROWS, SEQ_LEN = 23, 64
SIZES = np.random.default_rng(0).integers(1, 5, 120)
IDS = np.repeat(np.arange(len(SIZES)), SIZES)


def filtered(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Leaves out one record in 17."""
    return None if int(sample["input_ids"][0]) % 17 == 5 else sample


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Pairs and more, some of them longer than a row; and records that are each for themselves."""
    folder = tmp_path_factory.mktemp("together")
    rng = np.random.default_rng(1)
    for name in ("pairs", "web"):
        tokens = [[at + 1] * int(length) for at, length in enumerate(rng.integers(1, 28, len(IDS)))]
        table = pa.table({"input_ids": pa.array(tokens, pa.list_(pa.int32())), "pair": IDS})
        pq.write_table(table, folder / f"{name}.parquet", GROUP_ROWS)
    return str(folder / "pairs.parquet"), str(folder / "web.parquet")


def config_of(paths: tuple[str, str], pairs: dict[str, Any] | None = None, **changes: Any) -> LoaderConfig:
    own: dict[str, Any] = {"together": "pair", "overlong": "drop", "epochs": 1, **(pairs or {})}
    settings: dict[str, Any] = {
        "sources": [Source("pairs", paths[0], **own), Source("web", paths[1], epochs=1, weight=0.5)],
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=20),
        "global_batch_size": 8,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 900,
        "plan_window": 2,
    }
    return LoaderConfig(**(settings | changes))


def group_of(piece: tuple[Any, ...]) -> int:
    return int(IDS[piece[2] * GROUP_ROWS + piece[3]])


def check_together(steps: list[Step]) -> Counter[int]:
    """Every group that is there is whole and in one row; how often each was given."""
    given: Counter[int] = Counter()
    for step in steps:
        for row in step.rows:
            there = Counter(group_of(piece) for piece in row if piece[0] == "pairs")
            for group, count in there.items():
                assert count == SIZES[group], f"step {step.number} has {count} of the {SIZES[group]} of group {group}"
                given[group] += 1
    return given


def dropped_of(state: dict[str, Any]) -> dict[str, int]:
    return dict(state["sources"]["pairs"]["dropped"])


def test_each_group_once_in_one_row(paths: tuple[str, str]) -> None:
    steps = run_world(config_of(paths), dp=2, keep_states=True)
    given = check_together(steps)
    assert max(given.values()) == 1
    lost = set(range(len(SIZES))) - set(given)
    assert lost, "no group is longer than a row"
    assert steps[-1].state is not None
    assert dropped_of(steps[-1].state) == {"overlong": int(SIZES[sorted(lost)].sum())}
    web = Counter(piece for step in steps for piece in step.pieces() if piece[0] == "web")
    assert len(web) == len(IDS)
    units: dict[int, set[int]] = {}
    for piece in (piece for step in steps for piece in step.pieces() if piece[0] == "pairs"):
        units.setdefault(group_of(piece), set()).add(piece[2])
    assert any(len(of) == 2 for of in units.values()), "no group reaches over two units"


def test_a_resume_at_every_step_gives_the_same(paths: tuple[str, str]) -> None:
    config = config_of(paths, {"transform": filtered, "on_error": "skip"})
    whole = run_world(config, dp=2, keep_states=True)
    check_together(whole)
    carried = 0
    for at, step in enumerate(whole[:-1]):
        assert step.state is not None
        carried += len(step.state["carry"])
        with World(config, 1, state=step.state) as world:
            rest = world.steps(3)
        check_together(rest)
        for one, other in zip(rest, whole[at + 1 :], strict=False):
            assert (one.rows, one.certificate) == (other.rows, other.certificate)
    assert carried
    last = whole[-1].state
    assert last is not None
    counts = dropped_of(last)
    given = check_together(whole)
    lost = sorted(set(range(len(SIZES))) - set(given))
    assert sum(counts.values()) == int(SIZES[lost].sum())
    assert set(counts) == {"filtered", "partner", "overlong"}


def test_a_row_group_whose_ids_are_broken(paths: tuple[str, str], tmp_path: Path) -> None:
    """It is gone with the groups that it cuts and touches; all others are there, and no record is counted twice."""
    content = bytearray(Path(paths[0]).read_bytes())
    column = pq.read_metadata(paths[0]).row_group(1).column(1)
    start = column.dictionary_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    (tmp_path / "pairs.parquet").write_bytes(content)
    pairs = {"on_error": "quarantine", "overlong": "drop"}
    config = config_of((str(tmp_path / "pairs.parquet"), paths[1]), pairs, quarantine_dir=str(tmp_path / "bad"))
    steps = run_world(config, dp=2, keep_states=True)
    given = check_together(steps)
    assert max(given.values()) == 1
    assert steps[-1].state is not None
    counts = dropped_of(steps[-1].state)
    lost = sorted(set(range(len(SIZES))) - set(given))
    assert set(IDS[GROUP_ROWS - 1 : 2 * GROUP_ROWS + 1].tolist()) <= set(lost)
    assert sum(counts.values()) == int(SIZES[lost].sum())
    assert counts["read_error"] == GROUP_ROWS
    beside = int(np.isin(IDS, IDS[GROUP_ROWS - 1 : 2 * GROUP_ROWS + 1]).sum()) - GROUP_ROWS
    assert counts["partner"] == beside
    (listed,) = read_lines(tmp_path / "bad")
    assert (listed["unit"], listed["row"], listed["reason"]) == (1, -1, "read_error")


def test_the_order_is_of_the_settings_alone(paths: tuple[str, str]) -> None:
    base = [step.certificate for step in run_world(config_of(paths), dp=1, steps=8)]
    for changes in ({"num_loaders": 2}, {"plan_window": 1}, {"loader_buffer_bytes": 1}, {"strategy": RoundRobin()}):
        assert [step.certificate for step in run_world(config_of(paths, **changes), dp=2, steps=8)] == base
    plain = config_of(paths, {"together": None})
    assert [step.certificate for step in run_world(plain, dp=1, steps=8)] != base


def test_it_is_part_of_the_order(paths: tuple[str, str]) -> None:
    state = run_world(config_of(paths), steps=2, keep_states=True)[-1].state
    assert state is not None
    assert [name for name in state["fingerprint"] if "together" in name] == ["sources.pairs.together"]
    with MegaScaleLoader(config_of(paths, {"together": None})) as loader, pytest.raises(StateError, match="together"):
        loader.load_state_dict(state)


def marked(columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Ids that depend on which records are transformed together."""
    draws = rng.integers(1, 1 << 20, len(columns["input_ids"]))
    return {"input_ids": [[int(ids[0]), int(draw)] for ids, draw in zip(columns["input_ids"], draws, strict=True)]}


def test_a_shown_sample_is_that_of_the_run(paths: tuple[str, str]) -> None:
    config = config_of(paths, {"transform_batched": marked, "columns": ("input_ids",)}, weights={"web": 0})
    with World(config) as world:
        microbatches = [mb for step in world.steps() for mb in step.microbatches()]
        pairs = [(ids, row) for mb in microbatches for ids, row in zip(mb.rows, mb.tensors["input_ids"], strict=True)]
        assert sum(len(ids) for ids, _ in pairs) == len(IDS)
        for ids, row in pairs:
            tokens = iter(row.tolist())
            for piece in ids:
                shown = world.loaders[0].sample(piece).transformed["input_ids"]
                assert list(shown) == [next(tokens), next(tokens)]


class TestRefusals:
    @pytest.mark.parametrize("rows", [PaddedRows(64, 2), CollatedRows(2)])
    def test_rows_of_one_record(self, paths: tuple[str, str], rows: Any) -> None:
        said = rf"together= of \['pairs'\] puts several records in one row, and a row of {type(rows).__name__}"
        with pytest.raises(ConfigError, match=said):
            config_of(paths, rows=rows)

    def test_what_cannot_be_looked_up(self, tmp_path: Path) -> None:
        pairs = Source("pairs", [{"input_ids": [1], "pair": 1}] * 8, together="pair", overlong="drop")
        with pytest.raises(ConfigError, match="not for a dataset"):
            MegaScaleLoader(LoaderConfig(sources=[pairs], rows=PackedRows(8, 1), runtime="local"))

    def test_groups_that_the_places_do_not_make(self, paths: tuple[str, str]) -> None:
        config = config_of(paths, strategy=lambda graph: graph.mix().pack().distribute("dp", group_size=2))
        with pytest.raises(ConfigError, match="1 data-parallel groups do not make whole buckets of 2"):
            MegaScaleLoader(config)
