"""The sections on kernels: which cost most, all of them, their call sites, and the roofline."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log10

from replayfmt.dump.row_templates import scope_path
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted, printable

from .measurements import NO_ROW, MeasuredCalls, Measurements, calls_of_kernels, sums_of_kernels
from .ops import CapturedCallSite, CapturedTime, Clock, KernelTotals
from .pictures import (
    Axis,
    BarPicture,
    BarSeries,
    Line,
    MissingPicture,
    Picture,
    Points,
    ReportTable,
    ScatterPicture,
    TableCell,
    TableColumn,
    TableRow,
    count_cell,
    figure_cell,
    seconds,
    text_cell,
    time_cell,
)

MOST_ROWS = 2000
_TOP = 12
NO_SCOPE = "(in no scope)"


@dataclass(frozen=True)
class Section:
    """A part of the page. `about` are sentences above what is shown; `notes` stand below it."""

    name: str
    title: str
    about: list[str]
    pictures: list[Picture] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KernelFigures:
    """What there is to say of kernels and call sites. `clock`: which captured times are compared."""

    reader: CaptureReader
    sites: list[CapturedCallSite]
    kernels: list[KernelTotals]
    clock: Clock | None
    measured: Measurements

    def kernel_name(self, kernel: int) -> str:
        return self.reader.kernels[kernel].qualified_name

    def scope_name(self, scope: int) -> str:
        return scope_path(self.reader, scope) if scope else NO_SCOPE

    def captured(self, each: CapturedCallSite | KernelTotals) -> CapturedTime:
        return each.device if self.clock == "device" else each.host

    @cached_property
    def calls_by_kernel(self) -> dict[int, MeasuredCalls]:
        return calls_of_kernels(self.sites, self.kernels, self.kernel_name, self.measured)

    @cached_property
    def energy_by_kernel(self) -> dict[int, MeasuredCalls]:
        return sums_of_kernels(self.sites, self.measured.energy_by_signature)

    def command(self, tool_and_flags: str) -> str:
        """A command line for this capture."""
        return f"opreplay-{tool_and_flags} {shlex.quote(printable(self.reader.path))}"

    @property
    def no_calls(self) -> str:
        command = self.command("benchmark --per-op --roofline --benchmark-out=per_op.json")
        return f"no benchmark of single ops was given. Measure them with {command}, then add --benchmark=per_op.json"

    @property
    def no_energy(self) -> str:
        return "no energy report was given. Make one with opreplay-energy, then add --energy=FILE"

    @property
    def no_captured(self) -> str:
        return "the capture holds no times of ops"


def top_kernels(figures: KernelFigures) -> Section:
    kernels, measured = figures.kernels, figures.measured
    clock = figures.clock or "host"

    def of_calls(name: str, scale: float = 1.0) -> Callable[[KernelTotals], float | None]:
        def value(each: KernelTotals) -> float | None:
            found = figures.calls_by_kernel.get(each.kernel)
            sum_of_calls = None if found is None or not found.calls else getattr(found, name)
            return None if sum_of_calls is None else sum_of_calls * scale

        return value

    def joules(each: KernelTotals) -> float | None:
        found = figures.energy_by_kernel.get(each.kernel)
        return None if found is None or not found.calls else found.joules

    replayed = of_calls("total_ns", 1e-9)
    no_calls = "" if measured.any_calls else figures.no_calls
    no_energy = "" if measured.energy_by_signature else figures.no_energy
    notes: list[str] = []
    parts = [found for found in figures.calls_by_kernel.values() if found.calls and found.missing_calls]
    if parts:
        notes.append(
            f"{counted(len(parts), 'kernel')} of which some calls were not measured: isolated times and bytes are "
            f"those of {min(each.share for each in parts):.1%} or more of their calls."
        )
    pictures = [
        _top("top-captured", f"Time during capture ({clock})", Axis("all calls", "s"), figures,
             lambda each: seconds(figures.captured(each).total_ns),
             "" if figures.clock else figures.no_captured, notes),
        _top("top-replayed", "Time of isolated calls", Axis("all calls", "s"), figures, replayed, no_calls, notes),
        _top("top-calls", "Calls", Axis("calls"), figures, lambda each: float(each.calls), "", notes),
        _top("top-bytes", "Bytes moved", Axis("all calls, at least", "B"), figures, of_calls("bytes_moved"), no_calls,
             notes),
        _top("top-energy", "Energy", Axis("all calls", "J"), figures, joules, no_energy, notes),
    ]  # fmt: skip
    return Section(
        "top", "Most expensive kernels",
        [f"The {min(_TOP, len(kernels))} largest of {len(kernels):,} kernels by each figure, summed over their calls."],
        pictures, [], notes,
    )  # fmt: skip


def _top(
    name: str,
    title: str,
    axis: Axis,
    figures: KernelFigures,
    value: Callable[[KernelTotals], float | None],
    missing: str,
    notes: list[str],
) -> Picture:
    """The largest; what is left out because it is not known is added to `notes`."""
    if missing:
        return MissingPicture(name, title, missing)
    known = [(found, each) for each in figures.kernels if (found := value(each)) is not None]
    if not known:
        return MissingPicture(name, title, "it is not known of any kernel; the table of kernels says why")
    if unknown := len(figures.kernels) - len(known):
        notes.append(
            f"{title}: not known of {counted(unknown, 'kernel')}, which {'is' if unknown == 1 else 'are'} "
            "not in the picture; the table of kernels says why."
        )
    largest = sorted(known, key=lambda pair: -pair[0])[:_TOP]
    return BarPicture(
        name,
        title,
        axis,
        [figures.kernel_name(each.kernel) for _found, each in largest],
        [BarSeries("", [found for found, _each in largest])],
        [f"kernel-{each.kernel}" for _found, each in largest],
    )


def kernel_table(figures: KernelFigures) -> ReportTable:
    dearest: dict[int, CapturedCallSite] = {}
    for site in figures.sites:
        best = dearest.get(site.kernel)
        if best is None or _weight(figures, site) > _weight(figures, best):
            dearest[site.kernel] = site
    total = sum(figures.captured(each).total_ns or 0.0 for each in figures.kernels)

    def row(each: KernelTotals) -> TableRow:
        name = figures.kernel_name(each.kernel)
        calls, energy = figures.calls_by_kernel.get(each.kernel), figures.energy_by_kernel.get(each.kernel)
        share = figures.captured(each).total_ns
        link = f"site-{dearest[each.kernel].number}"
        cells = (
            text_cell(name, figures.reader.kernels[each.kernel].schema, link, name),
            count_cell(each.calls),
            count_cell(each.signatures),
            *_captured_cells(figures, each),
            figure_cell(None if share is None or not total else share / total, "%", figures.no_captured),
            *_measured_cells(figures, calls, energy, each.calls),
        )
        return TableRow(*cells, name=f"kernel-{each.kernel}")

    rows = sorted(figures.kernels, key=lambda each: _weight(figures, each), reverse=True)
    columns = (
        TableColumn("kernel"),
        TableColumn("calls", figures=True),
        TableColumn("signatures", figures=True),
        *_captured_columns(figures),
        TableColumn("share", "of the captured time", True),
        *_MEASURED_COLUMNS,
    )
    return _without_empty("kernels", "Kernels", columns, [row(each) for each in rows[:MOST_ROWS]], len(rows))


def call_site_table(figures: KernelFigures) -> ReportTable:
    def row(site: CapturedCallSite) -> TableRow:
        calls = figures.measured.by_signature.get(site.signature)
        energy = figures.measured.energy_by_signature.get(site.signature)
        about = f"opreplay-dump --ops={site.first}:{site.first + 1}"
        cells = (
            TableCell(str(site.number), site.number),
            text_cell(site.signature),
            text_cell(figures.scope_name(site.scope)),
            count_cell(site.calls),
            TableCell(f"{site.first:,}", site.first, about),
            *_captured_cells(figures, site),
            *_measured_cells(figures, calls, energy, site.calls),
        )
        return TableRow(*cells, name=f"site-{site.number}")

    chosen = sorted(figures.sites, key=lambda site: _weight(figures, site), reverse=True)
    columns = (
        TableColumn("site", figures=True),
        TableColumn("signature"),
        TableColumn("scope"),
        TableColumn("calls", figures=True),
        TableColumn("first op", "ordinal of the first call", True),
        *_captured_columns(figures),
        *_MEASURED_COLUMNS,
    )
    rows = [row(site) for site in chosen[:MOST_ROWS]]
    return _without_empty("call-sites", "Call sites", columns, rows, len(chosen))


_MEASURED_COLUMNS = (
    TableColumn("isolated, all calls", "calls times the median time of one", True),
    TableColumn("isolated, a call", "median time of a call on its own", True),
    TableColumn("bytes, a call", "the least that a call can read and write", True),
    TableColumn("FLOP, a call", "floating-point operations", True),
    TableColumn("FLOP/s", "achieved by isolated calls", True),
    TableColumn("bytes/s", "achieved by isolated calls", True),
    TableColumn("of roof", "share of what the device could reach", True),
    TableColumn("energy, all calls", "joules a run", True),
    TableColumn("energy, a call", figures=True),
)


def _captured_columns(figures: KernelFigures) -> tuple[TableColumn, ...]:
    columns = [TableColumn("captured, host", "host time during capture, the recorder's own work included", True)]
    if figures.clock == "device":
        columns.append(TableColumn("captured, device", "device time during capture", True))
    return tuple(columns)


def _captured_cells(figures: KernelFigures, each: CapturedCallSite | KernelTotals) -> list[TableCell]:
    times = [each.host, each.device] if figures.clock == "device" else [each.host]
    return [
        time_cell(
            time.total_ns,
            "the capture has no time of these calls",
            "" if time.calls == each.calls else f"of {time.calls:,} of {each.calls:,} calls",
        )
        for time in times
    ]


def _measured_cells(
    figures: KernelFigures, calls: MeasuredCalls | None, energy: MeasuredCalls | None, of_site: int
) -> list[TableCell]:
    none = NO_ROW if figures.measured.any_calls else figures.no_calls
    found = calls or MeasuredCalls()
    none = none if found.calls else found.reasons.get("missing", none)
    reasons = {**{name: none for name in ("total_ns", "bytes_moved", "flops")}, **found.reasons}
    call_ns = found.call_ns
    nanoseconds = found.total_ns

    def a_second(total: float | None) -> float | None:
        return None if total is None or not nanoseconds else total / nanoseconds * 1e9

    ends = None if found.low_ns is None or found.high_ns is None or not found.calls else (found.low_ns, found.high_ns)
    within = "" if ends is None or not call_ns else "between " + " and ".join(
        figure_cell(end / found.calls / 1e9, "s", "").text for end in ends
    )  # fmt: skip
    no_roof = "the benchmark was made without --roofline, or too little is known of the op" if calls else none
    no_joules = "the report has no row of these calls" if figures.measured.energy_by_signature else figures.no_energy
    joules = None if energy is None else energy.a_call(energy.joules)
    why = energy.reasons.get("missing", "") if energy is not None else no_joules
    unknown_rate = reasons["flops"]
    return [
        _of_part(None if call_ns is None else call_ns * of_site / 1e9, found, "s", reasons["total_ns"]),
        time_cell(call_ns, reasons["total_ns"], within),
        figure_cell(found.a_call(found.bytes_moved), "B", reasons.get("bytes_moved", "")),
        figure_cell(found.a_call(found.flops), "FLOP", reasons.get("flops", "")),
        figure_cell(a_second(found.flops), "FLOP/s", unknown_rate),
        figure_cell(a_second(found.bytes_moved), "B/s", reasons.get("bytes_moved", "")),
        figure_cell(found.share_of_roof, "%", no_roof, found.bound and f"bound by {found.bound}"),
        _of_part(None if joules is None else joules * of_site, energy, "J", why),
        figure_cell(joules, "J", why),
    ]


def _of_part(value: float | None, of: MeasuredCalls | None, unit: str, why: str) -> TableCell:
    """A sum over all calls, reduced to those measured, with their share."""
    if value is None or of is None or not of.missing_calls:
        return figure_cell(value, unit, why)
    cell = figure_cell(value * of.share, unit, why, of.known_part)
    return replace(cell, text=f"{cell.text} ({of.share:.1%} of the calls)")


def _weight(figures: KernelFigures, each: CapturedCallSite | KernelTotals) -> tuple[float, float]:
    """What rows are first sorted by: captured time, then calls."""
    return (figures.captured(each).total_ns or 0.0, float(each.calls))


def _without_empty(
    name: str, title: str, columns: Sequence[TableColumn], rows: list[TableRow], there_are: int
) -> ReportTable:
    """The table without columns of which no row knows a figure; notes say which these are, and why."""
    kept = [
        place
        for place in range(len(columns))
        if not rows or any(not (row.cells[place].sort == "" and columns[place].figures) for row in rows)
    ]
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for place in sorted({*range(len(columns))} - {*kept}):
        reasons = {row.cells[place].about for row in rows}
        left_out[reasons.pop() if len(reasons) == 1 else "it is not known of any row"].append(columns[place].title)
    notes = [f"Not measured: {', '.join(titles)}: {reason}." for reason, titles in left_out.items()]
    if there_are > len(rows):
        notes.append(
            f"{there_are - len(rows):,} more rows with less time are left out of the page; "
            "opreplay-dump --signatures lists all signatures."
        )
    sorted_by = next((place for place in kept if columns[place].title.startswith("captured")), None)
    return ReportTable(
        name,
        title,
        tuple(columns[place] for place in kept),
        [TableRow(*(row.cells[place] for place in kept), name=row.name) for row in rows],
        None if sorted_by is None else kept.index(sorted_by),
        notes,
    )


def roofline(figures: KernelFigures) -> Section:
    """Where each call site's signature lies between what it computes and what it moves."""
    groups: dict[str, Points] = {}
    peaks: set[tuple[float, float]] = set()
    only_memory = 0
    seen: set[str] = set()
    for site in figures.sites:
        calls = figures.measured.by_signature.get(site.signature)
        if calls is None or site.signature in seen or not calls.bytes_moved or not calls.total_ns:
            continue
        seen.add(site.signature)
        if not calls.flops:
            only_memory += 1
            continue
        if calls.peak_flops and calls.peak_bandwidth:
            peaks.add((calls.peak_flops, calls.peak_bandwidth))
        group = groups.setdefault(calls.kernel_class or "operator", Points(calls.kernel_class, [], [], [], []))
        group.x.append(calls.flops / calls.bytes_moved)
        group.y.append(calls.flops / calls.total_ns * 1e9)
        group.labels.append(printable(site.signature, 200))
        group.links.append(f"site-{site.number}")
    about = [
        "A point is a signature: what it computes for each byte that it moves at least, against the rate that isolated "
        "calls achieved. A line is a roof: below its slope a call waits for memory, below its plateau for arithmetic."
    ]
    notes = []
    if only_memory:
        notes.append(
            f"{only_memory:,} signatures are not in the picture: PyTorch has no formula for their operations. Their "
            "rate in bytes is in the table of call sites."
        )
    title = "Roofline"
    if not groups:
        if figures.measured.by_signature:
            reason = "the benchmark has no op with known operations and bytes"
        elif figures.measured.by_kernel:
            reason = "the benchmark is summed by kernel (--group-by=kernel); add one without --group-by"
        else:
            reason = figures.no_calls
        return Section("roofline", title, about, [MissingPicture("roofline", title, reason)], [], notes)
    x = [value for group in groups.values() for value in group.x]
    lines = []
    for flops, bandwidth in sorted(peaks):
        ridge = flops / bandwidth
        first, last = min(*x, ridge) / 2, max(*x, ridge) * 2
        name = f"roof: {_rate(flops, 'FLOP/s')}, {_rate(bandwidth, 'B/s')}"
        lines.append(Line(name, [first, ridge, last], [first * bandwidth, flops, flops]))
    if not lines:
        notes.append("No roof is drawn: the benchmark was made without --roofline.")
    picture = ScatterPicture(
        "roofline",
        title,
        Axis("operations for each byte", "FLOP/B", True),
        Axis("achieved", "FLOP/s", True),
        list(groups.values()),
        lines,
    )
    return Section("roofline", title, about, [picture], [], notes)


def _rate(value: float, unit: str) -> str:
    return figure_cell(value, unit, "").text if log10(value) < 21 else f"{value:.3g} {unit}"
