"""`TarWalk`: the members of a tar archive front to back, by their headers; goes on behind damage."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from megascale_lightning.errors import DataError
from megascale_lightning.sources.formats.webdataset.headers import (
    BLOCK,
    GLOBAL,
    LONG_LINK,
    LONG_NAME,
    MAGIC,
    MAGIC_AT,
    PAX,
    SPARSE,
    Header,
    parse_header,
    parse_pax,
)
from megascale_lightning.sources.stores.plaintext import PlainFile, codec_of
from megascale_lightning.sources.stores.storage import FileInfo, Storage

__all__ = ["Damage", "Member", "TarStream", "TarWalk"]

_ZEROS: Final = bytes(BLOCK)
_CHUNK: Final = 1 << 16
_READ_THROUGH: Final = 4 << 20
"""Bytes of a remote file that are rather read than passed by a request of their own."""
_MAX_EXTENSION: Final = 1 << 20
"""Bytes of a long name or of PAX records that are believed."""
_EXTENSIONS: Final = (LONG_NAME, LONG_LINK, GLOBAL, *PAX)


class Member(NamedTuple):
    """One entry of an archive, whatever its kind."""

    start: int
    """First byte of its headers, those of a long name included."""
    size: int
    """Bytes of its content."""
    name: bytes
    """With all folders, as stored."""
    is_file: bool
    header: bytes
    """Its header block."""


class Damage(NamedTuple):
    """Bytes that are no tar."""

    start: int
    message: str
    name: bytes | None
    """What a broken header seems to name."""
    header: bytes
    """The first block."""


class TarStream:
    """The plain content of an archive, front to back, with a look ahead.

    Args:
        storage: Opens it.
        info: The archive, compressed or not.
        position: Plain byte to begin at.

    Raises:
        DataError: It cannot be opened or read, or has another size than when the run began.
    """

    def __init__(self, storage: Storage, info: FileInfo, position: int = 0) -> None:
        self._info = info
        self._name = storage.name
        self._read_through = _READ_THROUGH if storage.is_remote(info.path) else 0
        self._ahead = b""
        self._plain: PlainFile | None = None
        self._file: Any = None
        if codec_of(info.path) is None:
            self._file = storage.open(info)
            try:
                self._file.seek(position)
            except BaseException:
                self._file.close()
                raise
        else:
            self._plain = PlainFile(storage, info, position)
        self.position = position
        """Byte that is read next."""

    @property
    def problem(self) -> str | None:
        """Why there is nothing behind `position`, though more was stored."""
        return None if self._plain is None or self._ahead else self._plain.problem

    def seek(self, position: int) -> None:
        """Go on at any byte of an archive that is stored plain."""
        if position != self.position:
            self._file.seek(position)
            self._ahead, self.position = b"", position

    def read(self, size: int) -> bytes:
        """The next bytes; fewer only at the end."""
        held = self._ahead[:size]
        self._ahead = self._ahead[size:]
        missing = size - len(held)
        data = held + self._more(missing, ahead=len(held)) if missing > 0 else held
        self.position += len(data)
        return data

    def peek(self, size: int) -> bytes:
        """The same without going on; may give more."""
        if len(self._ahead) < size:
            self._ahead += self._more(size - len(self._ahead), ahead=len(self._ahead))
        return self._ahead

    def skip(self, size: int) -> int:
        """Go on by as many bytes, or to the end; how many they were."""
        start = self.position
        held = min(size, len(self._ahead))
        self._ahead = self._ahead[held:]
        self.position += held
        size -= held
        if self._file is not None and size > self._read_through:
            size = min(size, max(self._info.size - self.position, 0))
            self._file.seek(self.position + size)
            self.position += size
            size = 0
        while size > 0:
            data = self._more(min(size, _CHUNK), ahead=0)
            if not data:
                break
            self.position += len(data)
            size -= len(data)
        return self.position - start

    def _more(self, size: int, *, ahead: int) -> bytes:
        """Bytes from `ahead` behind `position` on."""
        if self._plain is not None:
            return self._plain.read(size)
        found = []
        at = self.position + ahead
        size = min(size, max(self._info.size - at, 0))
        while size > 0:
            data = self._file.read(size)
            if not data:
                raise DataError(
                    f"source {self._name!r}: {self._info.path} gave {at} of its {self._info.size} bytes: it changed, "
                    "or the store cut the answer short"
                )
            found.append(data)
            at += len(data)
            size -= len(data)
        return b"".join(found)

    def close(self) -> None:
        """Let go of the file."""
        if self._plain is not None:
            self._plain.close()
        else:
            self._file.close()


class TarWalk:
    """Goes from header to header: ustar, GNU long names, PAX. What is no header is `Damage`, up to the next one.

    Blocks of zeros are passed over, so that archives written one behind the other are read to the end.

    Args:
        stream: At the first header.
        stop: Plain byte at which it ends; -1: at the end of the content.
    """

    def __init__(self, stream: TarStream, stop: int = -1) -> None:
        self._stream = stream
        self.stop = stop
        self.has_globals = False
        """There were PAX records for all that follows: what follows cannot be read without them."""
        self.has_end = False
        """The last thing passed was a block of zeros, as an archive ends."""
        self._globals: dict[bytes, bytes] = {}
        self._left = 0
        self._padding = 0
        self._is_over = False

    @property
    def problem(self) -> str | None:
        """Why there is nothing behind, though more was stored."""
        return self._stream.problem

    def next(self) -> Member | Damage | None:
        """The next entry, or None at the end; its content is then to be read by `content` or passed by `skip`."""
        self.skip()
        self._stream.skip(self._padding)
        self._padding = 0
        start, name, records = -1, None, dict(self._globals)
        while True:
            at = self._stream.position
            block = b"" if 0 <= self.stop <= at else self._stream.peek(BLOCK)[:BLOCK]
            begin = at if start < 0 else start
            if len(block) < BLOCK:
                return self._end(begin, block, has_extension=start >= 0)
            if block == _ZEROS:
                if start >= 0:
                    return self._damage(begin, "a long name stands before the end", block)
                self.has_end = True
                self._stream.skip(BLOCK)
                continue
            self.has_end = False
            header = parse_header(block)
            if isinstance(header, str):
                return self._damage(begin, header, block)
            if header.kind not in _EXTENSIONS:
                return self._member(begin, header, name, records, block)
            start = begin
            data = self._extension(header.size)
            if data is None:
                return self._damage(begin, "a long name or PAX header that is cut off", block)
            pairs = parse_pax(data) if header.kind in (*PAX, GLOBAL) else {}
            if pairs is None:
                return self._damage(begin, "a broken PAX header", block, first=0)
            if header.kind == LONG_NAME:
                name = data.split(b"\0", 1)[0]
            if header.kind == GLOBAL:
                self.has_globals = True
                self._globals.update(pairs)
            records.update(pairs)

    def _member(
        self, start: int, header: Header, name: bytes | None, records: dict[bytes, bytes], block: bytes
    ) -> Member | Damage:
        if header.kind == SPARSE or any(key.startswith(b"GNU.sparse.") for key in records):
            shown = header.name.decode("utf-8", "backslashreplace")
            return self._damage(start, f"a sparse file, {shown!r}, which is not supported", block)
        size = int(records[b"size"]) if records.get(b"size", b"").isdigit() else header.size
        if size < 0:
            return self._damage(start, f"a size of {size}", block)
        size = size if header.has_content else 0
        self._stream.skip(BLOCK)
        self._left, self._padding = size, -size % BLOCK
        name = records.get(b"path", header.name if name is None else name)
        return Member(start, size, name, header.is_file, block)

    def content(self) -> bytes:
        """The content of the member that `next` gave last; shorter than its size where the archive is cut off."""
        data = self._stream.read(self._left)
        self._left = 0
        return data

    def skip(self) -> int:
        """Pass over that content; how many of its bytes are there."""
        passed = self._stream.skip(self._left)
        self._left = 0
        return passed

    def _extension(self, size: int) -> bytes | None:
        if not 0 <= size <= _MAX_EXTENSION:
            return None
        stored = size + -size % BLOCK
        data = self._stream.peek(BLOCK + stored)
        if len(data) < BLOCK + stored:
            return None
        data = data[BLOCK : BLOCK + size]
        self._stream.skip(BLOCK + stored)
        return data

    def _end(self, start: int, block: bytes, *, has_extension: bool) -> Damage | None:
        if self._is_over:
            return None
        self._is_over = True
        self._stream.skip(len(block))
        problem = self._stream.problem
        if problem is not None:
            return Damage(start, problem, None, block)
        if has_extension or block.strip(b"\0"):
            return Damage(start, f"the archive ends inside a header at byte {start}", None, block)
        return None

    def _damage(self, start: int, reason: str, block: bytes, *, first: int = 1) -> Damage:
        """Passes over what is broken, up to what looks like a header and has its checksum.

        Args:
            start: First byte of it.
            reason: What is wrong.
            block: The header that is broken, or follows what is broken.
            first: Bytes from here on where no header is looked for.
        """
        name = None
        is_there = self._resync(first)
        if block.startswith(MAGIC, MAGIC_AT):
            if block[156:157] in (LONG_NAME, *PAX):
                is_there = is_there and self._pass_nameless()
            else:
                name = block[:100].split(b"\0", 1)[0]
                prefix = block[345:500].split(b"\0", 1)[0]
                name = prefix + b"/" + name if prefix and block[MAGIC_AT + 5] == 0 else name
        behind = f"; goes on at byte {self._stream.position}" if is_there else ", nor is there one behind it"
        return Damage(start, f"no tar header at byte {start}: {reason}{behind}", name, block)

    def _pass_nameless(self) -> bool:
        """Pass over the member whose name was in front of it: its own header has but the beginning of it."""
        header = parse_header(self._stream.peek(BLOCK)[:BLOCK])
        assert isinstance(header, Header)
        size = header.size if header.has_content else 0
        self._stream.skip(BLOCK + size + -size % BLOCK)
        return True

    def _resync(self, first: int) -> bool:
        while True:
            limit = _CHUNK if self.stop < 0 else min(_CHUNK, self.stop - self._stream.position)
            data = self._stream.peek(limit)[:limit]
            at = data.find(MAGIC, first + MAGIC_AT)
            while at >= 0:
                begin = at - MAGIC_AT
                if len(data) - begin < BLOCK:
                    break
                if isinstance(parse_header(data[begin : begin + BLOCK]), Header):
                    self._stream.skip(begin)
                    return True
                at = data.find(MAGIC, at + 1)
            if len(data) < _CHUNK:
                self._stream.skip(len(data))
                return False
            self._stream.skip(_CHUNK - BLOCK)
            first = 0
