"""What the tests of the integrations share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.corpora import write_corpus
from tests.integrations.fakes import FakeLoader, FakeSession


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    """Replaces the real session; holds the ones that were made."""
    from megascale_lightning.integrations.lightning import datamodule, loaders

    monkeypatch.setattr(datamodule, "LoadingSession", FakeSession)
    monkeypatch.setattr(loaders, "TrainerLoader", FakeLoader)
    monkeypatch.setattr(FakeSession, "made", [])
    for name in ("num_steps", "pass_length"):
        monkeypatch.setattr(FakeSession, name, None)
    monkeypatch.setattr(FakeSession, "knows_lengths", False)
    return FakeSession.made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small sources of `corpora`, written once for a module."""
    root = tmp_path_factory.mktemp("corpus")
    write_corpus(root)
    return root
