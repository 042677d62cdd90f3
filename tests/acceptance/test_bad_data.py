"""Bad records of every kind under every `on_error`: named, dropped and counted, or listed; all good ones delivered."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest

from megascale_lightning import DataError, MegaScaleLoader
from megascale_lightning.errors import CorruptDataError

from .bad_cases import (
    CASES,
    LINES,
    Case,
    check_lines,
    config_of,
    counts_of,
    files,
    good_line,
    quarantined,
    run,
    token_of,
    unpicky,
    untouched,
)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return CASES[request.param](tmp_path)


def test_it_is_named(case: Case, tmp_path: Path) -> None:
    """With "raise": source, file, unit, row and what is wrong, and what to do to go on without it."""
    if case.bad[0].row < 0 and case.bad[0].records == 1:
        expected: tuple[str, ...] = ("'web'", case.bad[0].file, case.bad[0].word)  # it is found when files are listed
    else:
        place = f"unit {case.bad[0].unit}" + (f", row {case.bad[0].row}" if case.bad[0].row >= 0 else "")
        expected = ("'web'", case.bad[0].file, place, case.bad[0].word, 'on_error="skip"')
    with pytest.raises(DataError) as caught:
        run(config_of(case, "raise", tmp_path))
    for word in expected:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_it_is_left_out(case: Case, tmp_path: Path) -> None:
    """Every good record once; each bad one counted, under "quarantine" listed too; the order is the same in both."""
    skipped = run(config_of(case, "skip", tmp_path))
    assert skipped.delivered == Counter(case.good)
    assert skipped.dropped == counts_of(case)
    assert skipped.lines == []
    assert not (tmp_path / "quarantine").exists()
    config = config_of(case, "quarantine", tmp_path)
    listed = run(config)
    assert (listed.delivered, listed.dropped) == (skipped.delivered, skipped.dropped)
    assert listed.certificate == skipped.certificate
    check_lines(listed.lines, case.bad)
    assert run(config).lines == listed.lines, "a second run has nothing to add"


def test_the_digest_is_that_of_the_stored_record(tmp_path: Path) -> None:
    case = LINES["no JSON"](tmp_path)
    entries = run(config_of(case, "quarantine", tmp_path)).lines
    stored = Path(case.data).read_bytes().split(b"\n")
    for entry in entries:
        line = stored[entry["row"]]
        assert (entry["digest"], entry["size"]) == (blake2b(line, digest_size=16).hexdigest(), len(line))


def test_a_compressed_file_that_is_cut_short(tmp_path: Path) -> None:
    """What lies before the cut is delivered, the rest is one bad record."""
    for index in range(3):
        content = b"".join(good_line(1000 * index + number) + b"\n" for number in range(300))
        (tmp_path / f"part-{index}.jsonl.gz").write_bytes(gzip.compress(content))
    path = tmp_path / "part-1.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-300])
    case = Case(str(tmp_path / "*.gz"), [], [])
    found = run(config_of(case, "quarantine", tmp_path))
    assert set(found.delivered) >= {token_of(1000 * index + number) for index in (0, 2) for number in range(300)}
    assert set(found.delivered.values()) == {1}
    assert found.dropped == {"read_error": 1}
    (entry,) = found.lines
    assert (Path(entry["file"]).name, entry["unit"], entry["reason"]) == ("part-1.jsonl.gz", 1, "read_error")
    assert run(config_of(case, "skip", tmp_path)).certificate == found.certificate
    with pytest.raises(DataError, match=r"part-1\.jsonl\.gz"):
        run(config_of(case, "raise", tmp_path))


@pytest.mark.parametrize("on_error", ["raise", "skip", "quarantine"])
def test_what_may_be_read_tomorrow_always_ends_the_run(tmp_path: Path, on_error: str) -> None:
    """A file that is gone, or has another size than when the run began, is no bad record."""
    for spoil in (Path.unlink, lambda path: path.write_bytes(b"short")):
        case = files(untouched)(tmp_path)
        with MegaScaleLoader(config_of(case, on_error, tmp_path)) as loader:
            spoil(tmp_path / "part-1.parquet")
            with pytest.raises(DataError, match=r"part-1\.parquet") as caught:
                list(loader)
        assert not isinstance(caught.value, CorruptDataError)
    assert quarantined(config_of(case, on_error, tmp_path)) == []


def test_what_a_policy_drops_is_not_bad(tmp_path: Path) -> None:
    """Empty, overlong and filtered samples are counted for themselves, listed nowhere, and no error under "raise"."""
    content = [good_line(0), b'{"input_ids": []}', json.dumps({"input_ids": [1] * 100}).encode(), b'{"what": "filter"}']
    (tmp_path / "lines.jsonl").write_bytes(b"\n".join([*content, good_line(1)]))
    case = Case(str(tmp_path / "lines.jsonl"), [token_of(0), token_of(1)], [])
    expected = {"empty": 1, "overlong": 1, "filtered": 1}
    policies = {"overlong": "drop", "transform": unpicky}
    for on_error, limit in (("raise", None), ("skip", 0.0), ("quarantine", 0.0)):
        found = run(config_of(case, on_error, tmp_path, source={**policies, "max_bad_fraction": limit}))
        assert (found.delivered, found.dropped, found.lines) == (Counter(case.good), expected, [])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("shared_ray")
class TestRay:
    """The same in actors."""

    @pytest.mark.parametrize("name", ["no JSON", "transform", "overflow in a table", "broken row group"])
    def test_it_is_left_out(self, tmp_path: Path, name: str) -> None:
        case = CASES[name](tmp_path)
        here = run(config_of(case, "quarantine", tmp_path))
        for entry in here.lines:
            del entry["time"]
        os.unlink(tmp_path / "quarantine" / "train" / "web.jsonl")
        there = run(config_of(case, "quarantine", tmp_path, runtime="ray"))
        for entry in there.lines:
            del entry["time"]
        assert there == here
        check_lines(there.lines, case.bad)

    @pytest.mark.parametrize("name", ["no UTF-8", "broken row group"])
    def test_it_is_named(self, tmp_path: Path, name: str) -> None:
        case = CASES[name](tmp_path)
        with pytest.raises(DataError) as caught:
            run(config_of(case, "raise", tmp_path, runtime="ray"))
        for word in ("'web'", case.bad[0].file, "unit", case.bad[0].word, 'on_error="skip"'):
            assert word in str(caught.value)
