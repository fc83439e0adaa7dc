"""Signatures of a capture's ops as text: printed, parsed, compared with its calls, and counted.

`SignatureIndex` finds how often each occurs and where first, without decoding every record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .codes import DType, Layout, MemoryFormat, RecordKind, ValueKind
from .model import CompositeValue, DeviceValue, Node, OpaqueValue, ProcessGroupValue, Record, TensorMeta, TensorValue
from .operator_schema import parse_operator_schema
from .reader import CaptureReader
from .record_frames import RecordFrame
from .signature_grammar import (
    NOTED_FLAGS,
    TYPES,
    AnyValue,
    DeviceText,
    Items,
    Number,
    Parser,
    SignatureText,
    TensorText,
    Text,
    ValueText,
    Word,
    row_major,
    runs_of,
    without_values,
)

__all__ = ["SignatureText", "matches", "parse_signature", "signature_of", "signature_text", "without_values"]


def parse_signature(text: str) -> SignatureText:
    """The signature in a text. Raises UsageError with the position if it is not one."""
    return Parser(text).signature()


def signature_text(record: Record, reader: CaptureReader) -> str:
    return str(signature_of(record, reader))


def signature_of(record: Record, reader: CaptureReader, *, values: bool = False) -> SignatureText:
    """The signature of an op; with `values`, ints and floats stand for themselves instead of for their type."""
    kernel = reader.kernels[record.signature.kernel]
    placed = _placed(kernel.schema, [node.name for node in record.signature.args])
    made = _SignatureMaker(reader, len(reader.devices) > 2, values)
    return SignatureText(
        kernel.qualified_name,
        tuple(
            ("" if in_place else node.name, made.value(node, value))
            for node, value, in_place in zip(record.signature.args, record.args, placed, strict=True)
        ),
    )


def matches(pattern: SignatureText, record: Record, reader: CaptureReader) -> bool:
    kernel = reader.kernels[record.signature.kernel]
    if kernel.qualified_name != pattern.kernel or len(pattern.arguments) != len(record.args):
        return False
    actual = signature_of(record, reader, values=True)
    made = _SignatureMaker(reader, True, True)
    for (wanted_name, wanted), (placed_name, _), node, value in zip(
        pattern.arguments, actual.arguments, record.signature.args, record.args, strict=True
    ):
        # Without a name the place decides; a name may always be given.
        if wanted_name != (node.name if wanted_name else placed_name) or not _fits(wanted, made.value(node, value)):
            return False
    return True


def _placed(schema: str, names: Sequence[str]) -> list[bool]:
    """For each given argument, whether its place alone says which it is, as in a call in Python."""
    try:
        arguments = parse_operator_schema(schema).arguments
    except ValueError:
        return [False] * len(names)
    placed, unbroken = [], True
    for position, name in enumerate(names):
        unbroken = (
            unbroken
            and position < len(arguments)
            and arguments[position].name == name
            and not arguments[position].keyword_only
        )
        placed.append(unbroken)
    return placed


class _SignatureMaker:
    """Makes value texts of a capture's values."""

    def __init__(self, reader: CaptureReader, devices: bool, values: bool) -> None:
        self._reader, self._devices, self._values = reader, devices, values

    def value(self, node: Node, value: object) -> ValueText:
        match node.kind:
            case ValueKind.none:
                return Word("None")
            case ValueKind.bool:
                return Word("True" if node.constant else "False")
            case ValueKind.int | ValueKind.float if self._values:
                assert isinstance(value, int | float)
                return Number(repr(value))
            case ValueKind.string:
                return Text(str(node.constant))
            case ValueKind.opaque if isinstance(value, OpaqueValue):
                return Text(value.text, "opaque")
            case ValueKind.process_group if isinstance(value, ProcessGroupValue):
                return Text(value.name, "process_group")
            case ValueKind.device if isinstance(value, DeviceValue):
                return DeviceText(str(self._reader.devices[value.id]))
            case ValueKind.tensor if isinstance(value, TensorValue):
                return self._tensor(value.meta)
            case ValueKind.list | ValueKind.tuple if isinstance(value, list | tuple):
                return self._items("[" if node.kind is ValueKind.list else "(", node, value)
            case ValueKind.composite if isinstance(value, CompositeValue):
                return self._items(value.form, node, value.parts)
            case ValueKind.dtype | ValueKind.layout | ValueKind.memory_format:
                code = {ValueKind.dtype: DType, ValueKind.layout: Layout, ValueKind.memory_format: MemoryFormat}
                return Word(code[node.kind](int(node.constant or 0)).name)
        return Word(TYPES[node.kind])

    def _items(self, form: str, node: Node, values: Sequence[object]) -> Items:
        return Items(
            form, runs_of(self.value(child, value) for child, value in zip(node.children, values, strict=True))
        )

    def _tensor(self, meta: TensorMeta) -> TensorText:
        layout = [] if meta.layout is Layout.strided else [meta.layout.name]
        notes = (*layout, *(str(flag.name) for flag in NOTED_FLAGS if flag in meta.flags))
        device = str(self._reader.devices[meta.device]) if self._devices else ""
        strides = None if row_major(meta.sizes, meta.strides) else meta.strides
        return TensorText(meta.dtype.name, meta.sizes, strides, notes, device)


def _fits(wanted: ValueText, actual: ValueText) -> bool:
    """Whether a captured value (with its numbers and devices) is one that a pattern asks for."""
    if isinstance(wanted, AnyValue):
        return True
    if isinstance(wanted, TensorText):
        return isinstance(actual, TensorText) and _tensor_fits(wanted, actual)
    if isinstance(actual, Number):
        if isinstance(wanted, Word):
            return wanted.text == actual.type
        return wanted == actual
    if isinstance(wanted, Items):
        return isinstance(actual, Items) and wanted.form == actual.form and _runs_fit(wanted.runs, actual.runs)
    return wanted == actual


def _tensor_fits(wanted: TensorText, actual: TensorText) -> bool:
    if (wanted.dtype, wanted.notes) != (actual.dtype, actual.notes) or len(wanted.sizes) != len(actual.sizes):
        return False
    if wanted.device and wanted.device != actual.device:
        return False
    if any(size is not None and size != given for size, given in zip(wanted.sizes, actual.sizes, strict=True)):
        return False
    if wanted.strides is None or actual.strides is None or isinstance(wanted.strides, AnyValue):
        sizes = [size or 0 for size in actual.sizes]
        return isinstance(wanted.strides, AnyValue) or (
            actual.strides is None if wanted.strides is None else row_major(sizes, wanted.strides)
        )
    assert not isinstance(actual.strides, AnyValue)
    return all(
        size == 1 or stride == given
        for size, stride, given in zip(actual.sizes, wanted.strides, actual.strides, strict=True)
    )


def _runs_fit(wanted: Sequence[tuple[ValueText, int]], actual: Sequence[tuple[ValueText, int]]) -> bool:
    """Whether two lists written as runs fit, item by item."""
    if sum(count for _, count in wanted) != sum(count for _, count in actual):
        return False
    pairs = iter(actual)
    given, left = next(pairs, (None, 0))
    for value, count in wanted:
        while count:
            taken = min(count, left)
            if given is None or not _fits(value, given):
                return False
            count, left = count - taken, left - taken
            if not left:
                given, left = next(pairs, (None, 0))
    return True


Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class SignatureGroup:
    """One signature of a capture: its text, its kernel's id, how often it is called, and the ordinal of the first."""

    text: str
    kernel: int
    calls: int
    first: int


@dataclass(frozen=True)
class KeyedOps:
    """The ops of one key in one frame, as ordinals in order."""

    key: Key
    kernel: int
    ordinals: np.ndarray


class SignatureIndex:
    """The signatures of one open capture."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self._texts: dict[Key, str] = {}

    def argument_tensors(self, signature_id: int) -> int:
        """How many of a record's tensor slots are its arguments'; they come first."""
        return self._reader.layouts[signature_id].arg_tensors

    def text(self, key: Key, ordinal: int) -> str:
        """The signature of the ops of a key, of which there is one at `ordinal`."""
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = signature_text(self._reader.record(ordinal), self._reader)
        return known

    def ops_by_key(
        self, kernels: Collection[int] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[KeyedOps]:
        """The ops with ordinals from `start` up to `stop`, of these kernels or of all, frame by frame."""
        reader = self._reader
        last = reader.record_count if stop is None else min(stop, reader.record_count)
        wanted = {
            number
            for number, signature in enumerate(reader.signatures)
            if signature is not None
            and signature.kind is RecordKind.op
            and (kernels is None or signature.kernel in kernels)
        }
        for index, info in enumerate(reader.record_frames):
            if info.first_ordinal >= last or info.first_ordinal + info.count <= start:
                continue
            frame = reader.frame(index)
            rows = slice(max(0, start - frame.first_ordinal), min(frame.count, last - frame.first_ordinal))
            signatures = frame.signature[rows]
            for number in np.unique(signatures).tolist():
                if number in wanted:
                    yield from self._keys(frame, number, np.flatnonzero(signatures == number) + rows.start)

    def _keys(self, frame: RecordFrame, number: int, rows: np.ndarray) -> Iterator[KeyedOps]:
        """The ops of one constant part, by the metadata of their arguments."""
        kernel = self._reader.signatures[number].kernel
        slots = frame.tensor_first[rows].astype(np.int64)[:, None] + np.arange(self.argument_tensors(number))
        metas = frame.tensor_meta[frame.tensor_slots[slots]]
        if not metas.shape[1]:
            yield KeyedOps((number, ()), kernel, rows + frame.first_ordinal)
            return
        distinct, group = np.unique(metas, axis=0, return_inverse=True)
        group = group.reshape(-1)
        for place, key in enumerate(distinct.tolist()):
            yield KeyedOps((number, tuple(key)), kernel, rows[group == place] + frame.first_ordinal)

    def groups(
        self, kernels: Collection[int] | None = None, start: int = 0, stop: int | None = None
    ) -> list[SignatureGroup]:
        """Every signature that occurs among these ops, in order of first use."""
        found: dict[tuple[int, str], list[int]] = {}
        for ops in self.ops_by_key(kernels, start, stop):
            first = int(ops.ordinals[0])
            entry = found.setdefault((ops.kernel, self.text(ops.key, first)), [0, first])
            entry[0] += len(ops.ordinals)
            entry[1] = min(entry[1], first)
        made = [SignatureGroup(text, kernel, calls, first) for (kernel, text), (calls, first) in found.items()]
        return sorted(made, key=lambda group: group.first)

    def matching(self, pattern: SignatureText, start: int = 0, stop: int | None = None) -> Iterator[KeyedOps]:
        """The ops that a signature selects, as `ops_by_key` gives them, none of them empty."""
        reader = self._reader
        kernels = {
            number
            for number, kernel in enumerate(reader.kernels)
            if kernel is not None and kernel.qualified_name == pattern.kernel
        }
        answers: dict[Key, bool] = {}
        for ops in self.ops_by_key(kernels, start, stop):
            if pattern.asks_for_values:
                chosen = np.array([matches(pattern, reader.record(int(ordinal)), reader) for ordinal in ops.ordinals])
                if chosen.any():
                    yield KeyedOps(ops.key, ops.kernel, ops.ordinals[chosen])
                continue
            answer = answers.get(ops.key)
            if answer is None:
                answer = answers[ops.key] = matches(pattern, reader.record(int(ops.ordinals[0])), reader)
            if answer:
                yield ops
