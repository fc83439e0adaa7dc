"""The section on probes: what they cost kernels, beside the kernels' times, and how blocks were scheduled."""

from __future__ import annotations

import statistics

from replayfmt.format.printable import printable
from replayfmt.probes.evaluations.tables import Cell, Unmeasured
from replayfmt.probes.recordings.logs import PtxasFigures

from .kernel_sections import KernelFigures, Section
from .pictures import Axis, BarPicture, BarSeries, MissingPicture, Picture
from .probe_results import ProbedKernel, ProbeRun, RecordedSchedule
from .tables import ReportTable, TableCell, TableColumn, TableRow, count_cell, figure_cell, text_cell

_NO_LAUNCH = "no launch of it was measured"


def probe_section(runs: list[ProbeRun], figures: KernelFigures) -> Section:
    """Of one run at least."""
    kernels = [each for run in runs for each in run.kernels]
    launches = [each for run in runs for each in run.launches]
    about = [
        "A probe is code within a kernel that records what happens there. A kernel that takes much longer with its "
        "probe is another kernel: look at the slowdown before the probe's figures."
    ]
    notes = [note + "." for run in runs for note in run.notes]
    for each in kernels:
        name = _name(each)
        if each.overhead.failed:
            notes.append(
                f"{name}: launches that failed, or have no time, and are in no figure: {each.overhead.failed:,}."
            )
        if len(each.kernels) > 1:
            notes.append(f"{name}: the run does not tell which of {len(each.kernels)} variants it probed.")
    tables = [
        ReportTable("probed", "Kernels with probes", _columns(figures), [_row(each, figures) for each in kernels])
    ]
    if launches:
        tables.append(_schedules(launches, figures))
    return Section("probes", "Probes", about, [_slowdowns(kernels)], tables, notes)


def _slowdowns(kernels: list[ProbedKernel]) -> Picture:
    title = "Slowdown"
    timed = [each for each in kernels if each.overhead.slowdowns]
    if not timed:
        return MissingPicture("probes", title, "no launch was measured with a probe and without")
    found = [each.overhead.slowdowns for each in timed]
    series = BarSeries("", [*map(statistics.fmean, found)], [*map(min, found)], [*map(max, found)])
    labels = [_name(each) for each in timed]
    return BarPicture(
        "probes", title, Axis("time with the probe / without, mean of the launches", "×"), labels, [series]
    )


def _name(each: ProbedKernel) -> str:
    return f"{printable(each.entry, 100)}, {each.probe}"


def _columns(figures: KernelFigures) -> tuple[TableColumn, ...]:
    clock = figures.clock or "host"
    return (
        TableColumn("kernel"),
        TableColumn("probe"),
        TableColumn("launches", "that were measured with the probe and without", True),
        TableColumn(f"captured, {clock}, a call", "mean time during capture", True),
        TableColumn("isolated, a call", "median time of a call on its own", True),
        TableColumn("without the probe", "mean time of a launch", True),
        TableColumn("with the probe", "mean time of a launch", True),
        TableColumn("slowdown", "mean over the launches", True),
        TableColumn("registers before", "of a thread", True),
        TableColumn("registers after", "of a thread", True),
    )


def _row(each: ProbedKernel, figures: KernelFigures) -> TableRow:
    overhead = each.overhead
    slowdowns = overhead.slowdowns

    def mean(values: list[float], scale: float, unit: str, about: str = "") -> TableCell:
        return figure_cell(statistics.fmean(values) * scale if values else None, unit, _NO_LAUNCH, about)

    captured = isolated = None
    calls = {totals.kernel: totals for totals in figures.kernels}
    why_captured, why_isolated = "the capture does not call it", figures.no_calls
    if len(each.kernels) > 1:
        why_captured = why_isolated = "the run does not tell which variant it is of"
    elif (totals := calls.get(each.kernels[0])) is not None:
        captured, why_captured = figures.captured(totals).mean_ns, "the capture has no time of these calls"
        measured = figures.calls_by_kernel.get(totals.kernel)
        if measured is not None:
            isolated, why_isolated = measured.call_ns, measured.reasons.get("total_ns", "")
        elif figures.measured.any_calls:
            why_isolated = "the benchmark has no row of these calls"
    between = f"between {min(slowdowns):.3f} × and {max(slowdowns):.3f} ×" if slowdowns else ""
    return TableRow(
        (
            _kernel_cell(each, figures),
            text_cell(each.probe),
            count_cell(len(slowdowns)),
            figure_cell(None if captured is None else captured / 1e9, "s", why_captured),
            figure_cell(None if isolated is None else isolated / 1e9, "s", why_isolated),
            mean(overhead.original_ms, 1e-3, "s"),
            mean(overhead.probed_ms, 1e-3, "s"),
            mean(slowdowns, 1.0, "×", between),
            _registers(overhead.before),
            _registers(overhead.after),
        )
    )


def _kernel_cell(each: ProbedKernel, figures: KernelFigures) -> TableCell:
    """Leads to the kernel's row, where there is one alone."""
    if len(each.kernels) > 1:
        return text_cell(each.entry, f"{len(each.kernels)} variants")
    (kernel,) = each.kernels
    name = figures.kernel_name(kernel)
    called = any(totals.kernel == kernel for totals in figures.kernels)
    return text_cell(name, link=f"kernel-{kernel}" if called else "", find=name if called else "")


def _registers(ptxas: PtxasFigures | None) -> TableCell:
    if ptxas is None or ptxas.registers is None:
        return figure_cell(None, "", "ptxas does not say it")
    return count_cell(ptxas.registers)


def _schedules(launches: list[RecordedSchedule], figures: KernelFigures) -> ReportTable:
    columns = (
        TableColumn("kernel"),
        TableColumn("recording", "of one launch"),
        TableColumn("blocks", figures=True),
        TableColumn("not recorded", "blocks without a record, which are in no figure", True),
        TableColumn("SMs", figures=True),
        TableColumn("cycles", "the longest time from the first start to the last end on one SM", True),
        TableColumn("scheduling share", "of the time of slots, in which they waited for the next block", True),
        TableColumn("tail", "share of the time after active warps last fell below half of their peak", True),
    )
    rows = [
        TableRow(
            (
                _kernel_cell(each.kernel, figures),
                text_cell(each.recording),
                *(_cell(each.schedule[name]) for name in ("blocks", "blocks_not_recorded", "sms", "span_cycles")),
                _cell(each.schedule["scheduling_share"]),
                _cell(each.warps["tail_share"]),
            )
        )
        for each in launches
    ]
    return ReportTable("schedules", "Schedules of blocks", columns, rows)


def _cell(value: Cell) -> TableCell:
    """A count or a share."""
    if isinstance(value, Unmeasured):
        return figure_cell(None, "", value.reason)
    if isinstance(value, str):
        return text_cell(value)
    return figure_cell(value, "%", "") if isinstance(value, float) else count_cell(value)
