"""Costs in a run: they decide places and never the order; one that the planner cannot feed is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megascale_lightning import Balanced, ConfigError, LoaderConfig, PackedRows, TransformerCost, ViTCost
from megascale_lightning.planning import presets

from .data import Corpus
from .harness import Step, run_world


def config_for(corpus: Corpus, cost: Any) -> LoaderConfig:
    return LoaderConfig(
        sources=corpus.sources(epochs=None),
        rows=PackedRows(64, 2, pack_ahead=24),
        global_batch_size=16,
        runtime="local",
        strategy=Balanced(cost),
    )


def places(step: Step) -> list[list[object]]:
    """The rows of each rank."""
    return [[microbatch.rows for microbatch in rank] for rank in step.ranks]


def test_places_follow_the_cost_and_the_order_does_not(mixed: Corpus) -> None:
    tiny = TransformerCost(hidden=8, layers=1, heads=1)  # attention is nearly all of it
    one, other = (run_world(config_for(mixed, cost), dp=2, steps=10) for cost in (tiny, presets.llama_12b()))
    assert [step.certificate for step in one] == [step.certificate for step in other]
    assert [step.rows for step in one] == [step.rows for step in other]
    assert any(places(a) != places(b) for a, b in zip(one, other, strict=True))


def test_a_field_that_a_cost_wants_and_no_file_has_is_named(mixed: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"part-000.parquet has no column 'patches'"):
        run_world(config_for(mixed, ViTCost(hidden=8, layers=1, heads=1)), steps=1)
