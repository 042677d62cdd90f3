"""Folders of MosaicML Streaming, read where they lie."""

from __future__ import annotations

from megascale_lightning.sources.formats.mds.format import FORMAT

__all__ = ["FORMAT"]
