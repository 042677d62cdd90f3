"""Seeds and permutations that are the same on every machine: blake2b of names and numbers, then raw PCG64 bits.

Only what numpy guarantees not to change between versions is used: bit generators seeded with an integer, and their raw
output. `Generator.permutation` carries no such promise.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

__all__ = ["derive_generator", "derive_permutation", "derive_seed"]


def derive_seed(*key: str | int) -> int:
    """128 bits from names and numbers."""
    text = "\x1f".join(item if isinstance(item, str) else str(int(item)) for item in key)
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def derive_permutation(n: int, *key: str | int) -> npt.NDArray[np.int64]:
    """A permutation of 0..n-1 that depends on the key alone: int64 [n]."""
    bits = np.random.PCG64(derive_seed(*key)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def derive_generator(*key: str | int) -> np.random.Generator:
    """A generator that depends on the key alone."""
    return np.random.Generator(np.random.PCG64(derive_seed(*key)))
