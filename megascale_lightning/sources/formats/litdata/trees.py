"""`Tree`: the nesting of a LitData item, from the text of torch's pytree specification, without torch."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Tree", "parse_tree"]

_MAPPINGS: Final = {"dict": dict, "OrderedDict": OrderedDict, "defaultdict": dict}
_LISTS: Final[dict[str, Callable[[Any], Any]]] = {"list": list, "tuple": tuple, "deque": deque, "namedtuple": tuple}


@dataclass(frozen=True, slots=True)
class Tree:
    """A node, or a leaf."""

    kind: str
    """dict, OrderedDict, defaultdict, list, tuple, deque, namedtuple; empty for a leaf."""
    keys: tuple[Any, ...] = ()
    """Of a mapping."""
    children: tuple[Tree, ...] = ()

    @property
    def is_mapping(self) -> bool:
        """Whether its children have keys."""
        return self.kind in _MAPPINGS

    def num_leaves(self) -> int:
        """Leaves at or below."""
        return sum(child.num_leaves() for child in self.children) if self.kind else 1

    def names(self, prefix: str = "") -> Iterator[str]:
        """What leads to each leaf, such as `meta.tags.0`."""
        if not self.kind:
            yield prefix
        for index, child in enumerate(self.children):
            key = str(self.keys[index] if self.is_mapping else index)
            yield from child.names(f"{prefix}.{key}" if prefix else key)

    def build(self, leaves: Iterator[Any]) -> Any:
        """The value of a node, from the leaves below it in their order."""
        if not self.kind:
            return next(leaves)
        values = [child.build(leaves) for child in self.children]
        if self.is_mapping:
            return _MAPPINGS[self.kind](zip(self.keys, values, strict=True))
        return _LISTS[self.kind](values)


def parse_tree(text: str) -> Tree:
    """From the `data_spec` of an index.

    Raises:
        ValueError: It is no specification of version 1, or has nodes of an unknown kind; the text says which.
    """
    spec = json.loads(text)
    if not isinstance(spec, list) or len(spec) != 2 or spec[0] != 1:
        raise ValueError(f"it is no pytree of version 1: {text[:80]}")
    return _node(spec[1])


def _node(spec: Any) -> Tree:
    if spec["type"] is None:
        return Tree("")
    kind = str(spec["type"]).rpartition(".")[2]
    children = tuple(_node(child) for child in spec["children_spec"])
    if kind in _LISTS:
        return Tree(kind, (), children)
    if kind not in _MAPPINGS:
        raise ValueError(f"it has a node of type {spec['type']!r}; known are {', '.join([*_MAPPINGS, *_LISTS])}")
    return Tree(kind, tuple(_keys(kind, json.loads(spec["context"]))), children)


def _keys(kind: str, context: Any) -> Sequence[Any]:
    # A defaultdict has its factory before the keys.
    return list(context[1] if kind == "defaultdict" else context)
