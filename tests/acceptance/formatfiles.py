"""Writes sources of numbered records: odd names of folders and files, some files empty or of one record."""

from __future__ import annotations

import csv
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

FOLDER = "Dätä Ünïcode 数据 & co"
GOLDEN = Path(__file__).resolve().parent.parent / "golden"

Parts = Sequence[Sequence[int]]
"""Record numbers of each file, rising."""

COUNT = 48
PARTS: Parts = [[], range(14), [], [14], range(15, 32), range(32, 47), [47], []]


def tokens_of(number: int) -> list[int]:
    """Tokens that name their record, 1 to 9 of them: 10 x (number + 1) and on."""
    return list(range(10 * (number + 1), 10 * (number + 1) + 1 + number * 7 % 9))


def number_of_tokens(tokens: Sequence[int]) -> int:
    """The record that tokens name."""
    return int(tokens[0]) // 10 - 1


def _paths(folder: Path, parts: Parts, suffix: str) -> Iterator[tuple[Path, Sequence[int]]]:
    for index, part in enumerate(parts):
        yield folder / f"pärt {index:02} #1%20;&'数+=.{suffix}", part


def _put(path: Path, data: bytes) -> None:
    codec = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}.get(path.suffix)
    if codec is None:
        path.write_bytes(data)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(data)


def _record(number: int) -> dict[str, Any]:
    return {"number": number, "text": f'record {number}, "é"\n数'}


# Tables


def _table(part: Sequence[int]) -> pa.Table:
    schema = pa.schema([("number", pa.int64()), ("text", pa.string())])
    return pa.Table.from_pylist([_record(number) for number in part], schema=schema)


def write_parquet(folder: Path, parts: Parts) -> dict[str, Any]:
    for path, part in _paths(folder, parts, "parquet"):
        pq.write_table(_table(part), path, row_group_size=5)
    return {"data": str(folder / "*.parquet")}


_LISTS = (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.large_list(pa.int32()))


def write_lists(folder: Path, parts: Parts) -> dict[str, Any]:
    """Each file has another type of lists."""
    for index, (path, part) in enumerate(_paths(folder, parts, "pq")):
        values = pa.array([tokens_of(number) for number in part], _LISTS[index % len(_LISTS)])
        pq.write_table(pa.table({"input_ids": values}), path, row_group_size=6)
    return {"data": str(folder / "*.pq")}


def write_arrow(folder: Path, parts: Parts, *, kind: str) -> dict[str, Any]:
    suffix = "feather" if kind == "feather" else "arrow"
    for path, part in _paths(folder, parts, suffix):
        table = _table(part)
        if kind == "feather":
            feather.write_feather(table, path, compression="lz4", chunksize=5)
            continue
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return {"data": str(folder / f"*.{suffix}")}


# Text


def write_lines(
    folder: Path,
    parts: Parts,
    *,
    suffix: str,
    write: Callable[[Sequence[int]], str],
    nothing: str = "",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Of the files without records the first holds `nothing`, others no byte; a file of one ends without a newline."""
    is_first = True
    for path, part in _paths(folder, parts, suffix):
        if part:
            text = write(part)
            _put(path, (text.rstrip() if len(part) == 1 else text).encode())
        elif is_first:
            is_first = False
            _put(path, nothing.encode())
        else:
            path.write_bytes(b"")
    return {"data": str(folder / f"*.{suffix}"), "format_options": options or {}}


def json_lines(part: Sequence[int]) -> str:
    return "".join(json.dumps(_record(number), ensure_ascii=bool(number % 2)) + "\n" for number in part)


def csv_lines(part: Sequence[int], delimiter: str) -> str:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, ["number", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(_record(number) for number in part)
    return sink.getvalue()


def text_lines(part: Sequence[int], end: str) -> str:
    return "".join(f"record {number} é 数{end}" for number in part)


def write_texts(folder: Path, parts: Parts) -> dict[str, Any]:
    for part in parts:
        for number in part:
            (folder / f"{number:03} #1%20;é.txt").write_text(f"record {number}\n\né 数\n", "utf-8")
    return {"data": str(folder / "*.txt"), "format_options": {"records": "file"}}


# Archives and folders


def write_tar(folder: Path, parts: Parts, *, suffix: str) -> dict[str, Any]:
    is_first = True
    for path, part in _paths(folder, parts, suffix):
        if not part and not is_first:
            path.write_bytes(b"")
            continue
        is_first &= bool(part)
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for number in part:
                for extension, content in (("txt", f"record {number}"), ("bin", "x" * (number * 90 % 1500))):
                    member = tarfile.TarInfo(f"ö #1%20;/{number:03} 数.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))
        _put(path, sink.getvalue())
    return {"data": str(folder / f"*.{suffix}")}


def write_megatron(folder: Path, parts: Parts) -> dict[str, Any]:
    for path, part in _paths(folder, parts, "idx"):
        sequences = [np.array(tokens_of(number), np.uint16) for number in part]
        lengths = np.array([len(one) for one in sequences], np.int32)
        pointers = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(part), len(part) + 1)
        documents = np.arange(len(part) + 1, dtype=np.int64)
        path.write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
        path.with_suffix(".bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    return {"data": str(folder / "*.idx")}


def write_images(folder: Path, parts: Parts) -> dict[str, Any]:
    for index, part in enumerate(parts):
        below = folder / f"clässe {index} #1%20;数"
        below.mkdir()
        for number in part:
            (below / f"{number:03} #1%20;é.png").write_bytes(b"record %d" % number)
    return {"data": str(folder), "format": "images"}


def copy_golden(folder: Path, _: Parts, *, path: str, **keywords: Any) -> dict[str, Any]:
    """What another library wrote, under another name."""
    return {"data": str(shutil.copytree(GOLDEN / path, folder / "golden #1%20;数")), **keywords}


# Objects


@dataclass(frozen=True)
class Numbers:
    """A map-style dataset."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return _record(index)


def _all_of(parts: Parts) -> int:
    return sum(map(len, parts))


def make_dataset(_: Path, parts: Parts) -> dict[str, Any]:
    return {"data": Numbers(_all_of(parts))}


def make_hugging_face(_: Path, parts: Parts) -> dict[str, Any]:
    import datasets

    return {"data": datasets.Dataset(_table([number for part in parts for number in part]))}


def _iterate(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield _record(number)


def make_iterable(_: Path, parts: Parts) -> dict[str, Any]:
    return {"data": partial(_iterate, _all_of(parts)), "format_options": {"slice_records": 7}}
