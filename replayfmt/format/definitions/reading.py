"""The reader's definitions: Tables bodies joined, and the objects they stand for, made on demand.

checks.py verifies each body before it is added here; after that, making a Kernel or a Signature out of columns
cannot fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

from replayfmt.errors import InvalidCapture

from ..codes import DType, KernelKind, Layout, OpStatus, RecordKind, TensorFlag, ValueKind
from ..container.frames import MAX_NESTING
from ..container.layouts import SCALARS, TABLES
from ..json_values import nested_deeper
from ..model import Device, ExternalFile, FileRange, Generator, Kernel, Node, Recipe, Scope, Signature, TensorMeta
from ..operator_schema import canonical_schema
from .checks import TablesCheck
from .external_files import file_at, range_at, recipe_at
from .signature_rules import CODE_CONSTANTS, TEXT_CONSTANTS, slots_by_kind
from .tables_output import FAMILIES, META_COLUMNS, NODE_COLUMNS

T = TypeVar("T")

_COLUMN_NAMES = (*(name for names in FAMILIES.values() for name in names), *META_COLUMNS, *NODE_COLUMNS)
_SLOTS = slots_by_kind()
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
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMN_NAMES}
        self.counts = dict.fromkeys(("string", *FAMILIES), 0)

    def add(self, body: bytes, minor: int, where: str, payload_bytes: np.ndarray) -> None:
        """Add a Tables body, which continues the ids so far. `payload_bytes` are the raw lengths of the payloads it may
        refer to, in order of their ids. Raises InvalidCapture, or UnsupportedVersion for codes that only a newer minor
        version has."""
        checked = TablesCheck(
            body, minor, where, self.counts, self._string_ids, self.column("file_bytes"), payload_bytes
        )
        self._string_ids.update(checked.strings)
        for name, column in checked.columns.items():
            if len(column):
                self._parts[name].append(column)
        self.counts = checked.counts

    @property
    def strings(self) -> list[str]:
        """Every string, from id 1."""
        return list(self._string_ids)

    def column(self, name: str) -> np.ndarray:
        """All rows of a column, from id 1."""
        parts = self._parts[name]
        if len(parts) != 1:
            parts = [np.concatenate(parts) if parts else np.zeros(0, SCALARS[TABLES.fields[name].type[1:-1]])]
            self._parts[name] = parts
        return parts[0]

    def columns(self) -> dict[str, np.ndarray]:
        """All rows of every column, by name."""
        return {name: self.column(name) for name in _COLUMN_NAMES}

    def same_as(self, other: Definitions) -> bool:
        """Whether both define the same."""
        return self.strings == other.strings and all(  # as bytes, because NaN is not equal to itself
            np.array_equal(self.column(name).view(np.uint8), other.column(name).view(np.uint8))
            for name in _COLUMN_NAMES
        )


class Frozen:
    """Every definition of a capture. Sequences are indexed by id, with None for id 0."""

    def __init__(self, definitions: Definitions, path: str) -> None:
        """Nothing may be added to `definitions` afterwards. `path` is the capture's, for messages."""
        self._definitions = definitions
        self._path = path
        self._annotations: dict[int, dict[str, Any]] = {}
        self._leaves: dict[tuple[int, int, int], Node] = {}
        column = definitions.column
        self.counts = definitions.counts
        self.strings: tuple[str | None, ...] = (None, *definitions.strings)
        count = self.counts.__getitem__
        self.devices = Lazy(count("device"), self._device)
        self.kernels = Lazy(count("kernel"), self._kernel)
        self.generators = Lazy(count("generator"), self._generator)
        self.scopes = Lazy(count("scope"), self._scope)
        self.metas = Lazy(count("meta"), self._meta)
        self.signatures = Lazy(count("signature"), self._signature)
        self.files = Lazy(count("file"), self._file)
        self.ranges = Lazy(count("range"), self._range)
        self.recipes = Lazy(count("recipe"), self._recipe)
        self._meta_ends = np.concatenate(([0], np.cumsum(column("meta_rank"), dtype=np.int64)))
        self._node_ends = np.concatenate(([0], np.cumsum(column("signature_nodes"), dtype=np.int64)))
        # Slots of each signature by id: int64[signatures + 1, 3] (tensors, ints, floats), row 0 unused.
        self.slots = self._slot_counts()

    def column(self, name: str) -> np.ndarray:
        """A column of the schema's Tables, all rows from id 1."""
        return self._definitions.column(name)

    def nodes(self, signature: int) -> slice:
        """Where a signature's nodes are in the node columns."""
        return slice(int(self._node_ends[signature - 1]), int(self._node_ends[signature]))

    def _slot_counts(self) -> np.ndarray:
        running = np.zeros((len(self.column("node_kind")) + 1, 3), np.int64)
        np.cumsum(_SLOTS[self.column("node_kind")], axis=0, out=running[1:])
        slots = np.zeros((len(self._node_ends), 3), np.int64)
        slots[1:] = running[self._node_ends[1:]] - running[self._node_ends[:-1]]
        return slots

    def unsupported_reasons(self) -> dict[int, str]:
        """The reason of each signature of unsupported records, by signature id."""
        rows = np.flatnonzero(self.column("signature_kind") == RecordKind.unsupported)
        reasons = self.column("node_constant")[self._node_ends[rows]].tolist()
        return {row + 1: self.strings[reason] or "" for row, reason in zip(rows.tolist(), reasons, strict=True)}

    def _text(self, column: str, number: int) -> str:
        return self.strings[int(self.column(column)[number - 1])] or ""

    def _device(self, number: int) -> Device:
        return Device(
            self._text("device_kind", number),
            int(self.column("device_index")[number - 1]),
            self._text("device_name", number),
            self._text("device_fingerprint", number),
        )

    def _kernel(self, number: int) -> Kernel:
        return Kernel(
            self._text("kernel_name", number),
            self._text("kernel_overload", number),
            canonical_schema(self._text("kernel_schema", number)),
            KernelKind(int(self.column("kernel_kind")[number - 1])),
        )

    def _generator(self, number: int) -> Generator:
        return Generator(
            int(self.column("generator_device")[number - 1]), bool(self.column("generator_default")[number - 1])
        )

    def _scope(self, number: int) -> Scope:
        return Scope(int(self.column("scope_parent")[number - 1]), self._text("scope_name", number))

    def scope_path(self, number: int) -> str:
        """Names from the outermost scope inwards, joined by slashes; "" for 0."""
        names = []
        parents = self.column("scope_parent")
        while number:
            names.append(self._text("scope_name", number))
            number = int(parents[number - 1])
        return "/".join(reversed(names))

    def _file(self, number: int) -> ExternalFile:
        return file_at(self.column, lambda string: self.strings[string] or "", number - 1)

    def _range(self, number: int) -> FileRange:
        return range_at(self.column, number - 1)

    def _recipe(self, number: int) -> Recipe:
        return recipe_at(self.column, number - 1)

    def annotation(self, number: int) -> dict[str, Any] | None:
        """An annotation by id, which is that of its text; None for 0. Do not change it: records share it. Raises
        InvalidCapture where the text is no JSON object."""
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

    def _meta(self, number: int) -> TensorMeta:
        row = number - 1
        dims = slice(int(self._meta_ends[row]), int(self._meta_ends[row + 1]))
        return TensorMeta(
            DType(int(self.column("meta_dtype")[row])),
            Layout(int(self.column("meta_layout")[row])),
            int(self.column("meta_device")[row]),
            tuple(self.column("meta_sizes")[dims].tolist()),
            tuple(self.column("meta_strides")[dims].tolist()),
            TensorFlag(int(self.column("meta_flags")[row])),
        )

    def _signature(self, number: int) -> Signature:
        row, place = number - 1, self.nodes(number)
        rows = iter(zip(*(self.column(name)[place].tolist() for name in NODE_COLUMNS), strict=True))

        def node() -> Node:  # recursion no deeper than MAX_NESTING, which was checked
            kind, name, constant, children = next(rows)
            text = (self.strings[name] or "") if name else ""
            value: int | str | None = None
            if kind in TEXT_CONSTANTS:
                value = self.strings[constant]
            elif kind in (ValueKind.bool, ValueKind.device) or kind in CODE_CONSTANTS:
                value = constant
            if children:
                return Node(ValueKind(kind), text, value, tuple(node() for _ in range(children)))
            leaf = self._leaves.get((kind, name, constant))  # lists of many tensors are the same object many times
            if leaf is None:
                leaf = self._leaves[kind, name, constant] = Node(ValueKind(kind), text, value)
            return leaf

        args = tuple(node() for _ in range(int(self.column("signature_args")[row])))
        results = tuple(node() for _ in range(int(self.column("signature_results")[row])))
        return Signature(
            RecordKind(int(self.column("signature_kind")[row])),
            args,
            results,
            int(self.column("signature_kernel")[row]),
            OpStatus(int(self.column("signature_status")[row])),
        )
