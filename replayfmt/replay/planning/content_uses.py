"""Finds every way in which ops use content that was not captured.

One pass over the ops follows the content from the storage it enters, through copies and simple computations, to every
op that reads it. Ops that are alike (same signature, shapes and numbers) are analyzed once. `IndexRanges` goes forward
with the value range of every integer tensor: it checks whether a constant is safe content where the program computes
indices from it in ways that cannot be traced back.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from replayfmt.format.codes import DType, MemoryFormat, RecordKind, ValueKind
from replayfmt.format.codes import Layout as LayoutCode
from replayfmt.format.model import CompositeValue, DeviceValue, TensorMeta, TensorValue, Value, is_dense
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.signature_layout import NodePlace, SlotLayout
from replayfmt.initializers.demands import Demand, DemandStep, Role
from replayfmt.initializers.initializer import Call, TensorInfo, Use
from replayfmt.initializers.operator_rules import Propagation, base_name, demand_of, is_integral, propagate
from replayfmt.pytorch import operators
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT

from .kernels import ResolvedKernel
from .scan import Scan

# For an op that takes a list of tensors, each of them is requested separately.
_RECENT = 32


class CapturedCalls:
    """Makes calls from records. `kernels` has, by kernel id, the resolved kernel or the reason why there is none.

    A record is not decoded again while its call is referenced, and for a while after.
    """

    def __init__(self, reader: CaptureReader, kernels: tuple[ResolvedKernel | str | None, ...]) -> None:
        self._reader = reader
        self._kernels = kernels
        self._alive: WeakValueDictionary[int, Call] = WeakValueDictionary()
        self._recent: deque[Call] = deque(maxlen=_RECENT)

    def call(self, ordinal: int) -> Call:
        call = self._alive.get(ordinal)
        if call is None:
            call = self._alive[ordinal] = self._decode(ordinal)
            self._recent.append(call)
        return call

    def _decode(self, ordinal: int) -> Call:
        record = self._reader.record(ordinal)
        assert record.kind is RecordKind.op
        kernel = self._reader.kernels[record.signature.kernel]
        resolved = self._kernels[record.signature.kernel]
        named = {node.name: self._value(value) for node, value in zip(record.signature.args, record.args, strict=True)}
        return Call(
            ordinal,
            kernel.name,
            kernel.overload,
            named,
            tuple(map(self._value, record.results)),
            self._reader.scope_path(record.scope),
            record.annotation or {},
            resolved.schema if isinstance(resolved, ResolvedKernel) else None,
            isinstance(resolved, ResolvedKernel) and resolved.elementwise,
        )

    def info(self, storage: int, meta: TensorMeta, offset: int) -> TensorInfo:
        """A tensor. Raises KeyError if this torch does not know its dtype."""
        device = self._reader.devices[meta.device]
        return TensorInfo(storage, TORCH_DTYPE[meta.dtype], meta.sizes, meta.strides, offset, str(device or ""))

    def _value(self, value: Value) -> Any:
        match value:
            case TensorValue():
                return self.info(value.storage, value.meta, value.offset)
            case list() | tuple():
                return tuple(map(self._value, value))
            case CompositeValue():
                return tuple(map(self._value, value.parts))
            case DType():
                return TORCH_DTYPE[value]
            case LayoutCode():
                return TORCH_LAYOUT[value]
            case MemoryFormat():
                return TORCH_MEMORY_FORMAT[value]
            case DeviceValue():
                return str(self._reader.devices[value.id])
            case None | bool() | int() | float() | complex() | str():
                return value
        return None


# Content is not followed through more steps, or in more ways, than this.
_MOST_STEPS = 12
_MOST_WAYS = 16
# An op's signature, metadata ids and integers.
Shapes = tuple[int, tuple[int, ...], tuple[int, ...]]
# Which tensor slots of ops of these shapes make demands, and which.
IndexDemands = Mapping[Shapes, Sequence[tuple[int, Demand]]]


@dataclass(frozen=True)
class ContentProvenance:
    """How a storage got its content: from storage `origin`, through `steps`, or not `followed`.

    `here` is the tensor whose elements are those of the tensor `there` on the origin, in order; None if there is no
    such tensor.
    """

    origin: int
    steps: tuple[DemandStep, ...] = ()
    followed: bool = True
    here: TensorInfo | None = None
    there: TensorInfo | None = None

    def on_origin(self, tensor: TensorInfo) -> TensorInfo | None:
        """The tensor on the origin with the elements of this one on the storage, in order; None if there is none."""
        if self.steps or not self.followed:
            return None
        if tensor.storage == self.origin:
            return tensor
        return self.there if self.here is not None and _same_place(self.here, tensor) else None


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
    passed: tuple[Propagation, ...]


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
        self._ways: dict[int, set[ContentProvenance]] = {
            storage: {ContentProvenance(storage)} for storage in self._origins
        }
        self._alike: dict[tuple[Shapes, tuple[int, ...]], _Alike] = {}
        self._shapes: dict[Shapes, int] = {}  # numbered, because they are as long as an op's list of tensors
        self._found: dict[int, dict[tuple[int, int, tuple[DemandStep, ...], bool], FoundUse]] = defaultdict(dict)
        if self._origins:
            self._follow()

    def of(self, storage: int) -> list[FoundUse]:
        """The distinct uses of a storage's content, in capture order."""
        return list(self._found.get(storage, {}).values())

    def asking(self, storages: Iterable[int]) -> IndexDemands:
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
        return Use(
            self.calls.call(found.ordinal),
            found.argument,
            found.position,
            found.tensor,
            found.view,
            found.steps,
            found.followed,
        )

    def _follow(self) -> None:
        kinds = self._reader.signature_kinds.tolist()
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
            self._ways[storage] = {ContentProvenance(storage)}
        else:
            self._ways.pop(storage, None)

    def _op(self, frame: RecordFrame, row: int, signature: int, slots: list[int], storages: list[int]) -> None:
        metas = frame.tensor_meta[slots].tolist()
        ints = frame.ints_of(row).tolist()
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
            return self.calls.info(storages[slot], meta, int(frame.tensor_offset[slots[slot]]))

        written: dict[int, tuple[TensorInfo, set[ContentProvenance]]] = {}
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

    def _note(
        self, way: ContentProvenance, alike: _Alike, argument: _Argument, ordinal: int, tensor: TensorInfo
    ) -> None:
        known = self._found[way.origin]
        own = (alike.shapes, argument.slot, way.steps, way.followed)
        if own in known:
            return
        known[own] = FoundUse(
            ordinal,
            alike.op,
            alike.overload,
            argument.name,
            argument.position,
            tensor,
            way.on_origin(tensor),
            way.steps,
            way.followed,
            argument.demand,
        )

    def _write(self, storage: int, tensor: TensorInfo, ways: set[ContentProvenance]) -> None:
        """Record that a tensor's part of a storage has new content."""
        before = self._ways.get(storage, set())
        length = self._reader.storage(storage).bytes if storage else 0
        if _covers(tensor, length) and not tensor.offset:
            before = set()
        after = before | ways
        if len(after) > _MOST_WAYS:
            after = {ContentProvenance(origin, followed=False) for origin in {way.origin for way in after}}
        if after:
            self._ways[storage] = after
        else:
            self._ways.pop(storage, None)

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
        passed = tuple(propagate(call, name, tensor))
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


def _after(way: ContentProvenance, passed: Propagation, tensor: TensorInfo, target: TensorInfo) -> ContentProvenance:
    """How content came to `target`, if it is made from `tensor`, whose content came by `way`."""
    steps = way.steps + passed.steps
    followed = way.followed and passed.followed and len(steps) <= _MOST_STEPS
    if not followed:
        return ContentProvenance(way.origin, followed=False)
    there = way.on_origin(tensor) if passed.whole and not passed.steps else None
    return ContentProvenance(way.origin, steps, True, target if there is not None else None, there)


def leaves(value: Any) -> list[Any]:
    """A value, or everything in a tuple, but nothing for None."""
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [] if value is None else [value]


def _same_place(one: TensorInfo, other: TensorInfo) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("storage", "offset", "sizes", "strides"))


def _covers(tensor: TensorInfo, length_bytes: int) -> bool:
    """Whether a tensor's elements are all of a memory of that length."""
    return is_dense(tensor.sizes, tensor.strides) and tensor.elements * tensor.dtype.itemsize == length_bytes


class ValueRange(NamedTuple):
    """From `low` to `high`, both included."""

    low: float
    high: float

    def joined(self, other: ValueRange) -> ValueRange:
        return ValueRange(min(self.low, other.low), max(self.high, other.high))


_TRUTH = ValueRange(0, 1)
RangeOf = Callable[[Any], ValueRange | None]


class IndexRanges:
    """One pass: `contents` are the ranges of storages whose content is decided; `asking` says which arguments of which
    ops must be within bounds. `holds` is whether all of them are."""

    def __init__(
        self, reader: CaptureReader, calls: CapturedCalls, contents: Mapping[int, ValueRange], asking: IndexDemands
    ) -> None:
        self._reader, self._calls, self._asking = reader, calls, asking
        self._ranges: dict[int, ValueRange] = dict(contents)
        self._dtypes: dict[int, torch.dtype] = {}  # the dtype that an op wrote
        self._contents = contents
        self._integral = [
            meta is not None and is_integral(TORCH_DTYPE.get(meta.dtype, torch.float32)) for meta in reader.metas
        ]
        self.holds = all(self._frame(reader.frame(index)) for index in range(len(reader.record_frames)))

    def _frame(self, frame: RecordFrame) -> bool:
        kinds = self._reader.signature_kinds.tolist()
        for row, signature in enumerate(frame.signature.tolist()):
            slots = frame.slots_of(row)
            metas = frame.tensor_meta[slots].tolist()
            if kinds[signature] == RecordKind.storage_import:
                self._import(frame, row, signature)
            elif kinds[signature] == RecordKind.op and any(self._integral[meta] for meta in metas):
                ints = frame.ints_of(row).tolist()
                storages = frame.tensor_storage[slots].tolist()
                for slot, demand in self._asking.get((signature, tuple(metas), tuple(ints)), ()):
                    known = self._ranges.get(storages[slot])
                    if known is None or demand.low is None or demand.high is None:
                        return False
                    if known.low < demand.low or known.high > demand.high:
                        return False
                self._op(self._calls.call(frame.first_ordinal + row))
        return True

    def _import(self, frame: RecordFrame, row: int, signature: int) -> None:
        """Imported content: the range decided for it, else unknown."""
        for storage in (int(value) for value in frame.ints[frame.int_first[row] : frame.int_first[row] + 1]):
            if storage not in self._contents:
                self._ranges.pop(storage, None)

    def _op(self, call: Call) -> None:
        in_place = call.name.endswith("_") and not call.name.endswith("__")
        target = call.tensor("self") if in_place else None
        for tensor in _written(call):
            if tensor is not target:
                self._ranges.pop(tensor.storage, None)
        if target is not None:
            if is_integral(target.dtype):
                self._write(target, _TRUTH if target.dtype is torch.bool else result_range(call, self._range_of, 0))
            return
        shared = {each.storage for each in leaves(tuple(call.arguments.values())) if isinstance(each, TensorInfo)}
        for index, result in enumerate(call.results):
            if isinstance(result, TensorInfo) and is_integral(result.dtype) and result.storage not in shared:
                self._write(result, _TRUTH if result.dtype is torch.bool else result_range(call, self._range_of, index))

    def _range_of(self, value: Any) -> ValueRange | None:
        """The range of an argument: that of a number, or what is known about a tensor."""
        if isinstance(value, TensorInfo):
            if value.dtype is torch.bool:
                return _TRUTH
            same = self._dtypes.get(value.storage, value.dtype) is value.dtype
            return self._ranges.get(value.storage) if same else None
        return ValueRange(value, value) if isinstance(value, int | float) else None

    def _write(self, tensor: TensorInfo, known: ValueRange | None) -> None:
        """If only a part of the storage is written, the rest keeps its values."""
        if not tensor.storage:
            return
        if known is not None and tensor.dtype is not torch.bool:
            info = torch.iinfo(tensor.dtype)
            if known.low < info.min or known.high > info.max:
                known = None  # it wraps around
        whole = _covers(tensor, self._reader.storage(tensor.storage).bytes)
        if not whole and known is not None:
            before = self._range_of(tensor)
            known = None if before is None else before.joined(known)
        if known is None:
            self._ranges.pop(tensor.storage, None)
        else:
            self._ranges[tensor.storage] = known
            self._dtypes[tensor.storage] = tensor.dtype


# Ops whose results consist of elements of these arguments and nothing else.
# fmt: off
_CHOSEN = {
    **dict.fromkeys(("clone", "_to_copy", "contiguous", "index_select", "gather", "index", "take", "repeat", "roll",
                     "flip", "expand_copy", "_reshape_copy", "permute_copy", "masked_select", "unfold_copy", "sort",
                     "topk", "amax", "amin", "cummax", "lift_fresh", "_unique2"), ("self",)),
    "cat": ("tensors",), "stack": ("tensors",), "copy": ("src",), "fill": ("value",), "full": ("fill_value",),
    "full_like": ("fill_value",), "new_full": ("fill_value",), "masked_fill": ("self", "value"),
    **dict.fromkeys(("where", "maximum", "minimum", "max", "min"), ("self", "other")), "scalar_tensor": ("s",),
    "scatter": ("self", "src", "value"), "index_put": ("self", "values"), "index_fill": ("self", "value"),
    "index_copy": ("self", "source"), "slice_scatter": ("self", "src"), "select_scatter": ("self", "src"),
}
# fmt: on
# Ops with a result that holds indices into `dim` of self: which result.
_PLACES = {"argmax": 0, "argmin": 0, "argsort": 0, "sort": 1, "topk": 1, "max": 1, "min": 1}


def result_range(call: Call, range_of: RangeOf, index: int) -> ValueRange | None:
    """The range of an integer result, None if it is unknown. For an in-place op it is the range of the written
    values."""
    base = base_name(call.name)
    if _PLACES.get(base) == index:
        return _place(call, "dim")
    if base in _CHOSEN and index == 0:
        if call.arguments.get("accumulate") or call.arguments.get("reduce"):
            return None
        return _joined([each for name in _CHOSEN[base] for each in leaves(call.arguments.get(name))], range_of)
    one, other = range_of(call.arguments.get("self")), range_of(call.arguments.get("other"))
    alpha = call.integer("alpha", 1) or 0
    match base:
        case "zeros" | "zeros_like" | "new_zeros" | "zero":
            return ValueRange(0, 0)
        case "ones" | "ones_like" | "new_ones":
            return ValueRange(1, 1)
        case "arange":
            start, end = call.integer("start", 0), call.integer("end")
            if start is not None and end is not None and end > start and (call.integer("step", 1) or 0) > 0:
                return ValueRange(start, end - 1)
        case "multinomial":
            return _place(call, -1)
        case "randint":
            low, high = call.integer("low", 0), call.integer("high")
            return None if low is None or high is None else ValueRange(low, high - 1)
        case "add" if one is not None and other is not None:
            return _span(one, ValueRange(*sorted((other.low * alpha, other.high * alpha))), lambda a, b: a + b)
        case "sub" if one is not None and other is not None:
            return _span(one, ValueRange(*sorted((other.low * alpha, other.high * alpha))), lambda a, b: a - b)
        case "rsub" if one is not None and other is not None and alpha == 1:
            return _span(other, one, lambda a, b: a - b)
        case "mul" if one is not None and other is not None:
            return _span(one, other, lambda a, b: a * b)
        case "neg" if one is not None:
            return ValueRange(-one.high, -one.low)
        case "bitwise_and" if one is not None and other is not None and min(one.low, other.low) >= 0:
            return ValueRange(0, min(one.high, other.high))
        case "bitwise_or" if one == _TRUTH and other == _TRUTH:
            return _TRUTH
        case "remainder" if other is not None and other.low == other.high > 0:
            return ValueRange(0, other.high - 1)
        case "cumsum" | "sum" if one is not None:
            return _summed(call, one)
        case "searchsorted" | "bucketize":
            sequence = call.tensor("sorted_sequence") or call.tensor("boundaries")
            return ValueRange(0, sequence.sizes[-1]) if sequence is not None and sequence.sizes else None
        case "clamp":
            least, most = range_of(call.arguments.get("min")), range_of(call.arguments.get("max"))
            if one is None:
                return None if least is None or most is None else ValueRange(min(least.low, most.low), most.high)
            if least is None or most is None or least.low <= most.high:
                lowest = one.low if least is None else max(one.low, least.low)
                return ValueRange(lowest, max(lowest, one.high if most is None else min(one.high, most.high)))
    return None


def _summed(call: Call, one: ValueRange) -> ValueRange | None:
    """The range of sums over all elements, or along dimensions."""
    info, dims = call.tensor("self"), call.arguments.get("dim")
    if info is None:
        return None
    along = (dims,) if isinstance(dims, int) else dims
    count = math.prod(info.sizes[dim] for dim in along) if info.sizes and along else info.elements
    if not count:
        return ValueRange(0, 0)
    return ValueRange(min(one.low, one.low * count), max(one.high, one.high * count))


def _written(call: Call) -> list[TensorInfo]:
    """The arguments that an op may write: those its schema declares; for an op that is not PyTorch's own, all of
    them."""
    operator = operators.operator_named(call.name)
    names = set(call.arguments)
    if operator.own and call.schema is not None:
        names = {
            each.name for each in call.schema.arguments if each.alias_info is not None and each.alias_info.is_write
        }
        names.update(operator.quiet_writes)
    found = [leaf for name in names for leaf in leaves(call.arguments.get(name))]
    return [each for each in found if isinstance(each, TensorInfo)]


def _joined(values: list[Any], range_of: RangeOf) -> ValueRange | None:
    ranges = [range_of(value) for value in values]
    joined: ValueRange | None = None
    for each in ranges:
        if each is None:
            return None
        joined = each if joined is None else joined.joined(each)
    return joined


def _place(call: Call, dim: str | int) -> ValueRange | None:
    """An index into a dimension of self."""
    info = call.tensor("self")
    if info is None:
        return None
    number = call.arguments.get(dim) if isinstance(dim, str) else dim
    if number is None and dim == "dim" and base_name(call.name) in ("sort", "topk", "argsort"):
        number = -1
    if not info.sizes:
        return ValueRange(0, 0)
    size = info.elements if number is None else info.sizes[number] if isinstance(number, int) else 0
    return ValueRange(0, size - 1) if size else None


def _span(one: ValueRange, other: ValueRange, compute: Callable[[float, float], float]) -> ValueRange:
    ends = [compute(a, b) for a in one for b in other]
    return ValueRange(min(ends), max(ends))
