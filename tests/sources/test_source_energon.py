"""Folders that Megatron-Energon prepared: splits, counts, fields, exclusions, the index of a shard."""

import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, Source
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources import build_manifest
from megascale_lightning.sources.formats.webdataset import format as webdataset
from megascale_lightning.sources.formats.webdataset import walk as tarwalk
from tests.sources.tars import keys, open_source, tar_bytes, write

GOLDEN = Path(__file__).parents[1] / "golden" / "energon"


@pytest.fixture
def folder(tmp_path):
    """A copy that may be changed."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "energon"))


def meta(folder, name, change):
    """Edit one of the descriptions."""
    path = folder / ".nv-meta" / name
    text = path.read_text()
    changed = change(text)
    assert changed != text
    path.write_text(changed)


def samples(data, columns=None, **settings):
    reader, manifest = open_source(str(data), columns, **settings)
    blocks = [reader.read(unit) for unit in range(manifest.num_units)]
    assert not any(block.failures for block in blocks)
    return [sample for block in blocks for sample in block.objects]


def test_the_folder_tells_its_format_shards_counts_and_fields():
    _, manifest = open_source(str(GOLDEN))
    assert (manifest.format, manifest.sliced) == ("webdataset", False)
    assert manifest.units["rows"].tolist() == [3, 2]
    assert [Path(info.path).name for info in manifest.files] == [
        "train_0.tar",
        "train_1.tar",
        ".info.json",
        "split.yaml",
        "dataset.yaml",
    ]
    found = samples(GOLDEN)
    assert [sample["__key__"] for sample in found] == [f"sample_{n:03}" for n in range(5)]
    assert [sample["caption"] for sample in found] == [f"text {n}" for n in range(5)]
    assert all(sorted(sample) == ["__key__", "caption", "image"] for sample in found)
    assert all(sample["image"].startswith(b"\x89PNG") for sample in found)


def test_any_rows_of_a_shard():
    reader, _ = open_source(str(GOLDEN))
    whole = reader.read(0).objects
    for start in range(4):
        for stop in range(start, 4):
            block = reader.read(0, start, stop)
            assert (block.row_start, list(block.objects)) == (start, whole[start:stop])


def test_another_split_and_all_members():
    found = samples(GOLDEN, format_options={"split": "val", "fields": None})
    assert [sample["txt"] for sample in found] == ["caption 5 é", "caption 6 é"]
    assert sorted(found[0]) == ["__key__", "cls", "json", "png", "txt"]
    with pytest.raises(ConfigError, match=r"no split 'test'; set format_options=.*'train', 'val'"):
        samples(GOLDEN, format_options={"split": "test"})


def test_own_fields_go_before_those_of_the_folder():
    found = samples(GOLDEN, format_options={"fields": {"label": "cls"}})
    assert [sample["label"] for sample in found] == [0, 1, 0, 1, 0]


def test_only_what_is_needed_is_read(monkeypatch):
    contents = []
    content = tarwalk.TarWalk.content
    monkeypatch.setattr(tarwalk.TarWalk, "content", lambda self: contents.append(content(self)) or contents[-1])
    assert samples(GOLDEN, ["caption"])[3] == {"__key__": "sample_003", "caption": "text 3"}
    assert [json.loads(one)["n"] for one in contents] == list(range(5))


def test_a_row_is_found_without_walking(monkeypatch):
    passed = []
    following = tarwalk.TarWalk.next
    monkeypatch.setattr(tarwalk.TarWalk, "next", lambda self: passed.append(1) or following(self))
    reader, _ = open_source(str(GOLDEN))
    assert keys(reader.read(0, 2, 3)) == ["sample_002"]
    assert len(passed) == 5, "four members and the end of the sample"


def test_large_shards_with_an_index_are_cut_by_rows(monkeypatch):
    monkeypatch.setattr(webdataset, "SLICED_BYTES", 1000)
    _, manifest = open_source(str(GOLDEN))
    assert not manifest.sliced


def test_a_remote_folder():
    import fsspec

    fs = fsspec.filesystem("memory")
    for path in sorted(GOLDEN.rglob("*")):
        if path.is_file():
            fs.pipe(f"/data.v1/{path.relative_to(GOLDEN).as_posix()}", path.read_bytes())
    try:
        assert samples("memory://data.v1/") == samples(GOLDEN)
        _, manifest = open_source("memory://data.v1")
        assert manifest.num_records == 5
    finally:
        fs.rm("/data.v1", recursive=True)


def test_an_index_serves_without_a_prepared_folder():
    reader, manifest = open_source(str(GOLDEN / "parts" / "train_*.tar"))
    assert manifest.num_records == 5
    assert sorted(reader.read(1).objects[0]) == ["__key__", "cls", "json", "png", "txt"]


def test_shards_in_part_without_an_index(folder, monkeypatch):
    (folder / "parts" / "train_1.tar.idx").unlink()
    _, manifest = open_source(str(folder))
    assert manifest.units["rows"].tolist() == [3, -1]
    assert len(samples(folder)) == 5
    monkeypatch.setattr(webdataset, "SLICED_BYTES", 1000)
    _, manifest = open_source(str(folder))
    assert (manifest.sliced, manifest.units["rows"].tolist()) == (True, [-1, -1])


def test_older_descriptions_in_yaml(folder):
    counts = json.loads((folder / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    (folder / ".nv-meta" / ".info.json").unlink()
    (folder / ".nv-meta" / ".info.yaml").write_text(
        "shard_counts:\n" + "".join(f"  {name}: {count}\n" for name, count in counts.items())
    )
    split = {"split_parts": {"train": ["parts/train_{0..1}.tar"]}, "exclude": []}
    (folder / ".nv-meta" / "split.yaml").unlink()
    (folder / ".nv-meta" / "split.json").write_text(json.dumps(split))
    (folder / ".nv-meta" / "dataset.yaml").unlink()
    found = samples(folder)
    assert [sample["cls"] for sample in found] == [0, 1, 0, 1, 0]


def test_code_that_makes_samples_is_not_run(folder):
    (folder / ".nv-meta" / "dataset.yaml").write_text("sample_loader: loader.py:load\npart_filter: loader.py:parts\n")
    assert sorted(samples(folder)[0]) == ["__key__", "cls", "json", "png", "txt"]


def test_excluded_shards_and_samples(folder, monkeypatch):
    exclude = "exclude:\n- parts/train_1.tar\n- parts/train_0.tar/sample_{001..001}"
    meta(folder, "split.yaml", lambda text: text.replace("exclude: []", exclude))
    assert [sample["__key__"] for sample in samples(folder)] == ["sample_000", "sample_002"]
    monkeypatch.setattr(webdataset, "SLICED_BYTES", 1000)
    reader, manifest = open_source(str(folder))
    assert manifest.sliced
    found = [reader.read_slice(0, index, 5000)[0] for index in range(4)]
    assert [(block.row_start, keys(block)) for block in found][:3] == [
        (0, ["sample_000"]),
        (1, ["sample_002"]),
        (2, []),
    ]


class TestWhatDoesNotFit:
    def test_counts(self, folder):
        meta(folder, ".info.json", lambda text: text.replace('train_1.tar": 2', 'train_1.tar": 4'))
        with pytest.raises(DataError, match=r"has 2 samples by .*train_1\.tar\.idx and 4 by \.nv-meta; prepare"):
            build_manifest(Source("s", str(folder)))

    def test_a_missing_shard(self, folder):
        (folder / "parts" / "train_1.tar").unlink()
        with pytest.raises(DataError, match=r"source 's': .*train_1\.tar is missing, which .*split\.yaml names"):
            build_manifest(Source("s", str(folder)))

    def test_broken_descriptions(self, folder):
        meta(folder, "split.yaml", lambda text: text + "\n: [")
        with pytest.raises(DataError, match=r"source 's': .*split\.yaml cannot be read"):
            build_manifest(Source("s", str(folder)))

    def test_descriptions_that_change_during_the_run(self, folder):
        reader, _ = open_source(str(folder))
        meta(folder, "dataset.yaml", lambda text: text.replace("image: png", "image: jpeg"))
        with pytest.raises(DataError, match=r"dataset\.yaml.*had 120"):
            reader.read(0)

    def test_an_index_that_is_no_index(self, folder):
        path = folder / "parts" / "train_0.tar.idx"
        path.write_bytes(np.fromfile(path, "<i8")[::-1].tobytes())
        reader, _ = open_source(str(folder))
        with pytest.raises(DataError, match=r"source 's': .*unit 0: .*train_0\.tar\.idx is no index"):
            reader.read(0)

    def test_an_index_of_other_samples(self, folder):
        path = folder / "parts" / "train_0.tar.idx"
        offsets = np.fromfile(path, "<i8")
        offsets[1:3] += [1024, -1024]
        offsets.tofile(path)
        reader, _ = open_source(str(folder))
        block = reader.read(0)
        assert sorted(block.failures) == [0, 2]
        assert "where the shard has two: the index is not its own" in block.failures[0]

    def test_a_shard_that_is_cut_off(self, folder):
        path = folder / "parts" / "train_0.tar"
        offsets = np.fromfile(f"{path}.idx", "<i8")
        path.write_bytes(path.read_bytes()[: offsets[1] + 600])
        reader, _ = open_source(str(folder))
        block = reader.read(0)
        assert keys(block) == ["sample_000", None, None]
        assert "is cut off" in block.failures[1]
        assert f"has a sample at byte {offsets[2]}, where the shard of" in block.failures[2]

    def test_damage_stays_within_its_sample(self, folder):
        path = folder / "parts" / "train_0.tar"
        offsets = np.fromfile(f"{path}.idx", "<i8")
        data = bytearray(path.read_bytes())
        data[offsets[1] : offsets[1] + 512] = b"#" * 512
        path.write_bytes(data)
        reader, _ = open_source(str(folder))
        block = reader.read(0)
        assert keys(block) == ["sample_000", None, "sample_002"]
        assert f"no tar header at byte {offsets[1]}" in block.failures[1]


def test_a_run_over_several_folders(folder):
    other = folder.with_name("other")
    (other / ".nv-meta").mkdir(parents=True)
    write(other / "x.tar", tar_bytes([(f"x{n}.{ext}", b'{"text": "x"}') for n in range(5) for ext in ("json", "png")]))
    (other / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {"x.tar": 5}}))
    (other / ".nv-meta" / "split.yaml").write_text("split_parts:\n  train: [x.tar]\n")
    (other / ".nv-meta" / "dataset.yaml").write_text("field_map: {image: png, caption: 'json[text]'}\n")
    source = Source("s", [str(folder), str(other)], epochs=1)
    rows = CollatedRows(micro_batch_size=2, collate_fn=list)
    settings = LoaderConfig(sources=[source], rows=rows, global_batch_size=2, runtime="local", part_bytes=4000)
    with MegaScaleLoader(settings) as loader:
        steps = [([item["__key__"] for item in batch], loader.state_dict()) for batch in loader]
    assert sorted(key for step, _ in steps for key in step) == [f"sample_{n:03}" for n in range(5)] + [
        f"x{n}" for n in range(5)
    ]
    for done, (_, state) in enumerate(steps):
        with MegaScaleLoader(settings) as loader:
            loader.load_state_dict(state)
            assert [[item["__key__"] for item in batch] for batch in loader] == [step for step, _ in steps[done + 1 :]]


def test_a_shard_that_a_split_names_twice_is_one(folder):
    once = build_manifest(Source("s", str(folder)))
    meta(folder, "split.yaml", lambda text: text.replace("  val:", "  - parts/train_1.tar\n  val:"))
    local = build_manifest(Source("s", str(folder)))
    assert [info.path for info in local.files] == [info.path for info in once.files]
    fsspec.filesystem("memory").put(str(folder), "/twice", recursive=True)
    remote = build_manifest(Source("s", "memory://twice"))
    assert remote.num_units == once.num_units
