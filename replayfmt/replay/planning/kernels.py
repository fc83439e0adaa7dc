"""The kernel protocol: what a replay needs of the kernel that an op calls. Operators are one kind; others follow.

Everything behind the plan asks a kernel, never the dispatcher, what it takes, what it reads and writes (`Effects`,
determined once for each signature), and how it is called. A `CallSite` is one call of a kernel in a replay's code; a
`KernelStandIn` chooses what is called there instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from replayfmt.errors import SubstitutionFailed
from replayfmt.format.codes import StorageOrigin, ValueKind
from replayfmt.format.model import Kernel, Node
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.pytorch.collectives import played_directly
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.overloads import direct_function, exact_arguments, parse_schema

_INTEGER = "IntType"


@dataclass(frozen=True)
class Effects:
    """What an op may do to its arguments, by tensor slot.

    `writes`: slots whose storage it may write. `rebinds`: pairs of an argument slot and the result slot that is the
    same tensor object afterwards; where their ids differ the op changed the tensor's metadata in place. `reshapes`:
    argument slots whose metadata it changes without returning the tensor. `unsure`: further slots whose storage it may
    write without saying so, which custom operators do; their content is restored like that of `writes`.
    """

    writes: tuple[int, ...]
    rebinds: tuple[tuple[int, int], ...]
    reshapes: tuple[int, ...]
    unsure: tuple[int, ...]


def effects_of(resolved: ResolvedKernel | str | None, layout: SlotLayout, captured: Kernel) -> Effects:
    """Where the kernel is missing here, from its captured schema; if that is unreadable, it writes all arguments."""
    if isinstance(resolved, ResolvedKernel):
        return resolved.effects(layout)
    try:
        return effects_of_schema(layout, parse_schema(captured.schema), False)
    except (RuntimeError, ValueError):
        return Effects(tuple(slot for each in layout.args for slot in each.tensors), (), (), ())


def effects_of_schema(
    layout: SlotLayout, schema: torch.FunctionSchema, in_place_view: bool, *, complete: bool = False
) -> Effects:
    """Read from alias annotations, and from what is known to be written without one. `in_place_view`: what it writes
    is the metadata of its arguments. `complete`: nothing else than the schema says is written, whatever its name."""
    operator = operator_named(schema.name)
    by_name = {argument.name: argument for argument in schema.arguments}
    returns = schema.returns
    writes: list[int] = []
    rebinds: list[tuple[int, int]] = []
    reshapes: list[int] = []
    unsure: list[int] = []
    for each in layout.args:
        argument = by_name.get(each.node.name)
        alias = argument.alias_info if argument is not None else None
        if alias is None or not alias.is_write:
            if each.node.name in operator.quiet_writes:
                writes += each.tensors
            elif not (operator.own or complete):
                unsure += each.tensors
            continue
        writes += each.tensors
        if each.node.kind is not ValueKind.tensor:
            continue
        same = [
            result.tensor_slot
            for result, returned in zip(layout.results, returns, strict=False)
            if result.node.kind is ValueKind.tensor
            and returned.alias_info is not None
            and returned.alias_info.is_write
            and returned.alias_info.before_set & alias.before_set
        ]
        if same:
            rebinds.append((each.tensor_slot, same[0]))
        elif in_place_view:
            reshapes.append(each.tensor_slot)
    return Effects(tuple(writes), tuple(rebinds), tuple(reshapes), tuple(unsure))


@dataclass(frozen=True)
class Addresses:
    """Where an op takes and returns addresses of objects as integers, for which the capture has tensors: names of its
    arguments, indices of its results. `once`: all that it does is done to such an object (it releases it, for one), so
    that it cannot be done twice."""

    arguments: tuple[str, ...]
    results: tuple[int, ...]
    once: bool


def addresses_of(layout: SlotLayout, schema: torch.FunctionSchema) -> Addresses | None:
    """None for an op without any."""
    types = {argument.name: argument.type.kind() for argument in schema.arguments}
    arguments = tuple(
        each.node.name
        for each in layout.args
        if each.node.kind is ValueKind.tensor and types.get(each.node.name) == _INTEGER
    )
    results = tuple(
        index
        for index, (each, returned) in enumerate(zip(layout.results, schema.returns, strict=False))
        if each.node.kind is ValueKind.tensor and returned.type.kind() == _INTEGER
    )
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    once = bool(arguments) and not writes and not schema.returns
    return Addresses(arguments, results, once) if arguments or results else None


def leaves_unwritten(reader: CaptureReader, arguments: Iterable[int], results: Iterable[int]) -> bool:
    """Whether an op leaves the memory it returns unwritten (the empty family), by the storages of its arguments and
    results. What it returns on memory that is there already was written, by it or by others."""
    new = {storage for storage in results if storage} - set(arguments)
    return bool(new) and all(reader.storage(storage).origin is StorageOrigin.uninitialized for storage in new)


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
        return played_directly(self.schema.name) or self.overload._op

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


@dataclass(frozen=True)
class CallSite:
    """One op of a capture while its call is being generated.

    `metas` are the metadata ids of its argument tensors, `original` is the function that would be called, `wrap` gives
    a function the same surroundings as the original, `fills` is False if the op leaves the memory it returns unwritten,
    `once` is True if the op must not run twice.
    """

    ordinal: int
    signature_id: int
    metas: tuple[int, ...]
    kernel_id: int
    kernel: ResolvedKernel
    layout: SlotLayout
    effects: Effects
    original: Callable[..., Any]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    fills: bool
    once: bool


class KernelStandIn(Protocol):
    """Chooses what is called instead of the kernels."""

    @property
    def reason(self) -> str:
        """Why results may differ from the captured ones bit for bit."""

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        """What to call at a site, with a key that equal calls share (None: for this site only); None for the
        original."""

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        """The error to raise for an exception at an ordinal if one of its own calls raised it, else None."""
        return None
