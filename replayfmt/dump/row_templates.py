"""Records as rows: templates that become fast functions, values as JSON text, and a frame's columns as Python lists.

A template is text with holes; each hole says what is shown there. Every row of JSON is plain ASCII that any JSON parser
reads without loss.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from replayfmt.errors import InvalidCapture
from replayfmt.format.attachments import METADATA, how_writes_are_known, roles_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Signature
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.record_frames import distinct
from replayfmt.format.signature_layout import SlotLayout

# The parameters of a row function, in this order. Single letters are this record's own values: ordinal, scope, thread,
# start, duration, device duration, then the first slot it has in the columns tensors, ints and floats. Capitals are the
# frame's columns: a fragment for each tensor slot, ints and floats as the output writes them, the ints as numbers, the
# row of the frame's tensor table for each tensor slot, and the device of each row of that table.
PARAMETERS = ("o", "s", "h", "n", "d", "g", "t", "i", "f", "T", "I", "F", "R", "L", "D")

RowFunction = Callable[..., str]


class Hole(Enum):
    """What a hole shows. The value is the code that reads it; `{k}` and `{end}` are slot numbers."""

    ordinal = "o"
    scope = "s"
    enclosing_indent = "s[2:]"
    thread = "h"
    start = "n"
    duration = "d"
    device_duration = "g"
    tensor = "T[t+{k}]"
    integer = "I[i+{k}]"
    number = "F[f+{k}]"
    tensor_device = "D[L[t+{k}]]"
    hash = "hexadecimal(R[i+{k}],R[i+{k}+1])"
    tensors = "T[t+{k}:t+{end}]"
    integers = "map(str,I[i+{k}:i+{end}])"
    numbers = "map(str,F[f+{k}:f+{end}])"


@dataclass(frozen=True, slots=True)
class Slot:
    """A hole. `first` counts from the record's first slot; `separator` joins the `count` slots of a run."""

    hole: Hole
    first: int = 0
    count: int = 1
    separator: str | None = None


Piece = str | Slot

# Longer templates are compiled in parts: the cost of compiling grows with the length of one expression.
PIECES_PER_FUNCTION = 256


def hexadecimal(low: int, high: int) -> str:
    """A 128-bit hash from its halves, which may be negative (two's complement), as 32 hexadecimal digits."""
    return f"{high & 0xFFFFFFFFFFFFFFFF:016x}{low & 0xFFFFFFFFFFFFFFFF:016x}"


def row_function(pieces: Iterable[Piece]) -> RowFunction:
    """The function that fills a template; its parameters are PARAMETERS. Owns nothing of the frames it is used on."""
    merged = _merge(pieces)
    starts = range(0, len(merged), PIECES_PER_FUNCTION)
    parts = [_compile(merged[start : start + PIECES_PER_FUNCTION]) for start in starts]
    if len(parts) == 1:
        return parts[0]
    return lambda *values: "".join([part(*values) for part in parts])


def _merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring texts and leave out empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        elif piece != "":
            merged.append(piece)
    return merged


def _compile(pieces: Sequence[Piece]) -> RowFunction:
    """Bind the texts of a template to the code of its arrangement."""
    texts: list[str] = []
    expressions: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            expressions.append(f"k{len(texts)}")
            texts.append(piece)
            continue
        first, end = int(piece.first), int(piece.first) + int(piece.count)
        expression = piece.hole.value.format(k=first, end=end)
        if piece.separator is not None:
            expression = f"k{len(texts)}.join({expression})"
            texts.append(piece.separator)
        expressions.append(expression)
    return _factory(tuple(expressions), len(texts))(*texts)


@lru_cache(maxsize=4096)
def _factory(expressions: tuple[str, ...], texts: int) -> Callable[..., RowFunction]:
    """Code for one arrangement: a function from the texts to the row function. `expressions` come from Hole alone."""
    constants = ",".join(f"k{number}" for number in range(texts))
    body = "".join(f"{{{expression}}}" for expression in expressions)
    source = f"lambda {constants}: lambda {','.join(PARAMETERS)}: f'{body}'"
    factory: Callable[..., Any] = eval(
        compile(source, "<row>", "eval"), {"hexadecimal": hexadecimal, "__builtins__": {"map": map, "str": str}}
    )
    return factory


EXACT = 2**53
_ENCODER = json.JSONEncoder()
# In text from json.dumps: the parts that `encode` may write differently.
_UNLIKE = re.compile(r"NaN|Infinity|[0-9]{16}|\\ud[89a-f]")


def quote(text: str) -> str:
    if not text.isascii():
        # Through UTF-16, so that two surrogates that make a pair become the character they mean.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _ENCODER.encode(text)


def integer(value: int) -> str:
    """A JSON number, or a string of digits where a double would round it."""
    return str(value) if -EXACT <= value <= EXACT else f'"{value}"'


def integers(column: np.ndarray) -> list[int | str]:
    """A column of integers, in a form whose text is JSON: `integer` of each, but fast."""
    values: list[int | str] = column.tolist()
    if column.size and (column.max() > EXACT or (column.dtype.kind == "i" and column.min() < -EXACT)):
        return [value if -EXACT <= int(value) <= EXACT else f'"{value}"' for value in values]
    return values


def json_number(value: float) -> str:
    """A JSON number, or the name of a non-finite value as a string."""
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def encode_fast(value: Any) -> str:
    """`encode`, for values that come by the million."""
    text = json.dumps(value, separators=(",", ":"))
    return encode(value) if _UNLIKE.search(text) else text


def encode(value: Any) -> str:
    """Any plain value (None, bool, int, float, str, lists, tuples and mappings of them) as compact JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{quote(str(key))}:{encode(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(encode(item) for item in value) + "]"


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


class ObjectCache(Generic[T]):
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
        self.lengths: ObjectCache[int] = ObjectCache(self._length)
        self.functions: ObjectCache[RowFunction] = ObjectCache(
            lambda number: row_function(self.template(reader.signatures[number])), self._length
        )
        self._writes: dict[int, str | None] = {}  # by kernel
        self.scopes: ObjectCache[str] = ObjectCache(self.scope, lambda _number: PATH_CHARACTERS)
        self.placements: ObjectCache[str] = ObjectCache(self._placement, lambda _number: PATH_CHARACTERS)

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
