"""Changes between save and resume: the right stream, or an error that names what changed and the way out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import (
    AttentionCost,
    ConfigError,
    DGraph,
    LoaderConfig,
    PackedRows,
    PaddedRows,
    Source,
    StateError,
)
from megascale_lightning.checkpointing.fingerprint import order_fingerprint

from .harness import Step, World

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

COUNTS = {"web": 90, "code": 60, "books": 40}
STOP = 9


def write(root: Path, name: str, index: int, count: int, *, value: int = 1) -> Path:
    """One file of a source: samples of 3 to 12 tokens, all of one digit."""
    path = root / name / f"{index}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"input_ids": [value] * (3 + number % 10)}) + "\n" for number in range(count)]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, count in COUNTS.items():
        for index in range(2):
            write(tmp_path, name, index, count // 2)
    return tmp_path


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [2 * token for token in sample["input_ids"]]}


def double_all(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [2 * ids for ids in columns["input_ids"]]}


def even_rows(graph: DGraph) -> DGraph:
    return graph.mix().pack(even=AttentionCost(8)).distribute("dp")


def other_rows(graph: DGraph) -> DGraph:
    return graph.mix().pack(even=AttentionCost(2)).distribute("dp")


def config_for(root: Path, names: tuple[str, ...] = tuple(COUNTS), **changes: Any) -> LoaderConfig:
    own = changes.pop("own", {})
    sources = [Source(name, str(root / name / "*.jsonl"), **own.get(name, {})) for name in names]
    base: dict[str, Any] = {"sources": sources, "rows": PackedRows(16, 2, pack_ahead=6), "global_batch_size": 4}
    return LoaderConfig(**(base | {"runtime": "local", "window_units": 2, "part_bytes": 600} | changes))


@pytest.fixture
def saved(root: Path) -> dict[str, Any]:
    with World(config_for(root)) as world:
        world.steps(STOP)
        return world.state()


def go_on(config: LoaderConfig, state: dict[str, Any], steps: int = 15, *, passes: bool = False) -> list[Step]:
    with World(config, 2, state=state, passes=passes) as world:
        return world.steps(steps)


def drawn(steps: list[Step]) -> Counter[str]:
    return Counter(piece[0] for step in steps for piece in step.pieces())


def test_settings_of_a_format_belong_to_the_order() -> None:
    def table(**options: Any) -> dict[str, Any]:
        config = LoaderConfig(
            sources=[Source("t", "x.csv", format_options=options)], rows=PackedRows(16, 2), runtime="local"
        )
        return order_fingerprint(config, stream="train", global_batch_size=4, passes=False)

    plain = table()
    assert table(delimiter=";", header=False) == plain | {
        "sources.t.format_options": '{"delimiter": ";", "header": false}'
    }
    assert table(header=False, delimiter=";") == table(delimiter=";", header=False)


def test_nothing_changed(root: Path, saved: dict[str, Any]) -> None:
    with World(config_for(root)) as world:
        whole = [step.certificate for step in world.steps(STOP + 15)]
    assert [step.certificate for step in go_on(config_for(root), saved)] == whole[STOP:]


def grow(root: Path) -> None:
    with (root / "web" / "1.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 2, 3]}\n')


def rewrite_at_equal_size(root: Path) -> None:
    path = root / "web" / "0.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("1", "7"))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


def add_file(root: Path) -> None:
    write(root, "web", 2, 10)


def remove_file(root: Path) -> None:
    (root / "web" / "1.jsonl").unlink()


REFUSED: list[Any] = [
    pytest.param(grow, {}, "files.web", id="file grown"),
    pytest.param(rewrite_at_equal_size, {}, "modified.web", id="file rewritten at equal size"),
    pytest.param(add_file, {}, "files.web", id="file added"),
    pytest.param(remove_file, {}, "files.web", id="file removed"),
    pytest.param(None, {"seed": 1}, "seed", id="seed"),
    pytest.param(None, {"rows": PackedRows(24, 2, pack_ahead=6)}, "rows.seq_len", id="seq_len"),
    pytest.param(None, {"rows": PackedRows(16, 2, pack_ahead=7)}, "rows.pack_ahead", id="pack_ahead"),
    pytest.param(
        None,
        {"rows": PackedRows(16, 2, pack_ahead=6, pad_documents_to=4)},
        "rows.pad_documents_to",
        id="pad_documents_to",
    ),
    pytest.param(None, {"rows": PaddedRows(16, 2)}, "rows.kind", id="kind of rows"),
    pytest.param(None, {"global_batch_size": 8}, "global_batch_size", id="global_batch_size"),
    pytest.param(None, {"window_units": 3}, "window_units", id="window_units"),
    pytest.param(None, {"part_bytes": 900}, "part_bytes", id="part_bytes"),
    pytest.param(None, {"last_step": "drop"}, "last_step", id="last_step"),
    pytest.param(None, {"own": {"web": {"transform": double}}}, "sources.web.transform", id="transform"),
    pytest.param(
        None,
        {"own": {"web": {"transform_batched": double_all}}},
        "sources.web.transform_batched",
        id="transform_batched",
    ),
    pytest.param(None, {"own": {"web": {"shuffle": False}}}, "sources.web.shuffle", id="shuffle"),
    pytest.param(None, {"own": {"web": {"epochs": 2}}}, "sources.web.epochs", id="epochs"),
    pytest.param(None, {"strategy": even_rows}, "strategy.pack.even", id="even rows"),
    pytest.param(None, {"own": {"web": {"overlong": "drop"}}}, "sources.web.overlong", id="overlong"),
    pytest.param(None, {"own": {"web": {"on_error": "skip"}}}, "sources.web.on_error", id="on_error"),
    pytest.param(None, {"names": ("web", "code")}, "gone ['books']", id="source removed"),
    pytest.param(None, {"names": ("web", "code", "wub")}, "added ['wub']", id="source renamed"),
]


@pytest.mark.parametrize(("change", "settings", "named"), REFUSED)
def test_the_error_names_what_changed(
    root: Path, saved: dict[str, Any], change: Callable[[Path], None] | None, settings: dict[str, Any], named: str
) -> None:
    write(root, "wub", 0, 5)
    if change is not None:
        change(root)
    with pytest.raises(StateError) as raised:
        go_on(config_for(root, **settings), saved)
    assert named in str(raised.value)
    assert "force_resume" in str(raised.value)


FORCED = [case for case in REFUSED if not str(case.values[2]).startswith(("gone", "added"))]


@pytest.mark.parametrize(("change", "settings", "named"), FORCED)
def test_named_in_force_resume_it_goes_on(
    root: Path, saved: dict[str, Any], change: Callable[[Path], None] | None, settings: dict[str, Any], named: str
) -> None:
    if change is not None:
        change(root)
    force = ["rows" if named == "rows.kind" else named, *(["modified"] if change is not None else [])]
    steps = go_on(config_for(root, force_resume=force, **settings), saved)
    assert [step.number for step in steps] == list(range(STOP, STOP + 15))
    assert set(drawn(steps)) == set(COUNTS)


def test_a_file_that_was_only_touched_may_be_named(root: Path, saved: dict[str, Any]) -> None:
    expected = [step.certificate for step in go_on(config_for(root), saved)]
    os.utime(root / "web" / "0.jsonl", ns=(1, 1))
    assert [step.certificate for step in go_on(config_for(root, force_resume=["modified"]), saved)] == expected


def test_moved_data_are_the_same_data(root: Path, saved: dict[str, Any], tmp_path_factory: Any) -> None:
    expected = [step.certificate for step in go_on(config_for(root), saved)]
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "data"
    root.rename(elsewhere)
    try:
        assert [step.certificate for step in go_on(config_for(elsewhere), saved)] == expected
    finally:
        elsewhere.rename(root)


def test_edited_weights_count_from_the_next_step(root: Path, saved: dict[str, Any]) -> None:
    steps = go_on(config_for(root, weights={"web": 0.0}), saved, 20)
    assert drawn(steps[4:])["web"] == 0
    again = go_on(config_for(root, weights={"web": 0.0}), saved, 20)
    assert [step.certificate for step in again] == [step.certificate for step in steps]


class TestEvenRows:
    """The cost by which rows are even is part of the order."""

    def test_a_run_goes_on_with_its_own(self, root: Path) -> None:
        with World(config_for(root, strategy=even_rows)) as world:
            whole = [step.certificate for step in world.steps(STOP + 15)]
        with World(config_for(root, strategy=even_rows)) as world:
            world.steps(STOP)
            saved = world.state()
        assert saved["fingerprint"]["strategy.pack.even"] == "AttentionCost(crossover=8)"
        assert [step.certificate for step in go_on(config_for(root, strategy=even_rows), saved)] == whole[STOP:]
        with World(config_for(root)) as world:
            assert [step.certificate for step in world.steps(STOP + 15)][-1] != whole[-1], "it changes nothing"
        for other, shown in (
            (
                other_rows,
                r"'AttentionCost\(crossover=8\)' \| 'AttentionCost\(crossover=2\)' \| rows hold other samples",
            ),
            (None, r"'AttentionCost\(crossover=8\)' \| None"),
        ):
            with pytest.raises(StateError, match=f"strategy.pack.even: {shown}"):
                go_on(config_for(root, strategy=other), saved)
        go_on(config_for(root, strategy=other_rows, force_resume=["strategy"]), saved)

    def test_rows_of_one_sample_have_nothing_to_even(self, root: Path) -> None:
        with pytest.raises(ConfigError, match="PaddedRows hold one sample each"):
            World(config_for(root, strategy=even_rows, rows=PaddedRows(16, 2)))


class TestSources:
    """`force_resume=["sources"]`: who is new begins, who is gone is left out, the others go on."""

    def test_added(self, root: Path, saved: dict[str, Any]) -> None:
        write(root, "wub", 0, 50)
        names = (*COUNTS, "wub")
        with World(config_for(root, names, force_resume=["sources"]), state=saved) as world:
            begun = world.state()["sources"]
            steps = world.steps(20)
        assert {name: begun[name] for name in COUNTS} == saved["sources"]
        assert begun["wub"] == {
            **dict.fromkeys(("epoch", "window", "part", "offset"), 0),
            "share": 0.0,
            "given": 0.0,
            "dropped": {},
        }
        shares = drawn(steps)
        assert shares["wub"] == pytest.approx(shares.total() / 4, abs=4)

    def test_removed(self, root: Path, saved: dict[str, Any]) -> None:
        names = ("web", "books")
        with World(config_for(root, names, force_resume=["sources"]), state=saved) as world:
            begun = world.state()
            steps = world.steps(20)
        assert begun["sources"] == {name: saved["sources"][name] for name in names}
        assert set(drawn(steps)) == set(names)
        assert begun["step"] == STOP

    def test_in_another_order_they_are_the_same(self, root: Path, saved: dict[str, Any]) -> None:
        expected = [step.certificate for step in go_on(config_for(root), saved)]
        names = ("code", "web", "books")
        found = go_on(config_for(root, names), saved)
        assert [step.rows for step in found] == [step.rows for step in go_on(config_for(root), saved)]
        assert len(expected) == len(found)


class TestVersions:
    def test_a_newer_state_is_refused(self, root: Path, saved: dict[str, Any]) -> None:
        with pytest.raises(StateError, match=r"version 99, saved by megascale_lightning 7\.0"):
            go_on(config_for(root), {**saved, "version": 99, "package": "7.0"})

    def test_another_order_is_refused_or_begun_anew(self, root: Path, saved: dict[str, Any]) -> None:
        other = {**saved, "order_version": 0}
        with pytest.raises(StateError, match=r"order_version: 0 \| 1"):
            go_on(config_for(root), other)
        with World(config_for(root, force_resume=["order_version"]), state=other) as world:
            positions = world.state()["sources"].values()
            assert all(source["window"] == source["offset"] == 0 for source in positions)
            assert len(world.steps(5)) == 5

    def test_another_package_with_the_same_versions_goes_on(self, root: Path, saved: dict[str, Any]) -> None:
        expected = [step.certificate for step in go_on(config_for(root), saved)]
        for package in ("0.0.1", "9.9"):
            found = go_on(config_for(root), {**saved, "package": package})
            assert [step.certificate for step in found] == expected


def test_passes_are_a_setting_of_the_order(root: Path, saved: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=r"passes: False \| True"):
        go_on(config_for(root), saved, passes=True)
