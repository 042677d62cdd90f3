"""Archives that tests write, and what is read of them."""

import io
import tarfile

import pyarrow as pa

from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.stores.plaintext import codec_of


def tar_bytes(entries, tar_format=tarfile.USTAR_FORMAT, **settings):
    """An archive of (name, content) pairs or whole `TarInfo`s, in memory."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tar_format, **settings) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            archive.addfile(info, io.BytesIO(entry[1]))
    return sink.getvalue()


def write(path, data):
    """Write plain bytes to a file, compressed as its name says; gives its path."""
    codec = codec_of(str(path))
    if codec is not None:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(data)
        data = sink.getvalue().to_pybytes()
    path.write_bytes(data)
    return str(path)


def open_source(data, columns=None, **settings):
    """(reader, manifest) of a source."""
    source = Source("s", data, **settings)
    manifest = build_manifest(source)
    return make_reader(source, manifest, columns), manifest


def slices(reader, unit, slice_bytes):
    """All slices of a unit, one after the other."""
    found, is_last = [], False
    while not is_last:
        block, is_last = reader.read_slice(unit, len(found), slice_bytes)
        found.append(block)
    return found


def joined(blocks):
    """(objects, failures, raw) of consecutive blocks as if they were one."""
    objects, failures, raw = [], {}, {}
    for block in blocks:
        assert block.row_start == len(objects)
        failures |= {block.row_start + index: text for index, text in block.failures.items()}
        raw |= {block.row_start + index: data for index, data in block.raw.items()}
        objects += block.objects
    return objects, failures, raw


def keys(block):
    """Keys of the records of a block; None for those that failed."""
    return [None if sample is None else sample["__key__"] for sample in block.objects]


def pairs(count, size=40):
    """Entries of `count` samples of a picture and a text."""
    return [
        entry for n in range(count) for entry in ((f"{n:03}.jpg", bytes([n % 256]) * size), (f"{n:03}.txt", b"t%d" % n))
    ]


def read_tar(tmp_path, data, columns=None, **settings):
    """The whole block of one shard with this content."""
    reader, _ = open_source(write(tmp_path / "a.tar", data), columns, **settings)
    return reader.read(0)


def header_at(data, name):
    """First byte of the header of a member."""
    return data.index(name.encode() + b"\0")
