"""Folders of LitData, read where they lie."""

from __future__ import annotations

from megascale_lightning.sources.formats.litdata.format import FORMAT

__all__ = ["FORMAT"]
