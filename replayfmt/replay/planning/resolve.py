"""Finds the operator that a captured kernel names, in the installed torch.

Only the dispatcher is asked: a name in a file never causes an import that the file chose. A schema that has changed
since the capture is accepted only if torch itself considers it backward compatible.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.pytorch import plain_callables
from replayfmt.pytorch.operators import ALWAYS_THERE, acts_outside, operator_named
from replayfmt.pytorch.registry import find_overload, is_registered
from replayfmt.pytorch.schemas import parse_schema, printed_schema

from ..code.allowed import AllowedCode
from .allowed_imports import FLAG, OPERATOR_FLAG, AllowedImports
from .kernels import OperatorKernel, ResolvedKernel


def resolve(
    kernel: Kernel,
    captured_torch: str | None,
    imports: AllowedImports | None = None,
    code: AllowedCode | None = None,
    graphs: Callable[[Kernel], ResolvedKernel | str] | None = None,
) -> ResolvedKernel | str:
    """What a captured kernel is replayed with, or a sentence that says why there is nothing. `imports`: what the user
    allows to be imported for an unknown operator; `code`: whether a kernel that is no operator may be made of the code
    in the capture; `graphs` makes those of graphs."""
    named = kernel.qualified_name
    if kernel.kind is KernelKind.graph and graphs is not None:
        return graphs(kernel)
    if kernel.kind is not KernelKind.operator:
        return code.resolve(kernel) if code is not None else f"{named} is no operator, but a {kernel.kind.name} kernel"
    namespace = kernel.name.partition("::")[0]
    imports = imports or AllowedImports()
    does = acts_outside(kernel.name)
    known = operator_named(kernel.name)
    if does is not None and not known.unchecked_view and not imports.allows_operator(kernel.name):
        if known.collective:
            return f"{named} is a collective; they are not replayed yet"
        return f"{named} {does}; such host calls are not replayed unless {OPERATOR_FLAG}={kernel.name} allows it"
    overload = find_overload(kernel.name, kernel.overload)
    if overload is None and namespace not in ALWAYS_THERE:
        imports.provide(kernel.name, lambda: is_registered(kernel.name, kernel.overload))
        overload = find_overload(kernel.name, kernel.overload)
        if overload is None and kernel.overload == plain_callables.OVERLOAD:
            return _by_types(kernel, imports)
        if overload is None:
            return f"{named} does not exist in torch {torch.__version__}; {imports.advice(namespace)}"
    if overload is None:
        return f"{named} does not exist in torch {torch.__version__}"
    difference = _schema_difference(kernel, overload, captured_torch)
    if difference:
        return difference
    draws = torch.Tag.nondeterministic_seeded in overload.tags
    return OperatorKernel(overload, known.own, draws)


def _by_types(kernel: Kernel, imports: AllowedImports) -> ResolvedKernel | str:
    """A function from a library that the user named, called by the argument types that a trace recorded."""
    namespace, _separator, base = kernel.name.partition("::")
    function = imports.callable(namespace, base)
    if function is None:
        return (
            f"{kernel.name} is a function without a schema, and no library was named for {namespace!r} that has "
            f"it: {FLAG}={namespace}=MODULE lets the capture call the functions that MODULE defines"
        )
    try:
        return OperatorKernel(plain_callables.as_operator(kernel.schema, function), False, False)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{kernel.qualified_name}: its captured schema cannot be read ({reason})"


def _schema_difference(kernel: Kernel, overload: OpOverload, captured_torch: str | None) -> str | None:
    here = printed_schema(overload._schema)
    if here == kernel.schema:
        return None
    versions = f"captured with torch {captured_torch or 'of an unknown version'}, this is torch {torch.__version__}"
    try:
        captured = parse_schema(kernel.schema)
        compatible = overload._schema.is_backward_compatible_with(captured)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, IndexError) as error:  # IndexError: the numbers of arguments differ
        reason = str(error).strip().partition("\n")[0]
        return f"{kernel.qualified_name}: its captured schema cannot be read ({reason}); {versions}"
    if compatible:
        return None
    return f"{kernel.qualified_name} changed: captured {kernel.schema!r}, here {here!r}; {versions}"
