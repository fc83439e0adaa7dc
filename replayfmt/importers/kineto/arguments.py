"""A call's arguments as recorded in a profiler trace, before the operator is known.

For each argument the profiler prints a type, sizes, strides and, for numbers and lists of numbers, the value. It leaves
out the values of anything else, the dtypes of tensors in a list, and lists of more than thirty tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replayfmt.format.codes import DType

from ..common.arguments import (
    HIDDEN_LIST,
    HIDDEN_NUMBER,
    NO_NUMBERS,
    NOTHING,
    UNRECORDED,
    Form,
    Recorded,
    TensorSpec,
    of_list,
    of_tensor,
    parse,
)
from ..common.types import dtype_of, wrapped
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
class Read:
    """Recorded arguments of one event kind, with the assumptions made in reading them; or what is missing."""

    arguments: list[Recorded] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    missing: str = ""


def read_arguments(kind: OpKind) -> Read:
    """What the trace says about each argument."""
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


def _settle_empty_lists(types: list[Any], read: Read) -> None:
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
        if has_values:
            return of_list([], "[]") if name == "ScalarList" and concrete == "[]" else _empty(name)
        return HIDDEN_LIST if name == "ScalarList" else HIDDEN_NUMBER
    if _is_sizes(dims) and dims:
        return of_tensor(_spec(None, dims, strides, read), name)
    return NO_NUMBERS if has_values and not name else UNRECORDED


def _empty(name: str) -> Recorded:
    """A number whose text is empty: removed from the trace."""
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


def with_dtype(item: Recorded, dtype: DType) -> Recorded:
    assert item.tensor is not None
    return replace(item, tensor=replace(item.tensor, dtype=dtype))


def with_dtype_everywhere(recorded: Recorded, dtype: DType) -> Recorded:
    """An argument whose tensors of unknown dtype get this one."""
    return replace(
        recorded, items=tuple(with_dtype(item, dtype) if is_undetermined(item) else item for item in recorded.items)
    )


def has_lists(kind: OpKind) -> bool:
    """Whether an event kind has a list of tensors, whose dtypes may have to be inferred from other calls."""
    types = kind.recorded["Input type"] if kind.recorded else None
    return isinstance(types, list) and any(wrapped(str(name))[0] in _LISTS for name in types)


def is_undetermined(item: Recorded) -> bool:
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
