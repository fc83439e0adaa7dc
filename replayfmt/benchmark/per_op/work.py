"""The work of one call: floating-point operations, bytes moved, and the class of its kernel with the rule for it.

FLOPs are those of torch.utils.flop_counter's formulas (a multiplication and an addition count as two); where it has
none they are not known, never 0. Bytes are the least that the call can move: each distinct byte of every tensor that
it reads once, and of every tensor that it writes or returns once. What a kernel reads again, or keeps in scratch
memory, is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.operators import Operator, operator_named
from replayfmt.pytorch.schemas import parse_schema
from replayfmt.replay.run.isolated import IsolatedCall

_RAISED = "it raises an exception, as it did under capture: how much of its work it did before is not known"

KernelClass = Literal["data movement", "matrix product or convolution", "other operator"]


@dataclass(frozen=True)
class CallWork:
    """What one call does. `flops`, and the bytes, are None if they are not known; the reasons say why.

    `dtype` is that of its first floating-point tensor, None if it has none, and `device` where it ran: that of an
    accelerator's tensor if it has one. Peaks depend on both.
    """

    flops: int | None
    flops_reason: str
    bytes_read: int | None
    bytes_written: int | None
    bytes_reason: str
    kernel_class: KernelClass
    rule: str
    dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")

    @property
    def bytes_moved(self) -> int | None:
        return None if self.bytes_read is None or self.bytes_written is None else self.bytes_read + self.bytes_written


def work_of(kernel: Kernel, call: IsolatedCall) -> CallWork:
    """The work of a call of `kernel`, found from what it was given and returned."""
    known = operator_named(kernel.name, kernel.overload)
    formula = _formula(kernel.name) if kernel.kind is KernelKind.operator else None
    flops, why_not = _flops(formula, kernel, call)
    tensors = _Tensors(kernel, call)
    if kernel.kind is KernelKind.operator:
        kernel_class, rule = _class(formula is not None, known, tensors)
    else:
        kernel_class, rule = "other operator", f"it is a kernel of the kind {kernel.kind.name}, not an operator"
    floating = (each.dtype for each in (*tensors.given, *tensors.returned) if each.is_floating_point())
    read: int | None = None
    written: int | None = None
    reason = ""
    try:
        read, written = tensors.bytes_moved(known)
    except _NotKnown as error:
        reason = str(error)
    devices = [tensor.device for tensor in (*tensors.given, *tensors.returned)]
    device = next(filter(is_accelerator, devices), torch.device("cpu"))
    return CallWork(flops, why_not, read, written, reason, kernel_class, rule, next(floating, None), device)


class _NotKnown(Exception):
    """A figure cannot be found; the message says why."""


def _formula(name: str) -> Callable[..., Any] | None:
    """flop_counter's formula of an operator (`aten::mm`)."""
    # Not before a plan is made: it imports Triton, whose kernels can then not be interpreted any more.
    from torch.utils.flop_counter import flop_registry

    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), base, None)
    formulas: Mapping[Any, Callable[..., Any]] = flop_registry
    return formulas.get(packet)


def _flops(formula: Callable[..., Any] | None, kernel: Kernel, call: IsolatedCall) -> tuple[int | None, str]:
    if call.raised:
        return None, _RAISED
    if formula is None:
        return None, f"torch.utils.flop_counter has no formula of {kernel.name}"
    try:
        return int(formula(*call.arguments, **call.named, out_val=call.result)), ""
    except Exception as error:  # a formula of another PyTorch, or of an operator that was replaced
        return None, f"torch.utils.flop_counter's formula of {kernel.name} raised {type(error).__name__}: {error}"


def _class(has_formula: bool, known: Operator, tensors: _Tensors) -> tuple[KernelClass, str]:
    if has_formula:
        return "matrix product or convolution", "torch.utils.flop_counter has its formula"
    if known.copies >= 0 or known.moves_elements:
        return "data movement", "it moves elements as they are (replayfmt.pytorch.operators)"
    if known.idle:
        return "data movement", "it only allocates or describes memory (replayfmt.pytorch.operators)"
    if tensors.only_views:
        return "data movement", "its results are views of its arguments"
    return "other operator", "none of the other rules holds"


class _Tensors:
    """The tensors of a call: given, written, and returned in memory of their own."""

    def __init__(self, kernel: Kernel, call: IsolatedCall) -> None:
        self._schema_error = ""
        self._raised = call.raised
        arguments: list[Any] = []
        try:
            arguments = parse_schema(kernel.schema).arguments
        except (RuntimeError, ValueError):
            self._schema_error = f"PyTorch cannot parse the schema {kernel.schema}"
        by_name = {argument.name: value for argument, value in zip(arguments, call.arguments, strict=False)}
        by_name |= call.named
        quiet = operator_named(kernel.name, kernel.overload).quiet_writes
        # Numbers, not named by every overload of what puts values somewhere.
        self._adds = by_name.get("accumulate") is True or "reduce" in by_name
        self.by_name = {name: list(_tensors_in(value)) for name, value in by_name.items()}
        written = {
            each.name for each in arguments if each.name in quiet or (each.alias_info and each.alias_info.is_write)
        }
        self._only_out = {each.name for each in arguments if each.kwarg_only and each.name in written}
        self.written = [tensor for name in written for tensor in self.by_name.get(name, ())]
        self.given = [tensor for tensors in self.by_name.values() for tensor in tensors]
        memory = {_memory(tensor) for tensor in self.given}
        results = list(_tensors_in(call.result))
        self.returned = [tensor for tensor in results if _memory(tensor) not in memory]
        self.only_views = bool(results) and not self.returned and not self.written and bool(arguments)

    def bytes_moved(self, known: Operator) -> tuple[int, int]:
        """Bytes read and written. Raises _NotKnown for tensors whose memory is not laid out by strides, and
        for schemas of another PyTorch."""
        if self._raised:
            raise _NotKnown(_RAISED)
        if self._schema_error:
            raise _NotKnown(self._schema_error)
        if known.idle or self.only_views:
            return 0, 0
        written = _distinct_bytes([*self.written, *self.returned])
        read_names = [name for name in self.by_name if name not in self._only_out and name not in known.unread]
        if known.reads_nothing:
            read_names = []
        elif known.overwrites_self:
            read_names = read_names[1:]
        if known.puts is not None and self.by_name.get(known.puts[0]) and self.written:
            put = min(_distinct_bytes(self.by_name[known.puts[0]]), _distinct_bytes(self.written))
            rest = [tensor for name in read_names[1:] for tensor in self.by_name[name]]
            return _distinct_bytes(rest) + (put if known.puts[1] or self._adds else 0), put
        if known.chooses and read_names:
            chosen = self.by_name[read_names[0]]
            rest = [tensor for name in read_names[1:] for tensor in self.by_name[name]]
            return min(_distinct_bytes(chosen), written) + _distinct_bytes(rest), written
        return _distinct_bytes([tensor for name in read_names for tensor in self.by_name[name]]), written


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _memory(tensor: torch.Tensor) -> int:
    """What identifies a tensor's memory: its storage; of tensors without one, themselves."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _distinct_bytes(tensors: list[torch.Tensor]) -> int:
    """The bytes of tensors, counted once where two are the same view, and where a dimension repeats others."""
    found: dict[tuple[Any, ...], int] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise _NotKnown(f"it has a tensor of layout {tensor.layout}")
        sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        count = 0 if not tensor.numel() else 1
        extent = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += (size - 1) * abs(stride)
        for size in sizes:
            count *= size
        key = (_memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
        found[key] = min(count, extent) * tensor.element_size()
    return sum(found.values())
