"""What the records of a capture say: their values as PyTorch has them, what each is called, which ones some ops need.

`python_values` turns values of a record into tensors, dtypes, devices and composites, `describe` and `count_work` tell
what a capture holds, and a `Slicer` finds the records that produce the inputs of chosen ops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replayfmt.errors import ContentNotCaptured, InvalidCapture
from replayfmt.format.codes import DType, Layout, MemoryFormat, RecordKind, ValueKind
from replayfmt.format.model import CompositeValue, DeviceValue, Node, TensorValue, Value
from replayfmt.format.reader import CaptureReader, RecordFrame, uncompared_signatures
from replayfmt.pytorch.tensors.composites import put_together
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT

from .kernels import Effects
from .scan import Scan

# Returns the tensor for a tensor value; the text is what errors call it.
GiveTensor = Callable[[TensorValue, str], torch.Tensor]


def python_values(
    reader: CaptureReader, nodes: Sequence[Node], values: Sequence[Value], give: GiveTensor, where: str
) -> list[Any]:
    """Arguments or results of a record as PyTorch has them. `where` begins the names that errors use.

    Raises ContentNotCaptured for what a capture only describes (opaque objects, generators, process groups), and what
    `give` raises.
    """
    return [
        _value(reader, value, give, f"{where}{node.name or place}")
        for place, (node, value) in enumerate(zip(nodes, values, strict=True))
    ]


def _value(reader: CaptureReader, value: Value, give: GiveTensor, name: str) -> Any:
    if isinstance(value, TensorValue):
        return give(value, name)
    if isinstance(value, list):
        return [_value(reader, each, give, f"{name}[{place}]") for place, each in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_value(reader, each, give, f"{name}[{place}]") for place, each in enumerate(value))
    if isinstance(value, CompositeValue):
        parts = [_value(reader, each, give, f"{name}.{place}") for place, each in enumerate(value.parts)]
        try:
            return put_together(value.form, parts)
        except (ValueError, RuntimeError) as error:
            raise InvalidCapture(f"{reader.path}: {name}: {error}") from None
    if isinstance(value, DeviceValue):
        return torch.device(str(reader.devices[value.id]))
    for kind, known in ((DType, TORCH_DTYPE), (Layout, TORCH_LAYOUT), (MemoryFormat, TORCH_MEMORY_FORMAT)):
        if isinstance(value, kind):
            if value not in known:
                raise ContentNotCaptured(f"{reader.path}: {name}: this torch has no {kind.__name__} {value.name}")
            return known[value]  # type: ignore[index]
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    raise ContentNotCaptured(f"{reader.path}: {name}: the capture only describes it ({value!r:.80})")


SCALARS = (ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex)


def describe(reader: CaptureReader, ordinal: int) -> tuple[str, str]:
    """What the record at an ordinal is, and the path of its scope."""
    record = reader.record(ordinal)
    scope = reader.scope_path(record.scope)
    if record.kind is RecordKind.op:
        kernel = reader.kernels[record.signature.kernel]
        return (kernel.qualified_name if kernel is not None else "op"), scope
    if record.kind is RecordKind.host_read:
        return f"host read by {record.argument('method')}", scope
    if record.kind is RecordKind.digest:
        return "a tensor that is alive here", scope
    return record.kind.name, scope


_OF_STREAMS = (
    RecordKind.event_record,
    RecordKind.event_wait,
    RecordKind.stream_synchronize,
    RecordKind.event_synchronize,
)


def orders_streams(reader: CaptureReader) -> bool:
    """Whether the capture has work on other streams than the default ones, or says what orders streams."""
    return len(reader.placements) > 1 or any(
        signature is not None and signature.kind in _OF_STREAMS for signature in reader.signatures
    )


def unseen_before(reader: CaptureReader, stop: int) -> Iterator[int]:
    """The records before an ordinal that may have written anything, the last one first."""
    unseen = np.array([signature is not None and signature.unseen for signature in reader.signatures])
    if stop < 1 or not unseen.any():
        return
    for index in range(reader.frame_of(stop - 1), -1, -1):
        frame = reader.frame(index)
        rows = np.flatnonzero(unseen[frame.signature[: stop - frame.first_ordinal]])
        yield from (rows[::-1] + frame.first_ordinal).tolist()


@dataclass(frozen=True)
class Work:
    """How many ops, different kernels and scopes there are; `comparable` are the digests, host reads and scalars that a
    replay can be compared with, `uncompared` the results of which a capture with digests has none, `unsupported` the
    records of work that no replay does."""

    ops: int
    kernels: int
    scopes: int
    comparable: int
    uncompared: int
    unsupported: int


def count_work(reader: CaptureReader, scan: Scan) -> Work:
    ops = scopes = comparable = uncompared = unsupported = 0
    kernels: set[int] = set()
    gaps = uncompared_signatures(reader)
    for number, signature in enumerate(reader.signatures):
        calls = int(scan.signature_calls[number])
        if signature is None or not calls:
            continue
        if signature.kind is RecordKind.op:
            ops += calls
            kernels.add(signature.kernel)
            comparable += calls * sum(node.kind in SCALARS for node in signature.results)
        elif signature.kind is RecordKind.scope_begin:
            scopes += calls
        elif signature.kind in (RecordKind.digest, RecordKind.host_read):
            comparable += 0 if signature.compares_nothing else calls
            uncompared += calls if number in gaps else 0
        elif signature.unseen:
            unsupported += calls
    return Work(ops, len(kernels), scopes, comparable, uncompared, unsupported)


_CONTENT = (RecordKind.storage_import, RecordKind.storage_resize)
_CHECKS = (RecordKind.digest, RecordKind.host_read)
_SLICED = (RecordKind.op, *_CONTENT, *_CHECKS)


@dataclass(frozen=True)
class Slice:
    """`needed` has for each record whether it participates; records that are not ops, no content and no comparison
    always do. `comparable`: how many digests, host reads and scalars there are to compare with."""

    needed: np.ndarray
    comparable: int


@dataclass(frozen=True)
class Row:
    """A record as the walks see it: its storages by what it does with them."""

    ordinal: int
    kind: RecordKind
    touched: frozenset[int]
    given: frozenset[int]  # of results, and of what it may write
    written: frozenset[int]  # the same without views on arguments
    draws: bool
    scalars: int


class Slicer:
    """Makes slices of a capture. `effects` describes signatures, `draws` says which kernels take random
    numbers from a generator whose state the capture has."""

    def __init__(self, reader: CaptureReader, effects: Callable[[int], Effects], draws: Callable[[int], bool]) -> None:
        self._reader, self._effects, self._draws = reader, effects, draws
        self._kinds = [RecordKind(kind) for kind in reader.signature_kinds.tolist()]
        self._parts_of_signature: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], bool, int]] = {}

    def slice(self, ordinals: Collection[int]) -> Slice:
        """The slice that has the ops at these ordinals."""
        stop = max(ordinals, default=-1) + 1
        sliced = np.asarray([kind in _SLICED for kind in self._kinds], bool)
        needed = np.concatenate(
            [
                np.zeros(0, bool),
                *(~sliced[self._reader.frame(index).signature] for index in range(len(self._reader.record_frames))),
            ]
        )
        wanted: set[int] = set()
        drawing = False
        for row in self.rows(stop, backwards=True):
            if row.kind is RecordKind.op:
                takes_part = row.ordinal in ordinals or not wanted.isdisjoint(row.given) or (drawing and row.draws)
                drawing = drawing or (takes_part and row.draws)
            else:
                takes_part = row.kind in _CONTENT and not wanted.isdisjoint(row.touched)
            if takes_part:
                needed[row.ordinal] = True
                wanted |= row.touched
        return Slice(needed, self._comparisons(needed, wanted))

    def _comparisons(self, needed: np.ndarray, wanted: set[int]) -> int:
        """Add the comparisons that hold to `needed`; how many there are."""
        comparable, stale = 0, set[int]()
        for row in self.rows(len(needed), backwards=False):
            if row.kind is RecordKind.op:
                if needed[row.ordinal]:
                    comparable += row.scalars
                else:
                    stale |= row.written
            elif row.kind is RecordKind.storage_import and needed[row.ordinal]:
                stale -= row.touched
            elif row.kind in _CONTENT:
                if not needed[row.ordinal]:
                    stale |= row.touched
            elif row.touched and row.touched <= wanted and row.touched.isdisjoint(stale):
                needed[row.ordinal] = True
                comparable += 1
        return comparable

    def rows(self, stop: int, *, backwards: bool) -> Iterator[Row]:
        """The ops, content and comparisons before an ordinal."""
        indices = range(len(self._reader.record_frames))
        for index in reversed(indices) if backwards else indices:
            frame = self._reader.frame(index)
            rows = range(max(0, min(frame.count, stop - frame.first_ordinal)))
            yield from self._of_frame(frame, reversed(rows) if backwards else iter(rows))

    def _of_frame(self, frame: RecordFrame, rows: Iterator[int]) -> Iterator[Row]:
        signatures, first = frame.signature.tolist(), frame.tensor_first.tolist()
        storages = frame.tensor_storage[frame.tensor_slots].tolist()
        int_first, ints = frame.int_first.tolist(), frame.ints.tolist()
        for row in rows:
            signature = signatures[row]
            kind = self._kinds[signature]
            if kind not in _SLICED:
                continue
            taken, written, passed, draws, scalars = self._signature_parts(signature)
            tensors = storages[first[row] : first[row + 1]]
            touched = frozenset((*tensors, *(ints[int_first[row] + slot] for slot in passed)))
            results, changed = frozenset(tensors[taken:]), frozenset(tensors[slot] for slot in written)
            yield Row(
                frame.first_ordinal + row,
                kind,
                touched,
                results | changed,
                changed | (results - frozenset(tensors[:taken])),
                draws,
                scalars,
            )

    def _signature_parts(self, signature: int) -> tuple[int, tuple[int, ...], tuple[int, ...], bool, int]:
        """Of a signature: tensors among its arguments, those that it may write, the places of storages, whether it
        draws, and how many scalars it returns."""
        known = self._parts_of_signature.get(signature)
        if known is None:
            layout = self._reader.layouts[signature]
            kind = layout.signature.kind
            written: tuple[int, ...] = ()
            passed = tuple(each.int_slot for each in layout.nodes(ValueKind.storage))
            draws, scalars = False, 0
            if kind is RecordKind.op:
                effects = self._effects(signature)
                written = effects.writes + effects.unsure
                draws = self._draws(layout.signature.kernel)
                scalars = sum(node.kind in SCALARS for node in layout.signature.results)
            elif kind in _CONTENT:
                place = layout.arg("storage")
                assert place is not None, f"a {kind.name} record without its storage"
                passed = (place.int_slot,)
            known = self._parts_of_signature[signature] = layout.arg_tensors, written, passed, draws, scalars
        return known
