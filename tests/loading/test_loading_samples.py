"""A loader with collated rows: whole samples, whatever they are, fetched late where nothing has to be known of them."""

import collections
import dataclasses
import itertools
import pickle
import random
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import DataError, ReplayError
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.loading.payload import pickled
from megascale_lightning.rows import CollatedRows, PackedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PartKey, TakeRequest

FIRST = PartKey("train", 0, 0, 0, 0)


def loader_of(source, *, buffer_bytes=1 << 30, part_bytes=1 << 30, seed=0):
    loaded = [LoadedSource(source, build_manifest(source))]
    return SourceLoader({"train": loaded}, {"train": CollatedRows(2)}, seed, 4, part_bytes, buffer_bytes)


def samples_of(block):
    bounds = block.payload.offsets
    return [pickle.loads(block.payload.values[a:b].data) for a, b in itertools.pairwise(bounds)]


def take_all(loader, meta):
    """(unit, row) -> sample, of the kept entries."""
    pieces = meta.pieces[meta.kept]
    names = pieces[["unit", "row"]].tolist()
    return dict(zip(names, samples_of(loader.take([TakeRequest(meta.key, pieces)])), strict=True))


def by_row(source, **more):
    loader = loader_of(source, **more)
    return {row: sample for (_, row), sample in take_all(loader, loader.describe(FIRST)).items()}


class Counted:
    """n samples `(index, drawn)`; remembers who was asked for."""

    def __init__(self, n, fails=()):
        self.n = n
        self.fails = fails
        self.asked = collections.Counter()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.asked[index] += 1
        if index in self.fails:
            raise KeyError(f"no image {index}")
        return index, random.randrange(1 << 40)


def test_a_dataset_is_touched_only_for_what_is_taken():
    data = Counted(2000)
    loader = loader_of(Source("d", data), part_bytes=300 * (16 << 10))
    found = set()
    for part in range(99):
        meta = loader.describe(PartKey("train", 0, 0, 0, part))
        assert meta.kept.all()
        assert meta.first.all()
        assert set(meta.pieces[["start", "stop", "length", "loss_tokens"]].tolist()) == {(0, -1, 1, 1)}
        assert meta.pieces["entry"].tolist() == list(range(len(meta.pieces)))
        found |= set(meta.pieces[["unit", "row"]].tolist())
        if meta.last_in_window:
            break
    assert part > 3
    assert not data.asked
    assert len(found) == 2000
    meta = loader.describe(FIRST)
    pieces = meta.pieces[[7, 3, 200]]
    block = loader.take([TakeRequest(FIRST, pieces)])
    indices = (pieces["unit"] * 1024 + pieces["row"]).tolist()
    assert [sample[0] for sample in samples_of(block)] == indices
    assert data.asked == collections.Counter(indices)
    assert loader.stats()["buffer_bytes"] == 2000 * meta.pieces.itemsize


def test_a_late_sample_is_drawn_by_its_name_alone():
    base = by_row(Source("d", Counted(50)))
    assert len({drawn for _, drawn in base.values()}) == 50
    random.seed(5)
    assert by_row(Source("d", Counted(50), shuffle=False)) == base
    # Fetched early, since drops have to be counted: the same draws.
    assert by_row(Source("d", Counted(50), on_error="skip")) == base
    assert by_row(Source("d", Counted(50)), seed=1) != base
    loader = loader_of(Source("d", Counted(50)))
    meta = loader.describe(FIRST)
    for entry in (9, 3, 9):
        (index, drawn), *_ = samples_of(loader.take([TakeRequest(FIRST, meta.pieces[[entry]])]))
        assert base[index] == (index, drawn)


def test_a_late_sample_that_fails_names_its_index():
    data = Counted(1030, fails=(1027,))
    loader = loader_of(Source("d", data, shuffle=False))
    meta = loader.describe(FIRST)
    assert meta.kept.all()
    with pytest.raises(DataError, match=r"'d', <dataset>, unit 1, row 3, index 1027: .*KeyError: 'no image 1027'") as e:
        take_all(loader, meta)
    assert isinstance(e.value.__cause__, KeyError)


def test_skipping_counts_drops_before_planning():
    data = Counted(30, fails=(4, 11))
    loader = loader_of(Source("d", data, on_error="skip", shuffle=False))
    meta = loader.describe(FIRST)
    assert np.flatnonzero(~meta.kept).tolist() == [4, 11]
    assert {meta.reasons[r] for r in meta.reason[~meta.kept]} == {"read_error"}
    assert meta.pieces["loss_tokens"].tolist() == meta.kept.astype(int).tolist()
    assert [sample[0] for sample in take_all(loader, meta).values()] == [i for i in range(30) if i not in (4, 11)]
    assert set(data.asked.values()) == {1}


@dataclasses.dataclass
class Point:
    x: int
    tags: tuple[str, ...]


def kinds():
    torch = pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2), (9, 8, 7))
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": [1, 2]})
    return [
        (torch.arange(3), 4),
        [1, "two", None],
        {"a": np.arange(4, dtype=np.uint16), "b": {"c": (1.5,)}},
        "text",
        None,
        Point(3, ("x",)),
        image,
        encoding,
        torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(7, dtype=torch.uint8),
        torch.zeros(0, 3),
        torch.nn.Parameter(torch.ones(2)),
        torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True),
        torch.tensor([1 + 2j]).conj(),
    ]


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_samples_arrive_as_they_were(early):
    """Types and values, for a dataset fetched late, and for one whose samples are held."""
    torch = pytest.importorskip("torch")
    data = kinds()
    found = by_row(Source("d", data, length=(lambda sample: 5) if early else None))
    assert len(found) == len(data)
    for row, sample in found.items():
        assert type(sample) is type(data[row])
        if isinstance(sample, torch.Tensor):
            assert sample.dtype == data[row].dtype
            assert sample.requires_grad == data[row].requires_grad
            assert torch.equal(sample.to_dense(), data[row].to_dense())
        elif isinstance(sample, tuple):
            assert torch.equal(sample[0], torch.arange(3))
            assert sample[1] == 4
        elif hasattr(sample, "tobytes"):
            assert sample.tobytes() == data[row].tobytes()
            assert sample.size == (3, 2)
        elif isinstance(sample, dict) and "a" in sample:
            assert sample["a"].dtype == np.uint16
            assert sample["a"].flags.writeable
            assert sample["b"] == {"c": (1.5,)}
        else:
            assert sample == data[row]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_view_travels_without_the_rest(dtype):
    torch = pytest.importorskip("torch")
    whole = torch.ones(100_000, 8, dtype=getattr(torch, dtype))
    content = pickled((whole[5], whole[:, 3][:20]))
    assert len(content) < 5000
    one, other = pickle.loads(content)
    assert torch.equal(one, whole[5])
    assert torch.equal(other, whole[:20, 3])
    one += 1
    assert float(whole[5].sum()) == 8


def test_classes_of_the_users_script_are_found_again(monkeypatch):
    """In an actor `__main__` is another module: names are looked up in the rank's."""
    here = types.ModuleType("__main__")
    exec(
        "class Thing:\n  class Inner: pass\n  def __init__(self, x): self.x = x\ndef double(x): return 2 * x",
        here.__dict__,
    )
    sample = [here.Thing(4), here.double, here.Thing.Inner()]
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    content = pickled(sample)
    monkeypatch.setitem(sys.modules, "__main__", here)
    thing, double, inner = pickle.loads(content)
    assert type(thing) is here.Thing
    assert thing.x == 4
    assert double is here.double
    assert type(inner) is here.Thing.Inner


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_a_sample_that_does_not_pickle_is_named(early, on_error):
    data = [(0,), (1, lambda: 0)]
    source = Source("d", data, shuffle=False, length=(lambda _: 1) if early else None, on_error=on_error)
    loader = loader_of(source)
    with pytest.raises(DataError, match=r"'d', <dataset>, unit 0, row 1: the sample, a tuple, does not pickle"):
        take_all(loader, loader.describe(FIRST))


@pytest.fixture
def parquet(tmp_path):
    ids = [np.arange(n) for n in (3, 1, 0, 7)]
    table = pa.table({"input_ids": ids, "text": list("abcd"), "n": [4, 0, 9, 2]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    return str(tmp_path / "a.parquet")


def lengths(source):
    meta = loader_of(source).describe(FIRST)
    return dict(
        zip((meta.pieces["unit"] * 3 + meta.pieces["row"]).tolist(), meta.pieces["length"].tolist(), strict=True)
    )


def test_records_of_a_file_come_whole(parquet):
    loader = loader_of(Source("d", parquet))
    found = take_all(loader, loader.describe(FIRST))
    assert found[0, 0].keys() == {"input_ids", "text", "n"}
    assert found[0, 0]["input_ids"].tolist() == [0, 1, 2]
    assert (found[1, 0]["text"], found[1, 0]["n"]) == ("d", 2)
    loader = loader_of(Source("d", parquet, columns=("text",), length="n"))
    assert take_all(loader, loader.describe(FIRST))[0, 1] == {"text": "b"}


def test_lengths(parquet):
    """By declaration, by `input_ids`, or 1; never 0, so that nothing is dropped as empty."""
    assert lengths(Source("d", parquet)) == {0: 3, 1: 1, 2: 1, 3: 7}
    assert lengths(Source("d", parquet, length="n")) == {0: 4, 1: 1, 2: 9, 3: 2}
    assert lengths(Source("d", parquet, length=lambda sample: 10 * sample["n"])) == {0: 40, 1: 1, 2: 90, 3: 20}
    assert lengths(Source("d", parquet, columns=("text",))) == dict.fromkeys(range(4), 1)
    assert lengths(Source("d", parquet, transform=lambda sample: sample["text"])) == dict.fromkeys(range(4), 1)
    # None as the other kinds of rows have it: a dataset's samples are not looked at for their length.
    assert lengths(Source("d", [{"input_ids": [1, 2, 3]}])) == {0: 1}


def test_a_batch_of_one_is_as_long_as_its_tokens():
    torch = pytest.importorskip("torch")
    made = lambda sample: {"input_ids": torch.zeros(1, sample)}  # noqa: E731
    assert lengths(Source("d", [5], transform=made)) == {0: 5}


@pytest.mark.parametrize("bad", [-1, "long", 2**31])
def test_what_is_no_length_fails_the_record(bad):
    source = Source("d", [3, 4], length=lambda sample: bad if sample == 4 else sample, shuffle=False)
    with pytest.raises(DataError, match=r"'d', <dataset>, unit 0, row 1: 'length' failed"):
        loader_of(source).describe(FIRST)
    skipping = dataclasses.replace(source, on_error="skip")
    assert loader_of(skipping).describe(FIRST).kept.tolist() == [True, False]


def test_a_transform_may_give_anything_and_none_drops():
    results = [[1, 2], (3,), None, "x", {"k": 1}]
    source = Source("d", list(range(5)), transform=lambda index: results[index], shuffle=False)
    loader = loader_of(source)
    meta = loader.describe(FIRST)
    assert [meta.reasons[r] for r in meta.reason] == ["", "", "filtered", "", ""]
    assert list(take_all(loader, meta).values()) == [[1, 2], (3,), "x", {"k": 1}]


def test_held_samples_are_within_the_buffer():
    """What is evicted is made again: the same bytes."""
    data = [bytes(1000) for _ in range(3000)]
    source = Source("d", data, length=len)
    roomy = loader_of(source, part_bytes=200 * (16 << 10))
    tight = loader_of(source, part_bytes=200 * (16 << 10), buffer_bytes=400_000)
    requests = []
    for part in range(8):
        meta = roomy.describe(PartKey("train", 0, 0, 0, part))
        assert meta.payload_bytes > 1000 * len(meta.pieces)
        assert np.array_equal(tight.describe(meta.key).pieces, meta.pieces)
        requests.append(TakeRequest(meta.key, meta.pieces[::3]))
    assert tight.stats()["buffer_bytes"] <= 400_000
    assert tight.stats()["evicted"] > 0
    one, other = roomy.take(requests), tight.take(requests)
    assert one.payload.values.tobytes() == other.payload.values.tobytes()
    assert one.payload.offsets.tolist() == other.payload.offsets.tolist()


def test_a_replay_of_another_length_is_refused():
    grown = [0]
    loader = loader_of(Source("d", [b"x"], length=lambda sample: 5 + grown[0]))
    meta = loader.describe(FIRST)
    loader.release([FIRST])
    grown[0] = 1
    with pytest.raises(ReplayError, match=r"row 0.*gives a sample of length 6 where it gave a sample of length 5"):
        take_all(loader, meta)


def test_streams_have_rows_of_their_own():
    source = Source("d", [{"input_ids": [1, 2]}])
    loaded = [LoadedSource(source, build_manifest(source))]
    rows = {"train": PackedRows(16, 1), "val/0": CollatedRows(1)}
    loader = SourceLoader({"train": loaded, "val/0": loaded}, rows, 0, 4, 1 << 20, 1 << 20)
    metas = [loader.describe(PartKey(stream, 0, 0, 0, 0)) for stream in ("train", "val/0")]
    packed, collated = (loader.take([TakeRequest(meta.key, meta.pieces)]) for meta in metas)
    assert packed.tokens["input_ids"].values.tolist() == [1, 2]
    assert packed.payload is None
    assert samples_of(collated) == [{"input_ids": [1, 2]}]
    assert not collated.tokens


def test_columns_of_a_hugging_face_dataset():
    """Its items come by `__getitem__`, in its own format, with the declared columns alone."""
    datasets = pytest.importorskip("datasets")
    torch = pytest.importorskip("torch")
    data = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1], "name": ["a", "b"]})
    found = by_row(Source("d", data.with_format("torch"), columns=("x", "label")))
    assert found[1].keys() == {"x", "label"}
    assert torch.equal(found[1]["x"], torch.tensor([3.0, 4.0]))
    assert by_row(Source("d", data))[0] == {"x": [1.0, 2.0], "label": 0, "name": "a"}
