"""The type of a schema's argument, reduced to what reading recorded values needs.

PyTorch's schema objects report enumerations as `int` in `type` and by name in `real_type`; this uses the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_NAMES = {"Scalar": "number", "SymInt": "int", "SymFloat": "float", "SymBool": "bool", "string": "str"}


# Element types of values that a trace can contain; any other is an object of a library's own type.
BASES = frozenset(
    {
        "Tensor",
        "int",
        "float",
        "number",
        "bool",
        "complex",
        "str",
        "ScalarType",
        "Layout",
        "MemoryFormat",
        "Device",
        "Generator",
    }
)


@dataclass(frozen=True)
class ArgumentType:
    """`base` is Tensor, int, float, number, bool, complex, str, ScalarType, Layout, MemoryFormat, Device, Generator, or
    another name; `depth` is the number of lists around it; `length` is a list's fixed length, 0 if it has none.
    `inner_optional` says for each list level, outermost first, whether its elements may be None."""

    base: str
    optional: bool = False
    depth: int = 0
    length: int = 0
    inner_optional: tuple[bool, ...] = ()

    @property
    def element(self) -> ArgumentType:
        """The type of a list's elements."""
        assert self.depth
        return ArgumentType(self.base, self.inner_optional[0], self.depth - 1, 0, self.inner_optional[1:])

    def __str__(self) -> str:
        text = self.base
        for optional in reversed(self.inner_optional):
            text += "?[]" if optional else "[]"
        return text + ("?" if self.optional else "")


_known: dict[str, ArgumentType] = {}


def schema_type(argument: Any) -> ArgumentType:
    """The type of a schema's argument (torch._C.Argument)."""
    real = argument.real_type
    length = argument.N or 0
    key = f"{real}|{length}"
    found = _known.get(key)
    if found is None:
        found = _known[key] = _of(real, length)
    return found


def _of(kind: Any, length: int = 0) -> ArgumentType:
    optional = False
    if isinstance(kind, torch._C.OptionalType):
        optional, kind = True, kind.getElementType()
    if isinstance(kind, torch._C.ListType):
        inner = _of(kind.getElementType())
        return ArgumentType(inner.base, optional, inner.depth + 1, length, (inner.optional, *inner.inner_optional))
    text = str(kind)
    return ArgumentType(_NAMES.get(text, text), optional)
