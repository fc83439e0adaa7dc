"""What a profiler event was a call of: its recorded arguments read by the operator that fits them.

The profiler prints for each argument a type, sizes, strides and, for numbers and lists of numbers, the value. It does
not say the overload, the device, the dtype of the tensors in a list, or anything of strings, devices and generators.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replayfmt.format.codes import ITEM_BYTES, DType
from replayfmt.pytorch.op_libraries import STRING_DEFAULTS

from .arguments import (
    HIDDEN_LIST,
    HIDDEN_NUMBER,
    NOTHING,
    UNRECORDED,
    DeviceName,
    Form,
    Reader,
    Recorded,
    TensorSpec,
    of_list,
    of_tensor,
    parse,
)
from .kineto_events import OpKind, WorkKind
from .operators import Operator, Operators
from .report import Status
from .results import Results, infer, shapes
from .types import dtype_of, wrapped

_LISTS = frozenset({"TensorList", "GenericList", "OptionalTensorList", "Tensor[]"})
_SCALARS = frozenset({"Scalar", "ScalarList", "Int", "Double", "Bool", "Float"})
_ELEMENT = re.compile(r"\b(?:c10|at)::(BFloat16|Half|Float8_\w+)\b|"
                      r"\b(double|float|long|unsigned char|signed char|bool)\b")
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
_WRAPPED = (DType.float64, DType.int64, DType.bool, DType.complex128)
Geometry = tuple[tuple[int, ...], tuple[int, ...] | None]


@dataclass(frozen=True)
class Placement:
    """Where a call ran: `device` is a name; `upload` and `download` say that it copied from or to host memory."""

    device: str
    upload: bool = False
    download: bool = False


@dataclass(frozen=True)
class Call:
    """A resolved event kind. `operator` is None, `reason` and `detail` say why, where it cannot be called."""

    name: str
    operator: Operator | None
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
    """Where the dtype of a list's tensors may be learned: from what a call called, and from its kernels' names."""

    called: Sequence[OpKind] = ()
    work: Sequence[WorkKind] = ()


@dataclass
class Read:
    """Recorded arguments of one event kind, with what was assumed to read them; or what is missing."""

    arguments: list[Recorded] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    missing: str = ""


class Calls:
    """Resolves event kinds. `kinds` are all of the trace: they say which dtypes tensors of a size have in it."""

    def __init__(self, operators: Operators, kinds: Iterable[OpKind]) -> None:
        self._operators = operators
        self._reader = Reader(STRING_DEFAULTS)
        self._results: dict[str, Results] = {}
        self._returned: dict[tuple[int, ...], set[DType]] = defaultdict(set)
        self._dtypes: dict[Geometry, set[DType]] = defaultdict(set)
        self._sized: dict[tuple[int, ...], set[DType]] = defaultdict(set)
        self._records = False
        for kind in kinds:
            self._records |= kind.recorded is not None
            for geometry, dtype in _typed(kind):
                self._dtypes[geometry].add(dtype)
                self._sized[geometry[0]].add(dtype)

    def resolve(self, kind: OpKind, placement: Placement, hints: Hints) -> Call:
        """The call that an event of this kind was, at this place."""
        # Where arguments are recorded at all, an event without any has none to record.
        read = Read() if kind.recorded is None and self._records else read_arguments(kind)
        shown = signature_text(read.arguments)
        if read.missing:
            known, why = self._operators.candidates(kind.name)
            reason, detail = ("import_incomplete", read.missing) if known else ("no_schema", why)
            return Call(kind.name, None, reason=reason, detail=detail, signature=shown)
        arguments = [self._with_dtypes(each, read, hints) for each in read.arguments]
        if any(_undetermined(item) for each in arguments for item in each.items):
            arguments = self._by_results(kind.name, arguments, read, hints)
        choice = self._operators.choose(kind.name, arguments)
        if choice.operator is None:
            return Call(kind.name, None, reason=choice.reason, detail=choice.detail, signature=shown)
        binding = self._reader.bind(choice.operator.schema, arguments)
        if binding.missing:
            return Call(kind.name, None, reason="import_incomplete", detail="; ".join(binding.missing),
                        signature=shown)
        assumed = [*choice.assumed, *read.assumed, *binding.assumed]
        bound = place(choice.operator.name, binding.arguments, placement, assumed)
        key = f"{choice.operator.schema}|{bound!r}"
        if key not in self._results:
            self._results[key] = infer(choice.operator.schema, bound)
            for shape in shapes(self._results[key].values or ()):
                self._returned[shape.sizes].add(shape.dtype)
        return Call(kind.name, choice.operator, tuple(bound), self._results[key], tuple(assumed), signature=shown)

    def _with_dtypes(self, recorded: Recorded, read: Read, hints: Hints) -> Recorded:
        """An argument, the dtypes of a list's tensors filled in where they can be learned."""
        if recorded.form is not Form.items or not any(_undetermined(item) for item in recorded.items):
            return recorded
        found: dict[DType, str] = {}
        unknown = False
        items = list(recorded.items)
        for place, item in enumerate(items):
            if _undetermined(item):
                assert item.tensor is not None
                dtype, why = self._dtype(item.tensor, read, hints)
                if dtype is None:
                    unknown = True
                    continue
                found.setdefault(dtype, why)
                items[place] = _with_dtype(item, dtype)
        if unknown and len(found) == 1:
            dtype = next(iter(found))
            items = [_with_dtype(item, dtype) if _undetermined(item) else item for item in items]
            read.assumed.append(f"some tensors of a list are {dtype.name}: the others are")
        read.assumed += [f"the tensors of a list are {dtype.name}: {why}" for dtype, why in found.items()]
        return replace(recorded, items=tuple(items))

    def _by_results(self, name: str, arguments: list[Recorded], read: Read, hints: Hints) -> list[Recorded]:
        """Arguments with the dtype for lists with which the result is a tensor that the trace has elsewhere.

        Sizes of results do not depend on dtypes, so they are found out with any.
        """
        tried = [_every(each, DType.float32) for each in arguments]
        choice = self._operators.choose(name, tried)
        binding = self._reader.bind(choice.operator.schema, tried) if choice.operator is not None else None
        if binding is None or binding.missing:
            return arguments
        results = infer(choice.operator.schema, binding.arguments)  # type: ignore[union-attr]
        found = {dtype for shape in shapes(results.values or ())
                 for dtype in self._dtypes.get((shape.sizes, shape.strides), self._sized.get(shape.sizes, ()))}
        widths = _kernel_widths(hints.work)
        found = {dtype for dtype in found if not widths or ITEM_BYTES[dtype] in widths}
        if len(found) != 1:
            return arguments
        dtype = _only(found)
        of_width = f" of the {min(widths)} bytes that the kernel copies" if widths else ""
        read.assumed.append(f"the tensors of a list are {dtype.name}: the only dtype{of_width} that tensors like the "
                            "result have in the trace")
        return [_every(each, dtype) for each in arguments]

    def _dtype(self, spec: TensorSpec, read: Read, hints: Hints) -> tuple[DType | None, str]:
        assert spec.sizes is not None
        called = {dtype for kind in hints.called for (sizes, _strides), dtype in _typed(kind) if sizes == spec.sizes}
        if len(called) == 1:
            return _only(called), "the operators that this one called had tensors of these sizes with that dtype"
        beside = {each.tensor.dtype for each in read.arguments if each.tensor is not None and each.tensor.dtype}
        known = self._dtypes.get((spec.sizes, spec.strides), set()) or called
        kernel = _kernel_dtypes(hints.work)
        if len(known & kernel) == 1:
            return _only(known & kernel), "the kernel's name has it, and tensors of these sizes have it in the trace"
        widths = _kernel_widths(hints.work)
        if widths:
            known = {dtype for dtype in known if ITEM_BYTES[dtype] in widths}
        if len(known) == 1:
            return _only(known), "the only one that tensors of these sizes and strides have in the trace" + (
                f", of the {min(widths)} bytes that the kernel copies" if widths else "")
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


# -------------------------------------------------------------------------------------------------------------- reading


def read_arguments(kind: OpKind) -> Read:
    """What the trace says of each argument."""
    given = kind.recorded
    if given is None or given["Input Dims"] is None:
        return Read(missing="the trace says nothing of its arguments; profile with record_shapes=True")
    types, dims = given["Input type"], given["Input Dims"]
    strides, concrete = given["Input Strides"], given["Concrete Inputs"]
    columns = [each for each in (types, dims, strides, concrete) if each is not None]
    if not all(isinstance(each, list) for each in columns):
        return Read(missing="its arguments are recorded in a form that is not known")
    if types is None:
        return Read(missing="the trace has no types of arguments")
    read = Read()
    for index in range(max(map(len, columns), default=0)):
        read.arguments.append(_argument(_at(types, index), _at(dims, index), _at(strides, index), _at(concrete, index),
                                        concrete is not None, read))
    _settle_empty_lists(types, read)
    return read


def _settle_empty_lists(types: list[Any], read: Read) -> None:
    """A list of tensors without sizes is empty, or too long for the profiler: the call's other lists tell."""
    empty = [place for place, each in enumerate(read.arguments)
             if each is UNRECORDED and wrapped(str(_at(types, place)))[0] in _LISTS]
    if empty and any(each.items and each.items[0].tensor is not None for each in read.arguments):
        for place in empty:
            read.arguments[place] = of_list([], "[]")
        read.assumed.append("a list of tensors that the trace shows without any is empty: it shows those of the others")


def _at(column: list[Any] | None, index: int) -> Any:
    return column[index] if column is not None and index < len(column) else None


def _argument(kind: Any, dims: Any, strides: Any, concrete: Any, has_values: bool, read: Read) -> Recorded:
    name = str(kind or "")
    text = str(concrete) if concrete not in (None, "") else ""
    head, inner = wrapped(name)
    if head in _LISTS and (inner or dims):
        return _tensors(inner, dims, strides, read)
    if name.startswith("nullptr"):
        return NOTHING
    dtype = None if name in _SCALARS else dtype_of(name)
    if dtype is not None or head == "Tensor":
        return of_tensor(_spec(dtype or (dtype_of(inner[0]) if inner else None), dims, strides, read), name)
    if text:
        return parse(text)
    if name in _SCALARS:
        if has_values:
            return of_list([], "[]") if name == "ScalarList" and concrete == "[]" else _empty(name)
        return HIDDEN_LIST if name == "ScalarList" else HIDDEN_NUMBER
    if _is_sizes(dims) and dims:
        return of_tensor(_spec(None, dims, strides, read), name)
    return UNRECORDED


def _empty(name: str) -> Recorded:
    """A number whose text is empty: cut out of the trace."""
    return HIDDEN_LIST if name == "ScalarList" else HIDDEN_NUMBER


def _tensors(types: list[str], dims: Any, strides: Any, read: Read) -> Recorded:
    if not isinstance(dims, list):
        return Recorded(Form.truncated, shown="a list of tensors whose sizes are not recorded")
    items = []
    for index, sizes in enumerate(dims):
        dtype = None
        if index < len(types):
            _head, inner = wrapped(types[index])
            dtype = dtype_of(inner[0] if inner else types[index])
        items.append(of_tensor(_spec(dtype, sizes, _at(strides if isinstance(strides, list) else None, index), read)))
    return of_list(items, f"{len(items)} tensors")


def _spec(dtype: DType | None, dims: Any, strides: Any, read: Read) -> TensorSpec:
    if not _is_sizes(dims):
        return TensorSpec(dtype, None)
    sizes = tuple(dims)
    if _is_sizes(strides) and len(strides) == len(sizes):
        return TensorSpec(dtype, sizes, tuple(strides))
    if sizes:
        sentence = "strides: the trace has none, contiguous ones are used"
        if sentence not in read.assumed:
            read.assumed.append(sentence)
    return TensorSpec(dtype, sizes)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _only(dtypes: set[DType]) -> DType:
    return next(iter(dtypes))


def _with_dtype(item: Recorded, dtype: DType) -> Recorded:
    assert item.tensor is not None
    return replace(item, tensor=replace(item.tensor, dtype=dtype))


def _every(recorded: Recorded, dtype: DType) -> Recorded:
    """An argument whose tensors of unknown dtype have this one."""
    return replace(recorded, items=tuple(_with_dtype(item, dtype) if _undetermined(item) else item
                                         for item in recorded.items))


def has_lists(kind: OpKind) -> bool:
    """Whether an event kind has a list of tensors, whose dtypes may have to be learned from other calls."""
    types = kind.recorded["Input type"] if kind.recorded else None
    return isinstance(types, list) and any(wrapped(str(name))[0] in _LISTS for name in types)


def _undetermined(item: Recorded) -> bool:
    return item.tensor is not None and item.tensor.dtype is None and item.tensor.sizes is not None


def _typed(kind: OpKind) -> Iterable[tuple[Geometry, DType]]:
    """The sizes and strides of the tensors of an event kind whose dtype it says."""
    given = kind.recorded
    if given is None or not isinstance(given["Input type"], list) or not isinstance(given["Input Dims"], list):
        return
    strides = given["Input Strides"] if isinstance(given["Input Strides"], list) else None
    for index, (name, sizes) in enumerate(zip(given["Input type"], given["Input Dims"], strict=False)):
        dtype = dtype_of(str(name))
        if dtype is not None and _is_sizes(sizes):
            steps = _at(strides, index)
            yield (tuple(sizes), tuple(steps) if _is_sizes(steps) else None), dtype


def _kernel_dtypes(work: Sequence[WorkKind]) -> set[DType]:
    found: set[DType] = set()
    for each in work:
        for exact, plain in _ELEMENT.findall(each.name.replace("unsigned int", "").replace("unsigned long", "")):
            dtype = dtype_of(exact or plain)
            if dtype is not None:
                found.add(dtype)
    return found


def _kernel_widths(work: Sequence[WorkKind]) -> set[int]:
    return {int(width) for each in work for width in _OPAQUE.findall(each.name)}


# -------------------------------------------------------------------------------------------------------------- placing


def place(operator: str, arguments: Sequence[tuple[str, Any]], placement: Placement,
          assumed: list[str]) -> list[tuple[str, Any]]:
    """Arguments with their devices filled in; what the trace does not say is added to `assumed`."""
    specs = [spec for _name, value in arguments for spec in _specs(value)]
    dimensions = any(spec.sizes for spec in specs)
    placed: list[tuple[str, Any]] = []
    for position, (name, value) in enumerate(arguments):
        if isinstance(value, DeviceName) and value.name is None:
            value = _device(operator, placement, bool(specs), assumed)
        elif isinstance(value, TensorSpec | list):
            value = _placed(operator, value, position, placement, dimensions and len(specs) > 1, assumed)
        placed.append((name, value))
    return placed


def _specs(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    return [spec for each in value for spec in _specs(each)] if isinstance(value, list) else []


def _device(operator: str, placement: Placement, has_tensors: bool, assumed: list[str]) -> DeviceName | None:
    if operator in _COPIES and (placement.upload or placement.download):
        name = "cpu" if placement.download else placement.device
        assumed.append(f"device={name}: the trace does not record devices; its copy went there")
        return DeviceName(name)
    if has_tensors:
        assumed.append("device=None: the trace does not record devices; that of the other tensors is used")
        return None
    assumed.append(f"device={placement.device}: the trace does not record devices; it is where the call's work ran")
    return DeviceName(placement.device)


def _placed(operator: str, value: Any, position: int, placement: Placement, beside_others: bool,
            assumed: list[str]) -> Any:
    if isinstance(value, list):
        return [_placed(operator, each, position, placement, beside_others, assumed) for each in value]
    if not isinstance(value, TensorSpec):
        return value
    device = placement.device
    if operator in _COPIES:
        source = position == (1 if operator == "aten::copy_" else 0)
        if (source and placement.upload) or (operator == "aten::copy_" and position == 0 and placement.download):
            device = "cpu"
    elif beside_others and value.sizes == () and value.dtype in _WRAPPED and device != "cpu":
        assumed.append(f"a {value.dtype.name} without dimensions is in host memory: Python numbers are passed that way")
        device = "cpu"
    return replace(value, device=device)


def signature_text(arguments: Sequence[Recorded]) -> str:
    """Recorded arguments for people: `bfloat16[4,8], int64[4], 0.5, [1, 2]`."""
    return ", ".join(_text(each) for each in arguments)


def _text(recorded: Recorded) -> str:
    if recorded.tensor is not None:
        spec = recorded.tensor
        sizes = "?" if spec.sizes is None else ",".join(map(str, spec.sizes))
        return f"{spec.dtype.name if spec.dtype else '?'}[{sizes}]"
    if recorded.form is Form.items:
        shown = ", ".join(map(_text, recorded.items[:8]))
        return f"[{shown}, and {len(recorded.items) - 8} more]" if len(recorded.items) > 8 else f"[{shown}]"
    return recorded.shown or "-"
