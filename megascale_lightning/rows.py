"""What a row of a batch is: `PackedRows`, `PaddedRows`, or what a `collate_fn` makes of samples, `CollatedRows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.types import IntArray

__all__ = ["CollatedRows", "ContextParallel", "PackedRows", "PaddedRows", "Rows", "context_problems"]

ContextParallel: TypeAlias = Literal["full", "head_tail", "contiguous"]
"""What of a row a context-parallel rank gets: all of it, two chunks from both ends, or one slice."""

_RESERVED: Final = frozenset(
    {"input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    | {"cu_seq_lens_q_unpadded", "cu_seq_lens_k_unpadded", "megascale"}
)


class Rows:
    """Base of the kinds of rows; each is a frozen dataclass."""

    micro_batch_size: int
    """Rows of one `training_step` on one rank."""
    token_fields: tuple[str, ...] = ()
    sample_fields: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most."""
        raise TypeError(f"{type(self).__name__} is no kind of rows: use PackedRows, PaddedRows or CollatedRows")

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Per-token fields that the loaders carry."""
        return ("input_ids", *self.token_fields)

    def room(self, lengths: IntArray) -> IntArray:
        """int64 [n]: tokens that documents of so many tokens take up in a row, int [n], their own padding included."""
        return lengths.astype(np.int64)

    def portable(self) -> Rows:
        """The same rows without what only the ranks need: what is sent to the roles' processes."""
        return self


@dataclass(frozen=True)
class PackedRows(Rows):
    """Rows of several samples each, at most `seq_len` tokens, never reaching into one another.

    Raises:
        ConfigError: A value is out of range.
    """

    seq_len: int
    """Tokens a row holds."""
    micro_batch_size: int
    """Rows of one `training_step` on one rank."""
    _: KW_ONLY
    pad_to_multiple_of: int | None = None
    """Rows are made as wide as the next multiple of it."""
    pad_documents_to: int | None = None
    """Each document is padded to the next multiple of it inside its row, and takes up that much of `seq_len` (part of
    the order). Context parallelism that cuts documents (`context_parallel="head_tail"`) needs a multiple of 2 x cp."""
    pack_ahead: int = 512
    """Samples drawn beyond what a step needs, so that rows fill well."""
    pad_id: int = 0
    """Token id of the padding."""
    token_fields: tuple[str, ...] = ()
    """Per-token fields beside `input_ids` that the batch carries: `loss_mask`, `labels`, ..."""
    sample_fields: tuple[str, ...] = ()
    """Per-sample fields that the batch carries, one entry per piece, in row order."""
    shift_labels: bool = False
    """Labels stand one to the left, so that position i holds the target of position i."""
    flatten: bool = False
    """Hand out [1, rows x width] instead of [rows, width], as variable-length attention wants it."""

    def __post_init__(self) -> None:
        found = positive(seq_len=self.seq_len, micro_batch_size=self.micro_batch_size)
        if not isinstance(self.pack_ahead, int) or self.pack_ahead < 0:
            found.append(f"pack_ahead must be a whole number of at least 0, not {self.pack_ahead!r}")
        found += self._document_problems()
        _settle_fields(self, found)

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most."""
        return self.seq_len

    @property
    def width(self) -> int:
        """Tokens of a row as handed out, padding included; context-parallel ranks may need it a little wider."""
        multiple = self.pad_to_multiple_of or 1
        return -(-self.seq_len // multiple) * multiple

    def room(self, lengths: IntArray) -> IntArray:
        """See `Rows.room`."""
        multiple = self.pad_documents_to or 1
        found: IntArray = -(-lengths.astype(np.int64) // multiple) * multiple
        return found

    def _document_problems(self) -> list[str]:
        multiple = self.pad_documents_to
        if multiple is None:
            return []
        found = positive(pad_documents_to=multiple)
        if found or positive(seq_len=self.seq_len) or self.seq_len % multiple == 0:
            return found
        nearest = max(round(self.seq_len / multiple), 1) * multiple
        return [
            f"seq_len must be a multiple of pad_documents_to={multiple}, so that the longest document still fits in a "
            f"row when it is padded, not {self.seq_len}: take {nearest}"
        ]


@dataclass(frozen=True)
class PaddedRows(Rows):
    """Rows of one sample each; rows of similar length share a microbatch, which is as wide as its longest row.

    Raises:
        ConfigError: A value is out of range.
    """

    max_len: int
    """Tokens a row holds at most."""
    micro_batch_size: int
    """Rows of one `training_step` on one rank."""
    _: KW_ONLY
    pad_to_multiple_of: int | None = None
    """Microbatches are made as wide as the next multiple of it."""
    pad_id: int = 0
    """Token id of the padding."""
    token_fields: tuple[str, ...] = ()
    """Per-token fields beside `input_ids` that the batch carries: `loss_mask`, `labels`, ..."""
    sample_fields: tuple[str, ...] = ()
    """Per-sample fields that the batch carries, one entry per row."""
    shift_labels: bool = False
    """Labels stand one to the left, so that position i holds the target of position i."""

    def __post_init__(self) -> None:
        _settle_fields(self, positive(max_len=self.max_len, micro_batch_size=self.micro_batch_size))

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most."""
        return self.max_len


@dataclass(frozen=True)
class CollatedRows(Rows):
    """Rows of one sample each, handed out exactly as a `collate_fn` returns them; it runs on the rank, in read-ahead.

    A sample may be anything that pickles: what a dataset's `__getitem__`, a transform, or a record of a file gives. Its
    length is what `Source.length` says; else that of its `input_ids` where a file or a transform gives a dict that has
    them; else 1. Rows of similar length share a microbatch. Without `length` and `transform` a dataset's items are
    fetched when they are due, and not before.

    Raises:
        ConfigError: A value is out of range.
    """

    micro_batch_size: int
    """Rows of one `training_step` on one rank."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """From the list of a microbatch's samples to its batch; None: torch's `default_collate`. It must not reach the
    model; what it draws comes from the trainer's random states, and is not repeated by a resume."""

    def __post_init__(self) -> None:
        found = positive(micro_batch_size=self.micro_batch_size)
        if self.collate_fn is not None and not callable(self.collate_fn):
            found.append(f"collate_fn must be callable, not {type(self.collate_fn).__name__}")
        if found:
            raise ConfigError("CollatedRows: " + "; ".join(found))

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most: there is no limit."""
        return 2**31 - 1

    @property
    def token_columns(self) -> tuple[str, ...]:
        """None: a sample travels as a whole."""
        return ()

    def portable(self) -> CollatedRows:
        """Without `collate_fn`, which may hold torch."""
        return replace(self, collate_fn=None)


def positive(**values: Any) -> list[str]:
    """What is wrong with numbers that must be at least 1, by name."""
    return [
        f"{name} must be a whole number of at least 1, not {value!r}"
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]


def context_problems(rows: Rows, context_parallel: str) -> list[str]:
    """What of the rows does not go with a way to cut them."""
    if context_parallel == "full":
        return []
    if isinstance(rows, CollatedRows):
        return [
            f"context_parallel={context_parallel!r} cuts rows of tokens, and what a collate_fn returns is handed out "
            'as it is: set context_parallel="full" and cut it on the rank, or take PackedRows or PaddedRows'
        ]
    if isinstance(rows, (PackedRows, PaddedRows)) and not rows.shift_labels:
        return [
            f"context_parallel={context_parallel!r} needs shift_labels=True of {type(rows).__name__}: the target of a "
            "slice's last token lies on another rank, so that labels are shifted before they are cut; a loss must not "
            "shift them again"
        ]
    return []


def _settle_fields(rows: Any, found: list[str]) -> None:
    """Finish the checks that packed and padded rows share; raise what was found."""
    if rows.pad_to_multiple_of is not None:
        found += positive(pad_to_multiple_of=rows.pad_to_multiple_of)
    for name in ("token_fields", "sample_fields"):
        object.__setattr__(rows, name, tuple(getattr(rows, name)))
    declared = [*rows.token_fields, *rows.sample_fields]
    taken = sorted(set(declared) & _RESERVED)
    if taken:
        found.append(f"fields {taken} are made by the loader and cannot be declared")
    if len(set(declared)) < len(declared):
        found.append(f"a field is declared twice in {declared}")
    if found:
        raise ConfigError(f"{type(rows).__name__}: " + "; ".join(found))
