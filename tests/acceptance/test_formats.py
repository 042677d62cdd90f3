"""What holds for every format: the order, every record once, resume, loaders that die, odd names, changed files."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import CollatedRows, ConfigError, DataError, LoaderConfig, MegaScaleLoader, PackedRows
from megascale_lightning.sources.formats.csv import format as csv
from megascale_lightning.sources.formats.webdataset import format as webdataset
from megascale_lightning.sources.stores import plaintext

from .formatfiles import FOLDER, number_of_tokens, tokens_of
from .formats import CASES, Case, Made
from .harness import Step, World, count_tokens, documents, run_world, same_tensors

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

SEQ_LEN = 16


def config_of(made: Made, *, raw: bool = False, epochs: int | None = None, **changes: Any) -> LoaderConfig:
    source = {name: changes.pop(name) for name in ("data", "shuffle") if name in changes}
    base: dict[str, Any] = {
        "sources": [(made.raw if raw else made.tokens)(epochs=epochs, **source)],
        "rows": PackedRows(SEQ_LEN, 2, pack_ahead=6),
        "global_batch_size": 4,
        "seed": 3,
        "runtime": "local",
        "window_units": 2,
        "part_bytes": made.case.part_bytes,
        "prefetch_steps": 2,
        "plan_window": 3,
    }
    return LoaderConfig(**(base | changes))


def slice_files(patch: pytest.MonkeyPatch, case: Case) -> None:
    """Small files stand for large ones."""
    if case.sliced:
        for module in (plaintext, csv, webdataset):
            patch.setattr(module, "SLICED_BYTES", 100)


@pytest.fixture(scope="module", params=CASES, ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch:
        slice_files(patch, request.param)
        yield request.param.make(tmp_path_factory.mktemp("formats") / FOLDER)


@dataclass
class Undisturbed:
    config: LoaderConfig
    epochs: int
    steps: list[Step]


@pytest.fixture(scope="module")
def undisturbed(made: Made) -> Undisturbed:
    """Some epochs on one rank of one loader that reads nothing ahead."""
    epochs = max(2, -(-80 // made.case.count))
    config = config_of(made, epochs=epochs, num_loaders=1, prefetch_steps=0, plan_window=1)
    steps = run_world(config, keep_states=True)
    assert len(steps) > 5
    return Undisturbed(config, epochs, steps)


def certificates_of(steps: list[Step]) -> list[str]:
    return [step.certificate for step in steps]


def assert_same(found: list[Step], expected: list[Step], *, tensors: bool = True) -> None:
    assert certificates_of(found) == certificates_of(expected)
    if tensors:
        assert all(same_tensors(mine, its) for mine, its in zip(found, expected, strict=True))
    else:
        assert [count_tokens([step]) for step in found] == [count_tokens([step]) for step in expected]


def test_every_record_once_in_each_epoch(made: Made, undisturbed: Undisturbed) -> None:
    """Whole, as its own tokens."""
    found: Counter[tuple[int, int]] = Counter()
    ids: set[tuple[int, ...]] = set()
    for step in undisturbed.steps:
        for mb in step.microbatches():
            for row, pieces in enumerate(mb.rows):
                for piece, tokens in zip(pieces, documents(mb, row), strict=True):
                    number = number_of_tokens(tokens)
                    assert tokens.tolist() == tokens_of(number)
                    found[piece[1], number] += 1
                    ids.add(piece[1:4])
    wanted = [(epoch, number) for epoch in range(undisturbed.epochs) for number in range(made.case.count)]
    assert sorted(found) == wanted
    assert set(found.values()) == {1}
    assert len(ids) == len(wanted), "an id names one record"


@pytest.mark.parametrize(
    ("dp", "changes"),
    [
        (2, {"num_loaders": 1, "prefetch_steps": 4, "plan_window": 8}),
        (1, {"num_loaders": 2, "prefetch_steps": 4, "plan_window": 1}),
        (2, {"num_loaders": 3, "prefetch_steps": 0, "plan_window": 8}),
    ],
    ids=["one loader", "two loaders", "three loaders"],
)
def test_the_order_depends_on_nothing_else(
    made: Made, undisturbed: Undisturbed, dp: int, changes: dict[str, Any]
) -> None:
    steps = run_world(config_of(made, epochs=undisturbed.epochs, **changes), dp=dp)
    assert_same(steps, undisturbed.steps, tensors=dp == 1)


def numbers_of(made: Made, **changes: Any) -> list[int]:
    """The records of two epochs as they are, one by one."""
    rows = CollatedRows(1, collate_fn=list)
    config = config_of(made, raw=True, epochs=2, rows=rows, global_batch_size=1, **changes)
    with MegaScaleLoader(config) as loader:
        return [made.case.number_of(sample) for batch in loader for sample in batch]


def test_records_as_they_are_in_stored_or_seeded_order(made: Made) -> None:
    everything = list(range(made.case.count))
    assert numbers_of(made, shuffle=False, num_loaders=2) == everything * 2
    shuffled = numbers_of(made)
    first, second = shuffled[: len(everything)], shuffled[len(everything) :]
    assert sorted(first) == sorted(second) == everything
    assert first != second, "epochs differ"
    assert first != everything
    other = numbers_of(made, seed=4)
    assert sorted(other[: len(everything)]) == everything
    assert other != shuffled, "seeds differ"


@pytest.mark.parametrize("made", [case for case in CASES if case.is_listed], indirect=True, ids=str)
def test_a_list_of_files_in_an_order_of_its_own(made: Made) -> None:
    paths = sorted(glob.glob(made.keywords["data"]), reverse=True)
    found = numbers_of(made, data=paths, shuffle=False)
    assert sorted(found) == sorted([*range(made.case.count)] * 2)
    assert found[0] == made.case.count - 1


def test_resume_at_every_step(made: Made, undisturbed: Undisturbed) -> None:
    steps = undisturbed.steps
    for at, step in enumerate(steps[:-1]):
        dp = 1 + at % 2
        config = config_of(made, epochs=undisturbed.epochs, num_loaders=2 - at % 2, plan_window=1 + at % 3)
        with World(config, dp, state=json.loads(json.dumps(step.state))) as world:
            assert_same(world.steps(), steps[at + 1 :], tensors=dp == 1)


def test_loaders_that_die_between_steps_change_no_batch(made: Made, undisturbed: Undisturbed) -> None:
    found: list[Step] = []
    with World(config_of(made, epochs=undisturbed.epochs, num_loaders=2)) as world:
        runtime = world.loaders[0]._session._runtime
        while step := world.steps(1):
            found += step
            runtime.kill(f"loader/{len(found) % 2}")
            if len(found) % 3 == 0:
                runtime.kill("loader/0")
                runtime.kill("loader/1")
    assert_same(found, undisturbed.steps)


@pytest.mark.parametrize("how", ["replaced", "removed"])
@pytest.mark.parametrize("case", [case for case in CASES if case.files], ids=str)
def test_a_file_that_changes_under_a_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, how: str
) -> None:
    slice_files(monkeypatch, case)
    made = case.make(tmp_path / FOLDER)
    victim = made.files()[0]
    with World(config_of(made)) as world:
        world.steps(2)
        if how == "removed":
            victim.unlink()
        else:
            other = tmp_path / "other"
            other.write_bytes(victim.read_bytes() + b"\n\n")
            os.replace(other, victim)
        with pytest.raises(DataError) as caught:
            world.steps(100)
    assert case.name in str(caught.value)
    assert victim.name in str(caught.value)


@pytest.mark.parametrize("case", [case for case in CASES if case.may_be_empty], ids=str)
def test_a_source_without_records_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    slice_files(monkeypatch, case)
    made = case.make(tmp_path / FOLDER, [[], []])
    with pytest.raises((ConfigError, DataError), match=rf"source '{case.name}'"):
        run_world(config_of(made), steps=1)


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    """Names of files are bytes."""
    made = next(case for case in CASES if case.name == "jsonl").make(tmp_path / FOLDER)
    path = made.files()[0]
    os.rename(path, os.path.join(os.fsencode(path.parent), b"z \xff\xfe.jsonl"))
    steps = run_world(config_of(made, epochs=1), keep_states=True)
    assert sorted(count_tokens(steps)) == [token for number in range(made.case.count) for token in tokens_of(number)]
    with World(config_of(made, epochs=1), state=steps[0].state) as world:
        assert_same(world.steps(), steps[1:])
