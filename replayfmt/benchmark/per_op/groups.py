"""The distinct ops of a capture, and the work of one call of each.

`select_ops` counts calls of the same kernel on the same shapes, strides and numbers together, in one pass over the
records; no tensor is made. `work_of` says what one call does: floating-point operations, bytes moved, and the class of
its kernel. FLOPs are those of torch.utils.flop_counter's formulas; where it has none they are not known, never 0. Bytes
are the least that the call can move: each distinct byte of every tensor that it reads, writes or returns, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from replayfmt.errors import UsageError
from replayfmt.format.attachments import only_inside
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Kernel, Record
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import signature_of
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.operators import Operator, operator_named
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import tensors_in
from replayfmt.replay.run.steps import IsolatedCall

from ..meters import scopes_inside

CapturedClock = Literal["device", "host"]


@dataclass
class OpGroup:
    """Ops with one signature. `count` is how often the workload ran them: an imported record may stand for many calls.

    `by_scope` has the same count by the id of the innermost scope, 0 for none. `device_ns` and `host_ns` are totals
    over the captured calls with known times, which `device_calls` and `host_calls` count; a record that stands for many
    calls has their mean.
    """

    signature: str
    kernel: Kernel
    first_ordinal: int
    count: int = 0
    by_scope: Counter[int] = field(default_factory=Counter)
    device_ns: int = 0
    device_calls: int = 0
    host_ns: int = 0
    host_calls: int = 0

    def add(self, record: Record) -> None:
        """Count one more op. Raises InvalidCapture if the record does not say how many calls it stands for."""
        calls = record.calls
        self.count += calls
        self.by_scope[record.scope] += calls
        if record.device_duration_ns is not None:
            self.device_ns += record.device_duration_ns * calls
            self.device_calls += calls
        if record.duration_ns is not None:
            self.host_ns += record.duration_ns * calls
            self.host_calls += calls

    @property
    def captured_ns(self) -> float | None:
        """The mean time of a call when captured; None if the capture does not say."""
        if self.device_calls:
            return self.device_ns / self.device_calls
        return self.host_ns / self.host_calls if self.host_calls else None

    @property
    def captured_clock(self) -> CapturedClock | None:
        """Which clock `captured_ns` is from: the device's if known, otherwise the recording host's."""
        return "device" if self.device_calls else "host" if self.host_calls else None


@dataclass
class UnsupportedWork:
    """Captured work that no replay does: number of calls by reason, and their device time."""

    calls: Counter[str] = field(default_factory=Counter)
    device_ns: int = 0

    def add(self, record: Record) -> None:
        self.calls[str(record.argument("reason"))] += record.calls
        self.device_ns += (record.device_duration_ns or 0) * record.calls


@dataclass(frozen=True)
class SelectedOps:
    """The ops to measure. `by_ordinal` has the group of every op that may be measured; `total` and `matched` count the
    groups in the file, and those that match scopes and filter; `everything` is True if no op of the file is left out.
    `unsupported` is the matching work that no replay does. `device_ns` is the captured device time of all ops and all
    unsupported work in the scopes together."""

    groups: list[OpGroup]
    by_ordinal: dict[int, OpGroup]
    total: int
    matched: int
    everything: bool
    unsupported: UnsupportedWork
    device_ns: int


def select_ops(
    reader: CaptureReader,
    *,
    pattern: str | None = None,
    limit: int | None = None,
    every: bool = False,
    scopes: tuple[str, ...] = (),
    ops: tuple[int, int | None] | None = None,
    progress: Callable[[str, int, int | None], None],
) -> SelectedOps:
    """Group a capture's ops, in order of first appearance.

    `pattern` is a shell pattern for operator names, with or without overload; `scopes` are names or full paths, `ops` a
    range of ordinals, and ops outside them are left out; `limit` takes only the first groups; with `every`, each op is
    a separate group. Raises UsageError if nothing is left.
    """
    inside = scopes_inside(reader, scopes) if scopes else None
    seen: set[str | int] = set()
    groups: dict[str | int, OpGroup] = {}
    taken: dict[int, OpGroup] = {}  # by first ordinal
    by_ordinal: dict[int, OpGroup] = {}
    unsupported = UnsupportedWork()
    matched = count = unsupported_device_ns = 0
    start, stop = ops or (0, None)
    for record in reader.records():
        if not record.ordinal & 0x3FFF:
            progress("reading ops", record.ordinal, reader.record_count)
        if record.kind not in (RecordKind.op, RecordKind.unsupported):
            continue
        outside = inside is not None and record.scope not in inside
        outside |= record.ordinal < start or (stop is not None and record.ordinal >= stop)
        if record.kind is RecordKind.unsupported:
            if not outside:
                unsupported_device_ns += (record.device_duration_ns or 0) * record.calls
                if pattern is None or fnmatchcase(str(record.argument("op")), pattern):
                    unsupported.add(record)
            continue
        count += 1
        signature = str(signature_of(record, reader, values=True))
        key = record.ordinal if every else signature
        seen.add(key)
        if outside:
            continue
        group = groups.get(key)
        if group is None:
            kernel = reader.kernels[record.signature.kernel]
            group = groups[key] = OpGroup(signature, kernel, record.ordinal)
            if pattern is None or kernel.fits(pattern):
                matched += 1
                if limit is None or len(taken) < limit:
                    taken[group.first_ordinal] = group
        group.add(record)
        if group.first_ordinal in taken:
            by_ordinal[record.ordinal] = group
    if not seen:
        raise UsageError(f"{reader.path}: there is no op in it to measure")
    asked = [f"--scope={name}" for name in scopes]
    if ops is not None:
        asked.append(f"--ops={start}:{'' if stop is None else stop}")
    within = f"in {', '.join(asked)} of {reader.path}" if asked else reader.path
    if not groups:
        raise UsageError(f"there is no op {within}")
    if not matched:
        in_bodies = only_inside(reader, lambda name: fnmatchcase(name, str(pattern)))
        raise UsageError(
            f"--kernel={pattern}: no op {within if asked else f'of {within}'} has such a name"
            + (f"; {in_bodies}" if in_bodies else "")
        )
    device_ns = unsupported_device_ns + sum(group.device_ns for group in groups.values())
    return SelectedOps(
        list(taken.values()), by_ordinal, len(seen), matched, len(by_ordinal) == count, unsupported, device_ns
    )


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
        self._values = by_name
        # Numbers, not named by every overload of what puts values somewhere.
        self._adds = by_name.get("accumulate") is True or "reduce" in by_name
        self.by_name = {name: list(tensors_in(value)) for name, value in by_name.items()}
        written = {
            each.name for each in arguments if each.name in quiet or (each.alias_info and each.alias_info.is_write)
        }
        self._only_out = {each.name for each in arguments if each.kwarg_only and each.name in written}
        self.written = [tensor for name in written for tensor in self.by_name.get(name, ())]
        self.given = [tensor for tensors in self.by_name.values() for tensor in tensors]
        memory = {_memory(tensor) for tensor in self.given}
        results = list(tensors_in(call.result))
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
        first = next(iter(self.by_name), "")
        read = [name for name in self.by_name if not known.reads_nothing and self._reads(known, name, name == first)]
        rest = _distinct_bytes([tensor for name in read if name != first for tensor in self.by_name[name]])
        if known.puts is not None and self.by_name.get(known.puts[0]) and self.written:
            put = min(_distinct_bytes(self.by_name[known.puts[0]]), _distinct_bytes(self.written))
            return rest + (put if known.puts[1] or self._adds else 0), put
        if known.chooses and first in read:
            return min(_distinct_bytes(self.by_name[first]), written) + rest, written
        return _distinct_bytes([tensor for name in read for tensor in self.by_name[name]]), written

    def _reads(self, known: Operator, name: str, first: bool) -> bool:
        """Whether the call reads the content of this argument."""
        given = self._values
        if name in self._only_out or name in known.unread or name in known.lends_shape:
            return False
        if known.unread_with is not None and name == known.unread_with[0]:
            return not given.get(known.unread_with[1])
        if known.only_with is not None and name == known.only_with[0]:
            return bool(given.get(known.only_with[1]))
        if name in known.read_for_result:
            flags, place = known.read_for_result[name]
            wanted = given.get(flags)
            return not isinstance(wanted, list | tuple) or bool(wanted[place])
        if known.like_other or not first:
            return first or not known.like_other
        return not known.overwrites_self and not (known.beta and given.get("beta") == 0)


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
