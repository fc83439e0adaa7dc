"""The writer's definitions: strings, devices, kernels, generators, scopes, tensor metadata and signatures, with ids.

The same content gets the same id. Content is kept in flat arrays, the form it is written in, and found again by a
128-bit hash of it, so that a capture with very many distinct signatures costs little memory. `encode` makes a Tables
body of what came since the last one, or of everything.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import flatbuffers
import numpy as np
from xxhash import xxh3_128_digest

from .codes import RecordKind, ValueKind
from .frames import MAX_STRING_BYTES
from .generated import Tables
from .model import SLOTS, Device, Generator, Kernel, Scope, Signature, TensorMeta
from .signatures import flatten

# Families in the schema's order, each with its first_x field, its per-row columns, and its columns of varying length.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "device": ("device_kind:I", "device_index:i", "device_name:I", "device_fingerprint:I"),
    "kernel": ("kernel_kind:B", "kernel_name:I", "kernel_overload:I", "kernel_schema:I"),
    "generator": ("generator_device:I", "generator_default:B"),
    "scope": ("scope_parent:I", "scope_name:I"),
    "meta": ("meta_dtype:B", "meta_layout:B", "meta_device:I", "meta_flags:H", "meta_rank:H"),
    "signature": ("signature_kind:B", "signature_status:B", "signature_kernel:I", "signature_args:I",
                  "signature_results:I", "signature_nodes:I"),
}
_RAGGED: dict[str, tuple[str, ...]] = {
    "meta": ("meta_sizes:q", "meta_strides:q"),
    "signature": ("node_kind:B", "node_name:I", "node_constant:q", "node_children:I"),
}
_MAX_ID = 0xFFFFFFFF


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


@dataclass
class _Mark:
    """How much of every column a Tables frame has already defined."""

    strings: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FAMILIES, 0))
    ragged: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RAGGED, 0))


class Definitions:
    """Everything defined so far, and what of it was not written yet."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._columns: dict[str, array] = {}
        for columns in (*_FAMILIES.values(), *_RAGGED.values()):
            for column in columns:
                name, code = column.split(":")
                self._columns[name] = array(code)
        self._ids: dict[bytes, int] = {}
        self._kernels: dict[Kernel, int] = {}
        self._scopes: dict[tuple[int, str], int] = {}
        self._written = _Mark()
        self._new_strings: list[bytes] = []
        self._new_text_bytes = self._text_bytes = 0
        # Slots of each signature, element 0 unused: what a frame's columns must add up to.
        self.slot_counts = (array("I", [0]), array("I", [0]), array("I", [0]))
        # Signatures with a string argument `reason` of unsupported records, for the summary.
        self.unsupported: dict[int, str] = {}

    def count(self, family: str) -> int:
        """How many ids of a family there are: `string`, or a key of the schema's first_x fields."""
        if family == "string":
            return len(self._strings)
        return len(self._columns[_FAMILIES[family][0].split(":")[0]])

    def column(self, name: str) -> np.ndarray:
        """A column as numpy, without a copy; valid until the next definition."""
        return np.asarray(self._columns[name])

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

    def _add(self, family: str, *row: int) -> int:
        for column, value in zip(_FAMILIES[family], row, strict=True):
            self._columns[column.split(":")[0]].append(value)
        number = self.count(family)
        if number > _MAX_ID:
            raise ValueError(f"more than {_MAX_ID} definitions of family {family}")
        return number

    def _interned(self, family: str, *row: int) -> int:
        key = xxh3_128_digest(family.encode() + repr(row).encode())
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = self._add(family, *row)
        return known

    def device(self, device: Device) -> int:
        return self._interned("device", self.string(device.kind), device.index, self.string(device.name),
                              self.string(device.fingerprint) if device.fingerprint else 0)

    def kernel(self, kernel: Kernel) -> int:
        known = self._kernels.get(kernel)
        if known is None:
            known = self._kernels[kernel] = self._add(
                "kernel", kernel.kind, self.string(kernel.name), self.string(kernel.overload), self.string(kernel.schema))
        return known

    def generator(self, generator: Generator) -> int:
        self._known("device", generator.device)
        return self._add("generator", generator.device, int(generator.default))

    def scope(self, scope: Scope) -> int:
        known = self._scopes.get((scope.parent, scope.name))
        if known is None:
            if scope.parent:
                self._known("scope", scope.parent)
            known = self._scopes[(scope.parent, scope.name)] = self._add("scope", scope.parent, self.string(scope.name))
        return known

    def meta(self, meta: TensorMeta) -> int:
        sizes, strides = array("q", meta.sizes), array("q", meta.strides)
        if len(sizes) != len(strides):
            raise ValueError(f"tensor metadata with {len(sizes)} sizes and {len(strides)} strides")
        head = (int(meta.dtype), int(meta.layout), meta.device, int(meta.flags), len(sizes))
        key = xxh3_128_digest(b"meta" + array("q", head).tobytes() + sizes.tobytes() + strides.tobytes())
        known = self._ids.get(key)
        if known is None:
            self._known("device", meta.device)
            if min(sizes, default=0) < 0 or min(strides, default=0) < 0:
                raise ValueError(f"tensor metadata with negative sizes or strides: {meta}")
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
        head = (int(signature.kind), int(signature.status), signature.kernel, len(signature.args),
                len(signature.results), len(rows))
        key = xxh3_128_digest(b"signature" + array("q", head).tobytes() + kinds.tobytes() + names.tobytes()
                              + constants.tobytes() + children.tobytes())
        known = self._ids.get(key)
        if known is None:
            if signature.kernel:
                self._known("kernel", signature.kernel)
            known = self._ids[key] = self._add("signature", *head)
            for name, column in (("node_kind", kinds), ("node_name", names), ("node_constant", constants),
                                 ("node_children", children)):
                self._columns[name].extend(column)
            self._note_slots(signature, known, kinds)
        return known

    def _note_slots(self, signature: Signature, number: int, kinds: array) -> None:
        slots = [0, 0, 0]
        for kind in kinds:
            for column, count in enumerate(SLOTS.get(ValueKind(kind), ())):
                slots[column] += count
        for column, count in zip(self.slot_counts, slots, strict=True):
            column.append(count)
        if signature.kind == RecordKind.unsupported:
            self.unsupported[number] = str(signature.args[0].constant)

    def _known(self, family: str, number: int) -> None:
        if not 1 <= number <= self.count(family):
            raise ValueError(f"{family} {number} is not defined; there are {self.count(family)}")

    def pending(self) -> bool:
        """Whether anything was defined that no Tables frame has yet."""
        return (len(self._strings) != self._written.strings
                or any(self.count(family) != rows for family, rows in self._written.rows.items()))

    def encode(self, everything: bool) -> memoryview:
        """A Tables body: of everything, or of what came since the last call without `everything`."""
        mark = _Mark() if everything else self._written
        body = self._build(mark, [text.encode() for text in self._strings] if everything else self._new_strings)
        if not everything:
            self._written = _Mark(len(self._strings), {family: self.count(family) for family in _FAMILIES},
                                  {family: len(self._columns[_RAGGED[family][0].split(":")[0]]) for family in _RAGGED})
            self._new_strings.clear()
            self._new_text_bytes = 0
        return body

    def _build(self, mark: _Mark, strings: list[bytes]) -> memoryview:
        builder = flatbuffers.Builder(4096)
        added: list[tuple[str, int]] = []
        if strings:
            places = [builder.CreateString(text) for text in strings]
            builder.StartVector(4, len(places), 4)
            for place in reversed(places):
                builder.PrependUOffsetTRelative(place)
            added.append(("strings", builder.EndVector()))
        firsts = [("string", mark.strings + 1)] if strings else []
        for family, columns in _FAMILIES.items():
            begin = mark.rows[family]
            if begin == self.count(family):
                continue
            firsts.append((family, begin + 1))
            for column in columns:
                name = column.split(":")[0]
                added.append((name, builder.CreateNumpyVector(self.column(name)[begin:])))
            for column in _RAGGED.get(family, ()):
                name = column.split(":")[0]
                added.append((name, builder.CreateNumpyVector(self.column(name)[mark.ragged[family]:])))
        Tables.Start(builder)
        for family, first in firsts:
            getattr(Tables, f"AddFirst{_camel(family)}")(builder, first)
        for name, place in added:
            getattr(Tables, f"Add{_camel(name)}")(builder, place)
        builder.Finish(Tables.End(builder))
        return memoryview(builder.Bytes)[builder.Head():]
