"""Axis names of frameworks fold into four; others are refused with the whole list."""

from __future__ import annotations

import pytest

from megascale_lightning import ConfigError
from megascale_lightning.places.axes import ALIASES, AXES, fold_axes, fold_axis


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("dp", "dp"),
        ("data_parallel", "dp"),
        ("dp_replicate", "dp"),
        ("dp_shard", "dp"),
        ("fsdp", "dp"),
        ("tensor_parallel", "tp"),
        ("model_parallel", "tp"),
        ("context", "cp"),
        ("context_parallel", "cp"),
        ("sp", "cp"),
        ("pipeline", "pp"),
        ("Data-Parallel", "dp"),
        (" TP ", "tp"),
    ],
)
def test_aliases_fold(name: str, axis: str):
    assert fold_axis(name) == axis


def test_every_axis_is_its_own_alias_and_no_alias_means_two():
    assert [fold_axis(axis) for axis in AXES] == list(AXES)
    names = [name for names in ALIASES.values() for name in names]
    assert len(names) == len(set(names))


def test_unknown_names_list_all_aliases():
    with pytest.raises(ConfigError, match="unknown axis 'expert'") as caught:
        fold_axis("expert")
    for names in ALIASES.values():
        for name in names:
            assert name in str(caught.value)


def test_all_unknown_names_are_reported_together():
    with pytest.raises(ConfigError, match="unknown axes 'ep', 'etp'"):
        fold_axes(["dp", "ep", "tp", "etp"])


def test_the_aliases_cannot_be_changed():
    with pytest.raises(TypeError):
        ALIASES["dp"] = ()  # type: ignore[index]
