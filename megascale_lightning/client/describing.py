"""`WindowInfos`: the `BatchInfo` of each microbatch of a window, the same for all kinds of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.errors import StreamError
from megascale_lightning.rows import CollatedRows
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import BatchWindow, IntArray, LoaderState, MixtureChange

__all__ = ["WindowInfos", "running_sum"]


class WindowInfos:
    """What the microbatches of a window say about themselves; it holds on to the window, its infos do not.

    Raises:
        StreamError: The window does not fit the rows of the stream.
    """

    def __init__(self, window: BatchWindow, spec: StreamSpec) -> None:
        size = spec.rows.micro_batch_size
        expected = window.num_steps * window.num_microbatches * size
        if len(window.row_offsets) - 1 != expected:
            raise StreamError(
                f"a window of {window.num_steps} steps x {window.num_microbatches} microbatches x {size} rows needs "
                f"{expected} rows, not {len(window.row_offsets) - 1}; it was made for another micro_batch_size"
            )
        self._window, self._size = window, size
        self._num_groups, self._num_context_ranks = spec.num_groups, spec.num_context_ranks
        self._used = np.full(window.num_steps, window.num_microbatches)
        if isinstance(spec.rows, CollatedRows):
            # A row is a sample, and a target. Microbatches without one on any rank are left out: they are the last.
            self._used = np.clip(-(-window.step_loss_tokens // (size * spec.num_groups)), 1, window.num_microbatches)
        self._source_names = tuple(source.name for source in spec.sources)
        self._loss_bounds = running_sum(window.pieces["loss_tokens"])
        self._states = [_own(state) for state in window.states]

    def indices(self, first_step: int | None = None) -> Iterator[int]:
        """Microbatches of the window from a step on, counted from its start; None: all of them."""
        window = self._window
        skipped = 0 if first_step is None else first_step - window.first_step
        for step in range(skipped, window.num_steps):
            first = step * window.num_microbatches
            yield from range(first, first + int(self._used[step]))

    def pieces_of(self, index: int) -> slice:
        """Where the pieces of a microbatch stand in the window."""
        offsets = self._window.row_offsets
        return slice(int(offsets[index * self._size]), int(offsets[(index + 1) * self._size]))

    def info(self, index: int, rank_loss_tokens: int | None = None) -> BatchInfo:
        """Describe microbatch `index` of the window, of whose targets a rank has so many; None: all."""
        return self._info(index, self._row_offsets(index), rank_loss_tokens)

    def short_info(self, index: int) -> tuple[BatchInfo, npt.NDArray[np.int64]]:
        """Describe microbatch `index` without its filler, unless it is all filler; and say which rows that leaves.

        Returns:
            The description, and int64 [rows described]: their numbers in the microbatch.
        """
        row_offsets = self._row_offsets(index)
        rows = np.flatnonzero(np.diff(row_offsets))
        if not len(rows):
            return self._info(index, row_offsets), np.arange(self._size)
        return self._info(index, row_offsets[np.append(rows, self._size)]), rows

    def _row_offsets(self, index: int) -> npt.NDArray[np.int64]:
        return self._window.row_offsets[index * self._size : (index + 1) * self._size + 1]

    def _info(self, index: int, row_offsets: npt.NDArray[np.int64], rank_loss_tokens: int | None = None) -> BatchInfo:
        window, states = self._window, self._states
        step, microbatch = divmod(index, window.num_microbatches)
        pieces = self.pieces_of(index)
        is_last_in_step = microbatch == self._used[step] - 1
        return BatchInfo(
            step=window.first_step + step,
            microbatch=microbatch,
            rank_loss_tokens=rank_loss_tokens,
            num_loss_tokens=int(self._loss_bounds[pieces.stop] - self._loss_bounds[pieces.start]),
            step_loss_tokens=int(window.step_loss_tokens[step]),
            num_groups=self._num_groups,
            num_context_ranks=self._num_context_ranks,
            num_microbatches=window.num_microbatches,
            row_weights=(np.diff(row_offsets) > 0).astype(np.float32),
            is_last_in_step=is_last_in_step,
            is_last_in_stream=is_last_in_step and states[step + 1].ended,
            is_last_in_pass=is_last_in_step and states[step + 1].passes > states[step].passes,
            pieces=window.pieces[pieces].copy(),
            row_offsets=row_offsets - row_offsets[0],
            source_names=self._source_names,
            before=states[step],
            after=states[step + 1],
        )


def running_sum(lengths: IntArray) -> npt.NDArray[np.int64]:
    """int64 [n + 1], from 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _own(state: LoaderState) -> LoaderState:
    """Copy the arrays of a state, which outlives the window."""
    changes = tuple(
        replace(change, weights=change.weights.copy()) if isinstance(change, MixtureChange) else change
        for change in state.changes
    )
    levels = None if state.levels is None else state.levels.copy()
    return replace(state, sources=state.sources.copy(), carry=state.carry.copy(), changes=changes, levels=levels)
