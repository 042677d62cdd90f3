"""Data of the acceptance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megascale_lightning.runtime.ray_session import RaySession

from .data import Corpus, make_corpus

SEQ_LEN = 64


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Three sources of 40, 150 and 300 samples, Parquet and JSONL, some samples longer than a row of 64."""
    return make_corpus(
        tmp_path_factory.mktemp("mixed"), {"web": 40, "code": 150, "books": 300}, seq_len=SEQ_LEN, seed=1
    )


@pytest.fixture(scope="session")
def five(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Five sources of 1, 7, 100, 1000 and 3001 samples."""
    return make_corpus(tmp_path_factory.mktemp("five"), (1, 7, 100, 1000, 3001), seq_len=SEQ_LEN, seed=2)


@pytest.fixture(scope="session")
def with_fields(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two sources of 90 and 160 samples with `loss_mask`, `labels` and `score`."""
    return make_corpus(
        tmp_path_factory.mktemp("fields"),
        {"web": 90, "code": 160},
        seq_len=SEQ_LEN,
        seed=3,
        fields=("loss_mask", "labels", "score"),
    )


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """A local Ray that stays between the runs of a module: each of them joins it instead of starting its own."""
    session = RaySession.start(None, None)
    yield
    session.release()
