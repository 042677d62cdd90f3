"""`RetryPolicy`: which errors of a disk or a network are tried again, how often and how soon. The only such place."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from megascale_lightning.errors import DataError, MegaScaleError
from megascale_lightning.sources.stores.secrets import redact

__all__ = [
    "TRANSIENT_ERRNOS",
    "RefusedError",
    "RetryPolicy",
    "ShortReadError",
    "is_refusal",
    "is_transient",
    "is_unsupported",
    "status_of",
]

_T = TypeVar("_T")

TRANSIENT_ERRNOS: Final = frozenset(
    {errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT}
    | {errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ESTALE}
    | {errno.EPIPE, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENETRESET}
)
"""Of an `OSError` that may be another the next time."""

_TRANSIENT_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_PERMANENT: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_TRANSIENT_NAMES: Final = frozenset(
    {"ClientConnectionError", "ClientPayloadError", "IncompleteRead", "ProtocolError", "EndpointConnectionError"}
    | {"ReadTimeoutError", "ConnectTimeoutError", "ConnectionClosedError", "HTTPClientError", "RetriesExceededError"}
    | {"ResponseStreamingError", "ChunkedEncodingError", "TransportError", "ConnectionError", "Timeout"}
)
"""Classes of libraries that are not imported here: aiohttp, http.client, urllib3, botocore, requests."""

_RESOLVING_NAMES: Final = frozenset({"gaierror", "ClientConnectorDNSError", "ClientConnectorError"})
"""Their numbers may be those of the resolver of names."""

_ARROW_STORE: Final = re.compile(
    r"AWS Error (UNKNOWN|NETWORK_CONNECTION|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING|REQUEST_TIMEOUT|"
    r"REQUEST_EXPIRED|REQUEST_TIME_TOO_SKEWED)|HTTP status (408|429|5\d\d)|curlCode: (?!60)\d+"
)
"""Arrow's file systems put what the store said into the text."""

_CAUSES: Final = 5


class ShortReadError(OSError):
    """A store gave fewer bytes than it was asked for, of a file that has them."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)


class RefusedError(OSError):
    """A file that is not to be read, whatever the store says the next time; the text tells why and what to do."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later.

    A missing file, a refusal (401, 403, 404) and damaged content are none of it.
    """
    return any(_is_transient(cause) for cause in _chain(error))


def _is_transient(error: BaseException) -> bool:
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, (TimeoutError, ConnectionError, asyncio.TimeoutError)):
        return True
    if getattr(error, "errno", None) == socket.EAI_AGAIN:
        return any(kind.__name__ in _RESOLVING_NAMES for kind in type(error).__mro__)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in TRANSIENT_ERRNOS
    if any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__):
        return True
    return isinstance(error, OSError) and _ARROW_STORE.search(str(error)) is not None


def is_refusal(error: BaseException) -> bool:
    """Whether a store does not let these credentials do it."""
    status = next((status_of(cause) for cause in (error, error.__cause__) if cause and status_of(cause)), None)
    return isinstance(error, PermissionError) or status in (401, 403) or "ACCESS_DENIED" in str(error)


def is_unsupported(error: BaseException) -> bool:
    """Whether a store, or Arrow's file system of it, cannot do this at all, now or later."""
    return any(kind.__name__.startswith("NotImplemented") for kind in type(error).__mro__)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, requests, urllib, botocore or gcsfs carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
    for name in ("status", "code"):
        found = getattr(error, name, None) if found is None else found
    found = int(found) if isinstance(found, str) and found.isdigit() else found
    return found if isinstance(found, int) and 100 <= found < 600 else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes: fsspec gives a FileNotFoundError for whatever a server said."""
    found: BaseException | None = error
    for _ in range(_CAUSES):
        if found is None:
            return
        yield found
        found = found.__cause__


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter; by default five attempts within about two seconds."""

    attempts: int = 5
    """In all."""
    first_delay_s: float = 0.1
    """Doubled with every further attempt; the wait is between a half of it and all of it."""
    max_delay_s: float = 4.0
    sleep: Callable[[float], object] = time.sleep
    uniform: Callable[[], float] | None = None
    """In [0, 1); None: of its own, since the global generators are seeded for the user's code."""

    def run(
        self,
        call: Callable[[], _T],
        what: str,
        *,
        between: Callable[[], object] | None = None,
        hint: Callable[[BaseException], str] | None = None,
    ) -> _T:
        """The value of a call, which is made again after a transient error.

        Args:
            call: Reads something.
            what: Begins the message: source and file.
            between: Called before another attempt.
            hint: What to do about an error, put behind the message.

        Raises:
            DataError: It failed for good, or too often; no secret is in it. What is no error of I/O passes through.
        """
        uniform = self.uniform or random.Random().random
        times, failed = 0, ""
        while True:
            times += 1
            try:
                return call()
            except MegaScaleError:
                raise
            except Exception as error:
                transient = is_transient(error)
                if not transient and not _is_io(error):
                    raise
                if not transient or times >= self.attempts:
                    failed = describe(error) + (hint(error) if hint is not None else "")
            if failed:
                # Outside of the handler: the error itself may hold headers, and is not to travel along.
                often = f" ({times} attempts)" if times > 1 else ""
                raise DataError(redact(f"{what} cannot be read{often}: {failed}"))
            self.sleep(min(self.first_delay_s * 2 ** (times - 1), self.max_delay_s) * (0.5 + 0.5 * uniform()))
            if between is not None:
                between()


def _is_io(error: BaseException) -> bool:
    return isinstance(error, OSError) or any(
        status_of(cause) is not None or type(cause).__module__.split(".")[0] in _STORES for cause in _chain(error)
    )


_STORES: Final = frozenset({"aiohttp", "botocore", "aiobotocore", "requests", "urllib3", "gcsfs", "google", "azure"})


def describe(error: BaseException) -> str:
    """What a store said, with the status where the text lacks it."""
    if isinstance(error, RefusedError):
        return str(error)
    said = [f"{type(error).__name__}: {error}" if str(error) else type(error).__name__]
    for cause in list(_chain(error))[1:]:
        text = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        if text not in said:
            said.append(text)
    return ", by ".join(said)
