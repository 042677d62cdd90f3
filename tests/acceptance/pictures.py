"""Random crops and colours of real pictures with torchvision, as a user writes them: nothing is seeded here."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def _augmentation() -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(32), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)])


def augment(sample: dict[str, Any]) -> dict[str, Any]:
    """A picture file as pixels: uint8 [3, 32, 32]."""
    from PIL import Image
    from torchvision.transforms import v2

    with Image.open(sample["path"]) as picture:
        return {"name": sample["name"], "pixels": _augmentation()(v2.functional.pil_to_tensor(picture.convert("RGB")))}
