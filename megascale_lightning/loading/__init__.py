"""Source loaders: read, transform, buffer; metadata for the planner, payload for the constructors."""

from __future__ import annotations

from megascale_lightning.loading.loader import LoadedSource, SourceLoader

__all__ = ["LoadedSource", "SourceLoader"]
