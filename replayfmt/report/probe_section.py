"""The section on probes: what they cost kernels, beside the kernels' times, and how blocks were scheduled.

Read from the folder of a probe's run, whose kernels are matched with those of the capture.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from replayfmt.errors import CaptureNotFound, InvalidRecording, UsageError
from replayfmt.format.attachments import contents_of, roles_of
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import printable
from replayfmt.probes.costs import KernelOverhead, evaluate_overhead
from replayfmt.probes.recordings import (
    BLOCK_SCHED,
    EventLog,
    ProbeRecording,
    PtxasFigures,
    TraceFolder,
    lines,
    read_event_log,
)
from replayfmt.probes.schedule import evaluate_schedule, evaluate_warps
from replayfmt.probes.tables import Cell, ResultTable, Unmeasured

from .kernel_sections import KernelFigures, Section
from .measurements import NO_ROW
from .pictures import (
    Axis,
    BarPicture,
    BarSeries,
    MissingPicture,
    Picture,
    ReportTable,
    TableCell,
    TableColumn,
    TableRow,
    count_cell,
    figure_cell,
    text_cell,
    time_cell,
)

_PROBE = re.compile(r"\s*// probe (\S+?):?(?:\s|$)")
_NAMESPACE = "triton::"
_MOST_RECORDINGS = 200


@dataclass(frozen=True)
class ProbedKernel:
    """A kernel with a probe, named by the PTX, else by the folder. `kernels` are ids of the capture: several if only
    their common name is known."""

    probe: str
    entry: str
    kernels: tuple[int, ...]
    overhead: KernelOverhead


@dataclass(frozen=True)
class RecordedSchedule:
    """A recording of `block_sched`: what `evaluate_schedule` and `evaluate_warps` say of the whole launch, by name."""

    kernel: ProbedKernel
    recording: str
    schedule: dict[str, Cell]
    warps: dict[str, Cell]


@dataclass(frozen=True)
class ProbeRun:
    """A folder. `notes`: what is not shown of it, and why."""

    where: str
    kernels: list[ProbedKernel]
    launches: list[RecordedSchedule]
    notes: list[str]


def read_probe_run(path: str, reader: CaptureReader) -> ProbeRun:
    """The folder of a run of this capture's kernels. Raises UsageError for another one and for damaged files,
    InvalidCapture if the capture's attachments are damaged."""
    where = f"--probes={path}"
    try:
        folder = TraceFolder.open(path)
        if folder.event_log is None:
            raise UsageError(f"{where}: has no event.log; expected the folder that opreplay-probe run wrote")
        log = read_event_log(folder.event_log)
        names = dict.fromkeys([*log.folders.values(), *(each.kernel for each in log.launches if each.kernel)])
        if not names:
            raise UsageError(f"{where}: event.log names no kernel; expected the folder that opreplay-probe run wrote")
        overheads = {each.kernel: each for each in evaluate_overhead([("", path)]).kernels}
        kernels = [
            _probed(where, name, overheads.get(name) or KernelOverhead("", name), folder, log, reader) for name in names
        ]
        return _with_launches(where, kernels, folder, log)
    except (CaptureNotFound, InvalidRecording) as error:
        raise UsageError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from None
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}") from None


def _probed(
    where: str, entry: str, overhead: KernelOverhead, folder: TraceFolder, log: EventLog, reader: CaptureReader
) -> ProbedKernel:
    places = [each for each in folder.kernels if log.folders.get(each.name) == entry]
    probe = next(filter(None, map(_probe_of, places)), None) or folder.path.resolve().name
    return ProbedKernel(printable(probe, 80), entry, _kernels_of(where, entry, places, reader), overhead)


def _probe_of(place: Path) -> str | None:
    """The probe's name, which opreplay-probe writes into the PTX."""
    path = place / "probed.ptx"
    found = (_PROBE.match(line) for line in lines(path)) if path.is_file() else iter(())
    return next((each[1] for each in found if each), None)


def _kernels_of(where: str, entry: str, places: list[Path], reader: CaptureReader) -> tuple[int, ...]:
    """The ids of the kernel in the capture."""
    found = {
        number: kernel
        for number, kernel in enumerate(reader.kernels)
        if number and kernel.name == f"{_NAMESPACE}{entry}"
    }
    if not found:
        ours = sorted({each.name for each in reader.kernels[1:] if each.name.startswith(_NAMESPACE)})
        has = f"has {', '.join(ours[:5])}{', …' if len(ours) > 5 else ''}" if ours else "has no Triton kernel"
        raise UsageError(
            f"{where}: is a run of the kernel {printable(entry, 100)}, which {reader.path} does not have: it "
            f"{printable(has, 300)}; name the folder of a run of this capture"
        )
    originals = [place / "original.ptx" for place in places if (place / "original.ptx").is_file()]
    codes = {
        number: contents_of(reader, kernel)["ptx"]
        for number, kernel in found.items()
        if "ptx" in roles_of(reader, kernel)
    }
    if not originals or not codes:
        return tuple(found)
    same = [
        number
        for number, code in codes.items()
        if any(each.stat().st_size == len(code) and each.read_bytes() == code for each in originals)
    ]
    chosen = same or [number for number in found if number not in codes]
    if not chosen:
        raise UsageError(
            f"{where}: is a run of another {printable(entry, 100)} than {reader.path} has: its PTX differs; name the "
            "folder of a run of this capture"
        )
    return tuple(chosen)


def _with_launches(where: str, kernels: list[ProbedKernel], folder: TraceFolder, log: EventLog) -> ProbeRun:
    """Which launch a recording is of follows from their order."""
    run = ProbeRun(printable(where), kernels, [], [])
    if not any(each.probe == BLOCK_SCHED.name for each in kernels):
        return run
    if len(folder.results) != len(log.launches):
        run.notes.append(
            f"{run.where}: schedules are not measured: {len(folder.results):,} recordings, {len(log.launches):,} "
            "launches in event.log"
        )
        return run
    by_name = {each.entry: each for each in kernels}
    for path, launch in zip(folder.results[:_MOST_RECORDINGS], log.launches, strict=False):
        kernel = by_name.get(launch.kernel or "")
        if kernel is None or kernel.probe != BLOCK_SCHED.name:
            continue
        section = ProbeRecording.open(path).section(0)
        if launch.shape is not None and launch.shape != section.launch:
            raise UsageError(
                f"{where}: {path.name}: expected the grid and block of its launch in event.log, got others"
            )
        schedule, warps = evaluate_schedule(section), evaluate_warps([(path.name, section)])
        run.launches.append(RecordedSchedule(kernel, path.name, _first_row(schedule.tables), _first_row(warps.tables)))
    if len(folder.results) > _MOST_RECORDINGS:
        left = len(folder.results) - _MOST_RECORDINGS
        run.notes.append(f"{run.where}: {left:,} more recordings are left out of the page")
    return run


def _first_row(tables: tuple[ResultTable, ...]) -> dict[str, Cell]:
    return dict(zip(tables[0].columns, tables[0].rows[0], strict=True))


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
            isolated = measured.call_ns
            why_isolated = measured.reasons.get("total_ns", measured.reasons.get("missing", ""))
        elif figures.measured.any_calls:
            why_isolated = NO_ROW
    between = f"between {min(slowdowns):.3f} × and {max(slowdowns):.3f} ×" if slowdowns else ""
    return TableRow(
        _kernel_cell(each, figures),
        text_cell(each.probe),
        count_cell(len(slowdowns)),
        time_cell(captured, why_captured),
        time_cell(isolated, why_isolated),
        mean(overhead.original_ms, 1e-3, "s"),
        mean(overhead.probed_ms, 1e-3, "s"),
        mean(slowdowns, 1.0, "×", between),
        _registers(overhead.before),
        _registers(overhead.after),
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
            _kernel_cell(each.kernel, figures),
            text_cell(each.recording),
            *(_cell(each.schedule[name]) for name in ("blocks", "blocks_not_recorded", "sms", "span_cycles")),
            _cell(each.schedule["scheduling_share"]),
            _cell(each.warps["tail_share"]),
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
