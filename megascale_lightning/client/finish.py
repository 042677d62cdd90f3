"""The last step on the rank: rows without padding become the tensors of a microbatch.

It runs in the rank's read-ahead thread, so it works at one slice copy per row and field (per document, where each has
padding of its own), and on whole arrays otherwise.
All tensors are the batch's own: none holds on to the window, which may lie in memory shared with other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from megascale_lightning.client.describing import WindowInfos, running_sum
from megascale_lightning.client.info import INFO_KEY, BatchInfo
from megascale_lightning.client.slicing import fields_of_stage, slice_of, width_multiple
from megascale_lightning.errors import StreamError
from megascale_lightning.places.tree import Place
from megascale_lightning.rows import PackedRows, PaddedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import IGNORED_LABEL, BatchWindow, IntArray

__all__ = ["finish"]

_NUMERIC: Final = "biuf"
_FIRST: Final = Place()


def finish(
    window: BatchWindow, spec: StreamSpec, place: Place = _FIRST, *, first_step: int | None = None
) -> Iterator[tuple[dict[str, Any], BatchInfo]]:
    """Give the microbatches of a window one after another, each made when it is asked for.

    Packed rows, with `m` rows in a microbatch: `input_ids`, `labels`, `position_ids`: int64 [m, width], or
    [1, m x width] with `flatten`. Positions start at 0 in each piece; the padding behind the last piece of a row is a
    segment of its own. `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [segments + 1], over the flattened microbatch, from 0 to
    m x width. `max_length_q`, `max_length_k`: int. With `pad_documents_to` these are the bounds of padded pieces, and
    `cu_seq_lens_q_unpadded`, `cu_seq_lens_k_unpadded` are running sums of their tokens without it.

    Padded rows: `input_ids`, `attention_mask`, `labels`, `position_ids`: int64 [m, longest row, rounded up].

    Both: the declared fields, per-token ones padded with 0, per-sample ones [pieces of the microbatch, ...], or a list
    where they are not numbers of one shape. Whole numbers are int64 (per sample, uint8 stays).

    A context-parallel rank has its slice of all that has a width, which is then a cp-th of it; bounds, lengths and
    per-sample fields are those of the whole microbatch. "full" rows are as wide as a multiple of 2 x cp. Of the stages
    of a pipeline the first has `input_ids`, the last `labels`, both the declared fields; positions, bounds, masks and
    `loss_mask` are on all of them.

    Args:
        window: Batches of one data-parallel group.
        spec: The stream.
        place: Whose part of them is wanted.
        first_step: Step to begin with, where it lies inside the window; None begins at its start.

    Returns:
        Per microbatch the batch, and its `BatchInfo`, which the batch also holds under "megascale".

    Raises:
        StreamError: The window does not fit the rows of the stream.
    """
    infos = WindowInfos(window, spec)
    layout = _Layout(window, spec, infos, place)
    for index in infos.indices(first_step):
        batch, rank_loss_tokens = layout.tensors(index)
        batch[INFO_KEY] = info = infos.info(index, rank_loss_tokens)
        yield batch, info


class _Layout:
    """Where everything of a window goes; worked out once, for all its microbatches."""

    def __init__(self, window: BatchWindow, spec: StreamSpec, infos: WindowInfos, place: Place) -> None:
        rows, size = spec.rows, spec.rows.micro_batch_size
        assert isinstance(rows, (PackedRows, PaddedRows))
        self._window, self._rows, self._size = window, rows, size
        self._spec, self._place = spec, place
        self._cuts = spec.num_context_ranks > 1 and spec.context_parallel != "full"
        self._pieces_of = infos.pieces_of
        lengths = window.pieces["length"].astype(np.int64)
        room = rows.room(lengths)
        row_bounds = running_sum(lengths)[window.row_offsets]
        self._row_bounds: list[int] = row_bounds.tolist()
        row_room = np.diff(running_sum(room)[window.row_offsets])
        multiple = width_multiple(spec.context_parallel, spec.num_context_ranks)
        self._widths = _widths(rows, row_room.reshape(-1, size), multiple)
        tails = np.repeat(self._widths, size) - row_room
        self._segment_rows, is_tail = _segments(window.row_offsets, tails)
        self._segment_lengths = _interleaved(room, tails, is_tail)
        self._segment_bounds = running_sum(self._segment_lengths)
        # What is copied at once: a row, or a document where each has its own padding.
        self._slots, self._slot_lengths, filled = np.arange(len(tails) + 1), np.repeat(self._widths, size), row_bounds
        self._unpadded: npt.NDArray[np.int64] | None = None
        if isinstance(rows, PackedRows) and rows.pad_documents_to is not None:
            self._unpadded = _interleaved(lengths, tails, is_tail)
            self._slots, self._slot_lengths = self._segment_rows, self._segment_lengths
            filled = running_sum(np.where(is_tail, 0, self._unpadded))
        self._filled: list[int] = filled.tolist()
        self._arange = np.arange(size * int(self._widths.max(initial=0)))

    def tensors(self, index: int) -> tuple[dict[str, Any], int | None]:
        """Make the tensors of microbatch `index` of the window; and count the targets of a slice."""
        width, segments = int(self._widths[index]), self._segments_of(index)
        bounds = self._segment_bounds[segments.start : segments.stop + 1] - self._segment_bounds[segments.start]
        lengths, starts = self._segment_lengths[segments], bounds[:-1]
        fields = {name: self._fill(name, index) for name in ("input_ids", *self._rows.token_fields)}
        labels = self._labels(fields, index, starts)
        positions = self._arange[: self._size * width] - np.repeat(starts, lengths)
        made = {"input_ids": fields.pop("input_ids"), "labels": labels, "position_ids": positions}
        made |= fields | {"labels": labels}
        if isinstance(self._rows, PaddedRows):
            made["attention_mask"] = self._attention_mask(index, width)
        rank_loss_tokens = None
        if self._cuts:
            own = self._slice(bounds, width)
            made = {name: values[own] for name, values in made.items()}
            rank_loss_tokens = int((made["labels"] != IGNORED_LABEL).sum())
        batch: dict[str, Any] = {name: self._shaped(made[name]) for name in self._of_stage(made)}
        if isinstance(self._rows, PackedRows):
            unpadded = None if self._unpadded is None else running_sum(self._unpadded[segments])
            batch |= _sequence_bounds(bounds, unpadded, int(lengths.max()))
        pieces = self._pieces_of(index)
        for name in self._of_stage(self._rows.sample_fields):
            batch[name] = _sample_field(self._window.samples[name][pieces])
        return batch, rank_loss_tokens

    def _of_stage(self, names: Iterable[str]) -> list[str]:
        return fields_of_stage(names, self._place, self._spec)

    def _slice(self, bounds: IntArray, width: int) -> npt.NDArray[np.int64]:
        """Where the tokens of this rank stand in the flat microbatch, whose segments have these bounds."""
        mode = self._spec.context_parallel
        if isinstance(self._rows, PaddedRows) or mode == "contiguous":
            num_rows = 1 if self._is_flat else self._size
            bounds = np.arange(num_rows + 1) * (self._size * width // num_rows)
        return slice_of(bounds, mode, self._place.cp, self._spec.num_context_ranks)

    @property
    def _is_flat(self) -> bool:
        return isinstance(self._rows, PackedRows) and self._rows.flatten

    def _segments_of(self, index: int) -> slice:
        rows = self._segment_rows
        return slice(int(rows[index * self._size]), int(rows[(index + 1) * self._size]))

    def _fill(self, name: str, index: int, padding: int | None = None, extra: int = 0) -> npt.NDArray[Any]:
        """Pad one field of the rows: [rows x width + extra, ...], the extra end being padding too."""
        values = self._window.tokens[name]
        if padding is None:
            padding = self._rows.pad_id if name == "input_ids" else 0
        width, size = int(self._widths[index]), self._size
        target = np.empty((size * width + extra, *values.shape[1:]), _tensor_dtype(values.dtype))
        slots = slice(int(self._slots[index * size]), int(self._slots[(index + 1) * size]))
        ends = np.cumsum(self._slot_lengths[slots]).tolist()
        at = 0
        for (start, stop), end in zip(pairwise(self._filled[slots.start : slots.stop + 1]), ends, strict=True):
            filled = at + stop - start
            target[at:filled] = values[start:stop]
            target[filled:end] = padding
            at = end
        target[size * width :] = padding
        return target

    def _labels(self, fields: dict[str, npt.NDArray[Any]], index: int, starts: IntArray) -> npt.NDArray[Any]:
        """Make the flat labels of a microbatch.

        Shifted ones are the same array seen from its second entry: a piece's first label, which is never a target, then
        stands at the last token of the piece before.
        """
        shift = int(self._rows.shift_labels)
        source = "labels" if "labels" in fields else "input_ids"
        labels = self._fill(source, index, padding=IGNORED_LABEL, extra=shift)
        labels[starts] = IGNORED_LABEL
        if "loss_mask" in fields:
            labels[: len(labels) - shift][fields["loss_mask"] == 0] = IGNORED_LABEL
        return labels[shift:]

    def _attention_mask(self, index: int, width: int) -> npt.NDArray[np.int64]:
        """1 on tokens; a filler row keeps its first position, as attention over nothing is not a number."""
        bounds = np.asarray(self._row_bounds[index * self._size : (index + 1) * self._size + 1])
        seen = np.maximum(np.diff(bounds), 1)
        return (self._arange[:width] < seen[:, None]).astype(np.int64).ravel()

    def _shaped(self, values: npt.NDArray[Any]) -> torch.Tensor:
        num_rows = 1 if self._is_flat else self._size
        return torch.from_numpy(values.reshape(num_rows, len(values) // num_rows, *values.shape[1:]))


def _widths(rows: PackedRows | PaddedRows, row_room: IntArray, multiple: int) -> npt.NDArray[np.int64]:
    """Width of each microbatch, a multiple of so much, by what its rows hold: [microbatches, rows a microbatch]."""
    multiple = math.lcm(multiple, rows.pad_to_multiple_of or 1)
    needed = np.full(len(row_room), rows.seq_len) if isinstance(rows, PackedRows) else row_room.max(axis=1, initial=1)
    widths: npt.NDArray[np.int64] = -(-needed // multiple) * multiple
    return widths


def _segments(row_offsets: IntArray, tails: IntArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Give where the segments of each row begin, int64 [rows + 1], and which are tails: a row's padding is its last."""
    if (tails < 0).any():
        raise StreamError(f"row {int(np.argmin(tails))} of a window is {-int(tails.min())} tokens longer than rows are")
    has_tail = tails > 0
    row_bounds = running_sum(np.diff(row_offsets) + has_tail)
    is_tail = np.zeros(row_bounds[-1], np.bool_)
    is_tail[row_bounds[1:][has_tail] - 1] = True
    return row_bounds, is_tail


def _interleaved(lengths: IntArray, tails: IntArray, is_tail: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Lengths of all segments, from those of the pieces and of the rows' tails."""
    segments = np.empty(len(is_tail), np.int64)
    segments[is_tail] = tails[tails > 0]
    segments[~is_tail] = lengths
    return segments


def _sequence_bounds(bounds: IntArray, unpadded: IntArray | None, longest: int) -> dict[str, Any]:
    """Sequence bounds under the names that transformers' variable-length attention takes."""
    found: dict[str, Any] = {}
    for name in ("q", "k"):
        found[f"cu_seq_lens_{name}"] = torch.from_numpy(bounds.astype(np.int32))
        if unpadded is not None:
            found[f"cu_seq_lens_{name}_unpadded"] = torch.from_numpy(unpadded.astype(np.int32))
        found[f"max_length_{name}"] = longest
    return found


def _sample_field(values: npt.NDArray[Any]) -> torch.Tensor | list[Any]:
    """Give a tensor if the values are numbers of one shape, else the list of them, arrays among them as tensors.

    It looks at the values alone, not at how the window holds them: that depends on what else is in the window.
    """
    if values.dtype == np.object_:
        items = [_numbers(item) for item in values]
        found = [item for item in items if item is not None]
        if not found or len(found) < len(items) or len({item.shape for item in found}) > 1:
            return [_listed(item) for item in values]
        values = np.stack(found)
    return torch.from_numpy(_owned(values)) if values.dtype.kind in _NUMERIC else list(values)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(_owned(value)) if value.dtype.kind in _NUMERIC else value.copy()
    return value


def _numbers(value: Any) -> npt.NDArray[Any] | None:
    """Give a value as an array of numbers, or None if it is anything else."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.dtype.kind in _NUMERIC else None


def _owned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy numbers into what torch takes; bytes stay bytes, as they are mostly pixels."""
    return values.astype(values.dtype if values.dtype == np.uint8 else _tensor_dtype(values.dtype))


def _tensor_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Whole numbers become int64, whatever width they were stored in."""
    return np.dtype(np.int64) if dtype.kind in "iu" else dtype
