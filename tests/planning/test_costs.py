"""Costs: the documented formulas, rows as sums over documents, metadata by name, sums, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from megascale_lightning.errors import ConfigError
from megascale_lightning.planning.costs import (
    AttentionCost,
    CostOf,
    CostSum,
    TokenCount,
    TransformerCost,
    ViTCost,
    cost_of_documents,
    cost_of_rows,
    fields_of,
)

SMALL = TransformerCost(hidden=8, layers=3, heads=4, kv_heads=2, ffn=20, vocab=50, experts=6, top_k=2)
LENGTHS = np.array([1, 7, 100])


def attention_part(cost: TransformerCost, lengths: Any) -> Any:
    return cost(lengths) - cost.per_token * lengths


@pytest.mark.parametrize("causal", [True, False])
def test_the_papers_example_of_packed_rows(causal: bool) -> None:
    """30 + 70 tokens cost 5800 pairs, 50 + 50 cost 5000: 1.16 times the attention for as many tokens."""
    cost = TransformerCost(hidden=64, layers=2, heads=4, causal=causal)
    lengths = np.array([30, 70, 50, 50])
    attention = CostOf(lambda lengths: attention_part(cost, lengths))
    uneven, even = cost_of_rows(attention, lengths, np.array([0, 2, 4]))
    assert uneven / even == pytest.approx(5800 / 5000, rel=1e-12)
    tokens = cost_of_rows(TokenCount(), lengths, np.array([0, 2, 4]))
    assert tokens.tolist() == [100.0, 100.0]


def test_rows_may_be_empty() -> None:
    assert cost_of_rows(TokenCount(), np.array([3, 4]), np.array([0, 0, 2, 2])).tolist() == [0.0, 7.0, 0.0]


def test_transformer_by_hand() -> None:
    """h=8, d=2: attention 2*8*2*(4+2) = 192; an expert 3*8*20 = 480, two of them 960; router 48; logits 400."""
    per_token = 3 * (192 + 960 + 48) + 400
    pair = 4 * 3 * 4 * 2
    assert SMALL.matmul_parameters == per_token
    assert SMALL.parameters == 3 * (192 + 6 * 480 + 48) + 2 * 400
    assert SMALL(LENGTHS).tolist() == [6 * per_token * n + 3 * pair * n * n / 2 for n in LENGTHS.tolist()]
    assert SMALL(LENGTHS).dtype == np.float64
    assert SMALL.crossover == pytest.approx(4 * per_token / pair)


def test_transformer_without_extras_by_hand() -> None:
    """One plain block: 4 h^2 and 8 h^2; full attention 4 h a pair; everything computed again is a fourth pass."""
    plain = TransformerCost(hidden=8, layers=1, heads=2, causal=False, gated=False)
    assert plain(LENGTHS).tolist() == [6 * 12 * 64 * n + 3 * 4 * 8 * n * n for n in LENGTHS.tolist()]
    again = TransformerCost(hidden=8, layers=1, heads=2, causal=False, gated=False, recompute=True)
    assert (again(LENGTHS) / plain(LENGTHS)).tolist() == [4 / 3] * 3
    wide = TransformerCost(hidden=8, layers=1, heads=2, head_dim=16, causal=False, gated=False)
    assert wide.pair_flops == 4 * plain.pair_flops


def test_vit_counts_pairs_inside_of_images() -> None:
    """Two images of 16 patches are cheaper than one of 32; one array alone takes a document as one image."""
    one, many = ViTCost(8, 2, 2, 32), ViTCost(8, 2, 2, 32, patch_pairs="patch_pairs")
    assert fields_of(one) == ("patches",)
    assert fields_of(many) == ("patches", "patch_pairs")
    metadata = {"patches": np.array([32, 32, 0]), "patch_pairs": np.array([2 * 16**2, 32**2, 0])}
    single, exact = (cost_of_documents(cost, LENGTHS, metadata) for cost in (one, many))
    weights, pair = 2 * (4 * 64 + 2 * 8 * 32), 4 * 2 * 8
    assert exact.tolist() == [6 * weights * 32 + 3 * pair * 512, 6 * weights * 32 + 3 * pair * 1024, 0]
    assert single.tolist() == [exact[1], exact[1], 0]


def test_own_function_gets_its_fields_alone() -> None:
    def seen(lengths: Any, *, pixels: Any) -> Any:
        return lengths + pixels

    cost = CostOf(seen, ("pixels",))
    metadata = {"pixels": np.array([5, 6, 7]), "other": np.zeros(3)}
    assert cost_of_documents(cost, LENGTHS, metadata).tolist() == [6, 13, 107]

    class Bare:
        fields = ("pixels",)

        def __call__(self, lengths: Any, pixels: Any) -> Any:
            return pixels

    assert cost_of_documents(Bare(), LENGTHS, metadata).tolist() == [5, 6, 7]
    assert cost_of_documents(lambda lengths: lengths * 2, LENGTHS).tolist() == [2, 14, 200]


def test_sums_of_costs() -> None:
    encoder, backbone = ViTCost(8, 2, 2, 32), SMALL
    both = encoder + backbone + CostOf(lambda lengths, pixels, patches: pixels + patches, ("pixels", "patches"))
    assert isinstance(both, CostSum)
    assert len(both.parts) == 3
    assert both.fields == ("patches", "pixels")
    metadata = {"patches": np.array([4, 0, 9]), "pixels": np.array([1, 2, 3])}
    expected = encoder(LENGTHS, patches=metadata["patches"]) + backbone(LENGTHS) + np.array([5, 2, 12])
    assert cost_of_documents(both, LENGTHS, metadata).tolist() == expected.tolist()
    assert backbone + encoder == pickle.loads(pickle.dumps(backbone + encoder))
    assert TokenCount() + AttentionCost() == CostSum((TokenCount(), AttentionCost()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda lengths: lengths[:2], r"shape \(2,\) for 3 documents"),
        (lambda lengths: 1.0, r"shape \(\) for 3 documents"),
        (lambda lengths: [str(length) for length in lengths], "gave <U3 for 3 documents: one number for each"),
        (lambda lengths: lengths * 1j, "gave complex128 for 3 documents: one number for each"),
        (lambda lengths: [[1], [1, 2], [3]], "gave no array for 3 documents"),
        (lambda lengths: None, "gave object for 3 documents: one number for each"),
        (lambda lengths: lengths - 7.0, "gave -6.0 for document 0 of 1 tokens"),
        (lambda lengths: np.where(lengths == 7, np.nan, 1.0), "gave nan for document 1 of 7 tokens"),
        (ViTCost(8, 2, 2), r"ViTCost wants the metadata \['patches'\].*there are \['pixels'\]"),
        (ViTCost(8, 2, 2) + TokenCount(), r"wants the metadata \['patches'\]"),
    ],
)
def test_what_a_cost_gives_is_checked(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost_of_documents(given, LENGTHS, {"pixels": np.ones(3)})


def test_what_a_cost_is_given_stays_as_it_is() -> None:
    lengths, patches = np.array([7, 1, 100]), np.ones(3)
    for cost in (
        CostOf(lambda lengths: lengths.sort()),
        CostOf(lambda lengths, patches: patches.fill(2), ("patches",)),
    ):
        with pytest.raises(ValueError, match="read-only"):
            cost_of_documents(cost, lengths, {"patches": patches})
    assert (lengths.tolist(), patches.tolist()) == ([7, 1, 100], [1, 1, 1])
    lengths.sort()  # for others they are as before


def test_called_without_its_metadata_it_says_so() -> None:
    with pytest.raises(ConfigError, match="ViTCost wants the metadata"):
        ViTCost(8, 2, 2)(LENGTHS)


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (lambda: TransformerCost(0, 1, 1.5), ["hidden must be", "heads must be a whole number of at least 1, not 1.5"]),  # type: ignore[arg-type]
        (lambda: TransformerCost(8, 1, 3), ["hidden 8 does not divide by heads 3: give head_dim"]),
        (lambda: TransformerCost(8, 1, 4, kv_heads=3), ["heads 4 does not divide by kv_heads 3"]),
        (lambda: TransformerCost(8, 1, 4, kv_heads=0, ffn=0), ["kv_heads must be", "ffn must be"]),
        (lambda: TransformerCost(8, 1, 4, vocab=-1), ["vocab must be a whole number of at least 0, not -1"]),
        (lambda: TransformerCost(8, 1, 4, top_k=2), ["top_k 2 is above experts 1"]),
        (lambda: ViTCost(8, 1, 3), ["does not divide by heads 3"]),
        (lambda: ViTCost(8, 1, 2, patch_pairs="a b"), ["names of metadata arrays, not 'a b'"]),
        (lambda: CostOf(3), ["function must be callable, not 3"]),  # type: ignore[arg-type]
        (lambda: CostOf(len, "patches"), [r"('patches',), not 'patches'"]),  # type: ignore[arg-type]
        (lambda: CostOf(len, ("lengths",)), ["without 'lengths'"]),
        (lambda: CostSum(()), ["one or more cost functions"]),
        (lambda: AttentionCost(0), ["crossover must be above 0"]),
    ],
)
def test_wrong_settings_are_refused(make: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(message in str(caught.value) for message in messages), str(caught.value)


def test_only_costs_can_be_added() -> None:
    with pytest.raises(TypeError):
        SMALL + 3
