"""Golden folders of other libraries, what these read from them, and streams over them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from megascale_lightning import LoaderConfig, PackedRows
from megascale_lightning.sources import Source, build_manifest, make_reader
from tests.acceptance.harness import World, run_world, same_tensors

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@dataclass(frozen=True)
class Library:
    """What tests of the folders of one library begin with."""

    kind: str
    """Of the golden folders, and the format."""

    @property
    def folder(self) -> Path:
        """The golden folders."""
        return GOLDEN / self.kind

    def source(self, data: Any, **more: Any) -> Source:
        """A source "s" of a folder, whose name may tell no format."""
        return Source("s", str(data), format=self.kind, **more)

    def copy(self, tmp_path: Path, name: str) -> Path:
        """A copy of a golden folder, to be damaged."""
        return Path(shutil.copytree(self.folder / name, tmp_path / name))


def edit_index(folder: Path, change: Callable[[Any], object]) -> None:
    """Write the `index.json` of a folder anew, as `change` left it."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def tokens(records: Sequence[Any]) -> list[list[int]]:
    """The tokens of records."""
    return [record["input_ids"].tolist() for record in records]


def plain(value: Any) -> Any:
    """A value as the JSON beside a golden folder has it."""
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.ravel().tolist()}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def expected(kind: str, name: str) -> list[Any]:
    """What the library itself read from a golden folder."""
    return json.loads((GOLDEN / kind / f"{name}.json").read_text())


def read_all(source: Source, columns: Sequence[str] | None = None) -> list[Any]:
    """All records in order; None for a failed one."""
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, columns)
    found = [sample for unit in range(manifest.num_units) for sample in reader.read(unit).samples()]
    reader.close()
    assert len(found) == manifest.num_records
    return found


def check_cuts(source: Source, columns: Sequence[str] | None = None) -> None:
    """Records are the same, however a unit is cut."""
    manifest = build_manifest(source)
    reader = make_reader(source, manifest, columns)
    for unit in range(manifest.num_units):
        rows = int(manifest.units["rows"][unit])
        whole = list(map(plain, reader.read(unit).samples()))
        assert len(whole) == rows
        for start in range(rows + 1):
            for stop in (start, start + 1, start + 3, rows, -1):
                block = reader.read(unit, start, stop)
                found = list(map(plain, block.samples()))
                assert found == whole[start : rows if stop < 0 else stop], (unit, start, stop)
                assert block.num_rows == len(found)
                assert block.row_start == start


def to_memory(folder: Path, name: str) -> str:
    """A copy of a folder in fsspec's memory, and its URL."""
    fs = fsspec.filesystem("memory")
    root = f"/binary_folders/{name}"
    if fs.exists(root):
        fs.rm(root, recursive=True)
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory:/{root}"


def check_stream(source: Source, records: Sequence[Sequence[int]]) -> None:
    """One epoch gives every record once, with its own tokens, and goes on from any step as if nothing had been.

    Args:
        source: With `epochs=1`.
        records: Tokens in the order of units and rows; empty ones are dropped.
    """
    manifest = build_manifest(source)
    ids = [(unit, row) for unit, rows in enumerate(manifest.units["rows"].tolist()) for row in range(rows)]
    tokens = {where: list(one) for where, one in zip(ids, records, strict=True) if len(one)}
    config = LoaderConfig(
        sources=[source],
        rows=PackedRows(seq_len=8, micro_batch_size=1, pack_ahead=4),
        global_batch_size=1,
        runtime="local",
        window_units=2,
        part_bytes=256,
    )
    steps = run_world(config, keep_states=True)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in steps:
        for batch in step.microbatches():
            for row, pieces in enumerate(batch.rows):
                wanted = []
                for _, epoch, *where, start, stop in pieces:
                    part = range(len(tokens[tuple(where)]))[start : None if stop < 0 else stop]
                    seen.update((epoch, *where, at) for at in part)
                    wanted += [tokens[tuple(where)][at] for at in part]
                assert batch.tensors["input_ids"][row][: len(wanted)].tolist() == wanted
    assert seen == Counter((0, *where, at) for where, one in tokens.items() for at in range(len(one)))
    assert len(steps) > 2
    for at, step in enumerate(steps[:-1]):
        with World(config, state=step.state) as world:
            rest = world.steps()
        assert len(rest) == len(steps) - at - 1
        for mine, other in zip(rest, steps[at + 1 :], strict=True):
            assert mine.certificate == other.certificate
            assert same_tensors(mine, other)
