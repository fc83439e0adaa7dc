"""The memory of a capture beside what the allocators of its devices report in a replay.

The capture's figure is exact, and is about storages alone (replayfmt.format.memory). An allocator also counts what
kernels take for themselves, what it rounds up, content that a replay stages ahead of its first use and copies that it
keeps to restore written content; and a replay drops what the program still held after its last use. The CPU's allocator
keeps no statistics: there, the process's resident set is reported, which is not the same and never stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from replayfmt.format.memory import DeviceMemory, PeakShare, PeakStorage, memory_by_device
from replayfmt.format.validation import counted
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import PeakMemory

from .statistics import size

_CPU = "PyTorch's allocator for the CPU keeps no statistics"
_MORE = ": kernels' own memory, rounding, content that is there before its first use, copies to restore it from"
_LESS = ": a replay drops what the program still held after its last use"
_SHOWN = 5  # of shares and of storages, in text


@dataclass(frozen=True)
class MemoryReport:
    """`captured` has the memory of each captured device, `replayed_on` the device of this machine that replays it (None
    if none does), and `measured` what was measured on each of those in a replay, as MemoryWatch has it."""

    captured: list[DeviceMemory]
    replayed_on: list[str | None]
    measured: tuple[PeakMemory, ...]

    @staticmethod
    def of(plan: Plan) -> MemoryReport:
        """Replays once, unverified. Raises ReplayFailed if that fails."""
        measured = plan.execute(verify="none").memory
        captured = memory_by_device(plan.reader)
        targets = {
            str(device): None if target is None else str(target)
            for device, target in zip(plan.device_map.captured, plan.device_map.targets, strict=True)
        }
        return MemoryReport(captured, [targets[each.device] for each in captured], measured)

    def as_json(self) -> dict[str, Any]:
        """For the key `memory` of a benchmark's document."""
        return {
            "captured": [
                each.as_json() | {"replayed_on": target}
                for each, target in zip(self.captured, self.replayed_on, strict=True)
            ],
            "measured": [self._measured(each) for each in self.measured],
        }

    def _measured(self, peak: PeakMemory) -> dict[str, Any]:
        cpu = peak.device == "cpu"
        row: dict[str, Any] = {"device": peak.device, "allocator_peak_bytes": None, "allocator_before_bytes": None}
        if cpu:
            row["allocator_peak_bytes_reason"] = _CPU
            row |= {"resident_set_peak_bytes": peak.peak_bytes, "resident_set_before_bytes": peak.before_bytes}
            if peak.peak_bytes is None:
                row["resident_set_peak_bytes_reason"] = peak.note
        elif peak.peak_bytes is None:
            row["allocator_peak_bytes_reason"] = peak.note
        else:
            row |= {"allocator_peak_bytes": peak.peak_bytes, "allocator_before_bytes": peak.before_bytes}
        alone, allocated = self._alone(peak.device), row["allocator_peak_bytes"]
        more = None if alone is None or allocated is None else allocated - alone.peak_bytes
        return row | {"allocator_minus_captured_bytes": more}

    def _alone(self, device: str) -> DeviceMemory | None:
        """The captured device that is replayed on a device, if it is the only one."""
        there = [each for each, on in zip(self.captured, self.replayed_on, strict=True) if on == device]
        return there[0] if len(there) == 1 else None

    def lines(self) -> Iterator[str]:
        if not self.captured:
            yield "memory    the capture has no storages"
        for each, target in zip(self.captured, self.replayed_on, strict=True):
            on = "" if target == each.device else f" (replayed on {target})"
            yield (
                f"memory of {each.device}{on}: {size(each.peak_bytes)} in {counted(each.peak_storages, 'storage')} at "
                f"ordinal {each.peak_ordinal}, from first to last uses; {size(each.held_peak_bytes)} if each is held "
                f"until its release was recorded; {size(each.end_bytes)} at the end"
            )
            for share in each.shares[:_SHOWN]:
                yield f"  {size(share.bytes):>10}  {_made(share)}, {counted(share.storages, 'storage')}"
            if left := each.shares[_SHOWN:]:
                yield f"  {size(sum(share.bytes for share in left)):>10}  {counted(len(left), 'other op')}"
            for storage in each.largest[:_SHOWN]:
                yield f"  {size(storage.bytes):>10}  storage {storage.storage}, {_from(storage)}"
        for peak in self.measured:
            yield from self._measured_lines(peak)

    def _measured_lines(self, peak: PeakMemory) -> Iterator[str]:
        row = self._measured(peak)
        if row["allocator_peak_bytes"] is None:
            yield f"allocator of {peak.device}: not measured: {row['allocator_peak_bytes_reason']}"
            resident = row.get("resident_set_peak_bytes")
            if resident is not None:
                more = resident - (peak.before_bytes or 0)
                grown = f"{size(more)} more than before the ops" if more > 0 else "no growth that Linux saw"
                yield f"  the process's resident set: {size(resident)}, {grown}"
            return
        yield (
            f"allocator of {peak.device}: {size(row['allocator_peak_bytes'])} at most in a replay, "
            f"{size(row['allocator_before_bytes'])} before the ops"
        )
        more = row["allocator_minus_captured_bytes"]
        if more is not None:
            why = _LESS if more < 0 else _MORE
            yield f"  {size(abs(more))} {'less' if more < 0 else 'more'} than the capture's figure" + (
                why if more else ""
            )


def _made(share: PeakShare) -> str:
    if share.outside:
        return "from outside (inputs, parameters), from their first use on"
    return "made by records that are no ops" if share.op is None else f"made by {share.op}"


def _from(storage: PeakStorage) -> str:
    where = f"ordinal {storage.ordinal}" + (f", scope {storage.scope}" if storage.scope else "")
    if storage.outside:
        return "from outside" + ("" if storage.op is None else f", first used by {storage.op}") + f" ({where})"
    return f"made by {storage.op or 'a record that is no op'} ({where})"
