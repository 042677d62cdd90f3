"""`SampleLife`: what became of one sample, told from where the stream stands, after a resume as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megascale_lightning.client.info import BatchInfo
from megascale_lightning.loading.finding import Found, RecordFinder
from megascale_lightning.planning.blocks import Block
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import IntArray, LoaderState

__all__ = ["SampleLife", "life_of"]


class SampleLife(NamedTuple):
    """What became of a sample."""

    life: str
    """"ahead": not drawn yet. "carried": drawn, and waits for a row. "delivered": handed out, on this rank or another,
    in a step that is not consumed yet. "consumed". "dropped": left out, see `reason`. "passed", with
    `last_step="drop"`, once the stream or the pass is over: consumed, or left out with an incomplete last step, which
    the state does not tell apart; while the step before that is handed out and not consumed, it may also be in a
    microbatch of that step that this rank was not handed."""
    step: int = -1
    """Of a delivered sample, where it is known."""
    reason: str = ""
    """Why it was dropped."""


def life_of(
    sample_id: Sequence[int],
    source: int,
    finder: RecordFinder,
    spec: StreamSpec,
    state: LoaderState,
    handed: Iterable[BatchInfo],
) -> SampleLife:
    """Tell the life of a sample, or of a piece.

    Args:
        sample_id: (epoch, unit, row), or with (start, stop) behind.
        source: Its source in the stream.
        finder: Of the source.
        spec: The stream.
        state: Where it stands: the consumed state.
        handed: Of microbatches handed out since.

    Raises:
        ConfigError: There is no such record.
        DataError: The part that it is in cannot be read.
    """
    epoch, unit, row, *piece = sample_id
    later, handed = {state.step: state}, list(handed)
    for info in handed:
        later |= {known.step: known for known in (info._before, info._after) if known.step > state.step}
    states = [later[step] for step in sorted(later)]
    window = finder.window(epoch, unit)
    reached = (int(states[-1].sources["epoch"][source]), int(states[-1].sources["window"][source]))
    if not spec.sources[source].together and (epoch, window) > reached:
        return SampleLife("ahead")
    found = finder.find(epoch, unit, row)
    sample = (source, epoch, unit, row, *piece[:1])
    carried = [_is_among(known.carry, sample) for known in states]
    drawn = [_is_drawn(spec, known, source, found) for known in states]
    given = [is_drawn and not waits for is_drawn, waits in zip(drawn, carried, strict=True)]
    if not drawn[-1]:
        return SampleLife("ahead")
    if found.reason:
        return SampleLife("dropped", reason=found.reason)
    if not any(given):
        return SampleLife("carried")
    at = given.index(True)
    after = states[at].step
    if spec.last_step == "drop" and (states[at].ended or states[at].passes > epoch):
        # The state behind a last step is that of the end, where what was left over for another step is gone, too.
        shown = at > 0 and any(info.step == after - 1 and _is_among(info._pieces, sample) for info in handed)
        return SampleLife("delivered", after - 1) if shown else SampleLife("passed")
    if at == 0:
        return SampleLife("consumed")
    return SampleLife("delivered", after - 1 if states[at - 1].step == after - 1 else -1)


def _is_drawn(spec: StreamSpec, state: LoaderState, source: int, found: Found) -> bool:
    """Whether the source has passed the record, or with a curriculum its level has."""
    part = found.meta.key.epoch, found.window, found.part
    is_passed = (*part, found.entry) < _place(state.sources[source])
    if not is_passed or state.levels is None or found.reason:
        return is_passed
    assert spec.curriculum is not None
    block = Block(found.meta)
    sample = int(np.searchsorted(block.first_entries, found.entry, "right")) - 1
    for samples, stands in zip(block.levels(spec.curriculum), state.levels[source], strict=True):
        at = int(np.searchsorted(samples, sample))
        if at < len(samples) and samples[at] == sample:
            return (*part, at) < _place(stands)
    return is_passed


def _place(stands: np.void) -> tuple[int, ...]:
    return tuple(int(stands[name]) for name in ("epoch", "window", "part", "offset"))


def _is_among(pieces: IntArray, sample: Sequence[int]) -> bool:
    """Whether a sample, or a piece of one, is among PIECE [n]: source, epoch, unit and row, and start of a piece."""
    names = ("source", "epoch", "unit", "row", "start")
    return bool(np.all([pieces[name] == at for name, at in zip(names, sample, strict=False)], axis=0).any())
