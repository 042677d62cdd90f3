"""The last step on the rank: rows without padding become the tensors of a microbatch.

It runs in the rank's read-ahead thread, so it works at one slice copy per row and field, and on whole arrays otherwise.
All tensors are the batch's own: none holds on to the window, which may lie in memory shared with other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from megascale_lightning.client.describing import WindowInfos, running_sum
from megascale_lightning.client.info import INFO_KEY, BatchInfo
from megascale_lightning.errors import StreamError
from megascale_lightning.rows import PackedRows, PaddedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import IGNORED_LABEL, BatchWindow, IntArray

__all__ = ["finish"]

_NUMERIC: Final = "biuf"


def finish(
    window: BatchWindow, spec: StreamSpec, *, first_step: int | None = None
) -> Iterator[tuple[dict[str, Any], BatchInfo]]:
    """Give the microbatches of a window one after another, each made when it is asked for.

    Packed rows, with `m` rows in a microbatch: `input_ids`, `labels`, `position_ids`: int64 [m, width], or
    [1, m x width] with `flatten`. Positions start at 0 in each piece; the padding behind the last piece of a row is a
    segment of its own. `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [segments + 1], over the flattened microbatch, from 0 to
    m x width. `max_length_q`, `max_length_k`: int.

    Padded rows: `input_ids`, `attention_mask`, `labels`, `position_ids`: int64 [m, longest row, rounded up].

    Both: the declared fields, per-token ones padded with 0, per-sample ones [pieces of the microbatch, ...], or a list
    where they are not numbers of one shape. Whole numbers are int64 (per sample, uint8 stays).

    Args:
        window: Batches of one data-parallel group.
        spec: The stream.
        first_step: Step to begin with, where it lies inside the window; None begins at its start.

    Returns:
        Per microbatch the batch, and its `BatchInfo`, which the batch also holds under "megascale".

    Raises:
        StreamError: The window does not fit the rows of the stream.
    """
    infos = WindowInfos(window, spec)
    layout = _Layout(window, spec, infos)
    for index in infos.indices(first_step):
        batch = layout.tensors(index)
        batch[INFO_KEY] = info = infos.info(index)
        yield batch, info


class _Layout:
    """Where everything of a window goes; worked out once, for all its microbatches."""

    def __init__(self, window: BatchWindow, spec: StreamSpec, infos: WindowInfos) -> None:
        rows, size = spec.rows, spec.rows.micro_batch_size
        assert isinstance(rows, (PackedRows, PaddedRows))
        self._window, self._rows, self._size = window, rows, size
        self._pieces_of = infos.pieces_of
        lengths = window.pieces["length"].astype(np.int64)
        row_bounds = running_sum(lengths)[window.row_offsets]
        self._row_bounds: list[int] = row_bounds.tolist()
        self._widths = _widths(rows, np.diff(row_bounds).reshape(-1, size))
        self._segment_lengths, self._segment_rows = _segments(
            lengths, window.row_offsets, np.repeat(self._widths, size) - np.diff(row_bounds)
        )
        self._segment_bounds = running_sum(self._segment_lengths)
        self._arange = np.arange(size * int(self._widths.max(initial=0)))

    def tensors(self, index: int) -> dict[str, Any]:
        """Make the tensors of microbatch `index` of the window."""
        width, segments = int(self._widths[index]), self._segments_of(index)
        bounds = self._segment_bounds[segments.start : segments.stop + 1] - self._segment_bounds[segments.start]
        lengths, starts = self._segment_lengths[segments], bounds[:-1]
        fields = {name: self._fill(name, index) for name in ("input_ids", *self._rows.token_fields)}
        labels = self._labels(fields, index, starts)
        positions = self._arange[: self._size * width] - np.repeat(starts, lengths)
        made = {"input_ids": fields.pop("input_ids"), "labels": labels, "position_ids": positions}
        shown = made | fields | {"labels": labels}
        batch: dict[str, Any] = {name: self._shaped(values, width) for name, values in shown.items()}
        if isinstance(self._rows, PackedRows):
            batch |= _sequence_bounds(bounds, int(lengths.max()))
        else:
            batch["attention_mask"] = self._attention_mask(index, width)
        pieces = self._pieces_of(index)
        for name in self._rows.sample_fields:
            batch[name] = _sample_field(self._window.samples[name][pieces])
        return batch

    def _segments_of(self, index: int) -> slice:
        rows = self._segment_rows
        return slice(int(rows[index * self._size]), int(rows[(index + 1) * self._size]))

    def _fill(self, name: str, index: int, padding: int | None = None, extra: int = 0) -> npt.NDArray[Any]:
        """Pad the rows of one field: [rows x width + extra, ...], the extra end being padding too."""
        values = self._window.tokens[name]
        if padding is None:
            padding = self._rows.pad_id if name == "input_ids" else 0
        width, size = int(self._widths[index]), self._size
        target = np.empty((size * width + extra, *values.shape[1:]), _tensor_dtype(values.dtype))
        bounds = self._row_bounds[index * size : (index + 1) * size + 1]
        for row, (start, stop) in enumerate(pairwise(bounds)):
            at = row * width
            filled = at + stop - start
            target[at:filled] = values[start:stop]
            target[filled : at + width] = padding
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

    def _attention_mask(self, index: int, width: int) -> torch.Tensor:
        """1 on tokens; a filler row keeps its first position, as attention over nothing is not a number."""
        bounds = np.asarray(self._row_bounds[index * self._size : (index + 1) * self._size + 1])
        seen = np.maximum(np.diff(bounds), 1)
        return torch.from_numpy((self._arange[:width] < seen[:, None]).astype(np.int64))

    def _shaped(self, values: npt.NDArray[Any], width: int) -> torch.Tensor:
        is_flat = isinstance(self._rows, PackedRows) and self._rows.flatten
        shape = (1, self._size * width) if is_flat else (self._size, width)
        return torch.from_numpy(values.reshape(*shape, *values.shape[1:]))


def _widths(rows: PackedRows | PaddedRows, row_tokens: IntArray) -> npt.NDArray[np.int64]:
    """Width of each microbatch, from the tokens of its rows: [microbatches, rows a microbatch]."""
    if isinstance(rows, PackedRows):
        return np.full(len(row_tokens), rows.width, np.int64)
    multiple = rows.pad_to_multiple_of or 1
    widths: npt.NDArray[np.int64] = -(-row_tokens.max(axis=1, initial=1) // multiple) * multiple
    return widths


def _segments(
    lengths: IntArray, row_offsets: IntArray, tails: IntArray
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Give the lengths of all segments, a row's padding being its last one, and int64 [rows + 1] offsets of rows."""
    if (tails < 0).any():
        raise StreamError(f"row {int(np.argmin(tails))} of a window is {-int(tails.min())} tokens longer than rows are")
    has_tail = tails > 0
    row_bounds = running_sum(np.diff(row_offsets) + has_tail)
    segments = np.empty(row_bounds[-1], np.int64)
    is_tail = np.zeros(len(segments), np.bool_)
    is_tail[row_bounds[1:][has_tail] - 1] = True
    segments[is_tail] = tails[has_tail]
    segments[~is_tail] = lengths
    return segments, row_bounds


def _sequence_bounds(bounds: IntArray, longest: int) -> dict[str, Any]:
    """Sequence bounds under the names that transformers' variable-length attention takes."""
    return {
        "cu_seq_lens_q": torch.from_numpy(bounds.astype(np.int32)),
        "cu_seq_lens_k": torch.from_numpy(bounds.astype(np.int32)),
        "max_length_q": longest,
        "max_length_k": longest,
    }


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
