"""`SampleWalk`: groups the members of an archive into samples, as WebDataset does; `KeyMemory`: the keys so far."""

from __future__ import annotations

import re
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_lightning.sources.formats.webdataset.walk import Damage, Member, TarWalk

__all__ = ["KeyMemory", "Part", "SampleWalk", "ShardMemory", "TarSample", "merge_samples", "split_name"]

_NAME: Final = re.compile(rb"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
_META: Final = re.compile(rb"__[^/]*__($|/)")
_RECENT_KEYS: Final = 1 << 16


@lru_cache(maxsize=16)  # every name is asked for several times in a row
def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key (folders and the name up to its first dot) and extension in lower case; None where it is of no sample.

    >>> split_name(b"a/b.c/d.seg.PNG")
    (b'a/b.c/d', b'seg.png')
    """
    match = None if _META.match(name) else _NAME.fullmatch(name)
    return None if match is None else (match.group(1), match.group(2).lower())


class Part(NamedTuple):
    """One member of a sample."""

    member: Member
    content: bytes | None
    """None where it was not asked for."""


@dataclass(slots=True)
class TarSample:
    """Consecutive members of one key, or what stands in their place."""

    start: int
    """First byte of its headers."""
    key: bytes | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    """By extension."""
    problem: str | None = None
    """Why it is none."""
    raw: bytes = b""
    """The header block where it begins, or is broken."""

    def fail(self, problem: str, raw: bytes) -> None:
        """Note the first thing that is wrong."""
        if self.problem is None:
            self.problem, self.raw = problem, raw


class KeyMemory:
    """Where each key of an archive came first, in about 16 bytes a key."""

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._hashes = np.empty(0, np.int64)
        self._starts = np.empty(0, np.int64)

    def first(self, key: bytes, start: int) -> int:
        """Where the key came first: `start`, if it was not there before."""
        digest = int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)
        at = int(np.searchsorted(self._hashes, digest))
        if at < len(self._hashes) and self._hashes[at] == digest:
            return int(self._starts[at])
        found = self._recent.setdefault(digest, start)
        if len(self._recent) >= _RECENT_KEYS:
            hashes = np.concatenate([self._hashes, np.fromiter(self._recent, np.int64)])
            starts = np.concatenate([self._starts, np.fromiter(self._recent.values(), np.int64)])
            order = np.argsort(hashes)
            self._hashes, self._starts, self._recent = hashes[order], starts[order], {}
        return found


class ShardMemory:
    """What walking through an archive found so far: where its samples begin, and their keys."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by whoever walks through the archive."""
        self.keys = KeyMemory()
        self._starts = array("q")
        self.can_restart = True
        """Reading may begin at any of these samples."""

    def note(self, row: int, start: int) -> None:
        """Sample `row` begins at byte `start`."""
        if row == len(self._starts):
            self._starts.append(start)

    def before(self, position: int) -> tuple[int, int]:
        """(row, start) of the first known sample at or behind a byte, else of the last one known; (0, 0) if none is."""
        if not self.can_restart or not self._starts:
            return 0, 0
        starts: npt.NDArray[np.int64] = np.frombuffer(self._starts, np.int64)
        row = min(int(np.searchsorted(starts, position)), len(starts) - 1)
        return row, int(starts[row])


class SampleWalk:
    """Goes from sample to sample.

    Args:
        walk: At the first header.
        keys: Keys of the samples before; None: one that comes again is not told.
    """

    def __init__(self, walk: TarWalk, keys: KeyMemory | None) -> None:
        self._walk = walk
        self._keys = keys
        self._queue: deque[Member | Damage] = deque()
        self._is_over = False

    def next_start(self) -> int | None:
        """Where the next sample begins, None at the end."""
        self._fill(1)
        return self._queue[0].start if self._queue else None

    def take(self, load: Callable[[str], bool] | None) -> TarSample:
        """The next sample.

        Args:
            load: Whether the content of an extension is wanted; None: of none.

        Raises:
            IndexError: There is none.
        """
        self._fill(1)
        item = self._queue[0]
        sample = TarSample(item.start, raw=item.header)
        if isinstance(item, Damage):
            self._queue.popleft()
            sample.fail(item.message, item.header)
            self._fill(1)
            follows = self._key_of(self._queue[0]) if self._queue else None
            if item.name is None or follows is None or _key(item.name) != follows:
                return sample
        sample.key = self._key_of(self._queue[0])
        while self._goes_on(sample):
            item = self._queue.popleft()
            if isinstance(item, Damage):
                sample.fail(item.message, item.header)
            else:
                self._add(sample, item, load)
        self._check_key(sample)
        return sample

    def _goes_on(self, sample: TarSample) -> bool:
        """Whether the next entry is of this sample: one of its key, or damage that names it or stands in its midst."""
        self._fill(1)
        if not self._queue:
            return False
        if not isinstance(self._queue[0], Damage):
            return self._key_of(self._queue[0]) == sample.key
        if self._queue[0].name is not None and _key(self._queue[0].name) == sample.key:
            return True
        while isinstance(self._queue[-1], Damage) and self._fill(len(self._queue) + 1):
            pass
        return self._key_of(self._queue[-1]) == sample.key

    def _add(self, sample: TarSample, member: Member, load: Callable[[str], bool] | None) -> None:
        _, suffix = split_name(member.name) or (b"", b"")
        extension = suffix.decode("utf-8", "surrogateescape")
        content = None
        if load is not None and load(extension):
            content = self._walk.content()
            there = len(content)
        else:
            there = self._walk.skip()
        if there < member.size:
            reason = "" if self._walk.problem is None else f" ({self._walk.problem})"
            what = f"{_place(member)} is cut off: {there} of its {member.size} bytes are there{reason}"
            sample.fail(what, member.header)
            self._is_over = True
        if not _is_utf8(member.name):
            sample.fail(f"the name of {_place(member)} is not UTF-8", member.header)
        _add_part(sample, extension, Part(member, content))

    def _check_key(self, sample: TarSample) -> None:
        if sample.key is None or self._keys is None:
            return
        first = self._keys.first(sample.key, sample.start)
        if first < sample.start:
            sample.fail(
                f"key {_shown(sample.key)} at byte {sample.start} came before, at byte {first}: the members of a "
                'sample have to stand together; format_options={"interleaved": "merge"} joins them',
                sample.raw,
            )

    def _fill(self, count: int) -> bool:
        """Have as many entries in the queue, of those that belong to samples; False at the end."""
        while len(self._queue) < count and not self._is_over:
            item = self._walk.next()
            if item is None:
                self._is_over = True
            elif isinstance(item, Damage) or (item.is_file and split_name(item.name) is not None):
                self._queue.append(item)
            else:
                there = self._walk.skip()
                if there < item.size:
                    self._queue.append(Damage(item.start, f"{_place(item)} is cut off", None, item.header))
                    self._is_over = True
        return len(self._queue) >= count

    def _key_of(self, item: Member | Damage) -> bytes | None:
        return _key(item.name) if isinstance(item, Member) else None


def _key(name: bytes) -> bytes | None:
    found = split_name(name)
    return None if found is None else found[0]


def _is_utf8(name: bytes) -> bool:
    if name.isascii():
        return True
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _add_part(sample: TarSample, extension: str, part: Part) -> None:
    before = sample.parts.setdefault(extension, part)
    if before is not part:
        what = f"{_place(part.member)} is there twice: another one is at byte {before.member.start}"
        sample.fail(what, part.member.header)


def _place(member: Member) -> str:
    return f"member {_shown(member.name)} at byte {member.start}"


def _shown(name: bytes) -> str:
    return repr(name.decode() if _is_utf8(name) else name)


def merge_samples(walk: SampleWalk, load: Callable[[str], bool]) -> Iterator[TarSample]:
    """All samples of an archive whose members may lie apart, each where its first member is.

    Args:
        walk: At the beginning, without a memory of keys.
        load: See `SampleWalk.take`.
    """
    found: dict[Any, TarSample] = {}
    while walk.next_start() is not None:
        sample = walk.take(load)
        whole = found.setdefault(sample.start if sample.key is None else sample.key, sample)
        if whole is sample:
            continue
        if sample.problem is not None:
            whole.fail(sample.problem, sample.raw)
        for extension, part in sample.parts.items():
            _add_part(whole, extension, part)
    yield from found.values()
