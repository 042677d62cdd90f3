"""What a checkpoint calls a cost: one text for one cost, and none that it could not know again."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from megascale_lightning import (
    AttentionCost,
    CalibratedCost,
    ConfigError,
    CostOf,
    TokenCount,
    TransformerCost,
    ViTCost,
)
from megascale_lightning.planning.signatures import signature


def by_pixels(lengths, pixels):
    return lengths + pixels


@dataclass(frozen=True)
class Own:
    scale: float
    base: object = TokenCount()

    def __call__(self, lengths):
        return self.scale * self.base(lengths)


SMALL = TransformerCost(64, 2, 4)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (TokenCount(), "TokenCount()"),
        (AttentionCost(), "AttentionCost()"),
        (AttentionCost(np.float64(512)), "AttentionCost(crossover=512.0)"),
        (SMALL, "TransformerCost(hidden=64, layers=2, heads=4)"),
        (
            SMALL + ViTCost(32, 1, 4, patches="n"),
            "CostSum(parts=(TransformerCost(hidden=64, layers=2, heads=4), "
            "ViTCost(hidden=32, layers=1, heads=4, patches='n')))",
        ),
        (
            CostOf(by_pixels, ("pixels",)),
            "CostOf(function=tests.planning.test_signatures.by_pixels, fields=('pixels'))",
        ),
        (Own(2), "tests.planning.test_signatures.Own(scale=2)"),
        (Own(2, SMALL), f"tests.planning.test_signatures.Own(scale=2, base={signature('x', SMALL)})"),
        (by_pixels, "tests.planning.test_signatures.by_pixels"),
        (np.square, "numpy.square"),
        (CalibratedCost(per_token=0.5, r2=float("nan")), "CalibratedCost(per_token=0.5)"),
    ],
)
def test_what_it_says(cost, said):
    assert signature("cost", cost) == said


def test_any_other_setting_is_another_cost():
    sizes = {"ffn": 128, "vocab": 7, "causal": False, "gated": False, "kv_heads": 2, "recompute": True}
    others = [SMALL, *(replace(SMALL, **{name: value}) for name, value in sizes.items())]
    assert len({signature("cost", cost) for cost in others}) == len(others)


class Plain:
    def __call__(self, lengths):
        return lengths


@dataclass(frozen=True)
class Holder:
    inside: object


@pytest.mark.parametrize(
    "cost",
    [
        lambda lengths: lengths,
        partial(by_pixels, pixels=0),
        Plain(),
        Plain().__call__,
        Holder(Plain()),
        CostOf(lambda lengths: lengths),
        SMALL + (lambda lengths: lengths),
    ],
)
def test_what_could_not_be_known_again_is_refused(cost):
    with pytest.raises(ConfigError, match=r"^here: .* cannot be recognised .* defined at the top of a module"):
        signature("here", cost)
