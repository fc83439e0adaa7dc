"""Templates filled with columns, many rows at once: what every long output is made of.

A template is text with holes, and a hole names a column. A column has a value for each row, or for each slot of the
records, of which every row has its own run (`SLOTS`). Two expanders fill them, and write the same bytes: `InPython`,
and `InCpp`, which is native/row_expansion.cpp, five times as fast, for outputs that are worth loading it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

EXACT = 2**53

# Columns with a value for each slot, and the kind of slots: what a record's first one is is in Sheet.firsts.
SLOTS = {"tensor": "t", "tensor_device": "t", "integer": "i", "hash": "i", "float": "f"}


class Slot(NamedTuple):
    """A hole. `first` counts from the row's first slot; `separator` joins the `length` slots of a run."""

    column: str
    first: int = 0
    length: int = 1
    separator: str | None = None


Piece = str | Slot


class Numbers(NamedTuple):
    """Integers, each after the text `before`. `quoted`: in quotes where a double would round them. The value `null` is
    shown as null."""

    values: np.ndarray
    before: str = ""
    quoted: bool = False
    null: int | None = None


class Words(NamedTuple):
    """Texts; `places` says which one each place shows, None: its own."""

    words: Any  # a list of strings, or what an expander's `words` returned
    places: np.ndarray | None = None


class Halves(NamedTuple):
    """128-bit hashes, as 32 hexadecimal digits: the low half at a hole's place, the high half at the next."""

    values: np.ndarray


Column = Numbers | Words | Halves


class Sheet(NamedTuple):
    """The columns of some rows, by name, and where the slots of each row begin, by kind of slots."""

    rows: int
    columns: dict[str, Column]
    firsts: Mapping[str, np.ndarray] = MappingProxyType({})


def constant(text: str, count: int) -> Words:
    """A column that shows the same everywhere."""
    return Words([text], np.zeros(count, np.int64))


def ranked(ids: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The distinct ids of a column, ascending, and the place of each row's id among them. Its memory grows with the
    largest id: use it for ids of definitions."""
    used = np.bincount(ids) > 0
    return np.flatnonzero(used).tolist(), (np.cumsum(used) - 1)[ids]


class Expander(ABC):
    """Fills templates. What `template` and `words` return is for the same expander."""

    @abstractmethod
    def template(self, pieces: Iterable[Piece], columns: Sequence[str]) -> Any:
        """A template made ready for sheets with these columns, in this order."""

    @abstractmethod
    def words(self, templates: Sequence[Any], which: np.ndarray, sheet: Sheet) -> Any:
        """The rows as texts for a column. Row r is of the template `which[r]`."""

    @abstractmethod
    def lines(self, templates: Sequence[Any], which: np.ndarray, sheet: Sheet, at_once: int) -> Iterator[bytes]:
        """The rows as UTF-8, in chunks of at most `at_once` rows. Use a chunk up before asking for the next."""

    @abstractmethod
    def longest(self, words: Any) -> int:
        """The length of the longest of what `words` returned."""


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring texts joined, empty ones left out."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece != "":
            found.append(piece)
    return found


class InPython(Expander):
    """A template is its pieces, and a row what each of them shows."""

    def template(self, pieces: Iterable[Piece], columns: Sequence[str]) -> list[Piece]:
        return merged(pieces)

    def words(self, templates: Sequence[list[Piece]], which: np.ndarray, sheet: Sheet) -> list[str]:
        return list(_filled(templates, which, sheet))

    def lines(self, templates: Sequence[list[Piece]], which: np.ndarray, sheet: Sheet, at_once: int) -> Iterator[bytes]:
        rows = _filled(templates, which, sheet)
        while text := "".join(islice(rows, at_once)):
            yield encoded(text)

    def longest(self, words: list[str]) -> int:
        return max(map(len, words), default=0)


def _filled(templates: Sequence[list[Piece]], which: np.ndarray, sheet: Sheet) -> Iterator[str]:
    columns = {name: _listed(column) for name, column in sheet.columns.items()}
    firsts: dict[str, list[int]] = {kind: first.tolist() for kind, first in sheet.firsts.items()}
    for row, number in enumerate(which.tolist()):
        parts = []
        for piece in templates[number]:
            if isinstance(piece, str):
                parts.append(piece)
                continue
            name, first, length, separator = piece
            values = columns[name]
            at = firsts[SLOTS[name]][row] + first if name in SLOTS else row
            if name == "hash":
                parts.append(hexadecimal(values[at], values[at + 1]))
            elif separator is None:
                parts.append(str(values[at]))
            else:
                parts.append(separator.join(map(str, values[at : at + length])))
        yield "".join(parts)


def _listed(column: Column) -> list[Any]:
    """A column's values, as what formats to their text."""
    if isinstance(column, Words):
        return column.words if column.places is None else list(map(column.words.__getitem__, column.places.tolist()))
    values: list[Any] = column.values.tolist()
    if isinstance(column, Halves):
        return values
    if column.quoted and column.values.size and (column.values.max() > EXACT or column.values.min() < -EXACT):
        values = [value if -EXACT <= value <= EXACT else f'"{value}"' for value in values]
    if column.null is not None:
        null = column.values == column.null
        for place in np.flatnonzero(null).tolist():
            values[place] = "null"
    return [f"{column.before}{value}" for value in values] if column.before else values


def hexadecimal(low: int, high: int) -> str:
    """A 128-bit hash from its halves, which may be negative (two's complement), as 32 hexadecimal digits."""
    return f"{high & 0xFFFFFFFFFFFFFFFF:016x}{low & 0xFFFFFFFFFFFFFFFF:016x}"


class _Text(NamedTuple):
    """Texts one after the other, in UTF-8; text n ends where `ends[n + 1]` says."""

    text: np.ndarray
    ends: np.ndarray


def _text(words: Sequence[str]) -> _Text:
    contents = [encoded(word) for word in words]
    ends = np.zeros(len(contents) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, contents), np.int64, len(contents)), out=ends[1:])
    return _Text(np.frombuffer(b"".join(contents), np.uint8), ends)


_CHUNK_BYTES = 1 << 18  # stays in the L2 cache until it is written


class InCpp(Expander):
    """The library. Raises NotAvailable if it cannot be loaded."""

    def __init__(self) -> None:
        import ctypes

        from replayfmt.native.building import library

        found = library("row_expansion.cpp")
        # CDLL: a call releases the GIL.
        self._expand = ctypes.CDLL(found._name, handle=found._handle).opreplay_expand_rows
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._expand.argtypes = (*6 * [address], number, number, address, number, address, address)
        self._expand.restype = number
        self._chunk = np.empty(_CHUNK_BYTES, np.uint8)

    def template(self, pieces: Iterable[Piece], columns: Sequence[str]) -> tuple[np.ndarray, bytes]:
        numbers = {name: number for number, name in enumerate(columns)}
        rows: list[tuple[int, ...]] = []
        texts: list[bytes] = []
        length = 0
        for piece in merged(pieces):
            text = encoded(piece if isinstance(piece, str) else piece.separator or "")
            place = (-1, 0, 0) if isinstance(piece, str) else (numbers[piece.column], piece.first, piece.length)
            rows.append((*place, length, len(text)))
            texts.append(text)
            length += len(text)
        return np.array(rows, np.int32).reshape(-1, 5), b"".join(texts)

    def words(self, templates: Sequence[Any], which: np.ndarray, sheet: Sheet) -> _Text:
        if not sheet.rows:
            return _text([])
        ends = np.zeros(sheet.rows + 1, np.int64)
        made = _Filling(self._expand, templates, which, sheet)
        out = np.empty(64 + 160 * sheet.rows, np.uint8)
        while True:
            rows, written = made.fill(0, out, ends[1:])
            if rows == sheet.rows:
                return _Text(out[:written], ends)
            out = np.empty(2 * len(out), np.uint8)

    def lines(self, templates: Sequence[Any], which: np.ndarray, sheet: Sheet, at_once: int) -> Iterator[bytes]:
        if not sheet.rows:
            return
        made, row = _Filling(self._expand, templates, which, sheet), 0
        while row < sheet.rows:
            rows, written = made.fill(row, self._chunk)
            if rows:
                yield self._chunk[:written].data  # type: ignore[misc]
                row += rows
            else:
                self._chunk = np.empty(2 * len(self._chunk), np.uint8)

    def longest(self, words: _Text) -> int:
        return int(np.diff(words.ends).max(initial=0))


class _Filling:
    """Templates and a sheet as the library takes them; holds whatever it has addresses of."""

    def __init__(
        self, expand: Any, templates: Sequence[tuple[np.ndarray, bytes]], which: np.ndarray, sheet: Sheet
    ) -> None:
        self._expand, self._count = expand, sheet.rows
        self._kept: list[Any] = []
        texts = b"".join(text for _pieces, text in templates)
        firsts = np.zeros((2, len(templates) + 1), np.int64)
        np.cumsum([(len(pieces), len(text)) for pieces, text in templates], axis=0, out=firsts[:, 1:].T)
        pieces = np.concatenate([pieces for pieces, _text in templates])
        columns = np.array([self._column(name, column, sheet) for name, column in sheet.columns.items()], np.int64)
        self._arguments = (
            self._address(pieces),
            self._address(firsts[0]),
            self._address(np.frombuffer(texts or b" ", np.uint8)),
            self._address(firsts[1]),
            self._address(np.ascontiguousarray(which, np.int64)),
            self._address(columns),
        )

    def fill(self, row: int, out: np.ndarray, ends: np.ndarray | None = None) -> tuple[int, int]:
        """How many rows from `row` on fit into `out`, and their length."""
        written = np.zeros(1, np.int64)
        of_ends = None if ends is None else ends.ctypes.data
        rows = self._expand(*self._arguments, row, self._count, out.ctypes.data, len(out), of_ends, written.ctypes.data)
        if rows < 0:
            raise IndexError("a template has a hole that its columns do not fill")
        return rows, int(written[0])

    def _address(self, values: np.ndarray) -> int:
        self._kept.append(values)
        return values.ctypes.data

    def _column(self, name: str, column: Column, sheet: Sheet) -> tuple[int, ...]:
        """The fields of a Column there."""
        first = self._address(np.ascontiguousarray(sheet.firsts[SLOTS[name]], np.int64)) if name in SLOTS else 0
        if isinstance(column, Words):
            text = column.words if isinstance(column.words, _Text) else _text(column.words)
            words = len(text.ends) - 1
            length, values = (words, 0) if column.places is None else (len(column.places), self._values(column.places))
            return 1, 0, 0, length, words, first, values, self._address(text.text), self._address(text.ends)
        values = self._values(column.values)
        if isinstance(column, Halves):
            return 2, 0, 0, len(column.values), 0, first, values, 0, 0
        before, null = _text([column.before]), column.null or 0
        flags = column.quoted | 2 * (column.values.dtype.kind == "u") | 4 * (column.null is not None)
        null -= (null >= 1 << 63) << 64  # as the bits of a signed one
        texts = self._address(before.text), self._address(before.ends)
        return 0, flags, null, len(column.values), 1, first, values, *texts

    def _values(self, values: np.ndarray) -> int:
        wide = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
        return self._address(np.ascontiguousarray(wide))
