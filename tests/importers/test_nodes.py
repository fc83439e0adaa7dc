"""A node of an execution trace that lacks what it needs is passed over, and told in words."""

import pytest

from replayfmt.importers.execution_trace.nodes import as_traced, node_of

NODE = {
    "id": 3,
    "name": "aten::mm",
    "ctrl_deps": 2,
    "inputs": {"values": [], "shapes": [], "types": []},
    "outputs": {"values": [], "shapes": [], "types": []},
    "attrs": [],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs": None}, "its inputs are not an object"),
        ({"outputs": [1]}, "its outputs are not an object"),
        ({"attrs": None}, "a field of it has a value of another type"),
        ({"attrs": ["x"]}, "a field of it has a value of another type"),
        ({"id": "x"}, "a field of it has a value of another type"),
        ({"inputs": {"values": 3}}, "a field of it|it has no"),
    ],
)
def test_a_field_of_another_type_is_told_in_words(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        node_of({**NODE, **changes})
    assert "Error" not in str(caught.value)


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="it has no 'ctrl_deps'"):
        node_of({name: value for name, value in NODE.items() if name != "ctrl_deps"})


def test_a_field_of_another_type_beside_a_missing_one_is_told_too() -> None:
    with pytest.raises(ValueError, match="its outputs are not an object"):
        node_of({name: value for name, value in NODE.items() if name != "outputs"} | {"id": "x"})


def test_tensors_are_read_wherever_they_stand_and_what_is_none_stays_as_it_was() -> None:
    one, undefined, wrong = [1, 2, 0, 4, 4, "cpu"], [0, 0, 0, 0, 0, ""], [True, 2, 0, 4, 4, "cpu"]
    values = [one, [one, undefined, None], wrong, [1, 2], "x"]
    shapes = [[4], [[4], [0], []], [4], [[], []], []]
    types = [
        "Tensor(float)",
        "GenericList[Tensor(float),Tensor(nullptr),None]",
        "Tensor(float)",
        "GenericList[Int,Int]",
        "String",
    ]
    group = {"values": values, "shapes": shapes, "types": types}
    node = node_of(
        {"id": 3, "name": "f", "ctrl_deps": 2, "inputs": group, "outputs": {**group, "strides": shapes}, "attrs": []}
    )
    assert [position for position, _tensor in node.inputs.tensors] == [0, 1]
    assert {(tensor.id, tensor.sizes, tensor.strides) for _position, tensor in node.inputs.tensors} == {(1, (4,), None)}
    assert node.inputs.values[2:] == values[2:]
    assert as_traced(node.inputs.values) == values
    assert (node.inputs.strided, node.outputs.strided) == (False, True)
    assert node.outputs.tensors[0][1].strides == (4,)
