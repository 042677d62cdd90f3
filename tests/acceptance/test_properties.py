"""The laws on drawn settings: any sources, rows, ranks, windows and stops."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import (
    Balanced,
    EmptySourceError,
    LoaderConfig,
    Mixture,
    PackedRows,
    PaddedRows,
    RoundRobin,
)

from .data import Corpus, make_corpus
from .harness import Step, World, check_steps, count_tokens, without_run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Sources with their lengths, and settings that belong to the order."""
    seq_len = draw(st.sampled_from([1, 2, 5, 16, 33]))
    names = [f"s{index}" for index in range(draw(st.integers(1, 4)))]
    longest = draw(st.sampled_from([1, seq_len, 3 * seq_len + 1]))
    lengths = {name: draw(st.lists(st.integers(1, longest), min_size=1, max_size=40)) for name in names}
    return {
        "lengths": lengths,
        "longest": longest,
        "seq_len": seq_len,
        "micro": draw(st.integers(1, 3)),
        "kind": draw(st.sampled_from(["packed", "padded"])),
        "pack_ahead": draw(st.sampled_from([0, 1, 5, 512])),
        "rows_per_step": draw(st.integers(1, 13)),
        "epochs": {name: draw(st.integers(1, 3)) for name in names},
        "weights": {name: draw(st.sampled_from([0.001, 0.1, 1.0, 50.0])) for name in names},
        "settings": {
            "seed": draw(st.integers(0, 5)),
            "window_units": draw(st.integers(1, 4)),
            "part_bytes": draw(st.sampled_from([1, 40, 400, 100_000])),
            "last_step": draw(st.sampled_from(["fill", "drop"])),
            "mixture": Mixture(unit=draw(st.sampled_from(["samples", "tokens"]))),
        },
    }


@st.composite
def places(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Data-parallel size, and settings that must not matter."""
    return draw(st.integers(1, 4)), {
        "num_loaders": draw(st.integers(1, 3)),
        "prefetch_steps": draw(st.integers(0, 5)),
        "plan_window": draw(st.integers(1, 9)),
        "loader_buffer_bytes": draw(st.sampled_from([1, 1000, 1 << 30])),
        "strategy": draw(st.sampled_from([Balanced(), RoundRobin()])),
    }


def make(root: str, job: dict[str, Any], place: dict[str, Any]) -> tuple[Corpus, LoaderConfig]:
    folder = Path(root)
    counts = {name: len(own) for name, own in job["lengths"].items()}
    corpus = make_corpus(folder, counts, seq_len=job["seq_len"], lengths=job["lengths"])
    return corpus, configured(corpus, job, place)


def configured(corpus: Corpus, job: dict[str, Any], place: dict[str, Any]) -> LoaderConfig:
    rows: PackedRows | PaddedRows = PaddedRows(job["seq_len"], job["micro"])
    if job["kind"] == "packed":
        rows = PackedRows(job["seq_len"], job["micro"], pack_ahead=job["pack_ahead"])
    return LoaderConfig(
        sources=corpus.sources(epochs=job["epochs"], weights=job["weights"]),
        rows=rows,
        global_batch_size=job["rows_per_step"],
        runtime="local",
        **job["settings"],
        **place,
    )


def rows_and_certificates(steps: list[Step]) -> list[tuple[Any, str]]:
    return [(step.rows, step.certificate) for step in steps]


def check_counts(corpus: Corpus, job: dict[str, Any], steps: list[Step], state: dict[str, Any]) -> None:
    """Exactly once per epoch; what is missing is counted as dropped."""
    pieces = [piece for step in steps for piece in step.pieces()]
    assert len(set(pieces)) == len(pieces)
    delivered = Counter(piece[0] for piece in pieces)
    tokens = count_tokens(steps)
    for name, own in job["lengths"].items():
        times = job["epochs"][name]
        expected = times * sum(-(-length // job["seq_len"]) for length in own)
        dropped = state["sources"][name]["dropped"]
        assert delivered[name] + dropped.get("last_step", 0) == expected
        assert set(dropped) <= {"last_step"}
        counts = {tokens[int(token)] for token in corpus.tokens(name)}
        if job["settings"]["last_step"] == "fill":
            assert counts == {times}
        assert max(counts) <= times
    full = [len(step.rows) == job["rows_per_step"] for step in steps]
    assert all(full[:-1])
    assert job["settings"]["last_step"] == "fill" or all(full)


@pytest.mark.slow
@settings(max_examples=60)
@given(job=jobs(), one=places(), two=places(), stops=st.lists(st.integers(1, 6), max_size=4))
def test_order_once_and_resume(
    job: dict[str, Any], one: tuple[int, dict[str, Any]], two: tuple[int, dict[str, Any]], stops: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        corpus, config = make(root, job, one[1])
        other = configured(corpus, job, two[1])
        steps: list[Step] = []
        with World(config, one[0], keep_states=True) as world:
            with suppress(EmptySourceError):
                steps = world.steps()
            end = world.state()
        if not steps:
            assert config.last_step == "drop", "there is too little for one step"
            with World(other, two[0]) as again, pytest.raises(EmptySourceError, match="before its first step"):
                again.steps()
            return
        check_steps(corpus, steps, config)
        assert end["ended"]
        check_counts(corpus, job, steps, end)

        found: list[Step] = []
        state: dict[str, Any] | None = None
        for count in [*stops, None]:
            with World(other, two[0], state=state, keep_states=True) as world:
                found += world.steps(count)
                state = world.state()
        assert rows_and_certificates(found) == rows_and_certificates(steps)
        check_steps(corpus, found, other)
        assert state is not None
        assert without_run(state) == without_run(end)
