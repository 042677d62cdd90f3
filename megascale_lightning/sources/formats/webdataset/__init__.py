"""Tar shards, as WebDataset and Megatron-Energon have them."""

from __future__ import annotations

from megascale_lightning.sources.formats.webdataset.format import FORMAT

__all__ = ["FORMAT"]
