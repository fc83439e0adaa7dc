"""A node of an execution trace that lacks what it needs is passed over, and told in words."""

import pytest

from replayfmt.importers.execution_trace.nodes import node_of

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
