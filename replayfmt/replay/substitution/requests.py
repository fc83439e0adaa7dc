"""What a substitution asks for, parsed from `SELECTOR[@FORMAT]=PATH[:NAME]`. Nothing is loaded or looked up here.

The first equals sign ends the selector: none of the four kinds of selector contains one. PATH is the longest prefix of
the rest that is a file, so that a path may contain colons, at signs and equals signs; NAME is what follows the next
colon. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from replayfmt.errors import UsageError
from replayfmt.format.signature_grammar import Parser, SignatureText
from replayfmt.format.validation import text_of

FLAG = "--replay-kernel-substitution"
FORM = "SELECTOR[@FORMAT]=PATH[:NAME]"
Format = Literal["python", "torch-library", "triton", "cubin"]
FORMATS: tuple[Format, ...] = ("python", "torch-library", "triton", "cubin")
ALL = "all"
_ANY = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"

_LIBRARY_ENDINGS = (".so", ".dylib", ".dll", ".pyd")
_OPERATOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)?\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)?)?\Z")


@dataclass(frozen=True)
class Selector:
    """Which calls: exactly one of these fields is set. `text` is how the user wrote it."""

    text: str
    kernel_id: int | None = None
    operator: str | None = None  # aten::mm, or aten::mm.default for one overload
    signature: SignatureText | None = None
    everything: bool = False


@dataclass(frozen=True)
class SubstitutionRequest:
    """One requested substitution, by a file or by a function. `told` is the prefix of error messages about it."""

    selector: Selector
    told: str
    path: str = ""
    name: str = ""
    format: Format | None = None
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Substitution:
    """A Python function in place of the kernels that `selector` (as on the command line) selects."""

    selector: str
    function: Callable[..., Any]

    def request(self) -> SubstitutionRequest:
        """The request. Raises UsageError if the selector is invalid or the function cannot be called."""
        told = f"Substitution({text_of('selector', self.selector)!r})"
        if not callable(self.function):
            raise UsageError(f"{told}: expected a function, got {type(self.function).__name__}")
        name = getattr(self.function, "__name__", "function")
        return SubstitutionRequest(parse_selector(self.selector, told), told, name=name, function=self.function)


def parse_request(text: str) -> SubstitutionRequest:
    """Parse a substitution from the command line. Raises UsageError that says what is missing or wrong."""
    told = f"{FLAG}={text}"
    left, equals, right = text.partition("=")
    if not equals:
        raise UsageError(f"{told}: expected {FORM}")
    selector, form = _split_format(left, told)
    parsed = parse_selector(selector, told)
    if not right:
        raise UsageError(f"{told}: the path is empty; expected {FORM}")
    path, name = split_path(right)
    if not path:
        raise UsageError(f"{told}: the path is empty; expected {FORM}")
    if name is not None and not _NAME.match(name):
        raise UsageError(
            f"{told}: {name!r} is neither a function's nor an operator's name; expected PATH:NAME with a "
            "name like mm, or mine::mm for a torch-library"
        )
    return SubstitutionRequest(parsed, told, path, name or "", form or infer_format(path, name or "", told))


def parse_selector(text: str, told: str) -> Selector:
    """Parse a kernel id, an operator's name, a signature, or `all`. Raises UsageError."""
    text = text.strip()
    if not text:
        raise UsageError(
            f"{told}: the selector is empty; expected a kernel id, an operator like aten::mm or "
            "aten::mm.default, a signature, or all"
        )
    if text == ALL:
        return Selector(text, everything=True)
    if "(" in text:
        return Selector(text, signature=Parser(text).signature())
    if re.fullmatch(r"[+-]?[0-9]+", text):
        if not text.isdecimal() or not 0 < int(text) < 2**32:
            raise UsageError(f"{told}: kernel id {text}: ids count from 1; opreplay-dump shows those of a capture")
        return Selector(text, kernel_id=int(text))
    if not _OPERATOR.match(text):
        raise UsageError(
            f"{told}: {text!r} is not a selector; expected a kernel id, an operator like aten::mm or "
            "aten::mm.default, a signature like 'aten::mm.default(float32[2,3], *)', or all"
        )
    return Selector(text, operator=text)


def _split_format(left: str, told: str) -> tuple[str, Format | None]:
    """The selector and the format after it. A signature contains at signs, all before its last parenthesis."""
    end = left.rfind(")") + 1
    head, at, form = left[end:].partition("@")
    if not at:
        return left, None
    if not form:
        raise UsageError(f"{told}: the format is empty; expected {_ANY} after the @")
    for known in FORMATS:
        if form == known:
            return left[:end] + head, known
    raise UsageError(f"{told}: {form!r} is not a format; expected {_ANY}")


def split_path(text: str) -> tuple[str, str | None]:
    """PATH and NAME of `PATH[:NAME]`: the longest prefix that is a file, else up to the last possible name.

    NAME is None if none was given.
    """
    if os.path.exists(text):
        return text, None
    for position in range(len(text) - 1, -1, -1):
        if text[position] == ":" and os.path.isfile(text[:position]):
            return text[:position], text[position + 1 :]
    # Not a file: split where a name could begin, so that the error can say which file was meant.
    for position, character in enumerate(text):
        if character == ":" and (_NAME.match(text[position + 1 :]) or position == len(text) - 1):
            return text[:position], text[position + 1 :]
    return text, None


def infer_format(path: str, name: str, told: str) -> Format:
    """The format of a file by its extension and by the name asked for. Raises UsageError if neither determines it."""
    if path.lower().endswith(_LIBRARY_ENDINGS):
        return "torch-library"
    if path.lower().endswith(".cubin"):
        return "cubin"
    if path.lower().endswith(".py"):
        return "torch-library" if "::" in name else "python"
    raise UsageError(
        f"{told}: the format of {path!r} cannot be inferred from its name; put @python or @torch-library after "
        f"the selector"
    )
