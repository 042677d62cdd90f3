"""`LoadingSession`: one config resolved against one trainer, and the runtime that serves it."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from megascale_lightning.checkpointing.filelists import (
    FileChanges,
    FileLists,
    compare_lists,
    list_names,
    lists_of,
    pack_lists,
)
from megascale_lightning.client.info import BatchInfo
from megascale_lightning.client.lives import SampleLife
from megascale_lightning.client.peers import PeerGroup, find_peers
from megascale_lightning.client.portable import check_portable_code
from megascale_lightning.client.resolving import (
    Manifests,
    Survey,
    check_quarantine,
    read_manifests,
    resolve_streams,
    runtime_plan,
    survey,
)
from megascale_lightning.client.samples import find_life, show_sample
from megascale_lightning.client.starting import RanksTogether, start_runtime
from megascale_lightning.client.states import SavedStates
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError
from megascale_lightning.loading.showing import ShownSample
from megascale_lightning.places.tree import ClientPlaceTree
from megascale_lightning.rows import CollatedRows
from megascale_lightning.runtime.port import BatchPort
from megascale_lightning.sources.functions import takes_rng
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.storage import FileInfo
from megascale_lightning.streams import StreamSpec, initial_state
from megascale_lightning.types import LoaderState

__all__ = ["LoadingSession"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STALL_TIMEOUT_S: Final = 1800.0


class LoadingSession:
    """Reads the file lists, settles the order, starts the roles, and serves the loaders of this process.

    Args:
        config: The settings.
        tree: Places of all ranks; one data-parallel rank when None.
        rank: Global rank of this process.
        accumulate: Microbatches per optimizer step as the trainer has it; None: by `global_batch_size`.
        broadcast: `broadcast(obj)` returns rank 0's object on every rank; None: this process is alone.
        kinds: Kinds of streams to serve ("train", "val", "test", "predict"); None: all that the config has.
        passes: The training stream goes in passes over its sources, see `StreamSpec.passes`.
        frozen: Files of training sources that go on with those they began with.
        mesh: The trainer's device mesh, whose process groups may carry batches (`broadcast_at`).

    Raises:
        ConfigError: The config does not fit the trainer, or its files are not there.
    """

    def __init__(
        self,
        config: LoaderConfig,
        *,
        tree: ClientPlaceTree | None = None,
        rank: int = 0,
        accumulate: int | None = None,
        broadcast: Callable[[Any], Any] | None = None,
        kinds: Collection[str] | None = None,
        passes: bool = False,
        frozen: FileLists | None = None,
        mesh: Any = None,
    ) -> None:
        check_portable_code(config)
        self.config = config
        self.tree = tree or ClientPlaceTree.from_sizes()
        self.stall_timeout = _STALL_TIMEOUT_S
        share = RanksTogether(rank, broadcast)
        streams = [name for name in config.streams() if kinds is None or name.split("/")[0] in kinds]
        self._manifests: Manifests = {}

        def look() -> Survey:
            check_quarantine(config, streams)
            self._manifests = read_manifests(config, streams, frozen)
            return survey(config, self._manifests)

        self._share = share
        surveyed = share(look)
        self.run: str = share(lambda: uuid.uuid4().hex[:12])
        self._specs = resolve_streams(config, self.tree, surveyed, accumulate, passes=passes)
        self._surveyed = surveyed
        # The same of all streams.
        self._peers = find_peers(self.tree, next((spec.broadcast for spec in self._specs.values()), ()), mesh)
        try:
            if config.runtime == "local":
                # Every rank runs the roles itself, and all must mean the same files.
                self._manifests = share(lambda: self._manifests)
            self._states = SavedStates(config, self._specs, surveyed.digests, self.run, self.file_lists())
            self._started = start_runtime(
                config, lambda: runtime_plan(config, self._specs, self._manifests, self.run), share
            )
        except BaseException:
            self._leave_peers()
            raise
        self._runtime = self._started.runtime
        self.port: BatchPort = self._runtime.port()
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._users = 0
        self._pid = os.getpid()
        self._key: _Key | None = None
        self._closed = False

    @classmethod
    def shared(
        cls,
        config: LoaderConfig,
        *,
        tree: ClientPlaceTree | None = None,
        accumulate: int | None = None,
        passes: bool = False,
    ) -> LoadingSession:
        """The session of a config in this process; each call is answered by one `leave`."""
        key = _Key(id(config), tree or ClientPlaceTree.from_sizes(), accumulate, passes, os.getpid())
        with _lock:
            session = _sessions.get(key)
            if session is None:
                session = cls(config, tree=tree, accumulate=accumulate, passes=passes)
                session._key = key
                _sessions[key] = session
            session._users += 1
            return session

    def leave(self) -> None:
        """A loader of a shared session is closed; with the last one the runtime ends."""
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._key is not None:
                _sessions.pop(self._key, None)
        self.close()

    def close(self, barrier: Callable[[], None] | None = None) -> None:
        """End what this process started, in the order of `Started.close`. A second call does nothing.

        Args:
            barrier: Meets all ranks; None where they cannot meet (an exception) or there is one only.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._leave_peers()
        finally:
            self._started.close(barrier)

    def _leave_peers(self) -> None:
        if self._peers is not None:
            self._peers.close()

    def spec(self, stream: str) -> StreamSpec:
        """The resolved stream. Raises: ConfigError: There is none of this name."""
        if stream not in self._specs:
            raise ConfigError(f"there is no stream {stream!r}; the config has {sorted(self._specs)}")
        return self._specs[stream]

    def pass_steps(self, stream: str) -> int | None:
        """Steps of one pass over the sources of a stream; None where it is not known before the data are read.

        It is known where every record gives one row: `CollatedRows`, nothing that could drop a sample, and a number of
        records that the files tell (datasets, Parquet).
        """
        spec, rows = self.spec(stream), self._pass_rows(stream)
        if rows is None:
            return None
        return rows // spec.rows_per_step if spec.last_step == "drop" else -(-rows // spec.rows_per_step)

    def pass_batches(self, stream: str) -> int | None:
        """Microbatches of one pass on each rank, known where `pass_steps` is; the last step may have fewer of them."""
        spec, rows = self.spec(stream), self._pass_rows(stream)
        if rows is None:
            return None
        steps, rest = divmod(rows, spec.rows_per_step)
        last = 0 if spec.last_step == "drop" else -(-rest // (spec.rows.micro_batch_size * spec.num_groups))
        return steps * spec.num_microbatches + last

    def _pass_rows(self, stream: str) -> int | None:
        spec, records = self.spec(stream), self._surveyed.records[stream]
        counts = []
        for source in self.config.streams()[stream]:
            if self.config.weights_of(stream)[source.name] == 0:
                continue
            sure = not source.is_transformed and source.on_error == "raise" and records[source.name] >= 0
            if not sure or not isinstance(spec.rows, CollatedRows):
                return None
            counts.append(records[source.name] * (1 if stream == "train" else source.epochs or 1))
        return sum(counts)

    def stats(self) -> dict[str, Any]:
        """Counters of the roles, by role name."""
        return self._runtime.stats()

    def peers(self, rank: int) -> PeerGroup | None:
        """Those that a rank shares its fetches with; None where it fetches by itself.

        Raises:
            ConfigError: Batches are broadcast, and the rank is not that of this process.
        """
        if self._peers is not None and rank != self._peers.rank:
            raise ConfigError(
                f"a loader for rank {rank} in the process of rank {self._peers.rank}: where batches are broadcast "
                "(broadcast_at), each process can have its own batches only"
            )
        return self._peers

    def next_number(self, stream: str, rank: int) -> int:
        """How many loaders of this stream and place there were before."""
        self._numbers[stream, rank] += 1
        return self._numbers[stream, rank] - 1

    def initial_state(self, stream: str) -> LoaderState:
        """The state before the first step."""
        return initial_state(self.spec(stream))

    def state_to_json(self, stream: str, state: LoaderState) -> dict[str, Any]:
        """The saved form of a state, with what it needs to be checked at resume."""
        return self._states.to_json(stream, state)

    def state_from_json(
        self,
        stream: str,
        saved: Mapping[str, Any],
        lists: FileLists | None = None,
        copied: Collection[str] = (),
    ) -> LoaderState:
        """The state of a saved form; see `SavedStates.from_json`.

        Raises:
            StateError: It is of a newer version, of other data or of other settings.
        """
        return self._states.from_json(stream, saved, lists, copied)

    @cached_property
    def reads_inline(self) -> bool:
        """Whether samples are made in this process with the global random states seeded for each (law 9).

        Then nothing may be read beside the training step, which draws from these states.
        """
        return self.config.runtime == "local" and any(
            _draws_globally(source, manifest.format)
            for stream in self._specs
            for source, manifest in zip(self.config.streams()[stream], self._manifests[stream], strict=True)
        )

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that are served."""
        return tuple(self._specs)

    def sample(self, stream: str, sample_id: Sequence[Any]) -> ShownSample:
        """See `show_sample`; of the files that the run reads."""
        return show_sample(self.config, stream, sample_id, self._manifests.get(stream))

    def lineage(
        self, stream: str, sample_id: Sequence[Any], state: LoaderState, handed: Iterable[BatchInfo]
    ) -> SampleLife:
        """See `find_life`; of the files that the run reads."""
        manifests = self._manifests.get(stream)
        return find_life(self.config, self.spec(stream), sample_id, state, handed, manifests)

    def file_lists(self) -> dict[str, tuple[FileInfo, ...]]:
        """Files of the training sources, as far as they have any; on the process that reads them."""
        sources, manifests = self.config.streams().get("train", ()), self._manifests.get("train", ())
        pairs = [pair for pair in zip(sources, manifests, strict=False) if pair[1].format != "dataset"]
        return {name: files for source, manifest in pairs for name, files in lists_of(source, manifest).items()}

    @cached_property
    def packed_file_lists(self) -> bytes:
        """`file_lists` in the form in which they are kept; empty where there are none."""
        lists = self.file_lists()
        return pack_lists(lists) if lists else b""

    def compare_files(self, saved: Mapping[str, Any], lists: FileLists) -> FileChanges:
        """What became of the files of a run that goes on: which of them to keep to, and which were only copied.

        All ranks call it, since only one looks at files.

        Args:
            saved: State of the training stream.
            lists: Its file lists.
        """
        ours, theirs = self._surveyed.digests["train"], saved.get("files", {})
        if not isinstance(theirs, Mapping):
            return FileChanges()  # refused where the state is read
        changed = [name for name in ours if ours[name] != theirs.get(name, ours[name]) and not self._forced(name)]
        if not changed:
            return FileChanges()
        names = [
            name for source in self.config.streams()["train"] if source.name in changed for name in list_names(source)
        ]

        def compare() -> FileChanges:
            now = self.file_lists()
            return compare_lists({name: (lists.get(name, ()), now.get(name, ())) for name in names})

        return self._share(compare)

    def _forced(self, source: str) -> bool:
        return any(name in ("files", f"files.{source}") for name in self.config.force_resume)


@dataclass(frozen=True)
class _Key:
    config: int
    tree: ClientPlaceTree
    accumulate: int | None
    passes: bool
    pid: int


_sessions: dict[_Key, LoadingSession] = {}
_lock = threading.Lock()


def _draws_globally(source: Source, form: str) -> bool:
    """Whether code of a source that runs in the loader's process may draw from the global random states."""
    if form == "iterable":
        return True  # it is read there whatever `thread_safe` and `executor` say of its transform
    function = source.transform or source.transform_batched
    may_draw = form == "dataset" or (function is not None and not takes_rng(function))
    return may_draw and not source.thread_safe and source.executor != "processes"
