"""Folders of images: names, classes, captions, metadata, what is left out; and how a folder tells its format."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, PackedRows, Source
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.sources import build_manifest
from megascale_lightning.sources.formats.images import format as images
from tests.sources.tars import open_source

GOLDEN = Path(__file__).parents[1] / "golden"


def put(folder, files):
    """Write files by their relative path; gives the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def read_all(data, columns=None, **settings):
    """(records, failures) of a source."""
    reader, manifest = open_source(data, columns, **settings)
    assert manifest.format == "images"
    records, failures = [], {}
    for unit in range(manifest.num_units):
        block = reader.read(unit)
        failures |= {len(records) + index: text for index, text in block.failures.items()}
        records += block.objects
    assert manifest.num_records == len(records)
    return records, failures


def test_records_come_in_the_order_of_their_paths(tmp_path):
    names = ["b/2.png", "b/10.PNG", "a.jpg", "b.jpeg", "c d/é.webp", "b/c/x.tif"]
    records, failures = read_all(put(tmp_path, {name: name for name in names}))
    assert not failures
    assert [record["path"] for record in records] == sorted(names)
    assert [record["image"] for record in records] == [name.encode() for name in sorted(names)]
    assert [record["label"] for record in records] == [None, None, "b", "b", "c", "c d"]
    assert all(record["caption"] is None for record in records)


def test_others_are_left_out_and_counted(tmp_path, caplog):
    files = {"a.jpg": "a", "b.jpg": "b", "a.txt": "of a", "lonely.txt": "", "notes.md": "", "model.pt": ""}
    hidden = {".c.jpg": "", "._a.jpg": "", ".cache/d.jpg": "", "._a.txt": ""}
    with caplog.at_level(logging.INFO, "megascale_lightning"):
        records, _ = read_all(put(tmp_path, files | hidden))
    assert [record["path"] for record in records] == ["a.jpg", "b.jpg"]
    assert "2 images; 1 captions without an image and 2 other files are left out" in caplog.text


def test_folders_lists_and_patterns(tmp_path):
    put(tmp_path, {"x/a/1.jpg": "1", "y/a/1.jpg": "2", "y/b/2.jpg": "3", "y/b/2.txt": "two", "y/b/3.txt": "no"})
    both, _ = read_all([str(tmp_path / "y"), str(tmp_path / "x")])
    assert [(record["path"], record["image"]) for record in both] == [
        ("a/1.jpg", b"2"),
        ("b/2.jpg", b"3"),
        ("a/1.jpg", b"1"),
    ]
    for pattern in (f"{tmp_path}/y/**/*.jpg", f"{tmp_path}/y/*/*.jpg"):
        found, _ = read_all(pattern)
        assert [(record["path"], record["label"], record["caption"]) for record in found] == [
            ("a/1.jpg", "a", None),
            ("b/2.jpg", "b", "two"),
        ]
    found, _ = read_all(f"{tmp_path}/{{x,y}}/a/1.jpg")
    assert [(record["path"], record["image"]) for record in found] == [("1.jpg", b"1"), ("1.jpg", b"2")]


def test_links_that_go_round_end(tmp_path):
    put(tmp_path, {"a/1.jpg": "1", "else/2.jpg": "2"})
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "more").symlink_to(tmp_path / "else")
    records, _ = read_all(str(tmp_path / "a"))
    assert [record["path"] for record in records] == ["1.jpg", "more/2.jpg"]


def test_ranges_are_bounded_in_files_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "UNIT_FILES", 4)
    monkeypatch.setattr(images, "UNIT_BYTES", 100)
    data = put(tmp_path, {f"{n:02}.jpg": b"x" * size for n, size in enumerate([1] * 9 + [60, 60, 300, 40, 60, 1])})
    reader, manifest = open_source(data)
    assert manifest.units["rows"].tolist() == [4, 4, 2, 1, 1, 2, 1]
    assert int(manifest.units["bytes"].sum()) == 530
    whole = reader.read(0).objects
    for start in range(5):
        for stop in range(start, 5):
            block = reader.read(0, start, stop)
            assert (block.row_start, list(block.objects)) == (start, whole[start:stop])


class TestCaptions:
    def test_texts_beside_the_images(self, tmp_path):
        files = {"a.jpg": "a", "a.txt": "\ufeffä cat\n", "b.png": "b", "b.jpg": "b", "b.TXT": " two ", "c.jpg": "c"}
        records, _ = read_all(put(tmp_path, files))
        assert [record["caption"] for record in records] == ["ä cat", "two", "two", None]
        records, _ = read_all(str(tmp_path), format_options={"captions": False})
        assert [record["caption"] for record in records] == [None] * 4

    def test_metadata_in_lines_of_json(self, tmp_path, caplog):
        rows = [{"file_name": "a.jpg", "text": "A", "n": 1}, {"file_name": "x/b.jpg", "text": "B"}, {"file_name": "no"}]
        files = {"a.jpg": "a", "x/b.jpg": "b", "x/c.jpg": "c", "metadata.jsonl": "\n\n".join(map(json.dumps, rows))}
        with caplog.at_level(logging.WARNING):
            records, _ = read_all(put(tmp_path, files))
        assert [(record["path"], record["text"], record["n"]) for record in records] == [
            ("a.jpg", "A", 1),
            ("x/b.jpg", "B", None),
            ("x/c.jpg", None, None),
        ]
        assert "1 entries of its metadata name no image" in caplog.text

    def test_metadata_in_csv(self, tmp_path):
        text = 'file_name,caption,score\nb.jpg,"two, or\nthree",5\n./a.jpg,,\n'
        records, _ = read_all(put(tmp_path, {"a.jpg": "a", "a.txt": "one", "b.jpg": "b", "metadata.csv": text}))
        assert [(record["caption"], record["score"]) for record in records] == [("", ""), ("two, or\nthree", "5")]

    @pytest.mark.parametrize(
        "content",
        [
            {"1.jpg": "one", "2.jpg": "two"},
            {"1.jpg": {"caption": "one"}, "2.jpg": {"caption": "two"}},
            [{"file_name": "2.jpg", "caption": "two"}, {"file_name": "1.jpg", "caption": "one"}],
        ],
    )
    def test_captions_json(self, tmp_path, content):
        data = put(tmp_path, {"a/1.jpg": "1", "a/2.jpg": "2", "a/captions.json": json.dumps(content), "b/1.jpg": "3"})
        records, _ = read_all(data)
        assert [record["caption"] for record in records] == ["one", "two", None]

    def test_two_entries_fail_the_image(self, tmp_path):
        rows = [{"file_name": name, "n": n} for n, name in enumerate(["a.jpg", "b.jpg", "a.jpg"])]
        data = put(tmp_path, {"a.jpg": "a", "b.jpg": "b", "metadata.jsonl": "\n".join(map(json.dumps, rows))})
        records, failures = read_all(data)
        assert records[0] is None
        assert records[1]["n"] == 1
        path = tmp_path / "metadata.jsonl"
        assert failures == {0: f"image {tmp_path}/a.jpg: it has two entries: {path}, line 1, and {path}, line 3"}

    def test_only_what_is_needed_is_read(self, tmp_path):
        data = put(tmp_path, {"a.jpg": "a", "a.txt": "one"})
        reader, _ = open_source(data, ["caption"])
        (tmp_path / "a.jpg").unlink()
        assert reader.read(0).objects == [{"caption": "one"}]

    @pytest.mark.parametrize(
        ("name", "content", "kind", "message"),
        [
            (
                "metadata.jsonl",
                '{"file_name": "a.jpg"}\n{"file',
                DataError,
                "metadata.jsonl cannot be read: line 2 is not",
            ),
            ("metadata.jsonl", "[1]", DataError, "line 1 holds a list, not an object"),
            ("metadata.jsonl", '{"file": "a.jpg"}', ConfigError, r"line 1 has no 'file_name' .* but \['file'\]"),
            ("metadata.csv", "file_name,x\na.jpg,1,2\n", DataError, "line 2 has more fields than the header"),
            ("metadata.csv", b"file_name\n\xff.jpg\n", DataError, "metadata.csv cannot be read: .*utf-8"),
            ("metadata.csv", "file_name,path\na.jpg,1\n", ConfigError, "has the column 'path', which a record has"),
            ("captions.json", "3", DataError, "it holds neither captions by file name nor a list of objects"),
        ],
    )
    def test_broken_metadata(self, tmp_path, name, content, kind, message):
        data = put(tmp_path, {"a.jpg": "a", name: content})
        with pytest.raises(kind, match=f"source 's': .*{message}"):
            build_manifest(Source("s", data))


def test_bad_images_are_failed_records(tmp_path):
    records, failures = read_all(put(tmp_path, {"a.jpg": "", "b.jpg": "b", "c.jpg": "c", "c.txt": b"\xff"}))
    assert [record and record["path"] for record in records] == [None, "b.jpg", None]
    assert failures[0] == f"image {tmp_path}/a.jpg is empty"
    assert f"image {tmp_path}/c.jpg: its caption {tmp_path}/c.txt is not UTF-8" in failures[2]


def test_what_the_source_asks_for_and_does_not_have(tmp_path):
    data = put(tmp_path, {"a.jpg": "a"})
    with pytest.raises(ConfigError, match="columns names 'text'; its images have image, path, label, caption"):
        build_manifest(Source("s", data, columns=("image", "text")))
    with pytest.raises(ConfigError, match="has no option 'caption'; it has captions"):
        build_manifest(Source("s", data, format_options={"caption": False}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="source 's': there is no image in "):
        build_manifest(Source("s", str(tmp_path / "empty"), format="images"))


def test_a_record_without_a_field_that_is_asked_for_lists_all_it_has(tmp_path):
    line = json.dumps({"file_name": "a.jpg", "score": 1})
    data = put(tmp_path, {"a.jpg": "a", "metadata.jsonl": line})
    there = ["caption", "image", "label", "path", "score"]
    _, failures = read_all(data, ("score", "input_ids"))
    assert failures[0].startswith(f"image {data}/a.jpg: 'input_ids' is not among its keys {there}: correct the name")
    assert read_all(data, ("score", "input_ids"), transform=dict) == ([{"score": 1}], {})
    config = LoaderConfig(sources=[Source("s", data)], rows=PackedRows(8, 1), global_batch_size=1, runtime="local")
    with MegaScaleLoader(config) as loader, pytest.raises(DataError, match=r"'input_ids' is not .*'path'"):
        next(iter(loader))


def test_an_image_that_is_gone_is_named(tmp_path):
    reader, _ = open_source(put(tmp_path, {"a.jpg": "a", "b.jpg": "b"}))
    (tmp_path / "b.jpg").unlink()
    with pytest.raises(DataError, match=r"b\.jpg"):
        reader.read(0)


@pytest.fixture
def store():
    """A folder of images in fsspec's memory."""
    import fsspec

    fs = fsspec.filesystem("memory")
    for name, content in {"a/1.jpg": b"1", "a/1.txt": b"one", "b/2.png": b"2", ".x/3.jpg": b"3"}.items():
        fs.pipe(f"/photos/{name}", content)
    yield fs
    fs.rm("/photos", recursive=True)


@pytest.mark.parametrize("data", ["memory://photos", "memory://photos/", "memory://photos/*/*.*g"])
def test_remote_folders(store, data):
    records, _ = read_all(data, **({} if "*" not in data else {"format": "images"}))
    assert [(record["path"], record["image"], record["label"], record["caption"]) for record in records] == [
        ("a/1.jpg", b"1", "a", "one"),
        ("b/2.png", b"2", "b", None),
    ]


class TestFoldersTellTheirFormat:
    def kind(self, data):
        return build_manifest(Source("s", data)).format

    def test_by_what_lies_in_them(self, tmp_path):
        shutil.copytree(GOLDEN / "mds" / "arrays", tmp_path / "mds" / "train")
        shutil.copytree(GOLDEN / "litdata" / "leaves", tmp_path / "lit")
        put(tmp_path / "pictures", {"x/y/1.jpg": "", "x/index.json": "{}", "a.parquet": "", "notes.txt": ""})
        assert self.kind(str(tmp_path / "mds")) == "mds"
        assert self.kind(tmp_path / "mds" / "train") == "mds"
        assert self.kind(str(tmp_path / "lit" / "index.json")) == "litdata"
        with pytest.raises(ConfigError, match=r"mds/train/index\.json has no list 'chunks'"):
            self.kind([str(tmp_path / "lit"), str(tmp_path / "mds")])
        assert self.kind(f"{tmp_path}/l*") == "litdata"
        assert self.kind(str(tmp_path / "pictures")) == "images"
        assert self.kind(str(GOLDEN / "energon")) == "webdataset"

    def test_remote_ones(self, store):
        assert self.kind("memory://photos") == "images"
        store.pipe({f"/photos/{path.name}": path.read_bytes() for path in (GOLDEN / "mds" / "arrays").iterdir()})
        assert self.kind("memory://photos/") == "mds"
        store.pipe("/photos/.nv-meta/.info.json", b"{}")
        with pytest.raises(DataError, match=r"photos/\.nv-meta has no split\.yaml"):
            self.kind("memory://photos")

    def test_others_are_refused_as_before(self, tmp_path):
        put(tmp_path, {"a.parquet": "", "index.json": "[]"})
        with pytest.raises(ConfigError, match=r"is a directory; name its files, such as .*/\*\.parquet"):
            self.kind(str(tmp_path))
        with pytest.raises(ConfigError, match="no file matches"):
            self.kind(str(tmp_path / "absent"))
        with pytest.raises(DataError, match="no readable Parquet file"):
            self.kind(str(tmp_path / "*.parquet"))


def label_of(sample):
    return {"input_ids": [int(sample["path"][:2])] * 3}


@pytest.mark.parametrize(
    "rows", [CollatedRows(micro_batch_size=2, collate_fn=list), PackedRows(seq_len=6, micro_batch_size=2)]
)
def test_every_step_can_be_resumed(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(images, "UNIT_FILES", 4)
    data = put(tmp_path, {f"{n:02}.jpg": b"x" * n for n in range(1, 19)} | {f"{n:02}.txt": f"t{n}" for n in range(9)})
    packed = isinstance(rows, PackedRows)
    source = Source("s", data, epochs=1, transform=label_of if packed else None)
    settings = LoaderConfig(
        sources=[source], rows=rows, global_batch_size=2, seed=1, runtime="local", part_bytes=40, window_units=2
    )

    def run(state=None):
        with MegaScaleLoader(settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return [(batch["input_ids"].tolist() if packed else batch, loader.state_dict()) for batch in loader]

    steps = run()
    if packed:
        ids = np.concatenate([np.array(step).flatten() for step, _ in steps])
        assert {n: int((ids == n).sum()) for n in range(1, 19)} == dict.fromkeys(range(1, 19), 3)
    else:
        found = sorted((item["path"], item["image"], item["caption"]) for step, _ in steps for item in step)
        assert found == [(f"{n:02}.jpg", b"x" * n, f"t{n}" if n < 9 else None) for n in range(1, 19)]
    for done, (_, state) in enumerate(steps):
        assert [step for step, _ in run(state)] == [step for step, _ in steps[done + 1 :]]


def refuse(sample):
    if sample["path"] in ("03.jpg", "05.jpg"):
        raise ValueError("no")
    return sample


def test_errors_name_the_image_itself(tmp_path):
    data = put(tmp_path / "photos", {f"{n:02}.jpg": "x" for n in range(8)})
    rows = CollatedRows(micro_batch_size=2, collate_fn=list)

    def config(**settings):
        source = Source("s", data, epochs=1, transform=refuse, **settings)
        return LoaderConfig(
            sources=[source], rows=rows, global_batch_size=2, runtime="local", quarantine_dir=str(tmp_path / "run")
        )

    with (
        pytest.raises(DataError, match=r"photos/0[35]\.jpg, unit 0, row [35]"),
        MegaScaleLoader(config()) as loader,
    ):
        list(loader)
    with MegaScaleLoader(config(on_error="quarantine")) as loader:
        assert sum(len(batch) for batch in loader) == 6
    lines = [line for path in (tmp_path / "run").rglob("*.jsonl") for line in path.read_text().splitlines()]
    files = {json.loads(line)["file"] for line in lines if "file" in json.loads(line)}
    assert files == {f"{data}/03.jpg", f"{data}/05.jpg"}


def test_a_run_goes_on_after_the_folder_moved(tmp_path):
    data = put(tmp_path / "one", {f"{n}.jpg": f"{n}" for n in range(6)} | {"metadata.csv": "file_name,text\n3.jpg,x\n"})
    rows = CollatedRows(micro_batch_size=2, collate_fn=list)
    settings = {"rows": rows, "global_batch_size": 2, "seed": 1, "runtime": "local"}
    with MegaScaleLoader(LoaderConfig(sources=[Source("s", data, epochs=1)], **settings)) as loader:
        iterator = iter(loader)
        seen = list(next(iterator))
        state = loader.state_dict()
    moved = shutil.copytree(data, tmp_path / "two")
    with MegaScaleLoader(LoaderConfig(sources=[Source("s", moved, epochs=1)], **settings)) as loader:
        loader.load_state_dict(state)
        seen += [item for batch in loader for item in batch]
    assert sorted((item["path"], item["text"]) for item in seen) == [
        (f"{n}.jpg", "x" if n == 3 else None) for n in range(6)
    ]
