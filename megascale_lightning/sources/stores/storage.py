"""`Storage`: how the files of a source are opened: on this machine, or by a filesystem behind a URL."""

from __future__ import annotations

import io
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

from megascale_lightning.errors import ConfigError, DataError, MegaScaleError
from megascale_lightning.sources.stores.filesystems import (
    Lease,
    StoreSetupError,
    adapt_filesystem,
    lease_filesystem,
    modified_ns,
    place_of,
    remember_filesystem,
    url_of,
    url_settings,
)
from megascale_lightning.sources.stores.remote import (
    AsyncRanges,
    HandleRanges,
    HttpRanges,
    LocalRanges,
    Ranges,
    RangeStream,
    check_size,
)
from megascale_lightning.sources.stores.retry import RetryPolicy, ShortReadError, is_refusal, is_transient, status_of
from megascale_lightning.sources.stores.secrets import (
    differing_parameters,
    redact,
    remember_secrets,
    resolve_options,
    strip_signature,
)

if TYPE_CHECKING:
    from megascale_lightning.sources.source import Source
    from megascale_lightning.sources.stores.diskcache import DiskCache

__all__ = ["FileInfo", "Storage", "is_url", "is_web"]

_T = TypeVar("_T")

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HTTP: Final = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file as it was when the run began."""

    path: str
    """Absolute, a URL without its signature, or a path of `Source.filesystem`."""
    size: int
    """Bytes."""
    mtime_ns: int
    """0 where the store does not say; a hash of the entity tag where it says only that."""

    @classmethod
    def local(cls, path: str) -> FileInfo:
        """A file or folder of this machine as it is now.

        Raises:
            OSError: It is not there, or cannot be looked at.
        """
        stat = os.stat(path)
        return cls(path, stat.st_size, stat.st_mtime_ns)


def is_url(path: str) -> bool:
    """Whether fsspec has to open it."""
    return _URL.match(path) is not None


def is_web(path: str) -> bool:
    """Whether a web server has it, which lists no folders."""
    return path.startswith(_HTTP)


class Storage:
    """Opens the files of one source. Safe to call from several threads.

    Every stream reads again after an error that may pass, where it was; so readers need not. What it raises names
    source and file, and no secret. It holds connections, shared by all in this process that use equal hosts and
    options, until it is no longer referred to; it does not pickle.

    Args:
        options: `Source.storage_options`.
        given: `Source.filesystem`: reads all paths, if there is one.
        name: Of the source, for messages.
        signed: URLs as `FileInfo` has them -> as they are asked for.
        cache: Blocks of remote files on this machine's disk.
        retry: What is tried again.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        given: Any = None,
        *,
        name: str = "",
        signed: Mapping[str, str] | None = None,
        cache: DiskCache | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.name = name
        self.retry = retry or RetryPolicy()
        self.listed: dict[str, tuple[FileInfo, ...]] = {}
        """What was listed before: a store is not asked twice."""
        self._options = dict(options or {})
        self.given = given
        """`Source.filesystem`."""
        self._signed = dict(signed or {})
        self._cache = cache
        self._lock = threading.Lock()
        self._resolved: dict[str, Any] | None = None
        self._adapted: Any = None
        self._placed: str | None = None
        self._leases: dict[tuple[str, str], Lease] = {}
        self._checked: set[str] = set()
        remember_secrets(self._options)
        # Connections end with the last storage that uses them: nobody has to remember to close them.
        weakref.finalize(self, _release, self._leases)

    @classmethod
    def of(cls, source: Source, *, cache: DiskCache | None = None) -> Storage:
        """As a source declares it.

        Raises:
            ConfigError: Two URLs are the same but for a parameter that is taken for a signature.
        """
        signed = _signed_urls(source.name, source.data)
        return cls(source.storage_options, source.filesystem, name=source.name, signed=signed, cache=cache)

    def __repr__(self) -> str:
        return f"Storage({self.name!r})"

    def is_remote(self, path: str) -> bool:
        """Whether a filesystem other than this machine's has to open it."""
        return self.given is not None or is_url(path)

    def filesystem(self, path: str) -> tuple[Any, str]:
        """The fsspec filesystem of a path, and the path as it knows it.

        Raises:
            ConfigError: fsspec, or what it needs for this URL, is not installed; a variable that `storage_options` name
                is not set.
            DataError: Its store does not answer, or refuses.
        """
        if self.given is not None:
            with self._lock:
                if self._adapted is None:
                    remember_filesystem(self.given)
                    self._adapted = adapt_filesystem(self.given)
            return self._adapted, str(self._adapted._strip_protocol(path))
        url = self._signed.get(path, path)
        fs = self._connect(path, url)
        return fs, str(fs._strip_protocol(url))

    def _connect(self, path: str, url: str) -> Any:
        of_source = f"source {self.name!r}: " if self.name else ""

        def lease() -> Lease:
            key = (url.split("://", 1)[0], repr(url_settings(url)))
            with self._lock:
                if key not in self._leases:
                    self._leases[key] = lease_filesystem(url, self._settled(url))
                return self._leases[key]

        failed = ""
        try:
            return self.attempt_at(path, lease).fs  # some connect at once
        except StoreSetupError as error:
            raise ConfigError(f"{of_source}{strip_signature(path)} cannot be read: {error}") from None
        except MegaScaleError:
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        # Outside of the handler: the error itself may hold credentials, and is not to travel along.
        raise DataError(redact(f"{of_source}{strip_signature(path)} cannot be read: {failed}"))

    def outside(self, url: str, fs: Any, inside: str) -> str:
        """How a file is named in `FileInfo` that a listing of `url` calls `inside`."""
        if self.given is not None:
            return inside
        return url_of(url, fs, inside)

    def open(self, info: FileInfo) -> BinaryIO:
        """Open for reading at byte 0; the caller closes it. A file of another size is refused now or at the first read.

        The stream raises `DataError` where it cannot read, at the latest after a few attempts; it never ends early.

        Raises:
            DataError: The file cannot be opened, or has another size than when the run began.
        """
        remote = self.is_remote(info.path)
        if not remote:
            self.check_unchanged(info)
        ranges = self.attempt(info, lambda: self._ranges(info))
        place = "" if self._cache is None else self._place()

        def fetch(start: int, stop: int) -> bytes:
            if remote and self._cache is not None:
                return self._cache.read(
                    info, start, stop, lambda first, last: self._fetch(ranges, info, first, last), place
                )
            return self._fetch(ranges, info, start, stop)

        raw = RangeStream(fetch, info.size, ranges.ahead_bytes, ranges.close)
        return cast("BinaryIO", io.BufferedReader(raw, ranges.buffer_bytes))

    def _place(self) -> str:
        """Tells the cache one store from another where paths do not."""
        if self._placed is None:
            options = self._options if self._resolved is None else self._resolved
            self._placed = place_of(options) if self.given is None else place_of(self.given)
        return self._placed

    def check_unchanged(self, info: FileInfo) -> None:
        """Refuse a local file of another size than when the run began.

        Raises:
            DataError: As said, or it is gone.
        """
        if self.is_remote(info.path):
            return
        self.attempt(info, lambda: check_size(os.stat(info.path).st_size, info.size))

    def attempt(self, info: FileInfo, call: Callable[[], _T], *, between: Callable[[], object] | None = None) -> _T:
        """The value of a call that reads a file, made again where that may help; for libraries that open it themselves.

        Raises:
            DataError: It failed for good; names source and file.
        """
        return self.attempt_at(info.path, call, between=between)

    def attempt_at(self, path: str, call: Callable[[], _T], *, between: Callable[[], object] | None = None) -> _T:
        """The same, of a path or a pattern."""
        of_source = f"source {self.name!r}: " if self.name else ""
        return self.retry.run(call, of_source + strip_signature(path), between=between, hint=_hint)

    def info(self, path: str) -> FileInfo | None:
        """What the store says of one path; None where there is no file.

        Raises:
            DataError: The store does not answer, or refuses.
        """
        fs, inside = self.filesystem(path)

        def look() -> Any:
            try:
                return fs.info(inside)
            except FileNotFoundError as error:
                # fsspec's HTTP says so whatever the server said.
                status = None if error.__cause__ is None else status_of(error.__cause__)
                if is_transient(error) or (status is not None and status not in (404, 410)):
                    raise
                return None

        entry = self.attempt_at(path, look)
        return None if entry is None else self.info_of(path, entry)

    def info_of(self, path: str, entry: Mapping[str, Any]) -> FileInfo | None:
        """A listing's entry; None for what is no file. `path` is how the file is named from now on.

        Raises:
            DataError: The size is not said.
        """
        if entry.get("type") != "file":
            return None
        size = entry.get("size")
        if size is None:
            raise DataError(
                f"source {self.name!r}: the store does not say the size of {strip_signature(path)} (no "
                "Content-Length), so that parts of it cannot be read; copy the files to a store that does"
            )
        return FileInfo(strip_signature(path), int(size), modified_ns(entry))

    def _settled(self, url: str) -> dict[str, Any]:
        if self._resolved is None:
            where = f"source {self.name!r}: storage_options" if self.name else "storage_options"
            self._resolved = resolve_options(self._options, where)
            remember_secrets(self._resolved)
        if is_web(url) and self._signed:
            return {"encoded": True, **self._resolved}  # requoting a signed URL would break its signature
        return self._resolved

    def _ranges(self, info: FileInfo) -> Ranges:
        if not self.is_remote(info.path):
            return LocalRanges(info.path)
        fs, inside = self.filesystem(info.path)
        if is_web(inside) and hasattr(fs, "set_session"):
            return HttpRanges(fs, inside, info.size, info.mtime_ns)
        if getattr(fs, "async_impl", False):
            return AsyncRanges(fs, inside, lambda: self._check_once(fs, inside, info))
        return HandleRanges(fs, inside, info.size)

    def _check_once(self, fs: Any, inside: str, info: FileInfo) -> None:
        """Ask once for the size of a file, of a store whose answers to range requests do not say it."""
        if info.path not in self._checked:
            check_size(fs.info(inside).get("size"), info.size)
            self._checked.add(info.path)

    def _fetch(self, ranges: Ranges, info: FileInfo, start: int, stop: int) -> bytes:
        def read() -> bytes:
            data = ranges.read(start, stop)
            if len(data) != stop - start:
                raise ShortReadError(f"bytes {start} to {stop} were asked for, and {len(data)} came")
            return data

        return self.attempt(info, read, between=ranges.close)

    def __reduce__(self) -> Any:
        raise ConfigError("a Storage holds connections and does not travel: make it of the source where it is used")


def _signed_urls(name: str, data: Any) -> dict[str, str]:
    """URL without its signature -> the URL, of those that have one."""
    from megascale_lightning.sources.stores.files import expand_braces, flat_paths

    found: dict[str, str] = {}
    for path in filter(is_url, flat_paths(data)):
        for url in [path] if strip_signature(path) == path else expand_braces(path):
            known = found.setdefault(strip_signature(url), url)
            if known != url:
                names = ", ".join(map(repr, differing_parameters(known, url)))
                raise ConfigError(
                    f"source {name!r}: its data name {strip_signature(url)} more than once, with other values of "
                    f"{names}, which is taken for a part of a signature and does not tell files apart: name each file "
                    "once, or tell files apart by their paths or another parameter"
                )
    return {stripped: url for stripped, url in found.items() if stripped != url}


def _hint(error: BaseException) -> str:
    if is_refusal(error):
        return ". The store refuses: give credentials by storage_options, filesystem= or env=(...)"
    return ""


def _release(leases: dict[tuple[str, str], Lease]) -> None:
    while leases:
        leases.popitem()[1].release()
