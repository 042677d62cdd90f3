"""Credentials of stores: they open the door, and are seen nowhere; runs with actors are in tests/acceptance."""

from __future__ import annotations

import json
import logging
from typing import Any

import fsspec
import pyarrow.fs
import pytest

from benchmarks.range_server import RangeServer
from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources.reader import make_reader
from megascale_lightning.sources.source import Source
from megascale_lightning.sources.stores.files import find_files
from megascale_lightning.sources.stores.retry import RetryPolicy
from megascale_lightning.sources.stores.secrets import MASK, strip_signature
from megascale_lightning.sources.stores.storage import Storage
from megascale_lightning.sources.survey import build_manifest

pytest.importorskip("aiohttp")

SECRET = "s3cr3t-pa55phrase"
SIGNED = "X-Amz-Algorithm=AWS4&X-Amz-Credential=AKIA%2F20260101%2Fs3&X-Amz-Signature=5ign4ture"


@pytest.fixture
def server(tmp_path):
    (tmp_path / "web").mkdir()
    with RangeServer(tmp_path / "web") as running:
        yield running


def quick(**more: Any) -> Storage:
    return Storage(name="web", retry=RetryPolicy(sleep=lambda _: None), **more)


def write(server: RangeServer, name: str, data: bytes) -> str:
    (server.folder / name).write_bytes(data)
    return f"{server.url}/{name}"


class TestCredentials:
    """They open the door, and are seen nowhere."""

    def options(self) -> list[tuple[dict[str, Any], dict[str, str]]]:
        basic, bearer = RangeServer.basic("reader", SECRET), f"Bearer {SECRET}"
        return [
            ({"headers": {"Authorization": bearer}}, {}),
            ({"headers": {"Authorization": "env:STORE_AUTH"}}, {"STORE_AUTH": bearer}),
            ({"client_kwargs": {"headers": {"Authorization": basic}}}, {}),
            ({"client_kwargs": {"headers": {"Authorization": "env:STORE_AUTH"}}}, {"STORE_AUTH": basic}),
        ]

    @pytest.mark.parametrize("number", range(4))
    def test_given_literally_or_by_a_variable(self, server, monkeypatch, caplog, number):
        caplog.set_level(logging.DEBUG)
        options, variables = self.options()[number]
        url = write(server, "a.jsonl", b'{"input_ids": [1]}\n')
        server.authorizations = frozenset({RangeServer.basic("reader", SECRET), f"Bearer {SECRET}"})
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        source = Source("web", url, storage_options=options)
        manifest = build_manifest(source)
        assert make_reader(source, manifest, None).read(0).num_rows == 1
        config = LoaderConfig(sources=[source], rows=PackedRows(8, 1), runtime="local")
        server.authorizations = frozenset({"Bearer another"})
        with pytest.raises(DataError, match="403") as caught:
            build_manifest(source)
        told = [repr(source), repr(config), repr(Storage.of(source)), repr(caught.value), caplog.text, repr(manifest)]
        for secret in (SECRET, RangeServer.basic("reader", SECRET).split()[1]):
            assert not [text for text in told if secret in text]

    def test_a_variable_that_is_not_set_is_named(self, server):
        source = Source("web", f"{server.url}/a", storage_options={"headers": {"Authorization": "env:NOT_THERE"}})
        with pytest.raises(ConfigError, match=r"'web': storage_options\['headers'\]\['Authorization'\].*'NOT_THERE'"):
            find_files("web", source.data, Storage.of(source))

    @pytest.mark.filterwarnings("ignore:source 'web'.* storage_options are ignored")
    def test_variables_that_are_missing_are_named_before_anything_starts(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}\n')
        source = Source("web", str(tmp_path / "a.jsonl"), storage_options={"key": "env:NOT_THERE"})
        rows = PackedRows(8, 1)
        with pytest.raises(ConfigError, match=r"NOT_SET \(named by env\), NOT_THERE \(named by source 'web'"):
            MegaScaleLoader(LoaderConfig(sources=[source], rows=rows, env=["NOT_SET"], runtime="local"))

    def test_a_masked_value_is_refused(self, server):
        source = Source("web", f"{server.url}/a", storage_options={"key": MASK})
        with pytest.raises(ConfigError, match=r"storage_options\['key'\] is masked.*env:NAME"):
            find_files("web", source.data, Storage.of(source))

    @pytest.mark.parametrize(
        "data", ["https://me:pw@host/a.parquet", ["a", ["s3://k:s@bucket/a"]], "{https://me:pw@h/a,b}"]
    )
    def test_passwords_in_urls_are_refused(self, data):
        with pytest.raises(ConfigError, match=r"user name and a password.*storage_options") as caught:
            Source("web", data)
        assert "pw" not in str(caught.value).replace("password", "")
        Source("web", "abfs://container@account.dfs.core.windows.net/a.parquet")
        with pytest.raises(ConfigError, match="user name"):
            Source("web", "s3://b/a", storage_options={"client_kwargs": {"proxy": "http://me:pw@proxy:80"}})

    def test_signatures_are_used_and_not_shown(self, server, caplog):
        caplog.set_level(logging.DEBUG)
        url = write(server, "a.jsonl", b'{"input_ids": [1]}\n') + f"?{SIGNED}&version=2"
        server.fault = lambda request: None if SIGNED in request.path else 403
        source = Source("web", url, format="jsonl")
        manifest = build_manifest(source)
        assert manifest.files[0].path == f"{server.url}/a.jsonl?version=2"
        assert make_reader(source, manifest, None).read(0).num_rows == 1
        later = Source("web", url.replace("5ign4ture", "0ther"), format="jsonl")
        assert later != source
        server.fault = lambda _: 403
        with pytest.raises(DataError) as caught:
            make_reader(source, manifest, None).read(0)
        for text in (repr(source), repr(caught.value), caplog.text):
            assert "5ign4ture" not in text
            assert "AKIA" not in text

    @pytest.mark.parametrize(
        ("url", "left"),
        [
            ("https://h/a.parquet", "https://h/a.parquet"),
            (f"https://h/a.parquet?{SIGNED}", "https://h/a.parquet"),
            ("https://h/a?sv=2020&st=x&se=y&sp=r&sig=abc%3D", "https://h/a"),
            ("https://h/a?GoogleAccessId=me&Expires=1&Signature=x&part=3", "https://h/a?part=3"),
            ("https://h/a?part=3&q=a%20b", "https://h/a?part=3&q=a%20b"),
            ("/data/what?token=.jsonl", "/data/what?token=.jsonl"),
        ],
    )
    def test_what_signs_a_url(self, url, left):
        assert strip_signature(url) == left

    def test_urls_that_only_a_signature_tells_apart_are_refused(self, server):
        write(server, "get.jsonl", b'{"input_ids": [1]}\n')
        url = f"{server.url}/get.jsonl"
        for data in ([f"{url}?key=aaaa-4711", f"{url}?key=bbbb-4711"], f"{url}?key={{aaaa,bbbb}}-4711"):
            source = Source("web", data)
            with pytest.raises(
                ConfigError, match=r"'web': its data name .*get\.jsonl more than once, .*'key'"
            ) as caught:
                build_manifest(source)
            assert "4711" not in str(caught.value)
        with pytest.raises(ConfigError, match="'token'"):
            build_manifest(Source("web", [url, f"{url}?token=aaaa-4711"]))
        told = Source("web", [f"{url}?part={part}&key=aaaa" for part in (1, 2)], format="jsonl")
        assert len(build_manifest(told).files) == 2
        assert len(build_manifest(Source("web", [f"{url}?key=aaaa"] * 2, format="jsonl")).files) == 1

    def test_chained_urls_are_refused(self):
        for data in ("zip://a.jsonl::s3://b/x.zip", ["a", "simplecache::http://[::1]:80/a.jsonl"]):
            with pytest.raises(ConfigError, match=r"'web': chained URLs \('::'\) are not read: .*filesystem="):
                Source("web", data)
        Source("web", ["http://[::1]:80/a.jsonl", "a::b.jsonl"])
        Source("web", "x://a::b.jsonl", filesystem=fsspec.filesystem("memory"))

    def test_a_filesystem_that_does_not_travel_is_named(self):
        class Local(fsspec.AbstractFileSystem):
            def __reduce__(self):
                raise TypeError("holds a connection")

        source = Source("web", "a.jsonl", filesystem=Local())
        with pytest.raises(
            ConfigError, match=r"'web': its filesystem, a Local, does not pickle \(holds a connection\)"
        ):
            LoaderConfig(sources=[source], rows=PackedRows(8, 1))
        LoaderConfig(sources=[source], rows=PackedRows(8, 1), runtime="local")
        with pytest.raises(
            ConfigError, match=r"filesystem must be a filesystem of fsspec or pyarrow, or None, not a str"
        ):
            Source("web", "a.jsonl", filesystem="s3")

    def test_a_filesystems_own_credentials_are_masked(self):
        fs = pyarrow.fs.S3FileSystem(access_key="AKIAXYZ", secret_key=SECRET, region="eu-x", endpoint_override="h:1")
        storage = Storage(given=fs, name="web", retry=RetryPolicy(sleep=lambda _: None))
        storage.filesystem("bucket/a")

        def refuse() -> None:
            raise PermissionError(f"h:1 eu-x refuses AKIAXYZ {SECRET}")

        with pytest.raises(DataError, match=r"h:1 eu-x refuses \*\*\* \*\*\*"):
            storage.attempt_at("bucket/a", refuse)

    def test_settings_say_what_is_wrong(self):
        sources = [Source("web", "a.jsonl")]
        for wrong in ("NAME", {"A": "secret"}, ["A=secret"]):
            with pytest.raises(ConfigError, match="env must be a list of names") as caught:
                LoaderConfig(sources=sources, rows=PackedRows(8, 1), env=wrong)  # type: ignore[arg-type]
            assert "secret" not in str(caught.value)
        with pytest.raises(ConfigError, match="cache_dir must be a folder"):
            LoaderConfig(sources=sources, rows=PackedRows(8, 1), cache_dir="s3://b/c")
        given = json.loads('{"data": "a", "storage_options": {"key": "s3cr3t"}}')
        with pytest.raises(ConfigError) as caught:
            LoaderConfig(sources=[given], rows=PackedRows(8, 1))
        assert "s3cr3t" not in str(caught.value)
