"""What became of a sample is told from the state alone: as it is in the rows, at every step, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    Balanced,
    CollatedRows,
    ConfigError,
    CostOf,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    Source,
)

from .harness import World

COUNT, UNIT = 40, 8


def filtered(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Leaves out one record in 11."""
    return None if int(sample["input_ids"][0]) % 11 == 5 else sample


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Documents of 1 to 90 tokens, and groups of up to three that stay together."""
    folder = tmp_path_factory.mktemp("lineage")
    rng = np.random.default_rng(0)
    pairs = np.repeat(np.arange(COUNT), rng.integers(1, 4, COUNT))[:COUNT]
    for name, most in (("web", 90), ("pairs", 20)):
        ids = [[at + 1] * int(length) for at, length in enumerate(rng.integers(1, most, COUNT))]
        table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32())), "pair": pairs})
        pq.write_table(table, folder / f"{name}.parquet", UNIT)
    return {name: str(folder / f"{name}.parquet") for name in ("web", "pairs")}


def config_of(paths: dict[str, str], **changes: Any) -> LoaderConfig:
    settings: dict[str, Any] = {
        "sources": [
            Source("web", paths["web"], epochs=1, transform=filtered),
            Source("pairs", paths["pairs"], epochs=1, together="pair", overlong="drop", weight=0.5),
        ],
        "rows": PackedRows(64, 1, pack_ahead=10),
        "global_batch_size": 6,
        "runtime": "local",
        "window_units": 1,
        "part_bytes": 150,
    }
    return LoaderConfig(**(settings | changes))


def everything() -> list[tuple[str, int, int, int]]:
    return [(name, 0, *divmod(at, UNIT)) for name in ("web", "pairs") for at in range(COUNT)]


def is_filtered(sample: tuple[str, int, int, int]) -> bool:
    return sample[0] == "web" and (sample[2] * UNIT + sample[3] + 1) % 11 == 5


def lives_of(world: World) -> dict[Any, Any]:
    return {sample: world.loaders[0].lineage(sample) for sample in everything()}


def check(lives: dict[Any, Any], given: dict[Any, int], carry: list[Any], ended: bool) -> None:
    """The lives are those of the rows and of the carry-over."""
    waiting = {(name, *rest[:3]) for name, *rest in carry}
    for sample, (life, step, reason) in lives.items():
        if sample in waiting:
            assert life == "carried"
        elif sample in given:
            assert (life, step, reason) == ("consumed", -1, "")
        elif is_filtered(sample):
            assert (life, reason) in ([("dropped", "filtered")] if ended else [("dropped", "filtered"), ("ahead", "")])
        else:
            assert (life, reason) == ("ahead", "")


def carried_by(loader: MegaScaleLoader) -> list[Any]:
    pieces = loader._state.carry[["source", "epoch", "unit", "row", "start"]].tolist()
    return [(("web", "pairs")[source], *rest) for source, *rest in pieces]


def test_at_every_step_and_after_a_resume(paths: dict[str, str]) -> None:
    given: dict[Any, int] = {}
    seen = set()
    with World(config_of(paths), dp=2) as world:
        check(lives_of(world), given, [], ended=False)
        while (step := world.step()) is not None:
            given |= {piece[:4]: step.number for piece in step.pieces()}
            state = world.state()
            if step.number % 2 and not state["ended"]:
                continue
            lives = lives_of(world)
            seen |= {life for life, _, _ in lives.values()}
            check(lives, given, carried_by(world.loaders[0]), state["ended"])
            if step.number == 2:
                with World(config_of(paths), dp=1, state=state) as resumed:
                    assert lives_of(resumed) == lives
        assert state["ended"]
    assert seen == {"ahead", "carried", "consumed", "dropped"}
    assert len(given) == sum(life == "consumed" for life, _, _ in lives.values())


def test_what_is_handed_out_and_not_consumed_is_delivered(paths: dict[str, str]) -> None:
    with MegaScaleLoader(config_of(paths), auto_consume=False) as loader:
        infos = []
        for batch in loader:
            infos.append(batch["megascale"])
            if infos[-1].step == 2:
                break
            if infos[-1].step == 0:
                loader.mark_consumed(infos[-1])
        for info in infos:
            for sample in (sample for row in info.sample_ids() for sample in row):
                life = loader.lineage(sample)
                assert life == (("consumed", -1, "") if info.step == 0 else ("delivered", info.step, ""))
        lost = next(sample for sample in everything() if loader.lineage(sample).life == "ahead")
        loader.load_state_dict(loader.state_dict())
        assert loader.lineage(infos[-1].sample_ids()[0][0]).life in ("ahead", "carried")
        assert loader.lineage(lost).life == "ahead"


def test_a_last_step_that_is_dropped_is_not_told_apart(paths: dict[str, str]) -> None:
    web = Source("web", paths["web"], epochs=1, transform=filtered, overlong="truncate")
    with MegaScaleLoader(config_of(paths, sources=[web], last_step="drop", global_batch_size=11)) as loader:
        given = {sample[:4] for batch in loader for row in batch["megascale"].sample_ids() for sample in row}
        lives = {sample: loader.lineage(sample).life for sample in everything() if sample[0] == "web"}
    assert set(lives.values()) == {"passed", "dropped"}
    assert given < {sample for sample, life in lives.items() if life == "passed"}
    lost = {sample for sample, life in lives.items() if life == "dropped"}
    assert lost == {sample for sample in lives if is_filtered(sample)}


@pytest.mark.parametrize("passes", [False, True])
def test_what_is_left_over_is_not_delivered_with_the_last_step(paths: dict[str, str], passes: bool) -> None:
    web = Source("web", paths["web"], epochs=None if passes else 1, transform=filtered, overlong="truncate")
    config = config_of(paths, sources=[web], last_step="drop", global_batch_size=11)
    with MegaScaleLoader(config, auto_consume=False, passes=passes) as loader:
        infos = []
        for batch in loader:
            infos.append(batch["megascale"])
            if infos[-1].is_last_in_pass:
                break
        given = {sample[:4]: info.step for info in infos for row in info.sample_ids() for sample in row}
        lives = {sample: loader.lineage(sample) for sample in everything() if sample[0] == "web"}
        kept = {sample: life for sample, life in lives.items() if not is_filtered(sample)}
        assert {sample: life.step for sample, life in kept.items() if life.life == "delivered"} == given
        assert {life.life for sample, life in kept.items() if sample not in given} == {"passed"}
        for info in infos:
            loader.mark_consumed(info)
        assert {loader.lineage(sample).life for sample in kept} == {"passed"}


def by_patches(lengths: Any, patches: Any) -> Any:
    return lengths + patches


def test_what_a_cost_needs_and_is_not_there(tmp_path: Path) -> None:
    patches = pa.array([None if row == 3 else row for row in range(12)])
    pq.write_table(pa.table({"input_ids": [[1, 2]] * 12, "patches": patches}), tmp_path / "a.parquet")
    source = Source("web", str(tmp_path / "a.parquet"), epochs=1, on_error="skip")
    strategy = Balanced(CostOf(by_patches, ("patches",)))
    config = LoaderConfig(sources=[source], rows=PackedRows(8, 1), runtime="local", strategy=strategy)
    with MegaScaleLoader(config) as loader:
        list(loader)
        lives = [loader.lineage(("web", 0, 0, row)) for row in range(12)]
    assert lives == [("dropped", -1, "read_error") if row == 3 else ("consumed", -1, "") for row in range(12)]


@pytest.mark.filterwarnings("ignore:source 'items' is an iterable")
@pytest.mark.parametrize("data", ["dataset", "iterable"])
def test_sources_of_any_kind(data: str) -> None:
    items = list(range(40))
    source = Source(
        "items",
        items if data == "dataset" else lambda: iter(items),
        epochs=1,
        format_options={} if data == "dataset" else {"slice_records": 7},
    )
    with MegaScaleLoader(LoaderConfig(sources=[source], rows=CollatedRows(4), runtime="local")) as loader:
        stream = iter(loader)
        next(stream)
        given = {sample for row in loader.last_info.sample_ids() for sample in row}
        for row in range(40):
            assert loader.lineage(("items", 0, 0, row)).life == (
                "consumed" if ("items", 0, 0, row, 0, -1) in given else "ahead"
            )


def test_what_is_not_there(paths: dict[str, str]) -> None:
    with MegaScaleLoader(config_of(paths)) as loader:
        next(iter(loader))
        for wrong, said in (
            (("pdf", 0, 0, 0), "no source 'pdf'"),
            (("web", 0, 99, 0), "epochs 0 to 0 and units 0 to 4, not epoch 0, unit 99"),
            (("web", 1, 0, 0), "epochs 0 to 0 and units 0 to 4, not epoch 1, unit 0"),
            (("pairs", 0, 0, 99), "unit 0 has no row 99"),
            (("web", 0), "is no sample id"),
        ):
            with pytest.raises(ConfigError, match=said):
                loader.lineage(wrong)
