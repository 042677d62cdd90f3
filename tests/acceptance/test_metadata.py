"""Costs by fields of the samples: they place the rows of a run, also of what is carried, and through a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import (
    AttentionCost,
    Balanced,
    CalibratedCost,
    ClientPlaceTree,
    CollatedRows,
    ConfigError,
    CostOf,
    DataError,
    HybridVLM,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    PaddedRows,
    RoundRobin,
    Source,
    TokenCount,
)

DP, STEPS = 2, 12


def with_patches(lengths: Any, patches: Any) -> Any:
    """In a module, so that the roles' processes can import it."""
    return lengths + 100.0 * patches


COST = CostOf(with_patches, ("patches",))


def patches_of(row: int) -> int:
    return row * 7919 % 13


def write(path: Path, name: str, count: int = 400) -> Path:
    """Documents of 1 to 90 tokens, with a number that has nothing to do with their length."""
    ids = pa.array([list(range(1, 2 + row * 31 % 90)) for row in range(count)], pa.list_(pa.int32()))
    patches = pa.array([patches_of(row) for row in range(count)])
    pq.write_table(pa.table({"input_ids": ids, "patches": patches}), path / f"{name}.parquet", 40)
    return path / f"{name}.parquet"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("patches"), "web")


def config_of(path: Path, *, padded: bool = False, **changes: Any) -> LoaderConfig:
    rows = PaddedRows(64, 2) if padded else PackedRows(64, 2, pack_ahead=40)
    settings: dict[str, Any] = {
        "sources": [Source("web", str(path))],
        "rows": rows,
        "global_batch_size": 16,
        "strategy": Balanced(COST),
        "runtime": "local",
        "window_units": 2,
        "part_bytes": 4000,
    }
    return LoaderConfig(**(settings | changes))


def places_of(config: LoaderConfig, steps: int = STEPS, states: list[Any] | None = None) -> list[list[Any]]:
    """For each step what each rank got: its sample ids, row by row."""
    tree = ClientPlaceTree.from_sizes(dp=DP)
    loaders = [MegaScaleLoader(config, tree, rank) for rank in range(DP)]
    try:
        if states:
            for loader, state in zip(loaders, states, strict=True):
                loader.load_state_dict(state)
        streams = [iter(loader) for loader in loaders]
        found = []
        for _ in range(steps):
            step: list[Any] = []
            for stream in streams:
                mine: list[Any] = []
                while True:
                    info = next(stream)["megascale"]
                    mine += [tuple(row) for row in info.sample_ids()]
                    if info.is_last_in_step:
                        break
                step.append(mine)
            found.append(step)
        if states is not None:
            states[:] = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        return found
    finally:
        for loader in loaders:
            loader.close()


def cost_of(rank: list[Any]) -> float:
    """100 a patch and 1 a token, of the documents of a rank: a cut one has its patches in every piece."""
    lengths = [
        (1 + row * 31 % 90 if stop < 0 else stop - start, patches_of(row))
        for samples in rank
        for _, _, unit, in_unit, start, stop in samples
        for row in [unit * 40 + in_unit]
    ]
    return sum(length + 100.0 * patches for length, patches in lengths)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_placed_by_what_the_samples_hold(path: Path, padded: bool) -> None:
    placed = places_of(config_of(path, padded=padded))
    dealt = places_of(config_of(path, padded=padded, strategy=RoundRobin()))
    spread = [np.array([[cost_of(rank) for rank in step] for step in steps]) for steps in (placed, dealt)]
    even, uneven = ((costs.max(axis=1) / costs.mean(axis=1)).mean() for costs in spread)
    assert even < 1.02
    assert uneven > 1.05
    rows = [[sorted(row for rank in step for row in rank) for step in steps] for steps in (placed, dealt)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("saved_at", [1, 5, 11])
def test_a_resumed_run_has_the_same_places(path: Path, saved_at: int) -> None:
    """What is carried is looked up again in its part."""
    states: list[Any] = []
    config = config_of(path)
    whole = places_of(config)
    first = places_of(config, saved_at, states)
    assert states[0]["carry"]["count"] > 0
    assert first + places_of(config, STEPS - saved_at, states) == whole


def test_measured_costs_of_two_models(path: Path) -> None:
    """They take the place of the declared ones, each of its own, with the fields that they want."""
    whole = places_of(config_of(path, strategy=HybridVLM(COST, AttentionCost(30))))
    by_others = places_of(config_of(path, strategy=HybridVLM(CalibratedCost(per_patch=1.0), TokenCount())))
    states: list[Any] = []
    first = places_of(config_of(path, strategy=HybridVLM(COST, AttentionCost(30))), 3, states)
    for state in states:
        state["costs"] = {"now": [{"per_patch": 2.0}, {"per_token": 0.5}], "changes": [[9, []]]}
    steered = first + places_of(config_of(path, strategy=HybridVLM(COST, AttentionCost(30))), STEPS - 3, states)
    assert steered == whole[:3] + by_others[3:9] + whole[9:]
    assert whole[3:9] != by_others[3:9]
    assert "costs" not in states[0]


def test_transforms_may_give_it(path: Path) -> None:
    def count(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": sample["input_ids"], "patches": float(sample["patches"])}

    plain = places_of(config_of(path), 4)
    assert places_of(config_of(path, sources=[Source("web", str(path), transform=count)]), 4) == plain


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (None, "patches"),
        (pa.array([[1]] * 9), r"wants a number 'patches' of each sample, not"),
        (pa.array(["a"] * 9), r"wants a number 'patches'"),
        (pa.array([1.0] * 4 + [float("nan")] + [1.0] * 4), r"row 4.*'patches', which the strategy wants, is nan"),
    ],
)
def test_what_is_no_number_is_named(tmp_path: Path, column: Any, said: str) -> None:
    table = {"input_ids": pa.array([[1, 2]] * 9)} | ({} if column is None else {"patches": column})
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        places_of(config_of(tmp_path / "bad.parquet"), 1)
    assert "'web'" in str(caught.value)


def test_records_without_it_are_dropped_by_on_error(tmp_path: Path) -> None:
    column = pa.array([1, None, 3, 4, None, 6, 7, 8, 9])
    pq.write_table(pa.table({"input_ids": pa.array([[1, 2]] * 9), "patches": column}), tmp_path / "a.parquet")
    source = Source("web", str(tmp_path / "a.parquet"), on_error="skip", epochs=1)
    config = config_of(tmp_path, sources=[source], global_batch_size=4)
    rows = {row for rank in places_of(config, 1)[0] for samples in rank for _, _, _, row, _, _ in samples}
    assert rows <= set(range(9)) - {1, 4}


@pytest.mark.parametrize(("where", "stream"), [("rows", "train"), ("eval_rows", "val/0")])
def test_collated_rows_are_refused(path: Path, where: str, stream: str) -> None:
    config = config_of(path, val_sources=[Source("held", str(path))], **{where: CollatedRows(2)})
    with pytest.raises(ConfigError, match=rf"\['patches'\].* of stream '{stream}'.*packed and padded rows only"):
        places_of(config, 1)
