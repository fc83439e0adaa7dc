"""Names and schemas of operators, read without PyTorch: which names are valid, and what a printed schema says of types,
defaults and writes.

Only valid names may be in a capture or be looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_LONGEST_NAME = 512
_OVERLOAD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_OPERATOR_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]*::{_OVERLOAD.pattern}")


def name_problem(name: str, overload: str) -> str:
    """Why `name` and `overload` (`default` for the one without a name) name no operator; "" where they may."""
    if len(name) > _LONGEST_NAME or len(overload) > _LONGEST_NAME:
        return f"an operator's name of {max(len(name), len(overload))} characters, allowed {_LONGEST_NAME}"
    if not _OPERATOR_NAME.match(name) or not _OVERLOAD.match(overload):
        return f"{f'{name}.{overload}'!a} is not an operator name, expected NAMESPACE::OPERATOR.OVERLOAD"
    return ""


_LONGEST_SCHEMA = 1 << 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*::[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)?\Z")
_ARGUMENT = re.compile(r"(?P<type>\S(?:.*\S)?)\s+(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<length>(?:\[\d*\])?)\Z")
_ALIAS = re.compile(r"\(\s*([A-Za-z0-9_|*]+)(?:\s*(!))?\s*(?:->[A-Za-z0-9_|*\s]*)?\)")
_QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*+(?:"|\Z|\\\Z)|'(?:[^'\\]|\\.)*+(?:'|\Z|\\\Z))""", re.DOTALL)
_UNNAMED = re.compile(r"\(\$\d+(!?)(?:\s*->\s*)?\)|(?<=[\]?])\((!?)\)(?=\[)")
_AFTER_OPTIONAL = re.compile(r"\?(!|\([^()]*\))(?=\[)")
_SETS = re.compile(r"(?<!\w)\w+(?:\|\w+)+")
_OPENING, _CLOSING = "([", ")]"


@dataclass(frozen=True)
class SchemaType:
    """A type without its alias annotation: `Tensor`, `int[2]`, `Tensor?[]`. `alias` is its set, "" for none."""

    text: str
    alias: str = ""
    written: bool = False

    @property
    def holds_tensors(self) -> bool:
        return self.text.startswith("Tensor")


@dataclass(frozen=True)
class SchemaArgument:
    """One argument. `default` is its text in the schema, None if the argument must be given."""

    name: str
    type: SchemaType
    default: str | None
    keyword_only: bool


@dataclass(frozen=True)
class OperatorSchema:
    """A schema, taken apart. `overload` is "" for the default one."""

    name: str
    overload: str
    arguments: tuple[SchemaArgument, ...]
    returns: tuple[SchemaType, ...]

    @property
    def base_name(self) -> str:
        """The operator's name without its namespace: `mm`."""
        return self.name.rpartition("::")[2]


def canonical_schema(text: str) -> str:
    """A schema that PyTorch printed, in a form that PyTorch reads.

    It prints `Tensor!`, written memory without a name, as `Tensor($0! -> )`, `Tensor(a!)?[]` as `Tensor?(a!)[]`, and
    the names of a set in any order; it reads none of the first two.
    """
    parts = _QUOTED.split(text)  # texts between the quoted ones, which are defaults
    for index in range(0, len(parts), 2):
        named = _UNNAMED.sub(r"\1\2", parts[index])
        parts[index] = _SETS.sub(
            lambda found: "|".join(sorted(found[0].split("|"))), _AFTER_OPTIONAL.sub(r"\1?", named)
        )
    return "".join(parts)


@lru_cache(maxsize=4096)
def parse_operator_schema(text: str) -> OperatorSchema:
    """A schema's parts. Raises ValueError if `text` is not a schema."""
    if len(text) > _LONGEST_SCHEMA:
        raise ValueError(f"a schema of {len(text)} characters")
    text = canonical_schema(text)
    head, parenthesis, rest = text.partition("(")
    if not parenthesis or not _NAME.match(head):
        raise ValueError(f"{text[:80]!r} does not begin with an operator's name")
    namespace, _, own = head.rpartition("::")
    base, _, overload = own.partition(".")
    end = _closing(rest)
    arrow, _, returned = rest[end + 1 :].partition("->")
    if arrow.strip() or returned.strip() in ("", "..."):
        raise ValueError(f"{text[:80]!r} does not say what it returns")
    arguments = tuple(_arguments(rest[:end]))
    names = [argument.name for argument in arguments]
    if len(set(names)) != len(names):
        raise ValueError(f"{text[:80]!r} has two arguments of one name")
    return OperatorSchema(f"{namespace}::{base}", overload, arguments, tuple(_returns(returned.strip())))


def _arguments(text: str) -> list[SchemaArgument]:
    arguments: list[SchemaArgument] = []
    keyword_only = False
    for part in split_top_level(text):
        if part == "*":
            keyword_only = True
            continue
        declared, equals, text = part.partition("=")
        declared, default = declared.strip(), text.strip() if equals else None
        found = _ARGUMENT.match(declared)
        if found is None:
            raise ValueError(f"{part[:80]!r} is not an argument of a schema")
        arguments.append(SchemaArgument(found["name"], _type(found["type"] + found["length"]), default, keyword_only))
    return arguments


def _returns(text: str) -> list[SchemaType]:
    if text.startswith("(") and _closing(text[1:]) == len(text) - 2:
        parts = split_top_level(text[1:-1])
    else:
        parts = [text]
    returns = []
    for part in parts:
        named = _ARGUMENT.match(part)
        returns.append(_type(named["type"] if named is not None else part))
    return returns


def _type(text: str) -> SchemaType:
    alias, written = "", False
    for found in _ALIAS.finditer(text):
        alias = alias or found[1]
        written |= bool(found[2])
    plain = _ALIAS.sub("", text)
    return SchemaType(plain.replace("!", "").strip(), alias, written or "!" in plain)


def split_top_level(text: str) -> list[str]:
    """The parts between commas that are in no brackets and no quotes; none for empty text."""
    parts: list[str] = []
    depth, start = 0, 0
    for position, character in _unquoted(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if parts or last else []


def _closing(text: str) -> int:
    """Where the bracket that was open before `text` is closed."""
    depth = 1
    for position, character in _unquoted(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if not depth:
                return position
    raise ValueError(f"{text[:80]!r} has a bracket that is never closed")


def _unquoted(text: str) -> Iterator[tuple[int, str]]:
    """The characters that are not in quotes, with their positions."""
    quote, escaped = "", False
    for position, character in enumerate(text):
        if not quote:
            if character in "\"'":
                quote = character
            else:
                yield position, character
        elif escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == quote:
            quote = ""
