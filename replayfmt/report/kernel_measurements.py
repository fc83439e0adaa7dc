"""What was measured of each kernel: that of its call sites, as often as the capture calls them, or its row of a
benchmark that was summed by kernel.

A sum is only known where it is known of all calls: neither a part of them, nor what the others would take if they were
like these, is that of the kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from .call_sites import CapturedCallSite, KernelTotals
from .measured import MeasuredCalls, MeasuredEnergy, Measurements

_SUMS = ("total_ns", "low_ns", "high_ns", "bytes_moved", "flops")


def calls_of_kernels(
    sites: Iterable[CapturedCallSite],
    kernels: Sequence[KernelTotals],
    name_of: Callable[[int], str],
    measured: Measurements,
) -> dict[int, MeasuredCalls]:
    """By the kernel's id; only those of which a call was measured."""
    found: dict[int, MeasuredCalls] = {}
    if measured.by_signature:
        by_kernel = _by_kernel(sites)
        for each in kernels:
            added = _calls(by_kernel[each.kernel], each, measured)
            if added is not None:
                found[each.kernel] = added
    for each in kernels:
        row = measured.by_kernel.get(name_of(each.kernel))
        if row is not None and each.kernel not in found:
            found[each.kernel] = row if row.calls in (0, each.calls) else _partial(row, each)
    return found


def energy_of_kernels(
    sites: Iterable[CapturedCallSite], kernels: Sequence[KernelTotals], measured: Measurements
) -> dict[int, MeasuredEnergy]:
    """By the kernel's id; only those of which a call was measured."""
    found: dict[int, MeasuredEnergy] = {}
    by_kernel = _by_kernel(sites) if measured.energy_by_signature else {}
    for each in kernels:
        parts = [(site, measured.energy_by_signature.get(site.signature)) for site in by_kernel.get(each.kernel, ())]
        known = sum(site.calls for site, energy in parts if energy is not None)
        if not known:
            continue
        added = found.setdefault(each.kernel, MeasuredEnergy())
        for site, energy in parts:
            if energy is None:
                added.add(site.calls, None, None, _only(known, each.calls))
            else:
                per_call = energy.joules_per_call
                error = None if energy.error_joules is None else energy.error_joules / energy.calls
                added.add(site.calls, per_call, error, energy.reason)
    return found


def _by_kernel(sites: Iterable[CapturedCallSite]) -> dict[int, list[CapturedCallSite]]:
    found: defaultdict[int, list[CapturedCallSite]] = defaultdict(list)
    for site in sites:
        found[site.kernel].append(site)
    return found


def _calls(sites: Sequence[CapturedCallSite], kernel: KernelTotals, measured: Measurements) -> MeasuredCalls | None:
    """The calls of a kernel's sites added up; None if none of them was measured."""
    parts = [(site, measured.by_signature.get(site.signature)) for site in sites]
    known = sum(site.calls for site, calls in parts if calls is not None)
    if not known:
        return None
    added = MeasuredCalls(calls=kernel.calls)
    for site, calls in parts:
        for name in _SUMS:
            total = None if calls is None else getattr(calls, name)
            if calls is None or total is None or not calls.calls:
                why = _only(known, kernel.calls) if calls is None else calls.reasons.get(name, "it is not known")
                added.add(name, None, site.calls, why)
            else:
                added.add(name, total / calls.calls, site.calls, "")
        if calls is not None and site.calls > added.most_calls:
            added.most_calls = site.calls
            added.share_of_roof, added.bound = calls.share_of_roof, calls.bound
            added.peak_flops, added.peak_bandwidth = calls.peak_flops, calls.peak_bandwidth
            added.kernel_class = calls.kernel_class
    return added


def _partial(row: MeasuredCalls, kernel: KernelTotals) -> MeasuredCalls:
    """A row of some of the kernel's calls."""
    why = _only(row.calls, kernel.calls)
    return MeasuredCalls(kernel.calls, None, None, None, None, None, reasons=dict.fromkeys(_SUMS, why))


def _only(known: int, calls: int) -> str:
    return f"only {known:,} of its {calls:,} calls were measured"
