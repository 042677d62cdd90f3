"""`parse_header`: one header block of a tar archive: old, ustar and GNU; `parse_pax`: the records of a PAX header."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

__all__ = [
    "BLOCK",
    "GLOBAL",
    "LONG_LINK",
    "LONG_NAME",
    "MAGIC",
    "MAGIC_AT",
    "PAX",
    "SPARSE",
    "Header",
    "parse_header",
    "parse_pax",
]

BLOCK: Final = 512
MAGIC: Final = b"ustar"
MAGIC_AT: Final = 257

LONG_NAME, LONG_LINK, SPARSE, GLOBAL = b"L", b"K", b"S", b"g"
PAX: Final = (b"x", b"X")

_FILES: Final = (b"0", b"\0", b"7")
_WITHOUT_CONTENT: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
_GNU_MAGIC: Final = b"ustar "
_MAX_DIGITS: Final = 18
"""Of a number in PAX records; Python itself refuses some thousands."""


class Header(NamedTuple):
    """What a header block says."""

    kind: bytes
    """The type flag."""
    name: bytes
    """With all folders, at most 256 bytes: a longer name stands in front."""
    size: int
    """Bytes as written, of which a link or a folder has none."""

    @property
    def is_file(self) -> bool:
        """A file with content. Old archives tell a folder by its name alone."""
        return self.kind in _FILES and not (self.kind == b"\0" and self.name.endswith(b"/"))

    @property
    def has_content(self) -> bool:
        """Bytes follow, for files and for kinds that are not known."""
        return self.is_file or self.kind not in (*_WITHOUT_CONTENT, b"\0")


def parse_header(block: bytes) -> Header | str:
    """The header, or why it is none."""
    try:
        checksum, size = _number(block[148:156]), _number(block[124:136])
    except ValueError:
        return "invalid numbers"
    # The checksum is that of the block with its own field blank.
    if checksum != 256 + sum(block) - sum(block[148:156]) and checksum != _signed_sum(block):
        return "bad checksum"
    kind, name = block[156:157], block[:100].split(b"\0", 1)[0]
    if block[345] and not block.startswith(_GNU_MAGIC, MAGIC_AT):
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    return Header(kind, name, size)


def _signed_sum(block: bytes) -> int:
    """As some old writers add up."""
    return 256 + int(sum(struct.unpack_from("148b8x356b", block)))


def _number(field: bytes) -> int:
    if field[0] & 0x80:
        # Two's complement, less the bit that says so.
        return int.from_bytes(field[1:], "big", signed=field[0] == 0xFF)
    digits = field.split(b"\0", 1)[0].strip()
    return int(digits, 8) if digits else 0


def parse_pax(data: bytes) -> dict[bytes, bytes] | None:
    """`length key=value` lines, None where they are broken."""
    found = {}
    while data and data[:1] != b"\0":
        digits, space, _ = data.partition(b" ")
        length = int(digits) if space and digits.isdigit() and len(digits) <= _MAX_DIGITS else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or length > len(data) or data[length - 1 : length] != b"\n":
            return None
        if key == b"size" and len(value) > _MAX_DIGITS:
            return None
        found[key] = value
        data = data[length:]
    return found
