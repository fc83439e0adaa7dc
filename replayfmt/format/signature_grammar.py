"""The text form of signatures (docs/signatures.md): its parts as plain values that print themselves, and its parser.

The parser reads what a user wrote from left to right and names the place of whatever is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from replayfmt.errors import UsageError

from .codes import DType, Layout, MemoryFormat, TensorFlag, ValueKind

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
class AnyValue:
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
    device: str

    def __str__(self) -> str:
        return device_text(self.device)


@dataclass(frozen=True)
class TensorText:
    """A tensor. Sizes may be None for any; strides are None if row-major, Open for any. `device` "": any."""

    dtype: str
    sizes: tuple[int | None, ...]
    strides: tuple[int, ...] | AnyValue | None = None
    notes: tuple[str, ...] = ()
    device: str = ""

    def __str__(self) -> str:
        sizes = ",".join("*" if size is None else str(size) for size in self.sizes)
        strides = (
            ""
            if self.strides is None
            else ("{*}" if isinstance(self.strides, AnyValue) else f"{{{','.join(map(str, self.strides))}}}")
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


ValueText = AnyValue | Word | Number | Text | DeviceText | TensorText | Items


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
    return Items(value.form, _runs((_type_alone(inner), count) for inner, count in value.runs))


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
    return _runs((value, 1) for value in values)


def _runs(counted: Iterable[tuple[ValueText, int]]) -> tuple[tuple[ValueText, int], ...]:
    runs: list[tuple[ValueText, int]] = []
    for value, count in counted:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + count)
        else:
            runs.append((value, count))
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


_LONGEST = 1 << 20
_DEEPEST = 64
_TOKEN = re.compile(
    r"""
    (?P<space>\s+) | (?P<string>"(?:[^"\\]|\\.)*") | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>-?(?:inf|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)) | (?P<mark>[][(){},:@*])
""",
    re.VERBOSE,
)
_DTYPES = {dtype.name for dtype in DType if dtype}
_TENSOR_NOTES = [
    *(str(flag.name) for flag in NOTED_FLAGS),
    *(layout.name for layout in Layout if layout > Layout.strided),
]
_WORDS = (
    {"None", "True", "False", *TYPES.values()}
    | _DTYPES
    | {layout.name for layout in Layout if layout}
    | {memory_format.name for memory_format in MemoryFormat if memory_format}
)


class Parser:
    """Reads one signature from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        self._next = 0
        if len(text) > _LONGEST:
            raise UsageError(f"a signature of {len(text)} characters; expected at most {_LONGEST}")

    def _fail(self, expected: str, position: int | None = None) -> NoReturn:
        if position is None:
            position = self._tokens[self._next][2]
        shown = self._text if len(self._text) < 200 else self._text[:197] + "..."
        found = self._text[position : position + 20]
        raise UsageError(
            f"{shown!r} is not a signature: expected {expected} at character {position + 1}, "
            f"found {found!r}; opreplay-dump --signatures prints those of a capture"
            if found
            else f"{shown!r} is not a signature: expected {expected} at its end; "
            "opreplay-dump --signatures prints those of a capture"
        )

    def signature(self) -> SignatureText:
        kernel, start = self._kernel()
        self._tokenize(start)
        self._take("(")
        arguments: list[tuple[str, ValueText]] = []
        if not self._is(")"):
            arguments.append(self._argument())
            while self._is(","):
                self._next += 1
                arguments.append(self._argument())
        self._take(")")
        if self._tokens[self._next][0] != "end":
            self._fail("nothing more")
        return SignatureText(kernel, tuple(arguments))

    def _kernel(self) -> tuple[str, int]:
        """The kernel's name, and where the arguments begin."""
        begin = len(self._text) - len(self._text.lstrip())
        quoted = _TOKEN.match(self._text, begin)
        if quoted is not None and quoted.lastgroup == "string":
            return self._string(quoted[0], begin), quoted.end()
        name, parenthesis, _rest = self._text.partition("(")
        if not parenthesis:
            self._fail(
                "a kernel and its arguments in parentheses, like 'aten::mm.default(float32[2,3], float32[3,2])'",
                len(self._text),
            )
        if not KERNEL.match(name.strip()):
            self._fail("a kernel with its overload, like 'aten::mm.default'", begin)
        return name.strip(), len(name)

    def _tokenize(self, position: int) -> None:
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                self._fail("a value", position)
            kind = str(found.lastgroup)
            if kind != "space":
                self._tokens.append((found[0] if kind == "mark" else kind, found[0], position))
            position = found.end()
        self._tokens.append(("end", "", len(self._text)))

    def _is(self, kind: str) -> bool:
        return self._tokens[self._next][0] == kind

    def _take(self, kind: str) -> str:
        if not self._is(kind):
            self._fail(repr(kind) if len(kind) == 1 else f"a {kind}")
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _string(self, token: str, position: int) -> str:
        try:
            return str(json.loads(token))
        except ValueError:
            self._fail("a string as JSON writes it", position)

    def _argument(self) -> tuple[str, ValueText]:
        name = ""
        kind, text, position = self._tokens[self._next]
        if kind in ("word", "string") and self._tokens[self._next + 1][0] == ":":
            name = text if kind == "word" else self._string(text, position)
            self._next += 2
        return name, self._value(1)

    def _value(self, depth: int) -> ValueText:
        kind, text, position = self._tokens[self._next]
        if depth > _DEEPEST:
            self._fail(f"at most {_DEEPEST} brackets inside one another")
        self._next += 1
        match kind:
            case "*":
                return AnyValue()
            case "[":
                return Items("[", self._runs("]", depth))
            case "(":
                return Items("(", self._runs(")", depth))
            case "@":
                return DeviceText(self._device())
            case "string":
                return Text(self._string(text, position))
            case "number":
                return self._number(text, position)
            case "word":
                return self._word(text, depth)
        self._next -= 1
        self._fail("a value")

    def _number(self, text: str, position: int) -> Number:
        if not text.lstrip("-").isdecimal():
            return Number(repr(float(text)))
        if len(text) > 20:
            self._fail("a number of 64 bits", position)
        return Number(repr(int(text)))

    def _word(self, word: str, depth: int) -> ValueText:
        if self._is("["):
            if word not in _DTYPES:
                self._next -= 1
                self._fail("a dtype, like float32")
            return self._tensor(word)
        if self._is("("):
            self._next += 1
            if word in ("opaque", "process_group", "composite"):
                text = self._string(self._take("string"), self._tokens[self._next - 1][2])
                if word != "composite":
                    self._take(")")
                    return Text(text, word)
                if self._is(","):
                    self._next += 1
                    if self._is(")"):
                        self._fail("a value")
                elif not self._is(")"):
                    self._fail("','")
                word = text
            return Items(word, self._runs(")", depth))
        if word in ("nan", "inf"):
            return Number(word)
        if word not in _WORDS:
            self._next -= 1
            self._fail("a value")
        return Word(word)

    def _runs(self, closing: str, depth: int) -> tuple[tuple[ValueText, int], ...]:
        runs: list[tuple[ValueText, int]] = []
        while not self._is(closing):
            if runs:
                self._take(",")
            value, count = self._value(depth + 1), 1
            if self._is("word") and self._tokens[self._next][1] == "x":
                self._next += 1
                count = self._size(least=1)
            runs.append((value, count))
        self._next += 1
        return _runs(runs)

    def _size(self, *, least: int = 0) -> int:
        text = self._tokens[self._next][1]
        if not self._is("number") or not text.isdecimal() or len(text) > 19 or not least <= int(text):
            self._fail("a whole number" + (" from 1" if least else ""))
        self._next += 1
        return int(text)

    def _sizes(self, closing: str) -> tuple[int | None, ...]:
        sizes: list[int | None] = []
        while not self._is(closing):
            if sizes:
                self._take(",")
            if self._is("*"):
                self._next += 1
                sizes.append(None)
            else:
                sizes.append(self._size())
        self._next += 1
        return tuple(sizes)

    def _tensor(self, dtype: str) -> TensorText:
        self._take("[")
        sizes = self._sizes("]")
        tensor = TensorText(dtype, sizes)
        if self._is("{"):
            position = self._next
            self._next += 1
            strides = self._sizes("}")
            if strides == (None,):
                tensor = replace(tensor, strides=AnyValue())
            elif None in strides or len(strides) != len(sizes):
                self._next = position
                self._fail(f"{len(sizes)} strides, or {{*}}")
            else:
                tensor = replace(tensor, strides=tuple(stride for stride in strides if stride is not None))
        while self._is(":"):
            self._next += 1
            if not self._is("word") or self._tokens[self._next][1] not in _TENSOR_NOTES:
                self._fail(f"one of {', '.join(_TENSOR_NOTES)}")
            tensor = replace(tensor, notes=(*tensor.notes, self._take("word")))
        if self._is("@"):
            self._next += 1
            tensor = replace(tensor, device=self._device())
        return tensor

    def _device(self) -> str:
        if self._is("string"):
            position = self._tokens[self._next][2]
            return self._string(self._take("string"), position)
        kind = self._take("word")
        if not self._is(":"):
            return kind
        self._next += 1
        return f"{kind}:{self._size()}"
