"""What stands out in a capture and its measurements: a few sentences with figures, each with the command that goes on.

Each rule looks for one thing and gives one sentence, or none. They are in the order in which a reader needs them.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from replayfmt.format.codes import ITEM_BYTES, RecordKind, ValueKind
from replayfmt.format.memory import DeviceMemory, memory_by_device
from replayfmt.format.races import accesses
from replayfmt.format.reader import CaptureReader
from replayfmt.format.record_frames import distinct
from replayfmt.format.validation import printable

from .kernel_sections import NO_SCOPE, KernelFigures
from .measurements import MeasuredCalls, Measurements
from .ops import CapturedOps, call_sites, captured_ops, clock_of, kernel_totals
from .pictures import si

MOST_FINDINGS = 5
_FAR_FROM_ROOF = 0.3  # share of the roof
_NOTABLE = 0.05  # share of the time
_OUTSIDE_OPS = 0.25  # share of the span
_SHORT_KERNEL_NS = 10_000
_SMALL_COPY_BYTES = 64 * 1024
_MANY = 0.1  # share of the ops
_AT_LEAST = 20  # ops
_MOST_OPS_FOLLOWED = 300_000  # one by one, some microseconds each
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone", "aten::_foreach_copy_"}
_WAITS_FOR_DEVICE = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::equal", "aten::is_nonzero"}
_DRAWS = ("rand", "normal", "uniform", "bernoulli", "dropout", "multinomial", "exponential", "cauchy", "geometric_")


@dataclass(frozen=True)
class Finding:
    """`rule` is its name for programs, `section` the part of the report that shows it. `figures` are those in `text`,
    in seconds, bytes and shares; `ordinals` the first of the records it is about."""

    rule: str
    text: str
    command: str
    section: str
    figures: dict[str, Any] = field(default_factory=dict)
    ordinals: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As `opreplay-dump --findings --format=jsonl` prints it."""
        return {"kind": "finding", **vars(self)}


def capture_findings(reader: CaptureReader) -> list[Finding]:
    """Those of a capture alone, without measurements. Raises InvalidCapture for a damaged frame."""
    ops = captured_ops(reader)
    figures = KernelFigures(reader, call_sites(ops)[0], kernel_totals(ops), clock_of(ops), Measurements())
    return findings(figures, ops, memory_by_device(reader))


def findings(figures: KernelFigures, ops: CapturedOps, memory: list[DeviceMemory]) -> list[Finding]:
    """At most MOST_FINDINGS of them. Raises InvalidCapture for a damaged frame."""
    found: list[Finding] = []
    for rule in _RULES:
        if len(found) < MOST_FINDINGS and (finding := rule(figures, ops, memory)) is not None:
            found.append(finding)
    return found


Rule = Callable[[KernelFigures, CapturedOps, list[DeviceMemory]], Finding | None]


def _pattern(name: str) -> str:
    return shlex.quote(printable(name, 200))


def _most_expensive_kernel(figures: KernelFigures, _ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    measured = {number: calls.call_ns * each.calls for number, each, calls in _measured(figures) if calls.call_ns}
    captured = {each.kernel: figures.captured(each).total_ns or 0.0 for each in figures.kernels}
    times, what = (measured, "isolated time") if measured else (captured, f"captured {figures.clock} time")
    total = sum(times.values())
    if not total:
        return None
    kernel = max(times, key=lambda each: times[each])
    name, share = figures.kernel_name(kernel), times[kernel] / total
    sites = [site for site in figures.sites if site.kernel == kernel]
    shapes: dict[str, float] = {}
    for site in sites:
        weight = figures.captured(site).total_ns if figures.clock else site.calls
        shapes[site.signature] = shapes.get(site.signature, 0.0) + (weight or 0.0)
    weighed = sum(shapes.values())
    signature, part = max(shapes.items(), key=lambda each: each[1])
    calls = sum(site.calls for site in sites)
    text = f"{name} has {si(share, '%')} of the {what} of all ops: {si(times[kernel] / 1e9, 's')} in {calls:,} calls"
    if len(shapes) > 1 and weighed:
        text += f", {si(part / weighed, '%')} of it as {signature}"
    return Finding(
        "most_expensive_kernel",
        text,
        figures.command(f"benchmark --per-op --kernel={_pattern(name)}"),
        "top",
        {"kernel": name, "share": share, "seconds": times[kernel] / 1e9, "calls": calls, "signature": signature},
        [min(site.first for site in sites)],
    )


def _measured(figures: KernelFigures) -> Iterator[tuple[int, Any, MeasuredCalls]]:
    for each in figures.kernels:
        calls = figures.calls_by_kernel.get(each.kernel)
        if calls is not None and calls.calls:
            yield each.kernel, each, calls


def _time_in_no_op(figures: KernelFigures, ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    if figures.clock != "host" or not len(ops):
        return None
    thread = Counter(ops.thread.tolist()).most_common(1)[0][0]
    chosen = (ops.thread == thread) & (ops.duration_ns >= 0)
    start, end = ops.start_ns[chosen], ops.start_ns[chosen] + ops.duration_ns[chosen]
    if len(start) < _AT_LEAST:
        return None
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(start[1:] - until[:-1], 0)
    span = int(until[-1] - start[0])
    share = float(gaps.sum()) / span if span else 0.0
    if share < _OUTSIDE_OPS:
        return None
    return Finding(
        "time_in_no_op",
        f"{si(share, '%')} of the {si(span / 1e9, 's')} from the first op to the last lies in no op: the program's own "
        "work, and the recorder's",
        figures.command("benchmark --reconcile"),
        "timeline",
        {"share": share, "span_seconds": span / 1e9},
        [int(ops.ordinal[chosen][order][int(np.argmax(gaps))])],
    )


def _far_from_the_roof(figures: KernelFigures, _ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    rows = [(number, each.calls * (calls.call_ns or 0.0), calls) for number, each, calls in _measured(figures)]
    total = sum(nanoseconds for _number, nanoseconds, _calls in rows)
    far = [
        (number, nanoseconds / total, calls.share_of_roof)
        for number, nanoseconds, calls in rows
        if calls.share_of_roof is not None and calls.share_of_roof < _FAR_FROM_ROOF and nanoseconds > _NOTABLE * total
    ]
    if not far:
        return None
    far.sort(key=lambda each: -each[1])
    names = [f"{figures.kernel_name(number)} ({si(roof, '%')} of it)" for number, _share, roof in far[:3]]
    share = sum(share for _number, share, _roof in far)
    return Finding(
        "far_from_the_roof",
        f"{si(share, '%')} of the isolated time is in kernels that reach less than {si(_FAR_FROM_ROOF, '%')} of what "
        f"the device could: {', '.join(names)}",
        figures.command(f"dump --kernel-skeleton={_pattern(figures.kernel_name(far[0][0]))}"),
        "roofline",
        {"share": share, "kernels": [figures.kernel_name(number) for number, _share, _roof in far]},
    )


def _idle_device(figures: KernelFigures, ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    known = ops.device_ns >= 0
    if figures.clock != "device" or int(known.sum()) < _AT_LEAST:
        return None
    times = ops.device_ns[known]
    span = int((ops.start_ns[known] + times).max() - ops.start_ns[known].min())
    busy = float((times * ops.calls[known]).sum())
    short = float((times < _SHORT_KERNEL_NS).mean())
    if not span or busy / span > 1 - _OUTSIDE_OPS or short < 0.5:
        return None
    return Finding(
        "idle_device",
        f"The device works for {si(busy / span, '%')} of the {si(span / 1e9, 's')}: {si(short, '%')} of its ops take "
        f"less than {si(_SHORT_KERNEL_NS / 1e9, 's')}, so that launching them takes longer than running them",
        figures.command("benchmark --per-op --cuda-graph"),
        "timeline",
        {"busy_share": busy / span, "short_share": short, "span_seconds": span / 1e9},
    )


def _host_waits(figures: KernelFigures, ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    reader = figures.reader
    waiting = [n for n, kernel in enumerate(reader.kernels) if kernel is not None and kernel.name in _WAITS_FOR_DEVICE]
    chosen = np.isin(ops.kernel, waiting) & np.isin(ops.device, list(reader.accelerators))
    count = int((ops.calls * chosen).sum())
    if not count:
        return None
    return Finding(
        "host_waits",
        f"The host waits for the device {count:,} times to read a value (.item(), nonzero and the like)",
        figures.command("dump --kernel='aten::_local_scalar_dense'"),
        "timeline",
        {"calls": count},
        ops.ordinal[chosen][:10].tolist(),
    )


def _memory_peak(figures: KernelFigures, _ops: CapturedOps, memory: list[DeviceMemory]) -> Finding | None:
    device = max(memory, key=lambda each: each.peak_bytes, default=None)
    if device is None or not device.peak_bytes or not device.shares:
        return None
    first = device.shares[0]
    who = (
        "came from outside (parameters, inputs)"
        if first.outside
        else f"was made by {first.op or 'records that are no op'}"
    )
    scope = next((each.scope for each in device.largest if each.scope), "")
    where = f", the largest storage in {scope}" if scope and scope != NO_SCOPE else ""
    share = first.bytes / device.peak_bytes
    return Finding(
        "memory_peak",
        f"{device.device} holds most at record {device.peak_ordinal:,}: {si(device.peak_bytes, 'B')} in "
        f"{device.peak_storages:,} storages, of which {si(share, '%')} {who}{where}",
        figures.command(f"dump --ops={max(0, device.peak_ordinal - 3)}:{device.peak_ordinal + 1}"),
        "memory",
        {"device": device.device, "bytes": device.peak_bytes, "share": share, "made_by": first.op},
        [device.peak_ordinal],
    )


def _small_copies(figures: KernelFigures, ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    reader = figures.reader
    copying = [n for n, kernel in enumerate(reader.kernels) if kernel is not None and kernel.name in _COPIES]
    chosen = np.isin(ops.kernel, copying)
    if len(ops) < _AT_LEAST or int(chosen.sum()) < max(_AT_LEAST, _MANY * len(ops)):
        return None
    sizes = np.array([0 if meta is None else _bytes(meta) for meta in reader.metas], np.int64)
    small: list[int] = []
    for number in range(len(reader.record_frames)):
        frame = reader.frame(number)
        rows = ops.ordinal[chosen] - frame.first_ordinal
        rows = rows[(rows >= 0) & (rows < frame.count)]
        slots = np.append(sizes[frame.tensor_meta[frame.tensor_slots]], 0)  # one more: where the last row ends
        ends = np.stack([frame.tensor_first[rows], frame.tensor_first[rows + 1]], 1).ravel()
        largest = np.maximum.reduceat(slots, ends)[::2]
        small += (rows[largest <= _SMALL_COPY_BYTES] + frame.first_ordinal).tolist()
    if len(small) < max(_AT_LEAST, _MANY * len(ops)):
        return None
    return Finding(
        "small_copies",
        f"{len(small):,} of {len(ops):,} ops copy at most {si(_SMALL_COPY_BYTES, 'B')} each",
        figures.command("dump --kernel='aten::*cop*' --kernel=aten::clone"),
        "kernels",
        {"ops": len(small), "share": len(small) / len(ops)},
        small[:10],
    )


def _bytes(meta: Any) -> int:
    return int(np.prod(meta.sizes, dtype=np.float64).clip(max=1e18)) * ITEM_BYTES[meta.dtype]


def _repeated_work(figures: KernelFigures, ops: CapturedOps, _memory: list[DeviceMemory]) -> Finding | None:
    """Calls with the same operator, numbers and tensors, none of which was written in between."""
    if not _AT_LEAST <= len(ops) <= _MOST_OPS_FOLLOWED:
        return None
    again = _calls_again(figures.reader)
    chosen = np.isin(ops.ordinal, again)
    known = ops.device_ns if figures.clock == "device" else ops.duration_ns
    total = float(known[known >= 0].sum())
    share = float(known[chosen & (known >= 0)].sum()) / total if total else len(again) / len(ops)
    if len(again) < 2 or share < _NOTABLE:
        return None
    kernels = Counter(ops.kernel[chosen].tolist()).most_common(1)[0]
    return Finding(
        "repeated_work",
        f"{len(again):,} calls compute what an earlier call with the same tensors computed, {si(share, '%')} of the "
        f"captured time; most often {figures.kernel_name(kernels[0])} ({kernels[1]:,})",
        figures.command(f"dump --ops={int(again[0])}:{int(again[0]) + 1}"),
        "kernels",
        {"calls": len(again), "share": share, "kernel": figures.kernel_name(kernels[0])},
        again[:10].tolist(),
    )


class _Shape(NamedTuple):
    """Of the calls of a signature: which tensor slots they read and write, the int slots of storages whose content is
    replaced, how many ints and floats they have, and whether equal calls compute the same."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    replaced: tuple[int, ...]
    ints: int
    floats: int
    repeats: bool


def _shape(reader: CaptureReader, signature: int) -> _Shape:
    layout = reader.layouts[signature]
    _tensors, ints, floats = layout.slots
    if layout.signature.kind is not RecordKind.op:
        replaced = tuple(each.int_slot for each in layout.nodes(ValueKind.storage))
        return _Shape((), (), replaced, ints, floats, False)
    kernel = reader.kernels[layout.signature.kernel]
    reads, writes = accesses(layout, kernel.schema)
    computes = bool(reads) and not writes and "(a" not in kernel.schema and bool(layout.results)
    repeats = computes and not any(part in kernel.name for part in _DRAWS)
    return _Shape(reads, writes, (), ints, floats, repeats)


def _calls_again(reader: CaptureReader) -> np.ndarray:
    """The ordinals of ops that repeat an earlier one, ascending.

    A call is a row: its ordinal, its ints and floats, the storage, offset and layout of each tensor that it reads, and
    how often that storage was written before. Those of one signature that are equal but for the ordinal repeat.
    """
    shapes: dict[int, _Shape] = {}
    calls: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    written = [np.zeros((0, 2), np.int64)]  # storages, and the ordinals of the records that write them
    for number in range(len(reader.record_frames)):
        frame = reader.frame(number)
        for signature in distinct(frame.signature).tolist():
            if signature not in shapes:
                shapes[signature] = _shape(reader, signature)
            shape = shapes[signature]
            rows = np.flatnonzero(frame.signature == signature)
            ordinals = rows[:, None] + frame.first_ordinal
            first_tensor, first_int = frame.tensor_first[rows][:, None], frame.int_first[rows][:, None]
            for storages in (
                frame.tensor_storage[frame.tensor_slots[first_tensor + np.array(shape.writes, np.int64)]],
                frame.ints[first_int + np.array(shape.replaced, np.int64)],
            ):
                written += [np.stack([column, ordinals[:, 0]], 1) for column in storages.T.astype(np.int64)]
            if shape.repeats:
                slots = frame.tensor_slots[first_tensor + np.array(shape.reads, np.int64)]
                columns = (
                    ordinals,
                    frame.ints[first_int + np.arange(shape.ints)],
                    frame.floats[frame.float_first[rows][:, None] + np.arange(shape.floats)].view(np.int64),
                    frame.tensor_offset[slots],
                    frame.tensor_meta[slots],
                    frame.tensor_storage[slots],
                )
                calls[signature].append(np.concatenate(columns, 1, dtype=np.int64, casting="unsafe"))
    span = reader.record_count + 1
    writes = np.sort(np.concatenate(written) @ np.array([span, 1]))
    again = [np.zeros(0, np.int64)]
    for signature, parts in calls.items():
        table = np.concatenate(parts)
        storages = table[:, -len(shapes[signature].reads) :] * span
        before = np.searchsorted(writes, storages + table[:, :1]) - np.searchsorted(writes, storages)
        _keys, first = np.unique(np.concatenate([table[:, 1:], before], 1), axis=0, return_index=True)
        again.append(np.delete(table[:, 0], first))
    return np.sort(np.concatenate(again))


_RULES: tuple[Rule, ...] = (
    _most_expensive_kernel,
    _time_in_no_op,
    _idle_device,
    _far_from_the_roof,
    _host_waits,
    _memory_peak,
    _repeated_work,
    _small_copies,
)
