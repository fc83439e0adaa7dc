"""Where records keep their slots: which values take some, how many a signature has, and which are whose.

The n-th record's slots follow those of the records before it. Within a record each of the columns tensors, ints and
floats is numbered for itself, along the signature's nodes in pre-order, arguments before results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .codes import ValueKind
from .model import Node, Signature

COLUMNS = ("tensors", "ints", "floats")

Counts = tuple[int, int, int]  # by column

# How many slots a node of each kind takes.
SLOTS: dict[ValueKind, Counts] = {
    ValueKind.tensor: (1, 0, 0),
    ValueKind.int: (0, 1, 0),
    ValueKind.storage: (0, 1, 0),
    ValueKind.generator: (0, 1, 0),
    ValueKind.payload: (0, 1, 0),
    ValueKind.range: (0, 1, 0),
    ValueKind.recipe: (0, 1, 0),
    ValueKind.float: (0, 0, 1),
    ValueKind.complex: (0, 0, 2),
}
_NONE: Counts = (0, 0, 0)
_BY_KIND = np.array([SLOTS.get(ValueKind(kind), _NONE) for kind in range(max(ValueKind) + 1)], np.int64).T.copy()


def slot_counts(kinds: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """How many slots records of each signature have: int64[3, signatures]. `kinds` are the value kinds of all nodes,
    `nodes` says how many of them each signature has."""
    running = np.zeros((3, len(kinds) + 1), np.int64)
    np.cumsum(_BY_KIND.take(kinds, axis=1), axis=1, out=running[:, 1:])
    ends = np.concatenate(([0], np.cumsum(nodes, dtype=np.int64)))
    return np.diff(running.take(ends, axis=1), axis=1)


class NodePlace(NamedTuple):
    """A node with the first slot it takes in each column, counted from the record's first ones."""

    node: Node
    tensor_slot: int
    int_slot: int
    float_slot: int
    children: tuple[NodePlace, ...]

    def of_kind(self, kind: ValueKind) -> Iterator[NodePlace]:
        """The nodes of a kind among this one and everything below it, in order."""
        if self.node.kind is kind:
            yield self
        for child in self.children:
            yield from child.of_kind(kind)

    @property
    def tensors(self) -> list[int]:
        """The tensor slots of this node and everything below it, in order."""
        return [each.tensor_slot for each in self.of_kind(ValueKind.tensor)]

    @property
    def constant(self) -> bool:
        """Whether the value takes no slot at all: it is the same in every record of the signature."""
        return self.node.kind not in SLOTS and all(child.constant for child in self.children)


def _place(nodes: tuple[Node, ...], start: Counts) -> tuple[tuple[NodePlace, ...], Counts]:
    """Places of nodes whose slots begin at `start`, and where the next node's slots would begin."""
    placed = []
    tensor, integer, real = start
    for node in nodes:
        first = (tensor, integer, real)
        own = SLOTS.get(node.kind, _NONE)
        tensor, integer, real = tensor + own[0], integer + own[1], real + own[2]
        children: tuple[NodePlace, ...] = ()
        if node.children:
            children, (tensor, integer, real) = _place(node.children, (tensor, integer, real))
        placed.append(NodePlace(node, *first, children))
    return tuple(placed), (tensor, integer, real)


class SlotLayout:
    """Where a signature's arguments and results keep their slots. `slots` is how many a record has; of its tensors the
    first `arg_tensors` are arguments."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.args, middle = _place(signature.args, _NONE)
        self.results, self.slots = _place(signature.results, middle)
        self.arg_tensors = middle[0]

    def arg(self, name: str) -> NodePlace | None:
        """The top-level argument of that name."""
        return next((each for each in self.args if each.node.name == name), None)

    @property
    def arg_storages(self) -> list[int]:
        """The int slots of storages among the arguments."""
        return [place.int_slot for each in self.args for place in each.of_kind(ValueKind.storage)]

    def nodes(self, kind: ValueKind) -> list[NodePlace]:
        """Every node of a kind, arguments and results."""
        return [place for each in (*self.args, *self.results) for place in each.of_kind(kind)]
