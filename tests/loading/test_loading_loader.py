import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import ConfigError, DataError, ReplayError, StateError
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.rows import PackedRows, PaddedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.sources.stores.filepool import MAX_OPEN_FILES
from megascale_lightning.types import PartKey, TakeRequest

FIRST = PartKey("train", 0, 0, 0, 0)


def loader_of(*sources, rows=None, buffer_bytes=1 << 30, part_bytes=1 << 20, window_units=4, seed=0, metadata=()):
    loaded = [LoadedSource(source, build_manifest(source)) for source in sources]
    rows = {"train": rows or PackedRows(16, 1)}
    sizes = window_units, part_bytes, buffer_bytes
    return SourceLoader({"train": loaded}, rows, seed, *sizes, metadata={"train": metadata})


def take_all(loader, meta):
    kept = np.flatnonzero(meta.kept)
    return loader.take([TakeRequest(meta.key, meta.pieces[kept])])


def texts(block, field="input_ids"):
    ragged = block.tokens[field]
    return [ragged.values[a:b].tolist() for a, b in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


def metas_of(loader, source=0, epoch=0):
    window, part = 0, 0
    while True:
        try:
            meta = loader.describe(PartKey("train", source, epoch, window, part))
        except IndexError:
            return
        yield meta
        window, part = (window + 1, 0) if meta.last_in_window else (window, part + 1)


@pytest.fixture
def parquet(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1000, n).astype(np.int32) for n in rng.integers(1, 40, 500)]
    for file in range(5):
        table = pa.table({"input_ids": rows[file::5], "quality": np.arange(100) + 100 * file})
        pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=30)
    return rows, str(tmp_path / "*.parquet")


def test_every_token_is_delivered_once(parquet):
    rows, path = parquet
    loader = loader_of(Source("web", path), part_bytes=4000)
    found = {}
    for meta in metas_of(loader):
        pieces = meta.pieces
        assert meta.kept.all()
        assert pieces["entry"].tolist() == list(range(len(pieces)))
        for piece, text in zip(pieces, texts(take_all(loader, meta)), strict=True):
            assert len(text) == piece["length"] <= 16
            assert piece["loss_tokens"] == piece["length"] - 1
            found.setdefault((int(piece["unit"]), int(piece["row"])), []).append((int(piece["start"]), text))
    whole = sorted([i for _, text in sorted(pieces) for i in text] for pieces in found.values())
    assert whole == sorted(row.tolist() for row in rows)


def test_the_order_does_not_depend_on_the_loader(parquet):
    _, path = parquet

    def order(source=0, epoch=0, seed=0, **more):
        loader = loader_of(*[Source("web", path)] * 1, seed=seed, part_bytes=4000, **more)
        return np.concatenate([meta.pieces for meta in metas_of(loader, source, epoch)])

    base = order()
    assert np.array_equal(order(buffer_bytes=1), base)
    assert not np.array_equal(order(seed=1), base)
    assert not np.array_equal(order(epoch=1)["row"], base["row"])
    # Parts in any order of asking.
    loader = loader_of(Source("web", path), part_bytes=4000)
    keys = [meta.key for meta in metas_of(loader_of(Source("web", path), part_bytes=4000))]
    backwards = [loader.describe(key).pieces for key in reversed(keys)][::-1]
    assert np.array_equal(np.concatenate(backwards), base)


def test_records_are_let_go_of_once_they_are_transformed(tmp_path):
    table = pa.table({"text": [f"{n:1000}" for n in range(5000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    del table
    held = []

    def transform(columns):
        held.append(pa.total_allocated_bytes())
        return {"input_ids": [[1]] * len(columns["text"])}

    loader = loader_of(
        Source("web", str(tmp_path / "a.parquet"), transform_batched=transform), part_bytes=1 << 30, window_units=50
    )
    loader.describe(FIRST)
    assert len(held) == 50
    assert max(held[1:]) < held[0] + 150_000  # of 100,000 bytes each


@pytest.mark.parametrize("buffer_bytes", [1, 20_000, 1 << 30])
def test_take_gives_the_same_bytes_whatever_is_buffered(parquet, buffer_bytes):
    _, path = parquet
    rows = PackedRows(16, 1, sample_fields=("quality",))
    reference = loader_of(Source("web", path), part_bytes=4000, rows=rows)
    metas = list(metas_of(reference))
    rng = np.random.default_rng(1)
    requests = []
    for _ in range(12):
        meta = metas[rng.integers(len(metas))]
        requests.append(TakeRequest(meta.key, meta.pieces[rng.permutation(len(meta.pieces))[:20]]))
    expected = reference.take(requests)
    loader = loader_of(Source("web", path), part_bytes=4000, rows=rows, buffer_bytes=buffer_bytes)
    for _ in range(2):
        got = loader.take(requests)
        assert got.num_pieces == expected.num_pieces == sum(len(r.pieces) for r in requests)
        assert got.tokens["input_ids"].values.tobytes() == expected.tokens["input_ids"].values.tobytes()
        assert np.array_equal(got.tokens["input_ids"].offsets, expected.tokens["input_ids"].offsets)
        assert got.samples["quality"].tolist() == expected.samples["quality"].tolist()
        loader.release([request.key for request in requests])
    assert loader.stats()["parts"] == 0
    if buffer_bytes == 1:
        assert loader.stats()["evicted"] > 0


def test_an_empty_take():
    loader = loader_of(Source("d", [{"input_ids": [1]}], format="dataset"))
    block = loader.take([])
    assert block.num_pieces == 0
    block = loader.take([TakeRequest(FIRST, loader.describe(FIRST).pieces[:0])])
    assert block.tokens["input_ids"].offsets.tolist() == [0]


def test_few_files_are_open_over_all_sources(tmp_path):
    for name in ("a", "b"):
        for file in range(12):
            pq.write_table(pa.table({"input_ids": [[1, 2, 3]]}), tmp_path / f"{name}{file}.parquet")
    loader = loader_of(*[Source(name, str(tmp_path / f"{name}*.parquet")) for name in ("a", "b")])
    for source in (0, 1):
        assert sum(len(meta.pieces) for meta in metas_of(loader, source)) == 12
    assert loader.stats()["open_files"] == MAX_OPEN_FILES == 16
    loader.shutdown()
    assert loader.stats()["open_files"] == 0


def test_token_types_are_kept_or_narrowed(tmp_path):
    for name, dtype, expected in [("a", "uint16", "uint16"), ("b", "int64", "int32"), ("c", "int32", "int32")]:
        table = pa.table({"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.type_for_alias(dtype)))})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        loader = loader_of(Source(name, str(tmp_path / f"{name}.parquet")))
        assert take_all(loader, loader.describe(FIRST)).tokens["input_ids"].values.dtype == expected
    both = loader_of(Source("x", str(tmp_path / "{a,c}.parquet"), shuffle=False))
    block = take_all(both, both.describe(FIRST))
    assert (block.tokens["input_ids"].values.dtype, texts(block)) == (np.int32, [[1, 2], [3], [1, 2], [3]])
    two = loader_of(Source("a", str(tmp_path / "a.parquet")), Source("b", str(tmp_path / "b.parquet")))
    metas = [two.describe(PartKey("train", source, 0, 0, 0)) for source in (0, 1)]
    block = two.take([TakeRequest(meta.key, meta.pieces) for meta in metas])
    assert block.tokens["input_ids"].values.dtype == np.int32
    assert sorted(texts(block)) == [[1, 2], [1, 2], [3], [3]]


def long_and_short(policy):
    data = [{"input_ids": list(range(n))} for n in (3, 10, 0, 4)]
    return loader_of(Source("d", data, overlong=policy, shuffle=False), rows=PackedRows(4, 1))


def test_overlong_split():
    loader = long_and_short("split")
    meta = loader.describe(FIRST)
    p = meta.pieces
    assert p["row"].tolist() == [0, 1, 1, 1, 2, 3]
    assert p["start"].tolist() == [0, 0, 4, 8, 0, 0]
    assert p["stop"].tolist() == [-1, 4, 8, 10, -1, -1]
    assert p["length"].tolist() == [3, 4, 4, 2, 0, 4]
    assert p["loss_tokens"].tolist() == [2, 3, 3, 1, 0, 3]
    assert meta.first.tolist() == [True, True, False, False, True, True]
    assert meta.kept.tolist() == [True, True, True, True, False, True]
    assert [meta.reasons[r] for r in meta.reason] == ["", "", "", "", "empty", ""]
    assert texts(take_all(loader, meta)) == [[0, 1, 2], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_overlong_truncate_drop_and_error():
    loader = long_and_short("truncate")
    meta = loader.describe(FIRST)
    assert [meta.reasons[r] for r in meta.reason] == ["", "truncated", "empty", ""]
    assert meta.kept.tolist() == [True, True, False, True]
    assert (meta.pieces["start"][1], meta.pieces["stop"][1], meta.pieces["length"][1]) == (0, 4, 4)
    assert texts(take_all(loader, meta))[1] == [0, 1, 2, 3]
    meta = long_and_short("drop").describe(FIRST)
    assert [meta.reasons[r] for r in meta.reason] == ["", "overlong", "empty", ""]
    assert meta.pieces["length"].tolist() == [3, 0, 0, 4]
    with pytest.raises(DataError, match=r"'d', <dataset>, unit 0, row 1: .* 10 tokens and a row holds 4"):
        long_and_short("error").describe(FIRST)


def test_pieces_of_a_sample_stay_together_when_shuffled():
    data = [{"input_ids": list(range(n, n + n % 11))} for n in range(60)]
    loader = loader_of(Source("d", data), rows=PackedRows(3, 1))
    meta = loader.describe(FIRST)
    assert meta.pieces["row"][meta.first].tolist() != sorted(meta.pieces["row"][meta.first].tolist())
    assert meta.first.sum() == 60
    starts = np.flatnonzero(meta.first)
    for a, b in zip(starts, [*starts[1:], len(meta.pieces)], strict=True):
        pieces = meta.pieces[a:b]
        assert len(set(pieces["row"].tolist())) == 1
        assert pieces["start"].tolist() == list(range(0, 3 * len(pieces), 3))


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_loss_tokens_follow_mask_and_labels(tmp_path, form):
    ids = [[1, 2, 3, 4, 5], [6], [7, 8]]
    masks, labels = [[1, 0, 1, 1, 0], [1], [0, 1]], [[1, 2, -100, 4, 5], [6], [7, 8]]
    if form == "parquet":
        pq.write_table(pa.table({"input_ids": ids, "loss_mask": masks, "labels": labels}), tmp_path / "a.parquet")
        source = Source("d", str(tmp_path / "a.parquet"), shuffle=False)
    else:
        records = [{"input_ids": i, "loss_mask": m, "labels": x} for i, m, x in zip(ids, masks, labels, strict=True)]
        source = Source("d", records, shuffle=False)

    def targets(capacity, *fields):
        loader = loader_of(source, rows=PackedRows(capacity, 1, token_fields=fields))
        meta = loader.describe(FIRST)
        block = take_all(loader, meta)
        assert all(len(block.tokens[f].values) == 8 for f in fields)
        return meta.pieces["loss_tokens"].tolist()

    assert targets(8) == [4, 0, 1]
    assert targets(8, "loss_mask") == [2, 0, 1]
    assert targets(8, "labels") == [3, 0, 1]
    assert targets(8, "loss_mask", "labels") == [1, 0, 1]
    assert targets(3, "loss_mask") == [1, 0, 0, 1]


def test_numbers_are_described_for_each_piece_and_not_held(tmp_path):
    lengths = [3, 40, 5, 1]
    table = {"input_ids": pa.array([[1] * n for n in lengths]), "patches": pa.array([7, 11, 13, 17], pa.uint16())}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    source = Source("s", str(tmp_path / "a.parquet"))
    plain, loader = loader_of(source), loader_of(source, metadata=("patches",))
    meta = loader.describe(FIRST)
    assert meta.metadata["patches"].dtype == np.float64
    described = zip(meta.pieces["row"].tolist(), meta.metadata["patches"].tolist(), strict=True)
    assert sorted(described) == [(0, 7), (1, 11), (1, 11), (1, 11), (2, 13), (3, 17)]
    assert meta.payload_bytes == plain.describe(FIRST).payload_bytes
    assert not plain.describe(FIRST).metadata
    assert set(take_all(loader, meta).samples) == set()


def test_bad_records_raise_or_are_dropped_with_their_place(tmp_path):
    ids = [[1, 2], None, [3, None], [5, 6], [2**40], [7]]
    masks = [[1, 1], [1], [1, 1], [1], [1], [1]]
    pq.write_table(
        pa.table({"input_ids": pa.array(ids, pa.list_(pa.int64())), "loss_mask": masks}), tmp_path / "a.parquet"
    )
    rows = PackedRows(4, 1, token_fields=("loss_mask",))
    path = str(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"'web', .*a\.parquet, unit 0, row 1: 'input_ids' is null"):
        loader_of(Source("web", path), rows=rows).describe(FIRST)
    loader = loader_of(Source("web", path, on_error="skip", shuffle=False), rows=rows)
    meta = loader.describe(FIRST)
    assert meta.kept.tolist() == [True, False, False, False, False, True]
    assert {meta.reasons[r] for r in meta.reason[1:5]} == {"read_error"}
    block = take_all(loader, meta)
    assert (texts(block), texts(block, "loss_mask")) == ([[1, 2], [7]], [[1, 1], [1]])
    assert meta.pieces["loss_tokens"].tolist() == [1, 0, 0, 0, 0, 0]


def test_bad_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": \n{"text": "x"}\n{"input_ids": ["a"]}\n')
    path = str(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl, unit 0, row 1: the line at byte 22 is not JSON"):
        loader_of(Source("web", path)).describe(FIRST)
    meta = loader_of(Source("web", path, on_error="skip", shuffle=False)).describe(FIRST)
    assert meta.kept.tolist() == [True, False, False, False]


def test_length_by_column_or_function_takes_the_first_tokens(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1, 2, 0, 0], [3, 4, 5, 6]], "n": [2, 4]}), tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    for length in ("n", lambda sample: sample["n"]):
        loader = loader_of(Source("s", path, length=length, shuffle=False))
        assert texts(take_all(loader, loader.describe(FIRST))) == [[1, 2], [3, 4, 5, 6]]
    with pytest.raises(DataError, match="'length' is 9 where 'input_ids' has 4"):
        loader_of(Source("s", path, length=lambda sample: 9)).describe(FIRST)
    with pytest.raises(ConfigError, match="no column 'm'"):
        loader_of(Source("s", path, length="m")).describe(FIRST)


def test_sample_fields_are_arrays_where_they_can_be():
    data = [{"input_ids": [1] * (i + 1), "score": i / 2, "box": [i, i], "url": f"u{i}"} for i in range(4)]
    rows = PaddedRows(3, 1, sample_fields=("score", "box", "url"))
    loader = loader_of(Source("d", data, shuffle=False), rows=rows)
    block = take_all(loader, loader.describe(FIRST))
    assert block.samples["score"].tolist() == [0, 0.5, 1, 1.5, 1.5]
    assert block.samples["box"].shape == (5, 2)
    assert block.samples["url"].tolist() == ["u0", "u1", "u2", "u3", "u3"]


def test_a_text_column_is_refused(tmp_path):
    pq.write_table(pa.table({"input_ids": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="'input_ids' is string"):
        loader_of(Source("s", str(tmp_path / "a.parquet"))).describe(FIRST)


def test_replay_of_other_data_is_refused():
    grown = [0]

    def transform(sample):
        return {"input_ids": list(range(5 + grown[0]))}

    loader = loader_of(Source("web", [{"x": 1}], transform=transform))
    meta = loader.describe(FIRST)
    loader.release([FIRST])
    grown[0] = 1
    with pytest.raises(ReplayError, match=r"'web'.*row 0.*transform '.*transform' gives 6 tokens.* gave 5"):
        take_all(loader, meta)
    grown[0] = 40
    with pytest.raises(ReplayError):
        take_all(loader, meta)


def test_replay_with_other_targets_is_refused():
    """The lengths are the same, but not what `step_loss_tokens` was counted from."""
    counted = [1]
    source = Source(
        "web", [{"x": 1}], transform=lambda sample: {"input_ids": [1, 2, 3], "loss_mask": [1, 1, counted[0]]}
    )
    loader = loader_of(source, rows=PackedRows(16, 1, token_fields=("loss_mask",)))
    meta = loader.describe(FIRST)
    loader.release([FIRST])
    counted[0] = 0
    with pytest.raises(ReplayError, match="3 tokens with 1 targets where it gave 3 tokens with 2 targets"):
        take_all(loader, meta)


def test_two_threads_make_a_part_once():
    entered, go_on, calls = threading.Event(), threading.Event(), []

    def transform(sample, rng):
        calls.append(sample["n"])
        entered.set()
        assert go_on.wait(10)
        return {"input_ids": [sample["n"]]}

    loader = loader_of(Source("d", [{"n": n} for n in range(5)], transform=transform))
    found = []
    threads = [threading.Thread(target=lambda: found.append(loader.describe(FIRST))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 5
    assert loader.stats()["made"] == 1
    assert all(meta is found[0] for meta in found)


def test_a_part_that_failed_is_tried_again():
    fails = [True]

    def transform(sample, rng):
        if fails.pop() if fails else False:
            raise RuntimeError("once")
        return {"input_ids": [1]}

    loader = loader_of(Source("d", [{"n": 1}], transform=transform))
    with pytest.raises(DataError, match="RuntimeError: once"):
        loader.describe(FIRST)
    assert loader.describe(FIRST).kept.all()


def test_a_part_that_only_a_damaged_state_asks_for_is_named():
    loader = loader_of(Source("d", [{"input_ids": [1]}]))
    with pytest.raises(StateError, match=r"source 'd' of stream 'train' has no part 1 in window 0 of epoch 0"):
        loader.describe(PartKey("train", 0, 0, 0, 1))


def test_unknown_windows_and_streams_are_index_errors():
    loader = loader_of(Source("d", [{"input_ids": [1]}]))
    for key in (PartKey("train", 0, 0, 1, 0), PartKey("val/0", 0, 0, 0, 0)):
        with pytest.raises(IndexError):
            loader.describe(key)
