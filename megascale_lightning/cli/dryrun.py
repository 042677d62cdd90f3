"""`DryRun`: a stream planned step by step from what its sources hold; no trainer, no batch, and nothing is written."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megascale_lightning.client.resolving import read_manifests, resolve_streams, runtime_plan, survey
from megascale_lightning.config import EVAL_KINDS, LoaderConfig
from megascale_lightning.errors import ConfigError, RuntimeFailure
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.types import Call, FloatArray, IntArray, LoaderState, MetaBlock, PlanWindow, StepPlan

__all__ = ["DryRun", "PlannedStep", "SourceRecords"]

_CLIENT: Final = 0
_NOT_PASSED: Final = ("truncated", "stopped")
"""Reasons of records that are given, or were never read."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, and how it came about."""

    plan: StepPlan
    target: FloatArray
    """float64 [sources]: the shares that the mixture wants of its draws, summing to 1."""
    after: LoaderState
    seconds: float
    """What the planner took for it, reading apart."""


class DryRun:
    """Plans a stream as a run from its beginning would. Close it, or use it as a context manager.

    Every part is read once, and of what was read only the metadata is kept. Bad records are listed nowhere, and no
    cache is filled.

    Args:
        config: The settings of the run.
        tree: Places of its ranks.
        stream: Name of the stream.
        accumulate: Microbatches of a training step on each rank; None: by `global_batch_size`.
        passes: Go in passes over the training sources.

    Raises:
        ConfigError: There is no such stream, or the settings do not fit each other, the places or the files.
    """

    def __init__(
        self,
        config: LoaderConfig,
        tree: ClientPlaceTree,
        stream: str = "train",
        *,
        accumulate: int | None = None,
        passes: bool = False,
    ) -> None:
        _check(config, stream, accumulate=accumulate, passes=passes)
        config = _inert(config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manifests = read_manifests(config, [stream])
            surveyed = survey(config, manifests)
            specs = resolve_streams(config, tree, surveyed, accumulate, passes=passes)
            plan = runtime_plan(config, specs, manifests, run="plan")
        self.spec = specs[stream]
        self.notes = tuple(str(warning.message) for warning in caught)
        """What a run would warn of."""
        counts = surveyed.records[stream]
        self.records = tuple(SourceRecords(source.num_windows, counts[source.name]) for source in self.spec.sources)
        """How far each source is gone through."""
        self._in_rows = np.zeros(len(self.records), np.int64)
        """Records of each source that were given."""
        self.state: LoaderState | None = None
        """Where the stream stands behind the last step; None before the first."""
        self._loaders: dict[str, Any] = {recipe.name: recipe.build() for recipe in plan.loaders}
        self._planner: Any = plan.planner.build()
        self._to_read: deque[Call] = deque()

    def steps(self, count: int) -> Iterator[PlannedStep]:
        """Plan so many steps from the beginning, fewer where the stream ends. To be called once.

        Raises:
            DataError: A record, a file or a transform is at fault as in a run, or the stream has no step at all.
        """
        name, step, generation = self.spec.name, 0, "pass 0"
        self._planner.open(name, generation, _CLIENT, None)
        while step < count and not self.ended:
            window, seconds = self._plan(generation, step)
            before, after = window.states[0], window.states[-1]
            self._move_to(after, window.steps)
            if window.steps:
                weights = self.spec.weights_at(step, before, {})
                yield PlannedStep(window.steps[0], weights / (weights.sum() or 1.0), after, seconds)
                self._planner.consumed(name, generation, {_CLIENT: step})
                step += 1
            if after.passes > before.passes and step < count:
                # What both need stays in memory if the next is opened first.
                done, generation = generation, f"pass {after.passes}"
                self._planner.open(name, generation, _CLIENT, after)
                self._planner.close(name, done, _CLIENT)
            elif not window.steps and not after.ended:
                raise RuntimeFailure(f"stream {name!r}: the planner gave neither step {step} nor an end")

    @property
    def ended(self) -> bool:
        """The stream has no further step."""
        return self.state is not None and self.state.ended

    def close(self) -> None:
        """Let go of files, and end the threads and processes of `Source.executor`."""
        for loader in self._loaders.values():
            loader.shutdown()

    def __enter__(self) -> DryRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _move_to(self, state: LoaderState, steps: Iterable[StepPlan]) -> None:
        self.state = state
        for plan in steps:
            self._in_rows += self._begun(plan.pieces)
        drawn = self._in_rows + self._begun(state.carry)
        done = [
            count + sum(left for reason, left in dropped.items() if reason not in _NOT_PASSED)
            for count, dropped in zip(drawn.tolist(), state.dropped, strict=True)
        ]
        waiting = (state.waiting > 0).tolist()
        for records, place, is_behind, count in zip(self.records, state.sources, waiting, done, strict=True):
            records.move_to(place, count if is_behind else None)

    def _begun(self, pieces: IntArray) -> IntArray:
        """int64 [sources]: the records of each whose first piece is among these."""
        return np.bincount(pieces["source"][pieces["start"] == 0], minlength=len(self.records))

    def _plan(self, generation: str, step: int) -> tuple[PlanWindow, float]:
        """The window of one step, or of none behind the end; and the seconds that the planner took for it."""
        seconds = 0.0
        while True:
            begin = time.perf_counter()
            found = self._planner.plan(self.spec.name, generation, step, 1)
            seconds += time.perf_counter() - begin
            self._collect()
            if isinstance(found, PlanWindow):
                return found, seconds
            if not self._to_read:
                raise RuntimeFailure(f"the planner waits for what nobody reads: {found.reason}")
            self._read()

    def _collect(self) -> None:
        """Note what is to be read, for when the planner cannot go on without; let go of the rest at once."""
        for call in self._planner.wants():
            if call.method == "describe":
                self._to_read.append(call)
            else:
                getattr(self._loaders[call.target], call.method)(*call.args)

    def _read(self) -> None:
        while self._to_read:
            call = self._to_read.popleft()
            result: Any
            try:
                result = getattr(self._loaders[call.target], call.method)(*call.args)
            except Exception as error:
                result = error  # the planner raises it where the part is needed
            if isinstance(result, MetaBlock):
                self.records[result.key.source].described(result)
            self._planner.answered(call, result)


class SourceRecords:
    """How far a source is gone through, in records as far as their number is known.

    Args:
        num_windows: Of one epoch.
        num_records: Of one epoch; -1 where it is found by reading.
    """

    def __init__(self, num_windows: int, num_records: int) -> None:
        self.num_records = num_records
        """Of one epoch; -1: not known yet."""
        self._num_windows = num_windows
        self._parts: dict[tuple[int, int, int], npt.NDArray[np.bool_]] = {}
        self._found: dict[int, int] = {}
        self._whole: dict[int, int] = {}
        self._read: set[tuple[int, int, int]] = set()
        self._place = (0, 0, 0)
        self._passed = 0
        self._offset = 0
        self._done: int | None = None

    def described(self, meta: MetaBlock) -> None:
        """A part was read; a curriculum may have it read again."""
        epoch = meta.key.epoch
        place = (epoch, meta.key.window, meta.key.part)
        if place in self._read:
            return
        self._read.add(place)
        self._parts[place] = meta.first
        self._found[epoch] = self._found.get(epoch, 0) + int(meta.first.sum())
        self._whole[epoch] = self._whole.get(epoch, 0) + meta.last_in_window
        if self._whole[epoch] == self._num_windows:
            self.num_records = self._found[epoch]

    def move_to(self, place: np.void, done: int | None) -> None:
        """The stream stands there now, SOURCE_STATE.

        Args:
            place: Where.
            done: Records drawn or left out so far, where a curriculum has passed over others; None: all before `place`.
        """
        self._done = done
        at = (int(place["epoch"]), int(place["window"]), int(place["part"]))
        if at[0] > self._place[0]:
            self._passed = 0
        self._place, self._offset = at, int(place["offset"])
        for key in sorted(key for key in self._parts if key < at):
            first = self._parts.pop(key)
            self._passed += int(first.sum()) if key[0] == at[0] else 0

    @property
    def epoch(self) -> int:
        """Whole epochs that are done."""
        return self._place[0]

    @property
    def epochs(self) -> float:
        """Epochs that are done with the part of the running one; at least so many where `is_exact` is False.

        What a curriculum has passed over is not done; where records are not known, windows that were opened count.
        """
        if self.is_exact and self._done is not None:
            return self._done / max(self.num_records, 1)
        if self.is_exact:
            begun = self._parts.get(self._place)
            passed = self._passed + (0 if begun is None else int(begun[: self._offset].sum()))
            return self.epoch + passed / max(self.num_records, 1)
        return self.epoch + self._place[1] / max(self._num_windows, 1)

    @property
    def is_exact(self) -> bool:
        """Whether `epochs` counts records; else whole windows."""
        return self.num_records >= 0


def _check(config: LoaderConfig, stream: str, *, accumulate: int | None, passes: bool) -> None:
    streams = config.streams()
    if stream not in streams:
        raise ConfigError(f"there is no stream {stream!r} to plan: the config has sources for {', '.join(streams)}")
    if stream != "train":
        if passes or accumulate is not None:
            raise ConfigError(f"passes and accumulation are of the training stream, not of {stream!r}")
        return
    finite = [source.name for source in config.drawn("train") if source.epochs is not None]
    if passes and finite:
        raise ConfigError(
            f"in passes each pass gives every source once, and sources {finite} have epochs=: leave them out"
        )


def _inert(config: LoaderConfig) -> LoaderConfig:
    """The same order of samples, without what a run would write or hold for its trainer."""
    kinds = {f"{kind}_sources": _unlisted(getattr(config, f"{kind}_sources")) for kind in EVAL_KINDS}
    return replace(
        config,
        sources=_unlisted(config.sources),
        **kinds,
        runtime="local",
        num_loaders=1,
        loader_buffer_bytes=1,  # the newest part is held in any case
        cache_dir=None,
    )


def _unlisted(sources: Any) -> Any:
    """Sources whose bad records are dropped as in a run, and written down nowhere."""
    if isinstance(sources, Mapping):
        return {name: _unlisted(given) for name, given in sources.items()}
    return tuple(replace(source, on_error="skip") if source.on_error == "quarantine" else source for source in sources)
