"""Tar shards in slices, and damaged ones: what lies before and behind is read, the same however it is cut."""

import gzip
import logging
import tarfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.sources.formats.webdataset import format as webdataset
from megascale_lightning.sources.formats.webdataset import walk as tarwalk
from megascale_lightning.sources.formats.webdataset.headers import parse_header
from megascale_lightning.sources.stores.storage import Storage
from tests.sources.tars import header_at, joined, keys, open_source, pairs, read_tar, slices, tar_bytes, write


class TestHeaders:
    KINDS = (
        tarfile.REGTYPE,
        tarfile.AREGTYPE,
        tarfile.CONTTYPE,
        tarfile.LNKTYPE,
        tarfile.SYMTYPE,
        tarfile.DIRTYPE,
        b"Z",
    )

    @given(
        st.text("abc./é", min_size=1, max_size=90),
        st.integers(0, 1 << 40),
        st.sampled_from(KINDS),
        st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT]),
        st.booleans(),
    )
    def test_they_are_read_as_the_standard_library_does(self, name, size, kind, tar_format, has_prefix):
        info = tarfile.TarInfo(f"{'p' * 90}/{name}" if has_prefix and tar_format == tarfile.USTAR_FORMAT else name)
        info.size, info.type, info.uid = min(size, 8 << 30) if tar_format == tarfile.USTAR_FORMAT else size, kind, 77
        info.size -= info.size == 8 << 30
        try:
            block = info.tobuf(tar_format)[-512:]
        except ValueError:
            return  # the name has no place to be cut
        expected = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        found = parse_header(block)
        assert (found.size, found.is_file) == (expected.size, expected.isreg())
        assert found.name.rstrip(b"/") == expected.name.encode("utf-8", "surrogateescape").rstrip(b"/")
        assert found.has_content == (expected.isreg() or kind == b"Z")

    def test_sums_of_signed_bytes(self):
        block = bytearray(tarfile.TarInfo("\u00ff" * 20).tobuf(tarfile.GNU_FORMAT, "latin-1"))
        signed = 256 + sum(int.from_bytes([byte], "big", signed=True) for byte in block[:148] + block[156:])
        block[148:156] = b"%06o\0 " % signed
        assert parse_header(bytes(block)).name == b"\xff" * 20
        block[0] ^= 1
        assert parse_header(bytes(block)) == "bad checksum"


class TestDamage:
    """What lies before and behind is read all the same."""

    def damaged(self, tmp_path, data):
        block = read_tar(tmp_path, data)
        assert block.num_rows == len(block.objects)
        good = [sample for sample in block.objects if sample is not None]
        assert all(len(sample) == 3 for sample in good), "no sample has lost a member"
        return keys(block), block.failures, block.raw

    @pytest.mark.parametrize("name", ["002.jpg", "002.txt"])
    def test_a_wrong_checksum_fails_the_sample_that_the_header_names(self, tmp_path, name):
        data = bytearray(tar_bytes(pairs(5)))
        at = header_at(data, name)
        data[at + 110] ^= 0xFF
        found, failures, raw = self.damaged(tmp_path, bytes(data))
        assert found == ["000", "001", None, "003", "004"]
        assert f"no tar header at byte {at}: bad checksum; goes on at byte {at + 1024}" in failures[2]
        assert raw[2] == bytes(data[at : at + 512])

    @pytest.mark.parametrize("garbage", [b"x" * 512, b"y" * 700, b"z" * 100_000, b"\0" * 512 + b"ustar" * 300])
    def test_garbage_between_samples_is_a_record_of_its_own(self, tmp_path, garbage):
        data = tar_bytes(pairs(5))
        at = header_at(data, "003.jpg")
        found, failures, _ = self.damaged(tmp_path, data[:at] + garbage + data[at:])
        assert found == ["000", "001", "002", None, "003", "004"]
        assert f"goes on at byte {at + len(garbage)}" in failures[3]

    def test_garbage_within_a_sample_fails_it(self, tmp_path):
        data = tar_bytes(pairs(5))
        at = header_at(data, "003.txt")
        found, failures, _ = self.damaged(tmp_path, data[:at] + b"x" * 1000 + data[at:])
        assert found == ["000", "001", "002", None, "004"]
        assert f"no tar header at byte {at}" in failures[3]

    def test_cut_off_in_a_member(self, tmp_path):
        data = tar_bytes(pairs(5, size=1000))
        at = header_at(data, "003.jpg")
        found, failures, raw = self.damaged(tmp_path, data[: at + 512 + 300])
        assert found == ["000", "001", "002", None]
        assert failures == {3: f"member '003.jpg' at byte {at} is cut off: 300 of its 1000 bytes are there"}
        assert raw[3] == data[at : at + 512]

    def test_cut_off_in_a_header(self, tmp_path):
        data = tar_bytes(pairs(5))
        at = header_at(data, "003.jpg")
        found, failures, _ = self.damaged(tmp_path, data[: at + 100])
        assert found == ["000", "001", "002", None]
        assert failures == {3: f"the archive ends inside a header at byte {at}"}

    def test_cut_off_between_members_is_logged(self, tmp_path, caplog):
        data = tar_bytes(pairs(5))
        with caplog.at_level(logging.WARNING):
            assert self.damaged(tmp_path, data)[0] == ["000", "001", "002", "003", "004"]
            assert not caplog.records
            found, failures, _ = self.damaged(tmp_path, data[: header_at(data, "003.jpg")])
        assert (found, failures) == (["000", "001", "002"], {})
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path / 'a.tar'} ends without the blocks of zeros that end an archive: it may be cut off"
        ]

    @pytest.mark.parametrize("is_header", [False, True])
    def test_a_member_without_its_long_name_is_none(self, tmp_path, is_header):
        """Its own header has the first 100 bytes of the name, which would make another key of it."""
        entries = [(f"{n}{'e' * 20}.{'f' * 200}.txt", b"x" * 600) for n in range(4)]
        data = bytearray(tar_bytes(entries, tarfile.PAX_FORMAT))
        at = data.index(b"path=2eee")
        data[at - 4 - (400 if is_header else 0)] ^= 0xFF
        block = read_tar(tmp_path, bytes(data))
        assert [key and key[0] for key in keys(block)] == ["0", "1", None, "3"]
        assert "no tar header at byte 5120: " in block.failures[2]
        assert "; goes on at byte 7680" in block.failures[2]

    def test_archives_behind_each_other(self, tmp_path):
        block = read_tar(tmp_path, tar_bytes(pairs(2)) + tar_bytes([("x.txt", b"")]))
        assert keys(block) == ["000", "001", "x"]

    def test_a_compressed_shard_that_is_cut_off(self, tmp_path):
        rng = np.random.default_rng(0)
        entries = [(f"{n}.bin", rng.bytes(5000)) for n in range(20)]
        path = tmp_path / "a.tar.gz"
        write(path, tar_bytes(entries))
        path.write_bytes(path.read_bytes()[:50_000])
        reader, _ = open_source(str(path))
        block = reader.read(0)
        assert 5 < block.num_rows < 20
        assert [sample["bin"] for sample in block.objects[:-1]] == [
            content for _, content in entries[: block.num_rows - 1]
        ]
        assert list(block.failures) == [block.num_rows - 1]
        assert "is cut off" in block.failures[block.num_rows - 1]
        assert "the file ends in the middle at plain byte" in block.failures[block.num_rows - 1]

    def test_a_compressed_shard_that_is_cut_off_between_members(self, tmp_path):
        data = tar_bytes(pairs(5))
        at = header_at(data, "003.jpg")
        path = tmp_path / "a.tar.gz"
        path.write_bytes(gzip.compress(data[:at]) + gzip.compress(data[at:])[:15])
        reader, _ = open_source(str(path))
        block = reader.read(0)
        assert keys(block) == ["000", "001", "002", None]
        assert f"the file ends in the middle at plain byte {at}" in block.failures[3]
        assert joined(slices(reader, 0, 1000)) == joined([block])


@st.composite
def shards(draw):
    """Content of a shard: keys that may come again, some of it broken."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12))
    entries = [
        (
            f"{'l' * draw(st.sampled_from([0, 0, 150]))}{name}.{draw(st.sampled_from(['jpg', 'txt', 'seg.png']))}",
            b"q" * draw(st.integers(0, 1500)),
        )
        for name in names
    ]
    data = bytearray(tar_bytes(entries, draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))))
    end = max(len(data.rstrip(b"\0")), 1)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, end - 1))
        if draw(st.booleans()):
            data[at : at + draw(st.integers(1, 700))] = b"#" * draw(st.integers(1, 700))
        else:
            del data[at : at + draw(st.integers(1, 1200))]
    return bytes(data)


class TestSlices:
    @settings(max_examples=60)
    @given(
        shards(),
        st.integers(1, 6000),
        st.sampled_from([".tar", ".tar.gz", ".tar.zst"]),
        st.randoms(use_true_random=False),
    )
    @pytest.mark.slow
    def test_any_slices_are_the_whole(self, tmp_path_factory, data, slice_bytes, suffix, rng):
        """Once, in order, with the same failures: broken or not, front to back or in any order."""
        path = write(tmp_path_factory.mktemp("shard") / f"a{suffix}", data)
        reader, _ = open_source(path)
        whole = joined([reader.read(0)])
        blocks = slices(reader, 0, slice_bytes)
        assert joined(blocks) == whole
        cuts = sorted(rng.randrange(len(whole[0]) + 1) for _ in range(2))
        parts = [reader.read(0, a, b) for a, b in zip([0, *cuts], [*cuts, -1], strict=True) if a != b]
        assert joined(parts) == whole
        for index in rng.choices(range(len(blocks)), k=4):
            block, is_last = reader.read_slice(0, index, slice_bytes)
            assert (joined([block]) if index == 0 else block.objects, block.row_start, is_last) == (
                joined([blocks[0]]) if index == 0 else blocks[index].objects,
                blocks[index].row_start,
                index == len(blocks) - 1,
            )
            assert block.failures == blocks[index].failures
        reader.close()

    def test_a_sample_belongs_to_the_slice_of_its_first_byte(self, tmp_path):
        reader, _ = open_source(write(tmp_path / "a.tar", tar_bytes(pairs(4))))
        assert [keys(block) for block in slices(reader, 0, 2049)] == [["000", "001"], ["002"], ["003"]]
        assert [keys(block) for block in slices(reader, 0, 2048)] == [["000"], ["001"], ["002"], ["003"]]

    def test_large_shards_are_sliced_and_small_ones_are_not(self, tmp_path, monkeypatch):
        paths = [write(tmp_path / f"{n}.tar", tar_bytes(pairs(2 + 20 * n))) for n in range(2)]
        assert not open_source(paths)[1].sliced
        monkeypatch.setattr(webdataset, "SLICED_BYTES", 20_000)
        assert not open_source(paths[:1])[1].sliced
        assert open_source(paths)[1].sliced

    def test_going_back_begins_near(self, tmp_path, monkeypatch):
        """Where samples begin is remembered: a plain shard is not walked through again."""
        path = write(tmp_path / "a.tar", tar_bytes(pairs(200)))
        passed = []
        following = tarwalk.TarWalk.next
        monkeypatch.setattr(tarwalk.TarWalk, "next", lambda self: passed.append(1) or following(self))
        reader, _ = open_source(path)
        blocks = slices(reader, 0, 10_000)
        assert len(passed) == 401
        passed.clear()
        again, _ = reader.read_slice(0, 30, 10_000)
        assert again.objects == blocks[30].objects
        assert len(passed) < 20

    def test_several_threads(self, tmp_path):
        path = write(tmp_path / "a.tar", tar_bytes(pairs(60)))
        reader, _ = open_source(path)
        whole = reader.read(0).objects
        found = {}

        def go(number):
            found[number] = joined(slices(reader, 0, 3000 + number % 2))

        threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(objects == whole and not failures for objects, failures, _ in found.values())
        assert len(found) == 4

    def test_few_files_stay_open(self, tmp_path):
        paths = [write(tmp_path / f"{n}.tar", tar_bytes(pairs(3))) for n in range(8)]
        reader, manifest = open_source(paths)
        for unit in range(manifest.num_units):
            reader.read_slice(unit, 0, 1000)
        assert reader._cursors.num_open == 4
        reader.close()
        assert reader._cursors.num_open == 0


class TestRemote:
    @pytest.fixture
    def url(self):
        import fsspec

        fs = fsspec.filesystem("memory")
        fs.pipe("/shards/a.tar", tar_bytes(pairs(60, size=300_000)))
        yield "memory://shards/a.tar"
        fs.rm("/shards", recursive=True)

    @pytest.mark.parametrize("columns", [None, ["txt"]])
    def test_no_request_for_each_member(self, url, monkeypatch, columns):
        requests = []
        fetch = Storage._fetch
        monkeypatch.setattr(Storage, "_fetch", lambda *given: requests.append(given[-2:]) or fetch(*given))
        reader, _ = open_source(url, columns)
        assert [sample["txt"] for sample in reader.read(0).objects] == [f"t{n}" for n in range(60)]
        assert len(requests) < 25
        assert sum(stop - start for start, stop in requests) < 19_000_000

    def test_an_index_beside_a_remote_shard(self, url):
        import fsspec

        data = tar_bytes(pairs(60, size=300_000))
        offsets = [header_at(data, f"{n:03}.jpg") for n in range(60)] + [len(data.rstrip(b"\0"))]
        fsspec.filesystem("memory").pipe("/shards/a.tar.idx", np.array(offsets, "<i8").tobytes())
        reader, manifest = open_source(url)
        assert manifest.num_records == 60
        assert keys(reader.read(0, 50, 52)) == ["050", "051"]
