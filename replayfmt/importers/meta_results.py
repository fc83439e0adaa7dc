"""What an operator returns for given arguments, found out without memory: it is run on PyTorch's meta device.

For what a trace does not say of results (strides, before execution traces had them) and for operators that an import
puts in place of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat
from replayfmt.pytorch.dtypes import DTYPE_CODE, TORCH_DTYPE, TORCH_MEMORY_FORMAT

from .arguments import DefaultGenerator, DeviceName, TensorSpec
from .values import Tensor, contiguous

_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, KeyError, AttributeError,
             AssertionError)


@dataclass(frozen=True)
class MetaTensor:
    """A tensor that an operator returned: what is known of it without content. `offset` is in elements."""

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class MetaResults:
    """Runs operators on the meta device, each call with the same arguments once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[MetaTensor | None] | None] = {}

    def of(self, schema: torch.FunctionSchema, arguments: Sequence[tuple[str, Any]]) -> list[MetaTensor | None] | None:
        """The tensors an operator returns, those in lists too, in order (None: no tensor there); None where PyTorch
        cannot tell. Argument values are those of a bound call."""
        key = (schema.name, schema.overload_name, tuple((name, _key(value)) for name, value in arguments))
        if key not in self._known:
            self._known[key] = self._run(schema, arguments)
        return self._known[key]

    def _run(self, schema: torch.FunctionSchema, arguments: Sequence[tuple[str, Any]]) -> list[MetaTensor | None] | None:
        namespace, _separator, base = schema.name.partition("::")
        try:
            overload = getattr(getattr(getattr(torch.ops, namespace), base), schema.overload_name or "default")
            given = {name: _value(value) for name, value in arguments}
            keywords = {argument.name for argument in schema.arguments if argument.kwarg_only}
            positional = [given[argument.name] if argument.name in given else argument.default_value
                          for argument in schema.arguments if not argument.kwarg_only]
            with torch.no_grad():
                returned = overload(*positional, **{name: given[name] for name in given if name in keywords})
        except _REFUSALS:
            return None
        return [] if returned is None else _flat(returned)


def _flat(value: Any) -> list[MetaTensor | None]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.dtype not in DTYPE_CODE:
            return [None]
        return [MetaTensor(DTYPE_CODE[value.dtype], tuple(value.shape), value.stride(), int(value.storage_offset()))]
    if isinstance(value, list | tuple):
        return [each for item in value for each in _flat(item)]
    return [None]


def _key(value: Any) -> Any:
    if isinstance(value, TensorSpec | Tensor):
        return _geometry(value)
    if isinstance(value, list | tuple):
        return tuple(_key(each) for each in value)
    return type(value).__name__, repr(value)


def _geometry(value: TensorSpec | Tensor) -> tuple[DType, tuple[int, ...], tuple[int, ...], int]:
    if isinstance(value, Tensor):
        return value.meta.dtype, value.meta.sizes, value.meta.strides, value.offset
    if value.dtype is None or value.sizes is None:
        raise ValueError("a tensor of which dtype or sizes are not known")
    return value.dtype, value.sizes, value.strides or contiguous(value.sizes), value.offset


def _value(value: Any) -> Any:
    if isinstance(value, TensorSpec | Tensor):
        dtype, sizes, strides, offset = _geometry(value)
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else -1
        base = torch.empty(offset + last + 1, dtype=TORCH_DTYPE[dtype], device="meta")
        return base.as_strided(sizes, strides, offset)
    if isinstance(value, DType):
        return TORCH_DTYPE[value]
    if isinstance(value, Layout):
        if value is not Layout.strided:
            raise ValueError(f"layout {value.name}")
        return torch.strided
    if isinstance(value, MemoryFormat):
        return TORCH_MEMORY_FORMAT[value]
    if isinstance(value, DeviceName):
        return torch.device("meta")
    if isinstance(value, DefaultGenerator):
        return None
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    return value
