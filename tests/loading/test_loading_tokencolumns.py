"""`token_column`: lists and `Encoding`s of tokens as one array, and values that int32 does not hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megascale_lightning.loading.columns import narrow
from megascale_lightning.loading.tokencolumns import token_column

MOST = 2**31 - 1


def rows_of(column, field="input_ids"):
    ragged, problems = token_column(field, column)
    assert problems == {}
    offsets = ragged.offsets.tolist()
    return ragged.values.dtype, [ragged.values[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.mark.parametrize(
    "column",
    [
        [[1, 2], [], [MOST]],
        [[1, 2], [-100, 5], [-MOST - 1]],
        [[np.int64(3)], [-np.int64(3)]],
        [[], []],
        [],
    ],
)
def test_lists_of_numbers_are_int32(column):
    assert rows_of(column, "labels") == (np.int32, column)


@pytest.mark.parametrize("column", [[[1], [2, MOST + 1]], [[-1], [2, MOST + 1]], [[1], [2, 2**32]]])
def test_a_number_beyond_int32_is_told_with_its_row(column):
    ragged, problems = token_column("input_ids", column)
    assert problems == {}
    assert narrow(ragged)[1] == {1: f"has the value {column[1][1]}, which does not fit int32"}


def test_a_list_that_is_no_numbers_leaves_the_others_alone():
    ragged, problems = token_column("input_ids", [[1, 2], [1.5], [3]])
    assert problems == {1: "holds float64, not token ids"}
    assert (ragged.offsets[1], ragged.offsets[-1] - ragged.offsets[2]) == (2, 1)


def test_encodings_are_int32_and_a_token_beyond_it_is_told_with_its_row():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": MOST, "c": MOST + 1}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    assert rows_of(tokenizer.encode_batch(["ab", "", "b"])) == (np.int32, [[0, MOST], [], [MOST]])
    ragged, problems = token_column("input_ids", tokenizer.encode_batch(["ab", "ac"]))
    assert problems == {}
    assert narrow(ragged)[1] == {1: f"has the value {MOST + 1}, which does not fit int32"}
