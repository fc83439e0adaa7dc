"""Rows of records as JSON, one object a line: what `opreplay-dump --format=jsonl` prints for ops and the other kinds.

docs/rows.md documents every key. Rows of definitions (file, summary, kernels, …) are in definitions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from replayfmt.format.codes import UNKNOWN_DEVICE_NS, DType, Layout, MemoryFormat, RecordKind, TensorFlag, ValueKind
from replayfmt.format.model import Node, Signature, TensorMeta
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.slots import NodePlace, SlotLayout

from .json_text import encode, encode_fast, integer, integers, number, quote
from .row_templates import Hole, Piece, Slot
from .values import Columns, Dialect, Made, device_slot, scope_path

# Kinds whose value is plain JSON; lists of one such kind hold these values themselves.
PLAIN = frozenset(
    {
        ValueKind.none,
        ValueKind.bool,
        ValueKind.int,
        ValueKind.float,
        ValueKind.complex,
        ValueKind.string,
        ValueKind.dtype,
        ValueKind.layout,
        ValueKind.memory_format,
        ValueKind.device,
        ValueKind.process_group,
        ValueKind.opaque,
    }
)
RUNS = {ValueKind.int: Hole.integers, ValueKind.float: Hole.numbers}
REFERENCES = frozenset({ValueKind.storage, ValueKind.generator, ValueKind.payload, ValueKind.range, ValueKind.recipe})
CODES: dict[ValueKind, Callable[[int], Any]] = {
    ValueKind.dtype: DType,
    ValueKind.layout: Layout,
    ValueKind.memory_format: MemoryFormat,
}

# Keys of a host_read or digest row that carries no digest: a capture may have been made without them.
DIGEST_KEYS = ("hash", "elements", "nan", "inf", "min", "max", "mean", "l2", "sample")
NO_DIGEST = "".join(f',"{key}":null' for key in DIGEST_KEYS)


class JsonLines(Dialect):
    """Writes records as JSON objects."""

    def __init__(self, reader: CaptureReader) -> None:
        super().__init__(reader)
        self._devices = ["null", *(quote(str(device)) for device in reader.devices[1:])]
        self._metas = Made(lambda number: self._meta(reader.metas[number]))
        self._meta_devices = Made(lambda number: self._devices[reader.metas[number].device])

    def scope(self, number: int) -> str:
        return quote(scope_path(self.reader, number))

    # ------------------------------------------------------------------------------------------------------- columns

    def columns(self, frame: RecordFrame) -> Columns:
        rows = frame.tensor_meta.tolist()
        longest = max((len(before) for before, _after in self._metas.of(list(set(rows)))), default=0)
        self.check_room(frame, longest * len(rows), "the tensors")
        storages = integers(frame.tensor_storage)
        if frame.tensor_storage.size and not frame.tensor_storage.all():
            storages = [storage or "null" for storage in storages]
        tensors = [
            f'"tensor":{tensor},"storage":{storage}{before}{offset}{after}'
            for tensor, storage, (before, after), offset in zip(
                integers(frame.tensor_id), storages, self._metas.of(rows), integers(frame.tensor_offset), strict=True
            )
        ]
        floats = frame.floats.tolist()
        if not np.isfinite(frame.floats).all():
            floats = [number(value) for value in floats]
        slots = frame.tensor_slots.tolist()
        return Columns(
            T=list(map(tensors.__getitem__, slots)),
            I=integers(frame.ints),
            F=floats,
            R=frame.ints.tolist(),
            L=slots,
            D=list(self._meta_devices.of(rows)),
        )

    def integers(self, column: np.ndarray) -> list[Any]:
        return integers(column)

    def device_durations(self, column: np.ndarray) -> list[str]:
        return [f',"device_duration_ns":{value if value != UNKNOWN_DEVICE_NS else "null"}' for value in column.tolist()]

    def annotations(self, ids: list[int]) -> list[str]:
        known = {
            number: f',"annotation":{encode_fast(self.reader.annotation(number))}' if number else ""
            for number in set(ids)
        }
        return [known[number] for number in ids]

    def placement(self, streams: list[tuple[str, int]]) -> str:
        return f',"streams":{encode(dict(streams))}'

    def values(self, values: np.ndarray) -> str:
        return f',"value":{encode(values.tolist())}'

    def tail(self, frame: RecordFrame) -> str:
        return f',"frame_offset":{integer(frame.offset)}}}\n'

    def _meta(self, meta: TensorMeta) -> tuple[str, str]:
        """What stands before and after the offset in a tensor's keys."""
        before = (
            f',"dtype":{quote(meta.dtype.name)},"sizes":{encode(meta.sizes)},"strides":{encode(meta.strides)},"offset":'
        )
        # With only one device, every op and every storage names it already.
        after = f',"device":{self._devices[meta.device]}' if len(self._devices) > 2 else ""
        if meta.layout != Layout.strided:
            after += f',"layout":{quote(meta.layout.name)}'
        if meta.flags:
            after += f',"flags":{encode([flag.name for flag in TensorFlag if flag in meta.flags])}'
        return before, after

    # ----------------------------------------------------------------------------------------------------- templates

    def template(self, signature: Signature) -> list[Piece]:
        if signature.kind == RecordKind.op:
            return self._op(signature)
        pieces: list[Piece] = [f'{{"kind":{quote(signature.kind.name)},"ordinal":', Slot(Hole.ordinal)]
        if signature.kind == RecordKind.global_state:
            pieces += [',"settings":{', *self._settings(signature), "}"]
        elif signature.kind == RecordKind.collective:
            pieces += self._values(SlotLayout(signature))
        else:
            pieces += self._fields(signature)
        pieces += [',"scope":', Slot(Hole.scope), ',"thread":', Slot(Hole.thread), ',"start_ns":', Slot(Hole.start)]
        return [*pieces, Slot(Hole.device_duration)] if signature.kind == RecordKind.unsupported else pieces

    def _op(self, signature: Signature) -> list[Piece]:
        kernel = self.reader.kernels[signature.kernel]
        layout = SlotLayout(signature)
        slot = device_slot(layout)
        return [
            '{"kind":"op","ordinal":',
            Slot(Hole.ordinal),
            f',"op":{quote(kernel.name)},"overload":{quote(kernel.overload)},"kernel":{signature.kernel}',
            *(f',"writes":{encode(how)}' for how in self.writes(signature)),
            ',"scope":',
            Slot(Hole.scope),
            ',"device":',
            "null" if slot is None else Slot(Hole.tensor_device, slot),
            ',"thread":',
            Slot(Hole.thread),
            f',"status":{quote(signature.status.name)},"start_ns":',
            Slot(Hole.start),
            ',"duration_ns":',
            Slot(Hole.duration),
            Slot(Hole.device_duration),
            *self._values(layout),
        ]

    def _values(self, layout: SlotLayout) -> list[Piece]:
        """`args` and `results`."""
        pieces: list[Piece] = [',"args":[']
        for position, place in enumerate(layout.args):
            pieces += ["," * (position > 0), f'{{"name":{quote(place.node.name)},', *self._content(place)]
        pieces.append('],"results":[')
        for position, place in enumerate(layout.results):
            pieces += ["," * (position > 0), "{", *self._content(place)]
        return [*pieces, "]"]

    def _content(self, place: NodePlace) -> list[Piece]:
        """A value's object after its name: type, value, closing brace."""
        node = place.node
        head = f'"type":{quote(node.kind.name)},'
        if node.kind in PLAIN:
            return [head + '"value":', *self._plain(place), "}"]
        if node.kind == ValueKind.tensor:
            return [head, Slot(Hole.tensor, place.tensor_slot), "}"]
        if node.kind in REFERENCES:
            return [head + f'"{node.kind.name}":', Slot(Hole.integer, place.int_slot), "}"]
        if node.kind == ValueKind.composite:
            head += f'"form":{quote(str(node.constant))},"parts":['
            return [head, *self._objects(place.children), "]}"]
        return [head, *self._list(place), "}"]

    def _list(self, place: NodePlace) -> list[Piece]:
        """`item_type` and `value` of a list or tuple."""
        kinds = {child.kind for child in place.node.children}
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        item_type = f'"{kind.name}"' if kind is not None else '"mixed"' if kinds else "null"
        head = f'"item_type":{item_type},"value":['
        if kind in PLAIN:
            return [head, *self._plain_items(place), "]"]
        return [head, *self._objects(place.children), "]"]

    def _objects(self, places: tuple[NodePlace, ...]) -> list[Piece]:
        """Values as objects without names, separated by commas."""
        if len(places) > 1 and all(place.node.kind == ValueKind.tensor for place in places):
            run = Slot(Hole.tensors, places[0].tensor_slot, len(places), '},{"type":"tensor",')
            return ['{"type":"tensor",', run, "}"]
        pieces: list[Piece] = []
        for place in places:
            pieces += ["," * bool(pieces) + "{", *self._content(place)]
        return pieces

    def _plain_items(self, place: NodePlace) -> list[Piece]:
        """The values of a list whose elements are plain, separated by commas."""
        kinds, count = {child.node.kind for child in place.children}, len(place.children)
        for kind, hole in RUNS.items():
            if kinds == {kind} and count > 1:
                return [Slot(hole, place.int_slot if kind == ValueKind.int else place.float_slot, count, ",")]
        pieces: list[Piece] = []
        for child in place.children:
            pieces += ["," * bool(pieces), *self._plain(child)]
        return pieces

    def _plain(self, place: NodePlace) -> list[Piece]:
        """The JSON of a value of a plain kind, or of an id."""
        node, real = place.node, place.float_slot
        if node.kind == ValueKind.int or node.kind in REFERENCES:
            return [Slot(Hole.integer, place.int_slot)]
        if node.kind == ValueKind.float:
            return [Slot(Hole.number, real)]
        if node.kind == ValueKind.complex:
            return ['{"real":', Slot(Hole.number, real), ',"imag":', Slot(Hole.number, real + 1), "}"]
        return [self._constant(node)]

    def _constant(self, node: Node) -> str:
        """The JSON of a value that is constant in its signature."""
        if node.kind == ValueKind.none:
            return "null"
        if node.kind == ValueKind.bool:
            return "true" if node.constant else "false"
        if node.kind == ValueKind.device:
            return self._devices[int(node.constant or 0)]
        if node.kind in CODES:
            return quote(CODES[node.kind](int(node.constant or 0)).name)
        return quote(str(node.constant))

    def _settings(self, signature: Signature) -> list[Piece]:
        pieces: list[Piece] = []
        for place in SlotLayout(signature).args:
            pieces += ["," * bool(pieces) + f"{quote(place.node.name)}:", *self._plain(place)]
        return pieces

    def _fields(self, signature: Signature) -> list[Piece]:
        """The keys that the arguments of a record that is not an op become. The reader has checked which there are."""
        pieces: list[Piece] = []
        for place in SlotLayout(signature).args:
            node = place.node
            if node.name == "hash_low":
                pieces += [',"hash":"', Slot(Hole.hash, place.int_slot), '"']
            elif node.name == "hash_high":
                continue  # shown with the other half
            elif node.kind in (ValueKind.tensor, ValueKind.composite):
                pieces += [',"value":{', *self._content(place)]
            elif node.kind == ValueKind.list:
                pieces += [f',"{node.name}":[', *self._plain_items(place), "]"]
            elif node.kind in (ValueKind.range, ValueKind.recipe):
                pieces += [f',"{node.name}":null,"{node.kind.name}":', *self._plain(place)]
            else:
                pieces += [f',"{node.name}":', *self._plain(place)]
        if signature.kind in (RecordKind.host_read, RecordKind.digest) and signature.args[-1].name != "sample":
            pieces.append(NO_DIGEST)
        return pieces
