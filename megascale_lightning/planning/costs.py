"""What a sample costs a rank to compute, as a function of its length and of other metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megascale_lightning.errors import ConfigError
from megascale_lightning.types import FloatArray, IntArray

__all__ = [
    "Addable",
    "AttentionCost",
    "CostFunction",
    "CostOf",
    "CostSum",
    "TokenCount",
    "TransformerCost",
    "ViTCost",
    "cost_of_documents",
    "cost_of_rows",
    "fields_of",
    "refuse_missing",
]

BACKWARD_TOO = 3
"""Training is 3 forward passes' worth of FLOPs: the gradients by inputs and by weights cost one each."""


class CostFunction(Protocol):
    """Cost of documents, in any unit: only ratios matter.

    One that needs more than lengths has an attribute `fields`, names of metadata arrays [n]; it gets them by keyword:
    `cost(lengths, patches=...)`.
    """

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> cost, float64 [n]."""
        ...


def fields_of(cost: Any) -> tuple[str, ...]:
    """Give the names of the metadata arrays that a cost wants beside the lengths."""
    return tuple(getattr(cost, "fields", ()))


def cost_of_documents(cost: Any, lengths: IntArray, metadata: Mapping[str, Any] | None = None) -> FloatArray:
    """Ask a cost function, and check what it gives.

    Args:
        cost: A `CostFunction`.
        lengths: Tokens, int [n].
        metadata: Arrays [n] by name; those that the cost does not want are left out.

    Returns:
        Costs, float64 [n].

    Raises:
        ConfigError: A wanted array is missing, or the cost gives something else than n finite numbers of at least 0.
    """
    known = {} if metadata is None else metadata
    wanted = fields_of(cost)
    refuse_missing(_name(cost), wanted, known)
    found = cost(_unwritable(lengths), **{name: _unwritable(known[name]) for name in wanted})
    try:
        given = np.asarray(found)
    except ValueError as error:
        raise ConfigError(
            f"{_name(cost)} gave no array for {len(lengths)} documents ({error}): one number for each"
        ) from error
    if given.dtype.kind not in "biuf":
        raise ConfigError(f"{_name(cost)} gave {given.dtype} for {len(lengths)} documents: one number for each")
    costs = given.astype(np.float64, copy=False)
    if costs.shape != np.shape(lengths):
        raise ConfigError(f"{_name(cost)} gave shape {costs.shape} for {len(lengths)} documents: one number for each")
    if not (np.isfinite(costs) & (costs >= 0)).all():
        at = int(np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))[0])
        raise ConfigError(
            f"{_name(cost)} gave {costs[at]} for document {at} of {lengths[at]} tokens: costs are finite and at least 0"
        )
    return costs


def cost_of_rows(
    cost: Any, lengths: IntArray, row_offsets: IntArray, metadata: Mapping[str, Any] | None = None
) -> FloatArray:
    """Give rows the sum over their documents: attention stays inside a document, however a row is filled.

    Args:
        cost: A `CostFunction`.
        lengths: Tokens of the documents, int [n], row after row.
        row_offsets: int [rows + 1] into `lengths`; a row may be empty.
        metadata: As for `cost_of_documents`.

    Returns:
        Costs, float64 [rows].

    Raises:
        ConfigError: As for `cost_of_documents`.
    """
    costs = cost_of_documents(cost, lengths, metadata)
    rows = np.repeat(np.arange(len(row_offsets) - 1), np.diff(row_offsets))
    return np.bincount(rows, weights=costs, minlength=len(row_offsets) - 1).astype(np.float64)


class Addable:
    """Costs in one unit can be added: `encoder + backbone`."""

    def __add__(self, other: Any) -> CostSum:
        if not callable(other):
            return NotImplemented
        return CostSum((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class CostSum(Addable):
    """Several costs of one document together, such as an encoder and its backbone; what `+` between costs gives.

    All have to be in one unit, as `TransformerCost` and `ViTCost` are.

    Raises:
        ConfigError: There are no parts, or one cannot be called.
    """

    parts: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.parts or not all(map(callable, self.parts)):
            raise ConfigError(f"CostSum: parts must be one or more cost functions, not {self.parts!r}")

    @property
    def fields(self) -> tuple[str, ...]:
        """Every metadata array that a part wants, once."""
        return tuple(dict.fromkeys(name for part in self.parts for name in fields_of(part)))

    def __call__(self, lengths: IntArray, **metadata: Any) -> FloatArray:
        """Lengths in tokens, int [n], and the arrays of `fields` -> cost, float64 [n]."""
        total = np.zeros(len(lengths), dtype=np.float64)
        for part in self.parts:
            total += cost_of_documents(part, lengths, metadata)
        return total


@dataclass(frozen=True)
class CostOf(Addable):
    """A function of your own over metadata: `CostOf(lambda lengths, pixels: lengths + pixels / 784, ("pixels",))`.

    With the roles in other processes the function has to be importable there: define it in a module.

    Raises:
        ConfigError: `function` cannot be called, or `fields` are no names of arrays beside the lengths.
    """

    function: Callable[..., Any]
    """`function(lengths, **arrays)`: int [n], and an array [n] for each of `fields` -> [n]."""
    fields: tuple[str, ...] = ()
    """Names of metadata arrays."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"CostOf: function must be callable, not {self.function!r}")
        if isinstance(self.fields, str):
            raise ConfigError(f"CostOf: fields must be a tuple of names: ({self.fields!r},), not {self.fields!r}")
        if not all(isinstance(name, str) and name.isidentifier() and name != "lengths" for name in self.fields):
            raise ConfigError(
                f"CostOf: fields must be names as of keywords, without 'lengths' (always given), not {self.fields!r}"
            )
        object.__setattr__(self, "fields", tuple(self.fields))

    def __call__(self, lengths: IntArray, **metadata: Any) -> FloatArray:
        """Lengths in tokens, int [n], and the arrays of `fields` -> cost, float64 [n]."""
        return np.asarray(self.function(lengths, **metadata), dtype=np.float64)


@dataclass(frozen=True)
class TokenCount(Addable):
    """A token costs the same wherever it stands."""

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> cost, float64 [n]."""
        return np.asarray(lengths, dtype=np.float64)


@dataclass(frozen=True)
class AttentionCost(Addable):
    """Matrix products grow with the length l, attention with its square: cost = l + l^2 / crossover.

    For a causal transformer of L layers with hidden size h the two terms are equal at about 12 h tokens (6 W l for
    the weights W = 12 L h^2 against 6 L h l^2 / 12 for the attention core, forward and backward alike); the default is
    that of h = 4096.

    Raises:
        ConfigError: `crossover` is not above 0.
    """

    crossover: float = 49152.0
    """Length in tokens at which attention costs as much as everything else."""

    def __post_init__(self) -> None:
        if not self.crossover > 0:
            raise ConfigError(f"AttentionCost: crossover must be above 0 tokens, not {self.crossover!r}")

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> cost, float64 [n]."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens + tokens * tokens / self.crossover


@dataclass(frozen=True)
class TransformerCost(Addable):
    """FLOPs of training a transformer on a document of l tokens: 6 W l + 3 q l^2 (half of the second if causal).

    A multiply-add is 2 FLOPs; a training step is a forward pass and twice that backward. With d = head_dim:

        W = L x (2 h a d + 2 h a_kv d + k x m h f + h E [if E > 1]) + V h     weights a token meets; m = 3 gated, else 2
        q = 4 L a d                                                           forward FLOPs of a (query, key) pair

    that is the queries and the output, the keys and values, the k chosen of E feed-forward blocks, the router, and the
    logits; scores and weighted sum of the attention. Norms, biases and activations are left out. The count is the usual
    one (Kaplan et al., 2020, arXiv 2001.08361, section 2.1; Narayanan et al., 2021, arXiv 2104.04473, appendix), with
    grouped keys, experts, and causal attention counted as half of the pairs.

    Raises:
        ConfigError: A size is not a whole number of at least 1 (`vocab`: 0), the heads do not divide, or `top_k` is
            above `experts`; all that is wrong is said at once.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None
    """Heads of keys and values; None: `heads`."""
    ffn: int | None = None
    """Width of a feed-forward block, of one expert; None: 4 x hidden."""
    vocab: int = 0
    """Size of the vocabulary, for the logits; 0: none."""
    experts: int = 1
    top_k: int = 1
    """Experts that a token goes through."""
    causal: bool = True
    gated: bool = True
    """Three matrices in a feed-forward block (SwiGLU), else two."""
    head_dim: int | None = None
    """None: hidden / heads."""
    recompute: bool = False
    """Every activation is computed a second time in the backward pass: 4 forward passes' worth instead of 3."""

    def __post_init__(self) -> None:
        found = _wrong_sizes(
            {name: getattr(self, name) for name in ("hidden", "layers", "heads", "experts", "top_k")},
            {name: getattr(self, name) for name in ("kv_heads", "ffn", "head_dim")},
        )
        if not isinstance(self.vocab, int) or self.vocab < 0:
            found.append(f"vocab must be a whole number of at least 0, not {self.vocab!r}")
        if not found:
            if self.head_dim is None and self.hidden % self.heads:
                found.append(f"hidden {self.hidden} does not divide by heads {self.heads}: give head_dim")
            if self.heads % (self.kv_heads or self.heads):
                found.append(f"heads {self.heads} does not divide by kv_heads {self.kv_heads}")
            if self.top_k > self.experts:
                found.append(f"top_k {self.top_k} is above experts {self.experts}")
        if found:
            raise ConfigError("; ".join(f"TransformerCost: {problem}" for problem in found))

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Lengths in tokens, int [n] -> FLOPs, float64 [n]."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.per_token * tokens + self.per_token_pair * tokens * tokens

    @property
    def per_token(self) -> float:
        """FLOPs that a token costs by itself."""
        return 2.0 * self._passes * self.matmul_parameters

    @property
    def per_token_pair(self) -> float:
        """FLOPs that l^2 is multiplied by."""
        return self._passes * self.pair_flops * (0.5 if self.causal else 1.0)

    @property
    def crossover(self) -> float:
        """Tokens of a document whose attention costs as much as everything else."""
        return self.per_token / self.per_token_pair

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of one (query, key) pair, in all layers: q."""
        return 4 * self.layers * self.heads * self._head_dim

    @property
    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: W."""
        return self.layers * self._layer(self.top_k) + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights: every expert, and embeddings apart from the logits' matrix; no norms and biases."""
        return self.layers * self._layer(self.experts) + 2 * self.vocab * self.hidden

    @property
    def _passes(self) -> int:
        return BACKWARD_TOO + self.recompute

    @property
    def _head_dim(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    def _layer(self, experts: int) -> int:
        attention = 2 * self.hidden * self._head_dim * (self.heads + (self.kv_heads or self.heads))
        block = (3 if self.gated else 2) * self.hidden * (self.ffn or 4 * self.hidden)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + experts * block + router


@dataclass(frozen=True)
class ViTCost(Addable):
    """FLOPs of training a vision transformer on the images of a document: as `TransformerCost`, on patches.

    Every patch of an image sees every other one of the image, and none of another image. So beside the number of
    patches the sum over the images of its square is needed: name the array that has it as `patch_pairs`. Without one a
    document is taken as one image, which is right for one image at most and too much for several.

    Raises:
        ConfigError: As for `TransformerCost`, or a name is no name.
    """

    hidden: int
    layers: int
    heads: int
    ffn: int | None = None
    """Width of a feed-forward block; None: 4 x hidden."""
    gated: bool = False
    head_dim: int | None = None
    """None: hidden / heads."""
    recompute: bool = False
    patches: str = "patches"
    """Metadata array: patches of all images of a document."""
    patch_pairs: str | None = None
    """Metadata array: sum over the images of a document of (patches of the image)^2."""

    def __post_init__(self) -> None:
        for name in self.fields:
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"ViTCost: patches and patch_pairs must be names of metadata arrays, not {name!r}")
        _ = self.transformer

    @property
    def fields(self) -> tuple[str, ...]:
        """The metadata arrays that it wants."""
        return (self.patches,) if self.patch_pairs is None else (self.patches, self.patch_pairs)

    @property
    def transformer(self) -> TransformerCost:
        """The same on one image, by its patches."""
        return TransformerCost(
            self.hidden,
            self.layers,
            self.heads,
            ffn=self.ffn,
            causal=False,
            gated=self.gated,
            head_dim=self.head_dim,
            recompute=self.recompute,
        )

    def __call__(self, lengths: IntArray, **metadata: Any) -> FloatArray:
        """Lengths, int [n], of which only n counts, and the arrays of `fields` -> FLOPs, float64 [n]."""
        refuse_missing("ViTCost", self.fields, metadata)
        patches = np.asarray(metadata[self.patches], dtype=np.float64)
        pairs = patches * patches
        if self.patch_pairs is not None:
            pairs = np.asarray(metadata[self.patch_pairs], dtype=np.float64)
        return self.transformer.per_token * patches + self.transformer.per_token_pair * pairs


def refuse_missing(name: str, wanted: tuple[str, ...], known: Mapping[str, Any]) -> None:
    """Raise ConfigError where a wanted array is not there."""
    missing = [field for field in wanted if field not in known]
    if missing:
        raise ConfigError(
            f"{name} wants the metadata {missing} beside the lengths; there are {sorted(known)}. Let the sources give "
            "them, or take a cost by length alone"
        )


def _unwritable(values: Any) -> Any:
    """The same array, which is that of the step, and which a cost that works in place must not change."""
    view = np.asarray(values).view()
    view.flags.writeable = False
    return view


def _parts(cost: Any) -> tuple[Any, ...]:
    return cost.parts if isinstance(cost, CostSum) else (cost,)


def _name(cost: Any) -> str:
    return getattr(cost, "__qualname__", type(cost).__qualname__)


def _wrong_sizes(sizes: Mapping[str, Any], optional: Mapping[str, Any]) -> list[str]:
    given = {**sizes, **{name: value for name, value in optional.items() if value is not None}}
    return [
        f"{name} must be a whole number of at least 1, not {value!r}"
        for name, value in given.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
