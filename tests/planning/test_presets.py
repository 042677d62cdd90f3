"""Presets: parameters, the length at which attention equals the rest, and its share, as published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megascale_lightning.planning import presets


def share(cost: Any, length: int) -> float:
    """Per cent of attention."""
    pairs = cost.per_token_pair * length**2
    return float(100 * pairs / cost(np.array([length]))[0])


@pytest.mark.parametrize(
    ("cost", "parameters", "per_token", "pair"),
    [
        (presets.mixtral_8x7b(), 46.7e9, 12.75e9, 5.24e5),
        (presets.llama2_13b(), 13.0e9, 12.85e9, 8.19e5),
        (presets.llama_12b(), 11.75e9, 11.58e9, 7.37e5),
        (presets.mistral_nemo_12b(), 12.25e9, 11.58e9, 6.55e5),
        (presets.vit_1b().transformer, 1.01e9, 1.01e9, 2.25e5),
        (presets.vit_1b_dinov2().transformer, 1.13e9, 1.13e9, 2.46e5),
        (presets.vit_2b().transformer, 1.84e9, 1.84e9, 3.19e5),
    ],
)
def test_sizes(cost: Any, parameters: float, per_token: float, pair: float) -> None:
    assert cost.parameters == pytest.approx(parameters, rel=0.005)
    assert cost.matmul_parameters == pytest.approx(per_token, rel=0.005)
    assert cost.pair_flops == pytest.approx(pair, rel=0.003)


@pytest.mark.parametrize(("cost", "tokens"), [(presets.llama2_13b(), 62_800), (presets.mixtral_8x7b(), 97_000)])
def test_where_attention_equals_the_rest(cost: Any, tokens: int) -> None:
    assert cost.crossover == pytest.approx(tokens, rel=0.005)
    assert share(cost, round(cost.crossover)) == pytest.approx(50, abs=0.01)


@pytest.mark.parametrize(
    ("cost", "lengths", "shares"),
    [
        (presets.llama2_13b(), [1024, 4096, 8192, 16384, 131072], [1.6, 6.1, 11.5, 20.7, 67.6]),
        (presets.mixtral_8x7b(), [1024, 4096, 8192, 16384, 131072], [1.0, 4.0, 7.8, 14.4, 57.4]),
        (presets.vit_1b().transformer, [256, 1024, 4096, 16384], [2.8, 10.3, 31, 65]),
        (presets.vit_2b().transformer, [256, 1024, 4096, 16384], [2.2, 8.2, 26, 59]),
    ],
)
def test_shares_of_attention(cost: Any, lengths: list[int], shares: list[float]) -> None:
    for length, expected in zip(lengths, shares, strict=True):
        assert share(cost, length) == pytest.approx(expected, abs=0.051 if expected < 26 or expected > 67 else 0.51)


def test_several_images_in_a_document() -> None:
    cost = presets.vit_2b(patch_pairs="squares") + presets.llama_12b()
    assert cost.fields == ("patches", "squares")
