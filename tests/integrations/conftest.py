"""What the tests of the integrations share."""

from __future__ import annotations

import pytest

from tests.integrations.fakes import FakeSession, fake_loader


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    """Replaces the real session; holds the ones that were made."""
    from megascale_lightning.integrations.lightning import datamodule

    monkeypatch.setattr(datamodule, "LoadingSession", FakeSession)
    monkeypatch.setattr(datamodule, "MegaScaleLoader", fake_loader)
    monkeypatch.setattr(FakeSession, "made", [])
    monkeypatch.setattr(FakeSession, "num_steps", None)
    return FakeSession.made
