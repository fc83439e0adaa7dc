"""Whether a function can be called as PyTorch calls an operator.

An operator's positional arguments may come by position or, after one that was left to its default, by name;
keyword-only arguments come by name; those with a default may be omitted. A replacement has to accept all of these, with
the same defaults: a default that differs from the schema's would change the op.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from replayfmt.errors import UsageError

_PLAIN = (type(None), bool, int, float, str)
_ABSENT = object()


def schema_signature(schema: torch.FunctionSchema) -> inspect.Signature:
    """The Python signature of an operator's overload. Default values that Python writes differently are kept as they
    are."""
    parameters = []
    for argument in schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append((argument.name, kind, default))
    # Schemas may have a required argument after one with a default; Python's signatures may not.
    needed = [
        index
        for index, (_name, kind, default) in enumerate(parameters)
        if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and default is inspect.Parameter.empty
    ]
    last_needed = needed[-1] if needed else -1
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=inspect.Parameter.empty if index < last_needed else default)
            for index, (name, kind, default) in enumerate(parameters)
        ]
    )


def check_binding(signature: inspect.Signature | None, schema: torch.FunctionSchema, what: str) -> None:
    """Raises UsageError, beginning with `what`, if a function of this signature cannot replace the schema's
    operator."""
    if signature is None:
        return  # C code without a signature: the checked pass calls it
    for args, kwargs in _calls(schema):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{what}: it takes {signature}, which does not bind {schema}: {error}") from None
    bound = _named_parameters(signature, schema)
    for argument in schema.arguments:
        parameter = bound.get(argument.name)
        if parameter is None or not argument.has_default_value() or parameter.default is inspect.Parameter.empty:
            continue
        wanted, given = _plain(argument.default_value), _plain(parameter.default)
        if wanted is not _ABSENT and given is not _ABSENT and not _same(wanted, given):
            raise UsageError(
                f"{what}: its default for {parameter.name!r} is {parameter.default!r}, the operator's is "
                f"{argument.default_value!r}; calls that leave it out mean the operator's"
            )


def _calls(schema: torch.FunctionSchema) -> list[tuple[list[str], dict[str, str]]]:
    """Calls that the operator accepts, with names in place of values: all arguments, the required ones, each by
    name."""
    everything: tuple[list[str], dict[str, str]] = ([], {})
    required: tuple[list[str], dict[str, str]] = ([], {})
    skipped = False
    for argument in schema.arguments:
        if argument.kwarg_only:
            everything[1][argument.name] = argument.name
        else:
            everything[0].append(argument.name)
        if argument.has_default_value():
            skipped = skipped or not argument.kwarg_only
        elif argument.kwarg_only or skipped:
            required[1][argument.name] = argument.name
        else:
            required[0].append(argument.name)
    by_name = [
        (required[0], {**required[1], argument.name: argument.name})
        for argument in schema.arguments
        if argument.has_default_value()
    ]
    return [everything, required, *by_name]


def _named_parameters(signature: inspect.Signature, schema: torch.FunctionSchema) -> dict[str, inspect.Parameter]:
    """The parameter that receives each of the schema's arguments, if it is a named parameter."""
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    arrived: dict[str, inspect.Parameter] = {}
    for position, argument in enumerate(schema.arguments):
        if not argument.kwarg_only and position < len(positional):
            arrived[argument.name] = positional[position]
        elif argument.name in signature.parameters:
            arrived[argument.name] = signature.parameters[argument.name]
    return arrived


def _plain(value: Any) -> Any:
    """A default that both sides write the same way; _ABSENT if they may not (dtypes and the like are numbers)."""
    if isinstance(value, list | tuple):
        plain = [_plain(each) for each in value]
        return _ABSENT if any(each is _ABSENT for each in plain) else plain
    return value if isinstance(value, _PLAIN) else _ABSENT


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
