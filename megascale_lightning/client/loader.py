"""`MegaScaleLoader`: the loader without a framework: iterate it, save its state, load it."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megascale_lightning.client.broadcasting import open_reader
from megascale_lightning.client.changes import PendingChanges, cost_change, first_step, merged_weights
from megascale_lightning.client.collating import check_collate_fn, collate
from megascale_lightning.client.finish import finish
from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.iterating import Microbatches
from megascale_lightning.client.lives import SampleLife
from megascale_lightning.client.pinning import pin_finished
from megascale_lightning.client.reader import Reader
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.errors import StreamError
from megascale_lightning.loading.showing import ShownSample
from megascale_lightning.rows import CollatedRows, Rows
from megascale_lightning.types import BatchWindow, Change, LoaderState, MixtureChange, StepReport

if TYPE_CHECKING:
    from megascale_lightning.checkpointing.filelists import FileLists
    from megascale_lightning.config import LoaderConfig
    from megascale_lightning.places.tree import ClientPlaceTree, Place
    from megascale_lightning.planning.calibration import CalibratedCost
    from megascale_lightning.streams import StreamSpec

__all__ = ["MegaScaleLoader"]

_REPORTS = 1000
_HANDED = 64


class MegaScaleLoader:
    """The microbatches of one place in one stream, and the state of what was consumed.

    Iterating goes on behind the last consumed step; `iter()` itself moves nothing, the first `next()` opens the stream.
    The training stream is one sequence over all iterators, each of which, in passes, ends with the pass that it begins
    in; evaluation streams start from the beginning each time.

    A step is consumed once its last microbatch was handed out, or, with `auto_consume=False`, once `mark_consumed` says
    so. Loaders of one config in one process share one runtime. Not thread-safe.

    Args:
        config: The settings.
        tree: Places of all ranks; one data-parallel rank when None.
        rank: The place of this loader in the tree.
        stream: "train", or "val/0", "val/1", ... for the config's `val_sources`.
        accumulate: Microbatches per optimizer step, as the trainer has it; None: by `global_batch_size`.
        passes: Go in passes: an iterator of the training stream ends when every source was given once.
        session: For integrations: the session to join.
        steps_per_epoch: Steps of one trainer epoch; None: as the config says.
        auto_consume: Whether handing out the last microbatch of a step consumes it.
        interrupted: Asked while waiting for a batch; True ends the wait with `InterruptedError`.
    """

    def __init__(
        self,
        config: LoaderConfig,
        tree: ClientPlaceTree | None = None,
        rank: int = 0,
        stream: str = "train",
        *,
        accumulate: int | None = None,
        passes: bool = False,
        session: LoadingSession | None = None,
        steps_per_epoch: int | None = None,
        auto_consume: bool = True,
        interrupted: Callable[[], bool] | None = None,
    ) -> None:
        self._session = session or LoadingSession.shared(config, tree=tree, accumulate=accumulate, passes=passes)
        self._reader: Reader | None = None
        self._readers: list[Reader] = []
        self._current: object = None
        self._handed: BatchInfo | None = None
        self.handed: deque[BatchInfo] = deque(maxlen=_HANDED)
        """Of the microbatches that the running iterator handed out, oldest first; whoever needs it takes from the left.
        A batch of `CollatedRows` has no room for it."""
        # A loader that is dropped without `close` must not hold other ranks back.
        weakref.finalize(self, _stop_all, self._readers).atexit = False
        self._owns = session is None
        self._closed = False
        try:
            self._spec = self._session.spec(stream)
            check_collate_fn(getattr(self._session.config.rows_of(stream), "collate_fn", None))
            self._place = self._session.tree.place(rank)
            self._peers = self._session.peers(rank)
        except BaseException:
            self.close()
            raise
        self._rank = rank
        self._steps_per_epoch = steps_per_epoch or (self._session.config.steps_per_epoch if stream == "train" else None)
        self._auto_consume = auto_consume
        self._interrupted = interrupted
        self._number = self._session.next_number(stream, rank)
        self._state = self._session.initial_state(stream)
        self._pending = PendingChanges()
        self._loads = 0
        self._opens = 0
        self.last_info: BatchInfo | None = None
        """Of the microbatch handed out last."""
        self.last_reports: deque[StepReport] = deque(maxlen=_REPORTS)
        """How even the last steps were, oldest first."""

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return self._spec.name

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step on this rank; a last step of `CollatedRows` may have fewer."""
        return self._spec.num_microbatches

    @property
    def step(self) -> int:
        """Steps consumed."""
        return self._state.step

    @property
    def certificate(self) -> str:
        """Hex of the running hash over all rows consumed: equal for equal data (law 1)."""
        return self._state.certificate.hex()

    def __len__(self) -> int:
        """Microbatches of one epoch: exact, and the same on all ranks.

        Raises:
            TypeError: The loader is unsized: `steps_per_epoch` is not set, and it goes in no passes whose length is
                known before the data are read.
        """
        if self._steps_per_epoch is not None:
            return self._steps_per_epoch * self.num_microbatches
        goes_in_passes = self._spec.passes or self.stream != "train"
        batches = self._session.pass_batches(self.stream) if goes_in_passes else None
        if batches is None:
            raise TypeError("this MegaScaleLoader is unsized: set steps_per_epoch for a length")
        return batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """An iterator that starts behind the last consumed step. It opens the stream at its first `next()`."""
        if self._closed:
            raise StreamError("this loader is closed")
        return Microbatches(self._next, self._at_epoch_end)

    def state_dict(self) -> dict[str, Any]:
        """The state behind the last consumed step, as plain JSON; no collective, no call elsewhere; re-entrant."""
        return self._session.state_to_json(self.stream, self._position())

    def load_state_dict(
        self, state: Mapping[str, Any], *, lists: FileLists | None = None, copied: Collection[str] = ()
    ) -> None:
        """Go on behind the step that the state was saved at, at the next `iter()`.

        Args:
            state: What `state_dict()` gave, here or in another run.
            lists: The file lists that it was saved with, where the error is to say which files changed.
            copied: Sources whose files were only copied since.

        Raises:
            StateError: The state is of another version, of other data or of other settings.
        """
        self._state = self._session.state_from_json(self.stream, state, lists, copied)
        self._pending.clear()
        self._loads += 1
        self._leave()

    def leave(self) -> None:
        """Stop reading, and wait for it; the next iterator opens the stream again. For integrations."""
        self._leave()
        for reader in self._readers:
            reader.close()

    def move_to(self, session: LoadingSession) -> None:
        """Read from another session of the same streams from now on, from the beginning. For integrations."""
        self.leave()
        self._session, self._spec = session, session.spec(self.stream)
        self._peers = session.peers(self._rank)
        self._number = session.next_number(self.stream, self._rank)
        self._state = session.initial_state(self.stream)

    def mark_consumed(self, info: BatchInfo) -> None:
        """The optimizer step of this microbatch, if it is the last of its step, was taken. For `auto_consume=False`.

        Raises:
            StreamError: It is not of the step that follows what was consumed.
        """
        self._check_next(info)
        if info.is_last_in_step:
            self._state = info._after
            self._pending.passed(self._state.step)
            if self._reader is not None:
                self._reader.consumed(self._position())

    def set_mixture(self, weights: Mapping[str, float], at_step: int | None = None) -> int | None:
        """Draw with other weights from a step on. Acts on rank 0; on the others it does nothing.

        The change is in the state from now on, and takes effect at its step whatever happens in between. From that
        step on it also takes the place of a schedule of the mixture, to the end or the next change.

        Args:
            weights: By source name, not normalised; a source that is not named keeps what it would have at that step.
            at_step: The first step whose draws they govern; None: `mixture_lead_steps` after the consumed ones.

        Returns:
            That step; None on other ranks.

        Raises:
            ConfigError: A weight is none, a source is unknown, or the step is too near to be planned with them.
            StreamError: This is no training stream.
        """
        return self._change(
            "set_mixture",
            at_step,
            lambda step: MixtureChange(step, merged_weights(self._spec, weights, self._position(), step)),
        )

    def set_cost(self, *costs: CalibratedCost, at_step: int | None = None) -> int | None:
        """Place rows by measured costs from a step on. Acts on rank 0; on the others it does nothing.

        As with `set_mixture`, the change is in the state from now on, and takes effect at its step, to the end or the
        next change. Samples and rows stay as they are.

        Args:
            costs: One for each that the strategy declares, in its order; none: those that it declares, again.
            at_step: The first step whose places they govern; None: `mixture_lead_steps` after the consumed ones.

        Returns:
            That step; None on other ranks.

        Raises:
            ConfigError: They do not fit the strategy, or the step is too near to be planned with them.
            StreamError: This is no training stream.
        """
        return self._change("set_cost", at_step, lambda step: cost_change(self._spec, costs, step))

    def sample(self, sample_id: Sequence[Any], stream: str | None = None) -> ShownSample:
        """One sample by its id, read and transformed in this process as in the run: for a look at it, or a debugger.

        Args:
            sample_id: `(source, epoch, unit, row)`, or a piece with `start, stop` behind, as an error or
                `BatchInfo.sample_ids()` names it.
            stream: Name of the stream; None: of this loader.

        Returns:
            `.raw`, the record as read; `.transformed`, what the transform gives for it with the random numbers of the
            run, or the error that it raises; `.where` for people.

        Raises:
            ConfigError: There is no such stream, source, unit or row.
            DataError: The unit cannot be read.
        """
        return self._session.sample(stream or self.stream, sample_id)

    def lineage(self, sample_id: Sequence[Any]) -> SampleLife:
        """What became of a sample, told from the state: after a resume as before it.

        It reads and transforms the part that the sample is in, in this process, unless the stream is far from there.

        Args:
            sample_id: As `sample` takes it; with `start, stop` behind, that of the piece.

        Raises:
            ConfigError: There is no such source, unit or row.
            DataError: The part that it is in cannot be read.
        """
        handed = [*self.handed, *([] if self._handed is None else [self._handed])]
        return self._session.lineage(self.stream, sample_id, self._state, handed)

    def close(self) -> None:
        """Leave the stream; with the last loader of its config the runtime ends. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        for reader in self._readers:
            reader.close()
        if self._owns:
            self._session.leave()

    def __enter__(self) -> MegaScaleLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _position(self) -> LoaderState:
        """The consumed state, with the changes that the planner may not have put in it yet."""
        return self._pending.into(self._state)

    def _change(self, method: str, at_step: int | None, make: Callable[[int], Change]) -> int | None:
        if self.stream != "train":
            raise StreamError(f"{method} changes the training stream, this is {self.stream!r}")
        if self._rank != 0:
            return None
        step = first_step(method, at_step, self._state, self._spec)
        self._pending.add(make(step))
        state = self._position()
        if self._reader is not None:
            self._reader.consumed(state)
            self._reader.set_changes(state.changes)
        return step

    def _open(self, iterator: object) -> Reader:
        """Read for an iterator from now on; an older one of this loader ends."""
        if self._reader is None or not self._goes_on():
            self._reopen()
        self._current = iterator
        assert self._reader is not None
        return self._reader

    def _goes_on(self) -> bool:
        """Whether the next microbatch of the running reader is the first behind what was consumed."""
        if self.stream != "train" or self._reader is None or self._reader.failed:
            return False
        last = self._handed
        return (
            last is not None and last.is_last_in_step and not last.is_last_in_pass and last.step + 1 == self._state.step
        )

    def _reopen(self) -> None:
        if self.stream != "train":
            self._state = self._session.initial_state(self.stream)
        self._opens += 1
        rows = self._session.config.rows_of(self.stream)
        opening = repr(
            (self.stream, self._number, self._state.step, self.certificate, self._loads, self._opens)
        ).encode()
        reader = open_reader(
            self._session.port,
            pin_finished(partial(_finish, self._spec, rows, self._place, self.last_reports)),
            peers=self._peers,
            opening=opening,
            inline=self._session.reads_inline,
            stream=self.stream,
            # The same on all ranks, another for every open.
            generation=hashlib.blake2b(self._session.run.encode() + opening, digest_size=8).hexdigest(),
            group=self._place.dp,
            client=self._rank,
            state=self._position(),
            depth=min(max(self._spec.num_microbatches, 2), 16),
            stall_timeout=self._session.stall_timeout,
        )
        # The old generation is left only now, so that what both need stays in memory.
        self._leave()
        self._reader = reader
        self._readers.append(reader)

    def _next(self, iterator: object, reader: Reader | None) -> tuple[dict[str, Any], Reader]:
        if reader is None:
            reader = self._open(iterator)
        elif self._current is not iterator:
            raise StreamError("this iterator ended when a newer one of the same loader, or load_state_dict, took over")
        item = reader.next(self._interrupted)
        if item is None:
            raise StopIteration
        batch, info = item
        self.last_info = self._handed = info
        self.handed.append(info)
        if self._auto_consume:
            self.mark_consumed(info)
        return batch, reader

    def _at_epoch_end(self) -> bool:
        steps = self._steps_per_epoch
        if not self._auto_consume or steps is None or (self.last_info and not self.last_info.is_last_in_step):
            return False
        return self._state.step % steps == 0

    def _check_next(self, info: BatchInfo) -> None:
        if info.step != self._state.step:
            raise StreamError(
                f"stream {self.stream!r}: a microbatch of step {info.step} was consumed, but step {self._state.step} "
                "comes next: a batch was lost or used twice between the loader and the training step"
            )

    def _leave(self) -> None:
        """Stop the running reader, if there is one; it is waited for at `close`."""
        self._current = self._handed = None
        self.handed.clear()
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._readers[:] = [reader for reader in self._readers if not reader.ended]


def _finish(
    spec: StreamSpec, rows: Rows, place: Place, reports: deque[StepReport], window: BatchWindow, first_step: int
) -> Iterator[tuple[Any, BatchInfo]]:
    for report in window.reports:
        if report.step >= first_step:
            # Of its own: a view of an array of the window would keep all of it in memory.
            costs = {name: getattr(report, name).copy() for name in ("group_costs", "group_costs_before")}
            reports.append(replace(report, **costs))
    if isinstance(rows, CollatedRows):
        return collate(window, spec, rows.collate_fn, first_step=first_step)
    return finish(window, spec, place, first_step=first_step)


def _stop_all(readers: list[Reader]) -> None:
    for reader in readers:
        reader.stop()
