"""The rewriting of Lightning's counters, on plain dicts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megascale_lightning.integrations.lightning.progress import settle_progress


def counters(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}


def fit_loop(
    current: tuple[int, ...], total: tuple[int, ...], *, last: bool = False, epoch: tuple[int, ...] = (1, 1, 0, 0)
) -> dict[str, Any]:
    return {
        "epoch_loop.batch_progress": {"current": counters(*current), "total": counters(*total), "is_last_batch": last},
        "epoch_progress": {"current": counters(*epoch), "total": counters(*epoch)},
    }


def after(loop: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    progress = loop["epoch_loop.batch_progress"]
    return tuple(progress["current"].values()), tuple(progress["total"].values()), progress["is_last_batch"]


@pytest.mark.parametrize(
    ("current", "total", "last"),
    [
        pytest.param((8, 8, 8, 7), (20, 20, 20, 19), False, id="end of a batch"),
        pytest.param((8, 8, 8, 8), (20, 20, 20, 20), False, id="end of a validation"),
        pytest.param((12, 12, 12, 11), (24, 24, 24, 23), True, id="end of an epoch's last batch"),
        pytest.param((0, 0, 0, 0), (0, 0, 0, 0), False, id="nothing done"),
    ],
)
def test_fitting_counters_are_left_alone(current: tuple[int, ...], total: tuple[int, ...], last: bool) -> None:
    loop = fit_loop(current, total, last=last)
    before = copy.deepcopy(loop)
    assert settle_progress(loop, saved=4, now=4, step_limited=True) is False
    assert loop == before


@pytest.mark.parametrize(
    ("current", "total", "last", "now", "expected"),
    [
        # Another accumulation, at the end of a step.
        ((8, 8, 8, 7), (20, 20, 20, 19), False, 8, ((16, 16, 16, 15), (40, 40, 40, 39), False)),
        ((8, 8, 8, 8), (20, 20, 20, 20), False, 8, ((16, 16, 16, 16), (40, 40, 40, 40), False)),
        ((8, 8, 8, 7), (20, 20, 20, 19), False, 2, ((4, 4, 4, 3), (10, 10, 10, 9), False)),
        # The same at the end of an epoch.
        ((8, 8, 8, 7), (8, 8, 8, 7), True, 8, ((16, 16, 16, 15), (16, 16, 16, 15), True)),
        # In the middle of a step: back to its first microbatch, all before it long complete.
        ((6, 6, 6, 5), (18, 18, 18, 17), False, 4, ((4, 4, 4, 4), (16, 16, 16, 16), False)),
        ((6, 6, 5, 5), (18, 18, 17, 17), False, 4, ((4, 4, 4, 4), (16, 16, 16, 16), False)),
        ((6, 6, 6, 5), (18, 18, 18, 17), False, 8, ((8, 8, 8, 8), (32, 32, 32, 32), False)),
        ((12, 12, 11, 11), (24, 24, 23, 23), True, 4, ((8, 8, 8, 8), (20, 20, 20, 20), False)),
        # In the first step of a later epoch: Lightning must not complete a batch of this epoch.
        ((2, 2, 2, 1), (14, 14, 14, 13), False, 4, ((0, 0, 0, 0), (12, 12, 12, 12), False)),
        # In the first step of all.
        ((3, 3, 3, 2), (3, 3, 3, 2), False, 8, ((0, 0, 0, 0), (0, 0, 0, 0), False)),
        # A failure in the first microbatch of a step, and one after an earlier failure left a gap.
        ((9, 9, 8, 8), (21, 21, 20, 20), False, 4, ((8, 8, 8, 8), (20, 20, 20, 20), False)),
        ((8, 8, 8, 7), (21, 21, 20, 19), False, 4, ((8, 8, 8, 7), (20, 20, 20, 19), False)),
    ],
)
def test_counters_follow_the_steps(
    current: tuple[int, ...], total: tuple[int, ...], last: bool, now: int, expected: Any
) -> None:
    loop = fit_loop(current, total, last=last)
    assert settle_progress(loop, saved=4, now=now, step_limited=True) is True
    assert after(loop) == expected
    assert settle_progress(loop, saved=now, now=now, step_limited=True) is False, "settled once, it stays"


def test_finished_epoch_of_a_step_limited_run_is_closed() -> None:
    loop = fit_loop((12, 12, 12, 12), (24, 24, 24, 24), last=True, epoch=(2, 2, 2, 1))
    assert settle_progress(loop, saved=4, now=4, step_limited=True) is True
    assert after(loop) == ((0, 0, 0, 0), (24, 24, 24, 24), False)
    assert loop["epoch_progress"]["current"] == counters(2, 2, 2, 2)


@pytest.mark.parametrize("last", [False, True])
def test_other_ends_of_an_epoch_are_left_alone(last: bool) -> None:
    """Epoch-based runs Lightning closes itself; an epoch that `max_steps` broke off goes on."""
    loop = fit_loop((12, 12, 12, 12), (24, 24, 24, 24), last=last, epoch=(2, 2, 2, 1))
    assert settle_progress(loop, saved=4, now=4, step_limited=not last) is False


def test_checkpoints_without_counters_are_left_alone() -> None:
    assert settle_progress({}, saved=4, now=8, step_limited=True) is False
