"""Records as rows: the template of each signature, a frame's columns, and values as JSON text.

Every row of JSON is plain ASCII that any JSON parser reads without loss.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from replayfmt.errors import InvalidCapture
from replayfmt.format.attachments import METADATA, how_writes_are_known, roles_of
from replayfmt.format.codes import UNKNOWN_NS, KernelKind
from replayfmt.format.model import Signature, TensorMeta
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.record_frames import distinct
from replayfmt.format.signature_layout import SlotLayout

from .expansion import EXACT, Column, Expander, Halves, Numbers, Piece, Sheet, Slot, Words, constant, ranked

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


def device_metas(reader: CaptureReader, frame: RecordFrame, rows: np.ndarray) -> np.ndarray:
    """The ids of the metadata of the tensors whose devices are the devices of a frame's ops; 0 for an op without
    tensors."""
    metas = np.zeros(frame.count, np.int64)
    for number in distinct(frame.signature[rows]).tolist():
        slot = device_slot(reader.layouts[number])
        if slot is not None:
            chosen = rows[frame.signature[rows] == number]
            metas[chosen] = frame.tensor_meta[frame.tensor_slots[frame.tensor_first[chosen] + slot]]
    return metas[rows]


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


# The columns of records, in the order in which their sheets have them.
COLUMNS = (
    *("ordinal", "scope", "enclosing", "thread", "start", "duration", "device_duration"),
    *("placement", "annotation", "end", "tensor", "tensor_device", "integer", "hash", "float"),
)
TENSOR_COLUMNS = ("id", "storage", "offset", "value")  # of a frame's tensors, each of which is a text in `tensor`
_AROUND = 64  # characters that a list may put around a tensor


class Dialect(ABC):
    """How one output writes records. Caches its work for signatures and scopes."""

    def __init__(self, reader: CaptureReader, expander: Expander) -> None:
        self.reader = reader
        self.expander = expander
        self.lengths: ObjectCache[int] = ObjectCache(self._length)
        self.templates: ObjectCache[Any] = ObjectCache(
            lambda number: expander.template(
                [*self.template(reader.signatures[number]), Slot("placement"), Slot("annotation"), Slot("end")], COLUMNS
            ),
            self._length,
        )
        self._tensors: ObjectCache[tuple[int, Any]] = ObjectCache(self._tensor_template)
        self._writes: dict[int, str | None] = {}  # by kernel
        self.scopes: ObjectCache[str] = ObjectCache(self.scope, lambda _number: PATH_CHARACTERS)
        self.placements: ObjectCache[str] = ObjectCache(self._placement, lambda _number: PATH_CHARACTERS)

    def rows(self, frame: RecordFrame, which: slice | np.ndarray, values: dict[int, str]) -> Iterator[bytes]:
        """The records of a frame that `which` takes, a line each, in chunks: use each up before asking for the next.
        `values`: the texts of small tensors' values, by place in the frame's tensor slots. Raises InvalidCapture if
        rows could be longer than any real one."""
        numbers, kinds = ranked(frame.signature[which])
        count = len(kinds)
        tensors = self._tensor_words(frame, values)
        at_once = self._rows_at_once(frame, numbers, self.expander.longest(tensors.words))
        scopes, inside = ranked(frame.scope[which])
        paths = list(self.scopes.of(scopes))
        nothing = constant("", count)
        placements = annotations = nothing
        if frame.placement is not None:
            used, index = ranked(frame.placement[which])
            placements = Words(list(self.placements.of(used)), index)
        if frame.annotation is not None:
            used, index = ranked(frame.annotation[which])
            annotations = Words([self.annotation(number) if number else "" for number in used], index)
        has_times = self.reader.session.has_times
        columns: dict[str, Column] = {
            "ordinal": self.ordinals(np.arange(frame.first_ordinal, frame.first_ordinal + frame.count)[which]),
            "scope": Words(paths, inside),
            "enclosing": Words([path[2:] for path in paths], inside),
            "thread": Numbers(frame.thread[which]),
            "start": self.numbers(frame.start_ns[which]) if has_times else constant("null", count),
            "duration": constant("null", count)
            if frame.duration_ns is None
            else Numbers(frame.duration_ns[which], null=UNKNOWN_NS),
            "device_duration": nothing
            if frame.device_duration_ns is None
            else self.device_durations(frame.device_duration_ns[which]),
            "placement": placements,
            "annotation": annotations,
            "end": constant(self.end(frame), count),
            "tensor": tensors,
            "tensor_device": self.tensor_devices(frame),
            "integer": self.numbers(frame.ints),
            "hash": Halves(frame.ints),
            "float": self._floats(frame.floats),
        }
        firsts = {"t": frame.tensor_first, "i": frame.int_first, "f": frame.float_first}
        sheet = Sheet(count, columns, {name: first[:-1][which] for name, first in firsts.items()})
        yield from self.expander.lines(list(self.templates.of(numbers)), kinds, sheet, at_once)

    def _tensor_words(self, frame: RecordFrame, values: dict[int, str]) -> Words:
        """The text of each tensor slot. The same tensor with the same values is one text."""
        metas, kinds = ranked(frame.tensor_meta)
        found = list(self._tensors.of(metas))
        longest = max((length for length, _template in found), default=0)
        self.check_room(frame, longest * len(kinds), "the tensors")
        index, places, shown = frame.tensor_slots, np.arange(len(kinds)), [""]
        if values:
            keys: dict[tuple[int, str], int] = {}
            index = index.astype(np.int64)
            for place, value in values.items():
                index[place] = len(kinds) + keys.setdefault((int(frame.tensor_slots[place]), value), len(keys))
            self.check_room(frame, sum(longest + len(value) for _tensor, value in keys), "the values")
            places = np.concatenate((places, np.array([tensor for tensor, _value in keys], np.int64)))
            shown += [value for _tensor, value in keys]
        columns: dict[str, Column] = {
            "id": self.numbers(frame.tensor_id[places]),
            "storage": self.storages(frame.tensor_storage[places]),
            "offset": self.offsets(frame.tensor_offset[places]),
            "value": Words(shown, np.maximum(np.arange(len(places)) - len(kinds) + 1, 0)),
        }
        templates = [template for _length, template in found]
        return Words(self.expander.words(templates, kinds[places], Sheet(len(places), columns)), index)

    def _tensor_template(self, number: int) -> tuple[int, Any]:
        """The template of the tensors with this metadata, and the length of its text."""
        pieces = [*self.tensor(self.reader.metas[number]), Slot("value")]
        length = sum(len(piece) for piece in pieces if isinstance(piece, str))
        return length, self.expander.template(pieces, TENSOR_COLUMNS)

    def _floats(self, values: np.ndarray) -> Words:
        bits = np.ascontiguousarray(values, np.float64).view(np.int64)
        different = distinct(bits)
        words = [self.float(value) for value in different.view(np.float64).tolist()]
        return Words(words, np.searchsorted(different, bits))

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

    def _rows_at_once(self, frame: RecordFrame, signatures: list[int], fragment: int) -> int:
        """How many of these records to write at once, so that their rows stay below CHUNK_CHARACTERS. `fragment`: the
        length of the longest text of a tensor. Raises InvalidCapture if a single row could be longer."""
        slots = (int(np.diff(each).max(initial=0)) for each in (frame.tensor_first, frame.int_first, frame.float_first))
        tensors, ints, floats = slots
        longest = max(self.lengths.of(signatures)) + 12 * PATH_CHARACTERS * bool(frame.scope.any())
        longest += tensors * (fragment + _AROUND) + 32 * (ints + floats)
        if frame.placement is not None:
            longest += max(map(len, self.placements.of(ranked(frame.placement)[0])))
        if frame.annotation is not None:
            strings = self.reader.strings
            longest += 12 * max(len(strings[number] or "") for number in ranked(frame.annotation)[0]) + 16
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
        """The row of every record of this signature, up to where it was and its annotation."""

    @abstractmethod
    def tensor(self, meta: TensorMeta) -> list[Piece]:
        """The text of every tensor with this metadata, of TENSOR_COLUMNS."""

    @abstractmethod
    def numbers(self, column: np.ndarray) -> Numbers:
        """A column of integers as this dialect writes them."""

    @abstractmethod
    def ordinals(self, column: np.ndarray) -> Column:
        """Ordinals as this dialect writes them."""

    @abstractmethod
    def storages(self, column: np.ndarray) -> Column:
        """The storages of tensors, 0 for none."""

    @abstractmethod
    def offsets(self, column: np.ndarray) -> Column:
        """The offsets of tensors into their storages."""

    @abstractmethod
    def tensor_devices(self, frame: RecordFrame) -> Column:
        """The device of each tensor slot."""

    @abstractmethod
    def float(self, value: float) -> str:
        """A row's text for a float."""

    @abstractmethod
    def device_durations(self, column: np.ndarray) -> Column:
        """Rows' texts for the device times of a frame."""

    @abstractmethod
    def annotation(self, number: int) -> str:
        """A row's text for the annotation with this id."""

    @abstractmethod
    def placement(self, streams: list[tuple[str, int]]) -> str:
        """A row's text for the streams that were current, each with its device."""

    @abstractmethod
    def values(self, values: np.ndarray) -> str:
        """The suffix of a tensor's text that shows its elements."""

    @abstractmethod
    def end(self, frame: RecordFrame) -> str:
        """The end of every row of a frame, including the newline."""
