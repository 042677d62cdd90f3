"""Arrow files and streams."""

from __future__ import annotations

from megascale_lightning.sources.formats.arrow.format import FORMAT

__all__ = ["FORMAT"]
