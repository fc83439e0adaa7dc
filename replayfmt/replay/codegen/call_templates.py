"""From an op's signature to the text of its call: the part of the generated code that all its records share.

A template is the call's text with a hole for each operand and, for each hole, the source of its value: a tensor slot, a
constant shared by all records of the signature, or a constant built from the record's own numbers. Constants never
appear in the text; they are parameters of the generated function. Two passes through the same ops therefore have the
same text even if their numbers differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from keyword import iskeyword
from typing import Any

import torch

from replayfmt.format.codes import DType, MemoryFormat, OpStatus, ValueKind
from replayfmt.format.codes import Layout as LayoutCode
from replayfmt.format.model import Node
from replayfmt.format.signature_layout import NodePlace, SlotLayout
from replayfmt.pytorch.collectives import WAIT, reads_results
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT

from ..operations import PackComposite
from ..planning.devices import DeviceMap
from ..planning.kernels import Addresses, Effects, ResolvedKernel, addresses_of


class Operand(IntEnum):
    """Where an operand's value comes from; `Template.operands` pairs it with its payload."""

    tensor = 1  # tensor slot
    storage = 2  # int slot with a storage id
    own = 3  # builder of a constant from the record's own numbers
    shared = 4  # (key, value): the same for every record


class Leaf(IntEnum):
    """What one result is; `Template.leaves` pairs it with its payload."""

    tensor = 1  # tensor slot
    nothing = 2  # None
    scalar = 3  # builder of the expected value
    composite = 4  # (form, parts): a tensor made of component values


# Builds a value from a record's columns: (ints, first int slot, floats, first float slot).
Builder = Callable[[list[int], int, list[float], int], Any]


@dataclass(frozen=True)
class Result:
    """One leaf of an op's results. `parts` are the components of a composite."""

    leaf: Leaf
    what: Any
    index: int  # which of the op's results it belongs to
    parts: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Template:
    """How to write one signature's op. `text` has a `%s` for the function, then one for each operand.

    `target` is the assignment's left side with a `%s` for each leaf, "" if the op has no result.
    """

    signature_id: int
    layout: SlotLayout
    kernel: ResolvedKernel
    kernel_id: int
    raises: bool
    text: str
    operands: tuple[tuple[Operand, Any], ...]
    target: str
    leaves: tuple[Result, ...]
    effects: Effects
    addresses: Addresses | None


class DirectFunctions:
    """The functions that templates call, found once for each way in which a kernel is called."""

    def __init__(self) -> None:
        self._by_signature: dict[int, Callable[..., Any]] = {}
        self._by_call: dict[Any, Callable[..., Any]] = {}

    def function(self, template: Template, values: list[Any]) -> Callable[..., Any]:
        """The function to call for a template; `values` are the operands of one record, None for tensors and
        storages."""
        known = self._by_signature.get(template.signature_id)
        if known is None:
            known = self._by_signature[template.signature_id] = self._find(template, values)
        return known

    def _find(self, template: Template, values: list[Any]) -> Callable[..., Any]:
        kinds = {operand for operand, _what in template.operands}
        plain = Operand.storage not in kinds and not any(isinstance(value, PackComposite) for value in values)
        kernel = template.kernel
        # Ops without results work in place on lists, but some functions return the lists anyway.
        if template.raises or not kernel.own or not plain or not kernel.schema.returns:
            return kernel.call
        key = (template.kernel_id, template.text, tuple(map(_type_of, values)))
        if key not in self._by_call:
            tensors = [i for i, (operand, _what) in enumerate(template.operands) if operand is Operand.tensor]
            self._by_call[key] = kernel.quickest(template.text, values, tensors)
        return self._by_call[key]


def _type_of(value: Any) -> Any:
    return tuple(map(_type_of, value)) if isinstance(value, list | tuple) else type(value)


class TemplateMaker:
    """Makes templates for one device mapping."""

    def __init__(self, devices: DeviceMap, generators: tuple[torch.Generator | None, ...]) -> None:
        self._devices = devices
        self._generators = generators

    def make(self, signature_id: int, layout: SlotLayout, kernel: ResolvedKernel) -> Template:
        operands: list[tuple[Operand, Any]] = []
        pieces = []
        names = kernel.argument_names
        keyword_only = {argument.name for argument in kernel.schema.arguments if argument.kwarg_only}
        given = 0
        device = self._factory_device(layout, kernel)
        for each in layout.args:
            if device is not None and each.node.name == "device":
                continue
            unread = kernel.schema.name == WAIT and each.node.name == "results" and not reads_results()
            text = "[]" if unread else self._piece(each, operands)
            # Positional until an argument was left to its default.
            if given < len(names) and names[given] == each.node.name and each.node.name not in keyword_only:
                pieces.append(text)
                given += 1
            else:
                given = len(names)
                name = each.node.name
                pieces.append(f"**{{{name!r}: {text}}}" if iskeyword(name) else f"{name}={text}")
        if device is not None:
            pieces.append("device=%s")
            operands.append((Operand.shared, (("device", str(device)), device)))
        leaves: list[Result] = []
        targets = [self._target(each, leaves, index) for index, each in enumerate(layout.results)]
        target = targets[0] if len(targets) == 1 else f"({', '.join(targets)})" if targets else ""
        raises = layout.signature.status is OpStatus.raised
        return Template(
            signature_id,
            layout,
            kernel,
            layout.signature.kernel,
            raises,
            f"%s({', '.join(pieces)})",
            tuple(operands),
            target,
            tuple(leaves),
            kernel.effects(layout),
            addresses_of(layout, kernel.schema),
        )

    def _piece(self, each: NodePlace, operands: list[tuple[Operand, Any]]) -> str:
        """The text of one argument; appends its operands in the order of their holes."""
        kind = each.node.kind
        if kind is ValueKind.tensor:
            operands.append((Operand.tensor, each.tensor_slot))
            return "%s"
        if kind is ValueKind.storage:
            operands.append((Operand.storage, each.int_slot))
            return "%s"
        if kind is ValueKind.composite:
            form = str(each.node.constant)
            operands.append((Operand.shared, (("put together", form), PackComposite(form))))
            return f"%s(({''.join(self._piece(child, operands) + ', ' for child in each.children)}))"
        if kind in (ValueKind.list, ValueKind.tuple) and not _scalars_only(each):
            inner = "".join(self._piece(child, operands) + ", " for child in each.children)
            return f"[{inner}]" if kind is ValueKind.list else f"({inner})"
        if each.constant and kind not in (ValueKind.list, ValueKind.tuple):
            return self._literal(each.node, operands)
        operands.append((Operand.own, self.builder(each)))
        return "%s"

    def _literal(self, node: Node, operands: list[tuple[Operand, Any]]) -> str:
        if node.kind is ValueKind.none:
            return "None"
        if node.kind is ValueKind.bool:
            return str(self._bool(node))
        operands.append((Operand.shared, ((node.kind, node.constant), self.value(node))))
        return "%s"

    def _bool(self, node: Node) -> bool:
        # Host memory can be pinned only if there is an accelerator.
        return bool(node.constant) and not (node.name == "pin_memory" and not torch.accelerator.is_available())

    def value(self, node: Node) -> Any:
        """The value of a node that takes no slot, mapped to this replay's devices."""
        constant = node.constant
        match node.kind:
            case ValueKind.none:
                return None
            case ValueKind.bool:
                return self._bool(node)
            case ValueKind.string:
                return constant
        assert isinstance(constant, int)
        match node.kind:
            case ValueKind.dtype:
                return TORCH_DTYPE[DType(constant)]
            case ValueKind.layout:
                return TORCH_LAYOUT[LayoutCode(constant)]
            case ValueKind.memory_format:
                return TORCH_MEMORY_FORMAT[MemoryFormat(constant)]
            case ValueKind.device:
                return self._devices.target(constant)
        raise AssertionError(f"a plan with a {node.kind.name} value is refused before its code is written")

    def builder(self, each: NodePlace) -> Builder:
        """A builder that makes an argument's value from a record's numbers."""
        slot, real = each.int_slot, each.float_slot
        match each.node.kind:
            case ValueKind.int:
                return lambda ints, i, floats, f: ints[i + slot]
            case ValueKind.float:
                return lambda ints, i, floats, f: floats[f + real]
            case ValueKind.complex:
                return lambda ints, i, floats, f: complex(floats[f + real], floats[f + real + 1])
            case ValueKind.generator:
                return lambda ints, i, floats, f: self._generators[ints[i + slot]]
            case ValueKind.list if each.children and all(c.node.kind is ValueKind.int for c in each.children):
                end = slot + len(each.children)
                return lambda ints, i, floats, f: ints[i + slot : i + end]
            case ValueKind.list:
                builders = [self.builder(child) for child in each.children]
                return lambda ints, i, floats, f: [build(ints, i, floats, f) for build in builders]
            case ValueKind.tuple:
                builders = [self.builder(child) for child in each.children]
                return lambda ints, i, floats, f: tuple(build(ints, i, floats, f) for build in builders)
        value = self.value(each.node)
        return lambda ints, i, floats, f: value

    def _factory_device(self, layout: SlotLayout, kernel: ResolvedKernel) -> torch.device | None:
        """The device for a captured factory's result, if it used the default device and that is mapped to another."""
        if layout.arg_tensors or not layout.slots[0]:
            return None
        takes_device = any(argument.name == "device" for argument in kernel.schema.arguments)
        given = layout.arg("device")
        if not takes_device or (given is not None and given.node.kind is not ValueKind.none):
            return None
        return self._devices.host_goes_to

    def _target(self, each: NodePlace, leaves: list[Result], index: int) -> str:
        """The assignment target of one result; appends its leaves in the order of their holes."""
        if each.node.kind in (ValueKind.list, ValueKind.tuple) and not _scalars_only(each):
            return f"({''.join(self._target(child, leaves, index) + ', ' for child in each.children)})"
        leaves.append(self._leaf(each, index))
        return "%s"

    def _leaf(self, each: NodePlace, index: int) -> Result:
        match each.node.kind:
            case ValueKind.tensor:
                return Result(Leaf.tensor, each.tensor_slot, index)
            case ValueKind.none:
                return Result(Leaf.nothing, None, index)
            case ValueKind.composite:
                parts = tuple(self._leaf(child, index) for child in each.children)
                return Result(Leaf.composite, str(each.node.constant), index, parts)
        return Result(Leaf.scalar, self.builder(each), index)


def _scalars_only(each: NodePlace) -> bool:
    """Whether a value contains no tensor, storage or composite."""
    kinds = {node.kind for node in each.node.preorder()}
    return not kinds & {ValueKind.tensor, ValueKind.storage, ValueKind.composite}
