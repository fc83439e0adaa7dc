"""Preconditions of kernels, without which they read out-of-bounds memory: checked before a kernel is called.

PyTorch's own front end makes sure of it, the dispatcher does not. These rules hold for every operator and follow from
its schema; what only one kernel relies on is not looked at (SECURITY.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from replayfmt.format.codes import ValueKind
from replayfmt.format.model import Node

# Enumerations that PyTorch passes as integers, and uses as indices without a look: what stands for one in a capture.
_ENUMERATIONS = {"ScalarType": ValueKind.dtype, "Layout": ValueKind.layout, "MemoryFormat": ValueKind.memory_format}
_ENUMERATION = re.compile("|".join(_ENUMERATIONS))
# Operators that look at the first of their tensors, whether there is one or not.
_NEED_A_TENSOR = frozenset({"aten::_stack", "aten::_foreach_clone", "aten::_foreach_copy"})


# What stands for an argument of a type in a call of compiled code, which takes what it is given for what it expects.
_KINDS = {
    "Tensor": (ValueKind.tensor,),
    "int": (ValueKind.int,),
    "float": (ValueKind.float, ValueKind.int),
    "bool": (ValueKind.bool,),
}


def exact_arguments(schema: torch.FunctionSchema, nodes: Sequence[Node]) -> str:
    """Why a call of code with this schema cannot have arguments of this structure, or "". It takes all of them."""
    name, arguments = schema.name, {argument.name: str(argument.type) for argument in schema.arguments}
    given = [node.name for node in nodes]
    if given != list(arguments):
        return f"{name} takes the arguments {list(arguments)}, the capture has {given}"
    for node in nodes:
        if node.kind not in _KINDS.get(arguments[node.name], ()):
            return f"{name} takes {arguments[node.name]} as `{node.name}`, the capture has {node.kind.name}"
    return ""


class ArgumentRules:
    """The rules for one operator."""

    def __init__(self, schema: torch.FunctionSchema) -> None:
        self._name = schema.name
        self._needs_a_tensor = schema.name in _NEED_A_TENSOR
        # By argument: the enumeration that it is, and the lengths that a list of a fixed length may have.
        self._enumerations: dict[str, ValueKind] = {}
        self._lengths: dict[str, frozenset[int]] = {}
        arguments: Sequence[Any] = schema.arguments
        for argument in arguments:
            found = _ENUMERATION.search(str(argument.real_type))
            if found:
                self._enumerations[argument.name] = _ENUMERATIONS[found[0]]
            # A list of one stands for all dimensions; `int[1]` takes any number. A pool without a stride has an empty
            # one, which its backward operator is given as it is.
            if argument.N is not None and argument.N > 1:
                also = (0,) if argument.name == "stride" else ()
                self._lengths[argument.name] = frozenset({1, argument.N, *also})

    def problem(self, nodes: Sequence[Node]) -> str:
        """What is wrong with arguments of this structure, or ""."""
        for node in nodes:
            enumeration, lengths = self._enumerations.get(node.name), self._lengths.get(node.name)
            if enumeration is not None and node.kind is ValueKind.int:
                return f"{self._name} takes a {enumeration.name} as `{node.name}`, the capture has an integer"
            if node.kind not in (ValueKind.list, ValueKind.tuple):
                continue
            if lengths and len(node.children) not in lengths:
                expected = " or ".join(str(length) for length in sorted(lengths))
                return f"{self._name} takes {expected} values as `{node.name}`, the capture has {len(node.children)}"
            if self._needs_a_tensor and not node.children:
                return f"{self._name} takes at least one tensor as `{node.name}`, the capture has none"
        return ""
