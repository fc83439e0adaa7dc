"""The reader's definitions: Tables bodies joined, and the objects they stand for, made on demand.

Each body is checked before it is added here; after that, making a Kernel or a Signature out of columns cannot fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

from replayfmt.errors import InvalidCapture

from ..container.frames import MAX_NESTING
from ..json_values import nested_deeper
from ..model import Node
from ..slots import SlotLayout, slot_counts
from .attachments import ATTACHMENTS
from .checks import TablesBody
from .devices import DEVICES
from .family import Family
from .file_ranges import FILE_RANGES
from .files import FILES
from .generators import GENERATORS
from .kernels import KERNELS
from .metas import METAS
from .placements import PLACEMENTS
from .recipes import RECIPES
from .scopes import SCOPES
from .signatures import SIGNATURES, unsupported_reasons
from .tables import COLUMNS, FAMILIES, NUMBERED, TABLES, decode_tables

T = TypeVar("T")

_KEPT_ANNOTATIONS = 4096


class Lazy(Sequence[T], Generic[T]):
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
        body = decode_tables(data, minor, where, self.counts, self._string_ids, self.column, payload_bytes)
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

    def columns(self) -> dict[str, np.ndarray]:
        """All rows of every column, by name."""
        return {name: self.column(name) for name in COLUMNS}

    def consolidates(self, others: Definitions) -> bool:
        """Whether both define the same, except that ranges of files may have got payloads since."""

        def same(name: str) -> bool:
            here, there = self.column(name), others.column(name)
            if name == "range_payload" and len(here) == len(there):
                here = np.where(there == 0, there, here)
            return np.array_equal(here.view(np.uint8), there.view(np.uint8))  # because NaN is not equal to itself

        return self.strings == others.strings and all(map(same, COLUMNS))


class Frozen:
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
        self.layouts = Lazy(self.counts["signature"], lambda number: SlotLayout(self.signatures[number]))
        self.files = self._lazy(FILES)
        self.file_ranges = self._lazy(FILE_RANGES)
        self.recipes = self._lazy(RECIPES)
        self.attachments = self._lazy(ATTACHMENTS)
        self.placements = self._lazy(PLACEMENTS)
        # Slots of each signature by id: int64[3, signatures + 1] (tensors, ints, floats), 0 unused.
        counted = slot_counts(self.column("node_kind"), self.column("signature_nodes"))
        self.slots = np.concatenate((np.zeros((3, 1), np.int64), counted), axis=1)

    def _lazy(self, family: Family[T]) -> Lazy[T]:
        return Lazy(self.counts[family.name], lambda number: family.at(self, number - 1))

    # ----------------------------------------------------------------------------------------- what families read from

    def number(self, name: str, row: int) -> int:
        """An element of a column."""
        return int(self.column(name)[row])

    def text(self, name: str, row: int) -> str:
        """The string that a column refers to; "" for 0."""
        return self.strings[int(self.column(name)[row])] or ""

    def nested(self, family: str, row: int) -> slice:
        """Where a definition's rows of nested columns are."""
        ends = self._nested_ends[family]
        return slice(int(ends[row]), int(ends[row + 1]))

    # ------------------------------------------------------------------------------------------- made of more than one

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
                known = json.loads(self.strings[number] or "")
            except (ValueError, RecursionError) as error:
                raise InvalidCapture(f"{self._path}: annotation {number} is not JSON: {error}") from None
            if not isinstance(known, dict) or nested_deeper(known, MAX_NESTING):
                raise InvalidCapture(
                    f"{self._path}: annotation {number} is not a JSON object that is nested at most {MAX_NESTING} deep"
                )
            if len(self._annotations) >= _KEPT_ANNOTATIONS:
                self._annotations.clear()  # many records may each have one of their own
            self._annotations[number] = known
        return known
