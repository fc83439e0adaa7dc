"""From a profiler event to an operator call: its recorded arguments, interpreted by the operator that fits them.

The trace does not record the overload, the device, the dtypes of tensors in a list, or any strings and generators: what
replaces them is noted for each call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayfmt.format.codes import ITEM_BYTES, DType
from replayfmt.pytorch.schemas import parse_schema
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE

from ..common.arguments import DeviceName, Form, Reader, Recorded, TensorSpec, score
from ..common.operators import REPLACED, Choice, FoundOperator, Operators
from ..common.report import Status
from ..common.results import Results, infer, refusal, shapes
from ..common.schema_types import schema_type
from .arguments import (
    Geometry,
    Read,
    is_undetermined,
    kernel_dtypes,
    kernel_widths,
    read_arguments,
    signature_text,
    typed,
    with_dtype,
    with_dtype_everywhere,
)
from .events import OpKind, WorkKind

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
# Operators that Python passes numbers instead of tensors, which count less when the result's dtype is chosen.
# fmt: off
_PROMOTING = frozenset(f"aten::{name}{ending}" for ending in ("", "_") for name in (
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "divide", "multiply", "subtract", "pow",
    "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "where", "atan2", "copysign",
    "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "float_power", "xlogy",
    "addcmul", "addcdiv", "lerp", "clamp", "masked_fill", "heaviside", "hypot", "nextafter", "logaddexp", "fmax",
    "fmin", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift"))
# fmt: on
_NUMBERS: dict[DType, Any] = {DType.float64: 1.5, DType.int64: 1, DType.bool: True, DType.complex128: 1j}


@dataclass(frozen=True)
class Placement:
    """Where a call ran: `device` is a name; `upload` and `download` say that it copied from or to host memory."""

    device: str
    upload: bool = False
    download: bool = False


@dataclass(frozen=True)
class ResolvedCall:
    """A resolved event kind. If it cannot be called, `operator` is None, and `reason` and `detail` say why."""

    name: str
    operator: FoundOperator | None
    arguments: tuple[tuple[str, Any], ...] = ()
    results: Results = Results(None, "not a call")
    assumed: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""
    signature: str = ""

    @property
    def status(self) -> Status:
        if self.operator is None:
            return "incomplete"
        return "inferred" if self.assumed else "exact"


@dataclass
class Hints:
    """Sources for the dtype of a list's tensors: the callees of a call, and the names of its kernels."""

    called: Sequence[OpKind] = ()
    work: Sequence[WorkKind] = ()


class EventCalls:
    """Resolves event kinds. `kinds` are all of the trace: they say which dtypes tensors of a size have in it. `foreign`
    has the schemas of operators that are replaced, and so need not be here."""

    def __init__(self, operators: Operators, kinds: Iterable[OpKind], foreign: Mapping[str, str] | None = None) -> None:
        self._foreign = foreign or {}
        self._operators = operators
        self._reader = Reader(operators.names)
        self._results: dict[str, Results] = {}
        self._returned: dict[tuple[int, ...], set[DType]] = defaultdict(set)
        self._dtypes: dict[Geometry, set[DType]] = defaultdict(set)
        self._sized: dict[tuple[int, ...], set[DType]] = defaultdict(set)
        self._records = False
        for kind in kinds:
            self._records |= kind.recorded is not None
            for geometry, dtype in typed(kind):
                self._dtypes[geometry].add(dtype)
                self._sized[geometry[0]].add(dtype)

    def resolve(self, kind: OpKind, placement: Placement, hints: Hints) -> ResolvedCall:
        """The call that an event of this kind was, at this placement."""
        # If arguments are recorded at all, an event without any has no arguments.
        read = Read() if kind.recorded is None and self._records else read_arguments(kind)
        shown = signature_text(read.arguments)
        if read.missing:
            known, why = self._operators.candidates(kind.name)
            reason, detail = ("import_incomplete", read.missing) if known else ("no_schema", why)
            return ResolvedCall(kind.name, None, reason=reason, detail=detail, signature=shown)
        arguments = [self._with_dtypes(each, read, hints) for each in read.arguments]
        if any(is_undetermined(item) for each in arguments for item in each.items):
            arguments = self._by_results(kind.name, arguments, read, hints)
        choice = self._operators.choose(kind.name, arguments)
        if choice.reason == "no_schema":
            choice = self._operators.by_types(kind.name, arguments)
        if choice.operator is None and choice.reason == "no_schema" and kind.name in self._foreign:
            replaced = FoundOperator(parse_schema(self._foreign[kind.name]), REPLACED)
            if score(replaced.schema, arguments) is None:
                return ResolvedCall(
                    kind.name,
                    None,
                    reason="import_incomplete",
                    detail=f"--rewrite=portable knows {replaced.schema}, whose arguments are others",
                    signature=shown,
                )
            choice = Choice(replaced)
        if choice.operator is None:
            return ResolvedCall(kind.name, None, reason=choice.reason, detail=choice.detail, signature=shown)
        binding = self._reader.bind(choice.operator.schema, arguments)
        if binding.missing:
            return ResolvedCall(
                kind.name, None, reason="import_incomplete", detail="; ".join(binding.missing), signature=shown
            )
        assumed = [*choice.assumed, *read.assumed, *binding.assumed]
        required = {each.name for each in choice.operator.schema.arguments if not schema_type(each).optional}
        bound = place(choice.operator.name, binding.arguments, placement, assumed, required)
        key = f"{choice.operator.schema}|{bound!r}"
        if key not in self._results:
            self._results[key] = infer(choice.operator.schema, bound)
            for shape in shapes(self._results[key].values or ()):
                self._returned[shape.sizes].add(shape.dtype)
        results = self._results[key]
        impossible, doubtful = refusal(choice.operator.schema, results)
        if impossible:
            return ResolvedCall(kind.name, None, reason="import_incomplete", detail=impossible, signature=shown)
        assumed += [doubtful] if doubtful else []
        return ResolvedCall(
            kind.name, choice.operator, tuple(bound), results, tuple(dict.fromkeys(assumed)), signature=shown
        )

    def _with_dtypes(self, recorded: Recorded, read: Read, hints: Hints) -> Recorded:
        """An argument, with the dtypes of a list's tensors filled in if they can be inferred."""
        if recorded.form is not Form.items or not any(is_undetermined(item) for item in recorded.items):
            return recorded
        found: dict[DType, str] = {}
        unknown = False
        items = list(recorded.items)
        for place, item in enumerate(items):
            if is_undetermined(item):
                assert item.tensor is not None
                dtype, why = self._dtype(item.tensor, read, hints)
                if dtype is None:
                    unknown = True
                    continue
                found.setdefault(dtype, why)
                items[place] = with_dtype(item, dtype)
        if unknown and len(found) == 1:
            dtype = next(iter(found))
            items = [with_dtype(item, dtype) if is_undetermined(item) else item for item in items]
            read.assumed.append(f"some tensors of a list are {dtype.name}: the others are")
        read.assumed += [f"the tensors of a list are {dtype.name}: {why}" for dtype, why in found.items()]
        return replace(recorded, items=tuple(items))

    def _by_results(self, name: str, arguments: list[Recorded], read: Read, hints: Hints) -> list[Recorded]:
        """Arguments with the list dtype for which the result is a tensor that the trace has elsewhere.

        Sizes of results do not depend on dtypes, so any dtype will do to infer them.
        """
        tried = [with_dtype_everywhere(each, DType.float32) for each in arguments]
        choice = self._operators.choose(name, tried)
        binding = self._reader.bind(choice.operator.schema, tried) if choice.operator is not None else None
        if binding is None or binding.missing:
            return arguments
        results = infer(choice.operator.schema, binding.arguments)  # type: ignore[union-attr]
        found = {
            dtype
            for shape in shapes(results.values or ())
            for dtype in self._dtypes.get((shape.sizes, shape.strides), self._sized.get(shape.sizes, ()))
        }
        widths = kernel_widths(hints.work)
        found = {dtype for dtype in found if not widths or ITEM_BYTES[dtype] in widths}
        if len(found) != 1:
            return arguments
        dtype = _only(found)
        of_width = f" of the {min(widths)} bytes that the kernel copies" if widths else ""
        read.assumed.append(
            f"the tensors of a list are {dtype.name}: the only dtype{of_width} that tensors like the "
            "result have in the trace"
        )
        return [with_dtype_everywhere(each, dtype) for each in arguments]

    def _dtype(self, spec: TensorSpec, read: Read, hints: Hints) -> tuple[DType | None, str]:
        assert spec.sizes is not None
        called = {dtype for kind in hints.called for (sizes, _strides), dtype in typed(kind) if sizes == spec.sizes}
        if len(called) == 1:
            return _only(called), "the operators that this one called had tensors of these sizes with that dtype"
        beside = {each.tensor.dtype for each in read.arguments if each.tensor is not None and each.tensor.dtype}
        known = self._dtypes.get((spec.sizes, spec.strides), set()) or called
        kernel = kernel_dtypes(hints.work)
        if len(known & kernel) == 1:
            return _only(known & kernel), "the kernel's name has it, and tensors of these sizes have it in the trace"
        widths = kernel_widths(hints.work)
        if widths:
            known = {dtype for dtype in known if ITEM_BYTES[dtype] in widths}
        if len(known) == 1:
            return _only(known), "the only one that tensors of these sizes and strides have in the trace" + (
                f", of the {min(widths)} bytes that the kernel copies" if widths else ""
            )
        returned = self._returned.get(spec.sizes, set())
        if widths:
            returned = {dtype for dtype in returned if ITEM_BYTES[dtype] in widths}
        if len(returned) == 1:
            return _only(returned), "the only one that results of these sizes have in the trace"
        if len(kernel) == 1 and not known:
            return _only(kernel), "the only one that the kernel's name has"
        if len(beside) == 1:
            return _only(beside), "the dtype of the call's other tensors"
        return None, ""


def _only(dtypes: set[DType]) -> DType:
    return next(iter(dtypes))


# -------------------------------------------------------------------------------------------------------------- placing


def place(
    operator: str,
    arguments: Sequence[tuple[str, Any]],
    placement: Placement,
    assumed: list[str],
    required: Collection[str] = (),
) -> list[tuple[str, Any]]:
    """Arguments with their devices filled in; assumptions are added to `assumed`. `required` names the arguments that
    must not be None."""
    specs = [spec for _name, value in arguments for spec in _specs(value)]
    placed: list[tuple[str, Any]] = []
    for position, (name, value) in enumerate(arguments):
        if isinstance(value, DeviceName) and value.name is None:
            value = _device(operator, placement, bool(specs) and name not in required, assumed)
        elif isinstance(value, TensorSpec | list):
            value = _placed(operator, value, position, placement, specs, assumed)
        placed.append((name, value))
    return placed


def _specs(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    return [spec for each in value for spec in _specs(each)] if isinstance(value, list) else []


def _device(operator: str, placement: Placement, by_tensors: bool, assumed: list[str]) -> DeviceName | None:
    if operator in _COPIES and (placement.upload or placement.download):
        name = "cpu" if placement.download else placement.device
        assumed.append(f"device={name}: the trace does not record devices; its copy went there")
        return DeviceName(name)
    if by_tensors:
        assumed.append("device=None: the trace does not record devices; that of the other tensors is used")
        return None
    assumed.append(f"device={placement.device}: the trace does not record devices; it is where the call's work ran")
    return DeviceName(placement.device)


def _placed(
    operator: str, value: Any, position: int, placement: Placement, specs: Sequence[TensorSpec], assumed: list[str]
) -> Any:
    if isinstance(value, list):
        return [_placed(operator, each, position, placement, specs, assumed) for each in value]
    if not isinstance(value, TensorSpec):
        return value
    device = placement.device
    if operator in _COPIES:
        source = position == (1 if operator == "aten::copy_" else 0)
        if (source and placement.upload) or (operator == "aten::copy_" and position == 0 and placement.download):
            device = "cpu"
    elif value.sizes == () and value.dtype in _NUMBERS:
        beside = _beside(value, specs)
        if device != "cpu" and any(each.sizes or each.dtype is not value.dtype for each in beside):
            assumed.append(
                f"a {value.dtype.name} without dimensions is in host memory: Python numbers are passed that way"
            )
            device = "cpu"
        elif beside and operator in _PROMOTING:
            assumed.append(_taken_for_a_tensor(value.dtype, beside))
    return replace(value, device=device)


def _beside(value: TensorSpec, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors beside one without dimensions that may be a Python number: those that have some, or else those before
    it, because a call of nothing but numbers there is not."""
    known = [each for each in specs if each.dtype is not None]
    return [each for each in known if each.sizes] or known[
        : next((place for place, each in enumerate(known) if each is value), 0)
    ]


def _taken_for_a_tensor(dtype: DType, beside: Sequence[TensorSpec]) -> str:
    """The assumption about a zero-dimensional tensor that may be a number."""
    told = (
        f"a {dtype.name} without dimensions is treated as a tensor: Python numbers are also passed that way, "
        f"and the trace does not say which"
    )
    first = next((each for each in beside if each.dtype is not DType.bool), beside[0])  # not a condition
    assert first.dtype is not None
    other = torch.empty(1 if first.sizes else (), dtype=TORCH_DTYPE[first.dtype], device="meta")
    as_tensor = torch.result_type(other, torch.empty((), dtype=TORCH_DTYPE[dtype], device="meta"))
    as_number = torch.result_type(other, _NUMBERS[dtype])
    if as_tensor is as_number:
        return told
    return f"{told}; beside {first.dtype.name} a tensor makes it compute in {as_tensor}, a number in {as_number}"
