"""Transforms that draw, in a module that is light to import."""

from __future__ import annotations

import random
from typing import Any


def tokens(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"input_ids": rng.integers(1, 1000, 1 + sample["n"] % 7)}


def batched(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [[random.randrange(1000)] * (1 + n % 7) for n in columns["n"]]}


def shouts(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("bad text: " + sample["text"])
