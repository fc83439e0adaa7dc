"""Turns a row's template into a fast function. A template is text with holes; a hole says what is shown there.

Millions of records share a few hundred signatures, so what differs between two rows of one signature is only what
fills the holes. Each *arrangement* of holes is compiled once, into an f-string. The text between the holes is passed to
that code as values: nothing from a capture is ever compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

# The parameters of a row function, in this order. Single letters are this record's own values: ordinal, scope, thread,
# start, duration, device duration, then the first slot it has in the columns tensors, ints and floats. Capitals are the
# frame's columns: a fragment for each tensor slot, ints and floats as the output writes them, the ints as numbers, the
# row of the frame's tensor table for each tensor slot, and the device of each row of that table.
PARAMETERS = ("o", "s", "h", "n", "d", "g", "t", "i", "f", "T", "I", "F", "R", "L", "D")

RowFunction = Callable[..., str]


class Hole(Enum):
    """What a hole shows. The value is the code that reads it; `{k}` and `{end}` are slot numbers."""

    ordinal = "o"
    scope = "s"
    enclosing_indent = "s[2:]"
    thread = "h"
    start = "n"
    duration = "d"
    device_duration = "g"
    tensor = "T[t+{k}]"
    integer = "I[i+{k}]"
    number = "F[f+{k}]"
    tensor_device = "D[L[t+{k}]]"
    hash = "hexadecimal(R[i+{k}],R[i+{k}+1])"
    tensors = "T[t+{k}:t+{end}]"
    integers = "map(str,I[i+{k}:i+{end}])"
    numbers = "map(str,F[f+{k}:f+{end}])"


@dataclass(frozen=True, slots=True)
class Slot:
    """A hole. `first` counts from the record's first slot; `separator` joins the `count` slots of a run."""

    hole: Hole
    first: int = 0
    count: int = 1
    separator: str | None = None


Piece = str | Slot

# Longer templates are compiled in parts: the cost of compiling grows with the length of one expression.
PIECES_PER_FUNCTION = 256


def hexadecimal(low: int, high: int) -> str:
    """A 128-bit hash from its halves, which may be negative (two's complement), as 32 hexadecimal digits."""
    return f"{high & 0xFFFFFFFFFFFFFFFF:016x}{low & 0xFFFFFFFFFFFFFFFF:016x}"


def row_function(pieces: Iterable[Piece]) -> RowFunction:
    """The function that fills a template; its parameters are PARAMETERS. Owns nothing of the frames it is used on."""
    merged = _merge(pieces)
    starts = range(0, len(merged), PIECES_PER_FUNCTION)
    parts = [_compile(merged[start : start + PIECES_PER_FUNCTION]) for start in starts]
    if len(parts) == 1:
        return parts[0]
    return lambda *values: "".join([part(*values) for part in parts])


def _merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring texts and leave out empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        elif piece != "":
            merged.append(piece)
    return merged


def _compile(pieces: Sequence[Piece]) -> RowFunction:
    """Bind the texts of a template to the code of its arrangement."""
    texts: list[str] = []
    expressions: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            expressions.append(f"k{len(texts)}")
            texts.append(piece)
            continue
        first, end = int(piece.first), int(piece.first) + int(piece.count)
        expression = piece.hole.value.format(k=first, end=end)
        if piece.separator is not None:
            expression = f"k{len(texts)}.join({expression})"
            texts.append(piece.separator)
        expressions.append(expression)
    return _factory(tuple(expressions), len(texts))(*texts)


@lru_cache(maxsize=4096)
def _factory(expressions: tuple[str, ...], texts: int) -> Callable[..., RowFunction]:
    """Code for one arrangement: a function from the texts to the row function. `expressions` come from Hole alone."""
    constants = ",".join(f"k{number}" for number in range(texts))
    body = "".join(f"{{{expression}}}" for expression in expressions)
    source = f"lambda {constants}: lambda {','.join(PARAMETERS)}: f'{body}'"
    factory: Callable[..., Any] = eval(
        compile(source, "<row>", "eval"), {"hexadecimal": hexadecimal, "__builtins__": {"map": map, "str": str}}
    )
    return factory
