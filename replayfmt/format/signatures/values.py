"""The parts of a signature as text: plain values that print themselves. The grammar is in docs/signatures.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..codes import TensorFlag, ValueKind

KERNEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*::[A-Za-z0-9_]+\.[A-Za-z0-9_]+\Z")
# Properties of a tensor's memory that are written behind it, and the words for values that a signature leaves open.
NOTED_FLAGS = (TensorFlag.conj, TensorFlag.neg, TensorFlag.zero)
TYPES = {
    ValueKind.int: "int",
    ValueKind.float: "float",
    ValueKind.complex: "complex",
    **{
        kind: kind.name
        for kind in (ValueKind.storage, ValueKind.generator, ValueKind.payload, ValueKind.range, ValueKind.recipe)
    },
}
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Open:
    """`*`: any one value."""

    def __str__(self) -> str:
        return "*"


@dataclass(frozen=True)
class Word:
    """`None`, `True`, a dtype, a memory format, or the type of a value that a signature leaves open: `int`."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Number:
    """Exactly this int or float, as Python writes it."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def type(self) -> str:
        return "int" if self.text.lstrip("-").isdecimal() else "float"


@dataclass(frozen=True)
class Text:
    """A string, or what could only be captured as a description: `of` is "", "opaque" or "process_group"."""

    text: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.of}({quoted(self.text)})" if self.of else quoted(self.text)


@dataclass(frozen=True)
class DeviceText:
    """A device as an argument."""

    device: str

    def __str__(self) -> str:
        return device_text(self.device)


@dataclass(frozen=True)
class TensorText:
    """A tensor. Sizes may be None for any; strides are None if row-major, Open for any. `device` "": any."""

    dtype: str
    sizes: tuple[int | None, ...]
    strides: tuple[int, ...] | Open | None = None
    notes: tuple[str, ...] = ()
    device: str = ""

    def __str__(self) -> str:
        sizes = ",".join("*" if size is None else str(size) for size in self.sizes)
        strides = (
            ""
            if self.strides is None
            else ("{*}" if isinstance(self.strides, Open) else f"{{{','.join(map(str, self.strides))}}}")
        )
        notes = "".join(f":{note}" for note in self.notes)
        return f"{self.dtype}[{sizes}]{strides}{notes}{device_text(self.device) if self.device else ''}"


@dataclass(frozen=True)
class Items:
    """A list (`form` "["), a tuple ("("), or a tensor made of parts (its form). `runs`: values, each with how often."""

    form: str
    runs: tuple[tuple[ValueText, int], ...]

    def __str__(self) -> str:
        inside = ", ".join(f"{value} x {count}" if count > 1 else str(value) for value, count in self.runs)
        if self.form == "[":
            return f"[{inside}]"
        if self.form == "(":
            return f"({inside})"
        if WORD.match(self.form) and self.form not in ("opaque", "process_group", "composite"):
            return f"{self.form}({inside})"
        return f"composite({quoted(self.form)}{', ' if inside else ''}{inside})"


ValueText = Open | Word | Number | Text | DeviceText | TensorText | Items


@dataclass(frozen=True)
class SignatureText:
    """A signature. `arguments` are (name, value); the name is "" where the place says which argument it is."""

    kernel: str
    arguments: tuple[tuple[str, ValueText], ...]

    def __str__(self) -> str:
        kernel = self.kernel if KERNEL.match(self.kernel) else quoted(self.kernel)
        written = [
            f"{name if WORD.match(name) else quoted(name)}: {value}" if name else str(value)
            for name, value in self.arguments
        ]
        return f"{kernel}({', '.join(written)})"

    @property
    def asks_for_values(self) -> bool:
        """Whether calls of one signature may differ in whether they match: where a number stands for itself."""
        return any(isinstance(value, Number) for _name, top in self.arguments for value in _nested_values(top))


def _nested_values(value: ValueText) -> Iterator[ValueText]:
    yield value
    if isinstance(value, Items):
        for inner, _count in value.runs:
            yield from _nested_values(inner)


def without_values(signature: SignatureText) -> SignatureText:
    """The same signature with the types of numbers in their place, which calls with other numbers have, too."""
    return SignatureText(signature.kernel, tuple((name, _type_alone(value)) for name, value in signature.arguments))


def _type_alone(value: ValueText) -> ValueText:
    if isinstance(value, Number):
        return Word(value.type)
    if not isinstance(value, Items):
        return value
    # Neighbours that differ in their numbers alone are equal now.
    runs: list[tuple[ValueText, int]] = []
    for each, count in ((_type_alone(inner), count) for inner, count in value.runs):
        if runs and runs[-1][0] == each:
            runs[-1] = (each, runs[-1][1] + count)
        else:
            runs.append((each, count))
    return Items(value.form, tuple(runs))


def quoted(text: str) -> str:
    """As JSON writes it, without an equals sign."""
    return json.dumps(text).replace("=", "\\u003d")


def device_text(device: str) -> str:
    """A device with its mark, quoted where its name is none that PyTorch would give."""
    kind, colon, index = device.partition(":")
    plain = WORD.match(kind) and (index.isdecimal() and index.isascii() if colon else True)
    return f"@{device}" if plain else f"@{quoted(device)}"


def runs_of(values: Iterable[ValueText]) -> tuple[tuple[ValueText, int], ...]:
    """Neighbours that are equal, counted."""
    runs: list[tuple[ValueText, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return tuple(runs)


def row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides are those of a row-major tensor without gaps; those of no elements always are."""
    if 0 in sizes:
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
