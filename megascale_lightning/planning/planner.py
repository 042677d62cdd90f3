"""`Planner`: the role that turns metadata into plan windows, for every stream and every client at its own pace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megascale_lightning.errors import StateError
from megascale_lightning.planning.blocks import BlockStore, NeedBlocks
from megascale_lightning.planning.generation import Generation
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import Call, Change, LoaderState, MetaBlock, NotYet, PartKey, PlanWindow

__all__ = ["Planner"]


class Planner:
    """Sees metadata, never payload. Synchronous; one thread; what it wants from the loaders it lists in `wants`.

    It is the register of open clients: a stream has one generation for each way it was opened, and plans no further
    ahead than `prefetch_steps` of that generation's slowest client.

    Args:
        specs: The streams by name.
        loader_of: Name of the loader role that holds a part.
        changes: Stream -> its newest generation, and what a planner before this one was told of it.
    """

    def __init__(
        self,
        specs: Mapping[str, StreamSpec],
        loader_of: Callable[[PartKey], str],
        changes: Mapping[str, tuple[str, tuple[Change, ...]]] | None = None,
    ) -> None:
        self._specs = dict(specs)
        self._loader_of = loader_of
        self._blocks = {name: BlockStore() for name in specs}
        self._generations: dict[tuple[str, str], Generation] = {}
        self._asked: set[PartKey] = set()
        self._needed: list[PartKey] = []
        self._failed: dict[PartKey, Exception] = {}
        self._released: list[PartKey] = []
        self._changes = dict(changes or {})

    def open(self, stream: str, generation: str, client: int, state: LoaderState | None) -> None:
        """A client starts to read; all clients of a generation hand in the same state (None: the very beginning).

        Raises:
            StateError: Another client opened the generation with another state of the same step.
        """
        spec = self._spec(stream)
        key = (stream, generation)
        if key not in self._generations:
            told, changes = self._changes.get(stream, ("", ()))
            known = changes if told == generation else ()
            self._generations[key] = Generation(spec, generation, self._blocks[stream], known)
        self._generations[key].open(client, state)
        self._ask(self._generations[key].upcoming())

    def close(self, stream: str, generation: str, client: int) -> None:
        """A client stops to read; with its last client a generation is forgotten."""
        held = self._generations.get((stream, generation))
        if held is None:
            return
        held.close(client)
        if not held.clients:
            del self._generations[stream, generation]
            self._failed = {key: error for key, error in self._failed.items() if key.stream != stream}
        self._free(stream)

    def consumed(self, stream: str, generation: str, marks: Mapping[int, int]) -> None:
        """Clients say which step they consumed last (-1: none). Unknown clients and older marks are ignored."""
        held = self._generations.get((stream, generation))
        if held is not None and held.mark(marks):
            self._free(stream)

    def set_changes(self, stream: str, generation: str, changes: Sequence[Change]) -> None:
        """Changes from steps on that are not planned yet, all that are to come of the stream's newest generation.

        Raises:
            StateError: A step that one of them governs is planned already.
        """
        self._spec(stream)
        self._changes[stream] = (generation, tuple(changes))
        held = self._generations.get((stream, generation))
        if held is not None:
            held.change(changes)

    def plan(self, stream: str, generation: str, first_step: int, count: int) -> PlanWindow | NotYet:
        """The steps [first_step, first_step + count), fewer where the stream ends.

        Raises:
            NotOpenError: No client has this generation open here, or it is of before this planner's time.
            DataError: A part could not be described.
            EmptySourceError: A whole epoch of a source gave nothing.
        """
        self._spec(stream)
        held = self._generations.get((stream, generation))
        if held is None:
            raise Generation.unknown(stream, generation)
        try:
            window = held.window(first_step, count)
        except NeedBlocks as missing:
            # Only what the stream cannot do without ends it; the others are merely worth asking for.
            self._raise_failed(missing.keys[:1])
            self._ask(missing.keys)
            self._ask(held.upcoming())
            keys = list(dict.fromkeys(missing.keys))  # the head that is due is among those that are ahead, too
            return NotYet(f"{len(keys)} parts of stream {stream!r} are being read: {_some(keys)}")
        if isinstance(window, PlanWindow):
            self._ask(held.upcoming())
        return window

    def wants(self) -> list[Call]:
        """Calls on loaders that nobody makes yet: parts to describe, parts to let go."""
        calls = [Call(self._loader_of(key), "describe", (key,)) for key in self._needed]
        self._needed = []
        released: dict[str, list[PartKey]] = {}
        for key in self._released:
            released.setdefault(self._loader_of(key), []).append(key)
        self._released = []
        return calls + [Call(loader, "release", (tuple(keys),)) for loader, keys in released.items()]

    def answered(self, call: Call, result: Any) -> None:
        """What became of a call from `wants`: its value, or the exception it raised."""
        if call.method != "describe":
            return
        key: PartKey = call.args[0]
        self._asked.discard(key)
        if isinstance(result, MetaBlock):
            self._blocks[key.stream].add(result)
        else:
            self._failed[key] = result

    def stats(self) -> dict[str, Any]:
        """Parts described, steps held and open clients, by stream."""
        return {
            name: {
                "parts": len(self._blocks[name]),
                "steps": sum(g.num_steps for (stream, _), g in self._generations.items() if stream == name),
                "clients": sum(len(g.clients) for (stream, _), g in self._generations.items() if stream == name),
            }
            for name in self._specs
        }

    def _spec(self, stream: str) -> StreamSpec:
        if stream not in self._specs:
            raise StateError(f"there is no stream {stream!r}; there are {sorted(self._specs)}")
        return self._specs[stream]

    def _ask(self, keys: Iterable[PartKey]) -> None:
        for key in keys:
            if key not in self._asked and key not in self._blocks[key.stream] and key not in self._failed:
                self._asked.add(key)
                self._needed.append(key)

    def _raise_failed(self, keys: Iterable[PartKey]) -> None:
        for key in keys:
            if key in self._failed:
                raise self._failed[key]

    def _free(self, stream: str) -> None:
        """Let go of parts that no open generation of the stream can need again."""
        store = self._blocks[stream]
        floors = [held.floor() for (name, _), held in self._generations.items() if name == stream]
        gone = [key for key in store if not any(floor.needs(key) for floor in floors)]
        store.drop(gone)
        self._released += gone


def _some(keys: Iterable[PartKey]) -> str:
    shown = [f"source {key.source} epoch {key.epoch} window {key.window} part {key.part}" for key in list(keys)[:3]]
    return ", ".join(shown)
