"""`Source.join`: a record gets the fields of its one partner; without one it follows `on_error`; ids are there once."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import ConfigError, CorruptDataError, DataError, MegaScaleWarning
from megascale_lightning.loading import LoadedSource, SourceLoader, ids, joined
from megascale_lightning.loading.joins import make_record_reader
from megascale_lightning.loading.quarantine import Quarantine, digest_of, read_lines
from megascale_lightning.loading.works import SampleWork
from megascale_lightning.rows import CollatedRows, PackedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.sources.formats import csv, jsonl
from megascale_lightning.sources.formats.parquet import ParquetReader
from megascale_lightning.sources.join import Join
from megascale_lightning.sources.stores import plaintext
from megascale_lightning.types import PartKey
from tests.loading.joinfiles import KINDS, write
from tests.loading.test_loading_loader import loader_of, metas_of, take_all, texts

COUNT = 60
RNG = np.random.default_rng(5)
OWN, OTHER = RNG.permutation(COUNT), RNG.permutation(COUNT)


def key_of(number, kind=str):
    return f"k{number:03}" if kind is str else int(number) * 1000 - 7


def columns_of(numbers, *, kind=str, key="__key__", name="txt"):
    return {key: [key_of(number, kind) for number in numbers], name: [f"{name} {number}" for number in numbers]}


def records_of(source, columns=None, **sizes):
    """All records as read, in stored order, failed ones as what is wrong with them."""
    manifest = build_manifest(source, needs_tokens=False)
    reader = make_record_reader(source, manifest, columns)
    found = []
    for unit in range(manifest.num_units):
        block = reader.read(unit)
        samples = block.samples()
        found += [block.failures.get(index) or samples[index] for index in range(block.num_rows)]
    return found


def paths_of(path, *kinds, kind=str, key="__key__", other=OTHER):
    own = write(path / "own" / "images", kinds[0], columns_of(OWN, kind=kind, key=key))
    return own, write(path / "other" / "captions", kinds[-1], columns_of(other, kind=kind, key=key, name="text"))


def lengthened(sample):
    """As many tokens as the number in both texts."""
    number = int(sample["txt"].split()[1])
    assert sample["text"].split()[1] == str(number)
    return {"input_ids": [number] * (1 + number % 5)}


class TestPartners:
    @pytest.mark.parametrize(("own", "other"), list(product(KINDS, KINDS)))
    def test_texts(self, tmp_path, own, other):
        mine, theirs = paths_of(tmp_path, own, other)
        found = records_of(Source("pairs", mine, join=Join(theirs, on="__key__", columns=["text"])))
        wanted = [{"__key__": key_of(n), "txt": f"txt {n}", "text": f"text {n}"} for n in OWN]
        assert [{name: record[name] for name in wanted[0]} for record in found] == wanted

    @pytest.mark.parametrize(("own", "other"), list(product(KINDS[:-1], KINDS[:-1])))
    def test_whole_numbers(self, tmp_path, own, other):
        mine, theirs = paths_of(tmp_path, own, other, kind=int, key="id")
        found = records_of(Source("pairs", mine, join=Join(theirs, on="id")))
        assert found == [{"id": key_of(n, int), "txt": f"txt {n}", "text": f"text {n}"} for n in OWN]

    def test_numbers_beyond_64_bits_and_texts_in_one_file(self, tmp_path):
        values = [1, 2**63, "1", -(2**70), "b", 2**64 + 1]
        records = {"id": values, "txt": [str(value) for value in values]}
        own = write(tmp_path / "own", "jsonl", records)
        other = write(tmp_path / "other", "jsonl", {"id": values[::-1], "text": list(range(6))[::-1]})
        assert [one["text"] for one in records_of(Source("pairs", own, join=Join(other, on="id")))] == list(range(6))
        pq.write_table(pa.table({"id": pa.array([2**63], pa.uint64()), "text": [9]}), tmp_path / "large.parquet")
        found = records_of(Source("pairs", own, on_error="skip", join=Join(str(tmp_path / "large.parquet"), on="id")))
        assert found[1] == {"id": 2**63, "txt": str(2**63), "text": 9}
        assert all(isinstance(one, str) for at, one in enumerate(found) if at != 1)

    def test_several_may_share_one(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1, 2, 1, 1], "txt": list("abcd")})
        other = write(tmp_path / "other", "parquet", {"id": [2, 1], "text": ["two", "one"]})
        assert [one["text"] for one in records_of(Source("p", own, join=Join(other, on="id")))] == [
            "one",
            "two",
            "one",
            "one",
        ]

    def test_several_joins(self, tmp_path):
        own, first = paths_of(tmp_path, "parquet", "jsonl", kind=int, key="id")
        second = write(tmp_path / "more" / "m", "parquet", columns_of(range(COUNT), kind=int, key="id", name="more"))
        both = [Join(first, on="id"), {"data": second, "on": "id", "columns": ["more"]}]
        found = records_of(Source("pairs", own, join=both))
        assert [one["more"] for one in found] == [f"more {n}" for n in OWN]
        assert [one["text"] for one in found] == [f"text {n}" for n in OWN]

    def test_files_of_other_schemas(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1, 2], "txt": ["a", "b"]})
        pq.write_table(pa.table({"id": [1], "n": pa.array([[5]], pa.list_(pa.int16()))}), tmp_path / "x0.parquet")
        pq.write_table(pa.table({"id": [2], "n": pa.array([[6]], pa.list_(pa.int64()))}), tmp_path / "x1.parquet")
        found = records_of(Source("pairs", own, join=Join(str(tmp_path / "x*.parquet"), on="id")))
        assert [one["n"].dtype for one in found] == [np.int16, np.int64]

    def test_a_field_that_some_files_lack_changes_no_type(self, tmp_path):
        """And no record has it, beside others that do."""
        own = write(tmp_path / "own", "parquet", {"id": list(range(8)), "input_ids": [[7]] * 8}, unit_rows=2)
        w = pa.array([0.0, 1.0, 2.0, 3.0], pa.float32())
        pq.write_table(pa.table({"id": [0, 1, 2, 4], "w": w}), tmp_path / "x0.parquet")
        pq.write_table(pa.table({"id": [3, 5, 6, 7], "lang": list("abcd"), "w": w}), tmp_path / "x1.parquet")
        source = Source("pairs", own, shuffle=False, join=Join(str(tmp_path / "x*.parquet"), on="id"))
        loader = loader_of(source, rows=PackedRows(16, 1, sample_fields=("w",)), window_units=1)
        fields = [take_all(loader, meta).samples["w"] for meta in metas_of(loader)]
        assert [one.dtype for one in fields] == [np.float32] * 4
        assert np.concatenate(fields).tolist() == [0, 1, 2, 0, 3, 1, 2, 3]
        seen = {}

        def saw(sample):
            seen[sample["id"]] = "lang" in sample
            return sample

        source = Source("pairs", own, transform=saw, join=source.join)
        list(metas_of(loader_of(source)))
        assert seen == {n: n in (3, 5, 6, 7) for n in range(8)}

    def test_what_is_read_in_slices_may_be_completed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(plaintext, "SLICED_BYTES", 100)
        lines = "".join(json.dumps({"id": int(n), "txt": f"txt {n}"}) + "\n" for n in OWN)
        with pa.CompressedOutputStream(str(tmp_path / "own.jsonl.gz"), "gzip") as stream:
            stream.write(lines.encode())
        other = write(tmp_path / "other", "parquet", {"id": OTHER, "text": [f"text {n}" for n in OTHER]})
        source = Source("pairs", str(tmp_path / "own.jsonl.gz"), transform=lengthened, join=Join(other, on="id"))
        metas = list(metas_of(loader_of(source, part_bytes=400)))
        assert len(metas) > 3
        assert sum(len(meta.pieces) for meta in metas) == COUNT

    @pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning")
    def test_an_iterable_may_be_completed(self, tmp_path):
        other = write(tmp_path / "other", "parquet", {"id": OTHER, "text": [f"text {n}" for n in OTHER]})

        def own():
            return ({"id": int(n), "txt": f"txt {n}"} for n in OWN)

        source = Source("pairs", own, transform=lengthened, epochs=1, join=Join(other, on="id"))
        (meta,) = metas_of(loader_of(source, window_units=100))
        assert len(meta.pieces) == COUNT


class TestInParts:
    @pytest.mark.parametrize("other", KINDS[:-1])
    def test_tokens_may_come_from_what_is_joined(self, tmp_path, other):
        """Also where none of the user's code is run."""
        own = write(tmp_path / "own", "parquet", {"id": OWN, "txt": [f"txt {n}" for n in OWN]})
        tokens = {"id": OTHER[:-9], "input_ids": [[int(n)] * (1 + n % 5) for n in OTHER[:-9]]}
        theirs = write(tmp_path / "other", other, {name: list(map(_plain, values)) for name, values in tokens.items()})
        source = Source("pairs", own, on_error="skip", join=Join(theirs, on="id"))
        loader = loader_of(source, part_bytes=200)
        given = {}
        for meta in metas_of(loader):
            kept = meta.pieces[meta.kept]
            given |= dict(zip(kept["unit"] * 7 + kept["row"], texts(take_all(loader, meta)), strict=True))
            assert set(meta.reason[~meta.kept].tolist()) <= {8}
        missing = set(OTHER[-9:].tolist())
        assert given == {at: [n] * (1 + n % 5) for at, n in enumerate(OWN.tolist()) if n not in missing}

    @pytest.mark.parametrize("count", [3, 4])
    def test_one_without_a_partner_changes_no_type(self, tmp_path, count):
        """Nor does one with null: fields of several numbers of the others stay one array."""
        own = write(tmp_path / "own", "parquet", {"id": [0, 1, 2, 3], "input_ids": [[7]] * 4})
        vectors = [[float(n), 1.0] for n in range(count)]
        stored = pa.array([None, *vectors[1:]], pa.list_(pa.float32()))
        pq.write_table(pa.table({"id": list(range(count)), "vec": stored}), tmp_path / "other.parquet")
        source = Source("p", own, on_error="skip", shuffle=False, join=Join(str(tmp_path / "other.parquet"), on="id"))
        loader = loader_of(source, rows=PackedRows(16, 1, sample_fields=("vec",)))
        (meta,) = metas_of(loader)
        vec = take_all(loader, meta).samples["vec"]
        assert (vec.dtype, vec.tolist()) == (np.float32, vectors[1:])

    @pytest.mark.parametrize("kinds", [("parquet", "parquet"), ("jsonl", "parquet"), ("tar", "jsonl")])
    @pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
    def test_a_transform_sees_both_wherever_it_runs(self, tmp_path, kinds, executor):
        mine, theirs = paths_of(tmp_path, *kinds, other=OTHER[3:])
        source = Source(
            "pairs",
            mine,
            transform=lengthened,
            thread_safe=True,
            executor=executor,
            num_workers=2,
            on_error="skip",
            join=Join(theirs, on="__key__", columns=["text"]),
        )
        loader = loader_of(source, window_units=100)
        (meta,) = metas_of(loader)
        lost = set(OTHER[:3].tolist())
        assert sorted(meta.pieces["length"].tolist()) == sorted(0 if n in lost else 1 + n % 5 for n in range(COUNT))
        assert sorted(meta.reason[~meta.kept].tolist()) == [8, 8, 8]
        loader.shutdown()

    def test_a_batched_transform_sees_both(self, tmp_path):
        mine, theirs = paths_of(tmp_path, "parquet", "parquet", other=OTHER[3:])

        def batched(columns):
            assert [text.split()[1] for text in columns["text"]] == [text.split()[1] for text in columns["txt"]]
            return {"input_ids": [[1]] * len(columns["txt"])}

        join = Join(theirs, on="__key__")
        source = Source("p", mine, transform_batched=batched, on_error="skip", join=join)
        (meta,) = metas_of(loader_of(source, window_units=100))
        assert (~meta.kept).sum() == 3

    def test_worker_processes_get_no_files_and_no_keys(self, tmp_path):
        mine, theirs = paths_of(tmp_path, "parquet")
        join = Join(theirs, on="__key__", storage_options={"key": "s3cret-key"})
        with pytest.warns(MegaScaleWarning, match="storage_options are ignored"):
            manifest = build_manifest(Source("p", mine, join=join), needs_tokens=False)
        work = SampleWork(source=Source("p", mine, join=join), seed=0, manifest=manifest, columns=None).portable()
        assert work.source.joins[0].on == "__key__"
        assert not [text for text in (b"s3cret", theirs.encode()) if text in pickle.dumps(work)]

    @pytest.mark.parametrize("columns", [None, ("txt",)])
    @pytest.mark.parametrize("kinds", [("parquet", "parquet"), ("jsonl", "jsonl")])
    @pytest.mark.parametrize("executor", ["inline", "processes"])
    def test_collated_rows_have_the_fields_of_both(self, tmp_path, columns, kinds, executor):
        mine, theirs = paths_of(tmp_path, *kinds, kind=int, key="id")
        join = Join(theirs, on="id", columns=("text",))
        source = Source("p", mine, columns=columns, executor=executor, num_workers=1, join=join)
        loader = loader_of(source, rows=CollatedRows(2), window_units=100)
        (meta,) = metas_of(loader)
        payload = take_all(loader, meta).payload
        samples = [_unpickled(payload, at) for at in range(COUNT)]
        wanted = {n: {"txt": f"txt {n}", "text": f"text {n}"} for n in range(COUNT)}
        for sample in samples:
            number = int(sample["txt"].split()[1])
            own = {} if columns else {"id": key_of(number, int)}
            assert sample == {**own, **wanted.pop(number)}
        assert not wanted
        loader.shutdown()

    def test_a_length_may_come_from_either(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1, 2], "a": [5, 6], "x": [0, 0]})
        other = write(tmp_path / "other", "parquet", {"id": [2, 1], "b": [8, 7], "y": [0, 0]})
        for length, columns, wanted in (("a", ("y",), [5, 6]), ("b", ("b",), [7, 8])):
            source = Source("p", own, columns=("x",), length=length, join=Join(other, on="id", columns=columns))
            loader = loader_of(source, rows=CollatedRows(1))
            (meta,) = metas_of(loader)
            assert sorted(meta.pieces["length"].tolist()) == wanted
            payload = take_all(loader, meta).payload
            assert {tuple(_unpickled(payload, at)) for at in range(2)} == {("x", *columns)}

    def test_a_length_of_tokens_may_come_from_either(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1, 2], "n": [1, 2], "input_ids": [[7, 7, 7]] * 2})
        other = write(tmp_path / "other", "parquet", {"id": [2, 1], "m": [3, 2]})
        for length, wanted in (("n", [1, 2]), ("m", [2, 3])):
            join = Join(other, on="id", columns=("m",))
            (meta,) = metas_of(loader_of(Source("p", own, columns=("input_ids",), length=length, join=join)))
            assert sorted(meta.pieces["length"].tolist()) == wanted

    @pytest.mark.parametrize("rows", [CollatedRows(1), PackedRows(16, 1)])
    def test_a_length_that_no_join_names_is_looked_for_in_the_own_files(self, tmp_path, rows):
        own = write(tmp_path / "own", "parquet", {"id": [1, 2], "n": [1, 2], "input_ids": [[7, 7, 7]] * 2})
        other = write(tmp_path / "other", "parquet", {"id": [2, 1], "m": [3, 2]})
        settings = {"columns": ("input_ids",), "join": Join(other, on="id")}
        (meta,) = metas_of(loader_of(Source("p", own, length="n", **settings), rows=rows))
        assert sorted(meta.pieces["length"].tolist()) == [1, 2]
        with pytest.raises(ConfigError, match=r"own\.parquet has no column 'm'; .* named in columns= of its Join"):
            list(metas_of(loader_of(Source("p", own, length="m", **settings), rows=rows)))

    def test_a_field_that_neither_has_is_named(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1, 2], "input_ids": [[7]] * 2, "labels": [[7]] * 2})
        other = write(tmp_path / "other", "parquet", {"id": [2, 1], "text": ["a", "b"]})
        for columns, rows in (
            (("id",), PackedRows(16, 1)),
            (("input_ids",), PackedRows(16, 1, token_fields=("labels",))),
            (None, PackedRows(16, 1, sample_fields=("size",))),
        ):
            source = Source("p", own, columns=columns, join=Join(other, on="id"))
            name = [*rows.token_columns, *rows.sample_fields][-1]
            with pytest.raises(
                ConfigError, match=rf"'p': \S*own\.parquet, .*joined to it, has no column '{name}'; its"
            ):
                list(metas_of(loader_of(source, rows=rows)))

    def test_those_that_go_along_are_none_of_the_bad_ones(self, tmp_path):
        columns = {"id": list(range(6)), "pair": [0, 0, 1, 1, 2, 2], "input_ids": [[1], [1], [1] * 17, [1], [1], [1]]}
        own = write(tmp_path / "own", "parquet", columns)
        other = write(tmp_path / "other", "parquet", {"id": [0, 2, 3, 4, 5], "text": ["c"] * 5})
        join = Join(other, on="id")
        source = Source("p", own, on_error="skip", shuffle=False, together="pair", overlong="drop", join=join)
        (meta,) = metas_of(loader_of(source))
        reasons = [meta.reasons[code] for code in meta.reason.tolist()]
        assert reasons == ["partner", "unpaired", "overlong", "overlong", "", ""]
        assert source.bad_reasons == ("read_error", "transform_error", "unpaired")

    def test_one_without_a_partner_takes_its_group_along_and_no_other(self, tmp_path):
        columns = {"id": list(range(8)), "pair": [0, 0, 1, 1, 1, 2, 2, 3], "input_ids": [[1]] * 8}
        own = write(tmp_path / "own", "parquet", columns, unit_rows=3)
        for kind in ("parquet", "jsonl"):
            other = write(tmp_path / "other", kind, {"id": [0, 1, 2, 3, 5, 6, 7], "text": ["c"] * 7})
            settings = {"together": "pair", "overlong": "drop", "join": Join(other, on="id")}
            (meta,) = metas_of(loader_of(Source("p", own, on_error="skip", shuffle=False, **settings)))
            assert meta.kept.tolist() == [True, True, False, False, False, True, True, True]
            with pytest.raises(DataError, match=r"unit 1, row 1: no record of .* has the 'id' 4;"):
                list(metas_of(loader_of(Source("p", own, **settings))))


def _plain(value):
    return value if isinstance(value, list) else int(value)


def _unpickled(payload, at):
    return pickle.loads(payload.values[payload.offsets[at] : payload.offsets[at + 1]].tobytes())


class TestMissing:
    @pytest.mark.parametrize(
        ("kinds", "kind"),
        [*product([("parquet", "parquet"), ("jsonl", "jsonl")], [str, int]), (("tar", "parquet"), str)],
    )
    @pytest.mark.parametrize("on_error", ["raise", "skip", "quarantine"])
    def test_it_follows_on_error(self, tmp_path, kinds, kind, on_error):
        mine, theirs = paths_of(tmp_path, *kinds, kind=kind, other=OTHER[2:])
        source = Source(
            "pairs",
            mine,
            transform=lengthened,
            on_error=on_error,
            shuffle=False,
            join=Join(theirs, on="__key__", columns=["text"]),
        )
        place = Quarantine(str(tmp_path / "bad" / "pairs.jsonl"), "train") if on_error == "quarantine" else None
        loaded = LoadedSource(source, build_manifest(source), place)
        loader = SourceLoader({"train": [loaded]}, {"train": PackedRows(16, 1)}, 0, 100, 1 << 20, 1 << 30)
        lost = sorted(np.flatnonzero(np.isin(OWN, OTHER[:2])).tolist())
        first = repr(key_of(OWN[lost[0]], kind))
        key = PartKey("train", 0, 0, 0, 0)
        if on_error == "raise":
            unit, row = divmod(lost[0], 7) if kinds[0] == "parquet" else (0, lost[0])
            said = rf"^source 'pairs', \S*own/images\.\w+, unit {unit}, row {row}: no record of \S*captions\.\w+ "
            with pytest.raises(DataError, match=rf"{said}has the '__key__' {first}; .*on_error=\"skip\""):
                loader.describe(key)
            return
        meta = loader.describe(key)
        assert np.flatnonzero(~meta.kept).tolist() == lost
        assert [meta.reasons[code] for code in meta.reason[~meta.kept].tolist()] == ["unpaired"] * 2
        if place is not None:
            lines = list(read_lines(tmp_path / "bad"))
            assert [line["reason"] for line in lines] == ["unpaired"] * 2
            assert first in lines[0]["message"]
            assert len({line["digest"] for line in lines}) == 2
            assert all(line["digest"] for line in lines)

    def test_its_digest_is_that_of_its_own_fields(self, tmp_path):
        """Whether its neighbours in the block have a partner or not."""
        own = write(tmp_path / "own", "parquet", {"id": [1, 2], "txt": ["a", "b"], "none": [None, None]})
        other = write(tmp_path / "other", "parquet", {"id": [1], "text": ["c"]})
        source = Source("p", own, on_error="skip", join=Join(other, on="id"))
        reader = make_record_reader(source, build_manifest(source, needs_tokens=False), None)
        beside, alone = reader.read(0), reader.read(0, 1, 2)
        assert (beside.table is None, alone.table is None) == (False, True)
        assert digest_of(beside, 1) == digest_of(alone, 0)
        assert digest_of(beside, 0) != digest_of(beside, 1)

    @pytest.mark.parametrize("kind", ["parquet", "jsonl"])
    def test_of_blocks_that_are_cut_for_the_transform(self, tmp_path, kind):
        own = write(tmp_path / "own", kind, columns_of(OWN, key="id"), unit_rows=COUNT)
        other = write(tmp_path / "other", kind, columns_of(OTHER[2:], key="id", name="text"))
        source = Source("pairs", own, on_error="skip", shuffle=False, join=Join(other, on="id"))
        (meta,) = metas_of(loader_of(source, rows=CollatedRows(1)))
        assert np.flatnonzero(meta.reason == 8).tolist() == np.flatnonzero(np.isin(OWN, OTHER[:2])).tolist()
        assert (~meta.kept).sum() == 2

    def test_null_belongs_to_nothing(self, tmp_path):
        for kind, mine in (("parquet", "parquet"), ("jsonl", "jsonl")):
            own = write(tmp_path / "own", mine, {"id": [1, None, 2], "txt": list("abc")})
            other = write(tmp_path / "other", kind, {"id": [None, 2, None, 1], "text": list("wxyz")})
            found = records_of(Source("pairs", own, on_error="skip", join=Join(other, on="id")))
            assert [found[0]["text"], found[2]["text"]] == ["z", "x"]
            assert found[1].startswith("its 'id' is null, so that nothing of ")

    def test_ids_of_another_kind_are_hinted_at(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1], "txt": ["a"]})
        other = write(tmp_path / "other", "parquet", {"id": ["1"], "text": ["b"]})
        found = records_of(Source("pairs", own, on_error="skip", join=Join(other, on="id")))
        assert found[0].endswith("has the 'id' 1 (the ids there are texts)")

    def test_a_record_that_lacks_the_field(self, tmp_path):
        (tmp_path / "own.jsonl").write_text('{"txt": "a"}\n{"id": 2, "txt": "b"}\n')
        other = write(tmp_path / "other", "jsonl", {"id": [1, 2], "text": ["c", "d"]})
        settings = {"join": Join(other, on="id"), "transform": lambda sample: {"input_ids": [1]}, "shuffle": False}
        (meta,) = metas_of(loader_of(Source("p", str(tmp_path / "own.jsonl"), on_error="skip", **settings)))
        assert [meta.reasons[code] for code in meta.reason.tolist()] == ["read_error", ""]
        with pytest.raises(DataError, match="row 0: 'id' is not among its keys"):
            list(metas_of(loader_of(Source("p", str(tmp_path / "own.jsonl"), **settings))))

    def test_a_partner_that_lacks_a_field(self, tmp_path):
        own = write(tmp_path / "own", "jsonl", {"id": [1, 2], "txt": ["a", "b"]})
        (tmp_path / "other.jsonl").write_text('{"id": 1, "text": "c"}\n{"id": 2}\n')
        join = Join(str(tmp_path / "other.jsonl"), on="id", columns=["text"])
        found = records_of(Source("pairs", own, on_error="skip", join=join))
        assert found[0]["text"] == "c"
        assert "other.jsonl, unit 0, row 1: 'text' is not among its keys" in found[1]


class TestTwice:
    @pytest.mark.parametrize("on_error", ["raise", "skip", "quarantine"])
    @pytest.mark.parametrize(("files", "kind"), [*product(KINDS, [str]), *product(KINDS[:-1], [int])])
    def test_it_names_both_places(self, tmp_path, on_error, kind, files):
        mine, _ = paths_of(tmp_path, "parquet", kind=kind)
        write(tmp_path / "many" / "a", files, columns_of([3, 4, 5], kind=kind, name="text"))
        write(tmp_path / "many" / "b", files, columns_of([6, 4], kind=kind, name="text"))
        join = Join(str(tmp_path / "many" / "*"), on="__key__", columns=["text"])
        source = Source("pairs", mine, on_error=on_error, transform=lengthened, join=join)
        said = r"'pairs', \S*/a\.\w+, unit 0, row 1 and source 'pairs', \S*/b\.\w+, unit 1, row 1: both have the"
        with pytest.raises(DataError, match=rf"{said} '__key__' {key_of(4, kind)!r}"):
            list(metas_of(loader_of(source)))

    def test_texts_with_one_hash_are_told_apart(self, tmp_path, monkeypatch):
        monkeypatch.setattr(ids, "hash", lambda value: len(str(value)) % 2, raising=False)
        mine, theirs = paths_of(tmp_path, "parquet", "jsonl", other=OTHER[1:])
        found = records_of(Source("pairs", mine, on_error="skip", join=Join(theirs, on="__key__")))
        lost = int(np.flatnonzero(np.isin(OWN, OTHER[0]))[0])
        assert [one["text"] for at, one in enumerate(found) if at != lost] == [
            f"text {n}" for n in OWN if n != OTHER[0]
        ]
        assert "no record of" in found[lost]
        again = write(tmp_path / "other" / "captions", "jsonl", columns_of([*OTHER, OTHER[9]], name="text"))
        with pytest.raises(DataError, match=rf"row 9 and .*row {COUNT}: both have the '__key__' '{key_of(OTHER[9])}'"):
            records_of(Source("pairs", mine, join=Join(again, on="__key__")))


class TestBrokenPartners:
    def broken(self, tmp_path, column):
        """Captions whose second row group has one column overwritten."""
        path = tmp_path / "other.parquet"
        pq.write_table(pa.table(columns_of(range(COUNT), key="id", name="text")), path, row_group_size=20)
        content = bytearray(path.read_bytes())
        chunk = pq.read_metadata(path).row_group(1).column(column)
        start = chunk.dictionary_page_offset
        content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(content)
        return Join(str(path), on="id")

    @pytest.mark.parametrize("column", [0, 1])
    def test_stored_bytes(self, tmp_path, column, caplog):
        own = write(tmp_path / "own", "parquet", columns_of(OWN, key="id"))
        join = self.broken(tmp_path, column)
        found = records_of(Source("pairs", own, on_error="skip", join=join))
        lost = [n for n, one in zip(OWN.tolist(), found, strict=True) if isinstance(one, str)]
        assert sorted(lost) == list(range(20, 40))
        settings = {"join": join, "transform": lengthened, "shuffle": False}
        (meta,) = metas_of(loader_of(Source("pairs", own, on_error="skip", **settings), window_units=100))
        assert [meta.reasons[code] for code in meta.reason[~meta.kept].tolist()] == ["unpaired"] * 20
        with pytest.raises(CorruptDataError, match=r'(?s)other\.parquet, unit 1.*on_error="skip" leaves out'):
            list(metas_of(loader_of(Source("pairs", own, **settings))))

    def test_a_line_that_is_no_json(self, tmp_path, caplog):
        own = write(tmp_path / "own", "jsonl", {"id": [1, 2, 3], "txt": list("abc")})
        (tmp_path / "other.jsonl").write_text('{"id": 3, "text": "x"}\n{"id": 2, "c\n{"id": 1, "text": "z"}\n')
        join = Join(str(tmp_path / "other.jsonl"), on="id")
        with caplog.at_level(logging.WARNING):
            found = records_of(Source("pairs", own, on_error="skip", join=join))
        assert [one["text"] for one in (found[0], found[2])] == ["z", "x"]
        assert "no record of" in found[1]
        assert "something that is joined to it cannot be read, such as source 'pairs', " in caplog.text
        with pytest.raises(DataError, match=r"other\.jsonl, unit 0, row 1: .*not JSON"):
            records_of(Source("pairs", own, join=join))


class TestReads:
    def reads_of(self, monkeypatch, path):
        """(unit, first row) of each read of the joined files with their captions."""
        found = []
        read = ParquetReader.read

        def counted(reader, unit, row_start=0, row_stop=-1):
            if reader._manifest.files[0].path == path and "text" in (reader._columns or ()):
                found.append((unit, row_start))
            return read(reader, unit, row_start, row_stop)

        monkeypatch.setattr(ParquetReader, "read", counted)
        return found

    def aligned(self, tmp_path, unit_rows=(7, 7)):
        numbers = range(COUNT)
        own = write(tmp_path / "own", "parquet", columns_of(numbers, key="id"), unit_rows=unit_rows[0])
        other = write(tmp_path / "other", "parquet", columns_of(numbers, key="id", name="text"), unit_rows=unit_rows[1])
        return Source("p", own, transform=lengthened, join=Join(other, on="id", columns=["text"])), other

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_where_the_order_is_alike_a_unit_is_read_once(self, tmp_path, monkeypatch, shuffle):
        source, other = self.aligned(tmp_path)
        monkeypatch.setattr(joined, "_HELD_BYTES", 0)
        found = self.reads_of(monkeypatch, other)
        source = Source("p", source.data, transform=lengthened, shuffle=shuffle, join=source.join)
        assert sum(len(meta.pieces) for meta in metas_of(loader_of(source, part_bytes=200))) == COUNT
        assert sorted(found) == [(unit, 0) for unit in range(9)]

    def test_ids_are_read_once(self, tmp_path, monkeypatch):
        source, _ = self.aligned(tmp_path)
        found = []
        build = joined.build_index

        def counted(*args, **more):
            found.append(args)
            return build(*args, **more)

        monkeypatch.setattr(joined, "build_index", counted)
        loader = loader_of(source, part_bytes=200)
        for epoch in range(2):
            assert sum(len(meta.pieces) for meta in metas_of(loader, epoch=epoch)) == COUNT
        assert len(found) == 1

    def test_each_unit_is_read_once_for_records_in_another_order(self, tmp_path, monkeypatch):
        own = write(tmp_path / "own", "parquet", columns_of(OWN, key="id"), unit_rows=COUNT)
        other = write(tmp_path / "other", "parquet", columns_of(OTHER, key="id", name="text"))
        monkeypatch.setattr(joined, "_HELD_BYTES", 0)
        found = self.reads_of(monkeypatch, other)
        source = Source("p", own, join=Join(other, on="id", columns=["text"]))
        assert [one["text"] for one in records_of(source)] == [f"text {n}" for n in OWN]
        assert found == [(unit, 0) for unit in range(9)]

    @pytest.mark.parametrize("unit_rows", [(5, 13), (13, 5), (7, 60)])
    def test_units_that_do_not_coincide(self, tmp_path, monkeypatch, unit_rows):
        source, other = self.aligned(tmp_path, unit_rows)
        monkeypatch.setattr(joined, "_HELD_BYTES", 0)
        found = self.reads_of(monkeypatch, other)
        source = Source("p", source.data, transform=lengthened, shuffle=False, join=source.join)
        assert sum(len(meta.pieces) for meta in metas_of(loader_of(source, part_bytes=200))) == COUNT
        assert len(found) == -(-COUNT // unit_rows[1])

    def test_of_large_units_a_piece_is_read(self, tmp_path, monkeypatch):
        source, other = self.aligned(tmp_path, (7, 60))
        monkeypatch.setattr(joined, "_PIECE_BYTES", 200)
        monkeypatch.setattr(joined, "_HELD_BYTES", 0)
        found = self.reads_of(monkeypatch, other)
        assert sum(len(meta.pieces) for meta in metas_of(loader_of(source, part_bytes=200))) == COUNT
        assert {unit for unit, _ in found} == {0}
        assert len({row for _, row in found}) > 4

    def test_what_is_held_has_a_bound(self, tmp_path, monkeypatch):
        source, _ = self.aligned(tmp_path)
        manifest = build_manifest(source)
        bound = int(manifest.joined[0].units["bytes"][:3].sum())
        monkeypatch.setattr(joined, "_HELD_BYTES", bound)
        reader = make_record_reader(source, manifest, None)
        for unit in range(manifest.num_units):
            reader.read(unit)
            (files,) = reader._joined
            assert 0 < sum(size for _, size in files._held.values()) <= bound
        assert len(files._held) >= 2

    def test_to_close_waits_for_no_read(self, tmp_path, monkeypatch):
        source, other = self.aligned(tmp_path)
        reading, closed = threading.Event(), threading.Event()
        read = ParquetReader.read

        def slow(reader, *args):
            if reader._manifest.files[0].path == other:
                reading.set()
                assert closed.wait(30), "close waits"
            return read(reader, *args)

        reader = make_record_reader(source, build_manifest(source, needs_tokens=False), None)
        (files,) = reader._joined
        monkeypatch.setattr(ParquetReader, "read", slow)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(files.find, [key_of(3)], ())
            assert reading.wait(30)
            closing = threading.Thread(target=lambda: (files.close(), closed.set()))
            closing.start()
            closing.join(30)
            ((one,), without) = found.result()
        assert (one.block.table["text"].to_pylist(), without) == (["text 3"], {})

    def test_what_is_found_keeps_no_piece_alive(self, tmp_path, monkeypatch):
        """Also where what is wanted of a piece is one record, or several in a row."""
        units, of_unit, size = 20, 50, 1 << 14
        texts = [RNG.bytes(size) for _ in range(units * of_unit)]
        other = write(tmp_path / "other", "parquet", {"id": range(len(texts)), "text": texts}, unit_rows=of_unit)
        wanted = [unit * of_unit + at for unit in range(units) for at in (5, 6)]
        own = write(tmp_path / "own", "parquet", {"id": wanted})
        source = Source("p", own, join=Join(other, on="id"))
        monkeypatch.setattr(joined, "_HELD_BYTES", 0)
        (files,) = make_record_reader(source, build_manifest(source, needs_tokens=False), None)._joined
        files.find(wanted[:1], ())
        before = pa.total_allocated_bytes()
        found, _ = files.find(wanted, ())
        assert [one.block.table["text"].to_pylist() for one in found] == [
            [texts[at] for at in pair] for pair in zip(wanted[::2], wanted[1::2], strict=True)
        ]
        # The last piece is still held.
        assert pa.total_allocated_bytes() - before < 2 * of_unit * size + 2 * len(wanted) * size

    def test_12_bytes_a_record(self, tmp_path):
        for kind in (int, str):
            other = write(tmp_path / "other", "parquet", columns_of(range(5000), kind=kind, key="id"), unit_rows=5000)
            source = Source("p", other, join=Join(other, on="id", columns=[]))
            manifest = build_manifest(source, needs_tokens=False)
            reader = make_record_reader(source, manifest, ["id"])
            reader.read(0)
            index = reader._joined[0]._index
            assert len(index) == 5000
            assert index.num_bytes == 12 * 5000 + index.starts.nbytes


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"on": ""}, "on must be the name of the field that holds the id, not ''"),
            ({"columns": "text"}, "columns must be a tuple of names, not 'text'"),
            ({"columns": 3}, "columns must be a tuple of names, not 3"),
            ({"columns": {"text": 1}}, "columns must be a tuple of names, not {'text': 1}"),
            ({"format": "xml"}, "format must be one of 'parquet', .*, not 'xml'"),
            ({"storage_options": 3}, "storage_options must be a mapping, not int"),
            ({"data": [{"id": 1}]}, "data must be files: a path, a pattern, a URL or a list of these, not a list"),
            ({"data": "https://me:word@host/x.parquet"}, "a URL holds a user name and a password"),
        ],
    )
    def test_settings(self, given, said):
        with pytest.raises(ConfigError, match=f"join: {said}"):
            Join(**{"data": "x.parquet", "on": "id", **given})

    @pytest.mark.parametrize("given", ["captions.parquet", {"data": "x"}, {"data": "x", "on": "id", "by": "y"}, 3])
    def test_what_is_no_join(self, given):
        with pytest.raises(ConfigError, match="join must be a Join, or a mapping of its data, on, and others"):
            Source("pairs", "own.parquet", join=given)

    def test_an_empty_list_is_no_join(self):
        assert Source("p", "x.parquet", join=[]) == Source("p", "x.parquet")

    def test_columns_that_both_name(self):
        with pytest.raises(ConfigError, match=r"name \['txt'\] more than once: choose one origin"):
            Source("p", "x.parquet", columns=("id", "txt"), join=Join("y.parquet", on="id", columns=("id", "txt")))

    @pytest.mark.parametrize("kind", ["parquet", "jsonl"])
    def test_fields_that_both_have(self, tmp_path, kind):
        own = write(tmp_path / "own", kind, {"id": [1], "txt": ["a"], "text": ["b"]})
        other = write(tmp_path / "other", kind, {"id": [1], "text": ["c"]})
        with pytest.raises(
            ConfigError, match=r"own records have the fields \['text'\].*other\.\w+ that are joined: cho"
        ):
            list(metas_of(loader_of(Source("p", own, transform=lengthened, join=Join(other, on="id")))))
        source = Source("p", own, columns=("txt",), join=Join(other, on="id"))
        assert records_of(source, source.read_columns) == [{"txt": "a", "id": 1, "text": "c"}]

    def test_files_that_lack_the_id(self, tmp_path):
        own = write(tmp_path / "own", "parquet", {"id": [1], "txt": ["a"]})
        other = write(tmp_path / "other", "parquet", {"ix": [1], "text": ["c"]})
        with pytest.raises(ConfigError, match=r"other\.parquet has no column 'id'"):
            build_manifest(Source("p", own, join=Join(other, on="id")))
        with pytest.raises(ConfigError, match=r"own\.parquet has no column 'ix'"):
            build_manifest(Source("p", own, join=Join(other, on="ix")))

    def test_what_cannot_be_looked_up(self, tmp_path, monkeypatch):
        own = write(tmp_path / "own", "parquet", {"id": [1], "txt": ["a"]})
        (tmp_path / "large.csv").write_text("id,text\n" + "1,c\n" * 50)
        monkeypatch.setattr(csv.format, "SLICED_BYTES", 100)
        with pytest.raises(
            ConfigError, match=r"join is for files whose records can be looked up .* not for csv that is"
        ):
            build_manifest(Source("p", own, join=Join(str(tmp_path / "large.csv"), on="id")))
        with pytest.raises(ConfigError, match="not for a dataset: join it in the dataset"):
            build_manifest(Source("p", [{"id": 1}] * 3, join=Join(own, on="id")))

    @pytest.mark.parametrize("value", [1.5, True, [1]])
    def test_ids_that_are_none(self, tmp_path, value):
        own = write(tmp_path / "own", "jsonl", {"id": [1], "txt": ["a"]})
        for kind in ("jsonl", "parquet"):
            other = write(tmp_path / "other", kind, {"id": [value], "text": ["c"]})
            for one, two in ((own, other), (other, own)):
                with pytest.raises(
                    DataError, match=r"row 0: join by 'id' takes whole numbers and texts as ids, not a "
                ):
                    records_of(Source("pairs", one, on_error="skip", join=Join(two, on="id")))

    def test_lines_of_one_unit_do_not_matter(self, tmp_path, monkeypatch):
        """Units of byte ranges are numbered and counted as they are read."""
        monkeypatch.setattr(jsonl, "UNIT_BYTES", 100)
        mine, theirs = paths_of(tmp_path, "jsonl", kind=int, key="id")
        source = Source("pairs", mine, join=Join(theirs, on="id"))
        assert [one["text"] for one in records_of(source)] == [f"text {n}" for n in OWN]
