"""Where a record's slots are, compared with what reading it gives; and that nobody else lays them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import replayfmt
from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.model import CompositeValue, Signature, TensorValue
from replayfmt.format.reader import RecordFrame, open_capture
from replayfmt.format.signature_layout import ARGUMENTS, NodePlace, argument_nodes, flatten

GOLDEN = Path(__file__).parents[1] / "golden"
LIBRARY = Path(replayfmt.__file__).parent


def _values(place: NodePlace, value: object) -> list[tuple[NodePlace, object]]:
    if not place.children:
        return [(place, value)]
    inside = value.parts if isinstance(value, CompositeValue) else value
    assert isinstance(inside, list | tuple)
    return [pair for child, each in zip(place.children, inside, strict=True) for pair in _values(child, each)]


def _at(frame: RecordFrame, row: int, place: NodePlace, value: object) -> object:
    """What the frame's columns have at a place."""
    if place.constant:
        return value
    if isinstance(value, TensorValue):
        local = int(frame.tensor_slots[frame.tensor_first[row] + place.tensor_slot])
        return value if int(frame.tensor_id[local]) == value.id else None
    real = frame.float_first[row] + place.float_slot
    if place.node.kind is ValueKind.float:
        return frame.floats[real]
    if place.node.kind is ValueKind.complex:
        return complex(*frame.floats[real : real + 2])
    return int(frame.ints[frame.int_first[row] + place.int_slot])


def _same(one: object, other: object) -> bool:
    number = getattr(other, "id", other)
    return one is other or np.array_equal(np.asarray(one), np.asarray(number), equal_nan=True)


@pytest.mark.parametrize("name", ["everything-1.0", "reference-1.0", "step-1.0"])
def test_each_value_is_where_the_layout_of_its_signature_says(name: str) -> None:
    kinds = set()
    with open_capture(GOLDEN / f"{name}.opreplay") as reader:
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            for row in range(frame.count):
                record = reader.record(frame.first_ordinal + row)
                layout = reader.layouts[record.signature_id]
                firsts = (frame.tensor_first, frame.int_first, frame.float_first)
                assert layout.slots == tuple(int(first[row + 1] - first[row]) for first in firsts)
                places, values = (*layout.args, *layout.results), (*record.args, *record.results)
                for place, value in (pair for each in zip(places, values, strict=True) for pair in _values(*each)):
                    kinds.add(place.node.kind)
                    assert _same(_at(frame, row, place, value), value), (name, record.ordinal, place)
    assert {ValueKind.tensor, ValueKind.int} <= kinds


def test_the_arguments_of_a_record_kind_are_made_as_its_rule_asks() -> None:
    for kind, fixed in ARGUMENTS.items():
        digest = kind in (RecordKind.digest,)
        given = {name: sorted(kinds)[0] for name, kinds in fixed if len(kinds) > 1}
        texts = {name: f"a {name}" for name, kinds in fixed if ValueKind.string in kinds}
        nodes = argument_nodes(kind, **given, **texts)
        assert [node.name for node in nodes] == [name for name, _kinds in fixed]
        assert {node.name: node.constant for node in nodes if node.constant is not None} == texts
        if not digest and ValueKind.device not in {node.kind for node in nodes}:
            assert len(flatten(Signature(kind, nodes))) == len(fixed)
