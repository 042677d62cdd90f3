"""A whole sample as bytes, so that it comes out on the rank as the thing it was."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from contextlib import suppress
from types import FunctionType
from typing import Any

__all__ = ["pickled"]


def pickled(sample: Any) -> bytes:
    """The sample, pickled. A tensor that is a view of a larger one travels without the rest of it.

    Raises:
        Exception: It does not pickle; anything that its parts raise.
    """
    try:
        return _dumped(pickle.Pickler, sample)
    except Exception:
        # Mostly it goes without; a look at every class costs as much as the rest.
        return _dumped(_ScriptPickler, sample)


def _dumped(kind: type[pickle.Pickler], sample: Any) -> bytes:
    file = io.BytesIO()
    pickler = kind(file, 5)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "Tensor"):
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced_tensor}
    pickler.dump(sample)
    return file.getvalue()


class _ScriptPickler(pickle.Pickler):
    """Pickle, for what the user's script defines, too."""

    def reducer_override(self, value: Any) -> Any:
        """How `value` is taken apart; NotImplemented: as always."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            return _reduced_name(value)
        return NotImplemented


def _reduced_tensor(tensor: Any) -> Any:
    """Plain numbers go by numpy: torch's own way costs a zip file each, and takes all that a view was cut from."""
    torch = sys.modules["torch"]
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    if is_plain and not tensor.is_conj() and not tensor.is_neg():
        if tensor.is_contiguous():
            with suppress(TypeError):  # numpy lacks some types, bfloat16 among them; those go torch's way below
                return torch.from_numpy, (tensor.numpy(),)
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()
    return tensor.__reduce_ex__(5)


def _reduced_name(value: Any) -> Any:
    """What was defined in the user's script is found there again, though no other process has it as `__main__`."""
    if "<locals>" in value.__qualname__ or getattr(sys.modules["__main__"], value.__qualname__, None) is value:
        return NotImplemented
    return _of_main, (value.__qualname__,)


def _of_main(name: str) -> Any:
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found
