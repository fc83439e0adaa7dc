"""From a profiler event to an operator call: its recorded arguments, interpreted by the operator that fits them.

For each argument the profiler prints a type, sizes, strides and, for numbers and lists of numbers, the value. It leaves
out the overload, the device, the dtypes of tensors in a list, lists of more than thirty tensors, and any strings and
generators: what replaces them is noted for each call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from replayfmt.format.codes import ITEM_BYTES, DType
from replayfmt.pytorch.collectives import Unknown
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE
from replayfmt.pytorch.triton.kernels import KernelCode

from ..common.arguments import (
    HIDDEN_LIST,
    HIDDEN_NUMBER,
    NO_NUMBERS,
    NOTHING,
    UNRECORDED,
    ArgumentForm,
    ArgumentReader,
    DeviceName,
    RecordedArgument,
    TensorSpec,
    dtype_of,
    of_list,
    of_tensor,
    parse,
    schema_type,
    score,
    wrapped,
)
from ..common.collectives import OBJECT
from ..common.operators import REPLACED, FoundOperator, OperatorChoice, Operators
from ..common.report import Status
from ..common.results import Results, Trials, refusal, shapes
from ..rewrites.engines import engine_name
from .events import OpKind, WorkKind

_LISTS = frozenset({"TensorList", "GenericList", "OptionalTensorList", "Tensor[]"})
_SCALARS = frozenset({"Scalar", "ScalarList", "Int", "Double", "Bool", "Float"})
_ELEMENT = re.compile(
    r"\b(?:c10|at)::(BFloat16|Half|Float8_\w+)\b|"
    r"\b(double|float|long|unsigned char|signed char|bool)\b"
)
_QUANTIZED = frozenset({DType.qint8, DType.quint8, DType.qint32, DType.quint4x2, DType.quint2x4})
_COMPLEX = frozenset({DType.complex32, DType.complex64, DType.complex128})
_PLAIN_COMPLEX = "complex tensors are assumed not conjugated: the trace does not say"
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
Geometry = tuple[tuple[int, ...], tuple[int, ...] | None]


@dataclass
class ReadArguments:
    """Recorded arguments of one event kind, with the assumptions made in reading them; or what is missing."""

    arguments: list[RecordedArgument] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    missing: str = ""


def read_arguments(kind: OpKind) -> ReadArguments:
    """What the trace says about each argument."""
    given = kind.recorded
    if given is None or given["Input Dims"] is None:
        return ReadArguments(missing="the trace says nothing of its arguments; profile with record_shapes=True")
    types, dims = given["Input type"], given["Input Dims"]
    strides, concrete = given["Input Strides"], given["Concrete Inputs"]
    columns = [each for each in (types, dims, strides, concrete) if each is not None]
    if not all(isinstance(each, list) for each in columns):
        return ReadArguments(missing="its arguments are recorded in a form that is not known")
    if types is None:
        return ReadArguments(missing="the trace has no types of arguments")
    read = ReadArguments()
    for index in range(max(map(len, columns), default=0)):
        read.arguments.append(
            _argument(
                _at(types, index),
                _at(dims, index),
                _at(strides, index),
                _at(concrete, index),
                concrete is not None,
                read,
            )
        )
    _settle_empty_lists(types, read)
    return read


def _settle_empty_lists(types: list[Any], read: ReadArguments) -> None:
    """A list of tensors without sizes is empty, or too long for the profiler: the call's other lists decide."""
    empty = [
        place
        for place, each in enumerate(read.arguments)
        if each is UNRECORDED and wrapped(str(_at(types, place)))[0] in _LISTS
    ]
    if empty and any(each.items and each.items[0].tensor is not None for each in read.arguments):
        for place in empty:
            read.arguments[place] = of_list([], "[]")
        read.assumed.append("a list of tensors that the trace shows without any is empty: it shows those of the others")


def _at(column: list[Any] | None, index: int) -> Any:
    return column[index] if column is not None and index < len(column) else None


def _argument(
    kind: Any, dims: Any, strides: Any, concrete: Any, has_values: bool, read: ReadArguments
) -> RecordedArgument:
    name = str(kind or "")
    text = str(concrete) if concrete not in (None, "") else ""
    head, inner = wrapped(name)
    if head in _LISTS and (inner or dims):
        return _tensors(inner, dims, strides, read)
    if name.startswith("nullptr"):
        return NOTHING
    dtype = None if name in _SCALARS else dtype_of(name)
    if dtype is not None or head == "Tensor":
        lacks = ""
        if dtype in _QUANTIZED:
            lacks = "a quantized tensor, whose scale is not recorded"
        elif strides == [] and dims and _is_sizes(dims):  # the profiler has strides for all strided ones
            lacks = "a tensor without strides: sparse, or not strided otherwise"
        if dtype in _COMPLEX and _PLAIN_COMPLEX not in read.assumed:
            read.assumed.append(_PLAIN_COMPLEX)
        if lacks:
            return of_tensor(TensorSpec(dtype, tuple(dims) if _is_sizes(dims) else None, lacks=lacks), name)
        return of_tensor(_spec(dtype or (dtype_of(inner[0]) if inner else None), dims, strides, read), name)
    if text:
        return parse(text)
    if name in _SCALARS:
        if has_values and name == "ScalarList" and concrete == "[]":
            return of_list([], "[]")
        # A number or a list whose text is empty was removed from the trace.
        return HIDDEN_LIST if name == "ScalarList" else HIDDEN_NUMBER
    if _is_sizes(dims) and dims:
        return of_tensor(_spec(None, dims, strides, read), name)
    return NO_NUMBERS if has_values and not name else UNRECORDED


def _tensors(types: list[str], dims: Any, strides: Any, read: ReadArguments) -> RecordedArgument:
    if not isinstance(dims, list):
        return RecordedArgument(ArgumentForm.truncated, shown="a list of tensors whose sizes are not recorded")
    items = []
    for index, sizes in enumerate(dims):
        dtype = None
        if index < len(types):
            _head, inner = wrapped(types[index])
            dtype = dtype_of(inner[0] if inner else types[index])
        items.append(of_tensor(_spec(dtype, sizes, _at(strides if isinstance(strides, list) else None, index), read)))
    return of_list(items, f"{len(items)} tensors")


def _spec(dtype: DType | None, dims: Any, strides: Any, read: ReadArguments) -> TensorSpec:
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


def with_dtype(item: RecordedArgument, dtype: DType) -> RecordedArgument:
    assert item.tensor is not None
    return replace(item, tensor=replace(item.tensor, dtype=dtype))


def with_dtype_everywhere(recorded: RecordedArgument, dtype: DType) -> RecordedArgument:
    """An argument whose tensors of unknown dtype get this one."""
    return replace(
        recorded, items=tuple(with_dtype(item, dtype) if is_undetermined(item) else item for item in recorded.items)
    )


def has_lists(kind: OpKind) -> bool:
    """Whether an event kind has a list of tensors, whose dtypes may have to be inferred from other calls."""
    types = kind.recorded["Input type"] if kind.recorded else None
    return isinstance(types, list) and any(wrapped(str(name))[0] in _LISTS for name in types)


def is_undetermined(item: RecordedArgument) -> bool:
    return item.tensor is not None and item.tensor.dtype is None and item.tensor.sizes is not None


def typed(kind: OpKind) -> Iterable[tuple[Geometry, DType]]:
    """The sizes, strides and dtypes of an event kind's tensors whose dtypes are recorded."""
    given = kind.recorded
    if given is None or not isinstance(given["Input type"], list) or not isinstance(given["Input Dims"], list):
        return
    strides = given["Input Strides"] if isinstance(given["Input Strides"], list) else None
    for index, (name, sizes) in enumerate(zip(given["Input type"], given["Input Dims"], strict=False)):
        dtype = dtype_of(str(name))
        if dtype is not None and _is_sizes(sizes):
            steps = _at(strides, index)
            yield (tuple(sizes), tuple(steps) if _is_sizes(steps) else None), dtype


def kernel_dtypes(work: Sequence[WorkKind]) -> set[DType]:
    found: set[DType] = set()
    for each in work:
        for exact, plain in _ELEMENT.findall(each.name.replace("unsigned int", "").replace("unsigned long", "")):
            dtype = dtype_of(exact or plain)
            if dtype is not None:
                found.add(dtype)
    return found


def kernel_widths(work: Sequence[WorkKind]) -> set[int]:
    return {int(width) for each in work for width in _OPAQUE.findall(each.name)}


def signature_text(arguments: Sequence[RecordedArgument]) -> str:
    """Recorded arguments for people: `bfloat16[4,8], int64[4], 0.5, [1, 2]`."""
    return ", ".join(_text(each) for each in arguments)


def _text(recorded: RecordedArgument) -> str:
    if recorded.tensor is not None:
        spec = recorded.tensor
        sizes = "?" if spec.sizes is None else ",".join(map(str, spec.sizes))
        return f"{spec.dtype.name if spec.dtype else '?'}[{sizes}]"
    if recorded.form is ArgumentForm.items:
        shown = ", ".join(map(_text, recorded.items[:8]))
        return f"[{shown}, and {len(recorded.items) - 8} more]" if len(recorded.items) > 8 else f"[{shown}]"
    return recorded.shown or "-"


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
    code: KernelCode | None = None  # of a Triton kernel
    given: Mapping[str, Any] | None = None  # of a collective that all ranks replay together: arguments by name
    group: str = ""  # of one: its name

    @property
    def status(self) -> Status:
        if self.operator is None:
            return "incomplete"
        return "inferred" if self.assumed else "exact"


@dataclass
class DtypeHints:
    """Sources for the dtype of a list's tensors: the callees of a call, and the names of its kernels."""

    called: Sequence[OpKind] = ()
    work: Sequence[WorkKind] = ()


class EventCalls:
    """Resolves event kinds. `kinds` are all of the trace: they say which dtypes tensors of a size have in it. `foreign`
    has the schemas of operators that are replaced, and so need not be here."""

    def __init__(
        self, operators: Operators, kinds: Iterable[OpKind], foreign: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self._foreign = foreign or {}
        self._operators = operators
        self._reader = ArgumentReader(operators.names)
        self._trials = Trials()
        self._returned: dict[tuple[int, ...], set[DType]] = defaultdict(set)
        self._dtypes: dict[Geometry, set[DType]] = defaultdict(set)
        self._sized: dict[tuple[int, ...], set[DType]] = defaultdict(set)
        self._records = False
        for kind in kinds:
            self._records |= kind.recorded is not None
            for geometry, dtype in typed(kind):
                self._dtypes[geometry].add(dtype)
                self._sized[geometry[0]].add(dtype)

    def resolve(self, kind: OpKind, placement: Placement, hints: DtypeHints) -> ResolvedCall:
        """The call that an event of this kind was, at this placement."""
        # If arguments are recorded at all, an event without any has no arguments.
        read = ReadArguments() if kind.recorded is None and self._records else read_arguments(kind)
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
        foreign = self._foreign.get(engine_name(kind.name))
        if choice.operator is None and choice.reason == "no_schema" and foreign is not None:
            schemas = [parse_schema(each) for each in foreign]
            fitting = [(well, each) for each in schemas if (well := score(each, arguments)) is not None]
            if not fitting:
                return ResolvedCall(
                    kind.name,
                    None,
                    reason="import_incomplete",
                    detail=f"--rewrite=portable knows {' and '.join(map(str, schemas))}, whose arguments are others",
                    signature=shown,
                )
            choice = OperatorChoice(FoundOperator(max(fitting, key=lambda each: each[0])[1], REPLACED))
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
        results = self._trials.of(choice.operator.schema, bound)
        for shape in shapes(results.values or ()):
            self._returned[shape.sizes].add(shape.dtype)
        impossible, doubtful = refusal(choice.operator.schema, results)
        if impossible:
            return ResolvedCall(kind.name, None, reason="import_incomplete", detail=impossible, signature=shown)
        assumed += [doubtful] if doubtful else []
        return ResolvedCall(
            kind.name, choice.operator, tuple(bound), results, tuple(dict.fromkeys(assumed)), signature=shown
        )

    def by_name(self, kind: OpKind, dtype: DType | None, hints: DtypeHints) -> tuple[FoundOperator, dict[str, Any]]:
        """A collective's arguments: tensors in lists, numbers and lists of them as they are. Tensors whose dtypes are
        not recorded have `dtype`. Raises Unknown."""
        known, why = self._operators.candidates(kind.name)
        read = read_arguments(kind)
        if not known or read.missing:
            raise Unknown(why or read.missing)
        given: dict[str, Any] = {each.name: [] for each in known[0].schema.arguments}
        for argument, each in zip(known[0].schema.arguments, read.arguments, strict=False):
            wanted = schema_type(argument)
            if wanted.base != "Tensor":
                items = [item.value for item in each.items]
                given[argument.name] = items if each.form is ArgumentForm.items else each.value
                if each.form is ArgumentForm.unrecorded:
                    given[argument.name] = OBJECT
                continue
            if wanted.depth > 1 or (each.tensor is None and not each.items):
                if wanted.optional:
                    continue
                raise Unknown(f"{argument.name} is not in profiler traces")
            for item in each.items or (each,):
                if is_undetermined(item):
                    found = dtype or self._dtype(item.tensor, read, hints)[0]  # type: ignore[arg-type]
                    item = with_dtype(item, found) if found is not None else item
                if item.tensor is None or item.tensor.dtype is None or item.tensor.sizes is None:
                    raise Unknown(f"the dtypes of {argument.name} are not in the trace")
                given[argument.name].append(item.tensor)
        return known[0], given

    def _with_dtypes(self, recorded: RecordedArgument, read: ReadArguments, hints: DtypeHints) -> RecordedArgument:
        """An argument, with the dtypes of a list's tensors filled in if they can be inferred."""
        if recorded.form is not ArgumentForm.items or not any(is_undetermined(item) for item in recorded.items):
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

    def _by_results(
        self, name: str, arguments: list[RecordedArgument], read: ReadArguments, hints: DtypeHints
    ) -> list[RecordedArgument]:
        """Arguments with the list dtype for which the result is a tensor that the trace has elsewhere.

        Sizes of results do not depend on dtypes, so any dtype will do to infer them.
        """
        tried = [with_dtype_everywhere(each, DType.float32) for each in arguments]
        choice = self._operators.choose(name, tried)
        binding = self._reader.bind(choice.operator.schema, tried) if choice.operator is not None else None
        if binding is None or binding.missing:
            return arguments
        results = self._trials.of(choice.operator.schema, binding.arguments)  # type: ignore[union-attr]
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

    def _dtype(self, spec: TensorSpec, read: ReadArguments, hints: DtypeHints) -> tuple[DType | None, str]:
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
