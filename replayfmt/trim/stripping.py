"""A capture without any content: metadata alone, safe to share.

Left out: payloads, external files, recipes, digests, host reads' values, scalars that ops returned to the program,
generators' states, host name, user, paths and command line. Nothing is replayed, so it works on captures that cannot
be, and where torch is not installed.
"""

from __future__ import annotations

from dataclasses import replace

from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import GeneratorValue, Node, Record, Signature, Value
from replayfmt.format.reader import CaptureReader

from .copying import Copier
from .schedule import Enter, Planner, Schedule
from .selection import Kept
from .writing import Content, Writing

POLICIES = {"payload": "none", "digests": "none"}

_SCALARS = frozenset({ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex, ValueKind.string})
_DIGEST_FREE = 2        # arguments of a host_read record before its digest


class Absent:
    """No content at all."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def enter(self, action: Enter) -> Content:
        empty = not action.length or self._is_meta(action.storage)
        return Content(StorageOrigin.uninitialized if empty else StorageOrigin.absent, 0, action.length)

    def _is_meta(self, storage: int) -> bool:
        device = self._reader.devices[self._reader.storage(storage).device]
        return device is not None and device.kind == "meta"


class _Stripped(Writing):
    """Writes records without the values in them."""

    def record(self, record: Record) -> None:
        match record.kind:
            case RecordKind.digest:
                return
            case RecordKind.host_read:
                self.copier.add(record, record.kind, record.signature.args[:_DIGEST_FREE], record.args[:_DIGEST_FREE])
            case RecordKind.generator_state:
                generator = record.args[0]
                assert isinstance(generator, GeneratorValue)
                self.generator_state(record, generator.id, None)
            case _:
                super().record(record)


def plan_stripped(reader: CaptureReader, kept: Kept) -> Schedule:
    """What a stripped capture of these records has to say besides them."""
    return Planner(reader, kept, None).plan()


def write_stripped(copier: Copier, schedule: Schedule, kept: Kept, *, annotate: bool) -> None:
    """Write the records of a stripped capture. The copier should redact."""
    copier.rewrite_results = without_scalars
    _Stripped(copier, schedule, kept, Absent(copier.reader), annotate=annotate).finish()


def without_scalars(signature: Signature, values: tuple[Value, ...]) -> tuple[Signature, tuple[Value, ...]]:
    """An op's signature and results without the scalars it computed. Those inside a composite are its shape."""
    if signature.kind is not RecordKind.op:
        return signature, values
    pairs = [_without(node, value) for node, value in zip(signature.results, values, strict=True)]
    return replace(signature, results=tuple(node for node, _ in pairs)), tuple(value for _, value in pairs)


def _without(node: Node, value: Value) -> tuple[Node, Value]:
    if node.kind in _SCALARS:
        return Node(ValueKind.none, node.name), None
    if node.kind in (ValueKind.list, ValueKind.tuple) and isinstance(value, list | tuple):
        pairs = [_without(child, each) for child, each in zip(node.children, value, strict=True)]
        return replace(node, children=tuple(child for child, _ in pairs)), [each for _, each in pairs]
    return node, value
