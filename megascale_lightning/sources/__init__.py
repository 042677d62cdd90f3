"""Sources: what they are, which files and units they have, how these are read and in which order.

Names are loaded when used: a trainer rank that only holds a `Source` does not import pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale_lightning.sources.manifest import Manifest
    from megascale_lightning.sources.order import Segment, num_windows, part_permutation, window_parts
    from megascale_lightning.sources.reader import make_reader
    from megascale_lightning.sources.records import RecordBlock, SourceReader
    from megascale_lightning.sources.source import Source
    from megascale_lightning.sources.survey import build_manifest

__all__ = [
    "Manifest",
    "RecordBlock",
    "Segment",
    "Source",
    "SourceReader",
    "build_manifest",
    "make_reader",
    "num_windows",
    "part_permutation",
    "window_parts",
]

_MODULES = {
    "Manifest": "manifest",
    "RecordBlock": "records",
    "Segment": "order",
    "Source": "source",
    "SourceReader": "records",
    "build_manifest": "survey",
    "make_reader": "reader",
    "num_windows": "order",
    "part_permutation": "order",
    "window_parts": "order",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
