"""Where measured calls lie on the roofline of their device: achieved rates against its peaks.

A call of F operations that moves B bytes has the intensity F / B. At best it runs at the lower of the peak of
operations and of intensity times the peak of bandwidth, its roof; which one is lower says what bounds it. Calls without
known operations are placed by bandwidth alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from replayfmt.format.printable import counted

from ..peaks import Peak, Peaks, cache_file
from .rows import OpRow
from .work import CallWork

# The peaks of a device: of the host with a number of threads, and with a precision of float32 products.
PeaksOf = Callable[[torch.device, int, str], Peaks]
# A share of the roof that rounding and noise do not explain.
_ABOVE_THE_ROOF = 1.05


@dataclass(frozen=True)
class RooflinePlace:
    """`of_roof` is the achieved share of what the call could reach, by the resource that bounds it."""

    bound: Literal["compute", "memory"]
    of_roof: float
    intensity: float | None
    peak_flops: Peak | None
    peak_bandwidth: Peak

    def fields(self) -> dict[str, Any]:
        """For a row."""
        peaks = [peak for peak in (self.peak_flops, self.peak_bandwidth) if peak is not None]
        doubtful = {"peaks_doubtful": True} if any(peak.doubts for peak in peaks) else {}
        return {
            "bound": self.bound,
            "share_of_roof": self.of_roof,
            "peak_flops": None if self.peak_flops is None else self.peak_flops.per_second,
            "peak_flops_source": None if self.peak_flops is None else self.peak_flops.source,
            "peak_bandwidth": self.peak_bandwidth.per_second,
            "peak_bandwidth_source": self.peak_bandwidth.source,
            **doubtful,
        }


def place(work: CallWork, call_ns: float, peaks: Peaks) -> RooflinePlace | None:
    """Where a call of `call_ns` nanoseconds lies; None if too little is known of its work or of the device."""
    if not work.bytes_moved or call_ns <= 0:
        return None
    bandwidth = peaks.of_bandwidth()
    if bandwidth is None:
        return None
    seconds = call_ns / 1e9
    by_memory = work.bytes_moved / bandwidth.per_second / seconds
    if not work.flops or work.dtype is None:
        return RooflinePlace("memory", by_memory, None, None, bandwidth)
    flops = peaks.of_flops(work.dtype)
    intensity = work.flops / work.bytes_moved
    if flops is None:
        return RooflinePlace("memory", by_memory, intensity, None, bandwidth)
    by_compute = work.flops / flops.per_second / seconds
    if by_compute > by_memory:
        return RooflinePlace("compute", by_compute, intensity, flops, bandwidth)
    return RooflinePlace("memory", by_memory, intensity, flops, bandwidth)


def work_fields(work: CallWork, call_ns: float | None) -> dict[str, Any]:
    """Fields for the work of one call and, with its time, the rates; what is not known is None with a reason."""
    found: dict[str, Any] = {
        "kernel_class": work.kernel_class,
        "kernel_class_rule": work.rule,
        "flops": work.flops,
        "bytes_read": work.bytes_read,
        "bytes_written": work.bytes_written,
    }
    if work.flops is None:
        found["flops_reason"] = work.flops_reason
    if work.bytes_moved is None:
        found["bytes_read_reason"] = found["bytes_written_reason"] = work.bytes_reason
    if call_ns:
        if work.flops is not None:
            found["flops_per_second"] = work.flops / call_ns * 1e9
        if work.bytes_moved:
            found["bytes_per_second"] = work.bytes_moved / call_ns * 1e9
        if work.flops is not None and work.bytes_moved:
            found["flops_per_byte"] = work.flops / work.bytes_moved
    return found


def row_work(row: OpRow, single: bool, peaks: Callable[[torch.device], Peaks] | None) -> dict[str, Any]:
    """A report's fields for the work of a row's calls: of a `single` op that of one call, with its place on the
    roofline; of several the sums of what is known, and the calls of which it is not."""
    works = [(op.work, calls) for op, calls in row.members if op.work is not None]
    if single:
        if not works or row.members[0][0].times is None:
            return {}
        work, call_ns = works[0][0], row.members[0][0].times.median
        fields = work_fields(work, call_ns)
        placed = None if peaks is None else place(work, call_ns, peaks(work.device))
        return fields if placed is None else fields | placed.fields()
    classes: dict[str, int] = {}
    for work, calls in works:
        classes[work.kernel_class] = classes.get(work.kernel_class, 0) + calls
    found: dict[str, Any] = {"kernel_classes": classes}
    for name, amounts in (
        ("total_flops", [(work.flops, calls) for work, calls in works]),
        ("total_bytes", [(work.bytes_moved, calls) for work, calls in works]),
    ):
        known = [amount * calls for amount, calls in amounts if amount is not None]
        found[name] = sum(known) if known else None
        found[f"{name}_unknown_calls"] = sum(calls for amount, calls in amounts if amount is None)
        if not known:
            found[f"{name}_reason"] = "not known of any of its calls"
    return found


def above_the_roof(rows: list[dict[str, Any]]) -> list[str]:
    """A warning if ops seem to be faster than their device can be."""
    above = [row for row in rows if row.get("share_of_roof", 0.0) > _ABOVE_THE_ROOF]
    if not above:
        return []
    peaks = "the given peaks are too low"
    if "measured" in {row.get(f"{peak}_source") for row in above for peak in ("peak_flops", "peak_bandwidth")}:
        peaks = (
            "the peaks are too low, although the machine seemed quiet when they were measured: give --peak-flops and "
            f"--peak-bandwidth, or remove {cache_file()}, and they are measured again"
        )
    return [
        f"faster than the peak that it is compared with: {counted(len(above), 'op')} ({above[0]['name']}: "
        f"{above[0]['share_of_roof']:.0%}): their data is in the caches, or {peaks}"
    ]
