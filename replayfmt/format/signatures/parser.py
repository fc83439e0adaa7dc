"""Reading a signature written by a user, from left to right, with the place of whatever is wrong with it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import NoReturn

from replayfmt.errors import UsageError

from ..codes import DType, Layout, MemoryFormat
from .values import (
    KERNEL,
    NOTED_FLAGS,
    TYPES,
    DeviceText,
    Items,
    Number,
    Open,
    SignatureText,
    TensorText,
    Text,
    ValueText,
    Word,
)

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
                return Open()
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
            if runs and runs[-1][0] == value:
                runs[-1] = (value, runs[-1][1] + count)
            else:
                runs.append((value, count))
        self._next += 1
        return tuple(runs)

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
                tensor = replace(tensor, strides=Open())
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
