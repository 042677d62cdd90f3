"""`transform_batched`: what it gets and may give, its seeds, what it drops and what is wrong with it."""

from __future__ import annotations

import functools
import json
import pickle
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.checkpointing.fingerprint import order_fingerprint
from megascale_lightning.config import LoaderConfig
from megascale_lightning.errors import ConfigError, DataError
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.rows import CollatedRows, PackedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PartKey, TakeRequest

from . import codes

COUNT = 2300
TEXTS = [f"{n} " + "x" * (n % 7) for n in range(COUNT)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two units: row groups of 1500 and 800 records; numbers, strings and lists."""
    folder = tmp_path_factory.mktemp("batched")
    table = pa.table({"n": range(COUNT), "text": TEXTS, "ids": [[n, n + 1] for n in range(COUNT)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=1500)
    return str(folder / "a.parquet")


def loader_for(source, rows=None, seed=0):
    loaded = LoadedSource(source, build_manifest(source))
    return SourceLoader({"train": [loaded]}, {"train": rows or PackedRows(64, 1)}, seed, 8, 1 << 30, 1 << 30)


def meta_of(transform, data, rows=None, *, seed=0, epoch=0, **more):
    source = Source("web", data, transform_batched=transform, shuffle=False, **more)
    loader = loader_for(source, rows, seed)
    return loader, loader.describe(PartKey("train", 0, epoch, 0, 0))


def ids_of(transform, data, **more):
    """(unit, row) -> ids of the records that are kept."""
    loader, meta = meta_of(transform, data, **more)
    pieces = meta.pieces[meta.kept]
    ragged = loader.take([TakeRequest(meta.key, pieces)]).tokens["input_ids"]
    names = pieces[["unit", "row"]].tolist()
    return {
        tuple(name): ragged.values[a:b].tolist()
        for name, a, b in zip(names, ragged.offsets[:-1], ragged.offsets[1:], strict=True)
    }


def in_lists(columns):
    return {"input_ids": [[n, len(text)] for n, text in zip(columns["n"], columns["text"], strict=True)]}


def in_arrays(columns):
    return {"input_ids": [np.array(ids) for ids in in_lists(columns)["input_ids"]]}


def in_a_table(columns):
    return {"input_ids": np.array(in_lists(columns)["input_ids"])}


def in_arrow(columns):
    return {"input_ids": pa.array(in_lists(columns)["input_ids"])}


def in_samples(columns):
    return [{"input_ids": ids} for ids in in_lists(columns)["input_ids"]]


WANTED = {(n // 1500, n % 1500): [n, len(TEXTS[n])] for n in range(COUNT)}


@pytest.mark.parametrize("transform", [in_lists, in_arrays, in_a_table, in_arrow, in_samples])
def test_every_form_of_answer_gives_the_same_tokens(files, transform):
    assert ids_of(transform, files) == WANTED


def test_it_gets_at_most_256_records_of_one_unit_in_order(files):
    seen = []

    def transform(columns):
        seen.append((columns["n"][0], columns["n"][-1], len(columns["n"])))
        assert all(type(column) is list for column in columns.values())
        assert isinstance(columns["ids"][0], np.ndarray)
        columns["ids"][0] += 1  # its own
        columns["input_ids"] = columns.pop("ids")
        return columns

    ids_of(transform, files)
    starts = [*range(0, 1500, 256), *range(1500, 2300, 256)]
    stops = [*starts[1:], 2300]
    assert seen == [(start, stop - 1, stop - start) for start, stop in zip(starts, stops, strict=True)]


def test_encodings_of_a_tokenizer_are_taken_as_they_are(files):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {letter: index for index, letter in enumerate("0123456789x ")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    wanted = {name: tokenizer.encode(TEXTS[ids[0]]).ids for name, ids in WANTED.items()}
    assert ids_of(lambda columns: {"input_ids": tokenizer.encode_batch(columns["text"])}, files) == wanted
    assert ids_of(lambda columns: tokenizer.encode_batch(columns["text"]), files) == wanted


def test_records_of_json_may_lack_fields():
    data = [{"a": 1}, {"b": 2}, {"a": 3, "b": 4}]
    seen = []

    def transform(columns):
        seen.append(columns)
        return {"input_ids": [[(a or 0) + 1, (b or 0) + 1] for a, b in zip(columns["a"], columns["b"], strict=True)]}

    assert list(ids_of(transform, data).values()) == [[2, 1], [1, 3], [4, 5]]
    assert seen == [{"a": [1, None, 3], "b": [None, 2, 4]}]


@pytest.mark.parametrize(
    "transform",
    [
        lambda columns: {
            "input_ids": [[n] if n % 3 else None for n in columns["n"]],
            "score": [float(n) if n % 3 else None for n in columns["n"]],
        },
        lambda columns: [{"input_ids": [n], "score": float(n)} if n % 3 else None for n in columns["n"]],
        lambda columns: {
            "input_ids": pa.array([[n] if n % 3 else None for n in columns["n"]]),
            "score": pa.array([float(n) if n % 3 else None for n in columns["n"]]),
        },
    ],
    ids=["lists", "samples", "arrow"],
)
def test_none_drops_a_record(transform):
    data = [{"n": n} for n in range(1, 10)]
    loader, meta = meta_of(transform, data, PackedRows(64, 1, sample_fields=("score",)))
    assert [meta.reasons[code] for code in meta.reason] == ["", "", "filtered"] * 3
    block = loader.take([TakeRequest(meta.key, meta.pieces[meta.kept])])
    assert block.tokens["input_ids"].values.tolist() == [1, 2, 4, 5, 7, 8]
    assert block.samples["score"].tolist() == [1, 2, 4, 5, 7, 8]


def test_none_in_some_fields_is_a_failure():
    def transform(columns):
        return {"input_ids": [[n] for n in columns["n"]], "score": [None if n == 1 else n for n in columns["n"]]}

    rows = PackedRows(64, 1, sample_fields=("score",))
    with pytest.raises(DataError, match=r"'web', <dataset>, unit 0, row 1: 'score' is null"):
        meta_of(transform, [{"n": n} for n in range(3)], rows)


def with_rng(columns, rng):
    return {"input_ids": rng.integers(0, 1 << 30, (len(columns["n"]), 2))}


def keyword_rng(columns, *, rng):
    return with_rng(columns, rng)


def with_globals(columns):
    torch = pytest.importorskip("torch")
    drawn = [
        [random.randrange(1 << 30), int(np.random.randint(1 << 30)), int(torch.randint(1 << 30, (1,)))]  # noqa: NPY002
        for _ in columns["n"]
    ]
    return {"input_ids": drawn}


@pytest.mark.parametrize("transform", [with_rng, keyword_rng, with_globals])
def test_randomness_is_a_function_of_seed_source_epoch_unit_and_first_row(files, transform):
    base = ids_of(transform, files)
    assert len({tuple(ids) for ids in base.values()}) == COUNT
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert ids_of(transform, files) == base
    assert not set(map(tuple, ids_of(transform, files, seed=1).values())) & set(map(tuple, base.values()))
    assert not set(map(tuple, ids_of(transform, files, epoch=1).values())) & set(map(tuple, base.values()))


def test_the_callers_random_states_are_untouched(files):
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = (random.random(), np.random.random())  # noqa: NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    ids_of(with_globals, files)
    assert (random.random(), np.random.random()) == expected  # noqa: NPY002


def failing(columns):
    if 1203 in columns["n"] or 7 in columns["n"]:
        raise ValueError("a bad record")
    return {"input_ids": [[n] for n in columns["n"]]}


def test_a_call_that_fails_names_the_rows(files):
    wanted = r"'web', .*a\.parquet, unit 0: rows 0 to 255: transform 'failing' failed: ValueError: a bad record"
    with pytest.raises(DataError, match=wanted) as info:
        meta_of(failing, files)
    causes = [info.value]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert isinstance(causes[-1], ValueError)
    assert "a bad record" in str(causes[-1])


def test_where_errors_are_skipped_the_bad_records_are_found(files):
    loader, meta = meta_of(failing, files, on_error="skip")
    reasons = [meta.reasons[code] for code in meta.reason]
    assert [n for n, reason in enumerate(reasons) if reason] == [7, 1203]
    assert set(reasons) == {"", "transform_error"}
    ids = loader.take([TakeRequest(meta.key, meta.pieces[meta.kept])]).tokens["input_ids"].values
    assert ids.tolist() == [n for n in range(COUNT) if n not in (7, 1203)]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            lambda n: {"input_ids": [[1]] * (n - 1)},
            r"transform .* gave 2 values of 'input_ids' for the 3 records of rows 0",
        ),
        (lambda n: [{"input_ids": [1]}] * (n + 1), r"gave 4 samples for the 3 records of rows 0 to 2; give one each"),
        (lambda n: {"ids": [[1]] * n}, r"gave a sample without 'input_ids'; its keys are \['ids'\]"),
        (lambda n: None, r"gave a NoneType for rows 0 to 2; give a mapping of one sequence"),
        (lambda n: {"input_ids": "abc"}, r"gave a str as 'input_ids' for rows 0 to 2; give a sequence"),
        (lambda n: {"input_ids": 5}, r"gave a int as 'input_ids' for rows 0 to 2"),
        (lambda n: [[1]] * n, r"gave a list among the samples of rows 0 to 2; a sample is one dict"),
        (lambda n: {"input_ids": [[1]] * n, "labels": [[1]] * n}, r"gives 'labels', which would be ignored"),
    ],
)
def test_what_is_no_answer_is_an_error_whatever_on_error_says(answer, problem, on_error):
    with pytest.raises(DataError, match=rf"source 'web', <dataset>, unit 0: .*{problem}"):
        meta_of(lambda columns: answer(len(columns["n"])), [{"n": n} for n in range(3)], on_error=on_error)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([1.5], "holds float64, not token ids"),
        ([True], "holds bool"),
        ([2**31], "has the value 2147483648, which does not fit int32"),
        (["a"], "holds <U1"),
        (5, "has shape"),
        ([[1], [2]], "has shape"),
    ],
)
def test_values_that_are_no_ids_are_failures_of_their_records(ids, problem):
    def transform(columns):
        return {"input_ids": [ids if n == 1 else [n] for n in columns["n"]]}

    data = [{"n": n} for n in range(3)]
    with pytest.raises(DataError, match=rf"'web', <dataset>, unit 0, row 1: 'input_ids' {problem}"):
        meta_of(transform, data)
    assert meta_of(transform, data, on_error="skip")[1].kept.tolist() == [True, False, True]


def test_collated_rows_get_one_dict_per_record():
    def transform(columns):
        return {"x": np.arange(6.0).reshape(3, 2), "text": [f"{n}!" for n in columns["n"]], "one": pa.array([1, 2, 3])}

    loader, meta = meta_of(transform, [{"n": n} for n in range(3)], CollatedRows(1))
    payload = loader.take([TakeRequest(meta.key, meta.pieces)]).payload
    found = [pickle.loads(payload.values[a:b]) for a, b in zip(payload.offsets[:-1], payload.offsets[1:], strict=True)]
    assert [(one["x"].tolist(), one["text"], one["one"]) for one in found] == [
        ([0, 1], "0!", 1),
        ([2, 3], "1!", 2),
        ([4, 5], "2!", 3),
    ]
    with pytest.raises(DataError, match="gave 2 values of 'x' for the 3 records"):
        meta_of(lambda columns: {"x": [1, 2]}, [{"n": n} for n in range(3)], CollatedRows(1))


def test_collated_samples_may_be_anything_and_none_drops():
    _, meta = meta_of(
        lambda columns: [None if n == 1 else (n, "x") for n in columns["n"]],
        [{"n": n} for n in range(3)],
        CollatedRows(1),
    )
    assert [meta.reasons[code] for code in meta.reason] == ["", "filtered", ""]


def test_a_length_may_be_a_field_or_a_function():
    def transform(columns):
        return {"input_ids": [[1, 2, 3]] * len(columns["n"]), "size": columns["n"]}

    data = [{"n": n} for n in range(1, 4)]
    for length in ("size", lambda sample: sample["size"]):
        assert meta_of(transform, data, length=length)[1].pieces["length"].tolist() == [1, 2, 3]


def test_a_partial_and_an_object_are_named():
    class Tokens:
        def __call__(self, columns):
            raise KeyError("x")

    for transform, name in ((functools.partial(failing), "'failing'"), (Tokens(), "'.*Tokens'")):
        with pytest.raises(DataError, match=f"transform {name} failed"):
            meta_of(transform, [{"n": 7}])


def test_it_goes_instead_of_transform():
    with pytest.raises(ConfigError, match="'web': transform and transform_batched are two ways to say the same"):
        Source("web", [], transform=len, transform_batched=len)


def test_a_run_whose_records_are_all_dropped_does_not_change_the_others(files):
    def transform(columns):
        return [{"input_ids": [1], "score": float(n)} if n >= 600 else None for n in columns["n"]]

    loader, meta = meta_of(transform, files, PackedRows(64, 1, sample_fields=("score",)))
    block = loader.take([TakeRequest(meta.key, meta.pieces[meta.kept])])
    assert block.samples["score"].dtype == np.float64
    assert block.samples["score"].tolist() == list(range(600, COUNT))


def test_it_is_found_by_its_dotted_path_and_belongs_to_the_order():
    def table(**settings):
        config = LoaderConfig(sources={"web": {"data": [], **settings}}, rows=PackedRows(8, 1))
        return order_fingerprint(config, stream="train", global_batch_size=1, passes=False)

    path = "tests.loading.codes.batched_with_rng"
    plain, named = table(), table(transform_batched=path)
    assert {name: value for name, value in named.items() if name not in plain} == {
        "sources.web.transform_batched": path
    }
    assert "sources.web.transform_batched" not in plain  # states of before stay good
    assert table(executor="processes", num_workers=3) == plain
    with pytest.raises(ConfigError, match=r"transform_batched='nothing\.at_all' cannot be imported"):
        table(transform_batched="nothing.at_all")


@pytest.mark.filterwarnings("ignore:source 'web' is an iterable")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_records_without_fields_are_refused(on_error):
    def pairs():
        yield from ((n, n) for n in range(3))

    problem = r"source 'web', unit 0, rows 0 to 2: transform_batched gets the fields .* one of these is a tuple"
    with pytest.raises(DataError, match=problem):
        meta_of(in_lists, pairs, on_error=on_error)


def test_what_it_changed_before_it_failed_is_not_seen_when_records_are_tried_one_by_one(tmp_path):
    """Each record of JSON lines gets its end once, whether or not a neighbour is bad."""
    lines = [json.dumps({"n": n, "ids": [n]}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    def with_end(columns):
        for ids in columns["ids"]:
            ids.append(9)
        if 7 in columns["n"]:
            raise ValueError("bad")
        return {"input_ids": columns["ids"]}

    found = ids_of(with_end, str(tmp_path / "a.jsonl"), on_error="skip")
    assert found == {(0, n): [n, 9] for n in range(300) if n != 7}


def test_a_column_of_nulls_drops_all_records(files):
    loader, meta = meta_of(lambda columns: {"input_ids": pa.nulls(len(columns["n"]))}, files)
    assert set(meta.reason.tolist()) == {meta.reasons.index("filtered")}
    loader.shutdown()


@pytest.mark.parametrize("executor", ["inline", "processes"])
@pytest.mark.parametrize("setting", ["transform", "transform_batched", "sample_fields"])
def test_text_that_is_no_utf8_is_a_failure_of_its_record(tmp_path, setting, executor):
    """Parquet files may say of any bytes that they are text; the records beside it are good."""
    offsets, content = np.array([0, 1, 2, 3], np.int32), b"a\xffc"
    text = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(content))
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"input_ids": [[1], [2], [3]], "text": text}), path)
    rows = PackedRows(64, 1, sample_fields=("text",))
    more = {} if setting == "sample_fields" else {setting: codes.unchanged}

    def describe(on_error):
        source = Source("web", path, shuffle=False, on_error=on_error, executor=executor, **more)
        loader = loader_for(source, rows)
        try:
            meta = loader.describe(PartKey("train", 0, 0, 0, 0))
            return meta, loader.take([TakeRequest(meta.key, meta.pieces[meta.kept])])
        finally:
            loader.shutdown()

    meta, block = describe("skip")
    assert [meta.reasons[code] for code in meta.reason] == ["", "read_error", ""]
    assert block.samples["text"].tolist() == ["a", "c"]
    with pytest.raises(DataError, match=r"'web', .*parquet, unit 0, row 1: 'text' cannot be read: UnicodeDecodeError"):
        describe("raise")
