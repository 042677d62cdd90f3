"""Filesystems behind URLs: one per process and set of options, closed when nobody uses it; what their listings say."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Final

from megascale_lightning.errors import ConfigError
from megascale_lightning.sources.stores.secrets import leaves, redact, remember_secrets

__all__ = [
    "Lease",
    "StoreSetupError",
    "adapt_filesystem",
    "is_filesystem",
    "lease_filesystem",
    "modified_ns",
    "place_of",
    "remember_filesystem",
    "url_of",
    "url_settings",
]

_HTTP: Final = ("http", "https")
_TIMES: Final = ("LastModified", "last_modified", "mtime", "Last-Modified", "updated", "modified", "created")
_TAGS: Final = ("ETag", "etag", "Content-MD5", "md5Hash", "content_md5", "version_id", "generation")
_CONNECT_S, _SILENT_S = 15, 60
"""How long a connection may take to be made, and how long nothing may arrive on it."""
_PLACES: Final = frozenset({"endpoint_url", "endpoint_override", "host", "account_name", "path", "protocol", "fo"})
"""Options that tell one store from another."""


class StoreSetupError(ConfigError):
    """fsspec, or what it needs for a URL, is not installed, or it refuses the options."""


class _Shared:
    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.users = 0


_lock = threading.RLock()
_shared: dict[tuple[Any, ...], _Shared] = {}


class Lease:
    """A filesystem while somebody uses it."""

    def __init__(self, key: tuple[Any, ...], shared: _Shared) -> None:
        self._key, self._mine = key, shared
        self.fs = shared.fs

    def release(self) -> None:
        """With its last user a filesystem is closed, and its connections with it. To be called once."""
        with _lock:
            self._mine.users -= 1
            if self._mine.users or _shared.get(self._key) is not self._mine:
                return
            del _shared[self._key]
        _close(self._mine.fs)


def lease_filesystem(url: str, options: Mapping[str, Any]) -> Lease:
    """The filesystem of a URL: the same object for all that ask for equal hosts with equal options in this process.

    fsspec's own sharing goes by thread: every thread would have connections of its own.

    Raises:
        StoreSetupError: As it says.
    """
    protocol = url.split("://", 1)[0]
    settings = {**url_settings(url), **options}
    key = (os.getpid(), protocol, repr(sorted(settings.items())))
    with _lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = _Shared(_make(protocol, settings))
        found.users += 1
        return Lease(key, found)


def url_settings(url: str) -> dict[str, Any]:
    """What a URL itself says of its filesystem: the host, the account; nothing for most.

    Raises:
        StoreSetupError: As `lease_filesystem`.
    """
    found: dict[str, Any] = _set_up(url.split("://", 1)[0], lambda kind: kind._get_kwargs_from_urls(url), "this URL")
    return found


def url_of(url: str, fs: Any, inside: str) -> str:
    """The URL of what `fs`, the filesystem of `url`, calls `inside`; with the host that `url` names."""
    if not url_settings(url):
        return str(fs.unstrip_protocol(inside))
    protocol, _, rest = url.partition("://")
    head = f"{protocol}://{rest.partition('/')[0]}"
    # The container of abfs stands before the host, and at the beginning of paths inside.
    names = [f"{head}/{inside.lstrip('/')}", f"{head}/{inside.lstrip('/').partition('/')[2]}"]
    return next((name for name in names if fs._strip_protocol(name) == inside), names[0])


def place_of(given: Any) -> str:
    """What tells a store from another, without credentials: of a filesystem, or of options."""
    if isinstance(given, Mapping):
        texts = sorted({(key, text) for key, text in leaves(given) if key in _PLACES})
        return repr(texts)
    if given is None:
        return ""
    kept = getattr(given, "storage_options", None)
    settings = kept if isinstance(kept, Mapping) else {str(n): part for n, part in enumerate(_pickled(given))}
    nested = [place_of(part) for part in (*settings.values(), getattr(given, "base_fs", None)) if is_filesystem(part)]
    return repr(
        (type(given).__qualname__, getattr(given, "base_path", getattr(given, "path", "")), place_of(settings), nested)
    )


def _pickled(given: Any) -> list[Any]:
    try:
        reduced = given.__reduce__()
    except Exception:  # what does not pickle is refused elsewhere, by name
        return []
    return list(reduced[1]) if isinstance(reduced, tuple) and isinstance(reduced[1], tuple) else []


def _make(protocol: str, settings: Mapping[str, Any]) -> Any:
    def make(kind: Any) -> Any:
        given = _with_timeouts(settings) if protocol in _HTTP else settings
        return kind(skip_instance_cache=True, **given)

    return _set_up(protocol, make, f"storage_options {sorted(settings)}")


def _set_up(protocol: str, call: Callable[[Any], Any], what: str) -> Any:
    """What a call makes of fsspec's class of a protocol."""
    problem = ""
    try:
        from fsspec import get_filesystem_class

        return call(get_filesystem_class(protocol))
    except ImportError as error:
        problem = f"needs a package that is not installed: {error}"
    except (TypeError, ValueError) as error:
        problem = f"cannot be set up with {what}: {error}"
    raise StoreSetupError(redact(f"the filesystem of {protocol}:// {problem}"))


def _with_timeouts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A server that goes silent must not hold a loader for the five minutes of aiohttp's default."""
    import aiohttp

    logging.getLogger("fsspec.http").addFilter(_redact_record)
    client = dict(settings.get("client_kwargs") or {})
    client.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_S))
    return {**settings, "client_kwargs": client}


def _redact_record(record: logging.LogRecord) -> bool:
    """Of fsspec, which writes whole URLs to its log at level DEBUG."""
    record.msg, record.args = redact(record.getMessage()), None
    if record.exc_info:
        record.exc_info = None
    return True


def _close(fs: Any) -> None:
    session = getattr(fs, "_session", None)
    if session is not None and hasattr(fs, "close_session"):
        fs.close_session(fs.loop, session)
        fs._session = None


def is_filesystem(given: Any) -> bool:
    """Whether it is an fsspec or a pyarrow filesystem."""
    return any(kind.__name__ in ("AbstractFileSystem", "FileSystem") for kind in type(given).__mro__)


def adapt_filesystem(given: Any) -> Any:
    """`Source.filesystem` with fsspec's methods."""
    from fsspec.spec import AbstractFileSystem

    if isinstance(given, AbstractFileSystem):
        return given
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(given, skip_instance_cache=True)


def remember_filesystem(given: Any) -> None:
    """Its credentials are masked in messages from now on: those of its options, or of what it is pickled as."""
    try:
        kept = getattr(given, "storage_options", None)
        remember_secrets(kept if isinstance(kept, Mapping) else _pickled(given))
    except Exception:  # only what is masked depends on it
        return


def modified_ns(entry: Mapping[str, Any]) -> int:
    """When a file was written, of what a listing or a server's headers say, in ns since 1970.

    Where there is only a tag of the content, a hash of that: it is equal as long as the content is. 0 for neither.
    """
    for name in _TIMES:
        found = _nanoseconds(entry.get(name))
        if found:
            return found
    for name in _TAGS:
        tag = entry.get(name)
        if tag:
            text = str(tag).removeprefix("W/").strip('"')
            return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return 0


def _nanoseconds(given: Any) -> int:
    value = given
    if isinstance(value, bool) or value is None:
        return 0
    if isinstance(value, (int, float)):
        return int(value * 1_000_000_000)
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value)
        except (TypeError, ValueError):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                return 0
    if not isinstance(value, datetime):
        return 0
    moment: datetime = value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + moment.microsecond * 1000
