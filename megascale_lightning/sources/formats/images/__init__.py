"""Folders of images with their captions."""

from __future__ import annotations

from megascale_lightning.sources.formats.images.format import FORMAT

__all__ = ["FORMAT"]
