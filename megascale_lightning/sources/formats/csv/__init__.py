"""CSV and TSV files."""

from __future__ import annotations

from megascale_lightning.sources.formats.csv.format import FORMAT

__all__ = ["FORMAT"]
