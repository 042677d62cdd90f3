"""`DataConstructor`: builds each data-parallel group's batches once, for all ranks of the group.

It asks the planner what belongs in a batch, and the loaders for the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from megascale_lightning.constructing.windows import Build, Failure, Generation, Window
from megascale_lightning.errors import StreamError
from megascale_lightning.streams import StreamSpec
from megascale_lightning.types import BatchWindow, Call, NotYet, PartKey, PlanWindow, SampleBlock

__all__ = ["DataConstructor"]


class DataConstructor:
    """Builds the batches of all streams, ahead of the ranks as far as the planner allows.

    It makes no calls itself: `wants` lists them, `answered` takes what came of them. One thread at a time.
    """

    def __init__(self, specs: Mapping[str, StreamSpec], loader_of: Callable[[PartKey], str]) -> None:
        """Make a constructor that knows nothing yet.

        Args:
            specs: The streams by name.
            loader_of: Gives the name of the loader that serves a part.
        """
        self._specs = dict(specs)
        self._loader_of = loader_of
        self._generations: dict[tuple[str, str], Generation] = {}
        self._fetches = 0
        # By identity, since the arguments hold arrays; the call is kept so that its identity is not given away.
        self._in_flight: dict[int, tuple[Call, Callable[[Any], None]]] = {}

    def fetch(
        self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int
    ) -> BatchWindow | NotYet:
        """Give the window of a group that holds a step: the same object to whoever asks.

        Args:
            stream: Name of the stream.
            generation: Which opening of it.
            group: Data-parallel group.
            client: Who asks; known from then on until `close`.
            first_step: The window begins at or before it. One that is planned for this question begins at it.
            consumed: Last step that the client has consumed, -1 for none.

        Returns:
            The window; one without steps if the stream ends before `first_step`.

        Raises:
            StreamError: There is no such stream or group.
            Exception: What planning it or taking its samples failed with; raised to each client once, after which the
                next question tries anew.
        """
        found = self._generation(stream, generation, group)
        found.note(client, group, first_step, consumed)
        end = found.end_before(first_step)
        if end is not None:
            return end
        window = found.window_at(first_step)
        if window.failure is not None:
            if window.failure.is_news_for(client):
                raise window.failure.tell(client)
            window = found.renew(window, first_step)
        if window.plan is None:
            window.ask_again(client)
            return _not_planned(stream, window)
        build = self._build(found, window, window.plan, group)
        if build.failure is not None:
            if build.failure.is_news_for(client):
                raise build.failure.tell(client)
            del window.builds[group]
            build = self._build(found, window, window.plan, group)
        if build.batch is not None:
            self._fetches += 1
            return build.batch
        return NotYet(f"{_steps(stream, window)} wait for {', '.join(build.waiting_for())}")

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        """Take note that a client has consumed all steps up to and with `step`. Unknown clients are ignored."""
        found = self._generations.get((stream, generation))
        if found is not None:
            found.mark(client, step)

    def close(self, stream: str, generation: str, client: int) -> None:
        """Forget a client; with the last one everything of the generation goes. Unknown ones are ignored."""
        found = self._generations.get((stream, generation))
        if found is None:
            return
        found.forget(client)
        if not found.clients:
            del self._generations[stream, generation]

    def wants(self) -> list[Call]:
        """List the calls to be made now; each is listed once, and its result awaited by `answered`."""
        return [call for generation in self._generations.values() for call in self._wants(generation)]

    def answered(self, call: Call, result: Any) -> None:
        """Take the result of a call.

        Args:
            call: The very object that `wants` gave.
            result: What the call returned, or the exception that it raised.

        Raises:
            StreamError: The call is not one of those awaited.
        """
        _, receive = self._in_flight.pop(id(call), (call, None))
        if receive is None:
            raise StreamError(
                f"{call.target}.{call.method} was answered, but that call is not awaited; answer each call of wants() "
                "once, with the object that it gave"
            )
        receive(result)

    def stats(self) -> dict[str, Any]:
        """Open generations and clients, windows held and batches built of them, and calls that are not answered.

        `fetches` counts the windows that clients were given, from the beginning on.
        """
        generations = self._generations.values()
        windows = [window for generation in generations for window in generation.windows.values()]
        return {
            "generations": len(generations),
            "clients": sum(len(generation.clients) for generation in generations),
            "windows": len(windows),
            "batches": sum(build.batch is not None for window in windows for build in window.builds.values()),
            "calls": len(self._in_flight),
            "fetches": self._fetches,
        }

    def _generation(self, stream: str, name: str, group: int) -> Generation:
        spec = self._specs.get(stream)
        if spec is None:
            raise StreamError(f"there is no stream {stream!r}; the streams are {sorted(self._specs)}")
        if not 0 <= group < spec.num_groups:
            raise StreamError(f"stream {stream!r} has groups 0 to {spec.num_groups - 1}, not {group}")
        return self._generations.setdefault((stream, name), Generation(spec=spec, stream=stream, name=name))

    def _build(self, generation: Generation, window: Window, plan: PlanWindow, group: int) -> Build:
        """Give the build of a group; a new one is begun from the plan."""
        build = window.builds.get(group)
        if build is None:
            build = window.builds[group] = Build()
            try:
                build.begin(generation.spec, plan, group, self._loader_of)
                build.finish(generation.spec, plan)
            except Exception as error:
                build.fail(error)
        return build

    def _wants(self, generation: Generation) -> Iterator[Call]:
        # Told first, so that the planner knows of the step that lets it plan the next window.
        yield from self._tell(generation)
        generation.free()
        self._read_ahead(generation)
        for window in generation.windows.values():
            if window.is_due():
                window.planning = True
                args = (generation.stream, generation.name, window.first_step, window.count)
                yield self._call("planner", "plan", args, partial(_planned, generation, window))
            for build in window.builds.values():
                if build.due and window.plan is not None:
                    yield from self._ask_loaders(generation, window.plan, build)

    def _tell(self, generation: Generation) -> Iterator[Call]:
        if generation.untold and not generation.telling and not generation.silenced:
            told, generation.untold, generation.telling = generation.untold, {}, True
            args = (generation.stream, generation.name, told)
            yield self._call("planner", "consumed", args, partial(_told, generation, told))

    def _read_ahead(self, generation: Generation) -> None:
        """Begin what is next for each group: builds of all that is planned, and the plan of the window after that."""
        for group, step in generation.groups().items():
            while generation.end_before(step) is None:
                window = generation.window_at(step)
                if window.plan is None:
                    break
                self._build(generation, window, window.plan, group)
                step = window.stop_step

    def _ask_loaders(self, generation: Generation, plan: PlanWindow, build: Build) -> Iterator[Call]:
        due, build.due = build.due, []
        for index in due:
            take = build.takes[index]
            receive = partial(_taken, generation.spec, plan, build, index)
            yield self._call(take.loader, "take", (take.requests,), receive)

    def _call(self, target: str, method: str, args: tuple[Any, ...], receive: Callable[[Any], None]) -> Call:
        call = Call(target, method, args)
        self._in_flight[id(call)] = (call, receive)
        return call


def _planned(generation: Generation, window: Window, result: PlanWindow | NotYet | Exception) -> None:
    window.planning = False
    if isinstance(result, PlanWindow):
        generation.accept(window, result)
    elif isinstance(result, NotYet):
        window.refusal = result
    else:
        window.failure = Failure(result)


def _taken(
    spec: StreamSpec, plan: PlanWindow, build: Build, index: int, result: SampleBlock | NotYet | Exception
) -> None:
    if isinstance(result, (SampleBlock, NotYet)):
        build.receive(index, result)
    else:
        build.fail(result)
    try:
        build.finish(spec, plan)
    except Exception as error:
        # It belongs to those who ask for the window, not to the runtime that delivers a block.
        build.fail(error)


def _told(generation: Generation, told: Mapping[int, int], result: Any) -> None:
    generation.telling = False
    if not isinstance(result, Exception):
        generation.rearm()
        return
    generation.silenced = not generation.untold
    for client, step in told.items():
        if client in generation.clients:
            generation.untold.setdefault(client, step)


def _steps(stream: str, window: Window) -> str:
    return f"steps {window.first_step} to {window.stop_step - 1} of stream {stream!r}"


def _not_planned(stream: str, window: Window) -> NotYet:
    if window.refusal is not None:
        return window.refusal
    return NotYet(f"{_steps(stream, window)} wait for the planner")
