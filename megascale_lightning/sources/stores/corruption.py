"""`reading_error`: tells bytes that are broken for good from what may be read at another time."""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from typing import Final

import pyarrow as pa

from megascale_lightning.errors import CorruptDataError, DataError
from megascale_lightning.sources.stores.secrets import redact

__all__ = ["is_corruption", "reading_error"]

_KINDS: Final = (
    CorruptDataError,
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
    tarfile.TarError,
    pa.ArrowInvalid,
    pa.ArrowSerializationError,
)

_BROKEN: Final = re.compile(
    r"thrift|unexpected end of|truncated|compress|codec|inflate|corrupt|checksum|\bcrc\b|magic|invalid data",
    re.IGNORECASE,
)
"""Libraries say so in an `OSError` without a number; a filesystem's own errors have one, or a class of their own."""


def is_corruption(error: BaseException) -> bool:
    """Whether reading the same bytes again is bound to fail the same way."""
    if type(error) is OSError:
        return error.errno is None and "AWS Error" not in str(error) and bool(_BROKEN.search(str(error)))
    return isinstance(error, _KINDS)


def reading_error(what: str, error: BaseException) -> DataError:
    """What a reader raises, from `error`: `CorruptDataError` where the stored bytes are at fault, else `DataError`.

    Args:
        what: The beginning of the message: source, file and unit.
        error: What the library raised in the end.
    """
    kind = CorruptDataError if is_corruption(error) else DataError
    return kind(redact(f"{what} cannot be read: {error}"))
