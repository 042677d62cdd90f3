"""Costs of known models, by name.

Sizes are those of the published configurations, except where a function says that it is a guess. Each call gives a new
value; change what differs with `dataclasses.replace`.
"""

from __future__ import annotations

from megascale_lightning.planning.costs import TransformerCost, ViTCost

__all__ = ["llama2_13b", "llama_12b", "mistral_nemo_12b", "mixtral_8x7b", "vit_1b", "vit_1b_dinov2", "vit_2b"]


def llama2_13b() -> TransformerCost:
    """Llama-2-13B: 13.0e9 parameters; attention costs as much as the rest at 62.8k tokens."""
    return TransformerCost(hidden=5120, layers=40, heads=40, ffn=13824, vocab=32000)


def llama_12b() -> TransformerCost:
    """The paper's Llama-12B, a guess (its configuration is not public): 11.75e9 parameters.

    The widths of Llama-2-13B with 36 layers, 4 for each of the 9 pipeline stages of the paper's case.
    """
    return TransformerCost(hidden=5120, layers=36, heads=40, ffn=13824, vocab=32000)


def mistral_nemo_12b() -> TransformerCost:
    """Mistral-Nemo: 12.25e9 parameters; a published model of the size of the paper's Llama-12B."""
    return TransformerCost(hidden=5120, layers=40, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=131072)


def mixtral_8x7b() -> TransformerCost:
    """Mixtral-8x7B: 46.7e9 parameters, 12.9e9 of them for a token; attention equals the rest at 97k tokens."""
    return TransformerCost(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8, top_k=2)


def vit_1b(*, patch_pairs: str | None = None) -> ViTCost:
    """ViT-g/14 (Zhai et al., 2022): 1.01e9 parameters. That it is the paper's ViT-1B is a guess.

    Args:
        patch_pairs: As for `ViTCost`: needed where documents have several images.
    """
    return ViTCost(hidden=1408, layers=40, heads=16, ffn=6144, patch_pairs=patch_pairs)


def vit_1b_dinov2(*, patch_pairs: str | None = None) -> ViTCost:
    """DINOv2's ViT-g/14: 1.13e9 parameters; another model of the size of the paper's ViT-1B.

    Args:
        patch_pairs: As for `ViTCost`: needed where documents have several images.
    """
    return ViTCost(hidden=1536, layers=40, heads=24, ffn=4096, gated=True, patch_pairs=patch_pairs)


def vit_2b(*, patch_pairs: str | None = None) -> ViTCost:
    """ViT-G/14 (Zhai et al., 2022): 1.84e9 parameters. That it is the paper's ViT-2B is a guess.

    Args:
        patch_pairs: As for `ViTCost`: needed where documents have several images.
    """
    return ViTCost(hidden=1664, layers=48, heads=16, ffn=8192, patch_pairs=patch_pairs)
