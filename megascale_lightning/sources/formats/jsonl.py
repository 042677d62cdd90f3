"""JSON lines: a unit is a byte range of about 8 MB cut at newlines, or a whole compressed file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from megascale_lightning.sources.formats import Listing, Resources, SourceFormat
from megascale_lightning.sources.formats.lines import LINES, UNIT_BYTES, LineReader, list_ranges
from megascale_lightning.sources.formats.optionsets import check_options, is_count
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["FORMAT", "JsonLinesFormat", "JsonLinesReader"]


class JsonLinesFormat(SourceFormat):
    """A unit is a byte range of about 8 MB cut at newlines, or a whole compressed file, in slices if one is large."""

    def list_units(
        self, source: Source, files: Sequence[FileInfo], storage: Storage, *, unit_bytes: int = UNIT_BYTES
    ) -> Listing:
        """Units of every file, their rows -1; see `SourceFormat`. An empty file has none."""
        check_options(source, "jsonl", {"max_record_bytes": is_count(1)})
        return list_ranges(files, storage, LINES, unit_bytes)

    def make_reader(
        self, source: Source, manifest: Manifest, columns: Sequence[str] | None, resources: Resources
    ) -> JsonLinesReader:
        """See `SourceFormat`."""
        return JsonLinesReader(source, manifest, resources.storage)


class JsonLinesReader(LineReader):
    """`SourceReader` of JSON lines. A row is a line that is not blank.

    A line that is no UTF-8, no JSON, no object or too long is a failed record; its message has the line's first byte.
    NaN and Infinity are numbers, as Python writes them; of a key that comes twice the last value counts.
    """

    def _parse(self, data: bytes, *, is_first: bool) -> tuple[Any, str | None]:
        try:
            record = json.loads(data.decode("utf-8-sig" if is_first else "utf-8"))
        except UnicodeDecodeError as error:
            return None, f"is not UTF-8: {error}"
        except (ValueError, RecursionError) as error:
            return None, f"is not JSON: {error}"
        if not isinstance(record, dict):
            return None, f"holds a {type(record).__name__}, not an object"
        return record, None


FORMAT: Final = JsonLinesFormat()
