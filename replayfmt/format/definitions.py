"""The reader's definitions: Tables bodies verified and joined, and the objects they stand for, made on demand.

Every rule of the schema's Tables is checked here, vectorized, when a body is added: lengths, ids in range, codes the
reader knows, the shape of each signature's tree of nodes, and the arguments that record kinds have. After that, making a
Kernel or a Signature out of columns cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

from ..errors import InvalidCapture, UnsupportedVersion
from . import flat
from .codes import (
    MAJOR_VERSION,
    MINOR_VERSION,
    DType,
    KernelKind,
    Layout,
    OpStatus,
    RecordKind,
    TensorFlag,
    ValueKind,
)
from .frames import MAX_NESTING
from .layouts import SCALARS, TABLES
from .model import Device, Generator, Kernel, Node, Scope, Signature, TensorMeta
from .signatures import (
    ARGUMENTS,
    CODE_CONSTANTS,
    CONTAINERS,
    DIGEST_ARGUMENTS,
    SETTING_KINDS,
    TEXT_CONSTANTS,
    slots_by_kind,
)

T = TypeVar("T")

FAMILIES: dict[str, tuple[str, ...]] = {
    "device": ("device_kind", "device_index", "device_name", "device_fingerprint"),
    "kernel": ("kernel_kind", "kernel_name", "kernel_overload", "kernel_schema"),
    "generator": ("generator_device", "generator_default"),
    "scope": ("scope_parent", "scope_name"),
    "meta": ("meta_dtype", "meta_layout", "meta_device", "meta_flags", "meta_rank"),
    "signature": ("signature_kind", "signature_status", "signature_kernel", "signature_args", "signature_results",
                  "signature_nodes"),
}
NODE_COLUMNS = ("node_kind", "node_name", "node_constant", "node_children")
_COLUMN_NAMES = (*(name for names in FAMILIES.values() for name in names), "meta_sizes", "meta_strides", *NODE_COLUMNS)
_KINDS = max(ValueKind) + 1
_SLOTS = slots_by_kind()
_IS_CONTAINER = np.isin(np.arange(_KINDS), [int(kind) for kind in CONTAINERS])
_IS_TEXT = np.isin(np.arange(_KINDS), [int(kind) for kind in TEXT_CONSTANTS])
_FLAGS = int(sum(TensorFlag))


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
    """Columns of every family, indexed by id less one, and lists of strings and objects indexed by id."""

    def __init__(self) -> None:
        self._strings: list[str] = []
        self._string_ids: dict[str, int] = {}
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMN_NAMES}
        self._counts = dict.fromkeys((*FAMILIES, "string"), 0)
        self._nodes = 0

    def count(self, family: str) -> int:
        """How many ids a family has: `string` or a key of FAMILIES."""
        return self._counts[family]

    # ---------------------------------------------------------------------------------------------------- reading

    def add(self, body: bytes, minor: int, where: str) -> None:
        """Add a Tables body, which continues the ids so far. Raises InvalidCapture, or UnsupportedVersion for codes
        that only a newer minor version has."""
        check = _Check(self, flat.root(body, TABLES, where), minor, where)
        check.strings()
        for family in FAMILIES:
            check.family(family)
        check.finish()

    def _extend(self, strings: list[str], columns: dict[str, np.ndarray], counts: dict[str, int]) -> None:
        self._string_ids.update(zip(strings, range(len(self._strings) + 1, counts["string"] + 1), strict=True))
        self._strings.extend(strings)
        for name, column in columns.items():
            if len(column):
                self._parts[name].append(column)
        self._counts = counts
        self._nodes += len(columns["node_kind"])

    def column(self, name: str) -> np.ndarray:
        """All rows of a column, from id 1."""
        parts = self._parts[name]
        if len(parts) != 1:
            dtype = SCALARS[TABLES.fields[name].type[1:-1]]
            joined = np.concatenate(parts) if parts else np.zeros(0, dtype)
            self._parts[name] = parts = [joined]
        return parts[0]

    def string_id(self, text: str) -> int:
        """The id of a string; 0 where the capture has no such string."""
        return self._string_ids.get(text, 0)

    def freeze(self) -> Frozen:
        """The definitions as objects. Nothing may be added afterwards."""
        return Frozen(self, self._strings)


class _Check:
    """One Tables body while it is checked."""

    def __init__(self, known: Definitions, table: flat.Table, minor: int, where: str) -> None:
        self._known = known
        self._table = table
        self._minor = minor
        self._where = where
        self._columns: dict[str, np.ndarray] = {}
        self._counts = dict(known._counts)
        self._new: list[str] = []

    def _fail(self, what: str) -> InvalidCapture:
        return InvalidCapture(f"{self._where}: {what}")

    def _first(self, family: str, rows: int) -> None:
        first = self._table.scalar(f"first_{family}")
        expected = self._known.count(family) + 1
        if rows and first != expected:
            raise self._fail(f"defines {family} {first} and on; expected {expected}")
        self._counts[family] += rows

    def _get(self, name: str) -> np.ndarray:
        column = self._table.column(name)
        if column is None:
            column = np.zeros(0, SCALARS[TABLES.fields[name].type[1:-1]])
        self._columns[name] = column
        return column

    def _range(self, name: str, lowest: int, highest: int) -> None:
        column = self._columns[name]
        if len(column) and not (lowest <= int(column.min()) and int(column.max()) <= highest):
            raise self._fail(f"{name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}")

    def _code(self, name: str, highest: int, lowest: int = 1) -> None:
        """Like _range for an enumeration, which a newer minor version may have extended."""
        column = self._columns[name]
        if len(column) and int(column.max()) > highest and self._minor > MINOR_VERSION:
            raise UnsupportedVersion(f"{self._where}: {name} holds {int(column.max())}, from format version "
                                     f"{MAJOR_VERSION}.{self._minor}; this reader knows {MAJOR_VERSION}.{MINOR_VERSION}")
        self._range(name, lowest, highest)

    def strings(self) -> None:
        self._new = self._table.strings("strings")
        self._first("string", len(self._new))
        if len(set(self._new)) != len(self._new) or not self._known._string_ids.keys().isdisjoint(self._new):
            raise self._fail("defines a string twice")

    def family(self, family: str) -> None:
        names = FAMILIES[family]
        lengths = [len(self._get(name)) for name in names]
        if len(set(lengths)) != 1:
            raise self._fail(f"{family} columns have different lengths: {dict(zip(names, lengths, strict=True))}")
        self._first(family, lengths[0])
        getattr(self, f"_check_{family}")()

    def _check_device(self) -> None:
        strings = self._counts["string"]
        self._range("device_kind", 1, strings)
        self._range("device_name", 1, strings)
        self._range("device_fingerprint", 0, strings)
        self._range("device_index", -1, 0x7FFFFFFF)

    def _check_kernel(self) -> None:
        self._code("kernel_kind", max(KernelKind))
        for name in ("kernel_name", "kernel_overload", "kernel_schema"):
            self._range(name, 1, self._counts["string"])

    def _check_generator(self) -> None:
        self._range("generator_device", 1, self._counts["device"])
        self._range("generator_default", 0, 1)

    def _check_scope(self) -> None:
        self._range("scope_name", 1, self._counts["string"])
        parents = self._columns["scope_parent"].astype(np.int64)
        # A parent comes before its children, so that paths are finite.
        if len(parents) and (parents >= np.arange(len(parents)) + self._known.count("scope") + 1).any():
            raise self._fail("a scope's parent is not defined before it")

    def _check_meta(self) -> None:
        self._code("meta_dtype", max(DType))
        self._code("meta_layout", max(Layout))
        self._range("meta_device", 1, self._counts["device"])
        flags = self._columns["meta_flags"]
        if len(flags) and int(np.bitwise_or.reduce(flags)) & ~_FLAGS:
            self._code("meta_flags", _FLAGS, 0)
            raise self._fail("meta_flags has unknown bits")
        dimensions = int(self._columns["meta_rank"].sum(dtype=np.int64))
        for name in ("meta_sizes", "meta_strides"):
            if len(self._get(name)) != dimensions:
                raise self._fail(f"{name} has {len(self._columns[name])} elements, meta_rank adds up to {dimensions}")
            self._range(name, 0, (1 << 62))

    def _check_signature(self) -> None:
        for name in NODE_COLUMNS:
            self._get(name)
        count = len(self._columns["signature_kind"])
        total = int(self._columns["signature_nodes"].sum(dtype=np.int64))
        lengths = {name: len(self._columns[name]) for name in NODE_COLUMNS}
        if any(length != total for length in lengths.values()):
            raise self._fail(f"signature_nodes add up to {total}, the node columns have {lengths}")
        if not count:
            return
        self._code("signature_kind", max(RecordKind))
        self._code("signature_status", max(OpStatus), 0)
        self._range("signature_kernel", 0, self._counts["kernel"])
        self._code("node_kind", max(ValueKind), 0)
        self._range("node_name", 0, self._counts["string"])
        kinds, statuses = self._columns["signature_kind"], self._columns["signature_status"]
        ops = kinds == RecordKind.op
        if ((self._columns["signature_kernel"] != 0) != ops).any() or ((statuses != OpStatus.none) != ops).any():
            raise self._fail("a signature has a kernel or a status without being an op, or is an op without them")
        if ((self._columns["signature_results"] != 0) & (~ops | (statuses == OpStatus.raised))).any():
            raise self._fail("a signature that is no op that returned has results")
        self._check_constants()
        self._check_trees()

    def _check_constants(self) -> None:
        kinds, constants = self._columns["node_kind"], self._columns["node_constant"]
        lowest, highest = np.zeros(_KINDS, np.int64), np.zeros(_KINDS, np.int64)
        highest[ValueKind.bool] = 1
        lowest[_IS_TEXT], highest[_IS_TEXT] = 1, self._counts["string"]
        lowest[ValueKind.device], highest[ValueKind.device] = 1, self._counts["device"]
        for kind, code in CODE_CONSTANTS.items():
            lowest[kind], highest[kind] = 1, code
        wrong = (constants < lowest[kinds]) | (constants > highest[kinds])
        if wrong.any():
            at = int(np.argmax(wrong))
            kind = ValueKind(int(kinds[at]))
            message = (f"node {at} is a {kind.name} with the constant {int(constants[at])}, "
                       f"allowed {int(lowest[kind])}..{int(highest[kind])}")
            if kind in CODE_CONSTANTS and self._minor > MINOR_VERSION:
                raise UnsupportedVersion(f"{self._where}: {message}, from format version {MAJOR_VERSION}.{self._minor}")
            raise self._fail(message)
        if (self._columns["node_children"][~_IS_CONTAINER[kinds]] != 0).any():
            raise self._fail("a node that is no list, tuple or composite has children")

    def _check_trees(self) -> None:
        """Each signature's nodes are exactly its arguments and results in pre-order, not nested too deep."""
        sizes = self._columns["signature_nodes"].astype(np.int64)
        roots = self._columns["signature_args"].astype(np.int64) + self._columns["signature_results"]
        children = self._columns["node_children"].astype(np.int64)
        ends = np.cumsum(sizes)
        begins = ends - sizes
        if (roots[sizes == 0] != 0).any():
            raise self._fail("a signature has arguments or results without nodes")
        if not len(children):
            return
        owner = np.repeat(np.arange(len(sizes)), sizes)
        running = np.cumsum(children - 1)
        before = np.concatenate(([0], running))[begins]
        # How many nodes are still owed after each node: never none before the last one, none after it.
        owed = roots[owner] + running - before[owner]
        last = np.zeros(len(children), bool)
        last[ends[sizes > 0] - 1] = True
        if (owed[last] != 0).any() or (owed[~last] <= 0).any():
            raise self._fail("a signature's nodes do not form its arguments and results")
        self._check_depth(begins, ends, owner, children)
        self._check_arguments(begins, children)

    def _check_depth(self, begins: np.ndarray, ends: np.ndarray, owner: np.ndarray, children: np.ndarray) -> None:
        # Only a signature with that many containers can be nested too deep; there are none in practice.
        containers = np.bincount(owner[children > 0], minlength=len(begins))
        for signature in np.flatnonzero(containers >= MAX_NESTING).tolist():
            open_levels: list[int] = []
            for below in children[begins[signature]:ends[signature]].tolist():
                while open_levels and not open_levels[-1]:
                    open_levels.pop()
                if open_levels:
                    open_levels[-1] -= 1
                if len(open_levels) >= MAX_NESTING:
                    raise self._fail(f"a signature's values are nested deeper than {MAX_NESTING}")
                if below:
                    open_levels.append(below)

    def _check_arguments(self, begins: np.ndarray, children: np.ndarray) -> None:
        """The arguments that records other than ops always have, so that nobody needs to look whether they are there."""
        kinds, args = self._columns["signature_kind"], self._columns["signature_args"]
        names: dict[str, int] = {}
        for number, text in enumerate(self._new, self._known.count("string") + 1):
            names[text] = number
        for kind, fixed in ARGUMENTS.items():
            rows = np.flatnonzero(kinds == kind)
            if len(rows):
                self._check_fixed(kind, rows, fixed, begins, args, names, exact=kind not in (
                    RecordKind.host_read, RecordKind.digest))
        for kind in (RecordKind.host_read, RecordKind.digest):
            lead = len(ARGUMENTS[kind])
            rows = np.flatnonzero((kinds == kind) & ((args != lead) | (kind == RecordKind.digest)))
            if len(rows):
                self._check_fixed(kind, rows, DIGEST_ARGUMENTS, begins + lead, args - np.uint32(lead), names, exact=True)
                self._check_samples(kind, begins[rows] + lead + len(DIGEST_ARGUMENTS) - 1, children)
        rows = np.flatnonzero(kinds == RecordKind.global_state)
        for row in rows.tolist():
            nodes = slice(int(begins[row]), int(begins[row]) + int(self._columns["signature_nodes"][row]))
            if not (np.isin(self._columns["node_kind"][nodes], [int(k) for k in SETTING_KINDS]).all()
                    and self._columns["node_name"][nodes].all()):
                raise self._fail("a global_state signature with settings that are no named scalars")

    def _check_fixed(self, kind: RecordKind, rows: np.ndarray, fixed: Sequence[tuple[str, frozenset[ValueKind]]],
                     begins: np.ndarray, args: np.ndarray, names: dict[str, int], exact: bool) -> None:
        enough = args[rows] == len(fixed) if exact else args[rows] >= len(fixed)
        if not enough.all() or (args[rows] > 0x7FFFFFFF).any():
            raise self._fail(f"a {kind.name} signature with {int(args[rows][~enough][0]) if not enough.all() else '?'} "
                             f"arguments, expected {len(fixed)}")
        for place, (name, allowed) in enumerate(fixed):
            nodes = begins[rows] + place
            number = names.get(name) or self._known.string_id(name)
            good = np.isin(self._columns["node_kind"][nodes], [int(value) for value in allowed])
            if not good.all() or not number or (self._columns["node_name"][nodes] != number).any():
                raise self._fail(f"a {kind.name} signature whose argument {place} is not `{name}`, "
                                 f"one of {sorted(value.name for value in allowed)}")

    def _check_samples(self, kind: RecordKind, nodes: np.ndarray, children: np.ndarray) -> None:
        node_kind = self._columns["node_kind"]
        numbers = np.isin(node_kind, [ValueKind.int, ValueKind.float, ValueKind.complex])
        counts = np.concatenate(([0], np.cumsum(numbers)))
        sizes = children[nodes]
        if (nodes + 1 + sizes > len(node_kind)).any() or (counts[nodes + 1 + sizes] - counts[nodes + 1] != sizes).any():
            raise self._fail(f"a {kind.name} signature whose sample holds more than numbers")

    def finish(self) -> None:
        self._known._extend(self._new, self._columns, self._counts)


class Frozen:
    """Every definition of a capture. Sequences are indexed by id, with None for id 0."""

    def __init__(self, definitions: Definitions, strings: list[str]) -> None:
        self._definitions = definitions
        column = definitions.column
        self.strings: tuple[str | None, ...] = (None, *strings)
        self._strings = self.strings
        count = definitions.count
        self.devices = Lazy(count("device"), self._device)
        self.kernels = Lazy(count("kernel"), self._kernel)
        self.generators = Lazy(count("generator"), self._generator)
        self.scopes = Lazy(count("scope"), self._scope)
        self.metas = Lazy(count("meta"), self._meta)
        self.signatures = Lazy(count("signature"), self._signature)
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
        return {row + 1: self._strings[reason] or "" for row, reason in zip(rows.tolist(), reasons, strict=True)}

    def _text(self, column: str, number: int) -> str:
        return self._strings[int(self.column(column)[number - 1])] or ""

    def _device(self, number: int) -> Device:
        return Device(self._text("device_kind", number), int(self.column("device_index")[number - 1]),
                      self._text("device_name", number), self._text("device_fingerprint", number))

    def _kernel(self, number: int) -> Kernel:
        return Kernel(self._text("kernel_name", number), self._text("kernel_overload", number),
                      self._text("kernel_schema", number), KernelKind(int(self.column("kernel_kind")[number - 1])))

    def _generator(self, number: int) -> Generator:
        return Generator(int(self.column("generator_device")[number - 1]),
                         bool(self.column("generator_default")[number - 1]))

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

    def _meta(self, number: int) -> TensorMeta:
        row = number - 1
        dims = slice(int(self._meta_ends[row]), int(self._meta_ends[row + 1]))
        return TensorMeta(
            DType(int(self.column("meta_dtype")[row])), Layout(int(self.column("meta_layout")[row])),
            int(self.column("meta_device")[row]), tuple(self.column("meta_sizes")[dims].tolist()),
            tuple(self.column("meta_strides")[dims].tolist()), TensorFlag(int(self.column("meta_flags")[row])))

    def _signature(self, number: int) -> Signature:
        row, place = number - 1, self.nodes(number)
        rows = iter(zip(*(self.column(name)[place].tolist() for name in NODE_COLUMNS), strict=True))

        def node() -> Node:  # recursion no deeper than MAX_NESTING, which was checked
            kind, name, constant, children = next(rows)
            value: int | str | None = None
            if _IS_TEXT[kind]:
                value = self._strings[constant]
            elif kind == ValueKind.bool or kind == ValueKind.device or ValueKind(kind) in CODE_CONSTANTS:
                value = constant
            return Node(ValueKind(kind), (self._strings[name] or "") if name else "", value,
                        tuple(node() for _ in range(children)))

        args = tuple(node() for _ in range(int(self.column("signature_args")[row])))
        results = tuple(node() for _ in range(int(self.column("signature_results")[row])))
        return Signature(RecordKind(int(self.column("signature_kind")[row])), args, results,
                         int(self.column("signature_kernel")[row]), OpStatus(int(self.column("signature_status")[row])))
