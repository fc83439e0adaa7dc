"""How a kernel is declared: enough to launch its binary where its source was left out of a capture.

    {"functions": {NAME: {"constexpr": bool, "options": {…}, "parameters": {NAME: kind}, "by_name": [NAME, …]}}}

It has the kernel, and the functions that it is given as arguments. Of their text there is nothing: a module that is
made of it has functions that cannot be compiled, and Triton finds in it how arguments are passed and specialized.
Declarations come from captures: what is no name, or no kind of a parameter, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from keyword import iskeyword
from typing import Any

from .functions import DECLARED, KernelFunction
from .sources import StandaloneSource, annotation, argument_kind

_KIND = re.compile(r"\**[A-Za-z0-9_]{0,32}\Z")
_FREE = ("triton", "tl")


def declaration_of(source: StandaloneSource, given: Iterable[str]) -> dict[str, Any]:
    """The declaration of a module's kernel, and of the functions of these names, as JSON."""
    names = dict.fromkeys([source.name, *given])
    return {"functions": {name: _declared(source.functions[name]) for name in names}}


def _declared(function: KernelFunction) -> dict[str, Any]:
    parameters = function.signature.parameters.values()
    return {
        "constexpr": function.constexpr,
        "options": dict(function.declared),
        "parameters": {}
        if function.constexpr
        else {name: argument_kind(function, name) for name in function.signature.parameters},
        "by_name": [each.name for each in parameters if each.kind is each.KEYWORD_ONLY],
    }


def source_without_bodies(declaration: Any) -> str:
    """The module of a declaration. Raises ValueError for what is none."""
    functions = declaration.get("functions") if isinstance(declaration, Mapping) else None
    if not isinstance(functions, Mapping) or not functions:
        raise ValueError("its declaration has no functions")
    head = "import triton\nimport triton.language as tl\n"
    return "\n\n".join([head, *(_definition(name, each) for name, each in functions.items())])


def _definition(name: Any, function: Any) -> str:
    if not isinstance(function, Mapping) or set(function) != {"constexpr", "options", "parameters", "by_name"}:
        raise ValueError(f"its declaration of {name!a} is none")
    kinds, by_name = function["parameters"], function["by_name"]
    if not isinstance(kinds, Mapping) or not isinstance(by_name, list):
        raise ValueError(f"its declaration of {name!a} has no parameters")
    for each in (name, *kinds):
        if not isinstance(each, str) or not each.isidentifier() or iskeyword(each) or each in _FREE:
            raise ValueError(f"{each!a} in its declaration is not the name of a function or of a parameter")
    decorator = "@triton.constexpr_function" if function["constexpr"] else f"@triton.jit({_options(function)})"
    parameters = [f"{each}{_checked(text)}" for each, text in kinds.items() if each not in by_name]
    if by_name:
        parameters += ["*", *(f"{each}{_checked(kinds[each])}" for each in kinds if each in by_name)]
    body = '    tl.static_assert(False, "the source of this kernel is not in the capture")\n'
    return f"{decorator}\ndef {name}({', '.join(parameters)}):\n{body}"


def _options(function: Mapping[str, Any]) -> str:
    options = function["options"]
    if not isinstance(options, Mapping) or not set(options) <= set(DECLARED):
        raise ValueError(f"its declaration has options that triton.jit does not take: {options!a}")
    for value in _leaves(options.values()):
        if not isinstance(value, bool | int) and not (isinstance(value, str) and value.isidentifier()):
            raise ValueError(f"{value!a} in its declaration is not the value of an option")
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value)
        else:
            yield value


def _checked(kind: Any) -> str:
    if not isinstance(kind, str) or not _KIND.match(kind):
        raise ValueError(f"{kind!a} in its declaration is not the kind of a parameter")
    return annotation(kind)
