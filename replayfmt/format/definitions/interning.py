"""The writer's definitions: strings, and those of every family, with ids.

The same content gets the same id. Content is kept in flat arrays, the form it is written in, and found again by a
128-bit hash of it, so that a capture with very many distinct signatures costs little memory. `encode` makes a Tables
body of what came since the last one, or of everything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_128_digest

from ..container.frames import MAX_STRING_BYTES
from ..slots import slot_counts
from .family import Family
from .signatures import unsupported_reasons
from .tables import COLUMNS, FAMILIES, NUMBERED, TABLES, encode_tables

T = TypeVar("T")

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
        known = self._slots.shape[1] - 1
        sizes = self.column("signature_nodes")[known:]
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

    # ------------------------------------------------------------------------------------------------------- defining

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

    # -------------------------------------------------------------------------------------------------------- writing

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

    def encode_all(self) -> memoryview:
        """A Tables body of everything, from id 1."""
        columns = {name: self.column(name) for name in self._columns}
        return encode_tables([text.encode() for text in self._strings], columns, dict.fromkeys(NUMBERED, 1))
