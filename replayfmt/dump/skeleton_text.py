"""How what a capture says becomes part of a Python file: escaped, as identifiers, docstrings and comments."""

from __future__ import annotations

from collections.abc import Iterator
from keyword import iskeyword

from replayfmt.format.operator_schema import SchemaType
from replayfmt.format.signatures.groups import SignatureGroup

_SHOWN_SIGNATURES = 40
_LONGEST_LINE = 400
_HINTS = {
    "Tensor": "Tensor",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "SymFloat": "float",
    "bool": "bool",
    "SymBool": "bool",
    "str": "str",
    "complex": "complex",
    "Scalar": "bool | int | float | complex",
    "ScalarType": "torch.dtype",
    "Layout": "torch.layout",
    "Device": "torch.device",
    "Generator": "torch.Generator",
    "MemoryFormat": "torch.memory_format",
    "Storage": "torch.UntypedStorage",
}


def identifier_like(name: str, taken: set[str]) -> str:
    """An identifier like `name` that is not among `taken` and no word of Python's."""
    if not name.isidentifier():
        name = f"kernel_{name}"
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not an identifier")
    while name in taken or iskeyword(name) or name in ("torch", "Tensor"):
        name += "_"
    return name


def type_hint(declared: SchemaType) -> str:
    """A type hint for a schema's type, `object` where there is none that says more."""
    text = declared.text
    optional = text.endswith("?")
    text = text.removesuffix("?")
    if text.endswith("]"):
        inner = text[: text.rindex("[")]
        hint = f"list[{type_hint(SchemaType(inner))}]"
    else:
        hint = _HINTS.get(text, "object")
    return f"{hint} | None" if optional else hint


def docstring_text(text: str) -> str:
    """Text of a capture for a docstring: on one line, not too long, and nothing in it can end the docstring."""
    if len(text) > _LONGEST_LINE:
        text = text[: _LONGEST_LINE - 3] + "..."
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return printable(escaped)


def printable(text: str) -> str:
    """Text of a capture for a comment: nothing in it ends the line."""
    return "".join(c if c.isascii() and c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def signature_lines(groups: list[SignatureGroup]) -> Iterator[str]:
    """Lines for a docstring: how often, the ordinal of the first call, signature."""
    for group in sorted(groups, key=lambda group: (-group.calls, group.first))[:_SHOWN_SIGNATURES]:
        yield "    " + docstring_text(f"{group.calls} x  {group.first}  {group.text}")
    if len(groups) > _SHOWN_SIGNATURES:
        yield f"    and {len(groups) - _SHOWN_SIGNATURES} more signatures"


def how_often(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
