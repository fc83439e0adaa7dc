"""Definitions of a whole capture: the Tables body, the ids that the writer gives, and the objects that a reader makes.

A body holds strings and the columns of every family, and is checked as a whole. A reader joins bodies and makes the
objects on demand.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, overload

import numpy as np
from xxhash import xxh3_128_digest

from replayfmt.errors import InvalidCapture

from .definition_families import (
    ATTACHMENTS,
    DEVICES,
    FILE_RANGES,
    FILES,
    GENERATORS,
    KERNELS,
    METAS,
    PLACEMENTS,
    RECIPES,
    SCOPES,
    Family,
    MetaFamily,
    TablesBody,
)
from .flatbuffer_tables import Value, build, table_layout
from .frames import MAX_BODY_BYTES, MAX_NESTING, MAX_STRING_BYTES
from .model import Node
from .signature_layout import SIGNATURES, SlotLayout, slot_counts, unsupported_reasons
from .validation import nested_deeper, parse_json

T = TypeVar("T")
FAMILIES: tuple[Family[Any], ...] = (
    DEVICES,
    KERNELS,
    GENERATORS,
    SCOPES,
    METAS,
    SIGNATURES,
    FILES,
    FILE_RANGES,
    RECIPES,
    ATTACHMENTS,
    PLACEMENTS,
)
# What has ids, by the names of the schema's first_x fields.
NUMBERED = ("string", *(family.name for family in FAMILIES))
COLUMNS = tuple(name for family in FAMILIES for name in (*family.columns, *family.nested_columns))

_OWN = (
    f"first_{family.name}:uint {family.fields} {'' if family.added_fields else family.nested_fields}"
    for family in FAMILIES
)
_ADDED = (f"{family.added_fields} {family.nested_fields}" for family in FAMILIES if family.added_fields)

TABLES = table_layout("Tables", " ".join(("first_string:uint strings:[string]", *_OWN, *_ADDED)))


def encode_tables(strings: Sequence[bytes], columns: Mapping[str, np.ndarray], firsts: Mapping[str, int]) -> memoryview:
    """A body that defines `strings` and the rows in `columns` of each family, with ids from `firsts[family.name]`."""
    values: dict[str, Value] = {}
    if strings:
        values.update(first_string=firsts["string"], strings=strings)
    for family in FAMILIES:
        if len(columns[family.columns[0]]):
            values[f"first_{family.name}"] = firsts[family.name]
            given = {name: np.asarray(columns[name]) for name in (*family.columns, *family.nested_columns)}
            added = (*family.added_columns, *family.nested_columns) if family.added_columns else ()
            if not any(given[name].any() for name in added):
                given = {name: column for name, column in given.items() if name not in added}
            values.update(given)
    return build(TABLES, values)


def encode_all(strings: Iterable[str | None], columns: Mapping[str, np.ndarray]) -> memoryview | None:
    """All definitions of a capture in one body; None if there are none, or so many that only single frames hold
    them."""
    texts = [(text or "").encode() for text in strings]
    size = sum(len(text) + 16 for text in texts) + sum(column.nbytes + 16 for column in columns.values())
    if size > MAX_BODY_BYTES or not (texts or any(map(len, columns.values()))):
        return None
    return encode_tables(texts, columns, dict.fromkeys(NUMBERED, 1))


# How the columns are kept: type codes of array.array, by numpy's.
_TYPE_CODES = {"u1": "B", "u2": "H", "u4": "I", "i4": "i", "i8": "q", "u8": "Q", "f8": "d"}
_MAX_ID = 0xFFFFFFFF
_RECENT = 4096
_FIRST_COLUMN = {family.name: family.columns[0] for family in FAMILIES}


class InternedDefinitions:
    """Everything defined so far, and what of it was not written yet.

    What is known already is only looked up; `whole` is entered to add something, so that an interrupt does not leave
    half a row.
    """

    def __init__(self, whole: Callable[[], AbstractContextManager[None]], payload_bytes: Callable[[int], int]) -> None:
        """`payload_bytes` says how long a payload's content is, and raises ValueError for an id that is none."""
        self._whole = whole
        self.payload_bytes = payload_bytes
        self._strings: dict[str, int] = {}
        self._columns: dict[str, array[Any]] = {
            name: array(_TYPE_CODES[TABLES.dtype(name).str[1:]]) for name in COLUMNS
        }
        self._ids: dict[bytes, int] = {}
        self._recent: dict[Any, int] = {}  # definitions of frequent families that came last
        self._written = dict.fromkeys(self._columns, 0)  # how much of each column a Tables frame has
        self._written_strings = 0
        self._new_strings: list[bytes] = []
        self._new_text_bytes = self._text_bytes = 0
        self._slots = np.zeros((3, 1), np.int64)

    def count(self, family: str) -> int:
        """How many ids of a family there are: `string`, or a key of the schema's first_x fields."""
        return len(self._strings if family == "string" else self._columns[_FIRST_COLUMN[family]])

    def column(self, name: str) -> np.ndarray:
        """A column as numpy, without a copy; valid until the next definition."""
        return np.asarray(self._columns[name])

    @property
    def slots(self) -> np.ndarray:
        """Slots of each signature by id, int64[3, signatures + 1] (tensors, ints, floats), 0 unused: what the columns
        of a frame must add up to."""
        sizes = self.column("signature_nodes")[(self._slots.shape[1] - 1) :]
        if len(sizes):
            kinds = self.column("node_kind")
            kinds = kinds[len(kinds) - int(sizes.sum(dtype=np.int64)) :]
            self._slots = np.concatenate((self._slots, slot_counts(kinds, sizes)), axis=1)
        return self._slots

    def unsupported_reasons(self) -> dict[int, str]:
        """The reason of each signature of unsupported records, by signature id."""
        sizes = self.column("signature_nodes").astype(np.int64)
        reasons = unsupported_reasons(self.column, np.cumsum(sizes) - sizes)
        strings = list(self._strings) if reasons else []
        return {signature: strings[reason - 1] for signature, reason in reasons.items()}

    def require(self, family: str, number: int) -> None:
        """Raise ValueError where no definition of a family has this id."""
        if not 1 <= number <= self.count(family):
            raise ValueError(f"{family} {number} is not defined; there are {self.count(family)}")

    def string(self, text: str) -> int:
        """The id of a string. The empty string is a string like any other: 0 is never its id."""
        known = self._strings.get(text)
        if known is None:
            try:
                data = text.encode()
            except UnicodeEncodeError:
                # Lone surrogates (from a file name that is not UTF-8) have no UTF-8 form: say which they were.
                return self.string(text.encode(errors="backslashreplace").decode())
            if len(data) > MAX_STRING_BYTES:
                raise ValueError(f"a string of {len(data)} bytes; the format's limit is {MAX_STRING_BYTES}")
            with self._whole():
                known = self._strings[text] = len(self._strings) + 1
                self._new_strings.append(data)
                self._new_text_bytes += len(data) + 16
                self._text_bytes += len(data) + 16
        return known

    def define(self, family: Family[T], definition: T) -> int:
        """The id of a definition. Raises ValueError if the format cannot hold it."""
        if family.frequent:
            known = self._recent.get(definition)
            if known is None:
                known = self._define(family, definition)
                if len(self._recent) >= _RECENT:
                    self._recent.clear()
                self._recent[definition] = known
            return known
        return self._define(family, definition)

    def extend(self, family: MetaFamily, columns: Mapping[str, np.ndarray]) -> None:
        """Define many at once, of which the caller knows that they are all different and new."""
        if self.count(family.name) + len(columns[family.columns[0]]) > _MAX_ID:
            raise ValueError(f"more than {_MAX_ID} definitions of family {family.name}")
        family.admit_columns(columns)
        for name in (*family.columns, *family.nested_columns):
            self._columns[name].frombytes(columns[name].astype(TABLES.dtype(name)).tobytes())

    def _define(self, family: Family[T], definition: T) -> int:
        row = family.row(definition)
        family.admit(definition, self)
        values = self._numbers(row.values)
        nested = [self._numbers(each) for each in row.nested]
        if not family.shared:
            with self._whole():
                return self._add(family, values, nested)
        key = xxh3_128_digest(f"{family.name}{values}{nested}".encode())
        known = self._ids.get(key)
        if known is None:
            with self._whole():
                known = self._ids[key] = self._add(family, values, nested)
        return known

    def give_payload(self, number: int, payload: int) -> None:
        """Give a file's range a payload afterwards. Raises ValueError for one of another length."""
        self.require("range", number)
        if self.payload_bytes(payload) != self._columns["range_bytes"][number - 1]:
            raise ValueError(f"a payload of another length than range {number}")
        self._columns["range_payload"][number - 1] = payload

    def _numbers(self, values: tuple[int | float | str, ...]) -> tuple[int | float, ...]:
        return tuple([self.string(value) if isinstance(value, str) else value for value in values])

    def _add(self, family: Family[T], values: tuple[int | float, ...], nested: list[tuple[int | float, ...]]) -> int:
        number = self.count(family.name) + 1
        if number > _MAX_ID:
            raise ValueError(f"more than {_MAX_ID} definitions of family {family.name}")
        names = (*family.columns, *family.nested_columns)
        before = [len(self._columns[name]) for name in names]
        try:
            for name, value in zip(family.columns, values, strict=True):
                self._columns[name].append(value)
            for name, rows in zip(family.nested_columns, zip(*nested, strict=True), strict=bool(nested)):
                self._columns[name].extend(rows)
        except (OverflowError, TypeError) as error:
            for name, length in zip(names, before, strict=True):
                del self._columns[name][length:]
            raise ValueError(f"{family.name} {values} does not fit the format: {error}") from None
        return number

    @property
    def new_text_bytes(self) -> int:
        """At most how many bytes the strings take that were not written yet."""
        return self._new_text_bytes

    @property
    def encoded_bytes(self) -> int:
        """At most how many bytes a Tables body of everything takes."""
        return self._text_bytes + sum(len(c) * c.itemsize + 16 for c in self._columns.values()) + 1024

    def pending(self) -> bool:
        """Whether anything was defined that no Tables frame has yet."""
        return bool(self._new_strings) or any(
            len(self._columns[name]) != self._written[name] for name in _FIRST_COLUMN.values()
        )

    def encode(self) -> memoryview:
        """A Tables body of what came since the last call."""
        columns = {name: self.column(name)[self._written[name] :] for name in self._columns}
        firsts = {family: self._written[name] + 1 for family, name in _FIRST_COLUMN.items()}
        body = encode_tables(self._new_strings, columns, {"string": self._written_strings + 1, **firsts})
        self._written = {name: len(column) for name, column in self._columns.items()}
        self._written_strings = len(self._strings)
        self._new_strings = []
        self._new_text_bytes = 0
        return body

    def encode_all(self) -> memoryview | None:
        return encode_all(self._strings, {name: self.column(name) for name in self._columns})


_KEPT_ANNOTATIONS = 4096


class LazySequence(Sequence[T], Generic[T]):
    """Definitions by id: element 0 is None, the others are made when they are first asked for."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._items: list[T | None] = [None] * (count + 1)
        self._make = make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        item = self._items[index]
        if item is None and index:
            number = index if index > 0 else len(self._items) + index
            if number:
                item = self._items[number] = self._make(number)
        return item

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))


class Definitions:
    """Columns of every family, with a row for each id from 1, and the strings."""

    def __init__(self) -> None:
        self._string_ids: dict[str, int] = {}
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
        self.counts = dict.fromkeys(NUMBERED, 0)

    def add(self, data: bytes, minor: int, where: str, payload_bytes: np.ndarray) -> TablesBody:
        """Add a Tables body, which continues the ids so far. `payload_bytes` are the raw lengths of the payloads it may
        refer to, in order of their ids. Raises InvalidCapture, or UnsupportedVersion for codes that only a newer minor
        version has."""
        known = (self.counts, self._string_ids, self.column)
        body = TablesBody(data, TABLES, minor, where, *known, payload_bytes)
        body.take_strings()
        for family in FAMILIES:
            body.take(family.name, family.columns, family.nested_columns, family.added_columns)
        for family in FAMILIES:  # when all are there: a family may refer to any other
            family.check(body)
        self._string_ids.update(body.strings)
        for name, column in body.columns.items():
            if len(column):
                self._parts[name].append(column)
        self.counts = body.counts
        return body

    @property
    def strings(self) -> list[str]:
        """Every string, from id 1."""
        return list(self._string_ids)

    def column(self, name: str) -> np.ndarray:
        """All rows of a column, from id 1."""
        parts = self._parts[name]
        if len(parts) != 1:
            parts = [np.concatenate(parts) if parts else np.zeros(0, TABLES.dtype(name))]
            self._parts[name] = parts
        return parts[0]

    def consolidates(self, others: Definitions) -> bool:
        """Whether both define the same, except that ranges of files may have got payloads since."""

        def same(name: str) -> bool:
            here, there = self.column(name), others.column(name)
            if name == "range_payload" and len(here) == len(there):
                here = np.where(there == 0, there, here)
            return np.array_equal(here.view(np.uint8), there.view(np.uint8))  # because NaN is not equal to itself

        return self.strings == others.strings and all(map(same, COLUMNS))


class DefinitionTables:
    """Every definition of a capture. Sequences are indexed by id, with None for id 0."""

    def __init__(self, definitions: Definitions, path: str) -> None:
        """Nothing may be added to `definitions` afterwards. `path` is the capture's, for messages."""
        self.column = definitions.column  # of the schema's Tables by name: all rows from id 1
        self.counts = definitions.counts
        self.strings: tuple[str | None, ...] = (None, *definitions.strings)
        self.leaves: dict[tuple[int, int, int], Node] = {}
        self._path = path
        self._annotations: dict[int, dict[str, Any]] = {}
        # Where the nested rows of each definition end: int64[definitions + 1], by family.
        self._nested_ends = {
            family.name: np.concatenate(([0], np.cumsum(self.column(family.columns[-1]), dtype=np.int64)))
            for family in FAMILIES
            if family.nested_columns
        }
        self.devices = self._lazy(DEVICES)
        self.kernels = self._lazy(KERNELS)
        self.generators = self._lazy(GENERATORS)
        self.scopes = self._lazy(SCOPES)
        self.metas = self._lazy(METAS)
        self.signatures = self._lazy(SIGNATURES)
        self.layouts = LazySequence(self.counts["signature"], lambda number: SlotLayout(self.signatures[number]))
        self.files = self._lazy(FILES)
        self.file_ranges = self._lazy(FILE_RANGES)
        self.recipes = self._lazy(RECIPES)
        self.attachments = self._lazy(ATTACHMENTS)
        self.placements = self._lazy(PLACEMENTS)
        # Slots of each signature by id: int64[3, signatures + 1] (tensors, ints, floats), 0 unused.
        counted = slot_counts(self.column("node_kind"), self.column("signature_nodes"))
        self.slots = np.concatenate((np.zeros((3, 1), np.int64), counted), axis=1)

    def _lazy(self, family: Family[T]) -> LazySequence[T]:
        return LazySequence(self.counts[family.name], lambda number: family.at(self, number - 1))

    def number(self, name: str, row: int) -> int:
        return int(self.column(name)[row])

    def text(self, name: str, row: int) -> str:
        """The string that a column refers to; "" for 0."""
        return self.strings[int(self.column(name)[row])] or ""

    def nested(self, family: str, row: int) -> slice:
        """Where a definition's rows of nested columns are."""
        ends = self._nested_ends[family]
        return slice(int(ends[row]), int(ends[row + 1]))

    @property
    def first_nodes(self) -> np.ndarray:
        """Where each signature's nodes begin in the node columns, by row; then where the last one's end."""
        return self._nested_ends[SIGNATURES.name]

    def unsupported_reasons(self) -> dict[int, str]:
        """The reason of each signature of unsupported records, by signature id."""
        reasons = unsupported_reasons(self.column, self.first_nodes)
        return {signature: self.strings[reason] or "" for signature, reason in reasons.items()}

    def scope_path(self, number: int) -> str:
        """Names from the outermost scope inwards, joined by slashes; "" for 0."""
        names = []
        while number:
            scope = self.scopes[number]
            names.append(scope.name)
            number = scope.parent
        return "/".join(reversed(names))

    def annotation(self, number: int) -> dict[str, Any] | None:
        """An annotation by id, which is that of its text; None for 0. Do not change it: records share it. Raises
        InvalidCapture if the text is no JSON object."""
        if not number:
            return None
        known = self._annotations.get(number)
        if known is None:
            try:
                known = parse_json(self.strings[number] or "")
            except ValueError as error:
                raise InvalidCapture(f"{self._path}: annotation {number} is not JSON: {error}") from None
            if not isinstance(known, dict) or nested_deeper(known, MAX_NESTING):
                raise InvalidCapture(
                    f"{self._path}: annotation {number} is not a JSON object that is nested at most {MAX_NESTING} deep"
                )
            if len(self._annotations) >= _KEPT_ANNOTATIONS:
                self._annotations.clear()  # many records may each have one of their own
            self._annotations[number] = known
        return known
