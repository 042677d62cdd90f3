"""What is left out as bad: its list over the life of a run, in slices, by killed loaders; the limit of its share."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import ConfigError, DataError, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.cli import main
from megascale_lightning.errors import CorruptDataError
from megascale_lightning.sources.formats.jsonl import JsonLinesReader
from megascale_lightning.sources.stores import plaintext

from .bad_cases import (
    Case,
    check_lines,
    config_of,
    full_disk,
    good_line,
    quarantined,
    quarantined_while_written,
    run,
    write_lines,
)
from .harness import World

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


class TestQuarantine:
    """The file over the life of a run."""

    def places(self, config: LoaderConfig) -> Counter[tuple[int, int]]:
        return Counter((entry["unit"], entry["row"]) for entry in quarantined(config))

    def test_over_epochs_resumes_and_parts_read_again(self, tmp_path: Path) -> None:
        """Two epochs in small parts that are read again, stopped and resumed at each third step: a line each."""
        case = write_lines(tmp_path)
        small = {
            "window_units": 2,
            "part_bytes": 400,
            "loader_buffer_bytes": 1,
            "source": {"epochs": 2, "shuffle": True},
        }
        config = config_of(case, "quarantine", tmp_path, **small)
        with World(config) as world:
            whole = world.steps()[-1].certificate
            end = world.state()
        state: dict[str, Any] | None = None
        found = ""
        while not found or not state["ended"]:  # type: ignore[index]
            with World(config_of(case, "quarantine", tmp_path, **small), state=state) as world:
                steps = world.steps(3)
                found = steps[-1].certificate if steps else found
                state = world.state()
                assert state["sources"]["web"]["dropped"].get("read_error", 0) <= 2 * len(case.bad)
        assert found == whole
        assert (
            state["sources"]["web"]["dropped"] == end["sources"]["web"]["dropped"] == {"read_error": 2 * len(case.bad)}
        )
        assert self.places(config) == {(bad.unit, bad.row): 1 for bad in case.bad}

    def test_skip_may_become_quarantine(self, tmp_path: Path) -> None:
        """Both give the same samples: a run goes on with the other one without force."""
        case = write_lines(tmp_path)
        with World(config_of(case, "skip", tmp_path)) as world:
            world.steps(2)
            state = world.state()
        with World(config_of(case, "quarantine", tmp_path), state=state) as world:
            assert world.steps()
        with World(config_of(case, "skip", tmp_path)) as world:
            assert world.steps()[-1].certificate == world.state()["certificate"]

    def test_a_stream_has_a_file_of_its_own(self, tmp_path: Path) -> None:
        case = write_lines(tmp_path)
        good = tmp_path / "good"
        good.mkdir()
        (good / "a.jsonl").write_bytes(good_line(1))
        config = config_of(
            case,
            "skip",
            tmp_path,
            sources=[Source("web", str(good / "a.jsonl"))],
            val_sources=[Source("web", case.data, on_error="quarantine")],
        )
        for _ in range(2):
            with MegaScaleLoader(config, stream="val/0") as loader:
                list(loader)
        assert len(quarantined(config, "val/0")) == len(case.bad)
        assert {entry["stream"] for entry in quarantined(config, "val/0")} == {"val/0"}
        assert quarantined(config) == []

    def test_it_is_announced(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Once per source, with the place."""
        config = config_of(write_lines(tmp_path), "quarantine", tmp_path, part_bytes=400)
        run(config)
        said = [record.getMessage() for record in caplog.records if "quarantine" in record.name]
        assert len(said) == 1
        assert "'web'" in said[0]
        assert str(tmp_path / "quarantine" / "train" / "web.jsonl") in said[0]

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        """Said before anything is read, with the path; of no concern where nothing is quarantined."""
        case = write_lines(tmp_path)
        (tmp_path / "quarantine").write_text("a file")
        with pytest.raises(ConfigError, match=r"quarantine_dir") as caught:
            MegaScaleLoader(config_of(case, "quarantine", tmp_path))
        assert str(tmp_path / "quarantine" / "train" / "web.jsonl") in str(caught.value)
        with MegaScaleLoader(config_of(case, "skip", tmp_path)) as loader:
            assert list(loader)

    @pytest.mark.parametrize("folder", ["s3://bucket/quarantine", 7, ""])
    def test_a_folder_that_is_none(self, tmp_path: Path, folder: Any) -> None:
        with pytest.raises(ConfigError, match="quarantine_dir"):
            config_of(write_lines(tmp_path), "quarantine", tmp_path, quarantine_dir=folder)

    def test_the_default_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        case = write_lines(tmp_path)
        run(config_of(case, "quarantine", tmp_path, quarantine_dir=None))
        assert len((tmp_path / "megascale_quarantine" / "train" / "web.jsonl").read_text().splitlines()) == len(
            case.bad
        )

    def test_a_disk_that_is_full(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The run goes on with one warning, and counts."""
        case = write_lines(tmp_path)
        config = config_of(case, "quarantine", tmp_path, part_bytes=400)  # a part for each file
        with full_disk(10_000):
            found = run(config)
        assert found.delivered == Counter(case.good)
        assert found.dropped == {"read_error": len(case.bad)}
        assert 0 < len(found.lines) < len(case.bad)
        assert sum("cannot be listed" in record.getMessage() for record in caplog.records) == 1
        run(config)
        assert self.places(config) == {(bad.unit, bad.row): 1 for bad in case.bad}

    def test_the_command_counts_them(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        case = write_lines(tmp_path)
        run(config_of(case, "quarantine", tmp_path))
        assert main(["quarantine", str(tmp_path / "quarantine")]) == 0
        shown = capsys.readouterr().out
        for index in range(3):
            assert f"20  read_error      {tmp_path / f'part-{index:02}.jsonl'}" in shown

    def test_the_counts_are_shown_with_the_state(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        case = write_lines(tmp_path)
        with MegaScaleLoader(config_of(case, "skip", tmp_path, source={"max_bad_fraction": 0.5})) as loader:
            list(loader)
            (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        assert main(["state", str(tmp_path / "state.json")]) == 0
        shown = capsys.readouterr().out
        assert 'dropped: {"read_error": 60}' in shown
        assert 'checked: {"records": 180, "bad": 60}' in shown


class TestSlices:
    """Large compressed files, which are read slice by slice."""

    @pytest.fixture(autouse=True)
    def slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plaintext, "SLICED_BYTES", 100)

    def write(self, folder: Path) -> Case:
        case = write_lines(folder, count=120)
        for path in folder.glob("*.jsonl"):
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        for bad in case.bad:
            bad.file += ".gz"
        return Case(str(folder / "*.gz"), case.good, case.bad)

    def test_records(self, tmp_path: Path) -> None:
        case = self.write(tmp_path)
        found = run(config_of(case, "quarantine", tmp_path, part_bytes=300))
        assert (found.delivered, found.dropped) == (Counter(case.good), {"read_error": len(case.bad)})
        check_lines(found.lines, case.bad)
        assert run(config_of(case, "skip", tmp_path, part_bytes=300)).certificate == found.certificate

    def test_bytes_that_are_broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slice that cannot be read ends its unit: one more bad record, and one line for all of it."""
        case = self.write(tmp_path)
        read = JsonLinesReader.read_slice
        broken = {(1, 2)}

        def read_slice(self: Any, unit: int, index: int, slice_bytes: int) -> Any:
            if (unit, index) in broken:
                raise CorruptDataError("the checksum of block 7 is wrong")
            return read(self, unit, index, slice_bytes)

        monkeypatch.setattr(JsonLinesReader, "read_slice", read_slice)
        config = config_of(case, "quarantine", tmp_path, part_bytes=300)
        found = run(config)
        lost = [entry for entry in found.lines if entry["row"] == -1]
        assert [(Path(entry["file"]).name, entry["unit"]) for entry in lost] == [("part-01.jsonl.gz", 1)]
        assert "'web'" in lost[0]["message"]
        assert "the checksum of block 7 is wrong" in lost[0]["message"]
        # Two slices of it were read: the lines that begin in its first 600 bytes.
        content = gzip.decompress((tmp_path / "part-01.jsonl.gz").read_bytes())
        known = content[:599].count(b"\n") + 1
        good = [token for token in case.good if not 2000 + known <= token < 3000]
        bad = [bad for bad in case.bad if bad.unit != 1 or bad.row < known]
        assert 5 < known < 100
        assert found.delivered == Counter(good)
        check_lines([entry for entry in found.lines if entry["row"] >= 0], bad)
        assert found.dropped == {"read_error": len(bad) + 1}
        assert run(config_of(case, "skip", tmp_path, part_bytes=300)).certificate == found.certificate
        broken.add((0, 0))
        with pytest.raises(CorruptDataError, match=r"'web'.*part-00\.jsonl\.gz, unit 0.*block 7.*skip"):
            run(config_of(case, "raise", tmp_path, part_bytes=300))


class TestLimit:
    """`max_bad_fraction`; that it depends on the records alone is in tests/planning/test_bad_records.py."""

    @pytest.mark.parametrize("limit", [-0.1, 1, 1.5, float("nan"), "0.1"])
    def test_a_limit_that_is_none(self, limit: Any) -> None:
        with pytest.raises(ConfigError, match=r"'web'.*max_bad_fraction"):
            Source("web", "x.jsonl", on_error="skip", max_bad_fraction=limit)

    def test_a_limit_without_effect(self) -> None:
        with pytest.raises(ConfigError, match=r"'web'.*max_bad_fraction.*skip"):
            Source("web", "x.jsonl", max_bad_fraction=0.1)

    @pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
    def test_every_rank_gets_the_error(self, tmp_path: Path, runtime: str) -> None:
        """One error each, which says where the records are listed; not a hang, and no end of data."""
        limit = {"max_bad_fraction": 0.3, "shuffle": True}
        config = config_of(
            write_lines(tmp_path), "quarantine", tmp_path, source=limit, runtime=runtime, global_batch_size=4
        )
        with World(config, 2) as world:
            messages = []
            for loader in world.loaders:
                with pytest.raises(DataError) as caught:
                    list(loader)
                messages.append(str(caught.value))
        for message in messages:
            for word in ("'web'", "max_bad_fraction=0.3", str(tmp_path / "quarantine" / "train" / "web.jsonl")):
                assert word in message
        assert messages[0] == messages[1]

    def test_it_comes_again_after_a_resume_unless_the_limit_is_raised(self, tmp_path: Path) -> None:
        case = write_lines(tmp_path)
        policies = {"max_bad_fraction": 0.32}
        small = {"rows": PackedRows(16, 2, pack_ahead=2), "prefetch_steps": 0, "plan_window": 1}
        whole = run(config_of(case, "skip", tmp_path, **small))
        with World(config_of(case, "skip", tmp_path, source=policies, **small)) as world:
            world.steps(2)
            state = world.state()
            with pytest.raises(DataError) as first:
                world.steps()
        assert state["sources"]["web"]["checked"]["records"] < 100
        with (
            World(config_of(case, "skip", tmp_path, source=policies, **small), state=state) as world,
            pytest.raises(DataError) as again,
        ):
            world.steps()
        assert str(again.value) == str(first.value)
        with World(config_of(case, "skip", tmp_path, source={"max_bad_fraction": 0.4}, **small), state=state) as world:
            world.steps()
            assert world.state()["certificate"] == whole.certificate


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("shared_ray")
def test_loaders_that_are_killed_while_they_write(tmp_path: Path) -> None:
    """Again and again: no line is there twice or torn, and none is missing of records that were passed."""
    case = write_lines(tmp_path, count=20, every=2, num_files=60)
    small = {"window_units": 2, "part_bytes": 600, "prefetch_steps": 1, "plan_window": 1, "num_loaders": 1}
    config = config_of(case, "quarantine", tmp_path, runtime="ray", **small)
    with World(config) as world:
        session = world.loaders[0]._session
        killed = set()
        while len(killed) < 4:
            pid = session.stats()["loader/0"]["pid"]
            known = len(quarantined_while_written(config))
            while len(quarantined_while_written(config)) == known:
                assert world.step() is not None, "the loader has read all before it was killed often enough"
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            passed = world.state()["sources"]["web"]["dropped"]["read_error"]
            assert len(quarantined_while_written(config)) >= passed
        world.steps()
        assert world.state()["sources"]["web"]["dropped"] == {"read_error": len(case.bad)}
    assert Counter((e["unit"], e["row"]) for e in quarantined(config)) == {(b.unit, b.row): 1 for b in case.bad}
