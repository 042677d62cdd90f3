"""Records joined by id are whole in every batch; the order is that of the source alone, whatever dies or resumes."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.range_server import RangeServer
from megascale_lightning import DataError, Join, LoaderConfig, MegaScaleLoader, PackedRows, Source, StateError
from megascale_lightning.checkpointing.filelists import FileChanges
from megascale_lightning.client.resolving import runtime_plan
from megascale_lightning.loading.quarantine import read_lines
from tests.loading.joinfiles import write

from .formatfiles import number_of_tokens, tokens_of
from .harness import Step, World, documents, run_world, same_tensors

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

COUNT, EPOCHS = 48, 2
SECRET = "n0b0dy-gu3sses-it"


def key_of(number: int) -> str:
    return f"k{number * 7919 % 1009:04}"


def joined(sample: dict[str, Any]) -> dict[str, Any]:
    """The tokens that both sides name."""
    number, other = (int(sample[name].split()[1]) for name in ("txt", "text"))
    assert number == other, f"{number} has the caption of {other}"
    return {"input_ids": tokens_of(number)}


def alone(sample: dict[str, Any]) -> dict[str, Any]:
    """The same, of the source itself."""
    return {"input_ids": tokens_of(int(sample["txt"].split()[1]))}


@dataclass(frozen=True)
class Data:
    """A source and what is joined to it, each of two files."""

    root: Path
    own: str
    join: Join

    def source(self, **more: Any) -> Source:
        return Source("pairs", self.own, **({"transform": joined, "join": self.join, "epochs": EPOCHS} | more))

    def config(self, source: Source | None = None, **changes: Any) -> LoaderConfig:
        base: dict[str, Any] = {
            "sources": [source or self.source()],
            "rows": PackedRows(16, 2, pack_ahead=6),
            "global_batch_size": 4,
            "seed": 3,
            "runtime": "local",
            "window_units": 2,
            "part_bytes": 200,
            "prefetch_steps": 2,
            "plan_window": 3,
        }
        return LoaderConfig(**(base | changes))


def write_data(root: Path, own: str, other: str, missing: int = 0) -> Data:
    rng = np.random.default_rng(2)
    for name, kind, field, numbers in (
        ("own", own, "txt", rng.permutation(COUNT)),
        ("other", other, "text", rng.permutation(COUNT)[missing:]),
    ):
        for index, part in enumerate(np.array_split(numbers, 2)):
            columns = {"__key__": [key_of(n) for n in part], field: [f"{field} {n}" for n in part]}
            write(root / name / f"{index}", kind, columns, unit_rows=5)
    join = Join(str(root / "other" / "*"), on="__key__", columns=("text",))
    return Data(root, str(root / "own" / "*"), join)


@pytest.fixture(scope="module", params=[("parquet", "jsonl"), ("jsonl", "tar"), ("tar", "parquet")], ids="-".join)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return write_data(tmp_path_factory.mktemp("join"), *request.param)


@pytest.fixture(scope="module")
def undisturbed(data: Data) -> list[Step]:
    """On one rank of one loader that reads nothing ahead."""
    steps = run_world(data.config(num_loaders=1, prefetch_steps=0, plan_window=1), keep_states=True)
    assert len(steps) > 5
    return steps


def assert_same(found: list[Step], expected: list[Step], *, tensors: bool = True) -> None:
    assert [step.certificate for step in found] == [step.certificate for step in expected]
    if tensors:
        assert all(same_tensors(mine, its) for mine, its in zip(found, expected, strict=True))


def given_in(steps: list[Step]) -> Counter[tuple[int, int]]:
    """How often each (epoch, number) was given, whole."""
    found: Counter[tuple[int, int]] = Counter()
    for mb in (mb for step in steps for mb in step.microbatches()):
        for row, pieces in enumerate(mb.rows):
            for piece, tokens in zip(pieces, documents(mb, row), strict=True):
                number = number_of_tokens(tokens)
                assert tokens.tolist() == tokens_of(number)
                found[piece[1], number] += 1
    return found


def test_each_record_once_with_its_partner(undisturbed: list[Step]) -> None:
    assert given_in(undisturbed) == Counter({(epoch, n): 1 for epoch in range(EPOCHS) for n in range(COUNT)})


def test_the_order_is_that_of_the_source_alone(data: Data, undisturbed: list[Step]) -> None:
    plain = data.source(transform=alone, join=None)
    steps = run_world(data.config(plain), keep_states=True)
    assert_same(steps, undisturbed)
    assert steps[-1].state is not None
    assert not [name for name in steps[-1].state["fingerprint"] if "join" in name]


@pytest.mark.parametrize(
    ("dp", "changes"),
    [
        (2, {"num_loaders": 1, "prefetch_steps": 4, "plan_window": 8}),
        (1, {"num_loaders": 2, "prefetch_steps": 4, "plan_window": 1}),
        (2, {"num_loaders": 3, "prefetch_steps": 0, "loader_buffer_bytes": 1}),
    ],
    ids=["one loader", "two loaders", "three loaders"],
)
def test_it_depends_on_nothing_else(data: Data, undisturbed: list[Step], dp: int, changes: dict[str, Any]) -> None:
    assert_same(run_world(data.config(**changes), dp=dp), undisturbed, tensors=dp == 1)


def test_resume_at_every_step(data: Data, undisturbed: list[Step]) -> None:
    for at, step in enumerate(undisturbed[:-1]):
        dp = 1 + at % 2
        config = data.config(num_loaders=2 - at % 2, plan_window=1 + at % 3)
        with World(config, dp, state=json.loads(json.dumps(step.state))) as world:
            assert_same(world.steps(), undisturbed[at + 1 :], tensors=dp == 1)


def test_loaders_that_die_between_steps_change_no_batch(data: Data, undisturbed: list[Step]) -> None:
    found: list[Step] = []
    with World(data.config(num_loaders=2)) as world:
        runtime = world.loaders[0]._session._runtime
        while step := world.steps(1):
            found += step
            runtime.kill(f"loader/{len(found) % 2}")
            if len(found) % 3 == 0:
                runtime.kill("loader/0")
                runtime.kill("loader/1")
    assert_same(found, undisturbed)


def test_a_shown_sample_has_the_fields_of_both(data: Data, undisturbed: list[Step]) -> None:
    with MegaScaleLoader(data.config()) as loader:
        for piece in undisturbed[1].pieces()[:5]:
            shown = loader.sample(piece)
            number = int(shown.raw["txt"].split()[1])
            assert shown.raw == {"__key__": key_of(number), "txt": f"txt {number}", "text": f"text {number}"}
            assert shown.transformed == {"input_ids": tokens_of(number)}
            assert loader.lineage(piece).life == "ahead"


class TestMissing:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Data:
        return write_data(tmp_path / "data", "parquet", "jsonl", missing=5)

    def test_they_are_dropped_and_counted(self, data: Data, tmp_path: Path) -> None:
        config = data.config(data.source(on_error="quarantine"), quarantine_dir=str(tmp_path / "bad"))
        steps = run_world(config, dp=2, keep_states=True)
        given = given_in(steps)
        assert set(given.values()) == {1}
        assert len(given) == EPOCHS * (COUNT - 5)
        last = steps[-1].state
        assert last is not None
        assert last["sources"]["pairs"]["dropped"] == {"unpaired": EPOCHS * 5}
        lines = list(read_lines(tmp_path / "bad"))
        assert [line["reason"] for line in lines] == ["unpaired"] * 5
        assert len({line["digest"] for line in lines}) == 5
        with World(config, state=last) as world:
            life = world.loaders[0].lineage(("pairs", 0, lines[0]["unit"], lines[0]["row"]))
        assert (life.life, life.reason) == ("dropped", "unpaired")
        for at, step in enumerate(steps[:-1]):
            with World(config, 1, state=step.state) as world:
                assert_same(world.steps(2), steps[at + 1 : at + 3], tensors=False)

    def test_the_first_of_them_ends_the_run(self, data: Data) -> None:
        said = (
            r"source 'pairs', \S+own/\d\.parquet, unit \d+, row \d: no record of \S+ and 1 more files has the '__key__'"
        )
        with pytest.raises(DataError, match=said) as caught:
            run_world(data.config())
        place = str(caught.value).partition(".sample(")[2].partition(")")[0]
        name, *numbers = place.strip("(").split(", ")
        with MegaScaleLoader(data.config()) as loader:
            shown = loader.sample((name.strip("'"), *map(int, numbers)))
            assert list(shown.raw) == ["__key__", "txt"]
            with pytest.raises(DataError, match="no record of"):
                _ = shown.transformed

    def test_a_share_of_them_may_be_too_much(self, data: Data) -> None:
        source = data.source(on_error="skip", max_bad_fraction=0.05)
        with pytest.raises(DataError, match=r"5 of 48 records are bad, more than max_bad_fraction=0\.05 allows"):
            run_world(data.config(source))
        assert run_world(data.config(data.source(on_error="skip", max_bad_fraction=0.2)))

    def test_the_digest_is_of_both(self, data: Data, tmp_path: Path) -> None:
        def digests(folder: str, source: Source) -> list[str]:
            run_world(data.config(source, quarantine_dir=str(tmp_path / folder)))
            return [line["digest"] for line in read_lines(tmp_path / folder) if line["reason"] == "transform_error"]

        def raises(sample: dict[str, Any]) -> dict[str, Any]:
            if "txt 7" in sample["txt"]:
                raise ValueError("no")
            return {"input_ids": [1]}

        source = data.source(on_error="quarantine", transform=raises)
        found = digests("a", source)
        assert len(found) == 1
        assert digests("b", source) == found
        assert digests("c", data.source(on_error="quarantine", transform=raises, join=None)) != found


class TestFiles:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Data:
        return write_data(tmp_path, "parquet", "jsonl")

    @pytest.fixture
    def saved(self, data: Data) -> dict[str, Any]:
        with World(data.config()) as world:
            world.steps(3)
            return world.state()

    def test_the_list_is_kept(self, data: Data) -> None:
        with MegaScaleLoader(data.config()) as loader:
            lists = loader._session.file_lists()
        assert {name: [os.path.basename(info.path) for info in files] for name, files in lists.items()} == {
            "pairs": ["0.parquet", "1.parquet"],
            "pairs/join/0": ["0.jsonl", "1.jsonl"],
        }

    @pytest.mark.parametrize("how", ["grown", "rewritten", "gone", "added"])
    def test_other_files_are_refused(self, data: Data, saved: dict[str, Any], how: str) -> None:
        with MegaScaleLoader(data.config()) as loader:
            lists = loader._session.file_lists()
        path = data.root / "other" / "1.jsonl"
        if how == "grown":
            path.write_text(path.read_text() + "\n")
        elif how == "rewritten":
            os.utime(path, ns=(1, 1))
        elif how == "gone":
            path.unlink()
        else:
            (data.root / "other" / "2.jsonl").write_text("\n")
        said = {"grown": "1 of another size", "rewritten": "1 written since", "gone": "1 gone", "added": "1 added"}[how]
        name = "modified" if how == "rewritten" else "files"
        with MegaScaleLoader(data.config()) as loader:
            with pytest.raises(StateError, match=rf"{name}\.pairs: .*\(join/0: {said}: \S*/\d\.jsonl"):
                loader._session.state_from_json("train", saved, lists)
            with pytest.raises(StateError, match=rf"{name}\.pairs"):
                loader.load_state_dict(saved)
            changes = loader._session.compare_files(saved, lists)
            assert changes.copied == ()
            assert dict(changes.kept) == ({"pairs/join/0": lists["pairs/join/0"]} if how == "added" else {})

    @pytest.mark.parametrize("which", [["own"], ["other"], ["own", "other"]])
    def test_copies_are_the_same_data(self, data: Data, saved: dict[str, Any], which: list[str]) -> None:
        with MegaScaleLoader(data.config()) as loader:
            lists = loader._session.file_lists()
        for at, path in enumerate(path for name in which for path in sorted((data.root / name).iterdir())):
            os.utime(path, ns=(10**9 * at, 10**9 * at))
        with MegaScaleLoader(data.config()) as loader:
            changes = loader._session.compare_files(saved, lists)
            assert changes.copied == ("pairs",)
            loader._session.state_from_json("train", saved, lists, changes.copied)
        os.utime(data.root / "own" / "0.parquet", ns=(5, 5))
        if which == ["other"]:
            with MegaScaleLoader(data.config()) as loader:
                assert loader._session.compare_files(saved, lists).copied == ()

    def test_a_join_that_was_added_has_no_files_to_keep_to(self, data: Data) -> None:
        plain = data.config(data.source(transform=alone, join=None))
        with World(plain) as world:
            world.steps(1)
            saved, lists = world.state(), world.loaders[0]._session.file_lists()
        with MegaScaleLoader(data.config()) as loader:
            assert loader._session.compare_files(saved, lists) == FileChanges()
            with pytest.raises(StateError, match=r"sources\.pairs\.join: "):
                loader.load_state_dict(saved)

    def test_another_join_is_refused(self, data: Data, saved: dict[str, Any]) -> None:
        more = Join(data.join.data, on="__key__", columns=("text", "__key__"))
        for join in (None, more):
            config, said = data.config(data.source(join=join)), r"sources\.pairs\.join: "
            with MegaScaleLoader(config) as loader, pytest.raises(StateError, match=said):
                loader.load_state_dict(saved)


class TestSecrets:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Iterator[tuple[Data, RangeServer]]:
        pytest.importorskip("aiohttp")
        data = write_data(tmp_path, "parquet", "parquet")
        with RangeServer(tmp_path / "other") as server:
            urls = [f"{server.url}/{index}.parquet" for index in range(2)]
            options = {"headers": {"Authorization": "env:JOIN_AUTH"}}
            join = Join(urls, on="__key__", columns=("text",), storage_options=options)
            yield Data(tmp_path, data.own, join), server

    def test_they_open_the_door_and_are_seen_nowhere(
        self, data: tuple[Data, RangeServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        given, server = data
        server.authorizations = frozenset({f"Bearer {SECRET}"})
        monkeypatch.setenv("JOIN_AUTH", f"Bearer {SECRET}")
        source = given.source(on_error="skip")
        literal = Join(
            given.join.data, on="__key__", storage_options={"headers": {"Authorization": f"Bearer {SECRET}"}}
        )
        with World(given.config(source)) as world:
            assert world.steps(3)
            state = world.state()
            manifests = world.loaders[0]._session._manifests
            lists = world.loaders[0]._session.packed_file_lists
            plan = runtime_plan(given.config(source), world.loaders[0]._session._specs, manifests, "run")
            assert plan.environment == {"JOIN_AUTH": f"Bearer {SECRET}"}
        server.authorizations = frozenset({"Bearer another"})
        with pytest.raises(DataError, match="403") as caught:
            run_world(given.config(source))
        told = [repr(state), repr(manifests), repr(lists), repr(caught.value), caplog.text]
        told += [repr(literal), repr(given.source(join=literal)), repr(given.config(given.source(join=literal)))]
        assert not [text for text in told if SECRET in text]
        assert SECRET.encode() not in pickle.dumps(manifests)

    def test_a_variable_that_is_not_set_is_named(self, data: tuple[Data, RangeServer]) -> None:
        with pytest.raises(Exception, match=r"'JOIN_AUTH'"):
            run_world(data[0].config())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_in_actors_that_are_killed(data: Data, undisturbed: list[Step]) -> None:
    found: list[Step] = []
    with World(data.config(runtime="ray", num_loaders=2)) as world:
        while step := world.steps(1):
            found += step
            if len(found) in (2, 5):
                stats = world.loaders[0]._session.stats()
                os.kill(stats[f"loader/{len(found) % 2}"]["pid"], signal.SIGKILL)
    assert_same(found, undisturbed)
