"""Best-fit packing: capacity, order of precedence, efficiency, and against a slow reference."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale_lightning.planning.packing import pack

lengths = st.lists(st.integers(1, 40), max_size=40)


def reference(carried, drawn, num_rows, capacity):
    """The rule of the design, word for word, in quadratic time."""
    pieces = list(enumerate([*carried, *drawn]))
    order = pieces[: len(carried)] + sorted(pieces[len(carried) :], key=lambda piece: (-piece[1], piece[0]))
    rooms, rows = [capacity] * num_rows, [[] for _ in range(num_rows)]
    for piece, length in order:
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= length]
        if fitting:
            _, row = min(fitting)
            rows[row].append(piece)
            rooms[row] -= length
    return rows


@given(lengths, lengths, st.integers(1, 8))
def test_it_is_best_fit_with_carried_pieces_first(carried, drawn, num_rows):
    assert pack(carried, drawn, num_rows=num_rows, capacity=40) == reference(carried, drawn, num_rows, 40)


def test_an_empty_pool_gives_empty_rows():
    assert pack([], [], num_rows=3, capacity=8) == [[], [], []]


def test_a_piece_of_the_full_width_has_a_row_of_its_own():
    assert pack([8], [8, 1], num_rows=3, capacity=8) == [[0], [1], [2]]


def test_a_realistic_step_fills_over_99_percent():
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(6, 1.2, 1500), 1, 4096).astype(int).tolist()
    rows = pack([], drawn, num_rows=128, capacity=4096)
    assert sum(drawn[piece] for row in rows for piece in row) / (128 * 4096) > 0.99
