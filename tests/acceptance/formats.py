"""Every format as a source of numbered records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megascale_lightning import Source

from .formatfiles import (
    COUNT,
    PARTS,
    Parts,
    copy_golden,
    csv_lines,
    json_lines,
    make_dataset,
    make_hugging_face,
    make_iterable,
    number_of_tokens,
    text_lines,
    tokens_of,
    write_arrow,
    write_images,
    write_lines,
    write_lists,
    write_megatron,
    write_parquet,
    write_tar,
    write_texts,
)


@dataclass(frozen=True)
class ToTokens:
    """The transform of a source."""

    number_of: Callable[[Any], int]

    def __call__(self, sample: Any) -> dict[str, Any]:
        return {"input_ids": tokens_of(self.number_of(sample))}


@dataclass(frozen=True)
class Case:
    """One format."""

    name: str
    write: Callable[[Path, Parts], dict[str, Any]]
    """Writes a source into a folder; returns keywords of `Source`."""
    number_of: Callable[[Any], int]
    """The number that a record holds."""
    files: str | None = None
    """Pattern of the files with records below the folder; None: it is no source of files."""
    count: int = COUNT
    """Records; another number where the folder was written by another library."""
    sliced: bool = False
    """To be tested with files that are read in slices."""
    may_be_empty: bool = True
    """There can be a file without records."""
    part_bytes: int = 700
    """What makes parts of a few records."""

    @property
    def is_listed(self) -> bool:
        """Whether its files are named by a pattern."""
        return self.files is not None and self.write is not write_images and self.count == COUNT

    def make(self, folder: Path, parts: Parts = PARTS) -> Made:
        """Write it."""
        folder.mkdir(parents=True)
        return Made(self, folder, self.write(folder, parts))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Made:
    """A source on disk."""

    case: Case
    folder: Path
    keywords: dict[str, Any]

    def raw(self, **more: Any) -> Source:
        """Its records as they are."""
        return Source(self.case.name, **(self.keywords | more))

    def tokens(self, **more: Any) -> Source:
        """Its records as `tokens_of` their numbers."""
        if self.case.number_of is _of_input_ids:
            return self.raw(**more)
        return self.raw(transform=ToTokens(self.case.number_of), **more)

    def files(self) -> list[Path]:
        """Those with records, the longest first."""
        assert self.case.files is not None
        found = [path for path in self.folder.rglob(self.case.files) if path.is_file()]
        return sorted(found, key=lambda path: -path.stat().st_size)


def _of_number(sample: Any) -> int:
    return int(sample["number"])


def _of_text(sample: Any) -> int:
    return int(sample["text"].split()[1])


def _of_input_ids(sample: Any) -> int:
    return number_of_tokens(sample["input_ids"])


def _of_txt(sample: Any) -> int:
    return int(sample["txt"].split()[1])


def _of_image(sample: Any) -> int:
    return int(sample["image"].split()[1])


def _of_key(sample: Any) -> int:
    return int(sample["caption"].split()[1])


def _of_length(sample: Any) -> int:
    return len(sample["input_ids"]) - 1


def _of_first_token(sample: Any) -> int:
    return int(sample["input_ids"][0])


def _of_hundreds(sample: Any) -> int:
    return int(sample["input_ids"][0]) // 100


def _json_case(suffix: str, *, sliced: bool = False) -> Case:
    write = partial(write_lines, suffix=suffix, write=json_lines, nothing="\n \n\r\n")
    name = suffix.replace(".", "-") + "-sliced" * sliced
    return Case(name, write, _of_number, f"*.{suffix}", sliced=sliced, part_bytes=61 if sliced else 700)


def _csv_case(suffix: str, *, delimiter: str = ",", sliced: bool = False) -> Case:
    lines = partial(csv_lines, delimiter=delimiter)
    write = partial(write_lines, suffix=suffix, write=lines, nothing=lines([]))
    name = suffix.replace(".", "-") + "-sliced" * sliced
    return Case(name, write, _of_number, f"*.{suffix}", sliced=sliced, part_bytes=21 if sliced else 700)


def _tar_case(suffix: str, *, sliced: bool = False) -> Case:
    name = suffix.replace(".", "-") + "-sliced" * sliced
    write = partial(write_tar, suffix=suffix)
    return Case(name, write, _of_txt, f"*.{suffix}", sliced=sliced, part_bytes=9000)


def _golden_case(kind: str, name: str, number_of: Callable[[Any], int], files: str, count: int, **more: Any) -> Case:
    write = partial(copy_golden, path=f"{kind}/{name}".rstrip("/"))
    return Case(f"{kind}-{name}".rstrip("-"), write, number_of, files, count, may_be_empty=False, **more)


CASES = [
    Case("parquet", write_parquet, _of_number, "*.parquet", part_bytes=200),
    Case("parquet-lists", write_lists, _of_input_ids, "*.pq", part_bytes=100),
    Case("arrow-file", partial(write_arrow, kind="file"), _of_number, "*.arrow"),
    Case("arrow-stream", partial(write_arrow, kind="stream"), _of_number, "*.arrow"),
    Case("feather-lz4", partial(write_arrow, kind="feather"), _of_number, "*.feather"),
    _json_case("jsonl"),
    *(_json_case(f"jsonl.{codec}") for codec in ("gz", "zst", "bz2", "lz4")),
    *(_json_case(f"jsonl.{codec}", sliced=True) for codec in ("gz", "zst", "bz2", "lz4")),
    _csv_case("csv"),
    _csv_case("csv", sliced=True),
    _csv_case("csv.gz"),
    _csv_case("csv.gz", sliced=True),
    _csv_case("tsv", delimiter="\t"),
    Case(
        "text-lines",
        partial(write_lines, suffix="txt", write=partial(text_lines, end="\r\n"), nothing="\n"),
        _of_text,
        "*.txt",
    ),
    Case(
        "text-paragraphs",
        partial(
            write_lines,
            suffix="md.zst",
            write=partial(text_lines, end="\nmore\n\n \n"),
            nothing="\n\n",
            options={"records": "paragraph"},
        ),
        _of_text,
        "*.md.zst",
        sliced=True,
        part_bytes=100,
    ),
    Case("text-files", write_texts, _of_text, "*.txt", may_be_empty=False),
    *(_tar_case(suffix) for suffix in ("tar", "tar.gz", "tar.zst")),
    *(_tar_case(suffix, sliced=True) for suffix in ("tar", "tar.gz", "tar.zst")),
    _golden_case("energon", "", _of_key, "train*.tar", 5, part_bytes=100_000),
    Case("megatron", write_megatron, _of_input_ids, "*.bin", part_bytes=100),
    _golden_case("mds", "arrays", _of_length, "*.mds", 20),
    _golden_case("mds", "packed_zstd", _of_first_token, "*.zstd", 30),
    _golden_case("mds", "jsonl", _of_number, "shard*.json", 7, part_bytes=60),
    _golden_case("litdata", "rows", _of_text, "*.bin", 20),
    _golden_case("litdata", "tokens", _of_hundreds, "*.bin", 20, part_bytes=200),
    _golden_case("litdata", "zstd_chunk", _of_number, "*.bin", 30, part_bytes=300),
    Case("images", write_images, _of_image, "*.png", part_bytes=100),
    Case("dataset", make_dataset, _of_number, part_bytes=160_000),
    Case("hugging-face", make_hugging_face, _of_number, part_bytes=160_000),
    Case("iterable", make_iterable, _of_number),
]
