"""What all records of a signature have in common, determined once, before the plan processes them.

That is which slots an op may write, which argument's metadata it may change, and where it takes and returns addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from replayfmt.format.codes import StorageOrigin, ValueKind
from replayfmt.format.reader import CaptureReader
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.schemas import parse_schema

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


def effects_of_missing(layout: SlotLayout, schema: str) -> Effects:
    """For an operator that is missing here, from its captured schema; if unreadable, it writes all arguments."""
    try:
        return effects_of_schema(layout, parse_schema(schema), False)
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
