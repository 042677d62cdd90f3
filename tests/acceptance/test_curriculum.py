"""Curricula through the loader: fields of files, evaluations, and what a resume says of another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale_lightning import Curriculum, LoaderConfig, MegaScaleLoader, PaddedRows, Source, StateError
from megascale_lightning.checkpointing.packing import pack_records, unpack_records
from megascale_lightning.types import LEVEL_STATE

SIZE = 400


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Records of 8 tokens, of which the first is their number, with a number `noise` from 0 to 1."""
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        lines = [
            json.dumps({"input_ids": [index, *[7] * 7], "noise": noise}) + "\n"
            for index, noise in enumerate(rng.random(SIZE).tolist())
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


NOISE = Curriculum("noise", [(0, 0.2), (40, 0.9)])


def config_for(corpus: Path, strategy: Any = NOISE, **more: Any) -> LoaderConfig:
    return LoaderConfig(
        sources=[Source(name, str(corpus / f"{name}.jsonl"), epochs=2) for name in ("web", "code")],
        rows=PaddedRows(8, 4),
        global_batch_size=20,
        runtime="local",
        window_units=1,
        part_bytes=2000,
        strategy=strategy,
        **{"val_sources": [Source("held", str(corpus / "web.jsonl"))], **more},
    )


def noise_of(corpus: Path) -> dict[str, list[float]]:
    lines = {name: (corpus / f"{name}.jsonl").read_text().splitlines() for name in ("web", "code")}
    return {name: [json.loads(line)["noise"] for line in found] for name, found in lines.items()}


def steps_of(loader: MegaScaleLoader, count: int) -> list[list[tuple[Any, ...]]]:
    """The samples of the next steps: (source, epoch, unit, row, start, stop)."""
    found: list[list[tuple[Any, ...]]] = []
    new = True
    for batch in loader:
        info = batch["megascale"]
        if new:
            found.append([])
        found[-1] += [piece for row in info.sample_ids() for piece in row]
        new = info.is_last_in_step
        if new and len(found) == count:
            break
    return found


def tokens_match(corpus: Path, batch: Any) -> bool:
    return bool((batch["input_ids"][:, 1:] == 7).all())


def test_a_field_of_the_files_follows_its_schedule_and_every_record_comes_once_an_epoch(corpus: Path) -> None:
    numbers = noise_of(corpus)
    with MegaScaleLoader(config_for(corpus)) as loader:
        steps = []
        for batch in loader:
            info = batch["megascale"]
            assert tokens_match(corpus, batch)
            of_rows = [row[0] for row in info.sample_ids() if row]
            for row, (source, *_) in zip(batch["input_ids"].tolist(), of_rows, strict=False):
                steps.append((info.step, source, row[0]))
    easy = [numbers[source][index] for step, source, index in steps if step < 5]
    assert np.quantile(easy, 0.9) == pytest.approx(0.2, abs=0.1)
    assert sorted((source, index) for _, source, index in steps) == sorted(
        (source, index) for source in numbers for index in range(SIZE) for _ in range(2)
    )


def test_a_state_goes_on_and_a_different_curriculum_is_refused_unless_forced(corpus: Path) -> None:
    with MegaScaleLoader(config_for(corpus)) as loader:
        steps_of(loader, 12)
        saved = json.loads(json.dumps(loader.state_dict()))
        whole = steps_of(loader, 5)
    with MegaScaleLoader(config_for(corpus)) as loader:
        loader.load_state_dict(saved)
        assert steps_of(loader, 5) == whole
    other = Curriculum("noise", [(0, 0.2), (40, 0.8)])
    for changed in (other, None):
        with (
            MegaScaleLoader(config_for(corpus, changed)) as loader,
            pytest.raises(StateError, match=r"curriculum: .*another order: every source begins its epoch anew"),
        ):
            loader.load_state_dict(saved)
        with MegaScaleLoader(config_for(corpus, changed, force_resume=["strategy"])) as loader:
            loader.load_state_dict(saved)
            at_once = json.loads(json.dumps(loader.state_dict()))
            found = steps_of(loader, 10**6)
        with MegaScaleLoader(config_for(corpus, changed)) as loader:
            loader.load_state_dict(at_once)
            assert steps_of(loader, 3) == found[:3], "as it was saved before a step of its own"
        left = {piece[:4] for step in found for piece in step}
        given = {piece[:4] for step in whole for piece in step}
        assert given <= left, "what waited is not lost"
    with MegaScaleLoader(config_for(corpus, None)) as loader:
        steps_of(loader, 3)
        plain = loader.state_dict()
    assert "levels" not in plain
    with (
        MegaScaleLoader(config_for(corpus)) as loader,
        pytest.raises(StateError, match=r"curriculum: None \| "),
    ):
        loader.load_state_dict(plain)
    with MegaScaleLoader(config_for(corpus, force_resume=["strategy"])) as loader:
        loader.load_state_dict(plain)
        assert len(steps_of(loader, 10**6)) == 80


def test_levels_that_the_run_does_not_have_are_refused(corpus: Path) -> None:
    with MegaScaleLoader(config_for(corpus)) as loader:
        fresh = loader.state_dict()
        steps_of(loader, 12)
        saved = loader.state_dict()
    count = saved["levels"]["count"]
    places = unpack_records(saved["levels"]["packed"], LEVEL_STATE, 2 * count).reshape(2, count)
    beyond = places.copy()
    beyond["window"][0, 3] = 40
    fewer = {"count": count - 1, "packed": pack_records(places[:, 1:].ravel())}
    without = {name: value for name, value in saved.items() if name != "levels"}
    cases = [
        ({**saved, "levels": fewer}, rf"places of {count - 1} levels a source .* the curriculum has {count}"),
        (without, rf"places of 0 levels a source .* the curriculum has {count}"),
        (
            {**saved, "levels": {"count": count, "packed": pack_records(beyond.ravel())}},
            r"levels: of code a window is 40, and the source has 1 of them",
        ),
    ]
    with MegaScaleLoader(config_for(corpus)) as loader:
        for damaged, said in cases:
            with pytest.raises(StateError, match=f"damaged: .*{said}"):
                loader.load_state_dict(damaged)
        loader.load_state_dict(fresh)
        loader.load_state_dict(saved)
    with MegaScaleLoader(config_for(corpus, None)) as loader:
        steps_of(loader, 2)
        plain = loader.state_dict()
        with pytest.raises(StateError, match=rf"damaged: .*places of {count} levels a source .* the curriculum has 0"):
            loader.load_state_dict({**plain, "levels": saved["levels"]})
    for changed in (Curriculum("noise", [(0, 0.3), (40, 0.9)]), None):
        with MegaScaleLoader(config_for(corpus, changed, force_resume=["strategy"])) as loader:
            for damaged, _ in cases:
                loader.load_state_dict(damaged)  # every source begins anew


def test_evaluations_have_none(corpus: Path) -> None:
    found = []
    for strategy in (NOISE, None):
        with MegaScaleLoader(config_for(corpus, strategy), stream="val/0") as loader:
            steps = steps_of(loader, 10**6)
            assert sum(map(len, steps)) == SIZE
            found.append(steps)
    assert found[0] == found[1]


def test_evaluations_need_none_of_its_numbers(corpus: Path) -> None:
    held = corpus / "held.jsonl"
    held.write_text("".join(json.dumps({"input_ids": [index] * 8}) + "\n" for index in range(20)))
    config = config_for(corpus, val_sources=[Source("held", str(held))])
    with MegaScaleLoader(config, stream="val/0") as loader:
        assert sum(map(len, steps_of(loader, 10**6))) == 20


@pytest.mark.parametrize("steps", [1, 9])
def test_what_became_of_a_sample_is_told_level_by_level(corpus: Path, steps: int) -> None:
    with MegaScaleLoader(config_for(corpus)) as loader:
        given = {piece[:4] for step in steps_of(loader, steps) for piece in step}
        saved = loader.state_dict()
        units = {piece[2] for piece in given if piece[0] == "web"}
        assert len(units) == 1, "one unit a file"
    with MegaScaleLoader(config_for(corpus)) as loader:
        loader.load_state_dict(saved)
        for row in range(0, SIZE, 7):
            sample = ("web", 0, 0, row)
            assert loader.lineage(sample).life == ("consumed" if sample in given else "ahead"), sample
