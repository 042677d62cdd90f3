"""File lists: patterns, braces and lists of them; what they name, and what they refuse."""

import glob
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megascale_lightning.errors import ConfigError, DataError, EmptySourceError, MegaScaleWarning
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.sources.formats import find_file_format
from megascale_lightning.sources.stores.files import expand_braces, find_files
from megascale_lightning.sources.stores.storage import Storage


def names(infos):
    return [os.path.basename(info.path) for info in infos]


@pytest.fixture
def shards(tmp_path):
    for name in ("s-000", "s-001", "s-002", "t-0"):
        (tmp_path / f"{name}.jsonl").write_text('{"input_ids": [1, 2]}\n')
    return tmp_path


def test_braces_are_written_out_in_order():
    assert expand_braces("{000..002}") == ["000", "001", "002"]
    assert expand_braces("{8..11}") == ["8", "9", "10", "11"]
    assert expand_braces("a{x,y{1,2}}b") == ["axb", "ay1b", "ay2b"]
    assert expand_braces("plain{x}") == ["plain{x}"]
    assert len(expand_braces("{000..127}.tar")) == 128


@pytest.mark.parametrize("kind", ["jsonl", "images", "megatron", "webdataset"])
def test_a_list_holds_nothing_but_paths(tmp_path, kind):
    with pytest.raises(ConfigError, match="'s': a file list holds paths, patterns and lists of these, not int"):
        build_manifest(Source("s", [5, str(tmp_path)], format=kind))


def test_globs_lists_and_braces_give_each_file_once_in_list_order(shards):
    assert names(find_files("s", str(shards / "s-*.jsonl"))) == ["s-000.jsonl", "s-001.jsonl", "s-002.jsonl"]
    assert names(find_files("s", shards / "s-{001..002}.jsonl")) == ["s-001.jsonl", "s-002.jsonl"]
    nested = [str(shards / "t-*"), [str(shards / "s-{000,001}.jsonl"), str(shards / "*.jsonl")]]
    assert names(find_files("s", nested)) == ["t-0.jsonl", "s-000.jsonl", "s-001.jsonl", "s-002.jsonl"]


def test_what_matches_nothing_is_named(shards):
    with pytest.raises(ConfigError, match=r"source 'web'.*s-003\.jsonl.*pattern"):
        find_files("web", str(shards / "s-{002..003}.jsonl"))
    with pytest.raises(ConfigError, match="is a directory"):
        find_files("web", str(shards))
    with pytest.raises(ConfigError, match="names no file"):
        find_files("web", [])


def test_a_url_is_read_through_fsspec():
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.pipe("/urls/a.jsonl", b'{"input_ids": [1]}\n')
    fs.pipe("/urls/b.jsonl", b'{"input_ids": [2]}\n')
    manifest = build_manifest(Source("m", "memory://urls/*.jsonl"))
    assert [info.size for info in manifest.files] == [19, 19]
    with Storage().open(manifest.files[1]) as stream:
        assert b"[2]" in stream.read()
    with pytest.raises(ConfigError, match="no file matches"):
        find_files("m", "memory://urls/none-*.jsonl")


def test_storage_options_without_use_are_announced(shards):
    fsspec = pytest.importorskip("fsspec")
    local = str(shards / "t-0.jsonl")
    for data, filesystem, why in (
        (local, None, "its data name no URL"),
        ([{"input_ids": [1]}], None, "its data name no URL"),
        (local, fsspec.filesystem("file"), "filesystem= reads the files"),
    ):
        source = Source("s", data, storage_options={"anon": True}, filesystem=filesystem)
        with pytest.warns(MegaScaleWarning, match=f"'s': storage_options are ignored, since {why}"):
            build_manifest(source)
    assert build_manifest(Source("s", [local, f"file://{local}"], storage_options={"auto_mkdir": False})).files


def test_a_changed_file_is_refused(shards):
    info = find_files("s", str(shards / "t-0.jsonl"))[0]
    (shards / "t-0.jsonl").write_text("longer than before, by far\n")
    with pytest.raises(DataError, match="had 22 when the run began"):
        Storage().open(info)


def test_manifest_digest_follows_content_not_place(shards, tmp_path_factory):
    first = build_manifest(Source("s", str(shards / "s-*.jsonl")))
    other = tmp_path_factory.mktemp("moved")
    for info in first.files:
        (other / os.path.basename(info.path)).write_bytes(Path(info.path).read_bytes())
    content, _, written = build_manifest(Source("s", str(other / "*.jsonl"))).digest().partition("-")
    assert content == first.digest().split("-")[0]
    assert written != first.digest().split("-")[1], "copies are written later"
    assert build_manifest(Source("s", str(shards / "*.jsonl"))).digest().split("-")[0] != content
    again = pickle.loads(pickle.dumps(first))
    assert again.digest() == first.digest()
    assert np.array_equal(again.units, first.units)


def test_unknown_formats_and_empty_sources_are_errors(tmp_path):
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(ConfigError, match="format"):
        build_manifest(Source("s", str(tmp_path / "a.csv")))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(EmptySourceError, match="'s'"):
        build_manifest(Source("s", str(tmp_path / "a.jsonl")))


def test_a_file_with_braces_in_its_name_is_itself(tmp_path: Path) -> None:
    folder = tmp_path / "{a,b}"
    folder.mkdir()
    (folder / "x.jsonl").write_text("{}\n")
    assert names(find_files("s", str(folder / "x.jsonl"))) == ["x.jsonl"]


def test_files_of_several_formats_are_not_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl.gz").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"source 's': .*a\.txt is text and .*b\.jsonl\.gz is jsonl; .*format="):
        build_manifest(Source("s", str(tmp_path / "*")))
    assert build_manifest(Source("s", [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl.gz")], format="text")).files
    (tmp_path / "b.jsonl.gz").rename(tmp_path / "z_LICENSE")
    assert build_manifest(Source("s", str(tmp_path / "*"))).format == "text"


def test_files_that_belong_to_others_do_not_tell_the_format() -> None:
    source = Source("s", "*")
    assert find_file_format(source, ["a.jpg", "a.txt", "metadata.jsonl"]) == "images"
    assert find_file_format(source, ["a.tar", "a.tar.idx"]) == "webdataset"
    with pytest.raises(ConfigError, match=r"a\.tar is webdataset and b\.txt is text"):
        find_file_format(source, ["a.tar", "b.txt"])


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "**", "a/**/**/x.jsonl", "**/b/**/*", "?/**/*.jsonl", "**/*/c/*"])
def test_two_stars_are_folders_at_any_depth_as_python_has_them(tmp_path: Path, pattern: str) -> None:
    for folder in ("a/b/c", "a/.hidden", "d", "a/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.jsonl").write_text("{}\n")
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "d")
    (tmp_path / "top.jsonl").write_text("{}\n")
    pattern = str(tmp_path / pattern)
    assert [info.path for info in find_files("s", pattern)] == sorted(
        {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
    )


@pytest.mark.watchdog(20)
def test_two_stars_do_not_follow_a_link_back_up(tmp_path: Path) -> None:
    """Two links in a folder: python's glob would list its file 2^40 times."""
    folder, other = tmp_path / "a", tmp_path / "b"
    for made in (folder, other):
        made.mkdir()
        (made / "x.jsonl").write_text("{}\n")
    (folder / "me").symlink_to(".")
    (folder / "up").symlink_to("..")
    (folder / "other").symlink_to(other)
    (other / "back").symlink_to(folder)
    found = [info.path for info in find_files("s", str(folder / "**" / "*.jsonl"))]
    assert found == [str(folder / "other" / "x.jsonl"), str(folder / "x.jsonl")]


def test_a_name_that_is_a_pattern_is_the_file_unless_the_pattern_matches_another(tmp_path: Path) -> None:
    (tmp_path / "*.jsonl").write_text("{}\n")
    assert names(find_files("s", str(tmp_path / "*.jsonl"))) == ["*.jsonl"]
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"'s': .*\*\.jsonl is a file, and a pattern .*b\.jsonl: write .*/\[\*\]\.js"):
        find_files("s", str(tmp_path / "*.jsonl"))
    assert names(find_files("s", str(tmp_path / "[*].jsonl"))) == ["*.jsonl"]
    (tmp_path / "a[1].jsonl").write_text("{}\n")
    assert names(find_files("s", str(tmp_path / "a[1].jsonl"))) == ["a[1].jsonl"]
