"""The rows of records in both outputs: JSON lines, and text for people; with the values of small tensors that ops take.

Text has one line for each record, ordinals aligned, indented by scope. Values are those of small integer and bool
tensors, where the capture holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from replayfmt.format.codes import (
    UNKNOWN_DEVICE_NS,
    DType,
    Layout,
    MemoryFormat,
    OpStatus,
    RecordKind,
    TensorFlag,
    ValueKind,
)
from replayfmt.format.model import Node, PayloadValue, Signature, StorageValue, TensorMeta, spanned
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.record_frames import decode_record, distinct
from replayfmt.format.signature_layout import NodePlace, SlotLayout
from replayfmt.format.validation import printable

from .expansion import Column, Expander, Numbers, Piece, Slot, Words, constant
from .row_templates import Dialect, device_slot, encode, encode_fast, integer, json_number, quote, scope_path

_LARGEST_PAYLOAD = 1 << 24  # of content that is read, bytes
_KEPT_BYTES = 1 << 26  # of content that is kept at hand
_KEPT_TEXTS = 1 << 14
_NUMPY: dict[DType, str] = {
    **{
        getattr(DType, f"{kind}{bits}"): f"<{kind[0]}{bits // 8}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    DType.bool: "|b1",
}
_FLAGS = TensorFlag.conj | TensorFlag.neg | TensorFlag.zero


class SmallValues:
    """Returns the values of a frame's tensors as `write` puts them, by place in the frame's tensor column."""

    def __init__(self, reader: CaptureReader, most: int, write: Callable[[np.ndarray], str]) -> None:
        """`most` elements are written of a tensor, 0: none are."""
        self._reader, self._write = reader, write
        self._small = np.array([meta is not None and _is_small(meta, most) for meta in reader.metas], bool)
        self.shows = bool(most) and len(reader.payloads) > 0 and bool(self._small.any())
        if not self.shows:
            return
        self._kinds = np.array([0 if each is None else int(each.kind) for each in reader.signatures], np.int64)
        self._arguments = np.array(
            [
                reader.layouts[number].arg_tensors if kind == RecordKind.op else 0
                for number, kind in enumerate(self._kinds.tolist())
            ],
            np.int64,
        )
        self._written: dict[int, tuple[list[int], list[int]]] = {}
        self._payload: dict[int, int] = {}  # storage → the payload it holds, while it does
        self._ever = np.zeros(reader.storage_count + 1, bool)  # storages that ever held one
        self._any = False
        self._next = 0  # the first frame that was not looked through
        self._content: dict[int, np.ndarray] = {}
        self._texts: dict[tuple[int, int, int], str] = {}

    def of(self, index: int, frame: RecordFrame) -> dict[int, str]:
        """The values to show in a frame. Frames must be requested in order."""
        if not self.shows:
            return {}
        places = np.flatnonzero(self._small[frame.tensor_meta[frame.tensor_slots]])
        rows = np.searchsorted(frame.tensor_first, places, "right") - 1
        taken = places - frame.tensor_first[rows] < self._arguments[frame.signature[rows]]
        places, rows = places[taken], rows[taken]
        if index > self._next and not len(places):
            return {}
        while self._next < index:
            self._pass(self._reader.frame(self._next), np.zeros(0, np.int64), np.zeros(0, np.int64))
        return self._pass(frame, places, rows)

    def _pass(self, frame: RecordFrame, places: np.ndarray, rows: np.ndarray) -> dict[int, str]:
        """Follow what a frame's records do to contents; the values at `places`, as they are right before their rows."""
        found: dict[int, str] = {}
        events = self._events(frame)
        passed = 0
        storages = frame.tensor_storage[frame.tensor_slots[places]]
        for place, row, storage in zip(places.tolist(), rows.tolist(), storages.tolist(), strict=True):
            while passed < len(events) and events[passed][0] < row:
                self._change(*events[passed][1:])
                passed += 1
            held = self._payload.get(storage)
            text = "" if held is None else self._text(held, frame, int(frame.tensor_slots[place]))
            if text:
                found[place] = text
        for _row, storage, payload in events[passed:]:
            self._change(storage, payload)
        self._next += 1
        return found

    def _change(self, storage: int, payload: int) -> None:
        if payload:
            self._payload[storage] = payload
        else:
            self._payload.pop(storage, None)

    def _events(self, frame: RecordFrame) -> list[tuple[int, int, int]]:
        """(row, storage, the payload that it holds from then on, 0 for none), by row."""
        kinds = self._kinds[frame.signature]
        found = []
        for row in np.flatnonzero(kinds == RecordKind.storage_import).tolist():
            record = decode_record(frame, row, self._reader.definitions)
            storage, source = record.argument("storage"), record.argument("payload")
            assert isinstance(storage, StorageValue)
            payload = 0
            if isinstance(source, PayloadValue) and (
                self._reader.payload_info(source.id).raw_bytes <= _LARGEST_PAYLOAD
            ):
                payload = source.id
                self._ever[storage.id] = self._any = True
            found.append((row, storage.id, payload))
        if self._any:
            rows = np.flatnonzero((kinds == RecordKind.storage_resize) | (kinds == RecordKind.storage_release))
            ended = frame.ints[frame.int_first[rows]]  # the storage is their first argument
            at = np.flatnonzero(self._ever[ended])
            found += zip(rows[at].tolist(), ended[at].tolist(), [0] * len(at), strict=True)
            for number in distinct(frame.signature).tolist():
                tensors, storages = self._writes(number)
                if not tensors and not storages:
                    continue
                rows = np.flatnonzero(frame.signature == number)
                for slot in tensors:
                    written = frame.tensor_storage[frame.tensor_slots[frame.tensor_first[rows] + slot]]
                    at = np.flatnonzero(self._ever[written])
                    found += zip(rows[at].tolist(), written[at].tolist(), [0] * len(at), strict=True)
                for slot in storages:
                    found += [(int(row), int(frame.ints[frame.int_first[row] + slot]), 0) for row in rows]
        # An op's own writes come after its arguments were shown: an import at its row would be a separate record.
        return sorted(found)

    def _writes(self, number: int) -> tuple[list[int], list[int]]:
        """The tensor slots and the integer slots of storages that records of a signature may write."""
        if number not in self._written:
            self._written[number] = _written_slots(self._reader, self._reader.layouts[number])
        return self._written[number]

    def _text(self, payload: int, frame: RecordFrame, tensor: int) -> str:
        """The values of a tensor on a payload; "" where it does not lie in it."""
        key = (payload, int(frame.tensor_offset[tensor]), int(frame.tensor_meta[tensor]))
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= _KEPT_TEXTS:
                self._texts.clear()
            values = self._values(*key)
            text = self._texts[key] = "" if values is None else self._write(values)
        return text

    def _values(self, payload: int, offset: int, number: int) -> np.ndarray | None:
        meta, content = self._reader.metas[number], self._bytes(payload)
        dtype = np.dtype(_NUMPY[meta.dtype])
        last = offset + spanned(meta.sizes, meta.strides)
        if min(meta.strides, default=0) < 0 or last * dtype.itemsize > len(content):
            return None
        strides = tuple(stride * dtype.itemsize for stride in meta.strides)
        return np.ndarray(meta.sizes, dtype, content, offset * dtype.itemsize, strides)

    def _bytes(self, payload: int) -> np.ndarray:
        content = self._content.get(payload)
        if content is None:
            if sum(map(len, self._content.values())) > _KEPT_BYTES:
                self._content.clear()
            content = self._content[payload] = np.frombuffer(self._reader.payload(payload), np.uint8)
        return content


def _is_small(meta: TensorMeta, most: int) -> bool:
    elements = 1
    for size in meta.sizes:
        elements *= size
    return meta.dtype in _NUMPY and meta.layout == Layout.strided and 0 < elements <= most and not meta.flags & _FLAGS


def _written_slots(reader: CaptureReader, layout: SlotLayout) -> tuple[list[int], list[int]]:
    signature = layout.signature
    if signature.kind is not RecordKind.op:
        return [], []
    kernel = reader.kernels[signature.kernel]
    try:
        arguments = parse_operator_schema(kernel.schema).arguments
        written = {argument.name for argument in arguments if argument.type.written}
    except ValueError:
        written = {node.name for node in signature.args}  # unknown
    places = [top for top in layout.args if top.node.name in written]
    storages = [place.int_slot for top in places for place in top.of_kind(ValueKind.storage)]
    return [slot for top in places for slot in top.tensors], storages


RUNS = {ValueKind.int: "integer", ValueKind.float: "float"}
REFERENCES = frozenset({ValueKind.storage, ValueKind.generator, ValueKind.payload, ValueKind.range, ValueKind.recipe})
# Kinds whose value is plain JSON; lists of one such kind hold these values themselves.
PLAIN = frozenset(ValueKind) - REFERENCES - {ValueKind.tensor, ValueKind.composite, ValueKind.list, ValueKind.tuple}
CODES: dict[ValueKind, Callable[[int], Any]] = {
    ValueKind.dtype: DType,
    ValueKind.layout: Layout,
    ValueKind.memory_format: MemoryFormat,
}

# Keys of a host_read or digest row that carries no digest: a capture may have been made without them.
DIGEST_KEYS = ("hash", "elements", "nan", "inf", "min", "max", "mean", "l2", "sample")
NO_DIGEST = "".join(f',"{key}":null' for key in DIGEST_KEYS)


class JsonLines(Dialect):
    def __init__(self, reader: CaptureReader, expander: Expander) -> None:
        super().__init__(reader, expander)
        self._devices = ["null", *(quote(str(device)) for device in reader.devices[1:])]
        self._device_of_meta = np.array([0 if meta is None else meta.device for meta in reader.metas], np.int64)

    def scope(self, number: int) -> str:
        return quote(scope_path(self.reader, number))

    def tensor(self, meta: TensorMeta) -> list[Piece]:
        # With only one device, every op and every storage names it already.
        after = f',"device":{self._devices[meta.device]}' if len(self._devices) > 2 else ""
        if meta.layout != Layout.strided:
            after += f',"layout":{quote(meta.layout.name)}'
        if meta.flags:
            after += f',"flags":{encode([flag.name for flag in TensorFlag if flag in meta.flags])}'
        return [
            '"tensor":',
            Slot("id"),
            ',"storage":',
            Slot("storage"),
            f',"dtype":{quote(meta.dtype.name)},"sizes":{encode(meta.sizes)},"strides":{encode(meta.strides)},"offset":',
            Slot("offset"),
            after,
        ]

    def numbers(self, column: np.ndarray) -> Numbers:
        return Numbers(column, quoted=True)

    ordinals = offsets = numbers

    def storages(self, column: np.ndarray) -> Column:
        return Numbers(column, quoted=True, null=0)

    def tensor_devices(self, frame: RecordFrame) -> Column:
        return Words(self._devices, self._device_of_meta[frame.tensor_meta][frame.tensor_slots])

    def float(self, value: float) -> str:
        return json_number(value)

    def device_durations(self, column: np.ndarray) -> Column:
        return Numbers(column, before=',"device_duration_ns":', null=UNKNOWN_DEVICE_NS)

    def annotation(self, number: int) -> str:
        return f',"annotation":{encode_fast(self.reader.annotation(number))}'

    def placement(self, streams: list[tuple[str, int]]) -> str:
        return f',"streams":{encode(dict(streams))}'

    def values(self, values: np.ndarray) -> str:
        return f',"value":{encode(values.tolist())}'

    def end(self, frame: RecordFrame) -> str:
        return f',"frame_offset":{integer(frame.offset)}}}\n'

    def template(self, signature: Signature) -> list[Piece]:
        if signature.kind == RecordKind.op:
            return self._op(signature)
        pieces: list[Piece] = [f'{{"kind":{quote(signature.kind.name)},"ordinal":', Slot("ordinal")]
        if signature.kind == RecordKind.global_state:
            pieces += [',"settings":{', *self._settings(signature), "}"]
        elif signature.kind == RecordKind.collective:
            pieces += self._values(SlotLayout(signature))
        else:
            pieces += self._fields(signature)
        pieces += [',"scope":', Slot("scope"), ',"thread":', Slot("thread"), ',"start_ns":', Slot("start")]
        return [*pieces, Slot("device_duration")] if signature.kind == RecordKind.unsupported else pieces

    def _op(self, signature: Signature) -> list[Piece]:
        kernel = self.reader.kernels[signature.kernel]
        layout = SlotLayout(signature)
        slot = device_slot(layout)
        return [
            '{"kind":"op","ordinal":',
            Slot("ordinal"),
            f',"op":{quote(kernel.name)},"overload":{quote(kernel.overload)},"kernel":{signature.kernel}',
            *(f',"writes":{encode(how)}' for how in self.writes(signature)),
            ',"scope":',
            Slot("scope"),
            ',"device":',
            "null" if slot is None else Slot("tensor_device", slot),
            ',"thread":',
            Slot("thread"),
            f',"status":{quote(signature.status.name)},"start_ns":',
            Slot("start"),
            ',"duration_ns":',
            Slot("duration"),
            Slot("device_duration"),
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
            return [head, Slot("tensor", place.tensor_slot), "}"]
        if node.kind in REFERENCES:
            return [head + f'"{node.kind.name}":', Slot("integer", place.int_slot), "}"]
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
            run = Slot("tensor", places[0].tensor_slot, len(places), '},{"type":"tensor",')
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
            return [Slot("integer", place.int_slot)]
        if node.kind == ValueKind.float:
            return [Slot("float", real)]
        if node.kind == ValueKind.complex:
            return ['{"real":', Slot("float", real), ',"imag":', Slot("float", real + 1), "}"]
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
                pieces += [',"hash":"', Slot("hash", place.int_slot), '"']
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


SHORT_DTYPES: dict[DType, str] = {
    **{getattr(DType, f"float{bits}"): f"f{bits}" for bits in (16, 32, 64)},
    **{getattr(DType, f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(DType, f"uint{bits}"): f"u{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(DType, f"complex{bits}"): f"c{bits}" for bits in (32, 64, 128)},
    DType.bfloat16: "bf16",
}
REFERENCE_WORDS = {
    ValueKind.storage: "storage ",
    ValueKind.generator: "generator ",
    ValueKind.payload: "payload ",
    ValueKind.range: "range ",
    ValueKind.recipe: "recipe ",
}
BRACKETS = {ValueKind.list: ("[", "]"), ValueKind.tuple: ("(", ")"), ValueKind.composite: ("(", ")")}
LEGEND = (
    "A record follows its ordinal; [name] is one that is not an op. %7 f32[4,8]{1,4}+2 is tensor 7: float32, its\n"
    "sizes, {strides} if it is not contiguous, +offset into its storage in elements, @device if there are several.\n\n"
)
SHOWN_FLAGS = (TensorFlag.conj, TensorFlag.neg, TensorFlag.zero)
SHOWN_ITEMS = 8  # of a list of plain values
SHOWN_OBJECTS = 3  # of a list that holds tensors or lists
SHOWN_CHARACTERS = 80
DEEPEST_INDENT = 16


def contiguous(meta: TensorMeta) -> bool:
    """Whether the strides are those of a row-major tensor without gaps."""
    expected = 1
    for size, stride in zip(reversed(meta.sizes), reversed(meta.strides), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class TextRows(Dialect):
    """Writes records as lines for people."""

    def __init__(self, reader: CaptureReader, expander: Expander) -> None:
        super().__init__(reader, expander)
        self._devices = ["", *(printable(str(device), SHOWN_CHARACTERS) for device in reader.devices[1:])]
        self._width = max(6, len(str(reader.record_count)))

    def scope(self, number: int) -> str:
        indent = ""
        while number and len(indent) < 2 * DEEPEST_INDENT:
            indent, number = indent + "  ", self.reader.scopes[number].parent
        return indent

    def numbers(self, column: np.ndarray) -> Numbers:
        return Numbers(column)

    storages = numbers

    def ordinals(self, column: np.ndarray) -> Column:
        return Words([f"{ordinal:>{self._width}}  " for ordinal in column.tolist()])

    def offsets(self, column: np.ndarray) -> Column:
        return Words([f"+{offset}" if offset else "" for offset in column.tolist()])

    def tensor_devices(self, frame: RecordFrame) -> Column:
        return constant("", len(frame.tensor_slots))

    def float(self, value: float) -> str:
        return str(value)

    def device_durations(self, column: np.ndarray) -> Column:
        return constant("", len(column))

    def annotation(self, number: int) -> str:
        said = self.reader.annotation(number) or {}
        text = "; ".join(f"{name}: {value}" for name, value in said.items())
        return f"  # {printable(text, SHOWN_CHARACTERS)}" if text else ""

    def placement(self, streams: list[tuple[str, int]]) -> str:
        return f"  on {', '.join(f'{printable(each, SHOWN_CHARACTERS)} stream {number}' for each, number in streams)}"

    def values(self, values: np.ndarray) -> str:
        return f"={_shown(values.tolist())}"

    def end(self, frame: RecordFrame) -> str:
        return "\n"

    def tensor(self, meta: TensorMeta) -> list[Piece]:
        text = f"{SHORT_DTYPES.get(meta.dtype, meta.dtype.name)}[{','.join(map(str, meta.sizes))}]"
        if meta.layout != Layout.strided:
            text += f":{meta.layout.name}"
        elif not contiguous(meta):
            text += f"{{{','.join(map(str, meta.strides))}}}"
        text += "".join(f":{flag.name}" for flag in SHOWN_FLAGS if flag in meta.flags)
        if len(self._devices) > 2:
            text += f"@{self._devices[meta.device]}"
        return ["%", Slot("id"), f" {text}", Slot("offset")]

    def template(self, signature: Signature) -> list[Piece]:
        layout = SlotLayout(signature)
        start: list[Piece] = [Slot("ordinal"), Slot("scope")]
        if signature.kind == RecordKind.op:
            return [*start, *self._op(layout)]
        if signature.kind in (RecordKind.scope_begin, RecordKind.scope_end):
            start[1] = Slot("enclosing")
        statistics = signature.kind in (RecordKind.host_read, RecordKind.digest)
        arguments: list[Piece] = []
        for place in layout.args:
            node = place.node
            if statistics and node.name == "nan":
                break  # the rest of a digest is for --format=jsonl
            if node.name == "hash_low":
                arguments += [", hash=", Slot("hash", place.int_slot)]
            elif node.name != "hash_high":  # shown with the other half
                # `storage 7` says by itself which argument it is.
                name = "" if node.kind in REFERENCE_WORDS else f"{printable(node.name, SHOWN_CHARACTERS)}="
                arguments += [", " * bool(arguments) + name, *self._value(place)]
        return [*start, f"[{signature.kind.name}] ", *arguments]

    def _op(self, layout: SlotLayout) -> list[Piece]:
        signature = layout.signature
        kernel = self.reader.kernels[signature.kernel]
        name = kernel.name if kernel.overload in ("", "default") else kernel.qualified_name
        pieces: list[Piece] = [printable(name, SHOWN_CHARACTERS), "("]
        for position, place in enumerate(layout.args):
            name = printable(place.node.name, SHOWN_CHARACTERS)
            pieces += [", " * (position > 0) + f"{name}=", *self._value(place)]
        how = "".join(f"  # writes: {each or 'not known how'}" for each in self.writes(signature))
        if signature.status == OpStatus.raised:
            return [*pieces, f") raised{how}"]
        pieces.append(") -> " if signature.results else ")")
        for position, place in enumerate(layout.results):
            pieces += [", " * (position > 0), *self._value(place)]
        return [*pieces, how]

    def _value(self, place: NodePlace) -> list[Piece]:
        node, tensor, integer, number, _children = place
        if node.kind in BRACKETS:
            return self._container(place)
        if node.kind == ValueKind.tensor:
            return [Slot("tensor", tensor)]
        if node.kind == ValueKind.int or node.kind in REFERENCE_WORDS:
            return [REFERENCE_WORDS.get(node.kind, ""), Slot("integer", integer)]
        if node.kind == ValueKind.float:
            return [Slot("float", number)]
        if node.kind == ValueKind.complex:
            return ["(", Slot("float", number), ", ", Slot("float", number + 1), "j)"]
        return [self._constant(node)]

    def _constant(self, node: Node) -> str:
        if node.kind == ValueKind.none:
            return "None"
        if node.kind == ValueKind.bool:
            return str(bool(node.constant))
        if node.kind == ValueKind.device:
            return self._devices[int(node.constant or 0)]
        if node.kind in CODES:
            return str(CODES[node.kind](int(node.constant or 0)).name)
        text = printable(str(node.constant), SHOWN_CHARACTERS)
        return f"'{text}'" if node.kind == ValueKind.string else f"<{node.kind.name} {text}>"

    def _container(self, place: NodePlace) -> list[Piece]:
        """A list, tuple or composite, cut after its first items."""
        node = place.node
        opening, closing = BRACKETS[node.kind]
        objects = any(child.kind == ValueKind.tensor or child.children for child in node.children)
        limit = SHOWN_OBJECTS if objects and node.kind != ValueKind.composite else SHOWN_ITEMS
        pieces: list[Piece] = [printable(str(node.constant)) if node.kind == ValueKind.composite else "", opening]
        for position, child in enumerate(place.children[:limit]):
            pieces += [", " * (position > 0), *self._value(child)]
        if len(node.children) > limit:
            pieces.append(f", … {len(node.children) - limit} more")
        return [*pieces, closing]


def _shown(values: Any) -> str:
    """Elements in brackets, each list cut after its first items."""
    if not isinstance(values, list):
        return str(values)
    more = f", … {len(values) - SHOWN_ITEMS} more" if len(values) > SHOWN_ITEMS else ""
    return f"[{', '.join(map(_shown, values[:SHOWN_ITEMS]))}{more}]"
