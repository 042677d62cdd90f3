"""Files with bad records of every kind, what has to be said of each, and a run over them."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.loading.quarantine import read_lines

from .conftest import SEQ_LEN

GOOD = 7
"""Every other record of a case is good; its first token is 1000 + its number."""


@dataclass
class Bad:
    """One record, or all of a unit, that must be found bad."""

    file: str
    unit: int
    row: int
    word: str
    """Said of it."""
    reason: str = "read_error"
    records: int = 1
    """It is counted as so many."""


@dataclass
class Case:
    """Files with good and bad records in turn."""

    data: str
    good: list[int]
    """First tokens."""
    bad: list[Bad]
    dropped: dict[str, int] = field(default_factory=dict)
    """What else is dropped, by reason."""
    source: dict[str, Any] = field(default_factory=dict)
    rows: Any = None


Make = Callable[[Path], Case]


def token_of(number: int) -> int:
    return 1000 + number


def good_line(number: int, **more: Any) -> bytes:
    return json.dumps({"input_ids": [token_of(number), 5, 6], **more}).encode()


def lines(
    *bad: tuple[bytes, str],
    good: Callable[[int], bytes] = good_line,
    reason: str = "read_error",
    rows: Any = None,
    **source: Any,
) -> Make:
    """A case of JSON lines: (line, what is said of it), with a good line before each and some behind."""

    def make(folder: Path) -> Case:
        content: list[bytes] = []
        found: list[Bad] = []
        for number, (line, word) in enumerate(bad):
            content += [good(number), line]
            found.append(Bad("lines.jsonl", 0, len(content) - 1, word, reason))
        numbers = [*range(len(bad)), *range(500, 500 + GOOD)]
        content += [good(number) for number in numbers[len(bad) :]]
        path = folder / "lines.jsonl"
        path.write_bytes(b"\n".join(content) + b"\n")
        return Case(str(path), [token_of(number) for number in numbers], found, source=source, rows=rows)

    return make


def field_line(value: str) -> bytes:
    return b'{"input_ids": %s}' % value.encode()


def table(
    bad: Sequence[tuple[int, str]],
    columns: Callable[[list[list[int] | None]], dict[str, Any]],
    *,
    rows: Any = None,
    **source: Any,
) -> Make:
    """A case of a Parquet file of 10 records in row groups of 4: (record, what is said of it)."""

    def make(folder: Path) -> Case:
        path = folder / "rows.parquet"
        ids: list[list[int] | None] = [[token_of(number), 5, 6] for number in range(10)]
        pq.write_table(pa.table(columns(ids)), path, row_group_size=4)
        found = [Bad("rows.parquet", record // 4, record % 4, word) for record, word in bad]
        good = [token_of(number) for number in range(10) if number not in {record for record, _ in bad}]
        return Case(str(path), good, found, source=source, rows=rows)

    return make


def replaced(at: dict[int, Any], kind: pa.DataType | None = None) -> Callable[[list[Any]], dict[str, Any]]:
    """The column of tokens with other values at some records."""
    return lambda ids: {
        "input_ids": pa.array(
            [at.get(record, tokens) for record, tokens in enumerate(ids)], kind or pa.list_(pa.int64())
        )
    }


def with_column(name: str, at: dict[int, Any], usual: Any, kind: pa.DataType) -> Callable[[list[Any]], dict[str, Any]]:
    """Another column beside the tokens."""
    return lambda ids: {"input_ids": ids, name: pa.array([at.get(record, usual) for record in range(len(ids))], kind)}


def files(broken: Callable[[Path], list[Bad]]) -> Make:
    """Three files of 3 records, the one in the middle broken."""

    def make(folder: Path) -> Case:
        for index in range(3):
            ids = [[token_of(number), 5, 6] for number in range(3 * index, 3 * index + 3)]
            path = folder / f"part-{index}.parquet"
            pq.write_table(pa.table({"input_ids": ids}), path, compression="none", use_dictionary=False)
        bad = broken(folder / "part-1.parquet")
        return Case(str(folder / "*.parquet"), [token_of(n) for n in (0, 1, 2, 6, 7, 8)], bad)

    return make


def cut(path: Path) -> list[Bad]:
    """Without its footer: how many rows it had is not known."""
    path.write_bytes(path.read_bytes()[:-20])
    return [Bad(path.name, 1, -1, "arquet")]


def emptied(path: Path) -> list[Bad]:
    path.write_bytes(b"")
    return [Bad(path.name, 1, -1, "0 bytes")]


def overwritten(path: Path) -> list[Bad]:
    """Its footer is whole and says that there are 3 rows."""
    content = bytearray(path.read_bytes())
    content[4:24] = b"\xff" * 20
    path.write_bytes(content)
    return [Bad(path.name, 1, -1, "thrift", records=3)]


def nulled(path: Path) -> list[Bad]:
    """Its column has no type but null."""
    pq.write_table(pa.table({"input_ids": pa.nulls(3)}), path)
    return [Bad(path.name, 1, row, "is null") for row in range(3)]


def untouched(_: Path) -> list[Bad]:
    return []


def exploding(sample: dict[str, Any]) -> dict[str, Any]:
    if sample.get("explode"):
        raise KeyError("speaker")
    return {"input_ids": sample["input_ids"]}


def unpicky(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Gives wrong values, too many, none."""
    given: dict[str, Any] = {"wrong": {"input_ids": ["a"]}, "huge": {"input_ids": [2**31]}, "filter": None}
    return given[sample["what"]] if "what" in sample else {"input_ids": sample["input_ids"]}


MASKED = PackedRows(SEQ_LEN, 2, pack_ahead=8, token_fields=("loss_mask",))


def masked_line(number: int) -> bytes:
    return good_line(number, loss_mask=[1, 1, 1])


def measured_line(number: int) -> bytes:
    return good_line(number, n=3)


def length_line(value: str) -> bytes:
    return b'{"input_ids": [1, 2], "n": %s}' % value.encode()


LINES: dict[str, Make] = {
    "missing column": lines(
        (b'{"text": "x"}', "'input_ids' is not among its keys ['text']"), (b"{}", "among its keys")
    ),
    "null": lines((field_line("null"), "'input_ids' is null"), (field_line("[1, null]"), "'input_ids'")),
    "wrong type": lines(
        (field_line('"abc"'), "'input_ids'"),
        (field_line("7"), "'input_ids'"),
        (field_line("true"), "'input_ids'"),
        (field_line('["a", "b"]'), "'input_ids'"),
        (field_line("[1.5, 2]"), "float64"),
        (field_line("[NaN]"), "float64"),
    ),
    "nested wrong type": lines(
        (field_line("[[1, 2], [3]]"), "'input_ids'"),
        (field_line("[[1, 2], [3, 4]]"), "[2, 2]"),
        (field_line('{"ids": [1]}'), "'input_ids'"),
        (field_line('[{"id": 1}]'), "'input_ids'"),
    ),
    "overflow": lines(
        (field_line(f"[1, {2**31}]"), str(2**31)),
        (field_line(f"[{-(2**31) - 1}]"), str(-(2**31) - 1)),
        (field_line(f"[{2**63}]"), str(2**63)),
        (field_line(f"[{2**64}]"), "'input_ids'"),
    ),
    "no JSON": lines(
        (b'{"input_ids": [1, 2', "is not JSON"),
        (b"hello", "at byte"),
        (b'{"input_ids": [1]} {"input_ids": [2]}', "is not JSON"),
        (b"[1, 2]", "holds a list"),
        (b"null", "NoneType"),
    ),
    "no UTF-8": lines((b'{"input_ids": [1], "text": "\xff\xfe"}', "is not UTF-8"), (b"\x00\xc3", "at byte")),
    "ragged fields": lines(
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "'loss_mask' has 1 entries where 'input_ids' has 2"),
        (b'{"input_ids": [1, 2], "loss_mask": []}', "'loss_mask'"),
        (b'{"input_ids": [1, 2]}', "'loss_mask'"),
        (b'{"input_ids": [1, 2], "loss_mask": [[1], [1]]}', "'loss_mask'"),
        good=masked_line,
        rows=MASKED,
    ),
    "lengths": lines(
        (length_line("NaN"), "ength"),
        (length_line("-1"), "is -1 where 'input_ids' has 2"),
        (length_line("3"), "is 3 where 'input_ids' has 2"),
        (length_line("2.0"), "ength"),
        (length_line('"2"'), "ength"),
        (length_line(str(2**70)), "ength"),
        (length_line("null"), "'n' is null"),
        (b'{"input_ids": [1, 2]}', "'n' is not among its keys"),
        good=measured_line,
        length="n",
    ),
    "transform": lines(
        (b'{"input_ids": [1], "explode": true}', "transform 'exploding' failed: KeyError: 'speaker'"),
        (b'{"explode": 1}', "KeyError: 'speaker'"),
        reason="transform_error",
        transform=exploding,
    ),
    "transform gives nonsense": lines(
        (b'{"what": "wrong"}', "'input_ids'"),
        (b'{"what": "huge"}', "'input_ids'"),
        reason="transform_error",
        transform=unpicky,
    ),
    "collated lengths": lines(
        (length_line("NaN"), "'length' failed"),
        (length_line("-1"), "-1 is no length"),
        (b"{}", "'length' failed: KeyError"),
        good=measured_line,
        length="n",
        rows=CollatedRows(2, list),
    ),
    "collated columns": lines(
        (b'{"text": 1}', "'input_ids' is not among its keys"),
        (b"broken", "is not JSON"),
        rows=CollatedRows(2, list),
        columns=("input_ids",),
    ),
    "collated transform": lines(
        (b'{"explode": true}', "KeyError: 'speaker'"),
        reason="transform_error",
        rows=CollatedRows(2, list),
        transform=exploding,
    ),
}

TABLES: dict[str, Make] = {
    "null rows": table([(1, "is null"), (9, "is null")], replaced({1: None, 9: None})),
    "null values": table([(2, "'input_ids' has a null among its values")], replaced({2: [1, None]})),
    "all-null row group": table([(n, "is null") for n in range(4, 8)], replaced(dict.fromkeys(range(4, 8)))),
    "overflow in a table": table(
        [(3, f"the value {2**40}"), (8, str(-(2**31) - 1))], replaced({3: [1, 2**40], 8: [-(2**31) - 1]})
    ),
    "unsigned overflow": table([(3, str(2**64 - 1))], replaced({3: [2**64 - 1]}, pa.list_(pa.uint64()))),
    "ragged columns": table(
        [(0, "'loss_mask' has 2 entries"), (5, "'loss_mask' is null"), (6, "'loss_mask' has 0 entries")],
        with_column("loss_mask", {0: [1, 1], 5: None, 6: []}, [1, 1, 1], pa.list_(pa.int8())),
        rows=MASKED,
    ),
    "length column": table(
        [(0, "is -1 where"), (4, "is 4 where"), (7, "is null")],
        with_column("n", {0: -1, 4: 4, 7: None}, 3, pa.int64()),
        length="n",
    ),
    "table through a function": table(
        [(1, "ValueError: tokens are null"), (6, "ValueError: tokens are null")],
        replaced({1: None, 6: [None]}),
        rows=CollatedRows(2, list),
        length=lambda sample: len([int(token) for token in need(sample["input_ids"])]),
    ),
}


def need(tokens: Any) -> Any:
    """The tokens, all of them there."""
    if tokens is None or any(token is None for token in tokens):
        raise ValueError("tokens are null")
    return tokens


FILES: dict[str, Make] = {
    "truncated file": files(cut),
    "zero-byte file": files(emptied),
    "broken row group": files(overwritten),
    "all-null file": files(nulled),
}

CASES = {**LINES, **TABLES, **FILES}


def config_of(case: Case, on_error: str, folder: Path, **changes: Any) -> LoaderConfig:
    source = {"epochs": 1, "shuffle": False, "on_error": on_error, **case.source, **changes.pop("source", {})}
    base: dict[str, Any] = {
        "sources": [Source("web", case.data, **source)],
        "rows": case.rows or PackedRows(SEQ_LEN, 2, pack_ahead=8),
        "global_batch_size": 2,
        "runtime": "local",
        "quarantine_dir": str(folder / "quarantine"),
    }
    return LoaderConfig(**(base | changes))


def first_tokens(batch: Any, row_weights: Any) -> list[int]:
    """The first token of each good record of a batch; filler rows left out."""
    if isinstance(batch, dict):
        return [token for token in batch["input_ids"].flatten().tolist() if token >= 1000]
    return [int(sample["input_ids"][0]) for sample, weight in zip(batch, row_weights, strict=True) if float(weight)]


@dataclass
class Outcome:
    """What a run over everything gave."""

    delivered: Counter[int]
    dropped: dict[str, int]
    certificate: str
    lines: list[dict[str, Any]]


def run(config: LoaderConfig) -> Outcome:
    with MegaScaleLoader(config) as loader:
        delivered: Counter[int] = Counter()
        for batch in loader:
            delivered.update(first_tokens(batch, loader.last_info.row_weights))
        dropped = loader.state_dict()["sources"]["web"]["dropped"]
        return Outcome(delivered, dropped, loader.certificate, quarantined(config))


def quarantined(config: LoaderConfig, stream: str = "train") -> list[dict[str, Any]]:
    path = Path(str(config.quarantine_dir)) / stream / "web.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def quarantined_while_written(config: LoaderConfig) -> list[dict[str, Any]]:
    path = Path(str(config.quarantine_dir)) / "train" / "web.jsonl"
    return list(read_lines(path)) if path.exists() else []


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of this process may have `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_lines(entries: list[dict[str, Any]], bad: Sequence[Bad]) -> None:
    """One whole line for each bad record, in the order they were met."""
    assert [(entry["unit"], entry["row"]) for entry in entries] == [(one.unit, one.row) for one in bad]
    for entry, one in zip(entries, bad, strict=True):
        assert entry["source"] == "web"
        assert entry["stream"] == "train"
        assert Path(entry["file"]).name == one.file
        assert entry["reason"] == one.reason
        assert one.word in entry["message"], f"{one.word!r} is not in: {entry['message']}"


def counts_of(case: Case) -> dict[str, int]:
    found = Counter(case.dropped)
    for one in case.bad:
        found[one.reason] += one.records
    return dict(found)


def write_lines(folder: Path, count: int = 60, every: int = 3, num_files: int = 3) -> Case:
    """Every third line is bad; each file is a unit."""
    good, bad = [], []
    for index in range(num_files):
        content = []
        for row in range(count):
            if row % every:
                content.append(good_line(1000 * index + row))
                good.append(token_of(1000 * index + row))
            else:
                content.append(b"broken %d" % row)
                bad.append(Bad(f"part-{index:02}.jsonl", index, row, "is not JSON"))
        (folder / f"part-{index:02}.jsonl").write_bytes(b"\n".join(content))
    return Case(str(folder / "*.jsonl"), good, bad)
