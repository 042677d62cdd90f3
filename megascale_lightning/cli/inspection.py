"""`inspect_source`: what is known of one source of one stream, as plain values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.loading.partmaker import LoadedSource
from megascale_lightning.loading.quarantine import WHOLE_UNIT
from megascale_lightning.loading.scanning import SLICE_BYTES, BadRow, RowCount, Scan, SourceScanner
from megascale_lightning.loading.showing import SampleShower
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.sources.functions import function_name
from megascale_lightning.sources.manifest import Manifest
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.secrets import redact
from megascale_lightning.sources.survey import build_manifest

__all__ = ["bin_edges", "inspect_source"]

_SCAN_S: Final = 4.0
_COUNT_S: Final = 2.0
_SHOWN_BAD: Final = 10
_SHOWN_FILES: Final = 3
_TEXT: Final = 100
_ITEMS: Final = 8
_MAX_BINS: Final = 16
_NO_FILES: Final = ("dataset", "iterable")


def inspect_source(config: LoaderConfig, stream: str, source: Source, limit: int | None) -> dict[str, Any]:
    """Look at a source; nothing of what is returned holds a secret.

    Args:
        config: The settings that it is part of.
        stream: Name of its stream.
        source: One of the stream's.
        limit: Records to look at; None: all of them.

    Returns:
        Values that JSON has.

    Raises:
        ConfigError: Files are missing, of no known format, or lack a column.
        DataError: A unit cannot be read now, or the transform gives what `on_error` does not cover.
    """
    rows = config.rows_of(stream)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manifest = build_manifest(source, needs_tokens=not isinstance(rows, CollatedRows))
    settings = {"stream": stream, "seed": config.seed}
    cuts = {"window_units": config.window_units, "part_bytes": config.part_bytes}
    loaded = LoadedSource(replace(source, executor="inline"), manifest)
    scanner = SourceScanner(loaded, rows, **settings, **cuts)  # type: ignore[arg-type]  # of two kinds of values
    scan = scanner.scan_all() if limit is None else scanner.scan_some(limit, _SCAN_S)
    count = RowCount(scan.records, is_exact=True) if scan.is_complete else scanner.count(_COUNT_S)
    weights = config.weights_of(stream)
    found = {
        "stream": stream,
        "source": source.name,
        **_size(manifest, count),
        "joined": [
            {"on": join.on, "columns": None if join.columns is None else [*join.columns], **_files(of_join)}
            for join, of_join in zip(source.joins, manifest.joined, strict=True)
        ],
        "weight": weights[source.name],
        "share": weights[source.name] / (sum(weights.values()) or 1.0),
        "share_unit": config.shares.unit if stream == "train" else "samples",
        "epochs": source.epochs or (None if stream == "train" else 1),
        "shuffle": source.shuffle,
        "notes": [str(warning.message) for warning in caught],
        "scanned": {
            "records": scan.records,
            "units": len(scan.units),
            "all": scan.is_complete,
            "ran_out_of_time": scan.ran_out,
        },
        "lengths": _lengths(scan, source, rows),
        "dropped": dict(scan.codes),
        **_bad(scan, source, manifest, all_of_them=limit is None),
        "first": _first(loaded, rows, scan, settings, cuts),
    }
    shown: dict[str, Any] = _without_secrets(found)
    return shown


def _size(manifest: Manifest, count: RowCount) -> dict[str, Any]:
    return {
        **_files(manifest),
        "units": manifest.num_units,
        "read_in_slices": manifest.sliced,
        "rows": count.rows,
        "rows_are": "counted" if count.is_exact else "at least" if count.is_least else "estimated",
    }


def _files(manifest: Manifest) -> dict[str, Any]:
    has_files = manifest.format not in _NO_FILES
    return {
        "format": manifest.format,
        "files": len(manifest.files) if has_files else None,
        "paths": [info.path for info in manifest.files[:_SHOWN_FILES]] if has_files else [],
        "stored_bytes": sum(info.size for info in manifest.files) if has_files else None,
    }


def _bad(scan: Scan, source: Source, manifest: Manifest, *, all_of_them: bool) -> dict[str, Any]:
    bad = scan.bad if all_of_them else scan.bad[:_SHOWN_BAD]
    return {
        "on_error": source.on_error,
        "num_bad": sum(scan.codes[reason] for reason in source.bad_reasons),
        "bad": [_bad_row(entry, manifest) for entry in bad],
        "bad_not_listed": len(scan.bad) - len(bad),
    }


def _bad_row(bad: BadRow, manifest: Manifest) -> dict[str, Any]:
    file = manifest.file_of(bad.unit, bad.row).path
    row = None if bad.row == WHOLE_UNIT else bad.row
    return {"file": file, "unit": bad.unit, "row": row, "reason": bad.reason, "message": bad.message}


def _lengths(scan: Scan, source: Source, rows: Rows) -> dict[str, Any] | None:
    """Statistics and a histogram; None where nothing is good, or lengths say nothing."""
    if not scan.lengths or (isinstance(rows, CollatedRows) and set(scan.lengths) == {1}):
        return None
    values = np.array(sorted(scan.lengths), np.int64)
    counts = np.array([scan.lengths[value] for value in values.tolist()], np.int64)
    total = int((values * counts).sum())
    reached = np.cumsum(counts)
    over = int(counts[values > rows.capacity].sum())
    edges = bin_edges(int(values[0]), int(values[-1]))
    bins = [int(counts[(values >= a) & (values < b)].sum()) for a, b in pairwise(edges)]
    quantile = {
        name: int(values[np.searchsorted(reached, share * reached[-1])])
        for name, share in (("median", 0.5), ("p95", 0.95))
    }
    return {
        "of": "length" if isinstance(rows, CollatedRows) else "tokens",
        "samples": int(reached[-1]),
        "total": total,
        "min": int(values[0]),
        "max": int(values[-1]),
        "mean": total / int(reached[-1]),
        **quantile,
        "row_holds": None if isinstance(rows, CollatedRows) else rows.capacity,
        "overlong": over,
        "overlong_policy": source.overlong,
        "histogram": [{"from": a, "to": b - 1, "count": n} for (a, b), n in zip(pairwise(edges), bins, strict=True)],
    }


def bin_edges(least: int, most: int) -> list[int]:
    """Where bins begin, and the end: powers of two where lengths span much, else equal steps."""
    if most >= 16 * max(least, 1):
        low = 0 if least == 0 else 1 << (least.bit_length() - 1)
        edges = [low]
        while edges[-1] <= most:
            edges.append(max(2 * edges[-1], 1))
        return edges
    step = -(-(most - least + 1) // min(_MAX_BINS, most - least + 1))
    return list(range(least, most + step + 1, step))


def _first(
    loaded: LoadedSource, rows: Rows, scan: Scan, settings: Mapping[str, Any], cuts: Mapping[str, Any]
) -> dict[str, Any]:
    """The first record that is not known to be bad, as read and as transformed."""
    source, manifest = loaded.source, loaded.manifest
    filled = np.flatnonzero(manifest.units["rows"])
    if manifest.sliced:
        cuts = {**cuts, "part_bytes": SLICE_BYTES}
    shower = SampleShower(loaded, rows, **settings, **cuts)
    unit = int(filled[0])
    bad = {entry.row for entry in scan.bad if entry.unit == unit}
    row = next(row for row in range(len(bad) + 1) if row not in bad)
    found: dict[str, Any] = {"unit": unit, "row": row}
    try:
        shown = shower.show(0, unit, row)
    except (ConfigError, DataError) as error:
        return {**found, "error": str(error)}
    found["raw"] = _fields(shown.raw)
    if not source.is_transformed:
        return found
    found["transform"] = function_name(source.transform or source.transform_batched).strip("'")
    try:
        sample = shown.transformed
    except DataError as error:
        return {**found, "error": str(error)}
    return {**found, "transformed": None if sample is None else _fields(sample)}


def _fields(sample: Any) -> dict[str, dict[str, Any]]:
    """Name -> type and value of each field; by number of a short tuple or list, else one without a name."""
    named = sample if isinstance(sample, Mapping) else {"": sample}
    if isinstance(sample, (tuple, list)) and 0 < len(sample) <= _ITEMS:
        named = dict(enumerate(sample))
    return {str(name): {"type": _type_text(value), "value": _value_text(value)} for name, value in named.items()}


def _type_text(value: Any) -> str:
    """A type with its size: `int32 [571]`, `str of 1204`, `list of 3 str`."""
    if value is None:
        return "none"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {list(value.shape)}" if value.shape else str(value.dtype)
    if isinstance(value, str):
        return f"str of {len(value)}"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"bytes of {len(value)}"
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(item).__name__ for item in value})
        return f"{type(value).__name__} of {len(value)}" + (f" {'/'.join(kinds)}" if kinds else "")
    if isinstance(value, Mapping):
        return f"dict of {len(value)}"
    if hasattr(value, "size") and hasattr(value, "mode"):  # a picture
        return f"{type(value).__name__}, {value.size[0]} x {value.size[1]}, {value.mode}"
    return type(value).__name__


def _value_text(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        flat = value.reshape(-1) if value.shape else [value]
        items = ", ".join(str(item.item() if hasattr(item, "item") else item) for item in flat[:_ITEMS])
        return items if not value.shape else f"[{items}{', ...' if len(flat) > _ITEMS else ''}]"
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if isinstance(value, (str, bytes)):
        return _shortened(repr(value[:_TEXT]), len(value) > _TEXT)
    if isinstance(value, (list, tuple)):
        return _shortened(repr(list(value[:_ITEMS])), len(value) > _ITEMS)
    return _shortened(repr(value), False)


def _shortened(text: str, is_cut: bool) -> str:
    text = " ".join(text.split())
    return f"{text[:_TEXT]}..." if is_cut or len(text) > _TEXT else text


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_without_secrets(item) for item in value]
    return value
