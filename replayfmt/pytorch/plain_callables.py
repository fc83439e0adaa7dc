"""Python functions in place of operators that are not registered.

Some kernels are plain functions of a module that profilers show under an operator's name. Such a function is called by
the types of the arguments that a trace recorded: a schema is made of them, whose result may be anything, and the
function is registered under a name of our own, so that everything else meets an operator like any other.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from .registry import find_overload
from .schemas import parse_schema

NAMESPACE = "opreplay_callables"
OVERLOAD = "callable"  # what a capture names as the overload of a function without a schema
_library: torch.library.Library | None = None
_known: dict[tuple[str, int], OpOverload] = {}


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of a function's first `count` parameters; `arg0`, `arg1`… if it has no signature."""
    generic = [f"arg{index}" for index in range(count)]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return generic
    plain = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return plain[:count] if len(plain) >= count and len(plain) == len(parameters) else generic


def schema_text(name: str, parameters: Sequence[tuple[str, str]]) -> str:
    """The schema of a function under an operator's name; `parameters` are (name, type)."""
    listed = ", ".join(f"{kind} {parameter}" for parameter, kind in parameters)
    return f"{name}.{OVERLOAD}({listed}) -> Any"


def as_operator(schema: str, function: Callable[..., Any]) -> OpOverload:
    """An operator that calls a function with the arguments that a schema of `schema_text` has.

    Raises RuntimeError and ValueError for a schema that cannot be read.
    """
    global _library
    known = _known.get((schema, id(function)))
    if known is not None:
        return known
    arguments = [argument.name for argument in parse_schema(schema).arguments]
    by_position = all(name == f"arg{index}" for index, name in enumerate(arguments))

    def call(*given: Any, **named: Any) -> Any:
        values = dict(zip(arguments, given, strict=False)) | named
        return function(*values.values()) if by_position else function(**values)

    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")
    digest = hashlib.sha256(f"{schema}|{id(function)}".encode()).hexdigest()[:16]
    name = f"{schema.partition('.')[0].replace('::', '__')}_{digest}"
    _library.define(f"{name}{schema[schema.index('(') :]}")
    _library.impl(name, call, "CompositeExplicitAutograd")
    found = find_overload(f"{NAMESPACE}::{name}")
    assert found is not None, "it was defined just now"
    _known[schema, id(function)] = found
    return found
