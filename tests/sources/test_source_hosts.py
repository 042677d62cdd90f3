"""Stores as their URLs name them: hosts, what connects at once, what cannot be listed."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import fsspec
import pytest

from benchmarks.range_server import RangeServer
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.formats import load_format
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import find_files
from megascale_lightning.sources.stores.retry import RetryPolicy
from megascale_lightning.sources.stores.storage import FileInfo, Storage
from megascale_lightning.sources.survey import build_manifest


def quick(**more: Any) -> Storage:
    return Storage(name="web", retry=RetryPolicy(sleep=lambda _: None), **more)


class Hosty(fsspec.AbstractFileSystem):
    """A store whose URLs name a host, as those of sftp do."""

    protocol = "hosty"
    refusals: ClassVar[list[Exception]] = []

    def __init__(self, host: str = "", **more: Any) -> None:
        super().__init__(host=host, **more)
        if self.refusals:
            raise self.refusals.pop()
        self.host = host

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path.rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": path.partition("://")[2].partition("/")[0]}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        names = ("/x/a.jsonl", "/x/b.jsonl") if path == "/x" else (path,)
        return [{"name": name, "size": len(self.host) + 1, "type": "file"} for name in names]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        return io.BytesIO(f"{self.host}\n".encode())


class Contained(Hosty):
    """A store whose paths begin with what stands before the host, as those of abfs do."""

    protocol = "contained"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        host, _, rest = path.partition("://")[2].partition("/")
        return f"{host.partition('@')[0]}/{rest}".rstrip("/") if "://" in path else path.rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return [{"name": f"{path}/a.jsonl", "size": 1, "type": "file"}]


class TestHosts:
    """A URL says which host, account or archive its filesystem is of."""

    @pytest.fixture(autouse=True)
    def known(self):
        fsspec.register_implementation("hosty", Hosty, clobber=True)
        fsspec.register_implementation("contained", Contained, clobber=True)
        Hosty.refusals.clear()

    def test_hosts_are_not_mixed_up(self):
        storage = quick()
        files = find_files("web", ["hosty://one/x/a.jsonl", "hosty://another/x/a.jsonl"], storage)
        assert [(info.path, info.size) for info in files] == [
            ("hosty://one/x/a.jsonl", 4),
            ("hosty://another/x/a.jsonl", 8),
        ]
        assert [storage.open(info).read() for info in files] == [b"one\n", b"another\n"]
        assert storage.filesystem("hosty://one/y")[0] is quick().filesystem("hosty://one/x")[0]

    def test_what_a_pattern_matches_keeps_its_host(self):
        files = find_files("web", ["hosty://one/x/*.jsonl", "contained://box@here/x/*.jsonl"], quick())
        assert [info.path for info in files] == [
            "hosty://one/x/a.jsonl",
            "hosty://one/x/b.jsonl",
            "contained://box@here/x/a.jsonl",
        ]

    def test_a_store_that_connects_at_once_is_asked_again(self):
        Hosty.refusals += [ConnectionRefusedError(), TimeoutError()]
        assert quick().filesystem("hosty://late/x")[0].host == "late"
        Hosty.refusals += [ConnectionRefusedError()] * 5
        with pytest.raises(DataError, match=r"'web': hosty://never/x cannot be read \(5 attempts\): ConnectionRefused"):
            quick().filesystem("hosty://never/x")

    def test_what_a_store_raises_at_once_names_the_source(self):
        Hosty.refusals.append(LookupError("unknown host key"))
        with pytest.raises(DataError, match=r"'web': hosty://odd/x cannot be read: LookupError: unknown host key"):
            quick().info("hosty://odd/x")

    def test_a_missing_package_is_no_missing_index(self):
        fsspec.register_implementation("unpacked", "no_such_module.Store", errtxt="install no-such", clobber=True)
        for data in ("unpacked://b/folder", "unpacked://b/folder/index.json"):
            with pytest.raises(
                ConfigError, match=r"^source 'web': unpacked://b/fol.* needs a package .*: install no-such"
            ):
                build_manifest(Source("web", data, format="mds"))


class TestShardIndexes:
    """Whether an index lies beside a shard must not depend on a network that fails."""

    def units(self, *errors: Exception) -> list[int]:
        failing = list(errors)

        class Shards(fsspec.AbstractFileSystem):
            def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
                if failing:
                    raise failing.pop(0)
                return [{"name": "b/a.tar", "size": 9, "type": "file"}, {"name": "b/a.tar.idx", "size": 24}]

        source, files = Source("web", "b/a.tar"), [FileInfo("b/a.tar", 9, 0)]
        units = load_format("webdataset").list_units(source, files, quick(given=Shards(skip_instance_cache=True))).units
        return [int(rows) for rows in units["rows"]]

    def test_a_flake_changes_nothing(self):
        assert self.units() == self.units(ConnectionResetError(), TimeoutError()) == [2]
        with pytest.raises(DataError, match="5 attempts"):
            self.units(*[ConnectionResetError()] * 5)

    @pytest.mark.parametrize(
        "error",
        [PermissionError("no"), FileNotFoundError("b"), NotImplementedError(), OSError("AWS Error ACCESS_DENIED")],
    )
    def test_a_store_that_lists_nothing_has_no_index(self, error):
        assert self.units(error) == [-1]


def test_images_of_a_web_server_need_no_listing(tmp_path):
    pytest.importorskip("aiohttp")
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(b"not looked at")
    with RangeServer(tmp_path) as server:
        urls = [f"{server.url}/{name}.png" for name in "ab"]
        server.fault = lambda request: None if request.path.endswith(".png") else 403
        source = Source("web", urls, format="images")
        manifest = build_manifest(source)
        assert [info.path for info in manifest.files] == urls
        records = make_reader(source, manifest, None).read(0).objects
    assert [record["path"] for record in records or ()] == ["a.png", "b.png"]
