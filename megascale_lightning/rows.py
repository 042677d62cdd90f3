"""What a row of a batch is: `PackedRows`, `PaddedRows`, or what a `collate_fn` makes of samples, `CollatedRows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final

from megascale_lightning.errors import ConfigError

__all__ = ["CollatedRows", "PackedRows", "PaddedRows", "Rows"]

_RESERVED: Final = frozenset(
    {"input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    | {"megascale"}
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
        _settle_fields(self, found)

    @property
    def capacity(self) -> int:
        """Tokens a row holds at most."""
        return self.seq_len

    @property
    def width(self) -> int:
        """Tokens of a row as handed out, padding included."""
        multiple = self.pad_to_multiple_of or 1
        return -(-self.seq_len // multiple) * multiple


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
