import random
import subprocess
import sys
import threading

import pytest

from megascale_lightning.errors import ConfigError, EmptySourceError
from megascale_lightning.sources import Source, build_manifest, make_reader
from megascale_lightning.sources.formats import dataset as datasets_module


class Numbers:
    def __init__(self, n, **attributes):
        self.n = n
        self.__dict__.update(attributes)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"input_ids": [index, index + 1]}


def test_units_are_index_ranges_that_cover_the_dataset():
    source = Source("s", Numbers(2500))
    manifest = build_manifest(source)
    assert [(int(u["start"]), int(u["stop"])) for u in manifest.units] == [(0, 1024), (1024, 2048), (2048, 2500)]
    reader = make_reader(source, manifest, ["input_ids"])
    block = reader.read(2, 450)
    assert (block.num_rows, block.lazy, list(block.objects)) == (
        2,
        True,
        [{"input_ids": [2498, 2499]}, {"input_ids": [2499, 2500]}],
    )


def test_a_callable_makes_the_dataset_where_it_is_read():
    source = Source("s", lambda: Numbers(3))
    reader = make_reader(source, build_manifest(source), None)
    assert reader.read(0, 1, 2).samples()[0] == {"input_ids": [1, 2]}


def test_a_callable_that_returns_other_data_is_refused():
    sizes = iter([3, 4])
    source = Source("s", lambda: Numbers(next(sizes)))
    manifest = build_manifest(source)
    with pytest.raises(ConfigError, match="4 records here and 3"):
        make_reader(source, manifest, None).read(0)


def test_what_is_no_dataset_is_refused():
    with pytest.raises(ConfigError, match="__len__ and __getitem__"):
        build_manifest(Source("s", lambda: 5))
    with pytest.raises(EmptySourceError):
        build_manifest(Source("s", Numbers(0)))


def test_a_list_of_dicts_is_a_dataset():
    source = Source("s", [{"input_ids": [1]}, {"input_ids": [2]}])
    assert build_manifest(source).files[0].size == 2


def test_pickling_is_only_asked_for_where_it_matters(monkeypatch):
    source = Source("s", Numbers(3, lock=threading.Lock()))
    build_manifest(source)
    with pytest.raises(ConfigError, match=r"attribute 'lock' does not pickle.*callable.*runtime=\"local\""):
        build_manifest(source, portable=True)
    monkeypatch.setattr(datasets_module, "MAX_PICKLED_BYTES", 1000)
    with pytest.raises(ConfigError, match="attribute 'blob' is larger"):
        build_manifest(Source("s", Numbers(3, blob=bytes(2000))), portable=True)
    build_manifest(Source("s", Numbers(3, blob=bytes(100))), portable=True)


def test_hugging_face_datasets_are_read_as_arrow():
    hf = pytest.importorskip("datasets")
    data = hf.Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]], "text": ["a", "b", "c"]}).select([2, 0])
    source = Source("s", data)
    block = make_reader(source, build_manifest(source), ["input_ids"]).read(0)
    assert block.table.column_names == ["input_ids"]
    assert block.table.column("input_ids").to_pylist() == [[4, 5, 6], [1, 2]]
    lazy = make_reader(source, build_manifest(source), None).read(0, 1, 2)
    assert lazy.samples()[0] == {"input_ids": [1, 2], "text": "a"}


def test_sources_and_loading_do_not_import_torch():
    code = (
        "import sys, megascale_lightning.loading, megascale_lightning.sources.formats.dataset; "
        "print([m for m in ('torch', 'lightning', 'ray', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_callable_may_draw_and_leaves_the_states_alone():
    def draws():
        random.seed(5)
        return Numbers(3)

    source = Source("s", draws, format="dataset")
    before = random.getstate()
    manifest = build_manifest(source)
    assert random.getstate() == before, "where units are listed"
    make_reader(source, manifest, None).read(0)
    assert random.getstate() == before, "where it is read"


def test_options_are_refused():
    with pytest.raises(ConfigError, match="format 'dataset' has no option 'split'"):
        build_manifest(Source("s", Numbers(3), format_options={"split": "train"}))


def test_a_callable_that_does_not_pickle_is_told_its_own_way_out():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"inside the callable.*runtime=\"local\"") as caught:
        build_manifest(Source("s", lambda: [lock] * 3), portable=True)
    assert "give a callable" not in str(caught.value)
