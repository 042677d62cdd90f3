import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning.sources.manifest import UNIT, Manifest
from megascale_lightning.sources.order import num_windows, part_permutation, window_parts, window_units_of
from megascale_lightning.sources.seeding import derive_permutation
from megascale_lightning.sources.stores.storage import FileInfo


def manifest_of(rows, sizes):
    units = [(0, i, i + 1, n, b) for i, (n, b) in enumerate(zip(rows, sizes, strict=True))]
    return Manifest((FileInfo("f", 1, 0),), np.array(units, UNIT), "parquet")


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ((), (0, 5)),
        ((2,), (2, 5)),
        ((2, 4), (2, 4)),
        ((2, 9), (2, 5)),
        ((7, 9), (5, 5)),
        ((7,), (5, 5)),
        ((4, 2), (2, 2)),
    ],
)
def test_a_unit_has_no_rows_behind_its_last(asked, has):
    manifest = manifest_of([3, 5], [1, 1])
    assert manifest.rows_of(1, *asked) == (manifest.files[0], *has)


def records_of(manifest, *, window_units, part_bytes, seed=0, epoch=0, shuffle=True, stream="train"):
    found = []
    for window in range(num_windows(manifest, window_units)):
        parts = window_parts(manifest, "web", stream, seed, epoch, window, window_units, part_bytes, shuffle)
        assert parts
        for number, part in enumerate(parts):
            records = []
            for segment in part:
                rows = int(manifest.units[segment.unit]["rows"])
                stop = rows if segment.row_stop < 0 else segment.row_stop
                records += [(segment.unit, row) for row in range(segment.row_start, stop)]
            order = part_permutation(len(records), "web", stream, seed, epoch, window, number, shuffle)
            found += [records[index] for index in order]
    return found


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 300)), min_size=1, max_size=17),
    window_units=st.integers(1, 9),
    part_bytes=st.integers(1, 200),
    shuffle=st.booleans(),
)
def test_every_record_is_in_exactly_one_part(units, window_units, part_bytes, shuffle):
    manifest = manifest_of([n for n, _ in units], [b for _, b in units])
    found = records_of(manifest, window_units=window_units, part_bytes=part_bytes, shuffle=shuffle)
    expected = [(unit, row) for unit, (n, _) in enumerate(units) for row in range(n)]
    assert sorted(found) == expected
    if not shuffle:
        assert found == expected


def test_order_depends_on_seed_epoch_and_stream_alone():
    manifest = manifest_of([7] * 11, [50] * 11)
    base = records_of(manifest, window_units=4, part_bytes=100)
    assert records_of(manifest, window_units=4, part_bytes=100) == base
    assert records_of(manifest, window_units=4, part_bytes=100, seed=1) != base
    assert records_of(manifest, window_units=4, part_bytes=100, epoch=1) != base
    assert records_of(manifest, window_units=4, part_bytes=100, stream="val/0") != base


def test_each_name_in_the_key_of_a_permutation_counts():
    part = {"source_name": "web", "stream": "train", "seed": 0, "epoch": 0, "window": 0, "part": 0}
    base = part_permutation(60, **part, shuffle=True).tolist()
    changes = {"source_name": "code", "stream": "val/0", "seed": 1, "epoch": 1, "window": 1, "part": 1}
    for name, value in changes.items():
        assert part_permutation(60, **(part | {name: value}), shuffle=True).tolist() != base, name
    manifest = manifest_of([7] * 60, [50] * 60)
    window = {name: value for name, value in part.items() if name != "part"} | {"window_units": 60}
    units = window_units_of(manifest, **window, shuffle=True).tolist()
    assert sorted(units) == list(range(60))
    for name in ("source_name", "stream", "seed", "epoch"):
        assert window_units_of(manifest, **(window | {name: changes[name]}), shuffle=True).tolist() != units, name


def test_large_units_are_cut_and_small_ones_grouped():
    manifest = manifest_of([100, 10, 10, 10], [1000, 40, 40, 40])
    parts = window_parts(manifest, "web", "train", 0, 0, 0, 4, 300, False)
    cuts = [(s.row_start, s.row_stop) for part in parts[:4] for s in part]
    assert cuts == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert [s.unit for s in parts[4]] == [1, 2, 3]
    unknown = manifest_of([-1], [1000])
    assert [(s.row_start, s.row_stop) for s in window_parts(unknown, "web", "train", 0, 0, 0, 4, 300, True)[0]] == [
        (0, -1)
    ]


def test_no_such_window():
    with pytest.raises(IndexError, match="'web'"):
        window_parts(manifest_of([1], [1]), "web", "train", 0, 0, 1, 4, 300, True)


def test_the_permutation_is_fixed_for_good():
    # These numbers are part of the order: a change breaks every resume (raise ORDER_VERSION).
    assert derive_permutation(8, "units", 0, "train", "web", 0).tolist() == [5, 2, 3, 4, 0, 7, 6, 1]
