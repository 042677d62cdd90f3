"""What a client sees of the roles: where it opens streams and fetches batches, whichever runtime runs them."""

from __future__ import annotations

from typing import Any, Protocol

from megascale_lightning.types import BatchWindow, Change, LoaderState, NotYet

__all__ = ["BatchPort", "Runtime"]


class BatchPort(Protocol):
    """Streams and batches for clients; safe for use by several threads.

    Every call is idempotent. It raises the role's own error (`DataError`, `NotOpenError`, ...) or a `RuntimeFailure`.
    """

    def open(self, stream: str, generation: str, client: int, state: LoaderState | None) -> None:
        """Enter a client of a stream's generation; `state` is where the generation starts (None: the beginning)."""
        ...

    def fetch(
        self, stream: str, generation: str, group: int, client: int, first_step: int, consumed: int
    ) -> BatchWindow | NotYet:
        """Give the window of a data-parallel group that begins at `first_step`.

        Waits about a second for it and then answers `NotYet`: ask again, with what is consumed by then. A window
        without steps says that the stream ended before `first_step`.

        Raises:
            NotOpenError: The generation is not known (any more): open it again.
        """
        ...

    def consumed(self, stream: str, generation: str, client: int, step: int) -> None:
        """Say that the client has consumed all steps up to and with `step`; no answer is awaited."""
        ...

    def set_changes(self, stream: str, generation: str, changes: tuple[Change, ...]) -> None:
        """Make known all changes to come; on return the planner, and any that replaces it, knows them.

        Only for the process that started the run.

        Raises:
            StateError: A step that one of them governs is planned already.
        """
        ...

    def close(self, stream: str, generation: str, client: int) -> None:
        """Take the client out: it holds nothing back any more."""
        ...


class Runtime(Protocol):
    """The roles of one run, running."""

    def port(self) -> BatchPort:
        """The port of this process."""
        ...

    def end_roles(self) -> None:
        """End the roles where this process started them; nobody reads any more. What they ran in stays."""
        ...

    def close(self) -> None:
        """End what this process started; a second call does nothing."""
        ...

    def stats(self) -> dict[str, Any]:
        """Role name -> its counters."""
        ...
