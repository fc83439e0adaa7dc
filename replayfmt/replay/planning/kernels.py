"""The kernel protocol: what a replay needs of the kernel that an op calls. Operators are one kind; others follow.

Everything behind the plan asks a kernel, never the dispatcher, what it takes, what it reads and writes, and how it is
called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from replayfmt.format.model import Node
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.argument_rules import exact_arguments
from replayfmt.pytorch.bindings import direct_function
from replayfmt.pytorch.operators import operator_named

from .effects import Effects, effects_of_schema


class ResolvedKernel(ABC):
    """The kernel of this process that a captured kernel is replayed with.

    `own`: its schema describes everything that it does, and it depends on its arguments alone. `draws`: it takes random
    numbers from a generator.
    """

    own: bool
    draws: bool
    how: str = ""
    """What was made of code in the capture to run it, as "run by …"; "" for operators."""

    def loaded(self) -> ResolvedKernel | str:
        """This kernel, ready to be called, or a sentence that says why it cannot be. Code of the capture is loaded,
        compiled and run here at the earliest: a plan asks for it once it has admitted the whole capture."""
        return self

    @property
    @abstractmethod
    def schema(self) -> torch.FunctionSchema:
        """Its arguments and results, with what it writes as far as it declares that."""

    @property
    @abstractmethod
    def call(self) -> Callable[..., Any]:
        """A function that calls it with any arguments that its schema takes."""

    def quickest(self, text: str, values: Sequence[Any], tensors: Sequence[int]) -> Callable[..., Any]:
        """The fastest function for this form of call: `text` has a `%s` for the function and one for each of `values`;
        those at the positions `tensors` are tensors."""
        return self.call

    def with_function(self, function: Any) -> ResolvedKernel:
        """This kernel with a function of the user's own kind of code in place of the captured code. Raises ValueError,
        with the reason, for one that cannot take its place."""
        raise ValueError("it is not a Triton kernel")

    def with_binary(self, given: Any) -> ResolvedKernel:
        """This kernel with a binary of the user's (a GivenCubin) in place of the captured one. Raises ValueError, with
        the reason, for one that cannot take its place."""
        raise ValueError("it is not a Triton kernel")

    @abstractmethod
    def effects(self, layout: SlotLayout) -> Effects:
        """What a call of a signature may do to its arguments."""

    @property
    @abstractmethod
    def content_decides_sizes(self) -> bool:
        """Whether the sizes of its results may depend on what is in its arguments."""

    @property
    @abstractmethod
    def makes_unchecked_views(self) -> bool:
        """Whether its results may go beyond the memory they are on."""

    @property
    def casts_inside(self) -> bool:
        """Whether what it computes may depend on autocast."""
        return not self.own

    @property
    def computes_for_gradients(self) -> int:
        """Which of its results it computes only where an input requires gradients, and leaves empty otherwise; -1 for
        none."""
        return -1

    @property
    def elementwise(self) -> bool:
        """Whether each element of its results depends on its arguments' elements at the same place alone."""
        return False

    @abstractmethod
    def runs_on(self, device_type: str) -> bool:
        """Whether there is an implementation for tensors of a device type."""

    def problem_with_arguments(self, nodes: Sequence[Node]) -> str:
        """Why it cannot be called with arguments of this structure; "" if it can. (The dispatcher checks those of
        operators.)"""
        return ""

    def problem_with(self, dtypes: Sequence[torch.dtype | None]) -> str:
        """Why it cannot be called with tensors of these dtypes, in the order of its tensor arguments; "" if it can.
        (Operators check their arguments themselves.)"""
        return ""

    @property
    def argument_names(self) -> list[str]:
        """The names of its arguments, in order."""
        return [argument.name for argument in self.schema.arguments]


@dataclass(frozen=True)
class OperatorKernel(ResolvedKernel):
    """An operator overload of the dispatcher."""

    overload: OpOverload
    own: bool
    draws: bool

    @property
    def schema(self) -> torch.FunctionSchema:
        return self.overload._schema

    @property
    def call(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self.overload._op
        return function

    def quickest(self, text: str, values: Sequence[Any], tensors: Sequence[int]) -> Callable[..., Any]:
        return direct_function(self.overload, text, values, tensors)

    def effects(self, layout: SlotLayout) -> Effects:
        """Read from the operator's alias annotations, which PyTorch's own functionalization relies on as well."""
        return effects_of_schema(layout, self.schema, torch.Tag.inplace_view in self.overload.tags)

    @property
    def content_decides_sizes(self) -> bool:
        return not self.own or torch.Tag.dynamic_output_shape in self.overload.tags

    @property
    def makes_unchecked_views(self) -> bool:
        return operator_named(self.schema.name).unchecked_view

    @property
    def casts_inside(self) -> bool:
        return operator_named(self.schema.name).casts_inside

    @property
    def computes_for_gradients(self) -> int:
        return operator_named(self.schema.name).for_gradients

    @property
    def elementwise(self) -> bool:
        return self.schema.name.startswith("aten::") and torch.Tag.pointwise in self.overload.tags

    def runs_on(self, device_type: str) -> bool:
        """Whether the dispatcher has any kernel of it for tensors of a device type."""
        key = torch._C._dispatch_key_for_device(device_type)
        return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.overload.name(), key))


class StoredCodeKernel(ResolvedKernel):
    """A kernel that the capture itself holds. It writes to memory that it is given and makes no tensors, and its
    schema, which was made from it, tells what it reads and writes."""

    own = True
    draws = False

    def problem_with_arguments(self, nodes: Sequence[Node]) -> str:
        return exact_arguments(self.schema, nodes)

    @property
    def content_decides_sizes(self) -> bool:
        return False

    @property
    def makes_unchecked_views(self) -> bool:
        return False
