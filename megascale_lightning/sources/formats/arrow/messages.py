"""Where the record batches of an Arrow file or stream lie, and how many rows each has: headers are read, bodies not.

`pyarrow` tells neither a batch's place in a stream nor its rows before it has read, and decompressed, the batch. Both
stand in the flatbuffers of the messages: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

import pyarrow as pa

__all__ = ["FEATHER_V1", "FILE_MAGIC", "Message", "MessageKind", "file_batches", "stream_messages"]

FILE_MAGIC: Final = b"ARROW1"
FEATHER_V1: Final = b"FEA1"

ReadAt = Callable[[int, int], Any]
"""`read_at(start, size)`: these bytes, as a buffer; fewer where the file ends."""

_CONTINUATION: Final = 0xFFFFFFFF
_HEADER_GUESS: Final = 4096
"""Read at once: the prefix and, of most messages, the whole header."""


class MessageKind(IntEnum):
    """What a message holds."""

    SCHEMA = 1
    DICTIONARY = 2
    BATCH = 3


class Message(NamedTuple):
    """One message of a stream."""

    kind: int
    """A `MessageKind`, or something that is passed over."""
    start: int
    """Its first byte."""
    stop: int
    """The byte behind its body."""
    num_rows: int
    """Of a record batch."""
    dictionary: int
    """The dictionary's number."""
    is_delta: bool
    """It adds to its dictionary, and does not replace it."""
    is_compressed: bool
    """The body of a record batch is."""


def stream_messages(read_at: ReadAt, size: int, start: int = 0) -> Iterator[Message]:
    """The messages of a stream from byte `start` on, where one has to begin.

    Raises:
        ArrowInvalid: The stream is broken or ends in the middle of a message; says at which byte.
    """
    while start < size:
        message = _message_at(read_at, size, start)
        if message is None:
            return
        yield message
        start = message.stop


def _message_at(read_at: ReadAt, size: int, start: int) -> Message | None:
    """The message at a byte; None for the end-of-stream marker."""
    head = bytes(read_at(start, min(_HEADER_GUESS, size - start)))
    if len(head) < 4:
        raise pa.ArrowInvalid(f"truncated: it ends at byte {start + len(head)}, in the middle of a message")
    (length,) = struct.unpack_from("<I", head)
    prefix = 4
    if length == _CONTINUATION:
        if len(head) < 8:
            raise pa.ArrowInvalid(f"truncated: it ends at byte {start + len(head)}, in the middle of a message")
        (length,) = struct.unpack_from("<I", head, 4)
        prefix = 8
    if length == 0:
        return None
    if start + prefix + length > size:
        raise pa.ArrowInvalid(f"truncated or corrupt: the message at byte {start} goes beyond the end at byte {size}")
    if prefix + length > len(head):
        head = bytes(read_at(start, prefix + length))
    try:
        message = _parse(head[prefix : prefix + length], start, start + prefix + length)
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"corrupt: no message begins at byte {start}") from error
    if not start < message.stop <= size:
        raise pa.ArrowInvalid(f"truncated or corrupt: the message at byte {start} goes beyond the end at byte {size}")
    return message


def _parse(header: bytes, start: int, body: int) -> Message:
    root = _Table(header, _number(header, 0, "<I"))
    kind, content = root.number(1, "<B"), root.table(2)
    num_rows, dictionary, is_delta, is_compressed = 0, -1, False, False
    if content is not None and kind == MessageKind.BATCH:
        num_rows, is_compressed = content.number(0, "<q"), content.table(3) is not None
    if content is not None and kind == MessageKind.DICTIONARY:
        dictionary, is_delta = content.number(0, "<q"), content.number(2, "<B") != 0
    return Message(kind, start, body + root.number(3, "<q"), num_rows, dictionary, is_delta, is_compressed)


def file_batches(read_at: ReadAt, size: int, count: int | None = None) -> list[Message]:
    """The first `count` record batches of a file (not a stream), or all, in the order in which the footer numbers them.

    Raises:
        ArrowInvalid: The file has no footer, or a broken one.
    """
    tail = bytes(read_at(max(size - 10, 0), min(size, 10)))
    if len(tail) < 10 or tail[4:] != FILE_MAGIC:
        raise pa.ArrowInvalid("truncated: it does not end as an Arrow file")
    (length,) = struct.unpack_from("<i", tail)
    if not 0 < length <= size - 20:
        raise pa.ArrowInvalid(f"corrupt: its footer would have {length} bytes of {size}")
    footer = bytes(read_at(size - 10 - length, length))
    try:
        blocks = list(_Table(footer, _number(footer, 0, "<I")).structs(3, "<qi4xq"))
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid("corrupt: its footer cannot be understood") from error
    found = []
    for start, _, _ in blocks[:count]:
        message = _message_at(read_at, size, start) if 0 < start < size else None
        if message is None or message.kind != MessageKind.BATCH:
            raise pa.ArrowInvalid(f"corrupt: its footer names a record batch at byte {start}, where none is")
        found.append(message)
    return found


def _number(data: bytes, at: int, form: str) -> int:
    if at < 0:
        raise IndexError(at)
    return int(struct.unpack_from(form, data, at)[0])


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - _number(data, at, "<i")

    def _place(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot >= _number(self._data, self._fields, "<H"):
            return None
        offset = _number(self._data, self._fields + slot, "<H")
        return self._at + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """A number; absent ones are 0."""
        place = self._place(field)
        return 0 if place is None else _number(self._data, place, form)

    def table(self, field: int) -> _Table | None:
        """A table inside."""
        place = self._place(field)
        return None if place is None else _Table(self._data, place + _number(self._data, place, "<I"))

    def structs(self, field: int, form: str) -> Iterator[tuple[Any, ...]]:
        """A vector of structs."""
        place = self._place(field)
        if place is None:
            return
        place += _number(self._data, place, "<I")
        for index in range(_number(self._data, place, "<I")):
            yield struct.unpack_from(form, self._data, place + 4 + index * struct.calcsize(form))
