"""Records as text for people: one line each, the ordinals aligned, indented by scope.

    12    aten::addmm(self=%31 f32[64], mat1=%32 f32[16,64], mat2=%33 f32[64,64]{1,64}) -> %40 f32[16,64]

LEGEND explains the notation to the reader of a dump. Long lists are cut short. Nothing of a capture reaches the
terminal unescaped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from replayfmt.format.codes import DType, Layout, OpStatus, RecordKind, TensorFlag, ValueKind
from replayfmt.format.model import Node, Signature, TensorMeta
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.slots import NodePlace, SlotLayout

from .jsonl import CODES
from .row_templates import Hole, Piece, Slot
from .values import Columns, Dialect, Made

SHORT_DTYPES: dict[DType, str] = {
    **{getattr(DType, f"float{bits}"): f"f{bits}" for bits in (16, 32, 64)},
    **{getattr(DType, f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(DType, f"uint{bits}"): f"u{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(DType, f"complex{bits}"): f"c{bits}" for bits in (32, 64, 128)},
    DType.bfloat16: "bf16",
}
REFERENCES = {
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

    def __init__(self, reader: CaptureReader) -> None:
        super().__init__(reader)
        self._devices = ["", *(printable(str(device), SHOWN_CHARACTERS) for device in reader.devices[1:])]
        self._metas = Made(lambda number: self._meta(reader.metas[number]))
        self._width = max(6, len(str(reader.record_count)))

    def scope(self, number: int) -> str:
        indent = ""
        while number and len(indent) < 2 * DEEPEST_INDENT:
            indent, number = indent + "  ", self.reader.scopes[number].parent
        return indent

    def columns(self, frame: RecordFrame) -> Columns:
        metas = frame.tensor_meta.tolist()
        longest = max(map(len, self._metas.of(list(set(metas)))), default=0)
        self.check_room(frame, longest * len(metas), "the tensors")
        tensors = [
            f"%{tensor} {meta}{f'+{offset}' if offset else ''}"
            for tensor, meta, offset in zip(
                frame.tensor_id.tolist(), self._metas.of(metas), frame.tensor_offset.tolist(), strict=True
            )
        ]
        slots, ints = frame.tensor_slots.tolist(), frame.ints.tolist()
        return Columns(
            T=list(map(tensors.__getitem__, slots)),
            I=ints,
            F=frame.floats.tolist(),
            R=ints,
            L=slots,
            D=[""] * len(tensors),
        )

    def integers(self, column: np.ndarray) -> list[Any]:
        return column.tolist()

    def device_durations(self, column: np.ndarray) -> list[str]:
        return [""] * len(column)

    def annotations(self, ids: list[int]) -> list[str]:
        known = {number: "" for number in set(ids)}
        for number in known:
            said = self.reader.annotation(number) or {}
            text = "; ".join(f"{name}: {value}" for name, value in said.items())
            known[number] = f"  # {printable(text, SHOWN_CHARACTERS)}" if text else ""
        return [known[number] for number in ids]

    def placement(self, streams: list[tuple[str, int]]) -> str:
        return f"  on {', '.join(f'{printable(each, SHOWN_CHARACTERS)} stream {number}' for each, number in streams)}"

    def values(self, values: np.ndarray) -> str:
        return f"={_shown(values.tolist())}"

    def ordinals(self, ordinals: list[int]) -> list[Any]:
        return [f"{ordinal:>{self._width}}  " for ordinal in ordinals]

    def tail(self, frame: RecordFrame) -> str:
        return "\n"

    def _meta(self, meta: TensorMeta) -> str:
        text = f"{SHORT_DTYPES.get(meta.dtype, meta.dtype.name)}[{','.join(map(str, meta.sizes))}]"
        if meta.layout != Layout.strided:
            text += f":{meta.layout.name}"
        elif not contiguous(meta):
            text += f"{{{','.join(map(str, meta.strides))}}}"
        text += "".join(f":{flag.name}" for flag in SHOWN_FLAGS if flag in meta.flags)
        return text if len(self._devices) <= 2 else f"{text}@{self._devices[meta.device]}"

    # ----------------------------------------------------------------------------------------------------- templates

    def template(self, signature: Signature) -> list[Piece]:
        layout = SlotLayout(signature)
        start: list[Piece] = [Slot(Hole.ordinal), Slot(Hole.scope)]
        if signature.kind == RecordKind.op:
            return [*start, *self._op(layout)]
        if signature.kind in (RecordKind.scope_begin, RecordKind.scope_end):
            start[1] = Slot(Hole.enclosing_indent)
        statistics = signature.kind in (RecordKind.host_read, RecordKind.digest)
        arguments: list[Piece] = []
        for place in layout.args:
            node = place.node
            if statistics and node.name == "nan":
                break  # the rest of a digest is for --format=jsonl
            if node.name == "hash_low":
                arguments += [", hash=", Slot(Hole.hash, place.int_slot)]
            elif node.name != "hash_high":  # shown with the other half
                # `storage 7` says by itself which argument it is.
                name = "" if node.kind in REFERENCES else f"{printable(node.name, SHOWN_CHARACTERS)}="
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
            return [Slot(Hole.tensor, tensor)]
        if node.kind == ValueKind.int or node.kind in REFERENCES:
            return [REFERENCES.get(node.kind, ""), Slot(Hole.integer, integer)]
        if node.kind == ValueKind.float:
            return [Slot(Hole.number, number)]
        if node.kind == ValueKind.complex:
            return ["(", Slot(Hole.number, number), ", ", Slot(Hole.number, number + 1), "j)"]
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
