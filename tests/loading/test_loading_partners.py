"""`Source.together`: groups are those of the column, whatever cuts the files into units and parts, and drop as one."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_lightning.errors import ConfigError, CorruptDataError, DataError
from megascale_lightning.loading import partners
from megascale_lightning.loading.reasons import READ_ERROR
from megascale_lightning.rows import PackedRows
from megascale_lightning.sources import Source
from megascale_lightning.sources.formats import jsonl
from tests.loading.test_loading_loader import loader_of, metas_of

CAPACITY = 64


def write(path, sizes, *, kind="parquet", group_rows=7, lengths=None):
    """Groups of these sizes, one after the other; the number of each record's group."""
    ids = np.repeat(np.arange(len(sizes)), sizes)
    lengths = np.full(len(ids), 3) if lengths is None else np.asarray(lengths)
    columns = {
        "input_ids": [[int(at)] * int(length) for at, length in enumerate(lengths)],
        "pair": [f"pair {group}" for group in ids.tolist()],
    }
    if kind == "parquet":
        pq.write_table(pa.table(columns), path / "data.parquet", row_group_size=group_rows)
        return ids, str(path / "data.parquet")
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    (path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ids, str(path / "data.jsonl")


def groups_of(meta):
    """The groups of a part: lists of entries."""
    return np.split(np.arange(len(meta.pieces)), np.flatnonzero(~meta.joined)[1:]) if len(meta.pieces) else []


def parts_of(path, *, part_bytes=200, window_units=2, pad_documents_to=None, **settings):
    source = Source("pairs", path, together="pair", **{"overlong": "drop", **settings})
    rows = PackedRows(CAPACITY, 1, pad_documents_to=pad_documents_to)
    loader = loader_of(source, rows=rows, part_bytes=part_bytes, window_units=window_units)
    return list(metas_of(loader))


def records_of(path, pieces, group_rows=7):
    """Number of each record in the file."""
    return pieces["unit"] * group_rows + pieces["row"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=40),
    st.integers(6, 9),
    st.sampled_from([40, 200, 10**6]),
    st.data(),
)
def test_groups_are_whole_and_every_record_is_there_once(tmp_path, sizes, group_rows, part_bytes, data):
    ids, path = write(tmp_path, sizes, group_rows=group_rows)
    metas = parts_of(path, part_bytes=part_bytes, shuffle=data.draw(st.booleans()))
    found = []
    for meta in metas:
        for group in groups_of(meta):
            records = records_of(path, meta.pieces[group], group_rows)
            assert len(set(ids[records])) == 1
            assert records.tolist() == sorted(records.tolist())
            found.append(records.tolist())
        assert meta.pieces["entry"].tolist() == list(range(len(meta.pieces)))
    assert sorted(map(len, found)) == sorted(sizes)
    assert sorted(record for records in found for record in records) == list(range(len(ids)))


def test_groups_reach_over_byte_ranges_of_json_lines(tmp_path, monkeypatch):
    sizes = [1, 2, 3] * 60
    _, path = write(tmp_path, sizes, kind="jsonl")
    monkeypatch.setitem(jsonl.FORMAT.list_units.__func__.__kwdefaults__, "unit_bytes", 500)
    metas = parts_of(path)
    units = {unit for meta in metas for unit in meta.pieces["unit"].tolist()}
    assert len(units) > 10
    found = [len(group) for meta in metas for group in groups_of(meta)]
    assert sorted(found) == sorted(sizes)
    assert any(len(set(meta.pieces["unit"][group].tolist())) == 2 for meta in metas for group in groups_of(meta))


def test_units_without_rows_between(tmp_path):
    table = pa.table({"input_ids": [[at] for at in range(8)], "pair": [0, 0, 1, 1, 1, 2, 2, 3]})
    with pq.ParquetWriter(tmp_path / "data.parquet", table.schema) as writer:
        for start, stop in ((0, 1), (1, 1), (1, 4), (4, 4), (4, 4), (4, 8)):
            writer.write_table(table.slice(start, stop - start))
    assert pq.ParquetFile(tmp_path / "data.parquet").num_row_groups == 6
    metas = parts_of(str(tmp_path / "data.parquet"), part_bytes=1, window_units=3)
    assert sorted(len(group) for meta in metas for group in groups_of(meta)) == [1, 2, 2, 3]


def test_shuffling_moves_groups_and_differs_by_epoch(tmp_path):
    _, path = write(tmp_path, [2] * 50, group_rows=100)
    source = Source("pairs", path, together="pair", overlong="drop")
    loader = loader_of(source, rows=PackedRows(CAPACITY, 1))
    orders = [next(iter(metas_of(loader, epoch=epoch))).pieces["row"].tolist() for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert all(a + 1 == b for order in orders for a, b in zip(order[::2], order[1::2], strict=True))
    assert sorted(orders[0]) == list(range(100)) != orders[0]


class TestDrops:
    """What is left out takes its group with it."""

    def counts(self, meta):
        return {
            reason: int((meta.reason == code).sum())
            for code, reason in enumerate(meta.reasons)
            if reason and (meta.reason == code).any()
        }

    def test_a_group_longer_than_a_row(self, tmp_path):
        _, path = write(tmp_path, [2, 1, 3, 1], lengths=[30, 30, 65, 30, 30, 5, 9], group_rows=100)
        (meta,) = parts_of(path, shuffle=False, part_bytes=10**6)
        assert meta.kept.tolist() == [True, True, False, False, False, False, True]
        assert self.counts(meta) == {"overlong": 4}
        assert (meta.pieces["length"][~meta.kept] == 0).all()
        with pytest.raises(DataError, match="row 3: the records that stay together with it have 65 tokens"):
            parts_of(path.replace("data", "*"), overlong="error", shuffle=False, length=first_of_65)

    def test_a_group_longer_than_a_row_as_padded(self, tmp_path):
        _, path = write(tmp_path, [2, 2], lengths=[31, 30, 33, 31], group_rows=100)
        for multiple, kept in ((None, [True] * 4), (16, [True, True, False, False])):
            (meta,) = parts_of(path, shuffle=False, part_bytes=10**6, pad_documents_to=multiple)
            assert meta.kept.tolist() == kept

    @pytest.mark.parametrize("kind", ["none", "raises", "empty"])
    def test_a_record_that_is_left_out(self, tmp_path, kind):
        _, path = write(tmp_path, [1, 2, 3], group_rows=100)
        settings = {"transform": Spoil(4, kind), "shuffle": False, "part_bytes": 10**6}
        (meta,) = parts_of(path, on_error="skip", **settings)
        assert meta.kept.tolist() == [True] * 3 + [False] * 3
        reason = {"none": "filtered", "raises": "transform_error", "empty": "empty"}[kind]
        assert self.counts(meta) == {reason: 1, "partner": 2}
        said = "is spoilt" if kind == "raises" else rf"row 4: this record is left out \({reason}\), and .* row 3 stays"
        with pytest.raises(DataError, match=said):
            parts_of(path, **settings)

    def test_a_whole_group_may_be_filtered(self, tmp_path):
        _, path = write(tmp_path, [1, 2, 3], group_rows=100)
        (meta,) = parts_of(path, shuffle=False, part_bytes=10**6, transform=lambda sample: keep(sample, {0, 3, 4, 5}))
        assert meta.kept.tolist() == [True, False, False, True, True, True]
        assert self.counts(meta) == {"filtered": 2}

    def test_what_cannot_be_read_may_belong_to_either_side(self, tmp_path):
        _, path = write(tmp_path, [1, 2, 2, 1], kind="jsonl")
        stored = (tmp_path / "data.jsonl").read_text().splitlines()
        (tmp_path / "data.jsonl").write_text("\n".join([*stored[:2], "{spoilt", *stored[3:]]) + "\n")
        (meta,) = parts_of(path, on_error="skip", shuffle=False)
        assert meta.kept.tolist() == [True, False, False, False, False, True]
        assert self.counts(meta) == {"read_error": 1, "partner": 3}

    def test_two_groups_around_it_are_not_one_that_is_too_long(self, tmp_path):
        _, path = write(tmp_path, [2, 1, 2], kind="jsonl", lengths=[20] * 5)
        stored = (tmp_path / "data.jsonl").read_text().splitlines()
        (tmp_path / "data.jsonl").write_text("\n".join([*stored[:2], "{spoilt", *stored[3:]]) + "\n")
        (meta,) = parts_of(path, on_error="skip", overlong="error", shuffle=False)
        assert self.counts(meta) == {"read_error": 1, "partner": 4}

    def test_null_stands_alone(self, tmp_path):
        table = pa.table({"input_ids": [[1]] * 4, "pair": pa.array([None, None, 7, 7])})
        pq.write_table(table, tmp_path / "data.parquet")
        (meta,) = parts_of(str(tmp_path / "data.parquet"), shuffle=False)
        assert meta.joined.tolist() == [False, False, False, True]


class TestBrokenUnits:
    """A row group whose ids cannot be read is lost with the two groups that adjoin it; all else is there, once."""

    SIZES = (2, 3, 1, 4, 2, 3, 2, 4, 2, 3, 1, 2, 4, 3, 2, 3, 4, 2, 3, 1, 4, 2, 3, 2, 3, 4)
    ROWS = 23

    def broken(self, path, *units, behind=0.0):
        """The file with the stored ids of these row groups overwritten, behind so much of them."""
        content = bytearray(path.read_bytes())
        for unit in units:
            column = pq.read_metadata(path).row_group(unit).column(1)
            assert column.path_in_schema == "pair"
            start = column.dictionary_page_offset or column.data_page_offset
            stop = start + column.total_compressed_size
            start += int(behind * column.total_compressed_size)
            content[start:stop] = b"\xff" * (stop - start)
        (path.parent / "broken.parquet").write_bytes(content)
        return str(path.parent / "broken.parquet")

    def lost(self, ids, *units):
        """Numbers of the records that are to be gone."""
        near = np.isin(np.arange(-1, len(ids) + 1) // self.ROWS, units)
        near = near[:-2] | near[1:-1] | near[2:]
        return np.flatnonzero(np.isin(ids, ids[near])).tolist()

    @pytest.mark.parametrize("units", [(1,), (0,), (2,), (1, 2)])
    @pytest.mark.parametrize("part_bytes", [60, 200, 10**6])
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_only_they_and_the_groups_beside_them_go(self, tmp_path, units, part_bytes, shuffle, monkeypatch):
        monkeypatch.setattr(partners, "_SCANNED", 10)
        ids, _ = write(tmp_path, self.SIZES, group_rows=self.ROWS)
        path = self.broken(tmp_path / "data.parquet", *units)
        metas = parts_of(path, part_bytes=part_bytes, on_error="skip", shuffle=shuffle)
        assert len(metas) > 3 or part_bytes > 200
        records = [records_of(path, meta.pieces, self.ROWS) for meta in metas]
        assert sorted(np.concatenate(records).tolist()) == list(range(len(ids)))
        kept = np.concatenate([found[meta.kept] for found, meta in zip(records, metas, strict=True)])
        assert sorted(set(range(len(ids))) - set(kept.tolist())) == self.lost(ids, *units)
        for found, meta in zip(records, metas, strict=True):
            for group in groups_of(meta):
                numbers = set(ids[found[group]].tolist())
                assert len(numbers) == 1 or not meta.kept[group].any()
                if meta.kept[group].any():
                    assert len(group) == self.SIZES[numbers.pop()]
        lost = np.concatenate([found[meta.reason == READ_ERROR] for found, meta in zip(records, metas, strict=True)])
        assert sorted(lost.tolist()) == [at for at in range(len(ids)) if at // self.ROWS in units]

    @pytest.mark.parametrize("behind", [0.2, 0.5, 0.8])
    def test_one_that_is_broken_in_the_middle_is_broken(self, tmp_path, behind, monkeypatch):
        monkeypatch.setattr(partners, "_AHEAD", 16)
        ids = np.repeat(np.arange(100), 5)
        table = pa.table({"input_ids": [[1]] * 500, "pair": [f"pair {group}" for group in ids.tolist()]})
        pages = {"use_dictionary": False, "data_page_size": 64, "write_batch_size": 4}
        pq.write_table(table, tmp_path / "data.parquet", row_group_size=248, **pages)
        path = self.broken(tmp_path / "data.parquet", 0, behind=behind)
        metas = parts_of(path, part_bytes=300, on_error="skip")
        found = np.concatenate([records_of(path, meta.pieces, 248) for meta in metas])
        assert sorted(found.tolist()) == list(range(500))
        kept = np.concatenate([meta.kept for meta in metas])
        assert sorted(found[kept].tolist()) == list(range(250, 500))

    def test_it_is_said(self, tmp_path):
        write(tmp_path, self.SIZES, group_rows=self.ROWS)
        path = self.broken(tmp_path / "data.parquet", 1)
        with pytest.raises(CorruptDataError, match=r'(?s)unit 1.* on_error="skip" leaves out what is broken'):
            parts_of(path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"overlong": "split"}, "not cut: together='pair' needs overlong='drop' or 'error', not 'split'"),
            ({"together": 3}, "name of a column"),
        ],
    )
    def test_settings(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            Source("pairs", "data.parquet", **{"together": "pair", "overlong": "drop", **settings})

    def test_a_column_that_is_not_there(self, tmp_path):
        for kind in ("parquet", "jsonl"):
            _, path = write(tmp_path, [1, 2], kind=kind)
            source = Source("pairs", path, together="pear", overlong="drop")
            with pytest.raises((DataError, ConfigError), match="'pear'"):
                list(metas_of(loader_of(source)))

    def test_ids_that_are_none(self, tmp_path):
        pq.write_table(pa.table({"input_ids": [[1], [2]], "pair": [[1], [2]]}), tmp_path / "data.parquet")
        with pytest.raises(DataError, match=r"row 0: together='pair' names ids such as numbers and texts, not a list"):
            parts_of(str(tmp_path / "data.parquet"))

    def test_a_column_of_one_value(self, tmp_path, monkeypatch):
        monkeypatch.setattr(partners, "_MOST", 100)
        _, path = write(tmp_path, [300])
        with pytest.raises(
            DataError, match=r"unit \d+, row 0: more than 100 records from here on have an equal 'pair'"
        ):
            parts_of(path)


class Spoil:
    """Leaves out one record."""

    def __init__(self, record, kind):
        self.record, self.kind = record, kind

    def __call__(self, sample):
        if sample["input_ids"][0] != self.record:
            return sample
        if self.kind == "raises":
            raise ValueError("it is spoilt")
        return None if self.kind == "none" else {**sample, "input_ids": sample["input_ids"][:0]}


def keep(sample, records):
    return sample if sample["input_ids"][0] in records else None


def first_of_65(sample):
    return min(len(sample["input_ids"]), 30)
