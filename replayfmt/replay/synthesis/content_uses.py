"""Finds every way in which ops use content that was not captured.

One pass over the ops follows the content from the storage it enters, through copies and simple computations, to every
op that reads it. Ops that are alike (same signature, shapes and numbers) are analyzed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.slots import NodePlace, SlotLayout
from replayfmt.initializers.demands import Demand, DemandStep, Role
from replayfmt.initializers.flow import Passed, passed_on
from replayfmt.initializers.request import Call, TensorInfo, Use
from replayfmt.initializers.roles import demand_of
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.schemas import parse_schema

from ..planning.kernels import ResolvedKernel
from ..planning.scan import Scan
from .calls import CapturedCalls

# Content is not followed through more steps, or in more ways, than this.
_MOST_STEPS = 12
_MOST_WAYS = 16
# An op's signature, metadata ids and integers.
Shapes = tuple[int, tuple[int, ...], tuple[int, ...]]
# Which tensor slots of ops of these shapes make demands, and which.
Asking = Mapping[Shapes, Sequence[tuple[int, Demand]]]


@dataclass(frozen=True)
class Way:
    """How a storage got its content: from storage `origin`, through `steps`, or not `followed`.

    `here` is the tensor whose elements are those of the tensor `there` on the origin, in order; None if there is no
    such tensor.
    """

    origin: int
    steps: tuple[DemandStep, ...] = ()
    followed: bool = True
    here: TensorInfo | None = None
    there: TensorInfo | None = None


@dataclass(frozen=True)
class FoundUse:
    """One use of a storage's content, with its demand on what the op reads (None if unknown)."""

    ordinal: int
    op: str
    overload: str
    argument: str
    position: int | None
    tensor: TensorInfo
    view: TensorInfo | None
    steps: tuple[DemandStep, ...]
    followed: bool
    demand: Demand | None

    @property
    def label(self) -> str:
        """The label, as in Use."""
        return self.argument if self.position is None else f"{self.argument}[{self.position}]"


@dataclass
class _Argument:
    """One tensor argument of ops that are alike. `slot` is its tensor slot, `passed` where its content goes."""

    name: str
    position: int | None
    slot: int
    read: bool
    overwritten: bool
    demand: Demand | None
    passed: tuple[Passed, ...]


@dataclass
class _Alike:
    """What all ops of one signature, shapes and numbers have in common. `shapes` is the number of the shapes."""

    op: str
    overload: str
    shapes: int
    arguments: list[_Argument] = field(default_factory=list)
    results: dict[int, int] = field(default_factory=dict)  # index of a result that is a tensor → its slot
    named: dict[str, int] = field(default_factory=dict)  # name of an argument that is a tensor → its slot


class ContentUses:
    """The uses of some storages' content. `storages` are those whose content was not captured."""

    def __init__(
        self,
        reader: CaptureReader,
        scan: Scan,
        kernels: tuple[ResolvedKernel | str | None, ...],
        storages: Iterable[int],
    ) -> None:
        self._reader, self._scan, self._kernels = reader, scan, kernels
        self.calls = CapturedCalls(reader, kernels)
        self._origins = frozenset(storages)
        self._ways: dict[int, set[Way]] = {storage: {Way(storage)} for storage in self._origins}
        self._alike: dict[tuple[Shapes, tuple[int, ...]], _Alike] = {}
        self._shapes: dict[Shapes, int] = {}  # numbered, because they are as long as an op's list of tensors
        self._found: dict[int, dict[tuple[int, int, tuple[DemandStep, ...], bool], FoundUse]] = defaultdict(dict)
        if self._origins:
            self._follow()

    def of(self, storage: int) -> list[FoundUse]:
        """The distinct uses of a storage's content, in capture order."""
        return list(self._found.get(storage, {}).values())

    def asking(self, storages: Iterable[int]) -> Asking:
        """The demands of ops on anything computed from the content of these storages."""
        asking: dict[int, dict[int, Demand]] = defaultdict(dict)
        for storage in storages:
            for (shapes, slot, _steps, _followed), each in self._found.get(storage, {}).items():
                if each.demand is not None and each.demand.role is not Role.number:
                    asking[shapes][slot] = each.demand
        return {shapes: list(asking[number].items()) for shapes, number in self._shapes.items() if number in asking}

    def direct_at(self, ordinal: int) -> list[tuple[int, FoundUse]]:
        """The storages whose own content an op reads in a new way, with that use."""
        return self._direct.get(ordinal, [])

    @cached_property
    def _direct(self) -> dict[int, list[tuple[int, FoundUse]]]:
        found: dict[int, list[tuple[int, FoundUse]]] = defaultdict(list)
        for storage, uses in self._found.items():
            for each in uses.values():
                if each.followed and not each.steps:
                    found[each.ordinal].append((storage, each))
        return found

    def use(self, found: FoundUse) -> Use:
        """A use with the details of its op."""
        return Use(
            self.calls.call(found.ordinal),
            found.argument,
            found.position,
            found.tensor,
            found.view,
            found.steps,
            found.followed,
        )

    # --------------------------------------------------------------------------------------------------------- the walk

    def _follow(self) -> None:
        kinds = [0, *(int(signature.kind) for signature in self._reader.signatures[1:] if signature is not None)]
        for index in range(len(self._reader.record_frames)):
            frame = self._reader.frame(index)
            signatures = frame.signature.tolist()
            first_slots = frame.tensor_first.tolist()
            local = frame.tensor_slots.tolist()
            storages = frame.tensor_storage.tolist()
            for row, signature in enumerate(signatures):
                slots = local[first_slots[row] : first_slots[row + 1]]
                if kinds[signature] == RecordKind.op and any(storages[slot] in self._ways for slot in slots):
                    self._op(frame, row, signature, slots, [storages[slot] for slot in slots])
                elif kinds[signature] == RecordKind.storage_import:
                    self._import(frame, row, signature)

    def _import(self, frame: RecordFrame, row: int, signature: int) -> None:
        """Content imported here replaces everything that was followed into the storage."""
        place = self._scan.layout(signature).arg("storage")
        assert place is not None
        storage = int(frame.ints[frame.int_first[row] + place.int_slot])
        if storage in self._origins:
            self._ways[storage] = {Way(storage)}
        else:
            self._ways.pop(storage, None)

    def _op(self, frame: RecordFrame, row: int, signature: int, slots: list[int], storages: list[int]) -> None:
        metas = frame.tensor_meta[slots].tolist()
        ints = frame.ints[frame.int_first[row] : frame.int_first[row + 1]].tolist()
        first: dict[int, int] = {}
        shared = tuple(first.setdefault(storage, slot) for slot, storage in enumerate(storages))
        shapes: Shapes = (signature, tuple(metas), tuple(ints))
        ordinal = frame.first_ordinal + row
        alike = self._alike.get((shapes, shared))
        if alike is None:
            number = self._shapes.setdefault(shapes, len(self._shapes))
            alike = self._alike[shapes, shared] = self._understand(signature, ordinal, number)

        def info(slot: int) -> TensorInfo:
            meta = self._reader.metas[metas[slot]]
            assert meta is not None
            return self.calls.info(storages[slot], meta, int(frame.tensor_offset[slots[slot]]))

        written: dict[int, tuple[TensorInfo, set[Way]]] = {}
        for argument in alike.arguments:
            ways = self._ways.get(storages[argument.slot])
            if ways is None:
                continue
            tensor = info(argument.slot)
            if argument.overwritten:
                written.setdefault(argument.slot, (tensor, set()))
            if not argument.read:
                continue
            for way in ways:
                self._note(way, alike, argument, ordinal, tensor)
                for passed in argument.passed:
                    target = (
                        alike.named.get(passed.written) if passed.result is None else alike.results.get(passed.result)
                    )
                    if target is not None:
                        other = info(target)
                        written.setdefault(target, (other, set()))[1].add(_after(way, passed, tensor, other))
        for target, (tensor, ways) in written.items():
            self._write(storages[target], tensor, ways)

    def _note(self, way: Way, alike: _Alike, argument: _Argument, ordinal: int, tensor: TensorInfo) -> None:
        known = self._found[way.origin]
        own = (alike.shapes, argument.slot, way.steps, way.followed)
        if own in known:
            return
        view = tensor if tensor.storage == way.origin and not way.steps and way.followed else None
        if view is None and way.here is not None and _same_place(way.here, tensor):
            view = way.there
        known[own] = FoundUse(
            ordinal,
            alike.op,
            alike.overload,
            argument.name,
            argument.position,
            tensor,
            view,
            way.steps,
            way.followed,
            argument.demand,
        )

    def _write(self, storage: int, tensor: TensorInfo, ways: set[Way]) -> None:
        """Record that a tensor's part of a storage has new content."""
        before = self._ways.get(storage, set())
        length = self._reader.storage(storage).bytes if storage else 0
        if dense(tensor) and tensor.elements * tensor.dtype.itemsize == length and not tensor.offset:
            before = set()
        after = before | ways
        if len(after) > _MOST_WAYS:
            after = {Way(origin, followed=False) for origin in {way.origin for way in after}}
        if after:
            self._ways[storage] = after
        else:
            self._ways.pop(storage, None)

    # --------------------------------------------------------------------------------------------------- what ops mean

    def _understand(self, signature: int, ordinal: int, shapes: int) -> _Alike:
        layout = self._scan.layout(signature)
        call = self.calls.call(ordinal)
        schema = self._schema(layout)
        alike = _Alike(call.name, call.overload_name, shapes)
        for index, place in enumerate(layout.results):
            if place.node.kind is ValueKind.tensor:
                alike.results[index] = place.tensor_slot
        shared = {each.storage for each in leaves(call.results) if isinstance(each, TensorInfo)}
        for place in layout.args:
            if place.node.kind is ValueKind.tensor:
                alike.named[place.node.name] = place.tensor_slot
            for position, slot, plain in _slots(place):
                tensor = call.tensor(place.node.name, position) if plain else None
                alike.arguments.append(self._argument(call, place.node.name, position, slot, tensor, schema, shared))
        return alike

    def _argument(
        self,
        call: Call,
        name: str,
        position: int | None,
        slot: int,
        tensor: TensorInfo | None,
        schema: torch.FunctionSchema | None,
        shared: set[int],
    ) -> _Argument:
        if tensor is None:  # a part of a composite tensor, or in a list of lists
            return _Argument(name, position, slot, True, False, None, ())
        argument = None if schema is None else next((each for each in schema.arguments if each.name == name), None)
        alias = None if argument is None else argument.alias_info
        known = operator_named(call.name)
        # Without results in the capture (imports of single calls) nothing can read the view either.
        if alias is not None and not alias.is_write and (tensor.storage in shared or not call.results):
            return _Argument(name, position, slot, False, False, None, ())  # a view of it
        writes = alias is not None and alias.is_write
        if writes and (
            (argument is not None and argument.is_out)
            or (name == "self" and (known.overwrites_self or known.moves_memory))
        ):
            return _Argument(name, position, slot, False, True, None, ())
        demand = demand_of(Use(call, name, position, tensor, tensor))
        passed = tuple(passed_on(call, name, tensor))
        return _Argument(
            name, position, slot, True, writes and any(each.written == name for each in passed), demand, passed
        )

    def _schema(self, layout: SlotLayout) -> torch.FunctionSchema | None:
        resolved = self._kernels[layout.signature.kernel]
        if isinstance(resolved, ResolvedKernel):
            return resolved.schema
        captured = self._reader.kernels[layout.signature.kernel]
        try:
            return parse_schema(captured.schema) if captured is not None else None
        except (RuntimeError, ValueError):
            return None


def _slots(place: NodePlace) -> Iterator[tuple[int | None, int, bool]]:
    """The tensors of one argument: position in a list, slot, and whether they are plain arguments or list elements."""
    if place.node.kind is ValueKind.tensor:
        yield None, place.tensor_slot, True
    elif place.node.kind in (ValueKind.list, ValueKind.tuple):
        for position, child in enumerate(place.children):
            for slot in child.tensors:
                yield position, slot, child.node.kind is ValueKind.tensor
    else:
        yield from ((None, slot, False) for slot in place.tensors)


def _after(way: Way, passed: Passed, tensor: TensorInfo, target: TensorInfo) -> Way:
    """How content came to `target`, if it is made from `tensor`, whose content came by `way`."""
    steps = way.steps + passed.steps
    followed = way.followed and passed.followed and len(steps) <= _MOST_STEPS
    if not followed:
        return Way(way.origin, followed=False)
    there = None
    if passed.whole and not steps:
        if tensor.storage == way.origin:
            there = tensor
        elif way.here is not None and _same_place(way.here, tensor):
            there = way.there
    return Way(way.origin, steps, True, target if there is not None else None, there)


def leaves(value: Any) -> list[Any]:
    """A value, or everything in a tuple, but nothing for None."""
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [] if value is None else [value]


def _same_place(one: TensorInfo, other: TensorInfo) -> bool:
    return (one.storage, one.offset, one.sizes, one.strides) == (
        other.storage,
        other.offset,
        other.sizes,
        other.strides,
    )


def dense(tensor: TensorInfo) -> bool:
    """Whether a tensor's elements fill their memory without gaps, in any order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.sizes, tensor.strides, strict=True), key=lambda each: each[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
