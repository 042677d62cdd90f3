"""Text that is on any machine with Python, and how it becomes tokens.

The loaders import this module to find `tokenize`: it imports nothing heavy, so that they stay small.
"""

import ast
import importlib.metadata
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 256  # byte 0 is in no text: it is the padding


def tokenize(sample: dict) -> dict:
    """The bytes of the text, as tokens."""
    return {"input_ids": np.frombuffer(sample["text"].encode(), np.uint8).astype(np.int32)}


def write_sources(folder: Path, limit: int = 5_000) -> None:
    """Write four sources of up to `limit` texts each: two as Parquet, two as JSON lines. What is there is kept."""
    if (folder / "packages.jsonl").exists():
        return
    code, docstrings = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for text, docstring in definitions(path.read_text(errors="ignore")):
            code.append(text)
            docstrings.append(docstring)
    write_parquet(folder / "code", code[:limit])
    write_parquet(folder / "manual", list(manual())[:limit])
    write_jsonl(folder / "docstrings.jsonl", list(filter(None, docstrings))[:limit])
    write_jsonl(folder / "packages.jsonl", list(filter(None, descriptions()))[:limit])


def definitions(module: str) -> Iterator[tuple[str, str | None]]:
    """Each function, class and method of a module: its code and its docstring."""
    lines = module.splitlines(keepends=True)
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield "".join(lines[node.lineno - 1 : node.end_lineno]), ast.get_docstring(node)


def manual() -> Iterator[str]:
    """The chapters of Python's language reference, as `help()` shows them."""
    from pydoc_data.topics import topics

    yield from topics.values()


def descriptions() -> Iterator[str | None]:
    """What the installed packages say of themselves."""
    for package in sorted(importlib.metadata.distributions(), key=lambda found: found.metadata["Name"] or ""):
        yield package.metadata.get_payload()


def write_parquet(folder: Path, texts: list[str]) -> None:
    """Several files of several row groups each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(texts), 1_000)):
        table = pa.table({"text": texts[start : start + 1_000]})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=100)


def write_jsonl(path: Path, texts: list[str]) -> None:
    """One file, one JSON object a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
