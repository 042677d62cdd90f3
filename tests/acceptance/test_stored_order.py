"""`shuffle=False` gives the records as they are stored, epoch after epoch, whatever the format and the loaders."""

from __future__ import annotations

import csv
import gzip
import json
import tarfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PaddedRows, Source
from megascale_lightning.rows import Rows

COUNT = 70
FILES = 2
PER_FILE = COUNT // FILES

Write = Callable[[Path, list[int]], Any]


def numbered(record: Any) -> dict[str, Any]:
    """A sample whose token is the number of the record."""
    if isinstance(record, Mapping):
        record = record.get("json", record)
        record = record["n"] if "n" in record else record["text"]
    return {"input_ids": np.array([int(record)], np.int32)}


def write_parquet(path: Path, numbers: list[int]) -> None:
    pq.write_table(pa.table({"n": numbers}), path, row_group_size=8)


def write_arrow(path: Path, numbers: list[int]) -> None:
    table = pa.table({"n": numbers})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)


def json_lines(numbers: list[int]) -> bytes:
    return b"".join(json.dumps({"n": number}).encode() + b"\n" for number in numbers)


def write_csv(path: Path, numbers: list[int]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["n"], *([number] for number in numbers)])


def write_tar(path: Path, numbers: list[int]) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            content = json.dumps({"n": number}).encode()
            info = tarfile.TarInfo(f"{number:05}.json")
            info.size = len(content)
            archive.addfile(info, BytesIO(content))


WRITERS: dict[str, Write] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": lambda path, numbers: path.write_bytes(json_lines(numbers)),
    "jsonl.gz": lambda path, numbers: path.write_bytes(gzip.compress(json_lines(numbers))),
    "csv": write_csv,
    "txt": lambda path, numbers: path.write_text("\n".join(map(str, numbers)) + "\n"),
    "tar": write_tar,
}


def generated(first: int) -> Callable[[], Any]:
    def numbers() -> Any:
        for number in range(first, first + COUNT):
            yield {"n": number}

    return numbers


def data_of(kind: str, folder: Path, first: int) -> Any:
    """Records with the numbers from `first` on, as data of a source."""
    if kind == "dataset":
        return [{"n": number} for number in range(first, first + COUNT)]
    if kind == "iterable":
        return generated(first)
    for index in range(FILES):
        begin = first + index * PER_FILE
        WRITERS[kind](folder / f"{first}-{index}.{kind}", list(range(begin, begin + PER_FILE)))
    return str(folder / f"{first}-*.{kind}")


@pytest.mark.filterwarnings("ignore:source .* is an iterable:megascale_lightning.errors.MegaScaleWarning")
@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.parametrize("rows", [PaddedRows(4, 1), CollatedRows(1)], ids=["padded", "collated"])
@pytest.mark.parametrize("kind", [*WRITERS, "dataset", "iterable", "jsonl.gz in slices"])
def test_two_epochs(kind: str, rows: Rows, num_loaders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources at once, whose windows and parts are small."""
    if kind.endswith(" in slices"):
        monkeypatch.setattr("megascale_lightning.sources.stores.plaintext.SLICED_BYTES", 50)
    data = {name: data_of(kind.split(" ")[0], tmp_path, first) for name, first in (("a", 1), ("b", 1001))}
    config = LoaderConfig(
        sources=[Source(name, given, transform=numbered, epochs=2, shuffle=False) for name, given in data.items()],
        rows=rows,
        global_batch_size=1,
        runtime="local",
        num_loaders=num_loaders,
        window_units=2,
        part_bytes=100,
    )
    with MegaScaleLoader(config) as loader:
        found = [int(batch["input_ids"].reshape(-1)[0]) for batch in loader]
    for first in (1, 1001):
        stored = list(range(first, first + COUNT))
        assert [number for number in found if number in range(first, first + COUNT)] == stored * 2
