"""Whether a constant is safe content if the program computes indices from it in ways that cannot be traced back.

Goes forward through the ops with the value range of every integer tensor: the results of the constant in masks that are
counted, or in tokens that are kept or replaced. Ranges are of whole storages, in one dtype. An unknown value has no
range, and fails every check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.initializers import Call, TensorInfo
from replayfmt.initializers.roles import base_name, is_integral
from replayfmt.pytorch import operators
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE

from .calls import CapturedCalls
from .content_uses import Asking, dense, leaves


class Range(NamedTuple):
    """From `low` to `high`, both included."""

    low: float
    high: float

    def joined(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))


_TRUTH = Range(0, 1)
RangeOf = Callable[[Any], Range | None]


class IndexRanges:
    """One pass: `contents` are the ranges of storages whose content is decided; `asking` says which arguments of which
    ops must be within bounds. `holds` is whether all of them are."""

    def __init__(
        self, reader: CaptureReader, calls: CapturedCalls, contents: Mapping[int, Range], asking: Asking
    ) -> None:
        self._reader, self._calls, self._asking = reader, calls, asking
        self._ranges: dict[int, Range] = dict(contents)
        self._dtypes: dict[int, torch.dtype] = {}  # the dtype that an op wrote
        self._contents = contents
        self._integral = [
            meta is not None and is_integral(TORCH_DTYPE.get(meta.dtype, torch.float32)) for meta in reader.metas
        ]
        self.holds = all(self._frame(reader.frame(index)) for index in range(len(reader.record_frames)))

    def _frame(self, frame: RecordFrame) -> bool:
        kinds = [0, *(int(signature.kind) for signature in self._reader.signatures[1:] if signature is not None)]
        for row, signature in enumerate(frame.signature.tolist()):
            slots = frame.tensor_slots[frame.tensor_first[row] : frame.tensor_first[row + 1]]
            metas = frame.tensor_meta[slots].tolist()
            if kinds[signature] == RecordKind.storage_import:
                self._import(frame, row, signature)
            elif kinds[signature] == RecordKind.op and any(self._integral[meta] for meta in metas):
                ints = frame.ints[frame.int_first[row] : frame.int_first[row + 1]].tolist()
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

    def _range_of(self, value: Any) -> Range | None:
        """The range of an argument: that of a number, or what is known about a tensor."""
        if isinstance(value, TensorInfo):
            if value.dtype is torch.bool:
                return _TRUTH
            same = self._dtypes.get(value.storage, value.dtype) is value.dtype
            return self._ranges.get(value.storage) if same else None
        return Range(value, value) if isinstance(value, int | float) else None

    def _write(self, tensor: TensorInfo, known: Range | None) -> None:
        """If only a part of the storage is written, the rest keeps its values."""
        if not tensor.storage:
            return
        if known is not None and tensor.dtype is not torch.bool:
            info = torch.iinfo(tensor.dtype)
            if known.low < info.min or known.high > info.max:
                known = None  # it wraps around
        whole = dense(tensor) and tensor.elements * tensor.dtype.itemsize == self._reader.storage(tensor.storage).bytes
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
_PLACES = {
    "argmax": (0, "dim"),
    "argmin": (0, "dim"),
    "argsort": (0, "dim"),
    "sort": (1, "dim"),
    "topk": (1, "dim"),
    "max": (1, "dim"),
    "min": (1, "dim"),
}


def result_range(call: Call, range_of: RangeOf, index: int) -> Range | None:
    """The range of an integer result, None if it is unknown. For an in-place op it is the range of the written
    values."""
    base = base_name(call.name)
    place = _PLACES.get(base)
    if place is not None and (index == place[0]):
        return _place(call, place[1])
    if base in _CHOSEN and index == 0:
        if call.arguments.get("accumulate") or call.arguments.get("reduce"):
            return None
        return _joined([each for name in _CHOSEN[base] for each in leaves(call.arguments.get(name))], range_of)
    one, other = range_of(call.arguments.get("self")), range_of(call.arguments.get("other"))
    alpha = call.integer("alpha", 1) or 0
    match base:
        case "zeros" | "zeros_like" | "new_zeros" | "zero":
            return Range(0, 0)
        case "ones" | "ones_like" | "new_ones":
            return Range(1, 1)
        case "arange":
            start, end = call.integer("start", 0), call.integer("end")
            if start is not None and end is not None and end > start and (call.integer("step", 1) or 0) > 0:
                return Range(start, end - 1)
        case "multinomial":
            return _place(call, -1)
        case "randint":
            low, high = call.integer("low", 0), call.integer("high")
            return None if low is None or high is None else Range(low, high - 1)
        case "add" if one is not None and other is not None:
            return _span(one, Range(*sorted((other.low * alpha, other.high * alpha))), lambda a, b: a + b)
        case "sub" if one is not None and other is not None:
            return _span(one, Range(*sorted((other.low * alpha, other.high * alpha))), lambda a, b: a - b)
        case "rsub" if one is not None and other is not None and alpha == 1:
            return _span(other, one, lambda a, b: a - b)
        case "mul" if one is not None and other is not None:
            return _span(one, other, lambda a, b: a * b)
        case "neg" if one is not None:
            return Range(-one.high, -one.low)
        case "bitwise_and" if one is not None and other is not None and min(one.low, other.low) >= 0:
            return Range(0, min(one.high, other.high))
        case "bitwise_or" if one == _TRUTH and other == _TRUTH:
            return _TRUTH
        case "remainder" if other is not None and other.low == other.high > 0:
            return Range(0, other.high - 1)
        case "cumsum" | "sum" if one is not None:
            return _summed(call, one)
        case "clamp" if one is not None:
            least, most = range_of(call.arguments.get("min")), range_of(call.arguments.get("max"))
            if least is None or most is None or least.low <= most.high:
                lowest = one.low if least is None else max(one.low, least.low)
                return Range(lowest, max(lowest, one.high if most is None else min(one.high, most.high)))
    return None


def _summed(call: Call, one: Range) -> Range | None:
    """The range of sums over all elements, or along dimensions."""
    info, dims = call.tensor("self"), call.arguments.get("dim")
    if info is None:
        return None
    along = (dims,) if isinstance(dims, int) else dims
    count = math.prod(info.sizes[dim] for dim in along) if info.sizes and along else info.elements
    if not count:
        return Range(0, 0)
    return Range(min(one.low, one.low * count), max(one.high, one.high * count))


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


def _joined(values: list[Any], range_of: RangeOf) -> Range | None:
    ranges = [range_of(value) for value in values]
    joined: Range | None = None
    for each in ranges:
        if each is None:
            return None
        joined = each if joined is None else joined.joined(each)
    return joined


def _place(call: Call, dim: str | int) -> Range | None:
    """An index into a dimension of self."""
    info = call.tensor("self")
    if info is None:
        return None
    number = call.arguments.get(dim) if isinstance(dim, str) else dim
    if number is None and dim == "dim" and base_name(call.name) in ("sort", "topk", "argsort"):
        number = -1
    if not info.sizes:
        return Range(0, 0)
    size = info.elements if number is None else info.sizes[number] if isinstance(number, int) else 0
    return Range(0, size - 1) if size else None


def _span(one: Range, other: Range, compute: Callable[[float, float], float]) -> Range:
    ends = [compute(a, b) for a in one for b in other]
    return Range(min(ends), max(ends))
