"""States that no run has saved: each wrong field is refused by its name, before anything is planned from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows, Source, StateError
from megascale_lightning.checkpointing.packing import pack_array, pack_records
from megascale_lightning.types import PIECE

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    for name in ("code", "web"):
        lines = [json.dumps({"input_ids": [1] * (3 + number % 10)}) + "\n" for number in range(60)]
        (root / f"{name}.jsonl").write_text("".join(lines))
    return root


def config(folder: Path) -> LoaderConfig:
    sources = [Source(name, str(folder / f"{name}.jsonl")) for name in ("code", "web")]
    return LoaderConfig(sources=sources, rows=PackedRows(16, 2), runtime="local", global_batch_size=4, part_bytes=900)


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    with MegaScaleLoader(config(folder)) as loader:
        batches = iter(loader)
        while loader.step < 3:
            next(batches)
        return loader.state_dict()


@pytest.fixture
def loader(folder: Path) -> Iterator[MegaScaleLoader]:
    with MegaScaleLoader(config(folder)) as made:
        yield made


def damaged(saved: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = deepcopy(saved)
    *outer, last = path.split(".")
    at = found
    for name in outer:
        at = at[name]
    at[last] = value
    return found


def piece(**fields: int) -> dict[str, Any]:
    pieces = np.zeros(1, PIECE)
    for name, value in fields.items():
        pieces[name] = value
    return {"count": 1, "packed": pack_records(pieces)}


CASES: list[tuple[str, Any]] = [
    *((f"sources.web.{field}", value) for field in ("epoch", "window", "part", "offset") for value in (-1, 0.5, "0")),
    ("sources.web.epoch", None),
    ("sources.web.part", True),
    ("sources.web.offset", 2**31),
    *(
        (f"sources.web.{field}", value)
        for field in ("share", "given")
        for value in (None, NAN, INF, 10**400, -0.5, "1", True)
    ),
    ("sources.web.dropped", None),
    ("sources.web.dropped", {"too long": -1}),
    ("sources.web.checked", {"records": 1.5, "bad": 0}),
    ("sources.web", [1, 2]),
    ("ended", 0),
    ("ended", "false"),
    ("ended", None),
    ("step", -1),
    ("step", 2.0),
    ("step", "3"),
    ("pass", -1),
    ("pass", None),
    ("certificate", "00"),
    ("certificate", 7),
    ("files", ["a"]),
    ("files", {"web": 3, "code": "a"}),
    ("fingerprint", ["a"]),
    ("sources", ["web", "code"]),
    ("mixture", "even"),
    ("mixture.weights", "even"),
    ("mixture.weights", pack_array(np.array([0.5, NAN]))),
    ("mixture.weights", pack_array(np.array([0.5]))),
    ("mixture.declared", pack_array(np.array([0.5, -1.0]))),
    ("mixture.changes", "none"),
    ("mixture.changes", [[-1, pack_array(np.array([0.5, 0.5]))]]),
    ("mixture.changes", [[9, pack_array(np.array([0.5, INF]))]]),
    ("costs", "none"),
    ("costs", {"now": []}),
    ("costs", {"now": [{"per_token": NAN}], "changes": []}),
    ("costs", {"now": [], "changes": [[-1, []]]}),
    ("costs", {"now": [], "changes": [[40, {"per_token": 1.0}]]}),
    ("carry", []),
    ("carry.count", -1),
    ("carry.count", 10**6),
    ("carry", piece(source=2)),
    ("carry", piece(source=-1)),
    ("carry", piece(length=-1)),
]


@pytest.mark.parametrize(("path", "value"), CASES, ids=[f"{path}={value!r}"[:60] for path, value in CASES])
def test_a_wrong_field_is_named(loader: MegaScaleLoader, saved: dict[str, Any], path: str, value: Any) -> None:
    with pytest.raises(StateError, match=rf"damaged.*{path}"):
        loader.load_state_dict(damaged(saved, path, value))
    loader.load_state_dict(saved)


@pytest.mark.parametrize("path", ["step", "pass", "ended", "sources", "mixture", "carry", "sources.web.given"])
def test_a_missing_field_is_named(loader: MegaScaleLoader, saved: dict[str, Any], path: str) -> None:
    found = deepcopy(saved)
    *outer, last = path.split(".")
    at = found
    for name in outer:
        at = at[name]
    del at[last]
    with pytest.raises(StateError, match=rf"damaged.*{path} is not there"):
        loader.load_state_dict(found)


def test_all_that_is_wrong_is_said_at_once(loader: MegaScaleLoader, saved: dict[str, Any]) -> None:
    found = damaged(damaged(saved, "step", -4), "sources.code.share", NAN)
    with pytest.raises(StateError, match=r"step must be .*, not -4; sources\.code\.share must be .*, not nan"):
        loader.load_state_dict(found)


def test_a_window_that_the_source_does_not_have(loader: MegaScaleLoader, saved: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=r"sources\.web\.window is 40, and the source has 1 of them"):
        loader.load_state_dict(damaged(saved, "sources.web.window", 40))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("part", r"source 'web' of stream 'train' has no part 4000 in window 0 of epoch \d+"),
        ("offset", r"source 'web' of stream 'train': offset 4000 lies behind the \d+ entries of part \d+ in window 0"),
    ],
)
def test_a_place_that_the_source_does_not_have(
    loader: MegaScaleLoader, saved: dict[str, Any], field: str, message: str
) -> None:
    loader.load_state_dict(damaged(saved, f"sources.web.{field}", 4000))
    with pytest.raises(StateError, match=message):
        next(batch for batch in loader if loader.step > 60)
