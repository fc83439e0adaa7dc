"""What the two outputs share in reading records: templates of rows, and a frame's columns as Python lists.

A dialect (JSON lines, text) says how things are written; `Columns` holds one frame's values as the dialect writes
them, in the form that row functions take (templates.PARAMETERS).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from replayfmt.errors import InvalidCapture
from replayfmt.format.attachments import METADATA, how_writes_are_known, roles_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.distinct import distinct
from replayfmt.format.model import Signature
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.slots import SlotLayout

from .row_templates import Piece, RowFunction, row_function

T = TypeVar("T")

# No chunk of rows is longer. One frame of ordinary records takes about 10 million characters.
CHUNK_CHARACTERS = 1 << 27
CACHE_CHARACTERS = 1 << 27
PATH_CHARACTERS = 2048


def device_slot(layout: SlotLayout) -> int | None:
    """The tensor slot whose device is the op's: its first result's, else its first argument's. None without tensors."""
    before, total = layout.arg_tensors, layout.slots[0]
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
        per_record = (
            np.diff(column).max(initial=0) for column in (frame.tensor_first, frame.int_first, frame.float_first)
        )
        tensors, ints, floats = map(int, per_record)
        return tensors * fragment + 32 * (ints + floats)


class Made(Generic[T]):
    """A cache of objects by id, created on demand: a capture may define far more than a selection uses. It is emptied
    at a total weight, so that memory does not grow with a capture's length."""

    def __init__(self, make: Callable[[int], T], weigh: Callable[[int], int] = lambda _number: 1) -> None:
        self._make = make
        self._weigh = weigh
        self._made: dict[int, T] = {}
        self._weight = 0

    def of(self, ids: list[int]) -> Iterator[T]:
        """What belongs to each id, in their order. Use it up before asking again."""
        if self._weight > CACHE_CHARACTERS:
            self._made.clear()
            self._weight = 0
        for number in set(ids).difference(self._made):
            self._made[number] = self._make(number)
            self._weight += self._weigh(number)
        return map(self._made.__getitem__, ids)


def scope_path(reader: CaptureReader, number: int) -> str:
    """A scope's names from the outermost inwards, joined by slashes; "" for 0. Of unreasonably long paths, only the
    end, after an ellipsis: nested scopes could otherwise make rows longer than the capture."""
    names: list[str] = []
    length = 0
    while number and length <= PATH_CHARACTERS:
        scope = reader.scopes[number]
        names.append(scope.name)
        length += len(scope.name) + 1
        number = scope.parent
    path = "/".join(reversed(names))
    return path if length <= PATH_CHARACTERS else "…" + path[-PATH_CHARACTERS:]


class Dialect(ABC):
    """How one output writes records. Caches its work for signatures and scopes."""

    def __init__(self, reader: CaptureReader) -> None:
        self.reader = reader
        self.lengths: Made[int] = Made(self._length)
        self.functions: Made[RowFunction] = Made(
            lambda number: row_function(self.template(reader.signatures[number])), self._length
        )
        self._writes: dict[int, str | None] = {}  # by kernel
        self.scopes: Made[str] = Made(self.scope, lambda _number: PATH_CHARACTERS)
        self.placements: Made[str] = Made(self._placement, lambda _number: PATH_CHARACTERS)

    def writes(self, signature: Signature) -> tuple[str | None, ...]:
        """How it is known what an op writes, or None; empty if its kernel is an operator or has no metadata."""
        kernel = self.reader.kernels[signature.kernel]
        if kernel.kind == KernelKind.operator or METADATA not in roles_of(self.reader, kernel):
            return ()
        if signature.kernel not in self._writes:
            self._writes[signature.kernel] = how_writes_are_known(self.reader, kernel)
        return (self._writes[signature.kernel],)

    def _length(self, number: int) -> int:
        """An upper bound of what a signature's text adds to a row, in characters."""
        signature = self.reader.signatures[number]
        text = sum(len(node.name) + len(str(node.constant)) for node in signature.nodes)
        if signature.kernel:
            kernel = self.reader.kernels[signature.kernel]
            text += len(kernel.name) + len(kernel.overload)
        # A character takes at most twelve in JSON: a pair of surrogates, each written as \\u and four digits.
        return 12 * text + 64 * len(signature.nodes) + 256

    def _placement(self, number: int) -> str:
        """A row's text for a placement; "" for 0. Raises InvalidCapture if it is longer than any real one."""
        if not number:
            return ""
        devices, streams = self.reader.devices, self.reader.placements[number].streams
        if sum(len(devices[device].kind) + 32 for device, _stream in streams) > PATH_CHARACTERS:
            raise InvalidCapture(f"{self.reader.path}: placement {number} is over {PATH_CHARACTERS} characters long")
        return self.placement([(str(devices[device]), stream) for device, stream in streams])

    def rows_at_once(self, frame: RecordFrame, signatures: list[int], columns: Columns) -> int:
        """How many of these records to write at once, so that their rows stay below CHUNK_CHARACTERS.

        Raises InvalidCapture if a single row could be longer.
        """
        path = 12 * PATH_CHARACTERS * bool(frame.scope.any())
        longest = max(self.lengths.of(signatures)) + path + columns.longest(frame)
        if frame.placement is not None:
            longest += max(map(len, self.placements.of(distinct(frame.placement).tolist())))
        if frame.annotation is not None:
            strings = self.reader.strings
            longest += 12 * max(len(strings[number] or "") for number in distinct(frame.annotation).tolist()) + 16
        self.check_room(frame, longest, "a row")
        return CHUNK_CHARACTERS // longest

    def check_room(self, frame: RecordFrame, characters: int, what: str) -> None:
        """Raise InvalidCapture if a frame needs more than in any real capture."""
        if characters > CHUNK_CHARACTERS:
            raise InvalidCapture(
                f"{self.reader.path}: frame at {frame.offset:#x}: {what} of its records could take "
                f"{characters} characters; the limit is {CHUNK_CHARACTERS}"
            )

    @abstractmethod
    def scope(self, number: int) -> str:
        """A row's text for the scope with this id."""

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
        """Rows' texts for the device times of a frame."""

    @abstractmethod
    def annotations(self, ids: list[int]) -> list[str]:
        """Rows' texts for their annotations, by id; "" for 0."""

    @abstractmethod
    def placement(self, streams: list[tuple[str, int]]) -> str:
        """A row's text for the streams that were current, each with its device."""

    @abstractmethod
    def values(self, values: np.ndarray) -> str:
        """The suffix of a tensor's text that shows its elements."""

    def ordinals(self, ordinals: list[int]) -> list[Any]:
        """Ordinals as this dialect writes them."""
        return ordinals

    @abstractmethod
    def tail(self, frame: RecordFrame) -> str:
        """The end of every row of a frame, including the newline."""
