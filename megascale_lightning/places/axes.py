"""The four axes of a training job, and the many names that frameworks give them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from megascale_lightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["ALIASES", "AXES", "Axis", "describe_aliases", "fold_axes", "fold_axis"]

Axis = Literal["pp", "dp", "cp", "tp"]

AXES: Final[tuple[Axis, ...]] = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbours on `tp` usually hold neighbouring ranks."""

ALIASES: Final[Mapping[Axis, tuple[str, ...]]] = MappingProxyType(
    {
        "pp": ("pp", "pipe", "pipeline", "pipeline_parallel"),
        "dp": (
            *("dp", "data", "data_parallel", "batch", "ddp", "dp_replicate", "replicate"),
            *("fsdp", "dp_shard", "shard", "dp_shard_in_ep", "dp_shard_mod_ep"),
        ),
        "cp": ("cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel", "ulysses"),
        "tp": ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"),
    }
)
"""Axis -> the names that fold into it. Replicated and sharded data parallelism are both `dp`: their ranks get different
rows. Sequence parallelism is `cp`: its ranks share rows and split their tokens."""

_AXIS_OF: Final[Mapping[str, Axis]] = {name: axis for axis, names in ALIASES.items() for name in names}


def fold_axis(name: str) -> Axis:
    """The axis that a framework's name means; case and `-` against `_` make no difference.

    Raises:
        ConfigError: The name is unknown; the message lists all that are known.
    """
    return fold_axes((name,))[0]


def fold_axes(names: Iterable[str]) -> tuple[Axis, ...]:
    """`fold_axis` of each name; all unknown names are reported together.

    Raises:
        ConfigError: Names are unknown.
    """
    names = tuple(names)
    folded = tuple(_AXIS_OF.get(_normal(name)) for name in names)
    unknown = [name for name, axis in zip(names, folded, strict=True) if axis is None]
    if unknown:
        what = "axis" if len(unknown) == 1 else "axes"
        raise ConfigError(f"unknown {what} {', '.join(map(repr, unknown))}; known names are {describe_aliases()}")
    return tuple(axis for axis in folded if axis is not None)


def describe_aliases() -> str:
    """All known names on one line, by axis."""
    return "; ".join(f"{axis}: {', '.join(names)}" for axis, names in ALIASES.items())


def _normal(name: object) -> str:
    return str(name).strip().lower().replace("-", "_")
