"""`ItemPlan`: what a LitData `index.json` says of all items: their nesting, formats of leaves, compression."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats.columnchecks import check_columns
from megascale_lightning.sources.formats.litdata.chunks import Chunk
from megascale_lightning.sources.formats.litdata.codecs import Decoder, known_formats, leaf_decoder, token_dtype
from megascale_lightning.sources.formats.litdata.trees import Tree, parse_tree
from megascale_lightning.sources.formats.optionsets import check_pickles
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.storage import FileInfo

__all__ = ["ItemPlan", "Packing", "parse_plan"]

ItemDecoder = Callable[[memoryview], tuple[Any, str | None]]
"""The bytes of an item -> (record, None), or (None, what is wrong)."""


class Packing(Enum):
    """What is compressed as one."""

    NONE = auto()
    FILE = auto()
    FRAMES = auto()
    ITEM = auto()


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """How the items of one folder are read."""

    path: str
    """Of the index."""
    tree: Tree
    formats: tuple[str, ...]
    """Of the leaves, in order."""
    packing: Packing
    is_tokens: bool
    """An item is nothing but the values of its one leaf, which has one axis."""
    field: str
    """Name of the record's field where the item is no mapping."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a record."""
        return tuple(map(str, self.tree.keys)) if self.tree.is_mapping else (self.field,)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Of the values, where `is_tokens`."""
        return np.dtype(token_dtype(self.formats[0]))

    def check_columns(self, name: str, needed: Sequence[str]) -> None:
        """Refuse items that lack a column.

        Raises:
            ConfigError: As said.
        """
        check_columns(name, self.path, self.columns, needed)

    def check_size(self, name: str, info: FileInfo, chunk: Chunk) -> None:
        """Refuse a chunk that is cut short. The size of one that is compressed as a whole is not written down.

        Raises:
            DataError: It has another size than the index says.
        """
        is_packed = self.packing is Packing.FILE and info.path.endswith(f"/{chunk.name}")
        if not is_packed and info.size not in chunk.sizes:
            raise DataError(
                f"source {name!r}: {info.path} has {info.size} bytes, and its index says {chunk.size}: it is cut short "
                "or of another data set"
            )

    def make_decoder(self, source: Source, columns: Sequence[str] | None) -> ItemDecoder:
        """What turns the bytes of an item into a dict of these columns, None: of all.

        Raises:
            ConfigError: A format is unknown, or a pickle and not allowed.
        """
        wanted = set(self.columns if columns is None else columns)
        names = list(self.tree.names())
        children = self.tree.children if self.tree.is_mapping else (self.tree,)
        steps: list[tuple[str, str, Decoder] | None] = []
        kept: list[tuple[str, Tree]] = []
        for column, child in zip(self.columns, children, strict=True):
            at = len(steps)
            for leaf, form in zip(names[at : at + child.num_leaves()], self.formats[at:], strict=False):
                steps.append((leaf, form, self._decoder(source, leaf, form)) if column in wanted else None)
            if column in wanted:
                kept.append((column, child))
        head = struct.Struct(f"<{len(steps)}I")
        return lambda data: _decode(data, head, steps, kept)

    def _decoder(self, source: Source, leaf: str, form: str) -> Decoder:
        where = f"source {source.name!r}: {leaf or self.field!r} of {self.path}"
        if form == "pickle":
            check_pickles(source, where)
        found = leaf_decoder(form)
        if found is None:
            raise ConfigError(f"{where} is stored as {form!r}; known are {', '.join(known_formats())}")
        return found


def _decode(
    data: memoryview,
    head: struct.Struct,
    steps: Sequence[tuple[str, str, Decoder] | None],
    kept: Sequence[tuple[str, Tree]],
) -> tuple[Any, str | None]:
    """An item: the sizes of all leaves, uint32 each, then the leaves."""
    if len(data) < head.size:
        return None, f"the item has {len(data)} bytes, fewer than the sizes of its {len(steps)} leaves"
    sizes = head.unpack_from(data)
    if head.size + sum(sizes) != len(data):
        return None, f"the item has {len(data)} bytes, and its leaves have {head.size + sum(sizes)}"
    at, leaves = head.size, []
    for size, step in zip(sizes, steps, strict=True):
        if step is not None:
            try:
                leaves.append(step[2](data[at : at + size]))
            except Exception as error:
                says = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                return None, f"{step[0]!r}, a {step[1]}, {says}"
        at += size
    values = iter(leaves)
    return {name: tree.build(values) for name, tree in kept}, None


def parse_plan(source: Source, path: str, index: dict[str, Any]) -> tuple[ItemPlan, list[Chunk]]:
    """What an index says.

    Args:
        source: Named in messages; its options choose the name of a field.
        path: Of the index, for messages.
        index: Its content.

    Raises:
        ConfigError: It is encrypted, or needs a loader, a nesting or a compression that is not known here.
        DataError: It is damaged.
    """
    where = f"source {source.name!r}: {path}"
    try:
        config = index["config"]
        _check_config(where, config)
        chunks = [_chunk(one, str(config.get("compression"))) for one in index["chunks"]]
        is_tokens = config.get("item_loader") == "TokensLoader" or (
            config.get("item_loader") is None and any(chunk.num_tokens >= 0 for chunk in chunks)
        )
        formats = tuple(map(str, config["data_format"]))
        tree = parse_tree(config["data_spec"])
        if tree.num_leaves() != len(formats):
            raise DataError(f"{where} has {len(formats)} formats for {tree.num_leaves()} leaves")
        packing = _packing(where, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, (ConfigError, DataError)):
            raise
        raise DataError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    if is_tokens and (len(formats) != 1 or token_dtype(formats[0]) is None):
        raise ConfigError(f"{where} has tokens stored as {', '.join(formats)}; arrays of one axis can be read")
    if source.format_options.get("block_size") is not None and not is_tokens:
        raise ConfigError(f"{where} was not written for TokensLoader, so it has no blocks: leave out block_size")
    default = "input_ids" if len(formats) == 1 and token_dtype(formats[0]) is not None else "item"
    field = str(source.format_options.get("field", default))
    return ItemPlan(path, tree, formats, packing, is_tokens, field), chunks


def _chunk(entry: dict[str, Any], compression: str) -> Chunk:
    name = str(entry["filename"])
    return Chunk(
        name=name,
        plain_name=name.replace(f".{compression}", ""),
        size=int(entry["chunk_bytes"]),
        num_items=int(entry["chunk_size"]),
        num_tokens=-1 if entry.get("dim") is None else int(entry["dim"]),
    )


def _check_config(where: str, config: dict[str, Any]) -> None:
    if config.get("encryption"):
        raise ConfigError(f"{where} is encrypted; write the chunks anew without encryption")
    loader = config.get("item_loader")
    if loader not in (None, "PyTreeLoader", "TokensLoader"):
        hint = "; name the Parquet files themselves" if loader == "ParquetLoader" else ""
        raise ConfigError(f"{where} needs {loader}; items of PyTreeLoader and TokensLoader can be read{hint}")


def _packing(where: str, config: dict[str, Any]) -> Packing:
    name = config.get("compression")
    if name is None:
        return Packing.NONE
    if str(name).split(":")[0] != "zstd":
        raise ConfigError(f"{where} has chunks compressed by {name!r}; zstd can be read")
    level = config.get("compression_level") or "chunk"
    found = {"chunk": Packing.FILE, "batch": Packing.FRAMES, "sample": Packing.ITEM}.get(level)
    if found is None:
        raise ConfigError(f"{where} has the compression level {level!r}; chunk, batch and sample can be read")
    return found
