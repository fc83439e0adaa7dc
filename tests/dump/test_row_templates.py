"""Templates become functions; the text in them never becomes code."""

from __future__ import annotations

from typing import Any

import pytest

from replayfmt.dump import row_templates
from replayfmt.dump.row_templates import PARAMETERS, PIECES_PER_FUNCTION, Hole, Slot, row_function

from .captures import HOSTILE

RECORD: dict[str, Any] = {
    "o": 12,
    "s": '"execute"',
    "h": 0,
    "n": 81234,
    "d": 17,
    "g": "",
    "t": 1,
    "i": 2,
    "f": 0,
    "T": ["T0", "T1", "T2", "T3"],
    "I": [10, 11, 12, '"big"'],
    "F": [0.5, '"NaN"'],
    "R": [10, 11, 12, -1],
    "L": [0, 1, 0, 1],
    "D": ["cpu", "cuda"],
}


def fill(*pieces: row_templates.Piece) -> str:
    return row_function(pieces)(*(RECORD[name] for name in PARAMETERS))


def test_a_hole_shows_the_record_that_the_function_is_called_for() -> None:
    assert fill("a", Slot(Hole.ordinal), ",", Slot(Hole.scope), Slot(Hole.tensor, 2), "b") == 'a12,"execute"T3b'
    assert fill(Slot(Hole.integer), Slot(Hole.integer, 1), Slot(Hole.number, 1)) == '12"big""NaN"'
    assert (
        fill(Slot(Hole.tensors, 0, 3, "+"), "|", Slot(Hole.integers, 0, 2, ","), "|", Slot(Hole.numbers, 0, 2, ";"))
        == 'T1+T2+T3|12,"big"|0.5;"NaN"'
    )
    assert fill(Slot(Hole.tensor_device, 0), Slot(Hole.tensor_device, 1)) == "cudacpu"
    assert fill(Slot(Hole.hash, 0)) == f"{2**64 - 1:016x}{12:016x}"


def test_a_template_without_text_or_without_holes_is_a_row_too() -> None:
    assert fill("only text") == "only text"
    assert fill(Slot(Hole.thread)) == "0"
    assert fill("", "a", "", "b") == "ab"


@pytest.mark.parametrize("text", HOSTILE)
def test_text_in_a_template_is_never_code(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        row_templates, "compile", lambda source, *rest: compiled.append(source) or compile(source, *rest), raising=False
    )
    row_templates._factory.cache_clear()
    filled = fill(text, Slot(Hole.ordinal), text, Slot(Hole.tensors, 0, 2, text), text)
    assert filled == f"{text}12{text}T1{text}T2{text}"
    assert compiled and all(source.isascii() and "import" not in source and "__" not in source for source in compiled)
    # The same arrangement with other texts needs no other code.
    assert fill("x", Slot(Hole.ordinal), "y", Slot(Hole.tensors, 0, 2, "z"), text) == f"x12yT1zT2{text}"
    assert len(compiled) == 1


def test_a_template_of_any_length_works() -> None:
    pieces = [piece for number in range(5 * PIECES_PER_FUNCTION) for piece in (f" {number}:", Slot(Hole.integer, 1))]
    assert fill(*pieces) == "".join(f' {number}:"big"' for number in range(5 * PIECES_PER_FUNCTION))
