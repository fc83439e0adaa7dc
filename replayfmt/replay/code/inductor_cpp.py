"""Inductor's C++ kernels in a replay: the stored library where it fits this machine, else compiled from the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayfmt.format.model import Kernel
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.inductor.code_machine import differences
from replayfmt.pytorch.inductor.cpp_kernels import CppArgument, StoredCppKernel, schema_of
from replayfmt.pytorch.inductor.cpp_library import CannotLoad, compiled, load
from replayfmt.pytorch.schemas import parse_schema

from ..planning.effects import Effects, effects_of_schema
from ..planning.kernels import ResolvedKernel, StoredCodeKernel


@dataclass(frozen=True)
class InductorCppKernel(StoredCodeKernel):
    """A kernel whose code and schema go together; once it is loaded, it is ready to be called."""

    named: str
    declared: torch.FunctionSchema
    stored: StoredCppKernel
    arguments: tuple[CppArgument, ...]
    function: Callable[..., Any] | None = None
    how: str = ""

    def loaded(self) -> InductorCppKernel | str:
        try:
            function, how = _function(self.stored)
        except CannotLoad as error:
            return f"{self.named} cannot be called: {str(error).strip().partition(chr(10))[0]}"
        return replace(self, function=function, how=how)

    @property
    def schema(self) -> torch.FunctionSchema:
        return self.declared

    @property
    def call(self) -> Callable[..., Any]:
        assert self.function is not None, "it is called once it is loaded"
        return self.function

    def effects(self, layout: SlotLayout) -> Effects:
        return effects_of_schema(layout, self.declared, False)

    def runs_on(self, device_type: str) -> bool:
        return device_type == "cpu"

    def problem_with(self, dtypes: Sequence[torch.dtype | None]) -> str:
        pointers = [argument for argument in self.arguments if argument.dtype is not None]
        if len(pointers) != len(dtypes):
            return f"it takes {len(pointers)} tensors, and is given {len(dtypes)}"
        for argument, dtype in zip(pointers, dtypes, strict=True):
            if dtype != argument.dtype:
                return f"{argument.name} points to elements of {argument.dtype}, and is given {dtype}"
        return ""


def resolve_inductor_cpp(
    kernel: Kernel, contents: Callable[[], Mapping[str, bytes]], device_types: frozenset[str]
) -> ResolvedKernel | str:
    """The kernel of a capture whose code the user has allowed to run, or a sentence that says why there is none.
    `contents` are its attachments by role, `device_types` those that the replay uses."""
    named = kernel.qualified_name
    try:
        stored = StoredCppKernel.read(contents())
        arguments = stored.arguments
        if stored.source is not None and stored.variant() != kernel.overload:
            return f"{named}: its stored source is another than the one it is named after"
        if schema_of(kernel.name.partition("::")[2], kernel.overload, arguments) != kernel.schema:
            return f"{named}: its schema {kernel.schema[:200]!a} is not that of its source"
        schema = parse_schema(kernel.schema)
    except (RuntimeError, ValueError) as error:
        return f"{named} cannot be called: {str(error).strip().partition(chr(10))[0]}"
    return InductorCppKernel(named, schema, stored, arguments)


def _function(stored: StoredCppKernel) -> tuple[Callable[..., Any], str]:
    """The function of a kernel, and where its code is from. Raises CannotLoad."""
    different = differences(dict(stored.compiled_for))
    if stored.library is not None and not different:
        return load(stored.library), "run from the stored library"
    why = (
        f"its library is for another {', '.join(different)}"
        if stored.library is not None
        else "its library was left out"
    )
    if stored.source is None:
        raise CannotLoad(f"{why}, and its source is not in the capture")
    if not stored.flags:
        raise CannotLoad(f"{why}, and the capture does not say how its source was compiled")
    return load(compiled(stored.source, stored.flags)), f"compiled here from the stored source ({why})"
