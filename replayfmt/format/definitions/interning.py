"""The writer's definitions: strings, devices, kernels, generators, scopes, tensor metadata, signatures, external files,
ranges and recipes, with ids.

The same content gets the same id. Content is kept in flat arrays, the form it is written in, and found again by a
128-bit hash of it, so that a capture with very many distinct signatures costs little memory. `encode` makes a Tables
body of what came since the last one, or of everything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from xxhash import xxh3_128_digest

from ..codes import DType, KernelKind, Layout, RecordKind, TensorFlag, ValueKind
from ..container.frames import MAX_LENGTH, MAX_STRING_BYTES
from ..container.layouts import TABLES
from ..model import SLOTS, Device, ExternalFile, FileRange, Generator, Kernel, Recipe, Scope, Signature, TensorMeta
from ..operator_names import name_problem
from .external_files import file_row, range_row, recipe_row
from .signature_rules import flatten
from .tables_output import FAMILIES, RAGGED, encode_tables

# How the columns are kept: type codes of array.array, by the schema's types.
_TYPE_CODES = {
    "[ubyte]": "B",
    "[ushort]": "H",
    "[uint]": "I",
    "[int]": "i",
    "[long]": "q",
    "[ulong]": "Q",
    "[double]": "d",
}
_MAX_ID = 0xFFFFFFFF
_FLAGS = int(sum(TensorFlag))


class InternedDefinitions:
    """Everything defined so far, and what of it was not written yet.

    What is known already is only looked up; `whole` is entered to add something, so that an interrupt does not leave
    half a row.
    """

    def __init__(self, whole: Callable[[], AbstractContextManager[None]], payload_bytes: Callable[[int], int]) -> None:
        """`payload_bytes` says how long a payload's content is, and raises ValueError for an id that is none."""
        self._whole = whole
        self._payload_bytes = payload_bytes
        self._strings: dict[str, int] = {}
        self._columns: dict[str, array] = {}
        for names in (*FAMILIES.values(), *RAGGED.values()):
            for name in names:
                self._columns[name] = array(_TYPE_CODES[TABLES.fields[name].type])
        self._ids: dict[bytes, int] = {}
        self._kernels: dict[Kernel, int] = {}
        self._scopes: dict[tuple[int, str], int] = {}
        self._written = dict.fromkeys(self._columns, 0)  # how much of each column a Tables frame has
        self._written_strings = 0
        self._new_strings: list[bytes] = []
        self._new_text_bytes = self._text_bytes = 0
        # Slots of each signature, element 0 unused: what a frame's columns must add up to.
        self.slot_counts = (array("I", [0]), array("I", [0]), array("I", [0]))
        self._unsupported: dict[int, str] = {}

    def count(self, family: str) -> int:
        """How many ids of a family there are: `string`, or a key of the schema's first_x fields."""
        if family == "string":
            return len(self._strings)
        return len(self._columns[FAMILIES[family][0]])

    def column(self, name: str) -> np.ndarray:
        """A column as numpy, without a copy; valid until the next definition."""
        return np.asarray(self._columns[name])

    def unsupported_reasons(self) -> dict[int, str]:
        """The reason of each signature of unsupported records, by signature id."""
        return self._unsupported

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

    @property
    def new_text_bytes(self) -> int:
        """At most how many bytes the strings take that were not written yet."""
        return self._new_text_bytes

    @property
    def encoded_bytes(self) -> int:
        """At most how many bytes a Tables body of everything takes."""
        return self._text_bytes + sum(len(c) * c.itemsize + 16 for c in self._columns.values()) + 1024

    def _add(self, family: str, *row: int | float) -> int:
        before = self.count(family)
        if before >= _MAX_ID:
            raise ValueError(f"more than {_MAX_ID} definitions of family {family}")
        try:
            for name, value in zip(FAMILIES[family], row, strict=True):
                self._columns[name].append(value)
        except (OverflowError, TypeError) as error:
            for name in FAMILIES[family]:
                del self._columns[name][before:]
            raise ValueError(f"{family} {row} does not fit the format: {error}") from None
        return before + 1

    def _interned(self, family: str, *row: int | float) -> int:
        key = xxh3_128_digest(family.encode() + repr(row).encode())
        known = self._ids.get(key)
        if known is None:
            with self._whole():
                known = self._ids[key] = self._add(family, *row)
        return known

    def device(self, device: Device) -> int:
        return self._interned(
            "device",
            self.string(device.kind),
            device.index,
            self.string(device.name),
            self.string(device.fingerprint) if device.fingerprint else 0,
        )

    def kernel(self, kernel: Kernel) -> int:
        known = self._kernels.get(kernel)
        if known is None:
            problem = name_problem(kernel.name, kernel.overload) if kernel.kind is KernelKind.operator else ""
            if problem:
                raise ValueError(problem)
            name, overload = self.string(kernel.name), self.string(kernel.overload)
            schema = self.string(kernel.schema)
            with self._whole():
                known = self._kernels[kernel] = self._add("kernel", kernel.kind, name, overload, schema)
        return known

    def generator(self, generator: Generator) -> int:
        self._known("device", generator.device)
        with self._whole():
            return self._add("generator", generator.device, int(generator.default))

    def scope(self, scope: Scope) -> int:
        known = self._scopes.get((scope.parent, scope.name))
        if known is None:
            if scope.parent:
                self._known("scope", scope.parent)
            name = self.string(scope.name)
            with self._whole():
                known = self._scopes[(scope.parent, scope.name)] = self._add("scope", scope.parent, name)
        return known

    def meta(self, meta: TensorMeta) -> int:
        try:
            sizes, strides = array("q", meta.sizes), array("q", meta.strides)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"tensor metadata whose sizes or strides are no 64-bit numbers: {meta}: {error}") from None
        if len(sizes) != len(strides):
            raise ValueError(f"tensor metadata with {len(sizes)} sizes and {len(strides)} strides")
        head = (int(meta.dtype), int(meta.layout), meta.device, int(meta.flags), len(sizes))
        key = xxh3_128_digest(b"meta" + array("q", head).tobytes() + sizes.tobytes() + strides.tobytes())
        known = self._ids.get(key)
        if known is None:
            self._known("device", meta.device)
            lengths = (*sizes, *strides, 0)
            if min(lengths) < 0 or max(lengths) > MAX_LENGTH:
                raise ValueError(f"tensor metadata with negative or impossible sizes or strides: {meta}")
            known_codes = 1 <= meta.dtype <= max(DType) and 1 <= meta.layout <= max(Layout)
            if not known_codes or int(meta.flags) & ~_FLAGS:
                raise ValueError(f"tensor metadata with unknown codes: {meta}")
            with self._whole():
                known = self._ids[key] = self._add("meta", *head)
                self._columns["meta_sizes"].extend(sizes)
                self._columns["meta_strides"].extend(strides)
        return known

    def signature(self, signature: Signature) -> int:
        rows = flatten(signature)
        kinds, names, constants, children = array("B"), array("I"), array("q"), array("I")
        for row in rows:
            kinds.append(row.kind)
            names.append(self.string(row.name) if row.name else 0)
            constants.append(self.string(row.constant) if isinstance(row.constant, str) else row.constant)
            if row.kind == ValueKind.device:
                self._known("device", int(row.constant))
            children.append(row.children)
        head = (
            int(signature.kind),
            int(signature.status),
            signature.kernel,
            len(signature.args),
            len(signature.results),
            len(rows),
        )
        key = xxh3_128_digest(
            b"signature"
            + array("q", head).tobytes()
            + kinds.tobytes()
            + names.tobytes()
            + constants.tobytes()
            + children.tobytes()
        )
        known = self._ids.get(key)
        if known is None:
            if signature.kernel:
                self._known("kernel", signature.kernel)
            with self._whole():
                known = self._ids[key] = self._add("signature", *head)
                for name, column in (
                    ("node_kind", kinds),
                    ("node_name", names),
                    ("node_constant", constants),
                    ("node_children", children),
                ):
                    self._columns[name].extend(column)
                self._note_slots(signature, known, kinds)
        return known

    def _note_slots(self, signature: Signature, number: int, kinds: array) -> None:
        slots = [0, 0, 0]
        for kind in kinds:
            for column, count in enumerate(SLOTS.get(ValueKind(kind), ())):
                slots[column] += count
        for counts, slot in zip(self.slot_counts, slots, strict=True):
            counts.append(slot)
        if signature.kind == RecordKind.unsupported:
            self._unsupported[number] = str(signature.args[0].constant)

    def file(self, file: ExternalFile) -> int:
        if file.payload and self._payload_bytes(file.payload) != file.bytes:
            raise ValueError(f"{file.path} has {file.bytes} bytes, its payload {self._payload_bytes(file.payload)}")
        return self._interned("file", *file_row(file, self.string))

    def range(self, given: FileRange) -> int:
        self._known("file", given.file)
        if given.payload and self._payload_bytes(given.payload) != given.bytes:
            raise ValueError(f"a range of {given.bytes} bytes with a payload of {self._payload_bytes(given.payload)}")
        return self._interned("range", *range_row(given, self._columns["file_bytes"][given.file - 1]))

    def recipe(self, recipe: Recipe) -> int:
        return self._interned("recipe", *recipe_row(recipe))

    def _known(self, family: str, number: int) -> None:
        if not 1 <= number <= self.count(family):
            raise ValueError(f"{family} {number} is not defined; there are {self.count(family)}")

    def pending(self) -> bool:
        """Whether anything was defined that no Tables frame has yet."""
        return bool(self._new_strings) or any(
            len(self._columns[names[0]]) != self._written[names[0]] for names in FAMILIES.values()
        )

    def encode(self) -> memoryview:
        """A Tables body of what came since the last call."""
        columns = {name: self.column(name)[self._written[name] :] for name in self._columns}
        firsts = {
            "string": self._written_strings + 1,
            **{family: self._written[names[0]] + 1 for family, names in FAMILIES.items()},
        }
        body = encode_tables(self._new_strings, columns, firsts)
        self._written = {name: len(column) for name, column in self._columns.items()}
        self._written_strings = len(self._strings)
        self._new_strings = []
        self._new_text_bytes = 0
        return body

    def encode_all(self) -> memoryview:
        """A Tables body of everything, from id 1."""
        columns = {name: self.column(name) for name in self._columns}
        firsts = dict.fromkeys(("string", *FAMILIES), 1)
        return encode_tables([text.encode() for text in self._strings], columns, firsts)
