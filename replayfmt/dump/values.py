"""What the two outputs share in reading records: where a node's slots are, and a frame's columns as Python lists.

A dialect (JSON lines, text) says how things are written; `Columns` holds one frame's values as the dialect writes
them, in the form that row functions take (templates.PARAMETERS).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from replayfmt.format.model import SLOTS, Node, Signature
from replayfmt.format.reader import CaptureReader, RecordFrame

from .templates import Piece, RowFunction, row_function

T = TypeVar("T")


@dataclass
class Cursor:
    """How many slots of each column the nodes before this one take, counted from the record's first slots."""

    tensors: int = 0
    ints: int = 0
    floats: int = 0

    def skip(self, node: Node) -> None:
        """Move past a node and everything below it."""
        for below in node.walk():
            tensors, ints, floats = SLOTS.get(below.kind, (0, 0, 0))
            self.tensors, self.ints, self.floats = self.tensors + tensors, self.ints + ints, self.floats + floats


def device_slot(signature: Signature) -> int | None:
    """The tensor slot whose device is the op's: its first result's, else its first argument's. None without tensors."""
    before = sum(SLOTS.get(node.kind, (0, 0, 0))[0] for top in signature.args for node in top.walk())
    total = signature.slots[0]
    return None if total == 0 else before if before < total else 0


@dataclass(frozen=True)
class Columns:
    """One frame's values as a dialect writes them. Names as in templates.PARAMETERS."""

    T: list[str]
    I: list[Any]  # noqa: E741
    F: list[Any]
    R: list[int]
    L: list[int]
    D: list[str]

    def longest(self, frame: RecordFrame) -> int:
        """An upper bound of what the slots of any one record of the frame add to its row, in characters."""
        fragment = max(map(len, self.T), default=0) + 64
        per_record = (np.diff(column).max(initial=0) for column in (
            frame.tensor_first, frame.int_first, frame.float_first))
        tensors, ints, floats = map(int, per_record)
        return tensors * fragment + 32 * (ints + floats)


class Made(Generic[T]):
    """Something made once for each id that is met: a capture may define far more than a selection uses."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._known: dict[int, T] = {}

    def of(self, ids: list[int]) -> Iterator[T]:
        """What belongs to each id, in their order."""
        for number in set(ids).difference(self._known):
            self._known[number] = self._make(number)
        return map(self._known.__getitem__, ids)


class Dialect(ABC):
    """How one output writes records. Keeps what it has made for the signatures and scopes it has met."""

    def __init__(self, reader: CaptureReader) -> None:
        self.reader = reader
        self.functions: Made[RowFunction] = Made(self._function)
        self.scopes: Made[str] = Made(self._scope)
        # The longest text that a signature and a scope have added to a row so far, in characters.
        self.longest_template = 0
        self.longest_scope = 0

    def _function(self, number: int) -> RowFunction:
        pieces = self.template(self.reader.signatures[number])
        length = sum(len(piece) for piece in pieces if isinstance(piece, str))
        self.longest_template = max(self.longest_template, length)
        return row_function(pieces)

    def _scope(self, number: int) -> str:
        text = self.scope(number)
        self.longest_scope = max(self.longest_scope, len(text))
        return text

    @abstractmethod
    def scope(self, number: int) -> str:
        """What a row shows of the scope with this id."""

    @abstractmethod
    def template(self, signature: Signature) -> list[Piece]:
        """The row of every record of this signature, without the frame's tail."""

    @abstractmethod
    def columns(self, frame: RecordFrame) -> Columns:
        """The frame's columns as this dialect writes them."""

    @abstractmethod
    def integers(self, column: np.ndarray) -> list[Any]:
        """A column of integers as this dialect writes them."""

    @abstractmethod
    def device_durations(self, column: np.ndarray) -> list[str]:
        """What rows show of the device times that a frame has."""

    def ordinals(self, ordinals: list[int]) -> list[Any]:
        """Ordinals as this dialect writes them."""
        return ordinals

    @abstractmethod
    def tail(self, frame: RecordFrame) -> str:
        """What ends every row of a frame, the newline included."""
