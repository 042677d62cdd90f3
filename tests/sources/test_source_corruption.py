"""What libraries raise on bytes that are broken for good, told from what a disk, a store or its permissions say."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import CorruptDataError, DataError
from megascale_lightning.sources.stores.corruption import is_corruption, reading_error
from megascale_lightning.sources.stores.secrets import remember_secrets

NOISE = np.random.default_rng(0).bytes(50_000)


def parquet(**settings: Any) -> bytearray:
    buffer = io.BytesIO()
    ids = np.random.default_rng(0).integers(0, 50_000, (1000, 20)).tolist()
    pq.write_table(pa.table({"input_ids": ids}), buffer, **settings)
    return bytearray(buffer.getvalue())


def read_parquet(content: bytes, **settings: Any) -> Any:
    return pq.ParquetFile(io.BytesIO(content), **settings).read(use_threads=False)


def spoiled(content: bytearray, at: int, count: int = 40) -> bytes:
    content[at : at + count] = b"\xff" * count
    return bytes(content)


def decompress(content: bytes, codec: Any) -> bytes:
    with pa.CompressedInputStream(io.BytesIO(content), codec) as plain:
        return bytes(plain.read())


def zipped(flip: int) -> bytes:
    content = bytearray(gzip.compress(NOISE))
    content[flip] ^= 0xFF
    return bytes(content)


BROKEN: dict[str, Callable[[], Any]] = {
    "empty": lambda: read_parquet(b""),
    "no Parquet": lambda: read_parquet(b"this is no Parquet file" * 10),
    "without footer": lambda: read_parquet(bytes(parquet()[:-20])),
    "page header": lambda: read_parquet(spoiled(parquet(), 4)),
    "snappy page": lambda: read_parquet(spoiled(parquet(compression="snappy"), 9000, 300)),
    "zstd page": lambda: read_parquet(
        spoiled(content := parquet(compression="zstd"), content.find(b"\x28\xb5\x2f\xfd"))
    ),
    "gzip page": lambda: read_parquet(spoiled(parquet(compression="gzip"), 9000, 300)),
    "checksum": lambda: read_parquet(
        spoiled(parquet(compression="none", use_dictionary=False, write_page_checksum=True), 600, 3),
        page_checksum_verification=True,
    ),
    "gz cut short": lambda: decompress(gzip.compress(NOISE)[:-9000], "gzip"),
    "gz no header": lambda: decompress(b"hello world" * 10, "gzip"),
    "gz flipped": lambda: decompress(zipped(-3), "gzip"),
    "zst cut short": lambda: decompress(pa.compress(NOISE, "zstd", asbytes=True)[:-9000], "zstd"),
    "zst no header": lambda: decompress(b"hello world" * 10, "zstd"),
    "bz2 cut short": lambda: decompress(bz2.compress(NOISE)[:-9000], "bz2"),
    "bz2 no header": lambda: decompress(b"hello world" * 10, "bz2"),
    "lz4 no header": lambda: decompress(b"hello world" * 10, "lz4"),
    "gzip module": lambda: gzip.decompress(b"hello"),
    "gzip module cut short": lambda: gzip.decompress(gzip.compress(NOISE)[:-9000]),
    "bz2 module": lambda: bz2.decompress(b"hello"),
    "zlib module": lambda: zlib.decompress(b"hello"),
    "tar": lambda: tarfile.TarInfo.frombuf(b"hello" * 200, "utf-8", "strict"),
    "Arrow": lambda: pa.ipc.open_file(b"hello").read_all(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_are_broken(name: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any library's
        BROKEN[name]()
    assert is_corruption(caught.value), repr(caught.value)
    assert type(reading_error("source 'web': a.bin", caught.value)) is CorruptDataError


class BrokenStream(io.BytesIO):
    """Its disk gives up."""

    def __init__(self, error: Exception) -> None:
        super().__init__(bytes(parquet()))
        self.error = error

    def read(self, *_: Any) -> bytes:
        raise self.error


class RequestsError(OSError):
    """As `requests.ConnectionError`: an `OSError` without a number."""


ELSEWHERE: dict[str, Exception] = {
    "disk": OSError(errno.EIO, "Input/output error, data may be corrupt"),
    "gone": FileNotFoundError(errno.ENOENT, "No such file: truncated.parquet"),
    "permission": PermissionError(errno.EACCES, "corrupt.parquet"),
    "network": ConnectionResetError(errno.ECONNRESET, "reset"),
    "requests": RequestsError("Unexpected end of stream"),
    "timeout": TimeoutError("checksum"),
    "AWS": OSError("When reading key 'a' in bucket 'b': AWS Error NETWORK_CONNECTION during GetObject: checksum"),
    "text": OSError("the server says no"),
    "code": TypeError("truncated"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_not_the_fault_of_the_bytes(name: str) -> None:
    """However it is worded, and through Arrow too."""
    for raised in (ELSEWHERE[name], raised_through_arrow(ELSEWHERE[name])):
        assert not is_corruption(raised), repr(raised)
    assert type(reading_error("source 'web': a.bin", ELSEWHERE[name])) is DataError


def raised_through_arrow(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        pq.ParquetFile(BrokenStream(error))
    return caught.value


def test_a_local_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone") as caught:
        pq.ParquetFile(tmp_path / "gone-truncated.parquet")
    assert not is_corruption(caught.value)


def test_the_message_holds_no_secret() -> None:
    remember_secrets({"secret": "opensesame-77"})
    error = reading_error("source 'web': a.bin", OSError("opensesame-77 is refused"))
    assert str(error) == "source 'web': a.bin cannot be read: *** is refused"
