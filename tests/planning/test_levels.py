"""The levels of one source, and the edges and numbers that sort its samples: what is passed, what stays the same."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megascale_lightning.curriculum import QuantileSchedule
from megascale_lightning.errors import DataError
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.levels import LevelCursor
from megascale_lightning.streams import initial_levels
from megascale_lightning.types import SOURCE_STATE, PartKey
from tests.planning.fakes import Drive, FakeData
from tests.planning.test_curriculum import all_pieces, spec_of

HALVES = QuantileSchedule("length", [(0, 30)], quantile=0.5)
"""Of the lengths of `FakeData`."""


def key_of(part, window=0):
    return PartKey("train", 0, 0, window, part)


def described(parts):
    blocks = BlockStore()
    for key in parts:
        blocks.add(FakeData([120]).describe(key))
    return blocks


def behind_all_parts(waiting, places=((0, 0), (0, 0)), *, blocks, rank=0):
    """A source of one epoch in 3 windows of 3 parts; of each level so many wait, from a part on: (window, part)."""
    source = FakeData([120]).spec().sources[0]
    at = np.zeros(1, SOURCE_STATE)
    levels = initial_levels(at, 2)[0]
    levels["seen"] = waiting
    levels["window"], levels["part"] = zip(*places, strict=True)
    at["epoch"] = 1
    return LevelCursor(HALVES, levels, rank, "train", 0, source, blocks, at[0], {}, (0, 0), 1)


class EndsDropped(FakeData):
    """All records of the last window are bad."""

    def describe(self, key):
        self.drop_every = 1 if key.window + 1 == self.num_windows(key.source) else 0
        return replace(super().describe(key), reasons=("", "read_error"))


@pytest.mark.parametrize("padded", [False, True])
def test_parts_at_the_end_of_which_nothing_is_left_are_passed(padded):
    def drive(with_curriculum, **limits):
        data = EndsDropped([90])
        changes = {"padded": padded, "epochs": 1, "rows": 9}
        spec = spec_of(data, QuantileSchedule("length", [(0, 100)]), **changes)
        spec = spec if with_curriculum else data.spec(**changes)
        return Drive(data, replace(spec, sources=(replace(spec.sources[0], num_records=90, **limits),)))

    found, plain = drive(True), drive(False)
    assert Counter(all_pieces(found.run())) == Counter(all_pieces(plain.run()))
    last, other = (driven.states[max(driven.states)] for driven in (found, plain))
    assert last.dropped == other.dropped == ({"read_error": 10},)
    assert last.checked == other.checked == ((90, 10),)
    assert last.sources["epoch"] == other.sources["epoch"] == [1]
    for with_curriculum in (False, True):
        with pytest.raises(DataError, match=r"10 of 90 records are bad, more than max_bad_fraction=0\.1"):
            drive(with_curriculum, max_bad_fraction=0.1).run()


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 1)])
def test_the_part_that_is_missing_is_that_of_the_first_draw_without_one(rank, first):
    """Ranks spread draws differently: one source begins with the easy level, the other with the hard one."""
    cursor = behind_all_parts([20, 20], ((0, 1), (1, 0)), blocks=described([]), rank=rank)
    cursor.pace(np.array([0.5, 0.5]))
    assert cursor.peek(4).missing == (key_of(1), key_of(0, window=1))[first]


def test_at_the_end_of_the_data_all_that_waits_is_read_ahead():
    parts = [key_of(part, window) for window in range(3) for part in range(3)]
    blocks = described(parts)
    hard = sum(len(blocks.get(key).levels(HALVES)[1]) for key in parts)
    cursor = behind_all_parts([0, hard], blocks=blocks)
    cursor.pace(np.array([0.999, 0.001]))
    assert cursor.upcoming(hard) == parts, "whatever the shares say, there is nothing else"


def test_edges_are_the_same_where_powers_end_in_another_bit(monkeypatch):
    def edges():
        return QuantileSchedule("length", [(0, 512), (9, 4096)]).edges.tolist()

    plain = edges()
    assert {512.0, 1024.0, 2048.0, 4096.0} <= set(plain)
    assert len(plain) == 13
    exact = np.geomspace
    for towards in (-np.inf, np.inf):
        monkeypatch.setattr(np, "geomspace", lambda *given, to=towards: np.nextafter(exact(*given), to))
        assert edges() == plain


def test_an_exact_power_of_the_ratio_gives_as_many_edges_however_its_logarithm_is_rounded(monkeypatch):
    exact = math.log
    for towards in (-np.inf, np.inf):
        monkeypatch.setattr(math, "log", lambda *given, to=towards: math.nextafter(exact(*given), to))
        assert len(QuantileSchedule("length", [(0, 1000), (9, 1440)]).edges) == 3
        assert len(QuantileSchedule("length", [(0, 1000), (9, 1000 * (1 + 1e-12))]).edges) == 2


def test_values_whose_ratio_no_float_holds_have_edges_in_between():
    edges = QuantileSchedule("noise", [(0, 1e-300), (9, 1e300)]).edges
    assert len(edges) == 15
    assert edges[[0, -1]].tolist() == [1e-300, 1e300]
    assert (np.diff(edges) > 0).all()


def test_its_own_values_are_edges_to_the_last_digit():
    assert QuantileSchedule("noise", [(0, 0.12345678901), (9, 0.98765432109)]).edges[[0, -1]].tolist() == [
        0.12345678901,
        0.98765432109,
    ]


def test_a_number_of_numpy_becomes_a_plain_one():
    table = QuantileSchedule("length", [(0, np.float64(30))], quantile=np.float64(0.5)).table
    assert [type(value) for value in (table["quantile"], table["schedule"][0][1])] == [float, float]
    assert json.loads(json.dumps(table)) == table
