"""States that older versions saved go on with the same data, for as long as their order is the same.

The files hold a state and the certificates of steps behind it. They are never made anew: a version that cannot go on
from one of them needs a migration, or a new ORDER_VERSION.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import MegaScaleLoader, Mixture, StateError
from megascale_lightning.checkpointing.migrations import STATE_VERSION, migrate
from megascale_lightning.checkpointing.state import weights_by_name
from tests.golden.corpus import RAMP, SLOPE, golden_config, write_corpus

FOLDER = Path(__file__).parent


def golden(version: int) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"state_v{version}.json").read_text()))


def test_there_is_one_of_every_version() -> None:
    assert [golden(version)["state"]["version"] for version in range(1, STATE_VERSION + 1)] == [1, 2, 3]


@pytest.mark.parametrize(("version", "passes", "mixture"), [(1, False, None), (2, True, None), (3, False, RAMP)])
def test_it_goes_on_with_the_same_data(tmp_path: Path, version: int, passes: bool, mixture: Mixture | None) -> None:
    write_corpus(tmp_path)
    found = golden(version)
    with MegaScaleLoader(golden_config(tmp_path, mixture=mixture), passes=passes) as loader:
        # The golden corpus is written anew: its files have other times than when the state was saved.
        state = {"files": {name: text[:12] for name, text in loader.state_dict()["files"].items()}, **found["state"]}
        loader.load_state_dict(state)
        seen = {str(loader.step): loader.certificate}
        while loader.step < max(map(int, found["certificates"])):
            for _ in loader:
                seen[str(loader.step)] = loader.certificate
                if str(max(map(int, found["certificates"]))) in seen:
                    break
    assert {step: seen[step] for step in found["certificates"]} == found["certificates"]


def test_a_curriculum_goes_on_with_the_same_data(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    found = json.loads((FOLDER / "state_v3_curriculum.json").read_text())
    with MegaScaleLoader(golden_config(tmp_path, strategy=SLOPE)) as loader:
        state = {"files": {name: text[:12] for name, text in loader.state_dict()["files"].items()}, **found["state"]}
        loader.load_state_dict(state)
        seen = {str(loader.step): loader.certificate}
        for _ in loader:
            seen[str(loader.step)] = loader.certificate
            if loader.step == 48:
                break
    assert {step: seen[step] for step in found["certificates"]} == found["certificates"]


def test_the_files_of_version_1_are_still_recognised(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with (tmp_path / "web.jsonl").open("a") as file:
        file.write('{"input_ids": [1]}\n')
    with (
        MegaScaleLoader(golden_config(tmp_path)) as loader,
        pytest.raises(StateError, match=r"files\.web") as raised,
    ):
        loader.load_state_dict(golden(1)["state"])
    assert "files.code" not in str(raised.value)


def test_a_migration_changes_nothing_of_what_it_is_given() -> None:
    saved = golden(1)["state"]
    migrate(saved)
    assert saved == golden(1)["state"]
    migrated = migrate(golden(1)["state"])
    assert weights_by_name(migrated, "weights") == saved["mixture"]["weights"]
    assert migrate(migrated) == migrated


@pytest.mark.parametrize("version", [0, STATE_VERSION + 1, "2", None])
def test_other_versions_are_refused(version: Any) -> None:
    with pytest.raises(
        StateError, match=rf"version {version!r}, saved by megascale_lightning 9\.1.* reads versions 1 to"
    ):
        migrate({**golden(2)["state"], "version": version, "package": "9.1"})


@pytest.mark.parametrize("key", ["carry", "mixture", "fingerprint", "files", "sources"])
def test_a_damaged_old_state_is_refused(key: str) -> None:
    saved = golden(1)["state"]
    del saved[key]
    with pytest.raises(StateError, match="damaged"):
        migrate(saved)
